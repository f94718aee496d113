"""Starter configurations: the few keys that people change, with values that fit what they have."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from rich.text import Text

from laurel.cli.data_check import Findings, examine
from laurel.config.load import load_config, to_yaml
from laurel.config.schemas import SCHEMAS
from laurel.config.tree import Section, nearest
from laurel.data.formats import KEYS_OF_COLUMNS, Trainer, could_be_named
from laurel.data.preferences import DATASET_CLASSES
from laurel.data.sources import READERS
from laurel.data.task_formats import TASK_SETS
from laurel.data.tasks import NOT_WHAT_IS_RIGHT
from laurel.errors import ConfigError, DataError, Terms, UserError, speaking
from laurel.observe.console import make_console, message_console, shorten_middle, visible
from laurel.observe.counts import counted, counted_that
from laurel.observe.files import check_output, replace_file
from laurel.observe.json_output import write_json
from laurel.rewards.open import check_not_missing
from laurel.run.scorer import find_local, say_on

if TYPE_CHECKING:
    from rich.console import Console


TaskName = Literal["rm", "grpo-math", "grpo-rm", "grpo-code"]
TASK_NAMES: tuple[TaskName, ...] = get_args(TaskName)
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
DEFAULT_REWARD_MODEL = "results/rm"
"""Where a starter configuration of `laurel rm` puts its checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StarterTask:
    """What one kind of starter is made of."""

    trainer: Trainer
    about: str
    data: str
    """The data set that is offered."""
    settings: tuple[str, ...]
    """What makes it this task."""
    on_cpu: tuple[str, ...]
    """Sizes that a laptop can work with."""
    on_gpu: tuple[str, ...]
    keys: tuple[str, ...]
    """What is written, besides what all tasks have."""
    from_scratch: tuple[str, ...] = ()
    """What a model takes that knows nothing yet, besides its sizes."""

    @property
    def environment(self) -> str | None:
        """Who judges; None for a reward model."""
        said = [one for one in self.settings if one.startswith("data.env_name=")]
        return said[0].partition("=")[2] if said else None


_RM_KEYS = ("rm.max_num_epochs", "rm.max_num_steps", "rm.val_period", "rm.seed")
_GRPO_KEYS = (
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
    "grpo.max_num_steps",
    "grpo.val_period",
    "grpo.max_val_samples",
    "grpo.seed",
    "loss_fn.reference_policy_kl_penalty",
    "policy.generation.max_new_tokens",
    "policy.generation.temperature",
    "data.env_name",
    "data.prompt_file",
)
_COMMON_KEYS = (
    "policy.model_name",
    "policy.train_global_batch_size",
    "policy.max_total_sequence_length",
    "policy.precision",
    "policy.optimizer",
    "data.split_validation_size",
    "data.on_bad_row",
    "checkpointing.checkpoint_dir",
    "checkpointing.save_period",
    "checkpointing.keep_top_k",
    "logger.log_dir",
    "logger.wandb_enabled",
    "cluster.gpus_per_node",
)
HELD_OUT = 0.05
"""Share of the rows that is validated on, where there are enough of them."""
FEW_ROWS = 20
"""Fewer than this tell little of a model."""
SCRATCH = "scratch"
"""What is said instead of a model to have a new one."""
_SCRATCH_ON_CPU = (
    "policy.scratch.hidden_size=128",
    "policy.scratch.num_layers=2",
    "policy.scratch.num_heads=4",
    "policy.scratch.vocab_size=2048",
    "policy.optimizer.kwargs.lr=1e-3",
    "cluster.cpu_threads=1",
)
_SCRATCH_ON_GPU = (
    "policy.scratch.hidden_size=512",
    "policy.scratch.num_layers=8",
    "policy.scratch.num_heads=8",
    "policy.scratch.vocab_size=16384",
    "policy.optimizer.kwargs.lr=3e-4",
)
_ABOUT_SCRATCH = {
    "policy.model_name": "The model is made here, by policy.scratch. To begin from a pretrained "
    "one instead, name it here, take policy.scratch out, and take a much lower learning rate.",
    "policy.optimizer": "This learning rate (lr) is one for a small model that knows nothing yet. "
    "A pretrained one of about 1B parameters takes 2e-6 to 5e-6.",
    "cluster.cpu_threads": "A model as small as this one gains nothing from a second thread, and "
    "beside other work loses by it. A larger one wants null.",
    "policy.generation.max_new_tokens": "A new model writes noise and does not stop by itself: "
    "every answer has so many tokens at first, and that is most of a step's time.",
}
_GRPO_ON_CPU = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=8",
    "policy.train_global_batch_size=32",
    "policy.max_total_sequence_length=512",
    "grpo.max_num_steps=100",
    "grpo.max_val_samples=32",
)
_GRPO_FROM_SCRATCH = ("policy.generation.max_new_tokens=64",)
_GRPO_ON_GPU = ("policy.max_total_sequence_length=1024", "grpo.max_num_steps=500")

