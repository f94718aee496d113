"""Packs token groups into micro-batches, and lays each batch out as the model's input."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from laurel.config.policy import BatchLimits
from laurel.types import PaddedRows, SequenceEnd, Span, TokenForest, TokenGroup, Tree

Label = TypeVar("Label")

LEAST_SAVED = 0.05
"""The least part of the tokens of a batch that makes up for trees of more than two levels."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch(Generic[Label]):
    """The inputs of one forward pass, and the labels with which the loss compares its outputs."""

    inputs: TokenForest | PaddedRows
    labels: Sequence[Label]
    num_tokens: int
    """The number of computed tokens: distinct ones in a forest, with padding in padded rows."""
    branches_of_N: Sequence[range] = ()
    """The sequences of each completion; empty: each completion is one."""


class Batcher:
    """Divides batches into micro-batches for one model."""

    def __init__(
        self,
        path: Literal["forest", "padded"],
        limits: BatchLimits,
        *,
        pad_id: int,
        dp_size: int = 1,
    ) -> None:
        """Choose the layout and limits of micro-batches.

        Args:
            limits: The size limits of micro-batches. A larger group is computed in parts, unless
                prompts are not shared.
            dp_size: The number of data-parallel ranks, `Learner.dp_size`.
        """
        self.path: Literal["forest", "padded"] = path
        self.limits = limits
        self._pad_id = pad_id
        self._dp_size = dp_size

    def cut(self, tokens: Sequence[TokenGroup], labels: Sequence[Label]) -> list[MicroBatch[Label]]:
        """Divide all groups into micro-batches.

        Forests are filled up to the token budget, evenly over several ranks. Batches of padded rows
        are filled too if dynamic batching is on, or if packing is on and the model cannot read
        forests; otherwise each holds `padded_groups` groups, in order.
        """
        limits, least = self.limits, None
        if self._is_forest:
            least = least_worth_sharing(
                tokens, limits.least_shared if limits.share_prompts else None
            )
            parts = self._fill_forests(tokens, least)
        elif limits.padded_tokens is not None:
            parts = pack_padded([t.lengths_G for t in tokens], limits.padded_tokens)
        else:
            size = limits.padded_groups
            starts = range(0, len(tokens), size)
            parts = [list(range(s, min(s + size, len(tokens)))) for s in starts]
        return [
            self._lay_out([tokens[i] for i in indices], [labels[i] for i in indices], least)
            for indices in parts
        ]

    def _fill_forests(self, tokens: Sequence[TokenGroup], least: int | None) -> list[list[int]]:
        limits = self.limits
        if least is None:
            share = limits.share_prompts
            sizes = [t.num_tokens if share else sum(t.lengths_G) for t in tokens]
            return pack_evenly(sizes, limits.forest_tokens, dp_size=self._dp_size)
        # Large parts share most, smaller ones divide more evenly over ranks.
        dp = self._dp_size
        divisors = [2**power for power in range((4 * dp).bit_length())] if dp > 1 else [1]
        ways = [
            self._pack(shared_parts(tokens, max(1, limits.forest_tokens // by), least))
            for by in divisors
        ]
        return min(ways, key=lambda way: way[0])[1]

    def _pack(self, parts: Sequence[tuple[list[int], int]]) -> tuple[int, list[list[int]]]:
        """Divide parts over micro-batches; return the tokens that pass one after another, too."""
        sizes = [size for _, size in parts]
        packed = pack_evenly(sizes, self.limits.forest_tokens, dp_size=self._dp_size)
        totals = sorted((sum(sizes[number] for number in some) for some in packed), reverse=True)
        indices = [sorted(i for number in some for i in parts[number][0]) for some in packed]
        return sum(totals[:: self._dp_size]), indices

    def filled(self) -> Batcher:
        """Return one that fills padded batches too, where no gradients are kept."""
        limits = replace(self.limits, padded_tokens=self.limits.forest_tokens)
        return self._limited(limits)

    def of_singles(self) -> Batcher:
        """Return one whose micro-batches hold a single conversation each."""
        return self._limited(
            replace(self.limits, forest_tokens=1, padded_tokens=1, share_prompts=False)
        )

    def _limited(self, limits: BatchLimits) -> Batcher:
        return Batcher(self.path, limits, pad_id=self._pad_id, dp_size=self._dp_size)

    @property
    def _is_forest(self) -> bool:
        return self.path == "forest"

    def divide(
        self,
        tokens: Sequence[TokenGroup],
        labels: Sequence[Label],
        subset: Callable[[Label, Sequence[int]], Label],
    ) -> tuple[list[TokenGroup], list[Label]]:
        """Divide groups into smaller ones, for losses in which completions are independent.

        A group that exceeds the share of a data-parallel rank, for whose end the others would wait,
        is divided into several, in which fewer completions share the prompt. Without prompt
        sharing, and for padded rows, each completion becomes a group.

        Args:
            subset: Returns the label of some completions of a group.
        """
        parts: list[TokenGroup] = []
        their_labels: list[Label] = []
        budget: int | None = None
        if self._is_forest and self.limits.share_prompts:
            total = sum(group.num_tokens for group in tokens)
            budget = max(self.limits.forest_tokens, -(-total // self._dp_size))
        for group, label in zip(tokens, labels, strict=True):
            for indices in shares(group, budget=budget):
                parts.append(select_completions(group, indices))
                whole = len(indices) == len(group.branches_of_G)
                their_labels.append(label if whole else subset(label, indices))
        return parts, their_labels

    def _lay_out(
        self, tokens: Sequence[TokenGroup], labels: Sequence[Label], least: int | None
    ) -> MicroBatch[Label]:
        if self._is_forest:
            share = self.limits.share_prompts
            forest = to_forest(tokens, share_prompts=share, least_shared=least)
            if share:
                forest = replace(forest, part_tokens=self.limits.forest_tokens)
            return MicroBatch(
                inputs=forest,
                labels=labels,
                num_tokens=len(forest.ids_T),
                branches_of_N=_branches_of(tokens),
            )
        rows = to_padded(tokens, pad_id=self._pad_id)
        return MicroBatch(inputs=rows, labels=labels, num_tokens=rows.ids_NL.numel())


def _branches_of(tokens: Sequence[TokenGroup]) -> list[range]:
    if not any(group.sequences_G for group in tokens):
        return []
    counts = [len(own) for group in tokens for own in group.branches_of_G]
    ends = accumulate(counts)
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def shares(group: TokenGroup, *, budget: int | None) -> list[list[int]]:
    """Choose which completions of a group are computed together, as indices of its completions.

    These are all completions if they and the prompt fit into `budget` tokens, otherwise as many as
    fit. Without a budget each is computed alone, because no prompt is shared then.
    """
    sizes = group.num_own_tokens_G
    if budget is None:
        return [[i] for i in range(len(sizes))]
    if group.num_tokens <= budget:
        return [list(range(len(sizes)))]
    # A prompt that fills the budget leaves each completion by itself.
    return bin_pack(sizes, max(1, budget - len(group.trunk_ids)))


def select_completions(group: TokenGroup, indices: Sequence[int]) -> TokenGroup:
    """Return a group with only the completions at these indices."""
    return replace(group.select(indices), truncated_G=())


def global_batches(
    groups: Sequence[TokenGroup],
    labels: Sequence[Label],
    subset: Callable[[Label, Sequence[int]], Label],
    *,
    size: int,
) -> list[tuple[list[TokenGroup], list[Label]]]:
    """Divide groups into batches of `size` completions each, in order; groups may be split.

    Args:
        subset: Returns the label of some completions of a group.
        size: The number of completions of one optimizer step; the last batch may have fewer.
    """
    batches: list[tuple[list[TokenGroup], list[Label]]] = []
    room = 0
    for group, label in zip(groups, labels, strict=True):
        first, count = 0, len(group.branches_of_G)
        while first < count:
            if room == 0:
                batches.append(([], []))
                room = size
            chosen = range(first, min(first + room, count))
            batches[-1][0].append(select_completions(group, chosen))
            batches[-1][1].append(subset(label, chosen))
            room, first = room - len(chosen), chosen.stop
    return batches


# Laying groups out as a forest, or as padded rows.


def to_forest(
    groups: Sequence[TokenGroup], *, share_prompts: bool = True, least_shared: int | None = None
) -> TokenForest:
    """Lay groups out as a token forest, which holds each prompt once for all its completions.

    Args:
        groups: At least one group.
        share_prompts: If False, every completion gets a tree with its own copy of the prompt:
            the scores are the same, with more arithmetic.
        least_shared: Share more than prompts: all sequences of all groups that begin with at least
            this many equal tokens form one tree, and so on in each of its nodes (`prefix_trees`).
            None: share prompts alone.

    Returns:
        The forest; its N completions are those of the groups, in order.
    """
    if least_shared is not None and share_prompts:
        return _prefix_forest(groups, least_shared)
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
            trees.append(Tree.of(trunk, [lay(ids) for ids in group.branches_ids_G]))
        else:
            for ids in group.branches_ids_G:
                trunk = lay(group.trunk_ids)
                trees.append(Tree.of(trunk, [lay(ids)]))
        spans = [(tree.nodes[0], branch) for tree in trees[first:] for branch in tree.nodes[1:]]
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


class PrefixNode(NamedTuple):
    """A node of `prefix_trees`: a run of tokens, as part of the first sequence that holds it."""

    parent: int
    """Index of the run that it continues; -1: it begins a tree."""
    sequence: int
    start: int
    end: int
    ended: tuple[int, ...]
    """The sequences that end with it."""


def prefix_trees(sequences: Sequence[np.ndarray], least: int) -> list[PrefixNode]:
    """Find the longest common beginnings of sequences, and of their continuations.

    Sequences that go on with `least` or more equal tokens share all tokens that they have in
    common there, once; with fewer, each keeps its own.

    Args:
        sequences: Sequences of at least one token.
        least: The fewest tokens of a shared run, at least 1.

    Returns:
        The runs of all trees in depth-first order, tree after tree, in the order in which the
        sequences first come to them.
    """
    runs: list[PrefixNode] = []
    waiting = [(-1, 0, members) for members in _alike(sequences, range(len(sequences)), 0, least)]
    waiting.reverse()
    while waiting:
        parent, start, members = waiting.pop()
        first = sequences[members[0]]
        end = len(first)
        for member in members[1:]:
            end = min(end, len(sequences[member]))
            differs = first[start:end] != sequences[member][start:end]
            if differs.any():
                end = start + int(differs.argmax())
        ended = tuple(m for m in members if len(sequences[m]) == end)
        others = [m for m in members if len(sequences[m]) > end]
        below = _alike(sequences, others, end, least)
        waiting += [(len(runs), end, some) for some in reversed(below)]
        runs.append(PrefixNode(parent, members[0], start, end, ended))
    return runs


def _alike(
    sequences: Sequence[np.ndarray], members: Iterable[int], start: int, least: int
) -> list[list[int]]:
    # Divides sequences by their next `least` tokens; one that has fewer left is alone.
    parts: dict[bytes | int, list[int]] = {}
    for member in members:
        ids = sequences[member][start : start + least]
        parts.setdefault(ids.tobytes() if len(ids) == least else member, []).append(member)
    return list(parts.values())


def whole_sequences(groups: Iterable[TokenGroup]) -> list[np.ndarray]:
    """Return the tokens of every sequence of groups, in order."""
    return [
        np.concatenate((group.trunk_ids, ids), dtype=np.int32)
        for group in groups
        for ids in group.branches_ids_G
    ]


def distinct_tokens(groups: Sequence[TokenGroup], least_shared: int) -> int:
    """Count the tokens of `to_forest(groups, least_shared=least_shared)`."""
    runs = prefix_trees(whole_sequences(groups), least_shared)
    return sum(run.end - run.start for run in runs)


def least_worth_sharing(groups: Sequence[TokenGroup], least_shared: int | None) -> int | None:
    """Return `least_shared` if `to_forest` saves enough with it, beyond prompts; otherwise None.

    Without it groups are laid out with shared prompts, bit for bit as if none began alike.
    """
    if least_shared is None:
        return None
    prompts_shared = sum(group.num_tokens for group in groups)
    # Most batches end here: to find the trees takes several times as long as this bound.
    if _most_saved(groups, least_shared) < LEAST_SAVED * prompts_shared:
        return None
    is_worth_it = distinct_tokens(groups, least_shared) <= (1.0 - LEAST_SAVED) * prompts_shared
    return least_shared if is_worth_it else None


def _most_saved(groups: Sequence[TokenGroup], least: int) -> int:
    # The tokens of groups that begin as another one does, or whose completions begin alike.
    begins = [group.trunk_ids[:least].tobytes() for group in groups]
    count = Counter(begins)
    return sum(
        group.num_tokens
        for group, begin in zip(groups, begins, strict=True)
        if count[begin] > 1
        or len(group.trunk_ids) < least
        or len({ids[:1].tobytes() for ids in group.branches_ids_G}) < len(group.branches_ids_G)
    )


def shared_parts(
    groups: Sequence[TokenGroup], budget: int, least_shared: int
) -> list[tuple[list[int], int]]:
    """Divide groups into those that share tokens, within the budget of a micro-batch.

    Args:
        budget: The largest number of distinct tokens of a part; a larger group is one by itself.
        least_shared: The fewest tokens of a shared run, as in `to_forest`.

    Returns:
        The indices of the groups of each part, with its number of distinct tokens. Every index
        appears once. Those that share most follow one another, so a budget divides them last.
    """
    whose = [index for index, group in enumerate(groups) for _ in group.branches_ids_G]
    runs = prefix_trees(whole_sequences(groups), least_shared)
    trees: list[list[int]] = []
    runs_of: list[set[int]] = [set() for _ in groups]
    for number, run in enumerate(runs):
        if run.parent < 0:
            trees.append([])
        for index in (whose[sequence] for sequence in run.ended):
            if not runs_of[index]:
                trees[-1].append(index)  # in depth-first order
            above = number
            while above >= 0:
                runs_of[index].add(above)
                above = runs[above].parent
    parts: list[tuple[list[int], int]] = []
    for members in trees:
        while members:
            count = _count_within(budget, [runs_of[index] for index in members], runs)
            part = members[:count]
            # Where runs end depends on who is there, so it may be some tokens more, or less.
            while (size := distinct_tokens([groups[i] for i in part], least_shared)) > budget:
                if len(part) == 1:
                    break
                part.pop()
            parts.append((part, size))
            members = members[len(part) :]
    return parts


def _count_within(budget: int, runs_of: Sequence[set[int]], runs: Sequence[PrefixNode]) -> int:
    # Counts the first groups whose runs are together within the budget; at least one.
    held: set[int] = set()
    size = 0
    for count, own in enumerate(runs_of):
        size += sum(runs[number].end - runs[number].start for number in own - held)
        if count and size > budget:
            return count
        held |= own
    return len(runs_of)


def _prefix_forest(groups: Sequence[TokenGroup], least: int) -> TokenForest:
    has_reads = _have_reads(groups)
    sequences = whole_sequences(groups)
    runs = prefix_trees(sequences, least)
    starts_N = [len(group.trunk_ids) for group in groups for _ in group.branches_ids_G]
    nodes: list[list[Span]] = []
    parents: list[list[int]] = []
    ends: dict[int, SequenceEnd] = {}
    first = end = 0  # of the tree's runs; of the row
    for index, run in enumerate(runs):
        if run.parent < 0:
            first = index
            nodes.append([])
            parents.append([])
        nodes[-1].append(Span(end, end + run.end - run.start))
        parents[-1].append(run.parent if run.parent < 0 else run.parent - first)
        end = nodes[-1][-1].end
        for sequence in run.ended:
            ends[sequence] = SequenceEnd(len(nodes) - 1, index - first, starts_N[sequence])
    trees = tuple(Tree(tuple(n), tuple(p)) for n, p in zip(nodes, parents, strict=True))
    ends_N = tuple(ends[sequence] for sequence in range(len(sequences)))
    ids_T = np.concatenate([sequences[run.sequence][run.start : run.end] for run in runs])
    positions_N = [positions for group in groups for positions in group.reads_G]
    starts = [tree.starts for tree in trees] if has_reads else []
    reads = [
        index
        for one, positions in zip(ends_N, positions_N, strict=has_reads)
        for index in _in_row(trees[one.tree], starts[one.tree], one.node, positions)
    ]
    return TokenForest(
        ids_T=torch.from_numpy(ids_T),
        trees=trees,
        reads=tuple(reads) if has_reads else None,
        ends=ends_N,
    )


def _in_row(
    tree: Tree, starts: Sequence[int], node: int, positions: Sequence[int]
) -> Iterator[int]:
    # Yields the index in the row of each position of the sequence that ends with a node; `starts`
    # are the tree's, which to compute takes a pass over its nodes.
    path = tree.path(node)
    begins = [starts[one] for one in path]
    for position in positions:
        holder = bisect_right(begins, position) - 1
        yield tree.nodes[path[holder]].start + position - begins[holder]


def to_padded(groups: Sequence[TokenGroup], *, pad_id: int) -> PaddedRows:
    """Lay groups out as a padded batch with one row per completion, in order.

    `pad_id` is the token id of the padding.
    """
    rows = whole_sequences(groups)
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


# Dividing sizes over micro-batches.


def bin_pack(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Divide items over micro-batches by first-fit decreasing, which needs few of them.

    Args:
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
