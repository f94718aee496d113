"""Calls in daemon threads, an event loop in one for callers of any thread, and a gate in a loop.

The end of the process does not wait for a call that never returns.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

from laurel.errors import EngineError
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


class BackgroundLoop:
    """An event loop in a thread of its own, which runs coroutines for callers of any thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._make_task)
        self._submitted: WeakSet[Coroutine[Any, Any, Any]] = WeakSet()
        self._closing = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, T] | Generator[Any, None, T],
        /,
        **options: Any,
    ) -> asyncio.Task[T]:
        task = asyncio.Task(work, loop=loop, **options)
        if work in self._submitted:
            # Where the future was cancelled nobody asks for the error, and asyncio prints each.
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return task

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop, and return a future of its result.

        Cancelling the future cancels the coroutine, whose errors are then nobody's.

        Raises:
            EngineError: The loop was closed.
        """
        with self._closing:
            if not self._is_closed:
                self._submitted.add(work)
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        raise EngineError(f"{self._thread.name} was closed")

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and block until its result.

        A call from the loop's own thread would deadlock.

        Raises:
            EngineError: The loop was closed.
        """
        return self.submit(work).result()

    def start(self, work: Coroutine[Any, Any, None]) -> Running:
        """Start a coroutine in the loop, and return a handle that can abort it.

        Raises:
            EngineError: The loop was closed.
        """
        with self._closing:
            if not self._is_closed:
                return Running(self.loop, work)
        work.close()
        raise EngineError(f"{self._thread.name} was closed")

    async def run_to_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the loop to its end, even where the caller is cancelled.

        A half-made change, such as of weights, would leave a state that nobody knows.
        """
        await asyncio.shield(asyncio.wrap_future(self.submit(work)))

    def close(
        self,
        last: Coroutine[Any, Any, None],
        *,
        patience: float | None = None,
        limit: float | None = None,
    ) -> bool:
        """Refuse new coroutines, run a last one, cancel the others, and end the thread.

        Args:
            patience: Seconds to wait for the cancelled coroutines to end, after which they are
                abandoned. None: no limit.
            limit: Seconds for the whole call; None: no limit.

        Returns:
            False if the loop was closed before, whose end it awaits too.

        Raises:
            TimeoutError: The limit passed, because something blocks the loop.
        """
        with self._closing:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            last.close()
            self._thread.join(limit)
            return False
        ending = asyncio.run_coroutine_threadsafe(_finish(last, patience), self.loop)
        ending.add_done_callback(lambda _: self.loop.call_soon_threadsafe(self.loop.stop))
        try:
            ending.result(limit)
        finally:
            if ending.done():
                self._thread.join()
        return True


class Running:
    """A handle of a coroutine that runs in a `BackgroundLoop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
        self._loop = loop
        self._ended: Future[None] = Future()
        self._task: asyncio.Task[None] | None = None
        loop.call_soon_threadsafe(self._begin, work)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._ended.set_result(None)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def abort(self) -> None:
        """Cancel the coroutine and wait until it has ended."""
        if not self._ended.done():
            self._loop.call_soon_threadsafe(self._cancel)
            await asyncio.shield(asyncio.wrap_future(self._ended))


class PauseGate:
    """A gate in one event loop that admits requests side by side or holds them back.

    It begins closed. While it is closed, other work can have the engine for itself.
    """

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._alone = asyncio.Lock()
        self._num_inside = 0

    def open(self) -> None:
        """Open the gate, so that waiting and new requests enter."""
        self._open.set()

    async def empty(self) -> None:
        """Wait until no request is inside the gate."""
        await self._idle.wait()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Enter the gate as a request: wait until it is open, and leave it with the context."""
        while not self._open.is_set():
            await self._open.wait()
        self._num_inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._idle.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Close the gate and wait until all requests have left; the caller must open it again."""
        async with self._alone:
            self._open.clear()
            await self._idle.wait()
            yield


async def _finish(last: Coroutine[Any, Any, None], patience: float | None) -> None:
    try:
        await last
    finally:
        await cancel_others(patience)


async def cancel_others(patience: float | None) -> None:
    """Cancel all other tasks of the running loop, and wait until they have ended.

    Args:
        patience: Most seconds to wait; None: no limit.
    """
    await end_all(asyncio.all_tasks() - {asyncio.current_task()}, patience=patience)


async def end_all(tasks: Iterable[asyncio.Future[Any]], *, patience: float | None = None) -> None:
    """Cancel tasks, and wait until they have ended, at most `patience` seconds."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        ended, _ = await asyncio.wait(tasks, timeout=patience)
        for task in ended:
            if not task.cancelled():
                task.exception()  # which tells the loop that somebody has seen it
