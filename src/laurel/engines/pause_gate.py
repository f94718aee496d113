"""Lets requests through side by side, or holds them back while something is done alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PauseGate:
    """Of one event loop. Closed at first."""

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
        """Wait for the gate to be open, and be inside."""
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
        """Close the gate and wait until those inside have left. Whoever is alone opens it again."""
        async with self._alone:
            self._open.clear()
            await self._idle.wait()
            yield
