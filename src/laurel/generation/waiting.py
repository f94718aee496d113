"""An event loop in a thread of its own, for what must go on while others compute."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from laurel.errors import EngineError, LaurelError

Result = TypeVar("Result")


class BackgroundLoop:
    """Runs coroutines for callers of any thread and any loop, until it is closed."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """The result, in time. Cancelling it cancels the work."""
        with self._closing:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        raise EngineError("the engine was closed")

    def wait_for(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the loop and block until its result.

        A call from the loop's own thread would deadlock.
        """
        return self.submit(work).result()

    def start(self, work: Coroutine[Any, Any, None]) -> Running:
        """Begin work that can be cancelled."""
        with self._closing:
            if not self._is_closed:
                return Running(self.loop, work)
        work.close()
        raise EngineError("the engine was closed")

    def close(
        self,
        last: Coroutine[Any, Any, None],
        *,
        patience: float | None = None,
        limit: float | None = None,
    ) -> bool:
        """Accept nothing more, run `last`, cancel what is left. False: it was closed before.

        Args:
            last: What is done before the rest is cancelled.
            patience: Seconds that the rest may take to end; then it is left behind. None: any.
            limit: Seconds for all of it; None: any.

        Raises:
            TimeoutError: The limit was not kept: something holds up the loop itself.
        """
        with self._closing:
            if self._is_closed:
                last.close()
                return False
            self._is_closed = True
        ending = asyncio.run_coroutine_threadsafe(_finish(last, patience), self.loop)
        ending.add_done_callback(lambda _: self.loop.call_soon_threadsafe(self.loop.stop))
        try:
            ending.result(limit)
        finally:
            if ending.done():
                self._thread.join()
        return True


class Running:
    """Work under way in a `BackgroundLoop`."""

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
        """Cancel it, and come back when it has ended."""
        if not self._ended.done():
            self._loop.call_soon_threadsafe(self._cancel)
            await asyncio.shield(asyncio.wrap_future(self._ended))


async def _finish(last: Coroutine[Any, Any, None], patience: float | None) -> None:
    try:
        await last
    finally:
        await cancel_others(patience)


async def cancel_others(patience: float | None) -> None:
    """Cancel all other tasks of this loop, and wait so many seconds at most until they have ended.

    For ever where that is None.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        ended, _ = await asyncio.wait(others, timeout=patience)
        for task in ended:
            if not task.cancelled():
                task.exception()  # which tells the loop that somebody has seen it


# --------------------------------------------------------------------------------------------------
# Lets requests through side by side, or holds them back while something is done alone.


class PauseGate:
    """A gate of one event loop that admits requests or holds them back; it begins closed."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._alone = asyncio.Lock()
        self._num_inside = 0

    def open(self) -> None:
        """Let requests through."""
        self._open.set()

    async def empty(self) -> None:
        """Wait until no request is inside."""
        await self._idle.wait()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Wait until the gate is open, then count as a request inside it within the context."""
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
        """Close the gate and wait until those inside have left. The caller opens it again."""
        async with self._alone:
            self._open.clear()
            await self._idle.wait()
            yield


# --------------------------------------------------------------------------------------------------
# Waiting for something that may die without a word.


class Lifeline:
    """The life of an engine in one event loop: its failure ends the tasks that wait for it."""

    def __init__(self) -> None:
        self.failure: LaurelError | None = None
        """Why the engine is unusable: the first failure wins."""
        self._is_cut = asyncio.Event()

    def cut(self, failure: LaurelError) -> None:
        """Fail permanently and wake the waiting tasks."""
        self.failure = self.failure or failure
        self._is_cut.set()

    async def hold(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of work on the engine; the failure, where the engine dies before."""
        doing = asyncio.ensure_future(work)
        cut = asyncio.ensure_future(self._is_cut.wait())
        try:
            await asyncio.wait({doing, cut}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            assert self.failure is not None
            raise self.failure
        finally:
            doing.cancel()
            cut.cancel()
