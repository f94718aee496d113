"""What can be wrong in `grpo.health`, told with the key and the choices."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from laurel.config.grpo import Alarm, GRPORun
from laurel.config.load import load_config
from laurel.errors import ConfigError


def loaded(*overrides: str) -> GRPORun:
    return load_config(GRPORun, None, list(overrides)).config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["grpo.health.stop_on=[length]", "grpo.health.ignore=[length]"], "both name length"),
        (["grpo.health.stop_on=[overoptimisation]"], "needs grpo.health.gold_metric, or a part"),
        (["grpo.health.stop_on=[format]"], "needs format_metric"),
        (["grpo.health.stop_on=[length]", "grpo.health.enabled=false"], "enabled=true"),
        (["grpo.health.length_factor=1.0"], "greater than 1"),
        (["grpo.health.window=0"], "at least 1"),
        (["grpo.health.stop_on=[lengths]"], f"one of {', '.join(get_args(Alarm))}"),
        (["grpo.health.stop_on=[lengths]"], "did you mean 'length'?"),
        (["grpo.health.windows=3"], "did you mean 'window'?"),
        (
            ["grpo.health.stop_on=[kl_jump]", "loss_fn.reference_policy_kl_penalty=0"],
            "loss_fn.reference_policy_kl_penalty",
        ),
        (["grpo.health.stop_on=[entropy]"], "there is no entropy any more (it rose in no run"),
        (["grpo.health.ignore=[kl_without_reward]"], "there is no kl_without_reward any more"),
        (["grpo.health.kl_growth=2.0"], "its alarm kl_without_reward was removed"),
        (["grpo.health.entropy_share=0.1"], "there is no such key any more"),
        (["grpo.health.noise_floor_share=0.9"], "there is no such key any more"),
        (["grpo.health.stop_on=[ensemble]"], "env.reward_model.models"),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        loaded(*overrides)


def test_a_part_without_weight_is_gold_enough_to_stop_on() -> None:
    parts = "[{env: math, weight: 1.0}, {env: math, weight: 0.0}]"
    composite = f"+env.composite.both={{parts: {parts}}}"
    config = loaded(composite, "grpo.health.stop_on=[overoptimisation]")
    assert config.grpo.health.gold_metric is None
