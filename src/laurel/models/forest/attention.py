"""Computes attention over a token forest, with unmodified Hugging Face decoders.

`register()` makes `laurel_forest` an attention implementation of transformers. The plan of the
forest is passed as the keyword argument `forest_plan` of the model's forward, so there is no global
state, and activation checkpointing recomputes with the same plan. A plan decides which keys a query
attends to: `ForestPlan` for whole sequences, and those of `models/forest/decoding.py` for
generation.

In a token forest, a tree is a tree of runs of tokens: a prompt, stored once, with its completions,
or any sequences that begin alike. Each node attends to all nodes above it and causally to itself.
Models pass sliding windows, soft-capping and attention sinks as keyword arguments; windows count
positions within a sequence. `ForestPlan.attend` uses the first of these methods that supports what
a layer needs:

- a cascade of flash kernels: on CPUs, in layers without a sliding window; on CUDA in half
  precision, with or without one;
- FlexAttention, on CUDA: everything but dropout, in any precision but float64;
- segment by segment, each node against `[ancestors' K/V ; own K/V]`, with a mask if necessary:
  everything, on every device.

The cascade computes the own keys of all nodes in one call. As the descendants of a node are
adjacent, one further call for each depth computes all attention to the nodes at this depth: a
prompt with its completions has one. The results are merged by their log-sum-exps. The backward pass
calls the kernels' backward functions with the merged output and log-sum-exp, from which each call
computes the correct weights of its keys. So no token is copied, nothing is masked, and only
queries, keys, values, output and log-sum-exp of every distinct token are kept. `SpanCall` computes
one span after the other, on a CPU; `PackedCall` computes all spans in one kernel launch, on CUDA.
Tensors have the layout `[T, H, D]`, which the packed kernels require.

Its kernels are private operators of torch, called in this module alone: on CUDA
`aten::_flash_attention_forward` and `_flash_attention_backward`, whose arguments used here are the
same in torch 2.11 and 2.13. Torch's public `torch.nn.attention.varlen.varlen_attn` (since 2.10)
returns a log-sum-exp, too, but cannot take their place:

- Its backward pass takes the log-sum-exp for a constant, so results merged by it would have wrong
  gradients. The backward kernel, which needs the merged output and log-sum-exp, has no public name.
- Before our own backward pass it would have to be the flash kernel, which it does not promise: it
  has a branch for cuDNN, for whose log-sum-exp the flash kernel's backward pass is not made.
- Where no gradient is wanted it would be a second way to the same kernel: 2.10 has no scale and no
  window, 2.12 added `enable_gqa`, and the host needs 26 us more for a call, two calls a layer
  (`benchmarks/attention.py --host`).

`torch.nn.attention.activate_flash_attention_impl("FA4")` puts FlashAttention 4 behind both
operators, for the whole process; FlashAttention 4 refuses windows in torch 2.11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from transformers import AttentionInterface

from laurel.errors import ModelError
from laurel.types import Span, Tree

_aten = torch.ops.aten

CAUSAL_PIECE = 192
"""The number of tokens in one causal call of the CPU kernel.

The kernel computes whole blocks on the diagonal, whose size grows with the number of queries. In
such pieces, 2,048 tokens took 0.90 and 512 tokens 0.73 of the time of a single call.
"""

MOST_BATCHED = 2**11
"""The most numbers in the queries of a span that is computed in a batch: to copy more of them takes
longer than a call."""

Rows = slice | Tensor
"""Tokens of a row: a slice if they are adjacent, otherwise int64 indices."""


class Seen(NamedTuple):
    """A span of adjacent queries, and the spans of keys that they attend to."""

    queries: Span
    keys: tuple[Span, ...]


class Attended(NamedTuple):
    """The attention output of some queries for a part of their keys, to be merged with others."""

    queries: Rows
    out: Tensor
    """`[queries, H, D]`: the attention output."""
    lse: Tensor
    """`[H, queries]`: the log-sum-exp of the logits."""


class Gradients(NamedTuple):
    """The gradients of queries, keys and values that one `KeyCall` contributes."""

    queries: Rows
    keys: Rows
    by_query: Tensor
    by_key: Tensor
    by_value: Tensor


class KeyCall(Protocol):
    """Computes attention to a part of the keys, such as those of the shared prompts.

    In all methods, `q`, `k` and `v` are those of all tokens, `[T, H, D]`, and `scale` is the factor
    of the logits; None is `D ** -0.5`.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Iterator[Attended]:
        """Yield the attention of queries to this call's keys only; no query is yielded twice."""

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float | None,
    ) -> Iterator[Gradients]:
        """Yield the gradients through this call's keys.

        `grad`, `out` and `lse` are the gradient of the output, the output and the log-sum-exp over
        all keys.
        """


