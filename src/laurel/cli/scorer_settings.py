"""The options of the command line that say how a reward model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from laurel.config.load import load_config
from laurel.config.overrides import parse_override
from laurel.config.schema import PolicyConfig
from laurel.errors import ConfigError, Terms
from laurel.rewards.load import Say

if TYPE_CHECKING:
    from laurel.models.scoring import ScoringRules

_HAS_OPTION = {"model_name": "--model", "precision": "--precision"}
"""Keys of the policy section that have an option of their own."""
_SAID_BY_CONTRACT = (
    "reward_model_cfg",
    "max_total_sequence_length",
    "tokenizer.chat_template_kwargs",
)
"""Keys that would have no effect on a model that brings its scoring contract."""
OPTIONS = Terms(
    {"policy.model_name": "--model", "cluster.device": "--device"},
    hint="(Here, keys of policy are given as --set, e.g. --set tokenizer.pad_token=auto)",
)
"""Errors about a model, for somebody who has only the command line."""


def policy_of_settings(
    settings: Sequence[str], *, rules: ScoringRules | None, say: Say
) -> PolicyConfig:
    """The policy section that `--set` writes.

    Args:
        settings: Overrides as `key=value`; `policy.` before the key may be left out.
        rules: The contract of the model, if it brings one.
        say: Told of settings without effect.

    Raises:
        ConfigError: A key that is not known, or that something else settles.
    """
    overrides: list[str] = []
    for setting in settings:
        sign = setting[: len(setting) - len(setting.lstrip("+~"))]
        override = sign + setting[len(sign) :].removeprefix("policy.")
        key = ".".join(parse_override(override).keys)
        if key in _HAS_OPTION:
            raise ConfigError(f"--set {setting}: use the option {_HAS_OPTION[key]} for that")
        if rules is not None and key.startswith(_SAID_BY_CONTRACT):
            raise ConfigError(f"--set {setting}: scoring.json of the model settles that")
        overrides.append(override)
    loaded = load_config(PolicyConfig, None, overrides)
    for warning in loaded.warnings:
        say(f"warning: {warning}")
    return loaded.config
