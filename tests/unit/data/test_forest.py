"""Which groups travel together, and how they are laid out."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.data.forest import (
    bin_pack,
    distinct_tokens,
    least_worth_sharing,
    pack_evenly,
    pack_padded,
    shared_parts,
    to_forest,
    to_padded,
)
from laurel.types import Span, TokenGroup, Tree
from random_trees import groups_of_tree, rows_of


def group(trunk, *branches):
    return TokenGroup(
        id="",
        trunk_ids=np.array(trunk, dtype=np.int32),
        branches_ids_G=tuple(np.array(ids, dtype=np.int32) for ids in branches),
    )


GROUPS = [group([11, 12, 13], [21, 22], [23]), group([], [31, 32])]


def test_a_forest_by_hand():
    forest = to_forest(GROUPS)
    assert forest.ids_T.tolist() == [11, 12, 13, 21, 22, 23, 31, 32]
    assert forest.positions_T.tolist() == [0, 1, 2, 3, 4, 3, 0, 1]
    assert forest.trees == (
        Tree.of(Span(0, 3), (Span(3, 5), Span(5, 6))),
        Tree.of(Span(6, 6), (Span(6, 8),)),
    )
    assert forest.last_N == [4, 5, 7]
    assert forest.num_completions == 3
    assert forest.ids_T.dtype == torch.int32
    assert forest.positions_T.dtype == torch.int64


def with_reads(*reads_G):
    return [replace(one, reads_G=reads) for one, reads in zip(GROUPS, reads_G, strict=True)]


def test_the_reads_of_a_batch_by_hand():
    groups = with_reads(((3, 4), (3,)), ((0,),))
    assert to_forest(groups).reads == (3, 4, 5, 6)
    assert to_padded(groups, pad_id=7).reads == ((0, 3), (0, 4), (1, 3), (2, 0))


@pytest.mark.parametrize("reads_G", [(((3, 4),), ((0,),)), (((3, 4), (3,)), ())])
def test_a_batch_in_which_a_sequence_lost_its_reads_is_refused(reads_G):
    groups = with_reads(*reads_G)
    with pytest.raises(AssertionError, match="lost its reads"):
        to_forest(groups)
    with pytest.raises(AssertionError, match="lost its reads"):
        to_padded(groups, pad_id=7)


def test_padded_rows_by_hand():
    rows = to_padded(GROUPS, pad_id=7)
    assert rows.ids_NL.tolist() == [[11, 12, 13, 21, 22], [11, 12, 13, 23, 7], [31, 32, 7, 7, 7]]
    assert rows.lengths_N.tolist() == [5, 4, 2]
    assert rows.starts_N.tolist() == [3, 3, 0]
    assert rows.num_completions == 3
    assert rows.ids_NL.dtype == torch.int64


IDS = st.lists(st.integers(0, 500), max_size=6)
ANY_GROUPS = st.lists(
    st.tuples(IDS, st.lists(IDS.filter(len), min_size=1, max_size=4)).map(
        lambda drawn: group(drawn[0], *drawn[1])
    ),
    min_size=1,
    max_size=5,
)


@settings(deadline=None)
@given(groups=ANY_GROUPS, share_prompts=st.booleans())
def test_every_sequence_can_be_read_back(groups, share_prompts):
    forest = to_forest(groups, share_prompts=share_prompts)
    ids, positions = forest.ids_T.tolist(), forest.positions_T.tolist()
    read = []
    covered = []
    for tree in forest.trees:
        covered += tree.nodes
        trunk, *branches = tree.nodes
        for branch in branches:
            row = [*range(*trunk), *range(*branch)]
            assert [positions[t] for t in row] == list(range(len(row)))
            read.append([ids[t] for t in row])
    assert read == [[*g.trunk_ids, *b] for g in groups for b in g.branches_ids_G]
    # The segments follow one another without a gap from the first token to the last.
    assert [span.start for span in covered] == [0, *(span.end for span in covered[:-1])]
    assert covered[-1].end == len(ids)
    if share_prompts:
        assert len(ids) == sum(g.num_tokens for g in groups)
    assert to_padded(groups, pad_id=0).lengths_N.tolist() == [
        n for g in groups for n in g.lengths_G
    ]


def test_a_tree_of_longest_common_beginnings_by_hand():
    groups = [
        group([1, 2, 3], [4, 5, 6], [4, 5, 7, 8], [9]),
        group([1, 2, 3, 4, 5, 6], [7]),  # goes on where a completion ended
        group([30, 31], [32]),
        group([1, 2], [3, 9]),  # the same as the third sequence, with another prompt
    ]
    forest = to_forest(groups, least_shared=2)
    assert forest.ids_T.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 6, 7, 9, 9, 30, 31, 32]
    spans = [[tuple(node) for node in tree.nodes] for tree in forest.trees]
    assert spans == [
        [(0, 3), (3, 5), (5, 6), (6, 8), (8, 10), (10, 11), (11, 12)],
        [(12, 15)],
    ]
    # With two tokens at least, [6] and [6, 7] do not share, nor do the two [9].
    assert [tree.parents for tree in forest.trees] == [(-1, 0, 1, 1, 1, 0, 0), (-1,)]


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**16),
    least=st.integers(1, 8),
    vocabulary=st.sampled_from([2, 40, 300]),
)
def test_every_sequence_of_a_deep_tree_can_be_read_back(seed, least, vocabulary):
    groups, _ = groups_of_tree(seed, nodes=20, vocabulary=max(vocabulary, 24))
    groups += [group([1] * 9, [1, 1, vocabulary], [1, 1], [1, 1])]
    groups = [
        replace(g, reads_G=tuple(tuple(range(length)) for length in g.lengths_G)) for g in groups
    ]
    forest = to_forest(groups, least_shared=least)
    whole = [[*g.trunk_ids, *b] for g in groups for b in g.branches_ids_G]
    rows = rows_of(forest)
    ids, positions = forest.ids_T.tolist(), forest.positions_T.tolist()
    assert [[ids[t] for t in row] for row in rows] == whole
    assert all([positions[t] for t in row] == list(range(len(row))) for row in rows)
    starts = [len(g.trunk_ids) for g in groups for _ in g.branches_ids_G]
    assert [end.start for end in forest.ends_N] == starts
    assert forest.last_N == [row[-1] for row in rows]
    assert forest.reads == tuple(t for row in rows for t in row)
    assert len(ids) == distinct_tokens(groups, least) <= sum(map(len, whole))
    covered = [span for tree in forest.trees for span in tree.nodes]
    assert [span.start for span in covered] == [0, *(span.end for span in covered[:-1])]
    assert covered[-1].end == len(ids)
    for tree in forest.trees:
        for node, parent in enumerate(tree.parents):
            assert parent < node
            children = [c for c, above in enumerate(tree.parents) if above == node]
            assert tree.exits[node] == max([node + 1, *(tree.exits[c] for c in children)])
            assert tree.nodes[node].length >= (least if children else 1)
            # Nothing that would have been shared is computed twice.
            spans = [tree.nodes[child] for child in children]
            begins = [ids[span.start : min(span.start + least, span.end)] for span in spans]
            long = [tuple(some) for some in begins if len(some) == least]
            assert len(set(long)) == len(long)
    copied = pickle.loads(pickle.dumps(forest))
    assert (copied.trees, copied.ends, copied.reads) == (forest.trees, forest.ends, forest.reads)
    for some in (groups, groups[:1], groups[-1:], groups[::2]):
        is_worth_it = distinct_tokens(some, least) <= 0.95 * sum(g.num_tokens for g in some)
        assert least_worth_sharing(some, least) == (least if is_worth_it else None)
    if least == 1:
        assert len(ids) == len({tuple(row[: n + 1]) for row in whole for n in range(len(row))})


@settings(deadline=None)
@given(seed=st.integers(0, 2**16), least=st.integers(1, 8), budget=st.integers(1, 200))
def test_parts_of_groups_that_share_are_within_the_budget(seed, least, budget):
    # Few tokens, so that runs end elsewhere where other groups are missing.
    drawn, _ = groups_of_tree(seed, nodes=20, vocabulary=24)
    groups = [*drawn, group([1] * 9, [1, 1, 4], [1, 1], [1, 1]), group([1] * 9, [1, 5], [2])]
    parts = shared_parts(groups, budget, least)
    assert sorted(index for part, _ in parts for index in part) == list(range(len(groups)))
    for part, size in parts:
        assert size == distinct_tokens([groups[i] for i in part], least)
        assert size <= budget or len(part) == 1
    assert len(shared_parts(drawn[:-1], 10_000, 1)) == 1


SIZES = st.lists(st.integers(1, 60), max_size=40)


def first_fit_decreasing(sizes, budget):
    """The same by looking at every bin."""
    bins = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fitting = (b for b in bins if sum(sizes[i] for i in b) + sizes[index] <= budget)
        bin_ = next(fitting, None)
        if bin_ is None:
            bins.append([index])
        else:
            bin_.append(index)
    return [sorted(items) for items in bins]


@settings(deadline=None)
@given(sizes=SIZES, budget=st.integers(1, 80))
def test_packing(sizes, budget):
    bins = bin_pack(sizes, budget)
    assert sorted(i for items in bins for i in items) == list(range(len(sizes)))
    for items in bins:
        assert items == sorted(items)
        assert len(items) == 1 or sum(sizes[i] for i in items) <= budget
    assert bin_pack(list(sizes), budget) == bins
    assert bins == first_fit_decreasing(sizes, budget)


def test_even_packing_by_hand():
    # 20 tokens are two micro-batches, for two places; `bin_pack` would fill the first.
    assert bin_pack([8, 4, 4, 2, 2], 12) == [[0, 1], [2, 3, 4]]
    assert pack_evenly([8, 4, 4, 2, 2], 12, dp_size=2) == [[0, 3], [1, 2, 4]]
    assert pack_evenly([8, 4, 4, 2, 2], 30, dp_size=1) == [[0, 1, 2, 3, 4]]
    # Four for four places, and more than there are items for five.
    assert pack_evenly([8, 4, 4, 2, 2], 30, dp_size=4) == [[0], [1], [2], [3, 4]]
    assert pack_evenly([8, 4], 30, dp_size=5) == [[0], [1]]
    # Two would do as 5 + 3 and 4 + 2 + 2, not as 5 + 2 and 4 + 3, the even way: 2 are left over.
    assert pack_evenly([4, 2, 2, 3, 5], 8, dp_size=2) == [[4], [0], [3], [1, 2]]
    assert pack_evenly([], 30, dp_size=5) == []


@settings(deadline=None)
@given(sizes=SIZES, budget=st.integers(1, 80), dp_size=st.integers(1, 5))
def test_even_packing(sizes, budget, dp_size):
    bins = pack_evenly(sizes, budget, dp_size=dp_size)
    assert sorted(i for items in bins for i in items) == list(range(len(sizes)))
    assert len(bins) % dp_size == 0 or len(bins) == len(sizes)
    for items in bins:
        assert items == sorted(items)
        assert len(items) == 1 or sum(sizes[i] for i in items) <= budget
    assert len(bins) >= len(bin_pack(sizes, budget))
    assert pack_evenly(sizes, budget, dp_size=1) == bin_pack(sizes, budget)


LENGTHS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple), max_size=25)


@settings(deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1, 200))
def test_padded_packing(lengths, budget):
    bins = pack_padded(lengths, budget)
    assert sorted(i for items in bins for i in items) == list(range(len(lengths)))
    for items in bins:
        rows = [length for i in items for length in lengths[i]]
        assert len(items) == 1 or len(rows) * max(rows) <= budget
    assert pack_padded(list(lengths), budget) == bins
    widths = [max(length for i in items for length in lengths[i]) for items in bins]
    assert widths == sorted(widths, reverse=True)  # rows of similar lengths share a batch


def test_packing_by_hand():
    # Decreasing: 6, 5, 4, 3, 2 into 10: 6+4, 5+3+2.
    assert bin_pack([5, 4, 2, 6, 3], 10) == [[1, 3], [0, 2, 4]]
    assert bin_pack([12, 3, 12], 10) == [[0], [2], [1]]  # too long for any: alone
    assert bin_pack([], 10) == []


def test_padded_packing_by_hand():
    # Widest first: rows of 9 and 8 make 2 * 9 = 18 tokens; a third row would make 27.
    assert pack_padded([(3,), (9,), (8,), (2, 2)], 20) == [[1, 2], [0, 3]]
    assert pack_padded([(30, 1), (4,)], 20) == [[0], [1]]  # too long for any: alone
    assert pack_padded([], 20) == []
