"""Scores of many groups at once, by a learner that may be spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from laurel.data.forest import pad, plant
from laurel.rewards.local import divide, in_order
from laurel.types import PaddedRows, TokenForest, TokenGroup

Scores = Callable[[Sequence[TokenForest | PaddedRows]], Iterable[Tensor]]
"""`Learner.outputs` of a reward model."""


def reward_scores(
    outputs: Scores,
    groups: Sequence[TokenGroup],
    *,
    path: Literal["forest", "padded"],
    batch_tokens: int,
    pad_id: int,
) -> np.ndarray:
    """Every output of the head for every completion.

    Args:
        outputs: Computes the scores of each batch.
        groups: At least one, as the contract encodes them.
        path: How batches reach the model.
        batch_tokens: Token budget of one forward pass; larger groups travel alone.
        pad_id: For models on the padded path.

    Returns:
        float32 `[N, K]`, in the order of the groups whatever the batches were.
    """
    parts = divide(path, groups, batch_tokens)
    chosen = [[groups[i] for i in indices] for indices in parts]
    batches = [plant(some) if path == "forest" else pad(some, pad_id=pad_id) for some in chosen]
    values = [scores_NK.float().cpu().numpy() for scores_NK in outputs(batches)]
    return in_order(groups, parts, values, num_outputs=values[0].shape[1])
