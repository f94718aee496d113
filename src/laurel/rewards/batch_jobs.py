"""What waits in a batcher: requests, how many there may be, and what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from laurel.rewards.merging import Encoder
from laurel.types import Group, Score, TokenGroup


class Backend(Encoder, Protocol):
    """A model whose calls block. Only one thread calls it, one call at a time."""

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        """A score for each branch, in order."""

    def sleep(self) -> None:
        """Give the memory of devices back."""

    def wake(self) -> None:
        """Be as before `sleep`."""

    def close(self) -> None:
        """Free everything. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherLimits:
    """How much is taken at once, and how much may wait."""

    batch_tokens: int = 8192
    """Distinct tokens of a batch; a larger group travels alone."""
    max_delay: float = 0.002
    """Seconds that an idle model waits for company."""
    max_waiting: int = 2000
    """Completions that may wait or be under way. A request of more is taken where nothing does."""
    max_waiting_characters: int = 2**26
    """Of their text; likewise."""
    cache_entries: int = 65536
    """Scores that are remembered; 0: none."""


@dataclass(slots=True, kw_only=True)
class BatcherStats:
    """What happened so far."""

    requests: int = 0
    completions: int = 0
    scored: int = 0
    failed: int = 0
    """Completions that got a failure."""
    refused: int = 0
    """Requests that found the queue full."""
    cancelled: int = 0
    computed: int = 0
    """Completions that the model computed; the others were equal to one that it had."""
    computed_tokens: int = 0
    batches: int = 0
    busy_seconds: float = 0.0
    waiting: int = 0
    """Completions that wait or are under way now."""


@dataclass(slots=True, eq=False)
class Job:
    """One request. It is done when each of its groups is. Its future is touched by its loop only,
    everything else by one thread at a time."""

    groups: Sequence[Group]
    size: int
    characters: int
    arrived: float
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[tuple[Score, ...]]]
    is_cancelled: bool = False
    error: Exception | None = None
    results: list[tuple[Score, ...]] = field(default_factory=list)
    missing: int = 0

    @classmethod
    def of(cls, groups: Sequence[Group], *, arrived: float) -> Job:
        """A request of the running event loop."""
        loop = asyncio.get_running_loop()
        size = sum(len(group.completions_G) for group in groups)
        characters = sum(map(_characters, groups))
        return cls(groups, size, characters, arrived, loop, loop.create_future())

    def settle(self) -> None:
        """Give the answer to whoever waits. In the job's own loop."""
        if self.future.done():  # whoever waited has gone
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.results)


def hand_out(jobs: Iterable[Job]) -> None:
    """Settle jobs in their loops, from any thread; each loop is woken once."""
    of_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        of_loop.setdefault(job.loop, []).append(job)
    for loop, some in of_loop.items():
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle_all, some)


def _settle_all(jobs: Iterable[Job]) -> None:
    for job in jobs:
        job.settle()


def _characters(group: Group) -> int:
    """Of the distinct text of a group."""
    said = sum(len(message.content) for message in group.prompt)
    for completion in group.completions_G:
        for message in completion.messages:
            said += len(message.content)
    return said
