"""The scorer of a reward loop: single completions from many threads, merged into batches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from laurel.errors import BusyError, EnvironmentFailedError, LaurelError
from laurel.models.forest.decoder import Path
from laurel.rewards.batching import BackendReplicas, BatcherLimits, BatchingScorer
from laurel.rewards.scorer import ContractScorer, ModelScorer, OnBatch
from laurel.types import Group, Score, TokenGroup

T = TypeVar("T")

# Completions and characters that may wait: a run requests no more than it already holds.
UNLIMITED = 2**62


class LoopScorer(ModelScorer):
    """Scores for any number of threads at once.

    Requests at the same time are computed together, and equal ones once. Timing decides which
    requests share a batch, and scores depend on that only by rounding.
    """

    def __init__(self, models: ContractScorer | BackendReplicas[ContractScorer]) -> None:
        """Take over a model, or replicas of one; `close` ends them."""
        self._models = models
        first = models if isinstance(models, ContractScorer) else models.replicas[0].value
        self._path = first.path
        super().__init__(first.contract)
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
        """The batch layout that the model reads: `forest` or `padded`."""
        return self._path

    @property
    def version(self) -> str:
        """Version of the model, for which its files may be read."""
        return self.directly(lambda scorer: scorer.version)

    def directly(self, work: Callable[[ContractScorer], T]) -> T:
        """Call a model itself: nothing is merged or cached.

        Raises:
            WorkerError: No replica is left, or no tokenizer worker.
        """
        with self._awake:
            if isinstance(self._models, ContractScorer):
                return work(self._models)
            return self._models.call(work)

    async def score_afresh(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """Score groups with a model itself, without the batcher's cache."""
        return await asyncio.to_thread(self.directly, lambda scorer: scorer.score_now(groups))

    def score_now(
        self, groups: Sequence[Group], on_batch: OnBatch | None = None
    ) -> list[tuple[Score, ...]]:
        """Score groups; `on_batch` is ignored, as batches mix the requests of many callers.

        Raises:
            EnvironmentFailedError: The scorer is closed, or was before the scores came.
            WorkerError: No replica is left, or no tokenizer worker.
        """
        try:
            if self._is_closed:
                raise BusyError("it is closed")
            return self.batcher.score_now(groups)
        except LaurelError as error:
            if not self._is_closed:
                raise
            raise EnvironmentFailedError("the scorer was closed") from error

    def encode(self, groups: Sequence[Group]) -> list[TokenGroup]:
        """Tokenise groups with a model itself."""
        return self.directly(lambda scorer: scorer.encode(groups))

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Let all models sleep within the context."""
        with self._awake:
            try:
                self.batcher.sleep_now()
                yield
            finally:
                self.batcher.wake_now()

    def close(self) -> None:
        """Close the models; running calls of replicas fail."""
        self._is_closed = True
        if isinstance(self._models, BackendReplicas):
            self._models.close()
        self.batcher.close()


def batcher_limits(scorer: ContractScorer) -> BatcherLimits:
    """Return batcher limits with a scorer's own token budget and an unlimited queue."""
    return BatcherLimits(
        batch_tokens=scorer.batch_tokens, max_waiting=UNLIMITED, max_waiting_characters=UNLIMITED
    )
