"""Attention over a token forest, under unmodified Hugging Face decoders.

`register()` makes `laurel_forest` an attention implementation of transformers. The plan of the
forest travels as the keyword argument `forest_plan` of the model's forward, so there is no global
state, and activation checkpointing sees the same plan when it recomputes. A plan decides who
attends to whom: `ForestPlan` here for whole sequences, those of `models/forest/decoding.py` for
generation.

In a forest, each trunk attends causally to itself; each branch attends to
`[trunk K/V ; own K/V]`, its queries aligned with the end of the keys. Every call is a plain scaled
dot product, so this runs forward and backward wherever torch does. Sliding windows, soft-capping
and attention sinks arrive as keyword arguments from the models that have them and are honoured by
position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from laurel.errors import ModelError
from laurel.types import Tree

FOREST = "laurel_forest"
PLAN_ARGUMENT = "forest_plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What the model of a layer asks of its attention."""

    scaling: float | None
    """Factor of the logits; None means `D ** -0.5`."""
    dropout: float
    """Probability of dropping an attention weight."""
    sliding_window: int | None
    """Number of latest positions a token sees, itself included."""
    softcap: float | None
    """Logits are squashed to `softcap * tanh(logits / softcap)` (Gemma 2)."""
    s_aux: Tensor | None
    """`[H]` logits of attention sinks (gpt-oss)."""


class AttentionPlan(Protocol):
    """Who attends to whom in one forward pass of the model."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """The attention of one layer.

        Args:
            module: The attention layer.
            query: `[1, H, T, D]`, rotated by position already.
            key: `[1, H_kv, T, D]`.
            value: `[1, H_kv, T, D_v]`.
            options: What the model asks for.

        Returns:
            `[1, H, T, D_v]`.
        """


class ForestPlan:
    """Where each trunk and branch lies, and the masks that all layers share.

    One plan serves one micro-batch: masks are made at first use and kept until it is dropped.
    """

    def __init__(self, trees: Sequence[Tree]) -> None:
        self.trees = tuple(trees)
        self.lengths: list[int] = []
        """Lengths of all segments in the order of the row: trunk, its branches, next trunk, ..."""
        for tree in self.trees:
            self.lengths.append(tree.trunk.length)
            self.lengths.extend(branch.length for branch in tree.branches_G)
        self._masks: dict[tuple[object, ...], Tensor] = {}

    def mask(
        self, num_queries: int, num_keys: int, window: int | None, like: Tensor
    ) -> Tensor | None:
        """Additive mask of queries that are the last of the keys; None where none is needed.

        Query `i` sits at position `num_keys - num_queries + i` and sees the keys at positions up
        to its own and, with a window `w`, later than its own minus `w`.

        Returns:
            `[num_queries, num_keys]` of 0 and -inf in the dtype of `like`, or None for the square
            causal case without a window, which the kernels do faster by themselves.
        """
        if window is not None and window >= num_keys:
            window = None
        if window is None and num_queries in (1, num_keys):
            return None
        key = (num_queries, num_keys, window, like.dtype, like.device)
        if key not in self._masks:
            keys = torch.arange(num_keys, device=like.device)
            queries = keys[num_keys - num_queries :, None]
            hidden = hidden_keys(keys, queries, window)
            blank = torch.zeros(num_queries, num_keys, dtype=like.dtype, device=like.device)
            self._masks[key] = blank.masked_fill_(hidden, float("-inf"))
        return self._masks[key]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """See `AttentionPlan`."""
        key, value = _repeat_heads(query, key), _repeat_heads(query, value)
        queries = query.split_with_sizes(self.lengths, dim=2)
        keys = key.split_with_sizes(self.lengths, dim=2)
        values = value.split_with_sizes(self.lengths, dim=2)
        segments = _segments(self, queries, keys, values)
        return torch.cat([self._segment(q, k, v, options) for q, k, v in segments], dim=2)

    def _segment(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Causal attention of queries that are the last of the keys."""
        mask = self.mask(q.shape[2], k.shape[2], options.sliding_window, q)
        if options.softcap is not None or options.s_aux is not None:
            return _attend_by_hand(q, k, v, mask, options)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=options.dropout,
            is_causal=mask is None and q.shape[2] > 1,
            scale=options.scaling,
        )


