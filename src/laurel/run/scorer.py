"""A reward model that commands load into this process: found, checked, made ready to score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from laurel.config.load import load_config
from laurel.config.overrides import parse_override
from laurel.config.policy import PolicyConfig
from laurel.errors import ConfigError, Terms, key_of, speaking
from laurel.observe.console import visible
from laurel.rewards.open import (
    ModelPlace,
    Say,
    ScorerSpec,
    check_at_once,
    check_files,
    find_model,
    load_scorer,
    read_rules,
)
from laurel.run.specs import scorer_spec

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.models.scoring import ScoringRules
    from laurel.rewards.scorer import LocalScorer


_HUB = "a name on the Hugging Face hub"


def say_on(console: Console) -> Say:
    """Says lines on a console, whatever stands in them."""

    def say(text: str) -> None:
        console.print(Text("\n".join(map(visible, text.split("\n")))), soft_wrap=True)

    return say


def check_named(model: str, *, or_server: bool = False) -> None:
    """Refuse that no model is named.

    Args:
        model: What `--model` says.
        or_server: Whether it could have been an address.

    Raises:
        ConfigError: Nothing is.
    """
    if not model:
        places = f", {_HUB}, or the address of a running laurel serve"
        raise ConfigError(
            f"no reward model is named; add {key_of('--model')} with a directory (of a model, a "
            "checkpoint, or "
            f"a run with checkpoints){places if or_server else f' or {_HUB}'}"
        )


def find_local(model: str, *, scores: bool = False) -> ModelPlace:
    """Where it is; see `rewards.open.find_model`.

    Args:
        model: What `--model` says.
        scores: It is to give scores; see `rewards.open.check_at_once`.

    Raises:
        UserError: There is none.
    """
    with speaking(OPTIONS):
        place = find_model(model)
        if scores:
            check_at_once(place)
        return place


def open_local(
    place: ModelPlace,
    spec: ScorerSpec,
    *,
    settings: Sequence[str],
    cpu_threads: int | None,
    console: Console,
    note_max_length: bool = True,
) -> LocalScorer:
    """Check the files of a model and load it, with signs of life.

    Args:
        place: See `find_local`.
        spec: How it scores; how it is loaded is said by the settings.
        settings: What `--set` says; see `policy_of_settings`.
        cpu_threads: On CPU; None is one per core.
        console: Where to say what is found.
        note_max_length: Say where `--max-length` has no effect.

    Raises:
        UserError: A model or a setting that cannot be used.
    """
    say = say_on(console)
    with console.status("checking the files of the model"):
        for note in place.notes:
            say(note)
        check_files(place)
    with console.status("loading torch and the model"), speaking(OPTIONS):
        rules = read_rules(place)
        policy = policy_of_settings(settings, rules=rules, say=say)
        is_idle = rules is not None and spec.max_length not in (None, rules.max_length)
        if rules is not None and is_idle and note_max_length:
            say(f"note    --max-length is not used: scoring.json says {rules.max_length} tokens")
        from laurel.workers.process import prepare

        prepare(spec.device, cpu_threads=cpu_threads, seed=0)
        return load_scorer(place, scorer_spec(spec, policy), say=say)


# --------------------------------------------------------------------------------------------------
# The options of the command line that say how a reward model is loaded.

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