def own_keys(trees: Sequence[Tree]) -> list[Seen]:
    """Return, for each node, its own tokens as its keys."""
    return [Seen(span, (span,)) for span in _nodes(trees)]


def ancestor_keys(trees: Sequence[Tree]) -> list[list[Seen]]:
    """Return, for all descendants of each inner node, which are adjacent, the node as their keys.

    There is a list for each depth, in which no query comes twice; a prompt with its completions
    has one.
    """
    by_depth: list[list[Seen]] = []
    for tree in trees:
        nodes, exits = tree.nodes, tree.exits
        for node, depth in enumerate(tree.depths):
            if exits[node] > node + 1 and nodes[node].length:
                by_depth += [[] for _ in range(len(by_depth), depth + 1)]
                below = Span(nodes[node].end, nodes[exits[node] - 1].end)
                by_depth[depth].append(Seen(below, (nodes[node],)))
    return [seen for seen in by_depth if seen]


def in_pieces(trees: Sequence[Tree], size: int = CAUSAL_PIECE) -> tuple[list[Seen], list[Seen]]:
    """Split long nodes into pieces of at most `size` tokens.

    In short pieces the CPU kernel computes fewer products above the diagonal of the causal mask.

    Returns:
        Two lists. In the first, each piece attends causally to itself. In the second, queries
        attend to all their keys: nodes to their ancestors, and a piece to the earlier pieces of its
        own node.
    """
    own = []
    before = [seen for depth in ancestor_keys(trees) for seen in depth]
    for start, end in _nodes(trees):
        for first in range(start, end, size):
            piece = Span(first, min(first + size, end))
            own.append(Seen(piece, (piece,)))
            if first > start:
                before.append(Seen(piece, (Span(start, first),)))
    return own, before


def keys_in_window(trees: Sequence[Tree], window: int) -> list[Seen]:
    """Return, for each node, the keys that its tokens reach with a sliding window.

    A node reaches the last `window - 1` tokens of its ancestors, and itself; its later tokens reach
    fewer of them.
    """
    seen = []
    for tree in trees:
        for node, span in enumerate(tree.nodes):
            if not span.length:
                continue
            keys, room, above = [span], window - 1, tree.parents[node]
            while above >= 0 and room > 0:
                start, end = tree.nodes[above]
                reached = Span(max(start, end - room), end)
                if reached.length:
                    keys.insert(0, reached)
                room, above = room - reached.length, tree.parents[above]
            seen.append(Seen(span, tuple(keys)))
    return seen


def after(seen: Sequence[Seen], num_given: int) -> list[Seen]:
    """Return the queries behind the first `num_given` tokens, whose keys stand before the row."""
    return [
        Seen(Span(queries.start - num_given, queries.end - num_given), keys)
        for queries, keys in seen
        if queries.start >= num_given
    ]


def _nodes(trees: Sequence[Tree]) -> Iterator[Span]:
    return (span for tree in trees for span in tree.nodes if span.length)


class Cascade(torch.autograd.Function):
    """Computes a layer's attention as an autograd function, by merging calls with disjoint keys.

    The first call must cover all queries.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: tuple[KeyCall, ...], scale: float | None
    ) -> Tensor:
        """Return the attention output `[T, H, D]` of all tokens.

        Each call attends to a part of the keys, and the partial outputs are merged by their
        log-sum-exp. Together the calls cover every key that a token sees once.
        """
        out = q.new_zeros(q.shape)
        lse = q.new_empty(q.shape[1::-1], dtype=torch.promote_types(q.dtype, torch.float32))
        for part in calls[0].forward(q, k, v, scale):
            out[part.queries], lse[:, part.queries] = part.out, part.lse
        for call in calls[1:]:
            for part in call.forward(q, k, v, scale):
                # With more keys under the softmax, both results are averaged by their shares.
                before = lse[:, part.queries]
                share = torch.sigmoid(part.lse - before).T[..., None]
                merged = torch.lerp(
                    out[part.queries].to(share.dtype), part.out.to(share.dtype), share
                )
                out[part.queries] = merged.to(out.dtype)
                lse[:, part.queries] = torch.logaddexp(before, part.lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return the gradients of queries, keys and values; None for the other arguments."""
        q, k, v, out, lse = ctx.saved_tensors
        by_q, by_k, by_v = (
            torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)
        )
        for call in ctx.calls:
            for part in call.backward(grad, q, k, v, out, lse, ctx.scale):
                _add(by_q, part.queries, part.by_query)
                _add(by_k, part.keys, part.by_key)
                _add(by_v, part.keys, part.by_value)
        return by_q, by_k, by_v, None, None


