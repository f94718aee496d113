"""Ends the processes that a user's code forks where the call of that code ends.

A forked process is a copy of the whole program in the middle of the call. If it came back from the
call, it would go on as if it were the program: answer a request a second time, take the next one,
run the steps of a training run.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

RETURNED = (
    "laurel: a process that was forked in the call of a function, a tool or an environment "
    "returned from the call, and is ended with exit code 1: end it with sys.exit or os._exit\n"
)


class ForkGuard:
    """A context around a call of a user's code, which only the process that entered it leaves.

    Another one ends as a program does that comes to that point: with the code of `sys.exit`, or
    with a traceback and 1 if it raised. It ends with 1 after a return, too: who waits for it may
    take 0 for success.
    """

    __slots__ = ("_process",)

    def __enter__(self) -> None:
        self._process = os.getpid()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._process:
            _end(error)


def _end(error: BaseException | None) -> None:
    code, said = 1, RETURNED
    try:
        if isinstance(error, SystemExit):
            is_code = error.code is None or isinstance(error.code, int)
            code, said = (int(error.code or 0) & 0xFF, "") if is_code else (1, f"{error.code}\n")
        elif error is not None:
            said = "".join(traceback.format_exception(error))
        # Not by Python's streams: a thread that was not copied may hold their locks.
        os.write(2, said.encode(errors="backslashreplace"))
    finally:
        os._exit(code)


async def guarded(work: Awaitable[T]) -> T:
    """Await a coroutine of a user's code, with each of its steps in a `ForkGuard`."""
    return await _Steps(work)


class _Steps(Generic[T]):
    def __init__(self, work: Awaitable[T]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, Any, T]:
        steps = _awaited(self._work)
        step: Callable[[], Any] = partial(steps.send, None)
        while True:
            try:
                with ForkGuard():
                    asked = step()
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                sent = yield asked
            except BaseException as error:
                step = partial(steps.throw, error)
            else:
                step = partial(steps.send, sent)


async def _awaited(work: Awaitable[T]) -> T:
    return await work
