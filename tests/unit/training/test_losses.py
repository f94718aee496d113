"""The formulas of `losses.py`, each against numbers worked by hand."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.extensions.reward_losses.losses import (
    davidson,
    plackett_luce,
    rao_kupper,
    regression,
)
from laurel.training.losses import (
    bradley_terry,
    ranked_pairs,
)

scores = st.floats(-30, 30, allow_nan=False)


def exact(*values):
    return torch.tensor(values, dtype=torch.float64)


def single(*values):
    return torch.tensor(values, dtype=torch.float32)


def flags(*values):
    return torch.tensor(values)


def assert_near(found, *expected, rel=1e-14):
    assert found.tolist() == pytest.approx(expected, rel=rel, abs=1e-300)


def l(x):  # noqa: E743 - the notation of losses.py
    """log(1 + e^-x) in Python's float64, without overflow."""
    return max(-x, 0.0) + math.log1p(math.exp(-abs(x)))


def test_a_certain_soft_label_changes_not_one_bit():
    better, worse = single(0.3, -7.1, 1e4, -1e4), single(1.7, 2.2, -1e4, 1e4)
    plain = bradley_terry(better, worse)
    assert torch.equal(plain, bradley_terry(better, worse, target_P=torch.ones(4)))


def test_small_losses_keep_their_digits():
    # log(1 + e^-25) = e^-25 to 11 digits; softplus with torch's threshold of 20 would say e^-25
    # for a lead but exactly 25 for a lag, whose true loss is 25 + e^-25 and whose gradient
    # differs from 1 by e^-25.
    lead = exact(25.0, -25.0).requires_grad_()
    loss = bradley_terry(lead, exact(0.0, 0.0))
    assert_near(loss, math.log1p(math.exp(-25.0)), 25.0 + math.log1p(math.exp(-25.0)))
    assert float(loss[1].detach()) > 25.0
    (gradient,) = torch.autograd.grad(loss.sum(), lead)
    assert 1.0 + float(gradient[1]) == pytest.approx(math.exp(-25.0), rel=1e-4)


@given(better=scores, worse=scores)
@settings(deadline=None)
def test_bradley_terry_against_plain_python(better, worse):
    assert_near(bradley_terry(exact(better), exact(worse)), l(better - worse), rel=1e-13)


DAVIDSON, RAO_KUPPER = partial(davidson, nu=1.5), partial(rao_kupper, theta=2.0)


def test_without_ties_they_are_bradley_terry():
    better, worse = exact(0.3, -2.0, 8.0), exact(1.7, -2.0, -8.0)
    decided, plain = flags(False, False, False), bradley_terry(better, worse)
    assert torch.equal(davidson(better, worse, decided, nu=1e-300), plain)
    assert_near(rao_kupper(better, worse, decided, theta=1.0 + 2**-50), *plain.tolist(), rel=2e-15)


@given(i=scores, j=scores, parameter=st.floats(1e-3, 1e3))
@settings(deadline=None)
def test_win_lose_and_tie_exhaust_the_outcomes(i, j, parameter):
    for loss in (partial(davidson, nu=parameter), partial(rao_kupper, theta=1.0 + parameter)):
        losses_P = loss(exact(i, j, i), exact(j, i, j), flags(False, False, True))
        assert float(torch.exp(-losses_P).sum()) == pytest.approx(1.0, abs=1e-13)


@given(i=scores, j=scores, parameter=st.floats(1e-3, 1e3))
@settings(deadline=None)
def test_a_tie_has_no_sides(i, j, parameter):
    for loss in (partial(davidson, nu=parameter), partial(rao_kupper, theta=1.0 + parameter)):
        one, other = loss(exact(i, j), exact(j, i), flags(True, True)).tolist()
        assert one == pytest.approx(other, rel=1e-15)


def list_loss(scores_N, *ranks_per_group):
    return plackett_luce(scores_N, ranked_pairs(ranks_per_group, with_ties=False).to(scores_N))


def test_plackett_luce_with_shared_ranks():
    # Strengths 6 and 3 share the first rank, 1 and 2 the second. Neither of the first two
    # competes with the other: 6 / (6 + 1 + 2) = 2/3 and 3 / (3 + 1 + 2) = 1/2.
    # The second rank has nobody to beat. Mean: (log(3/2) + log 2) / 2 = log(3) / 2.
    strengths = (math.log(6.0), 0.0, math.log(3.0), math.log(2.0))
    assert_near(list_loss(exact(*strengths), (4, 9, 4, 9)), math.log(3.0) / 2)


