"""Translates command options and settings into the specs of scorers and judges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from laurel import plugins
from laurel.config.load import load_config, parse_override
from laurel.config.policy import PolicyConfig, RewardPolicyConfig
from laurel.errors import ConfigError, key_of, setting_of, speaking
from laurel.observe.console import say_on

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.config.environments import JudgeFile
    from laurel.models.scoring import ScoringRules
    from laurel.rewards.blocking import BlockingScorer
    from laurel.rewards.scorer import LocalScorer, ModelScorer
    from laurel.rewards.spec import Say, ScorerSpec


def scorer_spec(asked: ScorerSpec, policy: PolicyConfig) -> ScorerSpec:
    """Complete a requested scorer's spec with how the `policy` section says its model is loaded."""
    from laurel.run.model import model_spec

    length = asked.max_length
    if length is None and "max_total_sequence_length" in policy.model_fields_set:
        length = policy.max_total_sequence_length
    model = replace(model_spec(policy), name=asked.model.name)
    return replace(asked, max_length=length, model=model)


# The options of a command line that say which reward model is meant, and how it is loaded.

OPTIONS = {
    "policy.model_name": "--model",
    "policy.precision": "--precision",
    "cluster.device": "--device",
    "cluster.cpu_threads": "--cpu-threads",
}
"""Words errors about a model in terms of command-line options, for commands without a file."""
_WITH_SETTINGS = OPTIONS | {"policy": "--set "}
# Keys of the policy section that have an option of their own.
_HAS_OPTION = {"model_name": "--model", "precision": "--precision"}
# Keys without effect on a model that has its scoring contract.
_SAID_BY_CONTRACT = (
    "reward_model_cfg",
    "max_total_sequence_length",
    "tokenizer.chat_template_kwargs",
    "tokenizer.date",
)


def asked_scorer(model: str, options: ScorerSpec, *, or_server: bool = False) -> ScorerSpec:
    """Return the scorer spec that a command's options describe; its model is resolved, not loaded.

    With `or_server`, the error message says that `model` may be an address.

    Raises:
        UserError: There is no such model, or it is no reward model.
    """
    if model.startswith(("http://", "https://")):
        raise ConfigError(
            f"{setting_of('--model', model)} is an address, and this command loads a model; name "
            "a directory or a name on the hub. To ask a running server: laurel eval pairs --model "
            "ADDRESS -d FILE, or POST to its /v1/score (docs/http.md)"
        )
    if not model:
        hub = "a name on the Hugging Face hub"
        places = f", {hub}, or the address of a running laurel serve" if or_server else f" or {hub}"
        raise ConfigError(
            f"no reward model is named; add {key_of('--model')} with a directory (of a model, a "
            f"checkpoint, or a run with checkpoints){places}"
        )
    from laurel.rewards.spec import find_reward_model

    with speaking(OPTIONS):
        found = find_reward_model(model)
    names = (_WITH_SETTINGS | {"policy.max_total_sequence_length": "--max-length"},)
    return replace(options, model=replace(options.model, name=model), found=found, names=names)


def open_asked(
    spec: ScorerSpec, settings: Sequence[str], *, cpu_threads: int | None, console: Console
) -> LocalScorer:
    """Load a command's scorer into this process, and show the progress.

    Raises:
        UserError: A model or a setting cannot be used.
    """
    say = say_on(console)
    with console.status("loading torch and the model"):
        from laurel.rewards.open import open_local, read_rules
        from laurel.workers.process import prepare

        assert spec.found is not None
        with speaking(_WITH_SETTINGS):
            policy = policy_of_settings(settings, rules=read_rules(spec.found), say=say)
            prepare(spec.device, cpu_threads=cpu_threads, seed=0)
        return open_local(scorer_spec(spec, policy), say=say)


IN_A_FILE = {
    "env.reward_model": "",
    "policy": "",
    "policy.max_total_sequence_length": "max_model_len",
}
"""The names of keys in a file that `--judge` names."""


def read_judge(file: Path, *, say: Say) -> JudgeFile:
    """Read a file that `--judge` names.

    Raises:
        ConfigError: There is no such file, or a key is wrong.
    """
    from laurel.config.environments import JudgeFile

    loaded = load_config(JudgeFile, file)
    for warning in loaded.warnings:
        say(f"warning: {warning}")
    return loaded.config


def check_judge(judge: JudgeFile) -> None:
    """Check the template of a command's judge, and that there is the model that it would load.

    Raises:
        UserError: The template is wrong, or there is no such model.
    """
    from laurel.rewards.spec import find_model

    plugins.find(plugins.ScoreSource, "judge").check(judge.judge, "judge")
    if judge.urls is None:
        with speaking(IN_A_FILE):
            find_model(str(judge.model_name))


@contextmanager
def open_asked_judge(
    judge: JudgeFile, options: ScorerSpec, console: Console, *, cpu_threads: int | None
) -> Iterator[ModelScorer | BlockingScorer]:
    """Open the judge of a command, and close it with the context.

    Args:
        options: The options of the command, of which the device counts.
        cpu_threads: The number of threads on a CPU; None is as `prepare` chooses.

    Raises:
        UserError: The judge cannot be loaded or asked.
    """
    with console.status("loading the judge"):
        from laurel.rewards.open import open_scorer
        from laurel.rewards.spec import NamedSource
        from laurel.workers.process import prepare

        with speaking(OPTIONS):
            prepare(options.device, cpu_threads=cpu_threads, seed=0)
        source = NamedSource("judge", judge.judge, within=judge)
        spec = replace(options, source=source, names=(IN_A_FILE,))
        scorer = open_scorer(spec, say=say_on(console))
    with scorer:
        yield scorer


def policy_of_settings(
    settings: Sequence[str], *, rules: ScoringRules | None, say: Say
) -> PolicyConfig:
    """Build a `policy` section from the values of `--set`.

    `policy.` before a key may be left out. `rules` are the scoring contract of the model, if it has
    one.

    Raises:
        ConfigError: A key is unknown, or an option or the contract decides it.
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
    loaded = load_config(RewardPolicyConfig, None, overrides)
    for warning in loaded.warnings:
        say(f"warning: {warning}")
    return loaded.config
