"""A reward model that commands load into this process: found, checked, made ready to score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.text import Text

from laurel.cli.scorer_settings import OPTIONS, policy_of_settings
from laurel.config.schema import ClusterConfig
from laurel.errors import ConfigError, key_of, speaking
from laurel.observe.console import visible
from laurel.rewards.load import (
    ModelPlace,
    Say,
    ScorerOptions,
    check_at_once,
    check_files,
    find_model,
    load_scorer,
    read_rules,
)

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.rewards.local import LocalScorer

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
    """Where it is; see `rewards.load.find_model`.

    Args:
        model: What `--model` says.
        scores: It is to give scores; see `rewards.load.check_at_once`.

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
    options: ScorerOptions,
    *,
    settings: Sequence[str],
    cpu_threads: int | None,
    console: Console,
    note_max_length: bool = True,
) -> LocalScorer:
    """Check the files of a model and load it, with signs of life.

    Args:
        place: See `find_local`.
        options: How it is loaded and scores; the policy section is that of the settings.
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
        is_idle = rules is not None and options.max_length not in (None, rules.max_length)
        if rules is not None and is_idle and note_max_length:
            say(f"note    --max-length is not used: scoring.json says {rules.max_length} tokens")
        from laurel.distributed.process import prepare

        prepare(ClusterConfig(device=options.device, cpu_threads=cpu_threads), seed=0)
        return load_scorer(place, replace(options, policy=policy), say=say)
