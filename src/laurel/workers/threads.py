"""Calls in daemon threads: the end of the process does not wait for one that never returns."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import NoReturn, TypeVar

from laurel.observe.user_code import ForkGuard

T = TypeVar("T")
CallEnd = Callable[[], T]
"""Returns the result of a call that has ended, or raises what it raised.

A future that carried an exception would lose its traceback, and not every exception may be set.
"""


class DaemonThread:
    """A daemon thread that makes calls one after the other.

    It cannot be ended in the middle of a call. A call that is given up is left behind with it.
    """

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, function: Callable[..., T], *arguments: object) -> Future[CallEnd[T]]:
        """Begin a call, after those that were begun before."""
        future: Future[CallEnd[T]] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                with ForkGuard():
                    result = function(*arguments)
            except BaseException as error:
                future.set_result(partial(_raise, error))
            else:
                future.set_result(lambda: result)

        self._work.put(work)
        return future

    def end(self) -> None:
        """End the thread after the calls that were begun, without waiting."""
        self._work.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            # A tensor that this thread released while Python ends would abort the process.
            del work


def _raise(error: BaseException) -> NoReturn:
    raise error


def begin_in_thread(
    function: Callable[..., T], *arguments: object, name: str
) -> Future[CallEnd[T]]:
    """Begin a call in a daemon thread of its own, with this name.

    Raises:
        RuntimeError: The system has no more threads.
    """
    thread = DaemonThread(name)
    future = thread.begin(function, *arguments)
    thread.end()
    return future


async def in_thread(function: Callable[[], T], *, name: str) -> T:
    """Call a function in a daemon thread of its own, and wait for its result."""
    # Its thread knows the context of the caller, as those of `asyncio.to_thread` do.
    work: Callable[[], T] = partial(contextvars.copy_context().run, function)
    return (await asyncio.wrap_future(begin_in_thread(work, name=name)))()
