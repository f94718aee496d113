"""Which metric names are understood, and what is said of the others."""

import subprocess
import sys
from dataclasses import replace

import pytest

from laurel.config.grpo import GRPOConfig
from laurel.errors import ConfigError
from laurel.observe.metrics import PREFERENCE_METRICS, STEP_METRICS
from laurel.training.stopping import (
    TRAIN_METRICS,
    EarlyStopping,
    Goal,
    Position,
    Selection,
    policy_goal,
    select_by,
    select_policy_by,
)

SETS = ["default", "Help-Steer_3"]


@pytest.mark.parametrize(
    ("name", "key", "higher"),
    [
        ("validation-default_loss", "validation-default_loss", False),
        ("validation-default_accuracy", "validation-default_accuracy", True),
        ("validation-Help-Steer_3_loss", "validation-Help-Steer_3_loss", False),
        (
            "validation-Help-Steer_3_rewards_chosen_mean",
            "validation-Help-Steer_3_rewards_chosen_mean",
            True,
        ),
        ("val:validation-default_loss", "validation-default_loss", False),
        ("val:validation-default_ece", "validation-default_ece", False),
        ("train_loss", "train_loss", False),
        ("train_accuracy", "train_accuracy", True),
        ("train:loss", "train_loss", False),
        ("train:train_loss", "train_loss", False),
        ("train:grad_norm", "train_grad_norm", False),
    ],
)
def test_every_form_of_a_name(name, key, higher):
    assert select_by(name, None, sets=SETS) == Selection(key=key, higher_is_better=higher)


@pytest.mark.parametrize("higher", [True, False])
def test_the_direction_may_be_given(higher):
    chosen = select_by("validation-default_loss", higher, sets=SETS)
    assert chosen == Selection(key="validation-default_loss", higher_is_better=higher)


def test_auto_is_the_loss_of_the_first_set():
    assert select_by("auto", None, sets=SETS) == Selection(key="validation-default_loss")
    assert select_by("auto", None, sets=[]) == Selection(key=None)


def test_null_keeps_the_most_recent():
    assert select_by(None, True, sets=SETS) == Selection(key=None)


def test_attributes_of_a_regression_head():
    by_error = select_by("validation-default_mse/help", None, sets=SETS, attributes=["help"])
    assert by_error == Selection(key="validation-default_mse/help", higher_is_better=False)
    by_order = select_by("validation-default_pearson/help", None, sets=SETS, attributes=["help"])
    assert by_order == Selection(key="validation-default_pearson/help", higher_is_better=True)
    with pytest.raises(ConfigError, match="mse/help"):
        select_by("validation-default_mse/honesty", None, sets=SETS, attributes=["help"])


@pytest.mark.parametrize(
    "name",
    [
        "loss",
        "validation-other_loss",
        "train:validation-default_loss",
        "val:train_loss",
        "test:loss",
        "",
    ],
)
def test_a_name_that_is_never_measured_is_refused_with_those_that_are(name):
    with pytest.raises(ConfigError) as refusal:
        select_by(name, None, sets=SETS)
    message = str(refusal.value)
    assert message.startswith(f"checkpointing.metric_name={name}: this run never measures that.")
    for measured in SETS:
        for metric in PREFERENCE_METRICS:
            assert f"validation-{measured}_{metric}" in message
    for metric in TRAIN_METRICS:
        assert f"train_{metric}" in message


def test_a_process_reward_model_has_no_metrics_of_pairs():
    def select(name):
        return select_by(name, None, sets=SETS, has_steps=True)

    for metric in ("loss", "num_nonfinite", *STEP_METRICS):
        assert select(f"validation-default_{metric}").key == f"validation-default_{metric}"
    assert select("auto").key == "validation-default_loss"
    for metric in ("accuracy", "margin_mean", "top1"):
        with pytest.raises(ConfigError, match="never measures that"):
            select(f"validation-default_{metric}")


def test_without_a_validation_set_it_says_so():
    with pytest.raises(
        ConfigError, match="There is no validation set: name one under data"
    ) as hint:
        select_by("validation-default_loss", None, sets=[])
    assert "It can measure: train_loss" in str(hint.value)