def _add(total: Tensor, rows: Rows, part: Tensor) -> None:
    # Indices may come more than once.
    if isinstance(rows, slice):
        total[rows] += part
    elif total.device.type == "cpu":
        total.index_add_(0, rows, part)
    else:
        total.index_put_((rows,), part, accumulate=True)


class SpanCall:
    """Computes attention span by span with PyTorch's flash kernel for CPUs.

    Short spans of the same sizes are a batch, which one call of the kernel computes as it would
    compute each alone, to the bit. Alone, they would take it longer to begin than to compute.
    Grouped-query attention is supported.
    """

    def __init__(self, seen: Sequence[Seen], *, is_causal: bool, most: int = 0) -> None:
        """Set the spans.

        Args:
            seen: The queries and keys, with exactly one span of keys for each span of queries.
            is_causal: Whether a query attends only to keys up to its own index in the span.
            most: The largest number of queries, or of keys, of a span in a batch.
        """
        batches, alone = _batches(seen, most)
        self._pairs = [(slice(*queries), slice(*keys)) for queries, (keys,) in alone]
        self._is_causal = is_causal
        queries = [[pair.queries for pair in batch] for batch in batches]
        keys = [[pair.keys[0] for pair in batch] for batch in batches]
        self._queries = _BatchedSpans(queries)
        self._keys = self._queries if keys == queries else _BatchedSpans(keys)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Iterator[Attended]:
        """Yield the attention of queries to this call's keys only; no query is yielded twice."""
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu.default
        taken = zip(self._queries.take(q), self._keys.take(k), self._keys.take(v), strict=True)
        found = [kernel(*batch, 0.0, self._is_causal, scale=scale) for batch in taken]
        if found and self._is_causal:
            outs, lses = zip(*found, strict=True)
            lse = self._queries.put([one[..., None] for one in lses])[..., 0].T
            yield Attended(self._queries.rows, self._queries.put(outs), lse)
        elif found:
            # Each by itself: how sigmoids are rounded depends on what stands beside them.
            for spans, batch in zip(self._queries.slices, found, strict=True):
                for span, out, lse in zip(spans, *batch, strict=True):
                    yield Attended(span, out.transpose(0, 1), lse)
        q, k, v = (_heads_first(t) for t in (q, k, v))
        for rows, seen in self._pairs:
            out, lse = kernel(
                q[:, :, rows], k[:, :, seen], v[:, :, seen], 0.0, self._is_causal, scale=scale
            )
            yield Attended(rows, out[0].transpose(0, 1), lse[0])

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float | None,
    ) -> Iterator[Gradients]:
        """Yield the gradients through this call's keys.

        `grad`, `out` and `lse` are the gradient of the output, the output and the log-sum-exp over
        all keys.
        """
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        queries, keys = self._queries, self._keys
        if queries.slices:
            taken = zip(
                *(queries.take(grad), queries.take(q), keys.take(k), keys.take(v)),
                *(queries.take(out), queries.take(lse.T)),
                strict=True,
            )
            found = [kernel(*batch, 0.0, self._is_causal, scale=scale) for batch in taken]
            by_q, by_k, by_v = zip(*found, strict=True)
            yield Gradients(
                queries.rows, keys.rows, queries.put(by_q), keys.put(by_k), keys.put(by_v)
            )
        grad, q, k, v, out = (_heads_first(t) for t in (grad, q, k, v, out))
        for rows, seen in self._pairs:
            found = kernel(
                grad[:, :, rows],
                q[:, :, rows],
                k[:, :, seen],
                v[:, :, seen],
                out[:, :, rows],
                lse[None, :, rows],
                0.0,
                self._is_causal,
                scale=scale,
            )
            yield Gradients(rows, seen, *(t[0].transpose(0, 1) for t in found))


