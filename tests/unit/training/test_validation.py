"""Scores of a validation set: in order, whatever the batches; figures that mean what they say."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from laurel.config.policy import BatchLimits, NamedCall
from laurel.config.reward_model import LossConfig
from laurel.data.forest import Batcher
from laurel.data.report import DataReport
from laurel.models.scoring import ScoringContract, ScoringRules, StepRules
from laurel.training.epochs import Validation, validate
from laurel.training.learner import LocalLearner
from laurel.training.losses import RewardLoss
from laurel.training.sft import SupervisedFineTuning
from laurel.types import Preference, PreferenceSample, TokenGroup, group_of


class ByLastToken(nn.Module):
    """Scores a completion by its last token: the numbers in a test are the tokens."""

    path = "forest"

    def __init__(self, *outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(0.9)
        self.outputs = outputs or ({},)

    def forward(self, forest):
        last = [int(forest.ids_T[index]) for index in forest.last_N]
        rows = [[column.get(token, float(token)) for column in self.outputs] for token in last]
        return cast(Tensor, self.dropout(torch.tensor(rows) * self.weight))


def sample(index, *tokens, **judged):
    """A group whose completions end with these tokens; the first is the best.

    Each has as many characters as its last token says.
    """
    ranks_G = judged.pop("ranks_G", tuple(range(len(tokens))))
    group = group_of([], ["x" * t for t in tokens], group_id=f"group {index}")
    return PreferenceSample(
        preference=Preference(group=group, ranks_G=ranks_G, **judged),
        tokens=TokenGroup(
            id=group.id,
            trunk_ids=np.array([1, 2], dtype=np.int32),
            branches_ids_G=tuple(np.array([0] * t + [t], dtype=np.int32) for t in tokens),
        ),
    )


def run(
    samples,
    *,
    model=None,
    loss=None,
    attributes=(),
    weights=None,
    steps=None,
    budget=20,
    done=None,
):
    model = model or ByLastToken()
    learner = LocalLearner(model, optimizer=NamedCall(name="torch.optim.SGD", kwargs={"lr": 1.0}))
    model.train()
    rules = ScoringRules(
        template_sha256="",
        bos_id=None,
        eos_id=None,
        pad_id=0,
        max_length=99,
        truncation_side="left",
        attributes=attributes,
        attribute_weights=weights,
        steps=steps,
    )
    micro_batches = Batcher("forest", BatchLimits(forest_tokens=budget), pad_id=0).cut(
        [one.tokens for one in samples],
        [one.preference for one in samples],
    )
    validation = validate(
        learner,
        samples,
        micro_batches,
        loss=RewardLoss(loss or LossConfig(), reward_weights_K=weights),
        contract=ScoringContract(None, rules),
        on_groups=(done if done is not None else []).append,
    )
    assert model.training, "the model trains on as before"
    return validation


def softplus(x):
    return math.log1p(math.exp(x))


SET = [sample(0, 3, 1), sample(1, 2, 5), sample(2, 4, 4), sample(3, 9, 6)]


def test_figures_by_hand():
    validation = run(SET)
    assert validation.scores_BG == ((3, 1), (2, 5), (4, 4), (9, 6))
    metrics = validation.metrics
    # Margins 2, -3, 0, 3; an equal score is not right.
    assert metrics["loss"] == pytest.approx(
        (softplus(-2) + softplus(3) + softplus(0) + softplus(-3)) / 4, rel=1e-6
    )
    assert metrics["accuracy"] == 0.5
    assert metrics["score_ties"] == 0.25
    assert metrics["rewards_chosen_mean"] == 4.5
    assert metrics["rewards_rejected_mean"] == 4.0
    assert metrics["margin_mean"] == 0.5
    assert metrics["num_valid_samples"] == 4
    # The answers are as long as their score, so length and score agree wholly.
    assert metrics["score_length_correlation"] == pytest.approx(1.0)
    assert metrics["longer_wins_baseline"] == 2.5 / 4
    assert next(iter(metrics)) == "loss"


def test_the_longer_answer_wins_as_often_as_in_the_data_report():
    # Two answers of one token each, of which one has more characters; and two of one length.
    samples = [sample(1, 3, 1), sample(2, 4, 4), sample(3, 2, 5)]
    both = (np.array([1], dtype=np.int32),) * 2
    cut = [replace(one, tokens=replace(one.tokens, branches_ids_G=both)) for one in samples]
    report = DataReport(name="default")
    report.describe(one.preference for one in samples)
    assert report.longer_wins_share == 0.5
    assert run(cut).metrics["longer_wins_baseline"] == report.longer_wins_share


@pytest.mark.parametrize(("budget", "batches"), [(1, 4), (15, 4), (33, 2), (10_000, 1)])
def test_scores_come_in_the_order_of_the_set_whatever_the_batches(budget, batches):
    done: list[int] = []
    validation = run(SET, budget=budget, done=done)
    assert validation.scores_BG == ((3, 1), (2, 5), (4, 4), (9, 6))
    assert validation.metrics == pytest.approx(run(SET).metrics, rel=1e-6)
    assert sum(done) == 4
    assert len(done) == batches  # of 8, 11, 12 and 19 tokens


def test_scores_that_are_not_finite_are_no_figure():
    """A loss of NaN or 0.0 would make this the best checkpoint."""
    validation = run(SET, model=ByLastToken(dict.fromkeys(range(10), math.nan)))
    assert validation.metrics == {"num_valid_samples": 0.0, "num_nonfinite": 8.0}


def test_one_score_that_is_not_finite_takes_the_loss_and_is_counted():
    metrics = run(SET, model=ByLastToken({9: math.inf})).metrics
    assert "loss" not in metrics or math.isfinite(metrics["loss"])
    assert metrics["num_nonfinite"] == 1.0
    assert metrics["num_valid_samples"] == 3.0
    metrics = run(SET, model=ByLastToken({1: math.nan})).metrics
    assert "loss" not in metrics
    assert metrics["accuracy"] == pytest.approx(1 / 3)


def test_a_set_of_ties_has_no_accuracy():
    ties = [sample(i, 3, 1, ranks_G=(0, 0)) for i in range(3)]
    metrics = run(ties, loss=LossConfig(type="davidson")).metrics
    assert metrics["num_valid_samples"] == 0.0
    assert "accuracy" not in metrics
    assert metrics["loss"] > 0


def test_lists_have_a_share_of_best_first():
    lists = [sample(0, 5, 3, 1), sample(1, 2, 7, 1)]
    validation = run(lists, loss=LossConfig(type="plackett_luce"))
    assert validation.scores_BG == ((5, 3, 1), (2, 7, 1))
    assert validation.metrics["top1"] == 0.5
    assert validation.metrics["num_valid_samples"] == 6


def test_a_regression_head_has_an_error_for_each_attribute_and_a_weighted_reward():
    rated = [
        sample(0, 3, 1, attributes_GK=((3.0, 6.0), (2.0, math.nan))),
        sample(1, 2, 5, attributes_GK=((2.0, 4.0), (5.0, 12.0))),
    ]
    double = ByLastToken({}, {t: 2.0 * t for t in range(10)})
    validation = run(
        rated,
        model=double,
        loss=LossConfig(type="regression"),
        attributes=("help", "length"),
        weights=(1.0, -1.0),
    )
    # Outputs (t, 2t), so the reward is -t: the lower token wins.
    assert validation.scores_BG == ((-3, -1), (-2, -5))
    assert validation.metrics["accuracy"] == 0.5
    assert validation.metrics["mse/help"] == pytest.approx(1 / 4)
    assert validation.metrics["mse/length"] == pytest.approx(4 / 3)
    assert validation.metrics["pearson/length"] == pytest.approx(
        float(np.corrcoef([6, 4, 10], [6, 4, 12])[0, 1]), rel=1e-6
    )


class ByReads(nn.Module):
    """The logits of steps are the tokens at their ends, but 99 is infinite and 98 not a number."""

    path = "forest"

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, forest):
        special = {99: math.inf, 98: math.nan}
        ids = [int(forest.ids_T[index]) for index in forest.reads]
        return torch.tensor([[special.get(one, float(one))] for one in ids]) * self.weight


def steps_of(index, tokens, labels):
    group = group_of([], ["answer"], group_id=f"group {index}")
    return PreferenceSample(
        preference=Preference(group=group, ranks_G=(0,), steps_GS=(labels,)),
        tokens=TokenGroup(
            id=group.id,
            trunk_ids=np.array([], dtype=np.int32),
            branches_ids_G=(np.array(tokens, dtype=np.int32),),
            reads_G=(tuple(range(len(tokens))),),
        ),
    )


def test_steps_that_are_not_finite_are_counted_and_never_a_score():
    samples = [
        steps_of(0, [3, 2], (1.0, 1.0)),
        steps_of(1, [99, 2], (0.0, 1.0)),
        steps_of(2, [4, 98], (1.0, 0.5)),
    ]
    loss = LossConfig(type="step_bce")
    validation = run(samples, model=ByReads(), loss=loss, steps=StepRules())
    (sound,), (infinite,), (unknown,) = validation.scores_BG
    assert sound == pytest.approx(1 / (1 + math.exp(-2)))
    assert math.isnan(infinite)
    assert math.isnan(unknown)
    assert validation.metrics["num_nonfinite"] == 2.0
    # The steps that have a value and a label: 3, 2, 2 and 4.
    assert validation.metrics["num_valid_samples"] == 4.0
    assert validation.metrics["step_accuracy"] == 1.0


def test_fine_tuning_says_how_much_it_validated_in_whole_numbers():
    """The line began `num_valid_tokens 298.0000  num_valid_samples 30.0000`."""
    lines = []
    progress = SimpleNamespace(message=lambda line, *, is_routine: lines.append(line))
    figures = {"num_valid_tokens": 12298.0, "num_valid_samples": 30.0, "loss": 0.74681}
    run = cast(SupervisedFineTuning, SimpleNamespace(services=SimpleNamespace(progress=progress)))
    for changed in ({}, {"num_valid_samples": 1.0}):
        validation = Validation(metrics=figures | changed)
        SupervisedFineTuning.report(run, "default", [], validation, step=3)
    assert lines == [
        "step 3  validation-default  loss 0.7468  of 12,298 tokens in 30 conversations",
        "step 3  validation-default  loss 0.7468  of 12,298 tokens in 1 conversation",
    ]
