"""The losses of steps: by hand, and that no division into micro-batches changes them."""

from __future__ import annotations

import math

import pytest
import torch

from laurel.config.policy import RewardModelConfig
from laurel.config.reward_model import LossConfig, RewardTrainingRun
from laurel.extensions.reward_losses.losses import steps_ranked, steps_right
from laurel.training.losses import RewardLoss
from laurel.types import Completion, Group, Message, Preference

NAN = math.nan


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def labelled(*steps_GS: tuple[float, ...]) -> Preference:
    completion = Completion(messages=(Message("assistant", "a"),))
    return Preference(
        group=Group(id="g", prompt=(), completions_G=(completion,) * len(steps_GS)),
        ranks_G=(0,) * len(steps_GS),
        steps_GS=steps_GS,
    )


def test_cross_entropy_of_hard_soft_and_missing_labels() -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, 30.0])
    loss = steps_right(logits, torch.tensor([1.0, 0.25, NAN, 0.0]))
    expected = [
        -log_sigmoid(2.0),
        -(0.25 * log_sigmoid(-1.0) + 0.75 * log_sigmoid(1.0)),
        0.0,
        30.0,
    ]
    torch.testing.assert_close(loss, torch.tensor(expected))
    smoothed = steps_right(logits[:1], torch.tensor([1.0]), label_smoothing=0.1)
    assert float(smoothed) == pytest.approx(-(0.9 * log_sigmoid(2.0) + 0.1 * log_sigmoid(-2.0)))


def test_a_missing_label_has_no_gradient() -> None:
    logits = torch.tensor([math.inf, 1.0], requires_grad=True)
    steps_right(logits, torch.tensor([NAN, 1.0])).sum().backward()
    assert logits.grad is not None
    assert logits.grad[1].isfinite()


def test_the_ranking_loss_by_hand() -> None:
    # Two right steps, then two wrong ones. The state before the first step has the logit 0.
    a, b, c, d, margin = 0.5, 1.5, -0.7, 0.2, 4.0
    wrong = math.exp(c + margin) + math.exp(d + margin)
    terms = [
        math.log(math.exp(x) / (math.exp(x) + below))
        for x, below in (
            (b, math.exp(a) + 1.0 + wrong),
            (a, 1.0 + wrong),
            (0.0, wrong),
        )
    ]
    logits = torch.tensor([a, b, c, d])
    loss = steps_ranked(logits, [(1.0, 0.9, 0.0, 0.1)], margin=margin)
    torch.testing.assert_close(loss, torch.tensor([-sum(terms) / 3]))
    # Without wrong steps, the earliest state has nothing to be chosen before.
    two = steps_ranked(logits[:2], [(1.0, 1.0)], margin=margin)
    expected = -(
        math.log(math.exp(b) / (math.exp(b) + math.exp(a) + 1.0))
        + math.log(math.exp(a) / (math.exp(a) + 1.0))
    )
    torch.testing.assert_close(two, torch.tensor([expected / 2]))


def test_steps_without_a_clear_label_do_not_take_part_in_the_ranking() -> None:
    logits = torch.tensor([0.5, 9.0, -0.7, 3.0, 1.0])
    loss = steps_ranked(logits, [(1.0, NAN, 0.0, 0.5), (NAN,)], margin=1.0)
    alone = steps_ranked(logits[[0, 2]], [(1.0, 0.0)], margin=1.0)
    torch.testing.assert_close(loss, torch.tensor([float(alone), 0.0]))


BATCH = [
    labelled((1.0, 0.0, NAN)),
    labelled((1.0, 1.0), (NAN, 0.3)),
    labelled((NAN,)),
    labelled((0.0, 0.0, 0.0)),
]


@pytest.mark.parametrize(("kind", "count"), [("step_bce", 8.0), ("step_ranking", 4.0)])
def test_micro_batches_add_up_to_the_batch(kind: str, count: float) -> None:
    loss = RewardLoss(LossConfig.model_validate({"type": kind}))
    assert loss.count(BATCH) == count
    logits = torch.randn(11, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = loss(logits, BATCH, num_groups=count)
    parts, first = torch.zeros((), dtype=torch.float64), 0
    for one in BATCH:
        size = sum(one.num_outputs_G)
        parts += loss(logits[first : first + size], [one], num_groups=count).loss
        first += size
    torch.testing.assert_close(whole.loss, parts)
    metrics = loss.metrics(whole.sums)
    assert metrics["num_valid_samples"] == 8.0
    assert metrics["loss"] == pytest.approx(float(whole.loss))
    assert set(metrics) == {"num_valid_samples", "loss", "accuracy"}


def test_accuracy_counts_steps_on_the_side_of_their_label() -> None:
    loss = RewardLoss(LossConfig(type="step_bce"))
    logits = torch.tensor([[1.0], [1.0], [-1.0], [0.0]])
    found = loss(logits, [labelled((1.0, 0.2, 0.0, 0.5))], num_groups=4.0)
    assert loss.metrics(found.sums)["accuracy"] == pytest.approx(2 / 3)


def test_a_logit_that_is_not_finite_is_on_no_side() -> None:
    loss = RewardLoss(LossConfig(type="step_bce"))
    logits = torch.tensor([[1.0], [math.nan], [math.inf]])
    metrics = loss.metrics(loss(logits, [labelled((1.0, 0.0, 0.0))], num_groups=3.0).sums)
    assert metrics["accuracy"] == 1.0
    assert metrics["num_valid_samples"] == 1.0


def test_answers_without_a_clear_label_teach_a_ranking_nothing() -> None:
    vague = labelled((0.5, NAN), (NAN,))
    ranking = RewardLoss(LossConfig(type="step_ranking"))
    assert not ranking.teaches(vague)
    assert ranking.count([vague]) == 0.0
    assert ranking.teaches(labelled((0.5,), (0.5, 0.0)))
    assert ranking.count([labelled((0.5,), (0.5, 0.0))]) == 1.0
    cross_entropy = RewardLoss(LossConfig(type="step_bce"))
    assert cross_entropy.teaches(vague)
    assert cross_entropy.count([vague]) == 1.0
    assert not cross_entropy.teaches(labelled((NAN,)))


@pytest.mark.parametrize(
    ("policy", "loss", "said"),
    [
        ("process", "bradley_terry", "a process reward model needs"),
        ("bradley_terry", "step_bce", "a process reward model needs"),
    ],
)
def test_model_and_loss_must_fit(policy: str, loss: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RewardTrainingRun.model_validate(
            {
                "policy": {"reward_model_cfg": {"reward_model_type": policy}},
                "rm": {"loss": {"type": loss}},
            }
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"step_separator": "\n"},
        {"step_aggregate": "mean"},
        {"reward_model_type": "process", "attributes": ["a"]},
    ],
)
def test_settings_without_a_meaning_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="remove"):
        RewardModelConfig.model_validate(changes)


def test_a_margin_without_ranking_is_refused() -> None:
    with pytest.raises(ValueError, match="step_margin has no meaning"):
        LossConfig(type="step_bce", step_margin=2.0)