class _BatchedSpans:
    """Spans of tokens in batches, each of spans of one length."""

    def __init__(self, batches: Sequence[Sequence[Span]]) -> None:
        spans = [span for batch in batches for span in batch]
        self.slices = [[slice(*span) for span in batch] for batch in batches]
        self.rows: Rows = _rows(sorted(spans), torch.device("cpu")) if spans else slice(0, 0)
        """All tokens, in the order of the row."""
        self._shapes = [(len(batch), batch[0].length) for batch in batches]
        self._lengths = [count * length for count, length in self._shapes]
        numbers = [number for span in spans for number in range(*span)]
        self._index = torch.tensor(numbers, dtype=torch.int64)
        self._inverse = self._index.argsort()

    def take(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the tokens of each batch, of `[T, H, ...]`, as `[B, H, L, ...]`."""
        if self._lengths:
            taken = tensor.contiguous().index_select(0, self._index)
            parts = taken.split_with_sizes(self._lengths)
            for part, shape in zip(parts, self._shapes, strict=True):
                yield part.view(*shape, *part.shape[1:]).transpose(1, 2)

    def put(self, batches: Sequence[Tensor]) -> Tensor:
        """Return the tokens of `rows`, `[tokens, H, D]`, of `[B, H, L, D]` of each batch."""
        taken = torch.cat([batch.transpose(1, 2).flatten(0, 1) for batch in batches])
        return taken.index_select(0, self._inverse)


def _heads_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1)[None]


def _batches(seen: Sequence[Seen], most: int) -> tuple[list[list[Seen]], list[Seen]]:
    """Return spans of the same sizes in batches, and all others.

    In a batch is what no other span shares a token with, so that sums have the order they had.
    """
    shared = _overlapping([queries for queries, _ in seen])
    shared |= _overlapping([keys for _, (keys,) in seen])
    by_size: dict[tuple[int, int], list[int]] = {}
    for number, (queries, (keys,)) in enumerate(seen):
        if number not in shared and max(queries.length, keys.length) <= most:
            by_size.setdefault((queries.length, keys.length), []).append(number)
    batches = [numbers for numbers in by_size.values() if len(numbers) > 1]
    batched = {number for numbers in batches for number in numbers}
    alone = [pair for number, pair in enumerate(seen) if number not in batched]
    return [[seen[number] for number in numbers] for numbers in batches], alone


def _overlapping(spans: Sequence[Span]) -> set[int]:
    """Return the indices of the spans that share a token with others."""
    found: set[int] = set()
    order = sorted(range(len(spans)), key=spans.__getitem__)
    last = order[0] if order else 0
    for number in order[1:]:
        if spans[number].start < spans[last].end:
            found |= {last, number}
        if spans[number].end > spans[last].end:
            last = number
    return found


class PackedCall:
    """Computes all spans in one launch of the flash kernel for sequences of different lengths."""

    def __init__(
        self,
        seen: Sequence[Seen],
        device: torch.device,
        *,
        is_causal: bool,
        window: int | None = None,
    ) -> None:
        """Set the spans, and copy their indices to the device, once for all layers.

        Args:
            is_causal: Whether a query attends only to keys up to its own position; the last query
                and the last key of a `Seen` have the same position.
            window: The number of latest positions that a query attends to; None: all.
        """
        lengths = [pair.queries.length for pair in seen]
        key_lengths = [sum(span.length for span in pair.keys) for pair in seen]
        self._rows = _rows([pair.queries for pair in seen], device)
        self._seen = _rows([span for pair in seen for span in pair.keys], device)
        self._ends = (_ends(lengths, device), _ends(key_lengths, device))
        self._longest = (max(lengths), max(key_lengths))
        self._is_causal = is_causal and window is None  # a window says it by its right end
        self._options = (
            {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Iterator[Attended]:
        """Yield the attention of queries to this call's keys only; no query is yielded twice."""
        out, lse, *_ = _aten._flash_attention_forward(
            q[self._rows],
            k[self._seen],
            v[self._seen],
            *self._ends,
            *self._longest,
            0.0,
            self._is_causal,
            False,
            scale=scale,
            **self._options,
        )
        yield Attended(self._rows, out, lse)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float | None,
    ) -> Iterator[Gradients]:
        """Yield the gradients through this call's keys.

        `grad`, `out` and `lse` are the gradient of the output, the output and the log-sum-exp over
        all keys.
        """
        nothing = torch.zeros(2, dtype=torch.uint64, device=q.device)  # no dropout, no state of it
        found = _aten._flash_attention_backward(
            grad[self._rows],
            q[self._rows],
            k[self._seen],
            v[self._seen],
            out[self._rows],
            lse[:, self._rows].contiguous(),
            *self._ends,
            *self._longest,
            0.0,
            self._is_causal,
            nothing,
            nothing[:0],
            scale=scale,
            **self._options,
        )
        yield Gradients(self._rows, self._seen, *found)


