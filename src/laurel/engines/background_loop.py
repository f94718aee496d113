"""An event loop in a thread of its own, for what must go on while others compute."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from laurel.errors import EngineError

Result = TypeVar("Result")


class BackgroundLoop:
    """Runs coroutines for callers of any thread and any loop, until it is closed."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """The result, in time. Cancelling it cancels the work."""
        with self._closing:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        raise EngineError("the engine was closed")

    def wait_for(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result. Not to be called in the loop's own thread."""
        return self.submit(work).result()

    def start(self, work: Coroutine[Any, Any, None]) -> Running:
        """Begin work that can be told to end."""
        with self._closing:
            if not self._is_closed:
                return Running(self.loop, work)
        work.close()
        raise EngineError("the engine was closed")

    def close(self, last: Coroutine[Any, Any, None]) -> bool:
        """Accept nothing more, run `last`, cancel what is left. False: it was closed before."""
        with self._closing:
            if self._is_closed:
                last.close()
                return False
            self._is_closed = True
        try:
            asyncio.run_coroutine_threadsafe(last, self.loop).result()
        finally:
            asyncio.run_coroutine_threadsafe(_cancel_others(), self.loop).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()
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


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
