"""The settings of a generator, and the gate that its requests wait at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from laurel.config.grpo import GenerationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSpec:
    """Settings of a generation engine that hold for every backend.

    The weights are passed separately, and each request has its own sampling parameters.
    """

    settings: GenerationConfig = field(default_factory=GenerationConfig)
    """The section `policy.generation` of the configuration, without its sampling parameters, which
    engines ignore."""
    max_length: int
    """Most tokens of a prompt and its completion together."""
    end_ids: tuple[int, ...]
    """Ids of the tokens that end a completion."""
    seed: int = 0
    """Seed of the engine, and of the weights of a policy from scratch; the learner uses the
    same."""
    weight_version: int = 0
    """Version of the weights that the engine starts with."""


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