def packed_calls(
    trees: Sequence[Tree], device: torch.device, window: int | None, *, num_given: int = 0
) -> list[KeyCall]:
    """Return the calls of flash kernels that compute a layer on CUDA: at most 1 + the depth.

    Without a sliding window, one call computes the attention of each node to itself, and one call
    for each depth that of all nodes below to their ancestors at this depth: two calls where all
    trees are prompts with their completions. With a window there is one call. For it, the last keys
    of a node's ancestors (at most `window - 1`) are copied in front of its own.

    Args:
        window: The number of latest positions that a query attends to; None for no limit.
        num_given: The number of keys and values that stand before those of the row.
    """
    if window is not None:
        seen = after(keys_in_window(trees, window), num_given)
        return [PackedCall(seen, device, is_causal=True, window=window)]
    own = PackedCall(after(own_keys(trees), num_given), device, is_causal=True)
    before = (after(seen, num_given) for seen in ancestor_keys(trees))
    return [own, *(PackedCall(seen, device, is_causal=False) for seen in before)]


def _rows(spans: Sequence[Span], device: torch.device) -> Rows:
    if all(one.end == other.start for one, other in pairwise(spans)):
        return slice(spans[0].start, spans[-1].end)
    return torch.cat([torch.arange(*span) for span in spans]).to(device, non_blocking=True)


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    # int32: the beginning of each sequence, and the end of the last one.
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return ends.to(device, non_blocking=True)


FOREST = "laurel_forest"
PLAN_ARGUMENT = "forest_plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """The scale, dropout, window, soft-cap and sinks that a model passes to a layer's attention."""

    scaling: float | None = None
    """The factor of the logits; None means `D ** -0.5`."""
    dropout: float = 0.0
    """The probability of dropping an attention weight."""
    sliding_window: int | None = None
    """The number of latest positions to which a token attends, including itself."""
    softcap: float | None = None
    """The limit of the logits, which become `softcap * tanh(logits / softcap)` (Gemma 2)."""
    s_aux: Tensor | None = None
    """The logits `[H]` of attention sinks (gpt-oss)."""


class AttentionPlan(Protocol):
    """A rule that decides to which keys each query of a forward pass attends."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute the attention of one layer for all tokens of a packed row (batch size 1).

        H and H_kv are the numbers of query and key heads, T is the number of tokens, and D and D_v
        are the sizes of heads.

        Args:
            query: The queries `[1, H, T, D]`, after rotary embedding.
            key: The keys `[1, H_kv, T, D]`, after rotary embedding.
            value: The values `[1, H_kv, T, D_v]`.

        Returns:
            The attention output `[1, H, T, D_v]`.
        """


