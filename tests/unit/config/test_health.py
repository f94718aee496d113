"""What can be wrong in `grpo.health`, told with the key and the choices."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from laurel.config.grpo_training import GRPORun
from laurel.config.health import Alarm
from laurel.config.load import load_config, to_yaml
from laurel.errors import ConfigError


def loaded(*overrides: str) -> GRPORun:
    return load_config(GRPORun, None, list(overrides)).config


def test_an_alarm_that_does_not_exist_is_told_with_those_that_do() -> None:
    with pytest.raises(ConfigError) as caught:
        loaded("grpo.health.stop_on=[lengths]")
    for name in get_args(Alarm):
        assert name in str(caught.value)
    assert "grpo.health.stop_on" in str(caught.value)
    assert "did you mean 'length'?" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["grpo.health.stop_on=[length]", "grpo.health.ignore=[length]"], "both name length"),
        (["grpo.health.stop_on=[overoptimisation]"], "needs gold_metric"),
        (["grpo.health.stop_on=[format]"], "needs format_metric"),
        (["grpo.health.stop_on=[length]", "grpo.health.enabled=false"], "enabled=true"),
        (["grpo.health.length_factor=1.0"], "greater than 1"),
        (["grpo.health.window=0"], "at least 1"),
        (["grpo.health.windows=3"], "did you mean 'window'?"),
        (
            ["grpo.health.stop_on=[kl_without_reward]", "loss_fn.reference_policy_kl_penalty=0"],
            "loss_fn.reference_policy_kl_penalty",
        ),
        (["grpo.health.stop_on=[entropy]", "loss_fn.entropy=false"], "loss_fn.entropy=true"),
        (["grpo.health.stop_on=[ensemble]"], "env.reward_model.models"),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        loaded(*overrides)


def test_every_threshold_is_described() -> None:
    text = to_yaml(loaded(), describe=True)
    section = text[text.index("  health:") :]
    section = section[: section.index("  seed:")]
    assert "length_factor: 1.5" in section
    assert "completions are so many times as long as in the first steps" in section
    assert section.count("#") > 20
