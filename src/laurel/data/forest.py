"""Packs token groups into micro-batches, and lays each batch out as the model's input."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch

from laurel.types import PaddedRows, Span, TokenForest, TokenGroup, Tree


def to_forest(groups: Sequence[TokenGroup], *, share_prompts: bool = True) -> TokenForest:
    """Lay groups out as a token forest, which holds each prompt once for all its completions.

    Args:
        groups: At least one group.
        share_prompts: If False, every completion gets a tree with its own copy of the prompt:
            the scores are the same, with more arithmetic.

    Returns:
        The forest; its N completions are those of the groups, in order.
    """
    has_reads = _have_reads(groups)
    pieces: list[np.ndarray] = []
    trees: list[Tree] = []
    reads: list[int] = []
    end = 0

    def lay(ids: np.ndarray) -> Span:
        nonlocal end
        pieces.append(ids)
        end += len(ids)
        return Span(end - len(ids), end)

    for group in groups:
        first = len(trees)
        if share_prompts:
            trunk = lay(group.trunk_ids)
            trees.append(Tree(trunk, tuple(map(lay, group.branches_ids_G))))
        else:
            for ids in group.branches_ids_G:
                trunk = lay(group.trunk_ids)
                trees.append(Tree(trunk, (lay(ids),)))
        spans = [(tree.trunk, branch) for tree in trees[first:] for branch in tree.branches_G]
        for (trunk, branch), positions in zip(spans, group.reads_G, strict=has_reads):
            # Completions that begin alike share their first steps, which end in the trunk.
            reads += [
                trunk.start + p if p < trunk.length else branch.start + p - trunk.length
                for p in positions
            ]
    ids_T = np.concatenate(pieces, dtype=np.int32)
    return TokenForest(
        ids_T=torch.from_numpy(ids_T),
        trees=tuple(trees),
        reads=tuple(reads) if has_reads else None,
    )


def to_padded(groups: Sequence[TokenGroup], *, pad_id: int) -> PaddedRows:
    """Lay groups out as a padded batch with one row per completion, in order.

    `pad_id` is the token id of the padding.
    """
    rows = [np.concatenate((g.trunk_ids, ids)) for g in groups for ids in g.branches_ids_G]
    ids_NL = np.full((len(rows), max(len(row) for row in rows)), pad_id, dtype=np.int64)
    for index, row in enumerate(rows):
        ids_NL[index, : len(row)] = row
    starts = [len(group.trunk_ids) for group in groups for _ in group.branches_ids_G]
    positions = [one for group in groups for one in group.reads_G]
    reads = tuple((row, column) for row, some in enumerate(positions) for column in some)
    return PaddedRows(
        ids_NL=torch.from_numpy(ids_NL),
        lengths_N=torch.tensor([len(row) for row in rows]),
        starts_N=torch.tensor(starts),
        reads=reads if _have_reads(groups) else None,
    )


def _have_reads(groups: Sequence[TokenGroup]) -> bool:
    # The outputs would be those of other steps if one sequence of a batch had lost its reads.
    have_reads = any(group.reads_G for group in groups)
    if have_reads:
        for group in groups:
            assert len(group.reads_G) == len(group.branches_ids_G), "a sequence has lost its reads"
    return have_reads


def bin_pack(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Divide items over micro-batches by first-fit decreasing, which needs few of them.

    Args:
        sizes: The number of tokens of each item.
        budget: The largest number of tokens in a micro-batch; a larger item gets its own.

    Returns:
        The indices of the items of each micro-batch. Every index appears once; the result depends
        only on the arguments.
    """
    bins: list[list[int]] = []
    # The leaves of this tree are bins, opened or not yet, and hold the room left in each; a node
    # holds the larger of its two. So the first bin with room is found without looking at them all.
    num_leaves = 1 << max(0, len(sizes) - 1).bit_length()
    room = [budget] * (2 * num_leaves)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[index]
        node = 1 if size <= budget else num_leaves + len(bins)
        while node < num_leaves:
            node = 2 * node if room[2 * node] >= size else 2 * node + 1
        if node - num_leaves == len(bins):
            bins.append([])
        bins[node - num_leaves].append(index)
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [sorted(items) for items in bins]


def pack_evenly(sizes: Sequence[int], budget: int, *, dp_size: int) -> list[list[int]]:
    """Divide items over micro-batches that several data-parallel ranks compute side by side.

    Args:
        sizes: The number of tokens of each item.
        budget: The largest number of tokens in a micro-batch; a larger item gets its own.
        dp_size: The number of ranks. For one rank the result is that of `bin_pack`.

    Returns:
        The indices of the items of each micro-batch. Unless there are too few items, every rank
        gets equally many micro-batches, of about equal size.
    """
    bins = bin_pack(sizes, budget)
    if dp_size == 1:
        return bins
    count = -(-len(bins) // dp_size) * dp_size
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    while count < len(sizes):
        parts: list[list[int]] = [[] for _ in range(count)]
        filled = [(0, number) for number in range(count)]
        for index in order:
            total, number = filled[0]
            parts[number].append(index)
            heapq.heapreplace(filled, (total + sizes[index], number))
        if all(total <= budget or len(parts[number]) == 1 for total, number in filled):
            return [sorted(items) for items in parts]
        count += dp_size
    return [[index] for index in range(len(sizes))]


def pack_padded(lengths: Sequence[tuple[int, ...]], budget: int) -> list[list[int]]:
    """Divide groups over padded micro-batches of similar lengths.

    Args:
        lengths: The lengths of the sequences of each group, in tokens.
        budget: The largest number of tokens in a micro-batch, with its padding; a larger group
            gets its own.

    Returns:
        The indices of the groups of each micro-batch.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-max(lengths[i]), i))
    bins: list[list[int]] = []
    width = rows = 0
    for index in order:
        more = len(lengths[index])
        if bins and (rows + more) * width <= budget:
            bins[-1].append(index)
            rows += more
        else:
            bins.append([index])
            width, rows = max(lengths[index]), more
    return bins