class ForestPlan:
    """Decides which keys each query of a token forest attends to, in all layers of a micro-batch.

    It is for forward passes over whole sequences, such as in training and scoring. Each node of a
    tree attends to all nodes above it, and causally to itself. Indices and masks are created at
    their first use, and kept.
    """

    def __init__(
        self, trees: Sequence[Tree], *, read_X: Tensor | None = None, has_root: bool = True
    ) -> None:
        """Arrange the trees of a row.

        Args:
            trees: The trees, in the order of the row.
            read_X: int64, the tokens whose hidden states the caller reads, each once; None for
                all. Those of other tokens may be wrong after the last layer (`UnreadTokens`).
            has_root: Whether the row has the tokens of the root. Without them there is one tree,
                the keys and values of whose root stand before those of the row.
        """
        self.trees = tuple(trees)
        self.read_X = read_X
        self.num_given = 0 if has_root else trees[0].nodes[0].length
        """The number of keys and values that stand before those of the row."""
        self.lengths: list[int] = []
        """The lengths of all nodes in order of the row."""
        # The length of the longest sequence.
        self._longest = 0
        for tree in self.trees:
            lengths = [node.length for node in tree.nodes]
            self.lengths += lengths
            self._longest = max(self._longest, *map(sum, zip(tree.starts, lengths, strict=True)))
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
        """Compute attention as `AttentionPlan.attend` describes.

        The output for padding tokens after the last tree is 0.
        """
        query, key, value = as_computed(query, key, value)
        if options.sliding_window is not None and options.sliding_window >= self._longest:
            options = replace(options, sliding_window=None)
        if _suits_cascade(query, value, options):
            calls = self._cascade(
                query.device, options.sliding_window, query.shape[1] * query.shape[3]
            )
            rows = (t[0].transpose(0, 1) for t in (query, key, value))
            out: Tensor = Cascade.apply(*rows, calls, options.scaling)  # type: ignore[no-untyped-call]
            return out.transpose(0, 1)[None]
        num_tokens = sum(self.lengths)
        filling = query.shape[2] + self.num_given - num_tokens
        query = query[:, :, : num_tokens - self.num_given]
        key, value = (t[:, :, :num_tokens] for t in (key, value))
        if _suits_flex(query, value, options):
            blocks = self.block_mask(query.device, options.sliding_window)
            kernel = compiled(flex_attention)
            found = attend_by_blocks(kernel, query, key, value, blocks, options)
        else:
            found = self.attend_by_segments(query, key, value, options)
        return F.pad(found, (0, 0, 0, filling)) if filling else found

    def _cascade(self, device: torch.device, window: int | None, width: int) -> tuple[KeyCall, ...]:
        # On CUDA at most one call more than the trees are deep, whatever their number.
        known = (device, window, width)
        if known not in self._calls:
            calls: list[KeyCall]
            if device.type == "cpu":
                own, before = (after(seen, self.num_given) for seen in in_pieces(self.trees))
                most = MOST_BATCHED // width
                calls = [
                    SpanCall(own, is_causal=True, most=most),
                    SpanCall(before, is_causal=False, most=most),
                ]
            else:
                calls = packed_calls(self.trees, device, window, num_given=self.num_given)
            self._calls[known] = tuple(calls)
        return self._calls[known]

    def block_mask(self, device: torch.device, window: int | None) -> BlockMask:
        """Return FlexAttention's mask of the keys that each query attends to.

        A query attends to the tokens of its own node up to itself, and to all of the nodes above.
        In depth-first order, the nodes that see a node are those from itself up to the next that is
        no descendant.

        Args:
            window: The number of latest positions that a query attends to, including its own; None
                for no limit.
        """
        known = (device, window)
        if known not in self._blocks:
            numbers: list[tuple[int, int, int]] = []  # node, first that is none below, position
            first = 0
            for tree in self.trees:
                for node, rule in enumerate(zip(tree.nodes, tree.starts, tree.exits, strict=True)):
                    span, start, last = rule
                    here = (first + node, first + last)
                    numbers += [(*here, start + i) for i in range(span.length)]
                first += len(tree.nodes)
            columns = torch.tensor(numbers, dtype=torch.int32).T.contiguous()
            enter, leave, position = columns.to(device, non_blocking=True).unbind()
            own_enter, own_position = enter[self.num_given :], position[self.num_given :]

            def sees(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
                is_kin = (enter[key] <= own_enter[query]) & (own_enter[query] < leave[key])
                return is_kin & ~hidden_keys(position[key], own_position[query], window)

            make = create_block_mask if device.type == "cpu" else compiled(create_block_mask)
            self._blocks[known] = make(sees, None, None, len(own_enter), len(enter), device=device)
        return self._blocks[known]

    def mask(
        self, num_queries: int, num_keys: int, window: int | None, like: Tensor
    ) -> Tensor | None:
        """Return the additive mask for queries that are the last tokens of a sequence.

        Query `i` has the position `num_keys - num_queries + i`. It attends to the keys at positions
        up to its own and, with a window `w`, above its own minus `w`.

        Args:
            num_keys: The number of keys: all tokens of the sequence.
            like: A tensor with the dtype and device of the mask.

        Returns:
            `[num_queries, num_keys]` of 0 and -inf. None if nothing is hidden, or if the mask is
            square and causal without a window, for which kernels have a faster option.
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
        """Compute attention one node at a time.

        A node attends to the keys of its ancestors, followed by its own. This is slower than flash
        kernels and FlexAttention, but supports all options on every device.

        Args:
            query: The queries `[1, H, T, D]` of the forest.
            key: The keys `[1, H_kv, T, D]`.
            value: The values `[1, H_kv, T, D_v]`.
        """
        key, value = _repeat_heads(query, key), _repeat_heads(query, value)
        own = [0, *self.lengths[1:]] if self.num_given else self.lengths
        queries = query.split_with_sizes(own, dim=2)
        keys = key.split_with_sizes(self.lengths, dim=2)
        values = value.split_with_sizes(self.lengths, dim=2)
        segments = _segments(self, queries, keys, values)
        return torch.cat([self._segment(q, k, v, options) for q, k, v in segments], dim=2)

    def attend_last(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Compute the causal attention of the last tokens of a sequence to the whole sequence.

        Args:
            query: The queries `[1, H, L_q, D]` of the last tokens.
            key: The keys `[1, H_kv, L, D]` of the sequence; L is at least L_q.
            value: The values `[1, H_kv, L, D_v]`.
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
    """Compute the attention of a layer; transformers calls this function in every layer.

    Args:
        query: The queries `[1, H, T, D]`, after rotary embedding.
        key: The keys `[1, H_kv, T, D]`, after rotary embedding.
        value: The values `[1, H_kv, T, D_v]`.
        attention_mask: Always None, because `forest_plan` decides what is masked.
        forest_plan: Decides which keys each query attends to. The caller of the model passes it as
            a keyword argument of the forward pass.
        scaling: The factor of the logits; it and the arguments below are the fields of
            `AttentionOptions`.

    Returns:
        The attention output `[1, T, H, D_v]`, and None instead of the attention weights.

    Raises:
        ModelError: `forest_plan` is None.
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
    """Cast tensors to the dtype of autocast; return them unchanged if autocast is off."""
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


VARIANTS = 64
"""How many compiled variants of one function may exist: one for each layer window, dtype, precision
of a model, kind of lengths, and with and without gradients."""


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of FlexAttention; uncompiled, it is slow and has no backward pass.

    The compiler keeps 8 variants of a function and runs it uncompiled after that, with whole
    matrices of scores and a warning. A Gemma 2 in training and sampling needs 16. More than
    `VARIANTS` are an error, as the whole function is one graph.
    """
    allow_variants()
    return torch.compile(function, fullgraph=True)


def allow_variants() -> None:
    """Let the compiler keep `VARIANTS` variants of a function."""
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, VARIANTS)


def attend_by_blocks(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: BlockMask,
    options: AttentionOptions,
) -> Tensor:
    """Compute attention with FlexAttention.

    Args:
        kernel: The compiled `flex_attention`.
        query: The queries `[1, H, T, D]`.
        key: The keys `[1, H_kv, T, D]`.
        value: The values `[1, H_kv, T, D_v]`.
        options: The options of the layer. Attention sinks are applied to the output.
    """
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
    """Return a mask of the keys to which each query must not attend.

    These are the keys later than the query, and those before its sliding window.

    Args:
        queries: The positions of the queries, in a shape that broadcasts against the keys.
        window: The sliding window, as in `AttentionOptions`; None for no window.
    """
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return hidden


def _segments(
    plan: ForestPlan, queries: Sequence[Tensor], keys: Sequence[Tensor], values: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    # Yields each node with the keys and values of all nodes above it before its own.
    first = 0
    for tree in plan.trees:
        for node in range(len(tree.nodes)):
            if not queries[first + node].shape[2]:
                continue
            path = [first + above for above in tree.path(node) if tree.nodes[above].length]
            k, v = keys[path[0]], values[path[0]]
            if len(path) > 1:
                k, v = (torch.cat([some[i] for i in path], dim=2) for some in (keys, values))
            yield queries[first + node], k, v
        first += len(tree.nodes)


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
    # The fused kernels lack capped logits and attention sinks. Softmax is computed in float32, as
    # the models do it, or in float64 if the weights are.
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
    """Register `forest_attention` with transformers as the implementation `laurel_forest`.

    Further calls do nothing. No mask function is registered, so transformers creates no masks. It
    also does not search the positions for packed sequences, for which the host would have to wait
    for the GPU.
    """
    implementations: Any = AttentionInterface  # it has no types
    if FOREST not in implementations():  # compiled models have one of their own
        implementations.register(FOREST, forest_attention)
