"""The loss of a configuration: weights of groups, settings, metrics, refusals."""

import math

import pytest
import torch
from pydantic import ValidationError

from laurel.config.reward_model import LossConfig
from laurel.errors import DataError
from laurel.training.losses import RewardLoss
from laurel.types import Preference, group_of

LN = math.log
NAN = math.nan


def judged(*ranks, **fields):
    """A judged group; only what the loss reads is filled in."""
    group = group_of([], ["answer"] * len(ranks), group_id="g")
    return Preference(group=group, ranks_G=ranks, **fields)


def loss_of(**chosen):
    return RewardLoss(LossConfig(**chosen))


def column(*scores, dtype=torch.float64):
    return torch.tensor(scores, dtype=dtype).unsqueeze(1)


def value(loss, scores, *batch):
    return float(loss(scores, batch, num_groups=loss.count(batch)).loss)


def test_bradley_terry_over_pairs():
    # Odds of 3 to 1 for the right side, then for the wrong one: (log(4/3) + log 4) / 2.
    found = value(loss_of(), column(LN(3), 0.0, LN(3), 0.0), judged(0, 1), judged(1, 0))
    assert found == pytest.approx((LN(4 / 3) + LN(4)) / 2, rel=1e-14)


def test_a_list_is_the_mean_of_its_pairs_and_weighs_as_much_as_a_pair():
    # List 6 : 3 : 1, in order: pairs at 2:1, 6:1 and 3:1, mean (log 3/2 + log 7/6 + log 4/3) / 3.
    # Pair at 1:1: log 2. Each of the two groups weighs a half.
    scores = column(LN(6), LN(3), 0.0, 0.5, 0.5)
    found = value(loss_of(), scores, judged(0, 1, 2), judged(0, 1))
    assert found == pytest.approx((LN(1.5 * 7 / 6 * 4 / 3) / 3 + LN(2)) / 2, rel=1e-14)


def test_ties_teach_bradley_terry_nothing():
    batch = [judged(0, 0), judged(0, 1)]
    scores = column(5.0, -5.0, LN(3), 0.0).requires_grad_()
    loss = loss_of()
    assert loss.count(batch) == 1.0
    output = loss(scores, batch, num_groups=1.0)
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(LN(4 / 3), rel=1e-14)
    assert scores.grad is not None
    # d/ds of log(1 + e^-d) is -sigmoid(-d) = -1/4 for the better side.
    assert scores.grad[:, 0].tolist() == pytest.approx([0.0, 0.0, -0.25, 0.25], rel=1e-14)


def test_plackett_luce_over_lists():
    # 6 : 3 : 1 as in test_losses: log(20/9) / 2. Pair at 3:1: log(4/3).
    scores = column(LN(6), LN(3), 0.0, 0.0, LN(3))
    found = value(loss_of(type="plackett_luce"), scores, judged(0, 1, 2), judged(1, 0))
    assert found == pytest.approx((LN(20 / 9) / 2 + LN(4 / 3)) / 2, rel=1e-14)


def test_davidson_learns_from_ties():
    # 4 : 1 with nu = 1.5 (test_losses): a win 4/8, a tie 3/8. In the list 4 : 1 : 4, ranks
    # 0, 1, 0: two wins and a tie between equals, 1.5 / 3.5 = 3/7.
    loss = loss_of(type="davidson", tie_parameter=1.5)
    scores = column(LN(4), 0.0, LN(4), 0.0, LN(4), 0.0, LN(4))
    found = value(loss, scores, judged(0, 1), judged(0, 0), judged(0, 1, 0))
    expected = (LN(2) + LN(8 / 3) + (LN(2) + LN(2) + LN(7 / 3)) / 3) / 3
    assert found == pytest.approx(expected, rel=1e-14)


def test_rao_kupper_has_theta_of_one_plus_the_tie_parameter():
    # 4 : 1 with theta = 3: a win 4 / (4 + 3), a tie (9 - 1) * 4 / ((4 + 3) * (1 + 12)) = 32/91.
    loss = loss_of(type="rao_kupper", tie_parameter=2.0)
    found = value(loss, column(LN(4), 0.0, LN(4), 0.0), judged(0, 1), judged(3, 3))
    assert found == pytest.approx((LN(7 / 4) + LN(91 / 32)) / 2, rel=1e-14)


def test_regression_averages_completions_then_groups():
    loss = loss_of(type="regression")
    batch = [
        judged(0, 1, attributes_GK=((0.0, 1.0), (NAN, 2.0))),
        judged(0, 1, attributes_GK=((3.0, NAN), (NAN, NAN))),
        judged(0, 1),
        judged(0, attributes_GK=((NAN, NAN),)),
    ]
    scores = torch.tensor(
        [[1.0, 3.0], [9.0, 5.0], [1.0, 9.0], [9.0, 9.0], [9.0, 9.0], [9.0, 9.0], [9.0, 9.0]],
        dtype=torch.float64,
    )

    # First: ((1 + 4) / 2 + 9) / 2 = 5.75. Second: one completion was rated, (3 - 1)^2 = 4.
    # The others were not rated and teach nothing. Mean of two: 4.875.
    assert loss.count(batch) == 2.0
    assert value(loss, scores, *batch) == pytest.approx(4.875, rel=1e-14)


