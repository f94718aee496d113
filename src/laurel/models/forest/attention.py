"""Attention over a token forest, under unmodified Hugging Face decoders.

`register()` makes `laurel_forest` an attention implementation of transformers. The plan of the
forest travels as the keyword argument `forest_plan` of the model's forward, so there is no global
state, and activation checkpointing sees the same plan when it recomputes. A plan decides
which keys a query sees: `ForestPlan` here for whole sequences, those of `models/forest/decoding.py`
for generation.

In a forest, each trunk attends causally to itself, and each branch to its trunk and causally to
itself. Sliding windows, soft-capping and attention sinks arrive as keyword arguments from the
models that have them and are honoured by position. `ForestPlan.attend` chooses how it is computed,
the first of these that can do what a layer asks for:

- a cascade of flash kernels (`models/forest/cascade.py`): on CPUs without windows; on CUDA in half
  precision, with windows as well;
- FlexAttention, on CUDA: everything but dropout, in any precision but float64;
- segment by segment, each branch against `[trunk K/V ; own K/V]`, with a mask where one is needed:
  everything, wherever torch runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from transformers import AttentionInterface

from laurel.errors import ModelError
from laurel.models.forest.cascade import (
    Cascade,
    KeyCall,
    SpanCall,
    in_pieces,
    packed_calls,
)
from laurel.types import Tree

FOREST = "laurel_forest"
PLAN_ARGUMENT = "forest_plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Options of a layer's attention that its model passes."""

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
    """A rule of which keys each query of a forward pass sees."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute the attention of one layer.

        Args:
            module: The attention layer.
            query: `[1, H, T, D]`, rotated by position already.
            key: `[1, H_kv, T, D]`.
            value: `[1, H_kv, T, D_v]`.
            options: Options of the layer.

        Returns:
            `[1, H, T, D_v]`.
        """


