"""Which completions are compared, and how much each comparison weighs."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.training.losses import ranked_pairs


def test_ties_are_pairs_only_where_asked_for():
    ranks = [(0, 0), (2, 0, 2)]

    without = ranked_pairs(ranks, with_ties=False)
    assert without.better_P.tolist() == [3, 3]  # completions 0, 1 | 2, 3, 4
    assert without.worse_P.tolist() == [2, 4]
    assert without.group_P.tolist() == [1, 1]
    assert without.weight_P.tolist() == [0.5, 0.5]

    with_ties = ranked_pairs(ranks, with_ties=True)
    assert with_ties.better_P.tolist() == [0, 2, 3, 3]
    assert with_ties.worse_P.tolist() == [1, 4, 2, 4]
    assert with_ties.is_tie_P.tolist() == [True, True, False, False]
    assert with_ties.weight_P.tolist() == [1.0, 1 / 3, 1 / 3, 1 / 3]
    assert with_ties.gap_P.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_the_gap_counts_levels_not_rank_numbers():
    pairs = ranked_pairs([(0, 7, 100, 7)], with_ties=True)

    # Three levels: 0 | 7, 7 | 100. One level is half of the way from best to worst.
    found = zip(pairs.better_P.tolist(), pairs.worse_P.tolist(), pairs.gap_P.tolist(), strict=True)
    assert list(found) == [
        (0, 1, 0.5),
        (0, 2, 1.0),
        (0, 3, 0.5),
        (1, 2, 0.5),
        (1, 3, 0.0),
        (3, 2, 0.5),
    ]


def test_groups_without_a_pair_are_counted_and_take_no_part():
    pairs = ranked_pairs([(), (0,), (3, 3), (1, 0)], with_ties=False)

    assert pairs.num_groups == 4
    assert pairs.group_P.tolist() == [3]
    assert (pairs.better_P.tolist(), pairs.worse_P.tolist()) == ([4], [3])
    empty = ranked_pairs([], with_ties=True)
    assert empty.num_groups == 0
    assert len(empty.better_P) == 0
    assert empty.better_P.dtype == torch.int64


@given(
    ranks_per_group=st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6),
    with_ties=st.booleans(),
)
@settings(deadline=None)
def test_every_usable_pair_appears_once_and_groups_weigh_one(ranks_per_group, with_ties):
    pairs = ranked_pairs(ranks_per_group, with_ties=with_ties)

    flat = [(group, rank) for group, ranks in enumerate(ranks_per_group) for rank in ranks]
    expected = {
        frozenset((i, j))
        for i in range(len(flat))
        for j in range(i)
        if flat[i][0] == flat[j][0] and (with_ties or flat[i][1] != flat[j][1])
    }
    found = list(zip(pairs.better_P.tolist(), pairs.worse_P.tolist(), strict=True))
    assert {frozenset(pair) for pair in found} == expected
    assert len(found) == len(expected)
    assert pairs.group_P.tolist() == [flat[better][0] for better, _ in found]
    for (better, worse), is_tie in zip(found, pairs.is_tie_P.tolist(), strict=True):
        assert flat[better][1] == flat[worse][1] if is_tie else flat[better][1] < flat[worse][1]
    # plackett_luce relies on this: the pairs of one better completion stand together.
    if not with_ties:
        assert [better for better, _ in found] == sorted(better for better, _ in found)
    for group in set(pairs.group_P.tolist()):
        torch.testing.assert_close(
            pairs.weight_P[pairs.group_P == group].sum(), torch.tensor(1.0, dtype=torch.float64)
        )
