"""A small batch that every loaded model must answer as it answers its sequences one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laurel.errors import ModelError, key_of
from laurel.models.decoder import Decoder, Path
from laurel.types import PaddedRows, Span, TokenForest, Tree

TOLERANCE = 1e-4
"""Allowed difference between hidden states in a batch and alone, relative to their size. Rounding
in float32 makes about 1e-6; a key too many or a position off by one shows as 1e-3 and more even in
an untrained model."""
LOW_PRECISION_TOLERANCE = 0.1
"""The same for weights in bfloat16 or float16, whose rounding alone reaches a few hundredths."""

WINDOW = 6
"""Sliding windows are this narrow during the check, shorter than its texts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """The same sequences as a forest, as rows, and one by one."""

    forest: TokenForest
    rows: PaddedRows
    sequences_N: tuple[Tensor, ...]
    """int64 [L] each."""

    def batch(self, path: Path) -> TokenForest | PaddedRows:
        """All of them, for a model of this path."""
        return self.forest if path == "forest" else self.rows


def draw_probe(model: Decoder, shapes: Sequence[tuple[int, Sequence[int]]], *, seed: int) -> Probe:
    """Random tokens; none is padding, by which Hugging Face finds the last one.

    Args:
        model: It says which tokens there are.
        shapes: Length of the trunk and of each branch, tree by tree.
        seed: Seeds the tokens.
    """
    pad_id = int(model.network.config.get_text_config().pad_token_id or 0)
    num_tokens = model.network.get_input_embeddings().num_embeddings
    total = sum(trunk + sum(branches) for trunk, branches in shapes)
    generator = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(0, num_tokens - 1, (total,), generator=generator)
    ids_T += ids_T >= pad_id
    trees, sequences, starts, positions, end = [], [], [], [], 0
    for trunk_length, branch_lengths in shapes:
        trunk = Span(end, end + trunk_length)
        end = trunk.end
        positions.append(torch.arange(trunk_length))
        branches = []
        for length in branch_lengths:
            branches.append(Span(end, end + length))
            sequences.append(torch.cat((ids_T[slice(*trunk)], ids_T[end : end + length])))
            positions.append(torch.arange(trunk_length, trunk_length + length))
            starts.append(trunk_length)
            end += length
        trees.append(Tree(trunk, tuple(branches)))
    rows = PaddedRows(
        ids_NL=torch.nn.utils.rnn.pad_sequence(
            sequences, batch_first=True, padding_value=float(pad_id)
        ),
        lengths_N=torch.tensor([len(ids) for ids in sequences]),
        starts_N=torch.tensor(starts),
    )
    forest = TokenForest(ids_T=ids_T, positions_T=torch.cat(positions), trees=tuple(trees))
    return Probe(forest=forest, rows=rows, sequences_N=tuple(sequences))


def check_batches(
    model: Decoder, difference: Callable[[], float | None], *, what: str, role: str
) -> float:
    """Run a comparison in full precision, with narrow windows and without dropout; judge it.

    Args:
        model: Is as it was afterwards.
        difference: Between a batch and one by one, relative; None where the latter is not finite.
        what: What the model gives.
        role: What it is loaded as.

    Returns:
        The difference.

    Raises:
        ModelError: It is too large, or the model cannot be given a batch.
    """
    kind = type(model.network).__name__
    was_training, dtype = model.training, model.weights_dtype
    remedy = f"It cannot be used as a {role}; please report it."
    if model.path == "forest":
        remedy = (
            "This architecture needs the padded path: set "
            f"{key_of('policy.sequence_packing.enabled')}=false, "
            "and please report the model."
        )
    model.eval()
    try:
        with model.without_gradients(), model.in_full_precision(), _narrow_windows(model):
            found = difference()
    except (TypeError, ModelError) as error:
        raise ModelError(f"{kind} cannot be given a batch ({error}). {remedy}") from error
    finally:
        model.train(was_training)
    if found is None:
        raise ModelError(
            f"{kind} gives {what}s that are NaN or infinite: its weights are damaged, or its "
            f"numbers leave the range of {str(dtype).removeprefix('torch.')}"
        )
    tolerance = LOW_PRECISION_TOLERANCE if dtype.itemsize < 4 else TOLERANCE
    if not found <= tolerance:
        raise ModelError(
            f"{kind} gives a conversation another {what} in a batch than alone (relative "
            f"difference {found:.3g}, allowed {tolerance:.3g}). {remedy}"
        )
    return found


def inputs_alone(model: Decoder, ids_L: Tensor) -> dict[str, Tensor]:
    """The keyword arguments of transformers' models for one sequence."""
    ids_1L = ids_L[None].to(model.device)
    return {"input_ids": ids_1L, "attention_mask": torch.ones_like(ids_1L)}


@contextmanager
def own_attention(model: Decoder) -> Iterator[None]:
    """The plainest attention the model brings, where batches use ours."""
    implementation = model.network.config._attn_implementation
    if model.path == "forest":
        model.network.set_attn_implementation("eager")
    try:
        yield
    finally:
        if model.path == "forest":
            model.network.set_attn_implementation(implementation)


@contextmanager
def _narrow_windows(model: Decoder) -> Iterator[None]:
    """Sliding windows shorter than the probe.

    A model that narrows only its masks, and does not tell its attention of the window, would
    otherwise pass, and go wrong on the first text longer than its window.
    """
    holders: list[Any] = [model.network.config.get_text_config(), *model.network.modules()]
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
