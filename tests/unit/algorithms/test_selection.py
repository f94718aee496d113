"""Which metric names are understood, and what is said of the others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from laurel.algorithms.selection import TRAIN_METRICS, Selection, select_by
from laurel.errors import ConfigError
from laurel.observe.metrics import PREFERENCE_METRICS

SETS = ["default", "Help-Steer_3"]


@pytest.mark.parametrize(
    ("name", "key", "higher"),
    [
        ("validation-default_loss", "validation-default_loss", False),
        ("validation-default_accuracy", "validation-default_accuracy", True),
        ("validation-Help-Steer_3_loss", "validation-Help-Steer_3_loss", False),
        ("validation-Help-Steer_3_rewards_chosen_mean",
         "validation-Help-Steer_3_rewards_chosen_mean", True),
        ("val:validation-default_loss", "validation-default_loss", False),
        ("val:validation-default_ece", "validation-default_ece", False),
        ("train_loss", "train_loss", False),
        ("train_accuracy", "train_accuracy", True),
        ("train:loss", "train_loss", False),
        ("train:train_loss", "train_loss", False),
        ("train:grad_norm", "train_grad_norm", False),
    ],
)  # fmt: skip
def test_every_form_of_a_name(name: str, key: str, higher: bool) -> None:
    assert select_by(name, None, sets=SETS) == Selection(key=key, higher_is_better=higher)


@pytest.mark.parametrize("higher", [True, False])
def test_the_direction_may_be_given(higher: bool) -> None:
    chosen = select_by("validation-default_loss", higher, sets=SETS)
    assert chosen == Selection(key="validation-default_loss", higher_is_better=higher)


def test_auto_is_the_loss_of_the_first_set() -> None:
    assert select_by("auto", None, sets=SETS) == Selection(key="validation-default_loss")
    assert select_by("auto", None, sets=[]) == Selection(key=None)


def test_null_keeps_the_most_recent() -> None:
    assert select_by(None, True, sets=SETS) == Selection(key=None)


def test_attributes_of_a_regression_head() -> None:
    by_error = select_by("validation-default_mse/help", None, sets=SETS, attributes=["help"])
    assert by_error == Selection(key="validation-default_mse/help", higher_is_better=False)
    by_order = select_by("validation-default_pearson/help", None, sets=SETS, attributes=["help"])
    assert by_order == Selection(key="validation-default_pearson/help", higher_is_better=True)
    with pytest.raises(ConfigError, match="mse/help"):
        select_by("validation-default_mse/honesty", None, sets=SETS, attributes=["help"])


@pytest.mark.parametrize(
    "name",
    [
        "val_loss",  # the default of NeMo RL, which it never measures
        "loss",
        "validation-other_loss",
        "validation-default/loss",
        "validation-default_Loss",
        "train/loss",
        "train:validation-default_loss",
        "val:train_loss",
        "val:loss",
        "test:loss",
        "train:loss:loss",
        "",
    ],
)
def test_a_name_that_is_never_measured_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        select_by(name, None, sets=SETS)
    message = str(refusal.value)
    assert message.startswith(f"checkpointing.metric_name={name}: this run never measures that.")
    for measured in SETS:
        for metric in PREFERENCE_METRICS:
            assert f"validation-{measured}_{metric}" in message
    for metric in TRAIN_METRICS:
        assert f"train_{metric}" in message


def test_without_a_validation_set_it_says_so() -> None:
    with pytest.raises(
        ConfigError, match="There is no validation set: name one under data"
    ) as hint:
        select_by("validation-default_loss", None, sets=[])
    assert "It can measure: train_loss" in str(hint.value)


def test_a_wrong_name_is_told_without_torch() -> None:
    program = "import sys, laurel.algorithms.selection; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