def test_one_completion_can_be_regressed():
    loss = loss_of(type="regression")
    scores = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    assert value(loss, scores, judged(0, attributes_GK=((0.0, 0.0),))) == 2.5


@pytest.mark.parametrize(
    ("kind", "single", "tie", "decided"),
    [
        ("bradley_terry", 0, 0, 1),
        ("plackett_luce", 0, 0, 1),
        ("davidson", 0, 1, 1),
        ("rao_kupper", 0, 1, 1),
        ("regression", 0, 0, 0),
    ],
)
def test_which_rows_teach(kind, single, tie, decided):
    rows = [judged(0), judged(1, 1), judged(1, 1, 2)]
    assert [loss_of(type=kind).count([row]) for row in rows] == [single, tie, decided]


def test_margins_are_used_only_where_asked_for():
    row, scores = judged(0, 1, margin=LN(3)), column(LN(9), 0.0)
    # Lead log 9, margin log 3: what is left is log 3.
    assert value(loss_of(use_margin=True), scores, row) == pytest.approx(LN(4 / 3), rel=1e-14)
    assert value(loss_of(), scores, row) == pytest.approx(LN(10 / 9), rel=1e-14)


def test_the_margin_of_a_list_belongs_to_best_against_worst():
    # Leads of log 2, log 4, log 2; margin 2 log 2 for best against worst, half for each step:
    # nothing is left of any lead.
    row = judged(0, 1, 5, margin=2 * LN(2))
    scores = column(LN(4), LN(2), 0.0)
    assert value(loss_of(use_margin=True), scores, row) == pytest.approx(LN(2), rel=1e-14)


@pytest.mark.parametrize("kind", ["davidson", "rao_kupper"])
def test_margins_do_not_touch_ties(kind):
    rows, scores = [judged(0, 0, margin=3.0), judged(0, 0)], column(1.0, 0.0)
    loss = loss_of(type=kind, use_margin=True)
    assert value(loss, scores, rows[0]) == value(loss, scores, rows[1])


@pytest.mark.parametrize(
    ("kind", "tie_parameter", "win", "lose"),
    [
        ("bradley_terry", 1.0, 4 / 5, 1 / 5),
        ("davidson", 1.5, 4 / 8, 1 / 8),
        ("rao_kupper", 1.0, 2 / 3, 1 / 9),
    ],
)
def test_soft_labels_and_smoothing(kind, tie_parameter, win, lose):
    # At 4 : 1. Target 0.7 with a tenth of wrong labels: q = 0.7 * 0.9 + 0.3 * 0.1 = 0.66.
    loss = loss_of(type=kind, tie_parameter=tie_parameter, label_smoothing=0.1)
    found = value(loss, column(LN(4), 0.0), judged(0, 1, target=0.7))
    assert found == pytest.approx(-0.66 * LN(win) - 0.34 * LN(lose), rel=1e-14)


def test_centering_adds_the_mean_square_of_pair_sums():
    scores = column(2.0, 1.0, 0.0, 1.0, 1.0)
    batch = [judged(0, 1, 2), judged(0, 1)]
    # List: ((2+1)^2 + (2+0)^2 + (1+0)^2) / 3 = 14/3. Pair: (1+1)^2 = 4. Mean 13/3.
    for kind in ("bradley_terry", "plackett_luce"):
        plain = value(loss_of(type=kind), scores, *batch)
        centred = value(loss_of(type=kind, center_rewards_coefficient=0.01), scores, *batch)
        assert centred - plain == pytest.approx(0.13 / 3, rel=1e-12)


def test_centering_reaches_ties_where_they_are_learned():
    loss = loss_of(type="davidson", tie_parameter=2.0, center_rewards_coefficient=0.1)
    # A tie between equals with nu = 2 has probability 1/2; (1 + 1)^2 = 4.
    assert value(loss, column(1.0, 1.0), judged(0, 0)) == pytest.approx(LN(2) + 0.4, rel=1e-14)


@pytest.mark.parametrize(
    ("kind", "setting", "choices"),
    [
        ("plackett_luce", {"use_margin": True}, "bradley_terry, davidson, rao_kupper"),
        (
            "plackett_luce",
            {"label_smoothing": 0.1},
            "bradley_terry, davidson, rao_kupper, step_bce",
        ),
        ("regression", {"use_margin": True}, "bradley_terry, davidson, rao_kupper"),
        ("regression", {"label_smoothing": 0.1}, "bradley_terry, davidson, rao_kupper, step_bce"),
        (
            "regression",
            {"center_rewards_coefficient": 0.1},
            "bradley_terry, davidson, plackett_luce, rao_kupper",
        ),
    ],
)
def test_a_setting_without_meaning_is_refused(kind, setting, choices):
    with pytest.raises(ValidationError) as error:
        loss_of(type=kind, **setting)
    (key,) = setting
    (problem,) = error.value.errors()
    assert f"{key} has no meaning for type={kind}" in problem["msg"]
    assert problem["msg"].endswith(choices)


