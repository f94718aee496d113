"""What the losses of a policy read beside its outputs: one value per group, flattened per batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from laurel.types import LogProbs, Mask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLabels:
    """What `PolicyLoss` knows of one group; every list follows the branches of its tree."""

    masks_GL: tuple[Mask, ...]
    """bool [L]: the tokens of each branch that the policy wrote."""
    advantages_G: tuple[float, ...]
    used_G: tuple[bool, ...]
    """False: the completion takes part in nothing, whatever its other values are."""
    behaviour_GL: tuple[LogProbs, ...]
    """Log-probabilities when the tokens were drawn. Like the next two, read only under the mask."""
    old_GL: tuple[LogProbs, ...] | None = None
    """Under the learner's weights before its first update on these rollouts. None: this is that
    update, so they are what the model gives now."""
    reference_GL: tuple[LogProbs, ...] | None = None
    """Under the reference policy."""
    rewards_G: tuple[float | None, ...]
    """As the environment gave them: which completions are positive examples."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the loss counts: the policy's, of completions in use."""
        pairs = zip(self.masks_GL, self.used_G, strict=True)
        return sum(int(mask_L.sum()) for mask_L, used in pairs if used)

    @property
    def num_samples(self) -> int:
        """Completions that the loss counts: in use, with a token of the policy."""
        pairs = zip(self.masks_GL, self.used_G, strict=True)
        return sum(used and bool(mask_L.any()) for mask_L, used in pairs)

    def subset(self, indices: Iterable[int]) -> PolicyLabels:
        """The labels of these completions, in this order."""
        chosen = tuple(indices)
        return PolicyLabels(
            masks_GL=tuple(self.masks_GL[i] for i in chosen),
            advantages_G=tuple(self.advantages_G[i] for i in chosen),
            used_G=tuple(self.used_G[i] for i in chosen),
            behaviour_GL=tuple(self.behaviour_GL[i] for i in chosen),
            old_GL=None if self.old_GL is None else tuple(self.old_GL[i] for i in chosen),
            reference_GL=(
                None if self.reference_GL is None else tuple(self.reference_GL[i] for i in chosen)
            ),
            rewards_G=tuple(self.rewards_G[i] for i in chosen),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DemonstrationLabels:
    """What `DemonstrationLoss` knows of one group: which tokens of each branch to imitate."""

    masks_GL: tuple[Mask, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the loss counts."""
        return sum(int(mask_L.sum()) for mask_L in self.masks_GL)

    def subset(self, indices: Iterable[int]) -> DemonstrationLabels:
        """The labels of these completions, in this order."""
        return DemonstrationLabels(masks_GL=tuple(self.masks_GL[i] for i in indices))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyTokens:
    """A micro-batch without what does not count.

    U runs over the policy's tokens of the completions in use, N over those completions. Nothing
    else is ever read, so a NaN in a masked place cannot spread, not even through a gradient of 0.
    """

    place_U: Tensor
    """int64 [U]: index among the M tokens of the branches."""
    sample_U: Tensor
    """int64 [U]: index among the N completions."""
    lengths_N: Tensor
    advantages_U: Tensor
    is_positive_U: Tensor
    """bool [U]: token of a completion with a positive reward."""
    behaviour_U: Tensor
    old_U: Tensor | None
    reference_U: Tensor | None

    @classmethod
    def of(cls, batch: Sequence[PolicyLabels], *, like: Tensor) -> PolicyTokens:
        """The tokens of a micro-batch whose log-probabilities are `like` [M]."""
        places = _places(
            [
                mask_L & used
                for labels in batch
                for mask_L, used in zip(labels.masks_GL, labels.used_G, strict=True)
            ],
            like,
        )
        branch_M = np.repeat(*_branches(batch))
        branches_N, sample_U, lengths_N = np.unique(
            branch_M[places], return_inverse=True, return_counts=True
        )
        advantages = np.array([a for labels in batch for a in labels.advantages_G], np.float64)
        is_positive = np.array(
            [r is not None and r > 0.0 for labels in batch for r in labels.rewards_G], bool
        )

        def given(values: Sequence[LogProbs]) -> Tensor:
            values_M = _flat(values, np.float32)
            assert len(values_M) == len(like), f"{len(like)} tokens, but {len(values_M)} values"
            return to_device(values_M[places], like)

        def given_by_all(rows: list[tuple[LogProbs, ...] | None], name: str) -> Tensor | None:
            streams = [row for row in rows if row is not None]
            assert len(streams) in (0, len(batch)), f"some groups have {name} values, others none"
            if len(streams) < len(batch):
                return None
            return given([row_L for row in streams for row_L in row])

        return cls(
            place_U=torch.from_numpy(places).to(like.device),
            sample_U=torch.from_numpy(sample_U).to(like.device),
            lengths_N=to_device(lengths_N, like),
            advantages_U=to_device(advantages[branches_N][sample_U], like),
            is_positive_U=torch.from_numpy(is_positive[branches_N][sample_U]).to(like.device),
            behaviour_U=given([row for labels in batch for row in labels.behaviour_GL]),
            old_U=given_by_all([labels.old_GL for labels in batch], "old"),
            reference_U=given_by_all([labels.reference_GL for labels in batch], "reference"),
        )

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.lengths_N)

    def sums(self, values_U: Tensor) -> Tensor:
        """[N]: over the tokens of each completion (deterministic on a GPU too)."""
        return values_U.new_zeros(self.num_samples).index_put(
            (self.sample_U,), values_U, accumulate=True
        )

    def means(self, values_U: Tensor) -> Tensor:
        """[N]: over the tokens of each completion."""
        return self.sums(values_U) / self.lengths_N

    def spread(self, values_N: Tensor) -> Tensor:
        """[U]: the value of its completion for each token."""
        return values_N[self.sample_U]


def kept_places(masks: Sequence[Mask], like: Tensor) -> Tensor:
    """int64 [U]: which of the tokens whose outputs are `like` [M] lie under their masks."""
    return torch.from_numpy(_places(masks, like)).to(like.device)


def _places(masks: Sequence[Mask], like: Tensor) -> np.ndarray:
    keep_M = _flat(masks, bool)
    assert like.shape == keep_M.shape, (
        f"{len(keep_M)} tokens in the branches, but outputs of shape {tuple(like.shape)}"
    )
    return np.flatnonzero(keep_M)


def to_device(values: np.ndarray, like: Tensor) -> Tensor:
    """An array with the device and the floating-point type of a tensor."""
    return torch.from_numpy(values).to(like.device, like.dtype)


def _flat(rows: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([*rows, np.zeros(0, dtype)]).astype(dtype, copy=False)


def _branches(batch: Sequence[PolicyLabels]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the branches, and their lengths."""
    lengths = np.array([len(m) for labels in batch for m in labels.masks_GL], np.int64)
    return np.arange(len(lengths)), lengths