def forest_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forest_plan: AttentionPlan | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer.

    Args:
        module: The attention layer.
        query: `[1, H, T, D]`, rotated by position already.
        key: `[1, H_kv, T, D]`.
        value: `[1, H_kv, T, D_v]`.
        attention_mask: Always None: the plan says who sees whom.
        forest_plan: The plan of this forward pass.
        scaling: See `AttentionOptions`, as for all that follow.
        dropout: See there.
        sliding_window: See there.
        softcap: See there.
        s_aux: See there.

    Returns:
        `[1, T, H, D_v]`, and None for the weights.
    """
    if forest_plan is None:
        raise ModelError(
            "the model was loaded for token forests and called without a plan: call it through "
            "RewardModel or PolicyModel, or switch it with model.set_attn_implementation('sdpa')"
        )
    options = AttentionOptions(
        scaling=scaling,
        dropout=dropout,
        sliding_window=sliding_window,
        softcap=softcap,
        s_aux=s_aux,
    )
    return forest_plan.attend(module, query, key, value, options).transpose(1, 2), None


def hidden_keys(keys: Tensor, queries: Tensor, window: int | None) -> Tensor:
    """Which keys a query must not see: later ones, and those that its window has left.

    Args:
        keys: Their positions.
        queries: Positions of the queries, to be broadcast against those of the keys.
        window: See `AttentionOptions.sliding_window`.
    """
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return hidden


def _segments(
    plan: ForestPlan, queries: Sequence[Tensor], keys: Sequence[Tensor], values: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each trunk, then each of its branches with the trunk's keys and values before its own."""
    segment = 0
    for tree in plan.trees:
        trunk = segment
        if tree.trunk.length:
            yield queries[trunk], keys[trunk], values[trunk]
        for _branch in tree.branches_G:
            segment += 1
            k, v = keys[segment], values[segment]
            if tree.trunk.length:
                k, v = torch.cat((keys[trunk], k), dim=2), torch.cat((values[trunk], v), dim=2)
            yield queries[segment], k, v
        segment += 1


def _repeat_heads(query: Tensor, shared: Tensor) -> Tensor:
    """Give every query head its own copy of the key or value head it shares."""
    repeats = query.shape[1] // shared.shape[1]
    return shared if repeats == 1 else shared.repeat_interleave(repeats, dim=1)


def _attend_by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """What the fused kernels cannot do: capped logits and attention sinks.

    Softmax in float32, as the models themselves do it, and in float64 where the weights are.
    """
    logits = (query @ key.transpose(2, 3)) * (
        query.shape[-1] ** -0.5 if options.scaling is None else options.scaling
    )
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    if mask is not None:
        logits = logits + mask
    elif query.shape[2] > 1:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(hidden, float("-inf"))
    if options.s_aux is not None:
        sinks = options.s_aux.reshape(1, -1, 1, 1).expand(logits.shape[0], -1, logits.shape[2], 1)
        logits = torch.cat((logits, sinks.to(logits.dtype)), dim=-1)
    precise = torch.promote_types(logits.dtype, torch.float32)
    weights = logits.softmax(dim=-1, dtype=precise).to(value.dtype)
    if options.s_aux is not None:
        weights = weights[..., :-1]
    return F.dropout(weights, p=options.dropout, training=options.dropout > 0.0) @ value


def _no_mask(*_: Any, **__: Any) -> None:
    """The plan replaces the masks that transformers would build."""
    return None


def register() -> None:
    """Make `laurel_forest` known to transformers. Calling it again changes nothing."""
    AttentionInterface.register(FOREST, cast(Any, forest_attention))
    AttentionMaskInterface.register(FOREST, cast(Any, _no_mask))
