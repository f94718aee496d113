"""Doing things side by side: calls that block in threads, and coroutines that fail together."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

from laurel.environments.returned import name_of, source_of
from laurel.observe.source_lines import is_installed, is_ours, line_of

T = TypeVar("T")


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run them side by side; the first exception ends the others, and only then is it raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_all(tasks)


async def end_all(tasks: Iterable[asyncio.Future[Any]], *, patience: float | None = None) -> None:
    """Cancel what still runs and wait for it, for `patience` seconds at most."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        ended, _ = await asyncio.wait(tasks, timeout=patience)
        for task in ended:
            if not task.cancelled():
                task.exception()  # which tells the loop that somebody has seen it


class PatientThreads:
    """Threads for calls that block, and may never come back.

    A call that is given up keeps its thread for as long as it wants; another takes its place, and
    no thread keeps the process from ending.
    """

    def __init__(self, limit: int, *, name: str) -> None:
        """Hold no thread yet; `limit` is how many calls run side by side."""
        self.limit = limit
        self._name = name
        self._idle: list[_Thread] = []

    async def call(
        self,
        slots: asyncio.Semaphore,
        function: Callable[..., T],
        *arguments: Any,
        timeout: float,
    ) -> T:
        """What the function returns; what it raises is raised.

        Args:
            slots: Of the event loop; has `limit` places.
            function: Called in a thread.
            arguments: Its arguments.
            timeout: Seconds from when it is called, not from when it is asked for.

        Raises:
            GivenUpError: It took longer.
        """
        async with slots:
            thread = self._idle.pop() if self._idle else _Thread(self._name)
            future: Future[_Outcome[T]] = thread.begin(function, arguments)
            waiting = asyncio.wrap_future(future)
            try:
                await asyncio.wait((waiting,), timeout=timeout)
                if not waiting.done():
                    raise GivenUpError(f"nothing within {timeout:g} s")
                outcome = waiting.result()
            finally:
                if future.done() and not future.cancelled():
                    self._idle.append(thread)
                else:
                    waiting.cancel()
                    thread.end()
        return outcome()

    def close(self) -> None:
        """End every thread that has nothing to do, and wait until it is gone."""
        idle, self._idle = self._idle, []
        for thread in idle:
            thread.end()
        for thread in idle:
            thread.join()


class GivenUpError(Exception):
    """A call that took too long."""


_Outcome = Callable[[], T]


def described(error: BaseException, called: Callable[..., Any] | None = None) -> str:
    """An exception in one line, with the line of code that it comes from.

    Args:
        error: What was raised.
        called: The function whose author is to read it: the innermost line of
            its own, or of what else is neither Laurel's nor of a package, is shown.
    """
    where = _line_of(error, called)
    return f"{type(error).__name__}: {error}" + (f" ({where})" if where else "")


def _line_of(error: BaseException, called: Callable[..., Any] | None) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    source = None if called is None else source_of(called)
    if called is not None and source is not None:
        own = [f for f in frames if f.filename == source[0] or not is_installed(f.filename)]
        if own:
            return line_of(own[-1].filename, own[-1].lineno)
        if all(is_ours(frame.filename) for frame in frames):
            return f"calling {name_of(called)}"  # it did not take how it was called
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _raise(error: BaseException) -> NoReturn:
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        raise error
    # sys.exit() must not end the loop, and a coroutine may not raise StopIteration.
    raise RuntimeError(described(error))


class _Thread:
    """Calls one function after the other."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> Future[_Outcome[T]]:
        """Call it. The future gets what came of it, to be called: it returns, or raises."""
        future: Future[_Outcome[T]] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*arguments)
            except BaseException as error:
                future.set_result(partial(_raise, error))
            else:
                future.set_result(lambda: result)

        self._work.put(work)
        return future

    def end(self) -> None:
        """Let the thread end when it comes back."""
        self._work.put(None)

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            # A tensor that this thread let go of while Python ends would abort the process.
            del work
