"""Translates configurations and command options into the settings (specs) of components."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from laurel import plugins
from laurel.config.load import load_config, parse_override
from laurel.config.policy import (
    PolicyConfig,
    RewardModelConfig,
    RewardPolicyConfig,
    TokenizerConfig,
)
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.sft import SFTRun
from laurel.errors import ConfigError, counted, key_of, setting_of, speaking
from laurel.models.spec import ModelSpec
from laurel.observe.console import say_on

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.config.environments import JudgeFile
    from laurel.config.grpo_run import GRPORun
    from laurel.generation.requests import GeneratorSpec
    from laurel.models.scoring import ScoringRules
    from laurel.rewards.blocking import BlockingScorer
    from laurel.rewards.scorer import LocalScorer, ModelScorer
    from laurel.rewards.spec import Say, ScorerSpec
    from laurel.training.batches import StepOrder


_NO_HEAD = RewardModelConfig()


def model_spec(policy: PolicyConfig) -> ModelSpec:
    """Return the spec of the model that a `policy` section describes."""
    is_named = policy.scratch is None or "model_name" in policy.model_fields_set
    parallel = policy.dtensor_cfg
    return ModelSpec(
        name=policy.model_name if is_named else None,
        revision=policy.revision,
        trust_remote_code=policy.trust_remote_code,
        safetensors_only=policy.safetensors_only,
        config_overrides=policy.hf_config_overrides,
        scratch=policy.scratch,
        tokenizer=policy.tokenizer,
        head=policy.reward_model_cfg if isinstance(policy, RewardPolicyConfig) else _NO_HEAD,
        precision=policy.precision,
        compile=policy.compile,
        reads_forests=policy.sequence_packing.enabled,
        lora=parallel.lora_cfg if parallel.lora_cfg.enabled else None,
        activation_checkpointing=parallel.activation_checkpointing,
        tensor_parallel_size=parallel.tensor_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        cpu_offload=parallel.cpu_offload,
        parallel_plan=parallel.custom_parallel_plan,
    )


def teacher_spec(policy: PolicyConfig, name: str) -> ModelSpec:
    """Return the spec of the model from which a policy learns besides, spread as the policy is."""
    return replace(
        model_spec(policy),
        name=name,
        revision=None,
        config_overrides={},
        scratch=None,
        tokenizer=TokenizerConfig(),
        lora=None,
    )


def scorer_spec(asked: ScorerSpec, policy: PolicyConfig) -> ScorerSpec:
    """Complete a requested scorer's spec with how the `policy` section says its model is loaded."""
    length = asked.max_length
    if length is None and "max_total_sequence_length" in policy.model_fields_set:
        length = policy.max_total_sequence_length
    model = replace(model_spec(policy), name=asked.model.name)
    return replace(asked, max_length=length, model=model)


def generator_spec(config: GRPORun, end_ids: Iterable[int]) -> GeneratorSpec:
    """Return the spec of a GRPO run's sampling engine; `end_ids` are the tokens that end a turn."""
    from laurel.generation.requests import GeneratorSpec

    return GeneratorSpec(
        settings=config.policy.generation,
        max_length=config.policy.max_total_sequence_length,
        end_ids=tuple(end_ids),
        seed=config.grpo.seed,
    )


def step_order(
    config: RewardTrainingRun | SFTRun,
    num_rows: int,
    *,
    units: Sequence[Sequence[int]] | None = None,
) -> StepOrder:
    """Return the order in which rows are used: that of the file, or shuffled by the run's seed.

    `units` are rows that stay together; `StepOrder` describes them.
    """
    from laurel.training.batches import StepOrder

    section = config.rm if isinstance(config, RewardTrainingRun) else config.sft
    size = config.policy.train_global_batch_size
    return StepOrder(num_rows, size, shuffle=config.data.shuffle, seed=section.seed, units=units)


def batch_notes(key: str, size: int, num_rows: int, *, unit: str = "row") -> list[str]:
    """Say that a step takes more than there is to learn from, if it does."""
    if size <= num_rows:
        return []
    return [f"{key}={size} exceeds the data: there are {counted(num_rows, unit)} to train on"]


SMALL_MODEL = 500_000_000
"""Parameters from which a pretrained model is no small one."""
RATE, RATE_OF_SMALL = 2e-6, 1e-4
"""The learning rate of a reward model, and of a small one: half of the best of four rates for one
of 135M parameters, because longer runs bear less (docs/benchmarks.md)."""


def is_small(num_parameters: int) -> bool:
    """Report whether a pretrained model is small; 0: its size is not known."""
    return 0 < num_parameters < SMALL_MODEL


SMALL_CHANGE = 1e-4
"""The change of a weight over a whole run below which a model learns little: 8 steps of 2e-6, which
the defaults take for 1,000 rows, are far below it."""


def epoch_notes(policy: PolicyConfig, num_rows: int, num_steps: int) -> list[str]:
    """Say that a step takes more rows than there are, or a run is too short for its learning rate.

    A step of Adam changes a weight by about the learning rate at most, whatever the gradient is.
    """
    rate = policy.optimizer.kwargs.get("lr")
    change = num_steps * rate if rate and "Adam" in policy.optimizer.name else SMALL_CHANGE
    notes = batch_notes("policy.train_global_batch_size", policy.train_global_batch_size, num_rows)
    if change >= SMALL_CHANGE:
        return notes
    return [
        *notes,
        f"{counted(num_steps, 'step')} with a learning rate of {rate:g} change no weight by much "
        f"more than {change:.1g}, so the model learns little: raise policy.optimizer.kwargs.lr, "
        "lower policy.train_global_batch_size, or bring more rows",
    ]


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
        cpu_threads: The number of threads on a CPU; None is one per core.

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
