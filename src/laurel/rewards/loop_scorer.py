"""What a reward loop asks: completions of many threads, one by one, merged into batches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from laurel.rewards.batching import BatcherLimits, BatchingScorer
from laurel.rewards.blocking import BlockingScorer
from laurel.rewards.preparing import Preparing
from laurel.rewards.scorer import ContractScorer
from laurel.types import Group, Score, TokenGroup

T = TypeVar("T")

UNLIMITED = 2**62
"""Completions and letters that may wait: a run asks for no more than it holds already."""


def batcher_limits(scorer: ContractScorer) -> BatcherLimits:
    """How a scorer's own budget is filled by requests of many."""
    return BatcherLimits(
        batch_tokens=scorer.batch_tokens, max_waiting=UNLIMITED, max_waiting_characters=UNLIMITED
    )


class ScoringBackend(Protocol):
    """Where requests are merged and computed. All coroutines run in one event loop."""

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """See `protocols.Scorer`."""

    async def set_asleep(self, is_asleep: bool) -> None:
        """Give the memory of devices back, or take it again. Requests wait meanwhile."""

    def directly(self, work: Callable[[ContractScorer], T]) -> T:
        """Let a model that can compute do something beside what is merged, in any thread."""

    async def aclose(self) -> None:
        """End everything. Idempotent."""


class LoopScorer(BlockingScorer):
    """A scorer of a model that may be asked from any number of threads at once.

    What they ask at the same time is computed together, and what two of them ask is computed once;
    who shares a batch depends on when they ask, and scores by that much: on rounding.
    """

    def __init__(self, backend: ScoringBackend) -> None:
        """Take over a backend; `close` ends it."""
        self.contract, self.path = backend.directly(lambda model: (model.contract, model.path))
        self.preparers: Preparing | None = None
        """Who renders and tokenises for the models. They end with the context of the scorer."""
        self._backend = backend
        self._awake = threading.Lock()
        super().__init__(backend)

    def directly(self, work: Callable[[ContractScorer], T]) -> T:
        """What a model says that is asked for itself: nothing is merged, nothing remembered."""
        with self._awake:
            return self._backend.directly(work)

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """See `protocols.Scorer`. Its event loop is another than that of the caller."""
        return await asyncio.to_thread(self.score_now, groups)

    async def score_afresh(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """What a model says that is asked for itself."""
        return await asyncio.to_thread(self.directly, lambda model: model.score_now(groups))

    def encode(self, groups: Sequence[Group]) -> list[TokenGroup]:
        """See `ContractScorer.encode`."""
        return self.directly(lambda model: model.encode(groups))

    @contextmanager
    def resting(self) -> Iterator[None]:
        """See `ContractScorer.resting`."""
        with self._awake:
            try:
                self.wait_for(lambda: self._backend.set_asleep(True))
                yield
            finally:
                self.wait_for(lambda: self._backend.set_asleep(False))

    def __exit__(self, *_: object) -> None:
        self.close()
        if self.preparers is not None:
            self.preparers.close()


class SingleModelBackend:
    """One model, in this process or wherever its scorer has it."""

    def __init__(self, scorer: ContractScorer) -> None:
        """Take over a scorer, and start the thread that computes."""
        self._scorer = scorer
        self._batcher = BatchingScorer(scorer, model_version="", limits=batcher_limits(scorer))

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """See `ScoringBackend`."""
        return await self._batcher.score(groups)

    async def set_asleep(self, is_asleep: bool) -> None:
        """See `ScoringBackend`."""
        await (self._batcher.sleep() if is_asleep else self._batcher.wake())

    def directly(self, work: Callable[[ContractScorer], T]) -> T:
        """See `ScoringBackend`."""
        return work(self._scorer)

    async def aclose(self) -> None:
        """See `ScoringBackend`."""
        await asyncio.to_thread(self._batcher.close)
        self._scorer.close()
