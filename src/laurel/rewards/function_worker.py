"""What runs in a process for a function that scores: one call after the other."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import threading
import time
from typing import Any

from laurel.config.scorers import FunctionConfig
from laurel.errors import UserError
from laurel.rewards.user_function import (
    Function,
    check_call,
    failure_of,
    find_function,
    is_async,
    served_arguments,
    verdicts_of,
)
from laurel.types import Score

_LOOK_FOR_PARENT_SECONDS = 1.0


def main(descriptor: int, parent: int) -> None:
    """Serve the process at the other end of a socket until it is gone.

    Args:
        descriptor: Of the socket.
        parent: Process id of the other end.
    """
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    link = socket.socket(fileno=descriptor)
    with link.makefile("rwb") as lines:
        config = json.loads(lines.readline())
        function: Function | None = None
        served: dict[str, Any] = {}
        refused: str | None = None
        try:
            function = find_function(config["path"], where=f"{config['where']}.path")
            where = config.pop("where")
            settings = FunctionConfig.model_validate(config)
            served = served_arguments(function, settings, where=where)
            check_call(
                function, settings.kwargs | served, judges_groups=settings.group, where=where
            )
        except UserError as error:
            refused = str(error)
        _say(lines, {"refused": refused})
        while function is not None and (line := lines.readline()):
            asked = json.loads(line)
            asked["arguments"] |= served
            found = _called(function, asked, judges_groups=config["group"])
            _say(lines, {"found": [dataclasses.asdict(one) for one in found]})


def _called(function: Function, asked: dict[str, Any], *, judges_groups: bool) -> tuple[Score, ...]:
    try:
        result = function(**asked["arguments"])
        if is_async(function):
            result = asyncio.run(_awaited(result))
        return verdicts_of(result, count=asked["count"], judges_groups=judges_groups)
    except BaseException as error:  # of the function's, SystemExit among them
        return (failure_of(error),) * int(asked["count"])


async def _awaited(result: Any) -> Any:
    return await result


def _say(lines: Any, value: object) -> None:
    lines.write(json.dumps(value).encode() + b"\n")
    lines.flush()


def _end_with(parent: int) -> None:
    """A call that never ends would otherwise outlive whoever asked."""
    while os.getppid() == parent:
        time.sleep(_LOOK_FOR_PARENT_SECONDS)
    os.killpg(0, signal.SIGKILL)
