"""Computes attention over a token forest with plain flash kernels, which know no trees or masks.

A tree of the forest is a tree of runs of tokens, in depth-first order. A query attends to two kinds
of keys: all those of the nodes above its own, and those of its own node up to itself. One call
computes the own keys of all nodes. As the descendants of a node are adjacent, one further call for
each depth computes all attention to the nodes at this depth: a prompt with its completions has one.
The results are merged by their log-sum-exps. The backward pass calls the kernels' backward
functions with the merged output and log-sum-exp, from which each call computes the correct weights
of its keys. So no token is copied, nothing is masked, and only queries, keys, values, output and
log-sum-exp of every distinct token are kept.

`SpanCall` computes one span after the other, on a CPU; `PackedCall` computes all spans in one
kernel launch, on CUDA. Tensors have the layout `[T, H, D]`, which the packed kernels require.

The kernels are private operators of torch, called in this module alone: on CUDA
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

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from laurel.types import Span, Tree

_aten = torch.ops.aten

CAUSAL_PIECE = 192
"""The number of tokens in one causal call of the CPU kernel.

The kernel computes whole blocks on the diagonal, whose size grows with the number of queries. In
such pieces, 2,048 tokens took 0.90 and 512 tokens 0.73 of the time of a single call.
"""

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
                by_q[part.queries] += part.by_query
                _add(by_k, part.keys, part.by_key)
                _add(by_v, part.keys, part.by_value)
        return by_q, by_k, by_v, None, None


def _add(total: Tensor, rows: Rows, part: Tensor) -> None:
    # Indices may come more than once.
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_put_((rows,), part, accumulate=True)


class SpanCall:
    """Computes attention span by span with PyTorch's flash kernel for CPUs.

    Grouped-query attention is supported.
    """

    def __init__(self, seen: Sequence[Seen], *, is_causal: bool) -> None:
        """Set the spans.

        Args:
            seen: The queries and keys, with exactly one span of keys for each span of queries.
            is_causal: Whether a query attends only to keys up to its own index in the span.
        """
        self._pairs = [(slice(*queries), slice(*keys)) for queries, (keys,) in seen]
        self._is_causal = is_causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Iterator[Attended]:
        """Yield the attention of queries to this call's keys only; no query is yielded twice."""
        q, k, v = (_heads_first(t) for t in (q, k, v))
        for rows, seen in self._pairs:
            out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
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
        grad, q, k, v, out = (_heads_first(t) for t in (grad, q, k, v, out))
        for rows, seen in self._pairs:
            found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
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


def _heads_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1)[None]


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
