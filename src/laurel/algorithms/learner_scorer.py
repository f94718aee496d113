"""The model that is being trained, as a scorer: wherever its ranks are, and by its own contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from laurel.algorithms.batches import Batcher
from laurel.algorithms.learner import Learner
from laurel.models.scoring import ScoringContract
from laurel.rewards.contract_scorer import ContractScorer, OnBatch
from laurel.rewards.to_tokens import Prepared, prepared_by
from laurel.types import Group, TokenGroup

if TYPE_CHECKING:
    from laurel.models.decoder import Path

Rows = list[int]
"""Where the outputs for the completions of a group belong."""


class LearnerScorer(ContractScorer):
    """Scores as a scorer that loads the checkpoint would; tokens are kept for the next time."""

    def __init__(
        self,
        learner: Learner,
        contract: ScoringContract,
        batcher: Batcher,
        *,
        micro_batch_size: int,
    ) -> None:
        """Hold a learner.

        Args:
            learner: Of a reward model.
            contract: That is saved with it.
            batcher: Cuts groups up for it.
            micro_batch_size: Groups of one forward pass where nothing is packed.
        """
        super().__init__(contract, batch_tokens=batcher.forest_budget, batch_size=None)
        self.preparers = _Remembering(contract)
        self._learner = learner
        self._batcher = batcher
        self._micro_batch_size = micro_batch_size

    @property
    def path(self) -> Path:
        """See `ContractScorer`."""
        return self._batcher.path

    def _values(
        self, tokens: Sequence[TokenGroup], on_batch: OnBatch | None, *, exactly: bool
    ) -> np.ndarray:
        if not tokens:
            return np.zeros((0, 1), dtype=np.float32)
        ends = np.cumsum([len(group.branches_ids_G) for group in tokens]).tolist()
        starts = [0, *ends[:-1]]
        rows: list[Rows] = [list(range(s, e)) for s, e in zip(starts, ends, strict=True)]
        # Lists of answers may be larger than a batch, and each answer stands for itself.
        micro_batches = self._batcher.cut(
            *self._batcher.divide(tokens, rows, lambda of, some: [of[i] for i in some]),
            micro_batch_size=self._micro_batch_size,
        )
        found = self._learner.outputs([one.inputs for one in micro_batches],
                                      in_full_precision=exactly)  # fmt: skip
        begun = set(starts)
        values_NK: np.ndarray | None = None
        for micro_batch, outputs_NK in zip(micro_batches, found, strict=True):
            scores_NK = outputs_NK.float().cpu().numpy()
            if values_NK is None:
                values_NK = np.full((ends[-1], scores_NK.shape[1]), np.nan, dtype=np.float32)
            values_NK[np.concatenate(micro_batch.labels)] = scores_NK
            if on_batch is not None:
                num_groups = sum(some[0] in begun for some in micro_batch.labels)
                on_batch(num_groups, micro_batch.num_tokens)
        assert values_NK is not None
        return values_NK

    def sleep(self) -> None:
        """Nothing: the learner rests by itself (`Learner.resting`)."""

    def wake(self) -> None:
        """Likewise."""


class _Remembering:
    """Renders and tokenises what it has not seen; see `rewards.to_tokens.Preparing`."""

    def __init__(self, contract: ScoringContract) -> None:
        self._contract = contract
        self._known: dict[Group, Prepared] = {}

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """See `Preparing`."""
        new = [group for group in dict.fromkeys(groups) if group not in self._known]
        self._known |= zip(new, prepared_by(self._contract, new), strict=True)
        return [self._known[group] for group in groups]

    def close(self) -> None:
        """See `Preparing`."""
