"""`laurel init`: three questions in, a commented configuration out that runs as it is."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.text import Text

from laurel.cli.json_output import write_json
from laurel.cli.local_scorer import say_on
from laurel.cli.output_file import check_output, replace_file
from laurel.cli.schemas import SCHEMAS
from laurel.cli.starter import (
    DEFAULT_MODEL,
    DEFAULT_REWARD_MODEL,
    SCRATCH,
    TASK_NAMES,
    TASKS,
    Answers,
    Machine,
    StarterTask,
    TaskName,
    starter,
)
from laurel.cli.starter_choices import ChosenData, ChosenModel, choose_data, choose_model
from laurel.config.load import load_config
from laurel.config.tree import nearest
from laurel.errors import ConfigError, UserError
from laurel.observe.console import make_console, message_console, visible

if TYPE_CHECKING:
    from rich.console import Console

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
        SCRATCH if options.scratch else options.model, "--model",
        "Model to begin with: a directory, a hub name, or scratch for a small new one [{}]",
        DEFAULT_MODEL, lambda said: choose_model(said, task), ask, say,
    )  # fmt: skip
    data = _answered(
        options.data, "--data", "Training rows: a file, a data set's name or a hub name [{}]",
        task.data, lambda said: choose_data(said, task), ask, say,
    )  # fmt: skip
    with console.status("looking at the machine"):
        machine = machine or look_at_machine()
    answers = Answers(
        task=task_name, model=model.name, data=data.settings, machine=machine,
        reward_model=options.reward_model or DEFAULT_REWARD_MODEL, name=output.stem,
        num_positions=model.num_positions, model_settings=model.settings,
        held_out=data.held_out,
    )  # fmt: skip
    _write(output, answers, unnamed=data.unnamed)
    say(f"wrote    {output}, made for {machine.device}; it fits the schema")
    for note in (*model.notes, *data.notes, *_about_judge(answers)):
        say(f"note     {note}")
    if data.misfit:
        say(f"warning  the data does not fit: {data.misfit}")
    if options.as_json:
        notes = [*model.notes, *data.notes, *_about_judge(answers)]
        write_json(
            {"output": output, "task": task_name, "model": model.name, "data": data.settings,
             "device": machine.device, "notes": notes, "misfit": data.misfit or None}
        )  # fmt: skip
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