def test_a_soft_label_that_cannot_be_used_is_refused_with_its_place():
    loss = loss_of(type="plackett_luce")
    with pytest.raises(DataError, match=r"rows\.jsonl:7: a soft label \(0\.8\)"):
        loss.count([judged(0, 1), judged(0, 1, target=0.8, source="rows.jsonl:7")])


@pytest.mark.parametrize("rows", [((1.0, 2.0),), ((1.0,), (2.0,)), ((1.0, 2.0), (1.0,))])
def test_ratings_that_do_not_fit_are_refused_with_their_place(rows):
    batch = [judged(0, 1, attributes_GK=rows, source="rows.jsonl:3")]
    with pytest.raises(DataError, match=r"rows\.jsonl:3: ratings of shape"):
        loss_of(type="regression")(torch.zeros(2, 2), batch, num_groups=1.0)


def test_mistakes_of_the_caller_are_caught():
    loss = loss_of()
    with pytest.raises(AssertionError, match="2 completions, but scores of shape"):
        loss(torch.zeros(3, 1), [judged(0, 1)], num_groups=1.0)
    with pytest.raises(AssertionError, match="one score per completion"):
        loss(torch.zeros(2, 2), [judged(0, 1)], num_groups=1.0)
    with pytest.raises(AssertionError, match="skip the step"):
        loss(torch.zeros(2, 1), [judged(0, 0)], num_groups=0.0)


def test_metrics_over_pairs_of_different_rank():
    loss = loss_of(type="davidson")
    batch = [judged(0, 1), judged(1, 0), judged(0, 1), judged(0, 0), judged(0, 1, 1)]
    scores = column(2.0, 1.0, 3.0, -1.0, 0.5, 0.5, 9.0, 9.0, 4.0, 5.0, 0.0, dtype=torch.float32)

    output = loss(scores.requires_grad_(), batch, num_groups=loss.count(batch))
    metrics = loss.metrics(output.sums)

    # Pairs (better, worse): (2, 1) right, (-1, 3) wrong, (.5, .5) equal, so wrong, (4, 5) wrong,
    # (4, 0) right; the tie takes no part.
    assert metrics["num_valid_samples"] == 5.0
    assert metrics["accuracy"] == pytest.approx(2 / 5)
    assert metrics["rewards_chosen_mean"] == pytest.approx((2 - 1 + 0.5 + 4 + 4) / 5)
    assert metrics["rewards_rejected_mean"] == pytest.approx((1 + 3 + 0.5 + 5 + 0) / 5)
    assert metrics["loss"] == pytest.approx(float(output.loss.detach()), rel=1e-6)
    assert loss.count(batch) == 5.0
    assert not any(total.requires_grad for total in output.sums.values())


def test_sums_of_batches_make_the_metrics_of_all():
    loss = loss_of()
    batch = [judged(0, 1), judged(0, 0), judged(0, 1, 2), judged(2, 1)]
    scores = column(2.0, 1.0, 7.0, 7.0, 0.0, 1.0, 2.0, 1.0, 4.0)
    whole = loss(scores, batch, num_groups=3.0).sums
    first = loss(scores[:4], batch[:2], num_groups=99.0).sums
    second = loss(scores[4:], batch[2:], num_groups=1.0).sums

    together = loss.metrics({name: first[name] + second[name] for name in first})

    assert together == pytest.approx(loss.metrics(whole), rel=1e-14)


def test_a_mean_over_nothing_is_absent():
    ties = [judged(0, 0)]
    nothing = loss_of()(torch.zeros(2, 1), ties, num_groups=1.0)
    assert loss_of().metrics(nothing.sums) == {"num_valid_samples": 0.0}

    davidson = loss_of(type="davidson")
    only_ties = davidson.metrics(davidson(torch.zeros(2, 1), ties, num_groups=1.0).sums)
    # Equal scores and nu = 1: a tie is one of three equal outcomes.
    assert only_ties == {"num_valid_samples": 0.0, "loss": pytest.approx(LN(3), rel=1e-6)}


def test_regression_is_ranked_by_its_weighted_attributes():
    scores = torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    batch = [judged(0, 1, attributes_GK=((1.0, 0.0), (0.0, 3.0)))]
    config = LossConfig(type="regression")

    by_mean = RewardLoss(config)
    assert by_mean.metrics(by_mean(scores, batch, num_groups=1.0).sums) == {
        "loss": 0.0,
        "accuracy": 0.0,
        "num_valid_samples": 1.0,
        "rewards_chosen_mean": 0.5,
        "rewards_rejected_mean": 1.5,
    }
    by_weight = RewardLoss(config, reward_weights_K=(2.0, 0.5))
    assert by_weight.metrics(by_weight(scores, batch, num_groups=1.0).sums) == {
        "loss": 0.0,
        "accuracy": 1.0,
        "num_valid_samples": 1.0,
        "rewards_chosen_mean": 2.0,
        "rewards_rejected_mean": 1.5,
    }