class ForestPlan:
    """The plan of whole sequences: segments of trunks and branches, shared by all layers.

    One plan serves one micro-batch: indices and masks are made at first use and kept until it is
    dropped.
    """

    def __init__(self, trees: Sequence[Tree]) -> None:
        self.trees = tuple(trees)
        self.lengths: list[int] = []
        """Lengths of all segments in the order of the row: trunk, its branches, next trunk, ..."""
        # Tokens of the longest sequence: a trunk and one of its branches.
        self._longest = 0
        for tree in self.trees:
            branches = [branch.length for branch in tree.branches_G]
            self.lengths += [tree.trunk.length, *branches]
            self._longest = max(self._longest, tree.trunk.length + max(branches, default=0))
        self._calls: dict[tuple[object, ...], tuple[KeyCall, ...]] = {}
        self._blocks: dict[tuple[object, ...], BlockMask] = {}
        self._masks: dict[tuple[object, ...], Tensor] = {}

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Attend as `AttentionPlan.attend`. The result of filling tokens after the last tree is
        0.
        """
        query, key, value = as_computed(query, key, value)
        if options.sliding_window is not None and options.sliding_window >= self._longest:
            options = replace(options, sliding_window=None)
        if _suits_cascade(query, value, options):
            calls = self._cascade(query.device, options.sliding_window)
            rows = (t[0].transpose(0, 1) for t in (query, key, value))
            out: Tensor = Cascade.apply(*rows, calls, options.scaling)  # type: ignore[no-untyped-call]
            return out.transpose(0, 1)[None]
        num_tokens = sum(self.lengths)
        filling = query.shape[2] - num_tokens
        query, key, value = (t[:, :, :num_tokens] for t in (query, key, value))
        if _suits_flex(query, value, options):
            blocks = self.block_mask(query.device, options.sliding_window)
            kernel = compiled(flex_attention)
            found = attend_by_blocks(kernel, query, key, value, blocks, options)
        else:
            found = self.attend_by_segments(query, key, value, options)
        return F.pad(found, (0, 0, 0, filling)) if filling else found

    def _cascade(self, device: torch.device, window: int | None) -> tuple[KeyCall, ...]:
        # At most two calls on CUDA, whatever the number of trees and branches.
        known = (device, window)
        if known not in self._calls:
            calls: list[KeyCall]
            if device.type == "cpu":
                own, before = in_pieces(self.trees)
                calls = [SpanCall(own, is_causal=True), SpanCall(before, is_causal=False)]
            else:
                calls = packed_calls(self.trees, device, window)
            self._calls[known] = tuple(calls)
        return self._calls[known]

    def block_mask(self, device: torch.device, window: int | None) -> BlockMask:
        """Make FlexAttention's mask: by segment and position."""
        known = (device, window)
        if known not in self._blocks:
            numbers: list[tuple[int, int, int]] = []  # own segment, trunk's segment, position
            segment = 0
            for tree in self.trees:
                trunk, first = segment, tree.trunk.length
                numbers += [(trunk, trunk, position) for position in range(first)]
                for branch in tree.branches_G:
                    segment += 1
                    numbers += [(segment, trunk, first + i) for i in range(branch.length)]
                segment += 1
            columns = torch.tensor(numbers, dtype=torch.int32).T.contiguous()
            own, shared, position = columns.to(device, non_blocking=True).unbind()

            def sees(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
                is_kin = (own[key] == own[query]) | (own[key] == shared[query])
                return is_kin & ~hidden_keys(position[key], position[query], window)

            make = create_block_mask if device.type == "cpu" else compiled(create_block_mask)
            self._blocks[known] = make(sees, None, None, len(own), len(own), device=device)
        return self._blocks[known]

    def mask(
        self, num_queries: int, num_keys: int, window: int | None, like: Tensor
    ) -> Tensor | None:
        """Make the additive mask of queries that are the last of the keys; None if none is needed.

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

    def attend_by_segments(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attend one trunk or branch after the other: slower, and able to do everything."""
        key, value = _repeat_heads(query, key), _repeat_heads(query, value)
        queries = query.split_with_sizes(self.lengths, dim=2)
        keys = key.split_with_sizes(self.lengths, dim=2)
        values = value.split_with_sizes(self.lengths, dim=2)
        segments = _segments(self, queries, keys, values)
        return torch.cat([self._segment(q, k, v, options) for q, k, v in segments], dim=2)

    def attend_last(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attend with the last tokens of one sequence to all of it, by position.

        Args:
            query: `[1, H, L_q, D]`.
            key: `[1, H_kv, L, D]`, L at least L_q.
            value: `[1, H_kv, L, D_v]`.
            options: As in `AttentionPlan.attend`.
        """
        return self._segment(query, _repeat_heads(query, key), _repeat_heads(query, value), options)

    def _segment(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
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
    """Dispatch the attention of a layer to its plan: transformers calls it in every layer.

    Args:
        module: The attention layer.
        query: `[1, H, T, D]`, rotated by position already.
        key: `[1, H_kv, T, D]`.
        value: `[1, H_kv, T, D_v]`.
        attention_mask: Always None: the plan decides.
        forest_plan: The plan of this forward pass.
        scaling: Factor of the logits; this and the options below are those of `AttentionOptions`.
        dropout: Probability of dropping an attention weight.
        sliding_window: Number of latest positions a token sees.
        softcap: Limit of the logits.
        s_aux: Logits of attention sinks.

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


def as_computed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to the dtype that autocast gives to products, where it is on."""
    kind = tensors[0].device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


def _suits_cascade(query: Tensor, value: Tensor, options: AttentionOptions) -> bool:
    width = query.shape[-1]
    is_plain = options.dropout == 0.0 and options.softcap is None and options.s_aux is None
    if not is_plain or value.shape[-1] != width:
        return False
    if query.device.type == "cpu":
        return options.sliding_window is None
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return _is_gpu(query) and is_half and width % 8 == 0 and width <= 256


def _suits_flex(query: Tensor, value: Tensor, options: AttentionOptions) -> bool:
    is_wide = min(query.shape[-1], value.shape[-1]) >= 16
    is_exact = query.dtype == torch.float64
    return _is_gpu(query) and is_wide and not is_exact and options.dropout == 0.0


def _is_gpu(tensor: Tensor) -> bool:
    # Meta tensors stand for those of a GPU.
    return tensor.device.type in ("cuda", "meta")


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile FlexAttention: only compiled it is fast and has a backward pass."""
    return torch.compile(function)


def attend_by_blocks(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: BlockMask,
    options: AttentionOptions,
) -> Tensor:
    """Attend with FlexAttention. A sink takes its share of the weights afterwards."""
    softcap = options.softcap

    def cap(logit: Tensor, *_: Tensor) -> Tensor:
        return logit if softcap is None else softcap * torch.tanh(logit / softcap)

    out, aux = kernel(
        query,
        key,
        value,
        score_mod=None if softcap is None else cap,
        block_mask=blocks,
        scale=options.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if options.s_aux is None:
        return cast(Tensor, out)
    sinks = options.s_aux.to(aux.lse.dtype).view(1, -1, 1)
    return cast(Tensor, out * torch.sigmoid(aux.lse - sinks)[..., None].to(out.dtype))


def hidden_keys(keys: Tensor, queries: Tensor, window: int | None) -> Tensor:
    """Find the keys a query must not see: later ones, and those that its window has left.

    Args:
        keys: Their positions.
        queries: Positions of the queries, to be broadcast against those of the keys.
        window: Sliding window, as in `AttentionOptions`.
    """
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return hidden


def _segments(
    plan: ForestPlan, queries: Sequence[Tensor], keys: Sequence[Tensor], values: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    # Each trunk, then each of its branches with the trunk's keys and values before its own.
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
    repeats = query.shape[1] // shared.shape[1]
    return shared if repeats == 1 else shared.repeat_interleave(repeats, dim=1)


def _attend_by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    # The fused kernels lack capped logits and attention sinks. Softmax in float32, as the models
    # themselves do it, and in float64 where the weights are.
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


def register() -> None:
    """Register `laurel_forest` with transformers. Calling it again changes nothing.

    It registers no function that makes masks: then transformers makes none, and does not look at
    the positions for sequences that share a row, for which a host would wait for its device.
    """
    AttentionInterface.register(FOREST, cast(Any, forest_attention))
