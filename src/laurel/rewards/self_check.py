"""What a loaded reward model must show before it is used: in a batch it scores as it does alone."""

from __future__ import annotations

import torch
from torch import Tensor

from laurel.models.probe import (
    Probe,
    check_batches,
    draw_probe,
    inputs_alone,
    own_attention,
)
from laurel.models.reward_model import RewardModel

SHAPES = ((11, (5, 1, 8)), (0, (7,)))
"""Of the probe: see `draw_probe`."""


def check_paths(model: RewardModel, *, seed: int = 0) -> float:
    """Compare a small batch on the model's path with the model's own forward pass, one by one.

    Hidden states are compared, because a new head makes every score small, and then scores with
    those that Hugging Face's class returns by itself.

    Returns:
        The largest relative difference found.

    Raises:
        ModelError: They disagree, so batches would give wrong scores.
    """
    probe = draw_probe(model, SHAPES, seed=seed)
    return check_batches(
        model, lambda: _largest_difference(model, probe), what="score", role="reward model"
    )


def _largest_difference(model: RewardModel, probe: Probe) -> float | None:
    """Between the batch and one by one; None where the latter is not finite."""
    batch = probe.batch(model.path)
    scores_NK = model(batch).double()
    if model.head_name is None:
        own_NK = torch.cat([_own_scores(model, ids) for ids in probe.sequences_N]).double()
        if not own_NK.isfinite().all():
            return None
        return float((scores_NK - own_NK).abs().max() / own_NK.abs().max().clamp_min(1e-12))
    hidden_ND = model.last_hidden(batch).double()
    with own_attention(model):
        own_NK = torch.cat([_own_scores(model, ids) for ids in probe.sequences_N]).double()
        own_ND = torch.cat([_own_hidden(model, ids) for ids in probe.sequences_N]).double()
    if not (own_NK.isfinite().all() and own_ND.isfinite().all()):
        return None
    size_N = own_ND.norm(dim=1).clamp_min(1e-12)
    head_K = getattr(model.classifier, model.head_name).weight.double().norm(dim=1)
    hidden = ((hidden_ND - own_ND).norm(dim=1) / size_N).max()
    scores = ((scores_NK - own_NK).abs() / (size_N[:, None] * head_K).clamp_min(1e-12)).max()
    return float(torch.maximum(hidden, scores))


def _own_scores(model: RewardModel, ids_L: Tensor) -> Tensor:
    """What the Hugging Face class returns for one sequence, `[1, K]`."""
    scores_1K: Tensor = model.classifier(**inputs_alone(model, ids_L)).logits
    return scores_1K


def _own_hidden(model: RewardModel, ids_L: Tensor) -> Tensor:
    """Hidden state of the last token of one sequence, `[1, D]`."""
    inputs = inputs_alone(model, ids_L)
    hidden_1D: Tensor = model.classifier.base_model(**inputs).last_hidden_state[:, -1]
    return hidden_1D