def test_plackett_luce_of_many_lists_at_once():
    lists = {
        (0, 1, 2): (math.log(6.0), math.log(3.0), 0.0),
        (1, 1): (3.0, 4.0),
        (): (),
        (1, 0): (0.0, math.log(3.0)),
        (5,): (2.0,),
    }
    flat = exact(*(score for list_scores in lists.values() for score in list_scores))

    loss = list_loss(flat, *lists)

    # Strengths 6, 3, 1. First pick: 6 / (6 + 3 + 1) = 3/5. Second: 3 / (3 + 1) = 3/4. The last
    # has nobody to beat. Mean of two: (log(5/3) + log(4/3)) / 2 = log(20/9) / 2. All of one
    # rank: 0; empty: 0; a pair at 3 to 1: log(4/3); one item: 0.
    assert_near(loss, math.log(20.0 / 9.0) / 2, 0.0, 0.0, math.log(4.0 / 3.0), 0.0)
    assert list_loss(exact()).tolist() == []


@given(i=st.floats(-1e4, 1e4, width=32), j=st.floats(-1e4, 1e4, width=32))
@settings(deadline=None)
def test_a_list_of_two_is_bradley_terry_to_the_last_bit(i, j):
    for make in (exact, single):
        assert torch.equal(list_loss(make(i, j), (0, 1)), bradley_terry(make(i), make(j)))


def test_plackett_luce_refuses_ties():
    with pytest.raises(AssertionError, match="a tie says nothing"):
        plackett_luce(exact(0.0, 0.0), ranked_pairs([(0, 1)], with_ties=True))


@given(
    items=st.lists(st.tuples(scores, st.integers(0, 4)), min_size=1, max_size=8),
    random=st.randoms(use_true_random=False),
)
def test_plackett_luce_from_its_definition_in_any_order(items, random):
    terms = []
    for score, rank in items:
        rivals = [other for other, other_rank in items if other_rank > rank]
        if rivals:
            top = max([score, *rivals])
            terms.append(top + math.log(sum(math.exp(s - top) for s in [score, *rivals])) - score)
    expected = sum(terms) / len(terms) if terms else 0.0

    random.shuffle(items)
    loss = list_loss(exact(*(score for score, _ in items)), tuple(rank for _, rank in items))

    assert loss.tolist() == pytest.approx([expected], rel=1e-12, abs=1e-14)


def test_unrated_attributes_get_no_gradient():
    predictions = exact(1.0, 5.0, 2.0, 4.0).view(2, 2).requires_grad_()
    targets = exact(0.0, math.nan, math.nan, math.nan).view(2, 2)
    (gradient,) = torch.autograd.grad(regression(predictions, targets).sum(), predictions)
    # The only rating: d(1 - 0)^2 = 2.
    assert gradient.tolist() == [[2.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("loss", "win", "lose", "tie"),
    [
        # Strengths 4 and 1; a tie weighs 1.5 * sqrt(4 * 1) = 3. Total 4 + 1 + 3 = 8.
        (DAVIDSON, 4 / 8, 1 / 8, 3 / 8),
        # The stronger wins: 4 / (4 + 2 * 1) = 2/3. The weaker: 1 / (1 + 2 * 4) = 1/9. A tie:
        # (2^2 - 1) * 4 * 1 / (6 * 9) = 12/54 = 2/9. Together 6/9 + 1/9 + 2/9 = 1.
        (RAO_KUPPER, 2 / 3, 1 / 9, 2 / 9),
        # Without ties: 4 / (4 + 1).
        (lambda better, worse, is_tie, **rest: bradley_terry(better, worse, **rest), 0.8, 0.2, 0.8),
    ],
    ids=["davidson", "rao_kupper", "bradley_terry"],
)
def test_wins_losses_ties_margins_and_soft_labels(loss, win, lose, tie):
    better, worse = exact(math.log(4.0), 0.0, math.log(4.0)), exact(0.0, math.log(4.0), 0.0)
    found = loss(better, worse, flags(False, False, True))
    assert_near(found, -math.log(win), -math.log(lose), -math.log(tie))
    # A fifth of the labels is wrong.
    found = loss(better[:1], worse[:1], flags(False), label_smoothing=0.2)
    assert_near(found, -0.8 * math.log(win) - 0.2 * math.log(lose))
    # d - m = ln 4, as above; q = 0.9 * 0.8 + 0.1 * 0.2 = 0.74.
    found = loss(
        exact(math.log(8.0)),
        exact(0.0),
        flags(False),
        margin_P=exact(math.log(2.0)),
        target_P=exact(0.9),
        label_smoothing=0.2,
    )
    assert_near(found, -0.74 * math.log(win) - 0.26 * math.log(lose))


@pytest.mark.parametrize(
    ("loss", "needs"),
    [
        *((partial(davidson, nu=nu), "nu must be above 0") for nu in (0.0, -1.0, math.nan)),
        *((partial(rao_kupper, theta=x), "theta must be above 1") for x in (1.0, 0.5, math.nan)),
    ],
)
def test_a_parameter_of_ties_out_of_range_is_refused(loss, needs):
    with pytest.raises(ValueError, match=needs):
        loss(exact(0.0), exact(0.0), flags(True))