TASKS: Mapping[TaskName, StarterTask] = {
    "rm": StarterTask(
        trainer="rm",
        about="a reward model, from preferences",
        data="HelpSteer3",
        settings=(),
        keys=_RM_KEYS,
        from_scratch=("rm.max_num_epochs=10", "rm.max_num_steps=1000"),
        on_cpu=("policy.train_global_batch_size=32", "policy.max_total_sequence_length=1024"),
        on_gpu=("policy.max_total_sequence_length=4096",),
    ),
    "grpo-math": StarterTask(
        trainer="grpo",
        about="a policy, against known answers to mathematics",
        data="GSM8K",
        settings=("data.env_name=math",),
        keys=_GRPO_KEYS,
        on_cpu=_GRPO_ON_CPU,
        on_gpu=_GRPO_ON_GPU,
        from_scratch=_GRPO_FROM_SCRATCH,
    ),
    "grpo-rm": StarterTask(
        trainer="grpo",
        about="a policy, against a reward model",
        data="HelpSteer3",
        settings=("data.env_name=reward_model", "env.reward_model.enabled=true"),
        keys=(
            *_GRPO_KEYS,
            "env.reward_model.enabled",
            "env.reward_model.model_name",
            "env.reward_model.precision",
        ),
        on_cpu=_GRPO_ON_CPU,
        on_gpu=_GRPO_ON_GPU,
        from_scratch=_GRPO_FROM_SCRATCH,
    ),
    "grpo-code": StarterTask(
        trainer="grpo",
        about="a policy, against tests of the programs that it writes",
        data="MBPP",
        # Where every task has tests, nothing ends with </code>.
        settings=("data.env_name=code", "env.code.stop_strings=null"),
        keys=(*_GRPO_KEYS, "env.code.num_workers", "env.code.reward", "env.code.stop_strings"),
        on_cpu=_GRPO_ON_CPU,
        on_gpu=_GRPO_ON_GPU,
        from_scratch=_GRPO_FROM_SCRATCH,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a starter has to fit."""

    num_gpus: int = 0
    """0: it works on a CPU."""

    @property
    def device(self) -> str:
        """In words."""
        if not self.num_gpus:
            return "a CPU"
        return f"{self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a starter is made for."""

    task: TaskName
    model: str | None
    """None: one from scratch."""
    data: Sequence[str]
    """Overrides of the `data` section that name the rows and how they are read."""
    reward_model: str = DEFAULT_REWARD_MODEL
    name: str = ""
    """Of the directory of checkpoints below `results`; empty: as the task is called."""
    num_positions: int | None = None
    """Tokens that the model can number, where that is known."""
    model_settings: Sequence[str] = ()
    """What the model's tokenizer needs."""
    held_out: float = HELD_OUT
    """Share of the training rows to validate on; 0 where there is nothing to hold out."""
    machine: Machine = field(default_factory=Machine)


def starter(answers: Answers) -> tuple[Section, str]:
    """The configuration, and its text with a comment above each key.

    Raises:
        ConfigError: An answer that the schema refuses.
    """
    task = TASKS[answers.task]
    overrides = [
        f"policy.model_name={json.dumps(answers.model)}",
        f"policy.precision={_precision(answers.machine)}",
        f"checkpointing.checkpoint_dir={json.dumps(f'results/{answers.name or answers.task}')}",
        f"data.split_validation_size={answers.held_out}",
        f"cluster.gpus_per_node={max(1, answers.machine.num_gpus)}",
        *(task.on_gpu if answers.machine.num_gpus else task.on_cpu),
        *task.settings,
        *_from_scratch(answers),
    ]
    if answers.task == "grpo-rm":
        overrides += [
            f"env.reward_model.model_name={json.dumps(answers.reward_model)}",
            f"env.reward_model.precision={_precision(answers.machine)}",
        ]
    extra = [*answers.model_settings, *answers.data]
    named = {setting.partition("=")[0] for setting in extra}
    overrides = [one for one in overrides if one.partition("=")[0] not in named] + extra
    config = load_config(SCHEMAS[task.trainer], None, overrides).config
    longest = getattr(config, "policy").max_total_sequence_length  # noqa: B009
    if answers.num_positions is not None and answers.num_positions < longest:
        shorter = f"policy.max_total_sequence_length={answers.num_positions}"
        key = shorter.partition("=")[0]
        overrides = [one for one in overrides if one.partition("=")[0] != key] + [shorter]
        config = load_config(SCHEMAS[task.trainer], None, overrides).config
    keys = {*task.keys, *_COMMON_KEYS, *(setting.partition("=")[0] for setting in extra)}
    keys |= {one.partition("=")[0] for one in _from_scratch(answers)}
    more = _ABOUT_SCRATCH if answers.model is None else {}
    return config, to_yaml(config, describe=True, keys=keys, more=more)


def _from_scratch(answers: Answers) -> tuple[str, ...]:
    """What a new model takes; nothing for one that is there."""
    if answers.model is not None:
        return ()
    sizes = _SCRATCH_ON_GPU if answers.machine.num_gpus else _SCRATCH_ON_CPU
    return (*sizes, *TASKS[answers.task].from_scratch)


def _precision(machine: Machine) -> str:
    return "bfloat16" if machine.num_gpus else "float32"


# --------------------------------------------------------------------------------------------------
# `laurel init`: three questions in, a commented configuration out that runs as it is.

_SECTION = re.compile(r"^([^#\n].*\n)(?=# )", re.MULTILINE)
"""The last line before the comment of the next section."""

_TRAIN_DATA = re.compile(r"^  train_data_path: .*\n", re.MULTILINE)

T = TypeVar("T")
Ask = Callable[[str, str], str]
"""Given a question and its default answer; returns the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitOptions:
    """What the command line says; None is asked for."""

    task: TaskName | None = None
    model: str | None = None
    scratch: bool = False
    """The same as the model `scratch`."""
    data: str | None = None
    reward_model: str | None = None
    output: Path | None = None
    force: bool = False
    as_json: bool = False


def run_init(
    options: InitOptions, *, ask: Ask | None = None, machine: Machine | None = None
) -> None:
    """Ask what is not said, write the file, check it, and say what comes next.

    Args:
        options: What is said.
        ask: Stands in for the terminal; None: the terminal, if there is one.
        machine: Stands in for this machine.

    Raises:
        UserError: An answer that cannot be used, or none where nobody can be asked.
    """
    console = message_console()
    say = say_on(console)
    if ask is None and sys.stdin.isatty():
        ask = _ask_on(console)
    task_name = _task(options, ask, say)
    task = TASKS[task_name]
    if options.reward_model is not None and task_name != "grpo-rm":
        raise ConfigError(f"--reward-model is for --task grpo-rm, not for {task_name}")
    if options.scratch and options.model is not None:
        raise ConfigError(
            f"--scratch makes a new model, and --model {options.model} names one; say one of them"
        )
    output = options.output or Path(f"{task_name}.yaml")
    _check_free(output, force=options.force)
    model = _answered(
        SCRATCH if options.scratch else options.model,
        "--model",
        "Model to begin with: a directory, a hub name, or scratch for a small new one [{}]",
        DEFAULT_MODEL,
        lambda said: choose_model(said, task),
        ask,
        say,
    )
    data = _answered(
        options.data,
        "--data",
        "Training rows: a file, a data set's name or a hub name [{}]",
        task.data,
        lambda said: choose_data(said, task),
        ask,
        say,
    )
    with console.status("looking at the machine"):
        machine = machine or look_at_machine()
    answers = Answers(
        task=task_name,
        model=model.name,
        data=data.settings,
        machine=machine,
        reward_model=options.reward_model or DEFAULT_REWARD_MODEL,
        name=output.stem,
        num_positions=model.num_positions,
        model_settings=model.settings,
        held_out=data.held_out,
    )
    _write(output, answers, unnamed=data.unnamed)
    say(f"wrote    {output}, made for {machine.device}; it fits the schema")
    for note in (*model.notes, *data.notes, *_about_judge(answers)):
        say(f"note     {note}")
    if data.misfit:
        say(f"warning  the data does not fit: {data.misfit}")
    if options.as_json:
        notes = [*model.notes, *data.notes, *_about_judge(answers)]
        write_json(
            {
                "output": output,
                "task": task_name,
                "model": model.name,
                "data": data.settings,
                "device": machine.device,
                "notes": notes,
                "misfit": data.misfit or None,
            }
        )
    else:
        _show_next(make_console(), output, task, model, data)


# ----------------------------------------------------------------------------------------- asking


def _ask_on(console: Console) -> Ask:
    """Questions on a terminal; an empty answer is the default."""

    def ask(question: str, default: str) -> str:
        console.print(Text(visible(question)), end=" ", soft_wrap=True)
        try:
            return input().strip() or default
        except EOFError:
            raise ConfigError("no answer; nothing was written") from None

    return ask


def _answered(
    said: str | None,
    option: str,
    question: str,
    default: str,
    take: Callable[[str], T],
    ask: Ask | None,
    say: Callable[[str], None],
) -> T:
    """What an option says, or an answer to the question, asked until it can be used."""
    if said is not None:
        return take(said)
    if ask is None:
        raise ConfigError(
            f"{option} is missing, and there is no terminal to ask on; for example {option} "
            f"{default}"
        )
    while True:
        answer = ask(question.format(default), default)
        try:
            return take(answer)
        except UserError as problem:
            say(f"error: {problem}")


def _task(options: InitOptions, ask: Ask | None, say: Callable[[str], None]) -> TaskName:
    if options.task is None and ask is not None:
        for name, task in TASKS.items():
            say(f"  {name:<10} {task.about}")
    if options.task is None and ask is None:
        raise ConfigError(
            "--task is missing, and there is no terminal to ask on; choose one of "
            f"{', '.join(TASK_NAMES)}"
        )

    def take(said: str) -> TaskName:
        for name in TASK_NAMES:
            if said == name:
                return name
        near = nearest(said, TASK_NAMES)
        hint = f" Did you mean {near}?" if near else ""
        raise ConfigError(f"{said!r} is no task.{hint} Choose one of {', '.join(TASK_NAMES)}")

    question = "What do you want to train? [{}]"
    return _answered(options.task, "--task", question, "rm", take, ask, say)


def _check_free(output: Path, *, force: bool) -> None:
    check_output(output, read_from="")
    if output.exists() and not force:
        raise ConfigError(
            f"{output} is there already; name another file with --output, or add --force to write "
            "over it"
        )


def look_at_machine() -> Machine:
    """The GPUs that a run here could take."""
    import importlib.util

    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus > 1 and importlib.util.find_spec("ray") is None:
        num_gpus = 1  # more than one takes the extra `ray`
    return Machine(num_gpus=num_gpus)


# ----------------------------------------------------------------------------------------- writing


def _write(output: Path, answers: Answers, *, unnamed: Sequence[str] = ()) -> None:
    """Write the file, once what is read back from it is what was meant.

    Args:
        output: Where to.
        answers: What it is made for.
        unnamed: Keys of the data section that are written as comments, to be filled in.
    """
    task = TASKS[answers.task]
    config, text = starter(answers)
    if unnamed:
        keys = "".join(f"  # {key.partition('.')[2]}: COLUMN\n" for key in unnamed)
        fill_in = f"  # Which column is which? Fill in, and take the '# ' away.\n{keys}"
        text = _TRAIN_DATA.sub(lambda line: line[0] + fill_in, text, count=1)
    command = f"laurel {task.trainer} --config {output}"
    heading = (
        f"# {task.about[0].upper()}{task.about[1:]}: {command}\n#\n"
        "# Here is what people change. Everything else, with its meaning:\n"
        f"#   laurel config --for {task.trainer} --config {output} --describe\n"
        "# Any key can be changed on the command line: policy.model_name=... \n\n"
    ).replace(" \n", "\n")
    output.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(output) as stream:
        stream.write(heading + _SECTION.sub(r"\1\n", text))
    read_back = load_config(SCHEMAS[task.trainer], output).config
    assert read_back == config, f"{output} does not say what was meant"


def _about_judge(answers: Answers) -> list[str]:
    name = answers.reward_model
    if answers.task != "grpo-rm" or Path(name).expanduser().exists():
        return []
    if name == DEFAULT_REWARD_MODEL:
        return [
            f"the reward model is to be {name}, which is not there yet: laurel init --task rm and "
            "laurel rm make it; or name another with --reward-model"
        ]
    return [f"the reward model {name} is taken for a name on the Hugging Face hub"]


def _show_next(
    console: Console, output: Path, task: StarterTask, model: ChosenModel, data: ChosenData
) -> None:
    """The commands that come next, on standard output."""
    lines = []
    if data.path is not None:
        keys = [one for one in data.settings if not one.startswith("data.train_data_path=")]
        check = ["laurel", "data", "check", data.path, "--for", task.trainer]
        check += [*([] if model.name is None else ["--model", model.name]), *keys, *model.settings]
        lines.append((shlex.join(check), "the first row" + (", in tokens" if model.name else "")))
    config = ["--config", str(output)]
    lines.append((shlex.join(["laurel", "plan", *config]), "does it fit the machine?"))
    lines.append((shlex.join(["laurel", task.trainer, *config]), "train"))
    console.print()
    for command, why in lines:
        console.print(Text(f"{command}   # {why}"), soft_wrap=True)


# --------------------------------------------------------------------------------------------------
# What a person who begins has: a model and rows, looked at so that a starter fits them.


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenModel:
    """A model, and what its tokenizer and positions ask of the configuration."""

    name: str | None
    """None: a new one."""
    num_positions: int | None = None
    settings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenData:
    """Rows, and how they are to be read."""

    settings: tuple[str, ...]
    path: str | None = None
    """A file that was looked at."""
    held_out: float = HELD_OUT
    """Share of the rows to validate on."""
    notes: tuple[str, ...] = ()
    misfit: str = ""
    """Why it does not fit the task."""
    unnamed: tuple[str, ...] = ()
    """Keys that would name its columns, which nobody could tell."""


def choose_model(said: str, task: StarterTask) -> ChosenModel:
    """The model that a person names, or a new one; what can be read of a directory is read.

    Raises:
        UserError: There is no such directory, or no model in it.
    """
    if said == SCRATCH:
        return ChosenModel(name=None, notes=(_about_scratch(task),))
    is_path = said.endswith("/") and not said.startswith(("/", "~", "."))
    check_not_missing(f"./{said}" if is_path else said, key="--model")
    place = Path(said).expanduser()
    if not place.is_dir():
        note = f"{said} is taken for a name on the Hugging Face hub, and was not looked at"
        return ChosenModel(name=said, notes=(note,))
    with speaking(Terms({"policy.model_name": "--model"})):
        found = find_local(said)
        name = said if (place / "config.json").is_file() else os.path.relpath(found.name)
        num_positions = _positions(name)
        settings, notes = _tokenizer_needs(name, for_reward_model=task.trainer == "rm")
    return ChosenModel(
        name=name, num_positions=num_positions, settings=settings, notes=(*found.notes, *notes)
    )


def _about_scratch(task: StarterTask) -> str:
    if task.trainer == "rm":
        return "the model is made here, small and random; its tokenizer is learned from the data"
    return (
        "the policy is made here, small and random, and its tokenizer is learned from the data: it "
        "writes noise, and learns where noise earns a reward now and then. Otherwise warm it up "
        "first, with laurel sft on examples"
    )


def _positions(name: str) -> int | None:
    from laurel.config.policy import PolicyConfig
    from laurel.models.loading.pretrained import read_config
    from laurel.observe.console import quiet_libraries

    quiet_libraries()
    hf_config = read_config(PolicyConfig(), name).get_text_config()
    positions: int | None = getattr(hf_config, "max_position_embeddings", None)
    return positions


def _tokenizer_needs(
    name: str, *, for_reward_model: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What of a tokenizer has to be settled in the configuration, and why."""
    from laurel.config.policy import TokenizerConfig
    from laurel.errors import ModelError
    from laurel.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(
        TokenizerConfig(chat_template=None),
        model_name=name,
        trust_remote_code=False,
        pad_may_end=True,
    )
    settings: list[str] = []
    notes: list[str] = []
    try:
        load_tokenizer(
            TokenizerConfig(), model_name=name, trust_remote_code=False, pad_may_end=True
        )
    except ModelError:
        settings.append("policy.tokenizer.chat_template=chatml")
        notes.append(f"{name} has no chat template: chatml is chosen for it")
    if for_reward_model and tokenizer.pad_token == tokenizer.eos_token:
        settings.append("policy.tokenizer.pad_token=auto")
        notes.append(f"{name} pads with its end token: another is chosen (pad_token: auto)")
    return tuple(settings), tuple(notes)


def choose_data(said: str, task: StarterTask) -> ChosenData:
    """The rows that a person names; a file is looked at as `laurel data check` does.

    Raises:
        DataError: No such file, no rows in it, no data set of that name.
    """
    place = Path(said).expanduser()
    is_file = place.exists() or said.startswith((".", "/", "~")) or _has_suffix(said)
    if not is_file:
        return _named_set(said, task)
    chosen = [] if task.environment is None else [f"data.env_name={task.environment}"]
    findings = examine(said, task.trainer, chosen)
    mapped: tuple[str, ...] = ()
    if not findings.is_usable:
        near = next((one for one in findings.near if one.trainer == task.trainer), None)
        if near is not None:
            mapped = tuple(one for one in near.settings if not one.startswith("data.env_name="))
            findings = examine(said, task.trainer, [*mapped, *chosen])
    return _looked_at(said, findings, mapped, task)


def _has_suffix(said: str) -> bool:
    return said.lower().removesuffix(".gz").endswith(tuple(READERS))


def _looked_at(
    path: str, findings: Findings, mapped: Sequence[str], task: StarterTask
) -> ChosenData:
    named = (f"data.train_data_path={json.dumps(path)}", *mapped)
    reading = findings.readings[0]
    report = reading.report
    if report is None:
        why = f"{shorten_middle(reading.problem, 300)}; ask laurel data check {shlex.quote(path)}"
        # Tests have columns of fixed names.
        could_be = task.environment != "code" and could_be_named(findings.raw.first, task.trainer)
        unnamed = KEYS_OF_COLUMNS[task.trainer] if could_be else ()
        if unnamed:
            why += f". Say which column is which, by {', '.join(unnamed)}: the file has lines to "
            why += "fill in"
        return ChosenData(settings=named, path=path, misfit=why, unnamed=unnamed)
    told = tuple(one for one in reading.settings if not one.startswith("data.env_name="))
    what = findings.known.name if findings.known is not None else report.dataset_class
    notes = [
        f"{path}: {what}, {report.num_kept:,} of {counted(report.num_read, 'row')} can be used"
    ]
    if mapped:
        notes.append(f"its columns are read by {', '.join(mapped)}")
    if NOT_WHAT_IS_RIGHT in report.notes:
        notes.append(f"{path} holds preferences: {NOT_WHAT_IS_RIGHT}")
    if reading.num_malformed:
        first = report.dropped["malformed"].examples[0]
        them = "it" if reading.num_malformed == 1 else "them"
        notes.append(
            f"{counted_that(reading.num_malformed, 'row', 'are')} malformed, and the run stops at "
            f"{first}: mend {them}, or set data.on_bad_row: skip"
        )
    held_out = share_held_out(report.num_kept) if report.num_prompts > 1 else 0.0
    if round(held_out * report.num_kept) < FEW_ROWS:
        notes.append(
            f"of so few rows about {held_out * report.num_kept:.0f} are held out to validate on, "
            "which tells little: name more under data.val_data_path where you have them"
        )
    return ChosenData(settings=(*named, *told), path=path, notes=tuple(notes), held_out=held_out)


def share_held_out(num_rows: int) -> float:
    """The share of a file's rows to validate on: of few rows more, up to a fifth."""
    return min(0.2, max(HELD_OUT, math.ceil(100 * FEW_ROWS / max(num_rows, 1)) / 100))


def _named_set(said: str, task: StarterTask) -> ChosenData:
    """A data set of the table, or of the hub."""
    if task.trainer == "rm":
        hubs = {name: one.hub_name for name, one in DATASET_CLASSES.items() if one.hub_name}
    else:
        hubs = {name: one.hub.name for name, one in TASK_SETS.items() if one.hub.name}
    if said in hubs:
        note = f"{said} is fetched from the Hugging Face hub ({hubs[said]}) when the run begins"
        brings_own = task.trainer == "rm" and DATASET_CLASSES[said].has_validation
        return ChosenData(
            settings=(f"data.dataset_name={said}",),
            notes=(note,),
            held_out=0.0 if brings_own else HELD_OUT,
        )
    if "/" not in said:
        near = nearest(said, hubs)
        hint = f" Did you mean {near}?" if near else ""
        raise DataError(
            f"--data {said}: there is no such file here, and no data set of that name.{hint} "
            f"Known are {', '.join(hubs)}; or give a file, or a hub name (owner/name)"
        )
    note = f"{said} is taken for a name on the hub; laurel data check {said} looks at it"
    return ChosenData(settings=(f"data.train_data_path={json.dumps(said)}",), notes=(note,))
