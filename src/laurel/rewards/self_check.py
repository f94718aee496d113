"""What a loaded model must show before it is used: in a batch it gives what it gives alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laurel.data.forest import pad, plant
from laurel.errors import ModelError
from laurel.models.reward_model import RewardModel
from laurel.types import PaddedRows, TokenForest, TokenGroup

TOLERANCE = 1e-4
"""Allowed difference between hidden states in a batch and alone, relative to their size. Rounding
in float32 makes about 1e-6; a key too many or a position off by one shows as 1e-3 and more even in
an untrained model."""
LOW_PRECISION_TOLERANCE = 0.1
"""The same for weights in bfloat16 or float16, whose rounding alone reaches a few hundredths."""

WINDOW = 6
"""Sliding windows are this narrow during the check, shorter than its texts."""


def check_paths(model: RewardModel, *, seed: int = 0) -> float:
    """Compare a small batch on the model's path with the model's own forward pass, one by one.

    Hidden states are compared, because a new head makes every score small, and then scores with
    those that Hugging Face's class returns by itself.

    Returns:
        The largest relative difference found.

    Raises:
        ModelError: They disagree, so batches would give wrong scores.
    """
    kind = type(model.classifier).__name__
    groups = _probe(model, seed)
    was_training, dtype = model.training, model.weights_dtype
    model.eval()
    try:
        with torch.inference_mode(), model.in_full_precision(), _narrow_windows(model):
            difference = _largest_difference(model, groups)
    except (TypeError, ModelError) as error:
        raise ModelError(f"{kind} cannot be given a batch ({error}). {_remedy(model)}") from error
    finally:
        model.train(was_training)
    if difference is None:
        raise ModelError(
            f"{kind} gives scores that are NaN or infinite: its weights are damaged, or its "
            f"numbers leave the range of {str(dtype).removeprefix('torch.')}"
        )
    tolerance = LOW_PRECISION_TOLERANCE if dtype.itemsize < 4 else TOLERANCE
    if not difference <= tolerance:
        raise ModelError(
            f"{kind} gives a conversation another score in a batch than alone (relative difference "
            f"{difference:.3g}, allowed {tolerance:.3g}). {_remedy(model)}"
        )
    return difference


def _remedy(model: RewardModel) -> str:
    if model.path == "forest":
        return (
            "This architecture needs the padded path: set policy.sequence_packing.enabled=false, "
            "and please report the model."
        )
    return "It cannot be used as a reward model; please report it."


def _largest_difference(model: RewardModel, groups: Sequence[TokenGroup]) -> float | None:
    """Between the batch and one by one; None where the latter is not finite."""
    rows = [np.concatenate((g.trunk_ids, ids)) for g in groups for ids in g.branches_ids_G]
    batch = _lay_out(model, groups)
    scores_NK = model(batch).double()
    if model.head_name is None:
        own_NK = torch.cat([_own_scores(model, ids) for ids in rows]).double()
        if not own_NK.isfinite().all():
            return None
        return float((scores_NK - own_NK).abs().max() / own_NK.abs().max().clamp_min(1e-12))
    hidden_ND = model.last_hidden(batch).double()
    with _own_attention(model):
        own_NK = torch.cat([_own_scores(model, ids) for ids in rows]).double()
        own_ND = torch.cat([_own_hidden(model, ids) for ids in rows]).double()
    if not (own_NK.isfinite().all() and own_ND.isfinite().all()):
        return None
    size_N = own_ND.norm(dim=1).clamp_min(1e-12)
    head_K = getattr(model.classifier, model.head_name).weight.double().norm(dim=1)
    hidden = ((hidden_ND - own_ND).norm(dim=1) / size_N).max()
    scores = ((scores_NK - own_NK).abs() / (size_N[:, None] * head_K).clamp_min(1e-12)).max()
    return float(torch.maximum(hidden, scores))


def _lay_out(model: RewardModel, groups: Sequence[TokenGroup]) -> TokenForest | PaddedRows:
    return plant(groups) if model.path == "forest" else pad(groups, pad_id=_pad_id(model))


def _own_scores(model: RewardModel, ids: np.ndarray) -> Tensor:
    """What the Hugging Face class returns for one sequence, `[1, K]`."""
    scores_1K: Tensor = model.classifier(**_inputs(model, ids)).logits
    return scores_1K


def _own_hidden(model: RewardModel, ids: np.ndarray) -> Tensor:
    """Hidden state of the last token of one sequence, `[1, D]`."""
    hidden_1D: Tensor = model.classifier.base_model(**_inputs(model, ids)).last_hidden_state[:, -1]
    return hidden_1D


def _inputs(model: RewardModel, ids: np.ndarray) -> dict[str, Tensor]:
    ids_1L = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
    return {"input_ids": ids_1L, "attention_mask": torch.ones_like(ids_1L)}


@contextmanager
def _own_attention(model: RewardModel) -> Iterator[None]:
    """The plainest attention the model brings, where batches use ours."""
    implementation = model.classifier.config._attn_implementation
    if model.path == "forest":
        model.classifier.set_attn_implementation("eager")
    try:
        yield
    finally:
        if model.path == "forest":
            model.classifier.set_attn_implementation(implementation)


@contextmanager
def _narrow_windows(model: RewardModel) -> Iterator[None]:
    """Sliding windows shorter than the probe.

    A model that narrows only its masks, and does not tell its attention of the window, would
    otherwise pass, and go wrong on the first text longer than its window.
    """
    holders: list[Any] = [model.classifier.config.get_text_config(), *model.classifier.modules()]
    wide = [(h, vars(h)["sliding_window"]) for h in holders if "sliding_window" in vars(h)]
    wide = [(holder, window) for holder, window in wide if type(window) is int and window > WINDOW]
    try:
        if model.path == "forest":
            for holder, _ in wide:
                holder.sliding_window = WINDOW
        yield
    finally:
        for holder, window in wide:
            holder.sliding_window = window


def _pad_id(model: RewardModel) -> int:
    return int(model.classifier.config.get_text_config().pad_token_id or 0)


def _probe(model: RewardModel, seed: int) -> list[TokenGroup]:
    """Two groups of random tokens; none is padding, by which Hugging Face finds the last one."""
    rng = np.random.default_rng(seed)
    num_tokens = model.classifier.get_input_embeddings().num_embeddings
    pad_id = _pad_id(model)

    def ids(length: int) -> np.ndarray:
        drawn = rng.integers(0, num_tokens - 1, length)
        return (drawn + (drawn >= pad_id)).astype(np.int32)

    return [
        TokenGroup(id="a", trunk_ids=ids(11), branches_ids_G=(ids(5), ids(1), ids(8))),
        TokenGroup(id="b", trunk_ids=ids(0), branches_ids_G=(ids(7),)),
    ]
