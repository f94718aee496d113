"""What a reward loop asks: completions of many threads, one by one, merged into batches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from laurel.errors import BusyError, EnvironmentFailedError, LaurelError
from laurel.models.forest.decoder import Path
from laurel.rewards.batching import BackendReplicas, BatcherLimits, BatchingScorer
from laurel.rewards.preparing import Prepared, Rendered
from laurel.rewards.scorer import ContractScorer, OnBatch
from laurel.types import Group, Score, TokenGroup

T = TypeVar("T")

UNLIMITED = 2**62
"""Completions and letters that may wait: a run asks for no more than it holds already."""


class LoopScorer(ContractScorer):
    """A `ContractScorer` that may be asked from any number of threads at once.

    What they ask at the same time is computed together, and what two of them ask is computed once;
    who shares a batch depends on when they ask, and scores by that much: on rounding.
    """

    def __init__(self, models: ContractScorer | BackendReplicas[ContractScorer]) -> None:
        """Take over a model, or replicas of one; `close` ends them."""
        self._models = models
        first = models if isinstance(models, ContractScorer) else models.replicas[0].value
        self._path = first.path
        super().__init__(
            first.contract, batch_tokens=first.batch_tokens, batch_size=first.batch_size
        )
        self.batcher = BatchingScorer(
            models,
            model_version="",
            limits=batcher_limits(first),
            num_threads=1 if isinstance(models, ContractScorer) else len(models.replicas),
        )
        self._awake = threading.Lock()
        self._is_closed = False

    @property
    def path(self) -> Path:
        """See `ContractScorer`."""
        return self._path

    def directly(self, work: Callable[[ContractScorer], T]) -> T:
        """What a model says that is asked for itself: nothing is merged, nothing remembered.

        Raises:
            WorkerError: No replica is left, or nobody who renders for them.
        """
        with self._awake:
            if isinstance(self._models, ContractScorer):
                return work(self._models)
            return self._models.call(work)

    async def score_afresh(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """What a model says that is asked for itself."""
        return await asyncio.to_thread(self.directly, lambda scorer: scorer.score_now(groups))

    def score_now(
        self, groups: Sequence[Group], on_batch: OnBatch | None = None
    ) -> list[tuple[Score, ...]]:
        """See `ContractScorer`. Nobody is told of progress: batches are not this caller's own.

        Raises:
            EnvironmentFailedError: It is closed, or was before the scores came.
            WorkerError: No replica is left, or nobody who renders for them.
        """
        try:
            if self._is_closed:
                raise BusyError("it is closed")
            return self.batcher.score_now(groups)
        except LaurelError as error:
            if not self._is_closed:
                raise
            raise EnvironmentFailedError("the scorer was closed") from error

    def score_exactly(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """See `ContractScorer`."""
        return self.directly(lambda scorer: scorer.score_exactly(groups))

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """See `ContractScorer`."""
        return self.directly(lambda scorer: scorer.prepare(groups))

    def prepare_rendered(self, row: Rendered) -> TokenGroup:
        """See `ContractScorer`."""
        return self.directly(lambda scorer: scorer.prepare_rendered(row))

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        """See `ContractScorer`."""
        return self.directly(lambda scorer: scorer.score_tokens(tokens))

    def encode(self, groups: Sequence[Group]) -> list[TokenGroup]:
        """See `ContractScorer`."""
        return self.directly(lambda scorer: scorer.encode(groups))

    def _values(
        self, tokens: Sequence[TokenGroup], on_batch: OnBatch | None, *, exactly: bool
    ) -> np.ndarray:
        raise AssertionError("the models behind the batcher compute")

    @contextmanager
    def resting(self) -> Iterator[None]:
        """See `ContractScorer`."""
        with self._awake:
            try:
                self.sleep()
                yield
            finally:
                self.wake()

    def sleep(self) -> None:
        """See `ContractScorer`."""
        self.batcher.sleep_now()

    def wake(self) -> None:
        """See `ContractScorer`."""
        self.batcher.wake_now()

    def close(self) -> None:
        """End the models. What replicas have under way fails."""
        self._is_closed = True
        if isinstance(self._models, BackendReplicas):
            self._models.close()
        self.batcher.close()


def batcher_limits(scorer: ContractScorer) -> BatcherLimits:
    """How a scorer's own budget is filled by requests of many."""
    return BatcherLimits(
        batch_tokens=scorer.batch_tokens, max_waiting=UNLIMITED, max_waiting_characters=UNLIMITED
    )