def goal_of(metric, *, has_validation=True, generations=1):
    config = GRPOConfig(
        stop_at_validation_metric=metric,
        stop_at_validation_threshold=0.5,
        val_num_generations_per_prompt=generations,
    )
    return policy_goal(config, has_validation=has_validation, environments=["math", "mine"])


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("accuracy", "validation_reward_mean"),  # as NeMo RL calls the mean of any reward
        ("reward_mean", "validation_reward_mean"),
        ("val:accuracy", "validation_reward_mean"),
        ("validation_reward_mean", "validation_reward_mean"),
        ("env/mine/accuracy", "validation_env/mine/accuracy"),
        ("pass_k", "validation_pass@4"),
        ("pass@4", "validation_pass@4"),
    ],
)
def test_a_goal_by_its_names(name, key):
    assert goal_of(name, generations=4) == Goal(key=key, threshold=0.5)


@pytest.mark.parametrize("name", ["acuracy", "pass_k", "avg_length", "env/theirs/accuracy", ""])
def test_a_goal_that_no_validation_measures_is_refused(name):
    with pytest.raises(ConfigError, match=f"stop_at_validation_metric={name}: this run never"):
        goal_of(name)


def test_a_goal_needs_a_validation_and_none_is_none():
    with pytest.raises(ConfigError, match="There is no validation set"):
        goal_of("accuracy", has_validation=False)
    assert policy_goal(GRPOConfig(), has_validation=False, environments=[]) is None


def test_a_wrong_name_is_told_without_torch():
    program = "import sys, laurel.training.stopping; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("figure", "higher"),
    [("final_score", True), ("accuracy", True), ("reasoning", True), ("tie_share", False)],
)
def test_figures_of_benchmarks(figure, higher):
    benchmarks = {"My-Bench": ["final_score", "accuracy", "reasoning", "tie_share"]}
    found = select_by(f"val:validation-My-Bench_{figure}", None, sets=SETS, benchmarks=benchmarks)
    expected = Selection(key=f"validation-My-Bench_{figure}", higher_is_better=higher)
    assert found == expected
    with pytest.raises(ConfigError, match=r"never measures that\. It can.*My-Bench_reasoning"):
        select_by("validation-My-Bench_loss", None, sets=[], benchmarks=benchmarks)


def test_auto_is_the_accuracy_where_there_are_only_benchmarks():
    benchmarks = {"B": ["final_score", "accuracy"]}
    only = select_by("auto", None, sets=[], benchmarks=benchmarks)
    assert only == Selection(key="validation-B_accuracy", higher_is_better=True)
    both = select_by("auto", None, sets=SETS, benchmarks=benchmarks)
    assert both == Selection(key="validation-default_loss")


def test_named_sets_of_a_policy():
    asked = {"has_validation": True, "environments": ["math"], "sets": ["Easy", "accuracy"]}
    easy = select_policy_by("validation-Easy_reward_mean", None, **asked)
    assert easy == Selection(key="validation-Easy_reward_mean", higher_is_better=True)
    # What a set is called does not turn the direction.
    short = select_policy_by("val:validation-accuracy_avg_length", None, **asked)
    assert short == Selection(key="validation-accuracy_avg_length", higher_is_better=False)
    with pytest.raises(ConfigError, match="validation-Easy_accuracy"):
        select_policy_by("validation-Hard_reward_mean", None, **asked)


WATCHED = EarlyStopping(key="loss", higher_is_better=False, patience=2, min_delta=0.1)


@pytest.mark.parametrize(
    ("rule", "values", "stale"),
    [
        (WATCHED, [1.0], 0),
        (WATCHED, [1.0, 0.5, 0.45], 1),  # better, but by less than min_delta
        (WATCHED, [1.0, 0.95, 0.85], 0),  # measured against the best, not against the last
        (WATCHED, [1.0, None, None], 2),  # what was not measured is no improvement
        (replace(WATCHED, higher_is_better=True), [0.5, 0.4, 0.7], 0),
        (replace(WATCHED, min_delta=0.0), [1.0, 1.0, 1.0], 2),  # equal is no improvement
    ],
)
def test_validations_since_the_best_value_are_counted(rule, values, stale):
    position = Position(step=1)
    for value in values:
        position = rule.watched(position.validated({} if value is None else {"loss": value}))
    assert position.num_stale == stale


def test_a_validation_before_the_first_step_does_not_count_as_stale():
    position = WATCHED.watched(Position().validated({}))
    assert (position.num_stale, position.best_watched) == (0, None)
    position = WATCHED.watched(Position().validated({"loss": 1.0}))
    assert (position.num_stale, position.best_watched) == (0, 1.0)
