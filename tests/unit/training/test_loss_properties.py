"""What holds for every comparison in `losses.py`: gradients, precision, range and symmetries."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laurel.extensions.reward_losses.losses import (
    davidson,
    plackett_luce,
    rao_kupper,
    regression,
)
from laurel.training.losses import (
    bradley_terry,
    centering,
    ranked_pairs,
)

LN2_FLOAT32 = float(torch.tensor(math.log(2.0), dtype=torch.float32))
"""The float32 nearest to ln 2."""

scores = st.floats(-30, 30, allow_nan=False)


def exact(*values):
    return torch.tensor(values, dtype=torch.float64)


def single(*values):
    return torch.tensor(values, dtype=torch.float32)


def flags(*values):
    return torch.tensor(values)


def list_loss(scores_N, *ranks_per_group):
    return plackett_luce(scores_N, ranked_pairs(ranks_per_group, with_ties=False).to(scores_N))


PairLoss = Callable[[Tensor, Tensor], Tensor]


def as_list(better_P, worse_P):
    """Plackett-Luce of lists of three, the third of which has the worse side's score, halved."""
    scores_N = torch.stack([better_P, worse_P, worse_P / 2], dim=1).flatten()
    return list_loss(scores_N, *[(0, 1, 2)] * len(better_P))


def tied(loss, is_tie):
    return lambda better, worse: loss(better, worse, torch.full(better.shape, is_tie))


COMPARISONS: dict[str, PairLoss] = {
    "bradley_terry": bradley_terry,
    "smoothed": partial(bradley_terry, label_smoothing=0.2),
    "davidson, decided": tied(partial(davidson, nu=0.7), False),
    "davidson, tied": tied(partial(davidson, nu=0.7), True),
    "davidson, smoothed": tied(partial(davidson, nu=0.7, label_smoothing=0.2), False),
    "rao_kupper, decided": tied(partial(rao_kupper, theta=1.7), False),
    "rao_kupper, tied": tied(partial(rao_kupper, theta=1.7), True),
    "rao_kupper, smoothed": tied(partial(rao_kupper, theta=1.7, label_smoothing=0.2), False),
    "plackett_luce": as_list,
}
every_comparison = pytest.mark.parametrize("loss", COMPARISONS.values(), ids=COMPARISONS.keys())


@every_comparison
def test_gradients_agree_with_finite_differences(loss):
    better = exact(0.5, -1.0, 3.0, 0.0, 12.0).requires_grad_()
    worse = exact(0.1, 2.0, -2.0, 0.0, -11.0).requires_grad_()
    assert torch.autograd.gradcheck(loss, (better, worse), atol=1e-8, rtol=1e-6)


def test_gradients_of_margin_target_centering_and_regression():
    better, worse, margin = (exact(*v).requires_grad_() for v in ((1.0, 2.0), (0.5, 3.0), (0.1, 1)))

    def soft(better, worse, margin):
        return bradley_terry(better, worse, margin_P=margin, target_P=exact(0.8, 0.3))

    assert torch.autograd.gradcheck(soft, (better, worse, margin))
    assert torch.autograd.gradcheck(centering, (better, worse))
    targets = exact(0.0, math.nan, 2.0, 1.0).view(2, 2)
    predictions = exact(1.0, 2.0, 3.0, 4.0).view(2, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: regression(p, targets), (predictions,))


@every_comparison
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_scores_neither_overflow_nor_vanish(loss, dtype):
    grid = torch.tensor([-1e4, -100.0, -1.0, 0.0, 1.0, 100.0, 1e4], dtype=dtype)
    better, worse = (
        side.flatten().requires_grad_() for side in torch.meshgrid(grid, grid, indexing="ij")
    )
    losses = loss(better, worse)
    gradients = torch.autograd.grad(losses.sum(), (better, worse))
    assert torch.isfinite(losses).all()
    assert (losses >= 0).all()
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_huge_leads_cost_what_the_formula_says():
    high, low = single(1e4), single(-1e4)
    yes, no = flags(True), flags(False)
    # Behind by 20000 a decision costs 20000 and ahead by 20000 nothing.
    assert bradley_terry(low, high).tolist() == [20000.0]
    assert bradley_terry(high, low).tolist() == [0.0]
    assert davidson(low, high, no, nu=0.7).tolist() == [20000.0]
    # Davidson's tie: log(e^10000 + ...) - log nu. Rao-Kupper's: its rarer win, 20000 + log theta,
    # with the other certain, less log(theta^2 - 1).
    tie = 10000.0 - math.log(0.7)
    assert davidson(high, low, yes, nu=0.7).tolist() == pytest.approx([tie], rel=1e-7)
    tie = 20000.0 + math.log(1.7) - math.log(1.7**2 - 1)
    assert rao_kupper(high, low, yes, theta=1.7).tolist() == pytest.approx([tie], rel=1e-7)
    # 20000 for the first pick, 0 for the second of (-1e4, 1e4, -1e4): mean 10000.
    assert list_loss(single(-1e4, 1e4, -1e4), (0, 1, 2)).tolist() == [10000.0]


def test_identical_scores_cost_ln_2_exactly():
    for score in (0.0, 0.1, -3.7, 1e4):
        assert bradley_terry(single(score), single(score)).tolist() == [LN2_FLOAT32]
        assert list_loss(single(score, score), (0, 1)).tolist() == [LN2_FLOAT32]
    # Long enough that vectorised and scalar code both run.
    assert set(bradley_terry(torch.ones(37), torch.ones(37)).tolist()) == {LN2_FLOAT32}


@every_comparison
@given(better=scores, worse=scores, shift=st.integers(-100, 100))
@settings(max_examples=30, deadline=None)
def test_only_differences_matter(loss, better, worse, shift):
    def shifted(by):
        if loss is as_list:
            scores_N = exact(better, worse, worse / 2) + by
            return list_loss(scores_N, (0, 1, 2))
        return loss(exact(better + by), exact(worse + by))

    torch.testing.assert_close(shifted(shift), shifted(0.0), rtol=1e-11, atol=1e-11)


@every_comparison
@given(better=scores, worse=scores)
@settings(max_examples=30, deadline=None)
def test_single_precision_agrees_with_double(loss, better, worse):
    better_P, worse_P = single(better), single(worse)
    # Both start from the same float32 scores, so only the arithmetic differs.
    reference = loss(better_P.double(), worse_P.double())
    torch.testing.assert_close(
        loss(better_P, worse_P).double(), reference, rtol=1e-6, atol=3e-7 * abs(better - worse)
    )


@every_comparison
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_are_widened_first(loss, dtype):
    better = torch.tensor([1.0, -2.5, 0.1]).to(dtype)
    worse = torch.tensor([0.7, 0.3, 0.1]).to(dtype)
    if loss is as_list:
        worse = (worse.float() * 2).to(dtype)  # so that halving is exact in either type
    losses = loss(better, worse)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, loss(better.float(), worse.float()))


def test_other_functions_widen_too():
    half = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    assert centering(half[0], half[0]).dtype == torch.float32
    assert regression(half, torch.tensor([[0.1, math.nan]])).dtype == torch.float32


def test_integer_scores_are_refused():
    with pytest.raises(AssertionError, match="not floating point"):
        bradley_terry(torch.tensor([1]), torch.tensor([0]))
