"""What all scorers share that hold a scoring contract: tokens in, verdicts out."""

from __future__ import annotations

import asyncio
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from laurel.models.decoder import Path
from laurel.models.scoring import ScoringContract
from laurel.rewards.rendered import Rendered
from laurel.rewards.to_tokens import Prepared, Preparing, prepared_by
from laurel.types import Group, Score, TokenGroup

OnBatch = Callable[[int, int], None]
"""Called with the groups and the tokens of each micro-batch that is done."""


class ContractScorer(ABC):
    """Renders groups by a contract and makes scores of what a model says, wherever that is."""

    has_exact_scores = True
    """Whether it can compute in a higher precision: see `score_exactly`."""

    def __init__(
        self, contract: ScoringContract, *, batch_tokens: int, batch_size: int | None
    ) -> None:
        """Hold a contract.

        Args:
            contract: The contract it scores by.
            batch_tokens: Token budget of one forward pass.
            batch_size: Rows of one forward pass on the padded path, instead of the budget. A group
                of more completions travels alone.
        """
        self.contract = contract
        self.batch_tokens = batch_tokens
        self.batch_size = batch_size
        # Calls run in threads of their own. A tokenizer is not made for that, and the first call
        # to end would switch dropout on again under the others.
        self._one_at_a_time = threading.Lock()
        self.preparers: Preparing | None = None
        """Who renders and tokenises instead. Whoever closes the scorer closes them."""

    @property
    @abstractmethod
    def path(self) -> Path:
        """How batches reach the model."""

    @abstractmethod
    def _values(
        self, tokens: Sequence[TokenGroup], on_batch: OnBatch | None, *, exactly: bool
    ) -> np.ndarray:
        """The outputs for every completion, float32 `[N, K]`, in order; of the same weights in a
        higher precision where that is asked for."""

    @abstractmethod
    def sleep(self) -> None:
        """Give the memory of devices back; `resting` does, and takes care of the rest."""

    @abstractmethod
    def wake(self) -> None:
        """Be as before `sleep`."""

    @property
    def is_ended(self) -> bool:
        """Whether what computes is gone, and raises its error from every call."""
        return False

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Give the memory of devices back meanwhile, once what is under way is done.

        Whoever asks for scores waits until it is over, so do not ask in the same thread.
        """
        with self._one_at_a_time:
            self.sleep()
            try:
                yield
            finally:
                self.wake()

    def close(self) -> None:  # noqa: B027  a model that is held here goes with the scorer
        """Free processes and memory. Idempotent."""

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """See `protocols.Scorer`. The arithmetic runs in a thread, beside the event loop."""
        return await asyncio.to_thread(self.score_now, groups)

    def score_now(
        self, groups: Sequence[Group], on_batch: OnBatch | None = None
    ) -> list[tuple[Score, ...]]:
        """The same for callers without an event loop.

        Completions of a group that say the same are computed once: computed twice, the order of
        sums would make them differ in the last digit, and a learner take that for a preference.

        Args:
            groups: What to score.
            on_batch: Told of progress.
        """
        with self._one_at_a_time:
            return self._scored(groups, on_batch)

    def score_exactly(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """The scores that the same weights give in a higher precision.

        What the rounding in `score_now` is measured against; several times slower.
        """
        with self._one_at_a_time:
            return self._scored(groups, None, exactly=True)

    def _scored(
        self, groups: Sequence[Group], on_batch: OnBatch | None, *, exactly: bool = False
    ) -> list[tuple[Score, ...]]:
        distinct = [tuple(dict.fromkeys(group.completions_G)) for group in groups]
        prepared = self._encode(
            [replace(group, completions_G=c) for group, c in zip(groups, distinct, strict=True)]
        )
        values_NK = self._values(
            [tokens for tokens, _ in prepared if tokens is not None], on_batch, exactly=exactly
        )
        rows = iter(values_NK.tolist())
        scores: list[tuple[Score, ...]] = []
        for group, completions, (tokens, failures) in zip(groups, distinct, prepared, strict=True):
            scored = iter(self._verdicts(tokens, rows))
            score_of = {
                completion: next(scored) if failure is None else Score(value=None, failure=failure)
                for completion, failure in zip(completions, failures, strict=True)
            }
            scores.append(tuple(score_of[completion] for completion in group.completions_G))
        return scores

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """The first half of `score_now`; nothing is computed, and equal completions stay."""
        with self._one_at_a_time:
            return self._encode(groups)

    def prepare_rendered(self, row: Rendered) -> TokenGroup:
        """See `ScoringContract.encode_rendered`."""
        with self._one_at_a_time:
            return self.contract.encode_rendered(row)

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        """The second half of `score_now`, for what was prepared."""
        with self._one_at_a_time:
            rows = iter(self._values(tokens, None, exactly=False).tolist())
            return [tuple(self._verdicts(group, rows)) for group in tokens]

    def encode(self, groups: Sequence[Group]) -> list[TokenGroup]:
        """What the model reads of groups with at least one completion each.

        Raises:
            DataError: A conversation that cannot be rendered.
        """
        with self._one_at_a_time:
            return self.contract.encode(groups)

    def _encode(self, groups: Sequence[Group]) -> list[Prepared]:
        if self.preparers is not None:
            return self.preparers.prepare(groups)
        return prepared_by(self.contract, groups)

    def _verdicts(
        self, tokens: TokenGroup | None, rows: Iterator[Sequence[float]]
    ) -> Iterator[Score]:
        """The scores of a group, in order; takes as many rows as it has completions."""
        if tokens is None:
            return
        for num_tokens, truncated in zip(tokens.lengths_G, tokens.truncated_G, strict=True):
            yield self._verdict(next(rows), num_tokens, truncated)

    @property
    def pad_id(self) -> int:
        """The token that fills rows up."""
        return self.contract.rules.pad_id or 0

    def _verdict(self, values_K: Sequence[float], num_tokens: int, truncated: bool) -> Score:
        if not all(math.isfinite(value) for value in values_K):
            return Score(
                value=None, num_tokens=num_tokens, truncated=truncated, failure="not finite"
            )
        return Score(
            value=self.contract.scalar(values_K),
            values_K=tuple(values_K),
            num_tokens=num_tokens,
            truncated=truncated,
        )
