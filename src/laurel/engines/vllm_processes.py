"""The life of a vLLM that was started here, and the processes that it has started."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

WATCH_SECONDS = 0.2
"""How often it is asked whether vLLM is alive."""
DIED = "vLLM died; what it wrote is above. Without a word: most likely out of memory (see dmesg)"


async def death_of(llm: Any) -> None:
    """Return when it has died."""
    while not llm.errored:
        await asyncio.sleep(WATCH_SECONDS)


def end(llm: Any, processes: Iterable[Any]) -> None:
    """End it and its processes, whatever state they are in.

    Args:
        llm: The engine; None where it was never made.
        processes: Of `processes_of`.
    """
    if llm is not None:
        with suppress(Exception):
            llm.shutdown()
            llm.engine_core.resources.ctx.term()  # its sockets are closed by now
    for process in processes:  # those that still run: their parent died before them
        with suppress(Exception):
            process.kill()
            process.wait(5)


def processes_of(llm: Any) -> list[Any]:
    """All of them, as psutil's processes."""
    psutil: Any = importlib.import_module("psutil")  # vLLM needs it too
    started = [psutil.Process(p.pid) for p in llm.engine_core.resources.engine_manager.processes]
    return started + [child for process in started for child in process.children(recursive=True)]
