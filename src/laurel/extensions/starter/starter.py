"""Runs `laurel init`: asks three questions and writes a commented, runnable configuration."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from laurel import plugins
from laurel.config.load import COLUMN_KEYS, load_config, to_yaml
from laurel.config.policy import TokenizerConfig
from laurel.config.reward_model import RATE_OF_SMALL, is_small
from laurel.config.schemas import SCHEMAS
from laurel.config.yaml_tree import nearest
from laurel.data.preferences import DATASET_CLASSES
from laurel.data.sources import READERS
from laurel.data.task_formats import names_of_sets, task_set
from laurel.data.tasks import NOT_WHAT_IS_RIGHT
from laurel.errors import (
    ConfigError,
    DataError,
    ModelError,
    UserError,
    counted,
    counted_that,
    speaking,
)
from laurel.extensions.starter.options import InitOptions
from laurel.models.files import is_model_file
from laurel.observe.console import message_console, quiet_libraries, say_on, shorten_middle, visible
from laurel.observe.files import check_output, replace_file
from laurel.observe.hub import check_not_missing
from laurel.observe.json_output import write_json
from laurel.rewards.spec import find_model

_TABLE = yaml.safe_load(files(__package__).joinpath("starters.yaml").read_text(encoding="utf-8"))
TASKS: Mapping[str, Any] = _TABLE["tasks"]
_HELD_OUT = "data.split_validation_size"
_COLUMN_WORD = re.compile(r"\+*(data\.(?:\w+_key|on_bad_row))=(.*)", re.DOTALL)
_TRAINING_ROWS = re.compile(r"^    data_path: .*\n", re.MULTILINE)
_BEFORE_SECTION = re.compile(r"^([^#\n].*\n)(?=# )", re.MULTILINE)
Ask = Callable[[str, str], str]
"""A function that asks a question, given with its default answer, and returns the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The user's choice of a model or of data, with the settings that it needs."""

    settings: Mapping[str, str]
    """Configuration keys with their values, written as in overrides."""
    notes: Sequence[str]
    problem: str = ""
    """The reason why the chosen data does not fit the task; empty if it fits."""
    columns: Sequence[str] = ()
    """The columns of the data, if the user has to assign them to prompt, chosen and rejected."""
    stops_at: str = ""
    """The place of the first malformed row, at which training would stop; empty without one."""
    longest: float = math.inf
    """The longest sequence that the model accepts, in tokens; infinite if it is unknown."""
    num_parameters: int = 0
    """The number of the model's parameters; 0 if it is unknown."""


def run_init(options: InitOptions, *, ask: Ask | None = None, num_gpus: int | None = None) -> bool:
    """Ask for every option that is None, write and check the configuration, print next commands.

    `ask` replaces the terminal, and `num_gpus` the detected number of GPUs.

    Returns:
        True if the configuration can be trained with as written; False if no row fits.
    """
    say = say_on(message_console())
    columns = _columns_of(options.column_words or ())
    reward_model = options.reward_model
    ask = ask or (_ask_on_terminal if sys.stdin.isatty() else None)

    def answer(option: str, value: str | None, question: str, default: str, take: Any) -> Any:
        if value is not None:
            return take(value)
        if ask is None:
            raise ConfigError(
                f"{option} is missing, and there is no terminal to ask on; give, for example, "
                f"{option} {default}"
            )
        while True:
            try:
                return take(ask(f"{question} [{default}]", default))
            except UserError as problem:
                say(f"error: {problem}")

    about = ", ".join(f"{name} ({table['about']})" for name, table in TASKS.items())
    question = f"What do you want to train? {about}"
    task = str(answer("--task", options.task, question, "rm", _known_task))
    table = TASKS[task]
    if reward_model is not None and task != "grpo-rm":
        raise ConfigError(f"--reward-model is for --task grpo-rm, not for {task}")
    output = options.output or Path(f"{task}.yaml")
    schema = output.with_name(f"laurel-{table['trainer']}.schema.json")
    show = plugins.find(plugins.Command, "config show").for_programs()
    schema_words = show.schema_text(table["trainer"])
    # Before the model and the rows are looked at, which takes time.
    _check_files(output, schema, schema_words, force=options.force)
    question = (
        "Which model to start from? A directory, a hub name, a GGUF file, or scratch for a small "
        "new one"
    )
    model = "scratch" if options.scratch else options.model
    take = partial(_model, trainer=table["trainer"])
    start: Choice = answer("--model", model, question, "Qwen/Qwen3-0.6B", take)
    question = "Which training rows? A file, a data set's name or a hub name"
    take = partial(_rows, task=table, own_columns=columns)
    rows: Choice = answer("--data", options.data, question, table["data"], take)
    rows = replace(rows, settings={**rows.settings, **columns})
    num_gpus = _usable_gpus() if num_gpus is None else num_gpus
    device = counted(num_gpus, "GPU") if num_gpus else "a CPU"
    judge = reward_model or "results/rm"
    _write(output, schema.name, task, start, rows, judge, num_gpus)
    with replace_file(schema) as stream:
        stream.write(schema_words)
    notes = [f"editors complete and check its keys by {schema}", *start.notes, *rows.notes]
    if task == "grpo-rm" and not Path(judge).expanduser().exists():
        notes.append(_absent_judge(judge))
    warnings = [f"the data does not fit: {rows.problem}"] if rows.problem else []
    if rows.columns:
        words = " ".join(f"{key}=COLUMN" for key in COLUMN_KEYS)
        warnings.append(
            f"the columns are to be named, in {output} or with laurel init --force ... {words}"
        )
    state = "it cannot be trained with yet" if rows.problem else "it is valid"
    say(f"wrote    {output}, for {device}; {state}")
    for line in (*(f"note     {n}" for n in notes), *(f"warning  {w}" for w in warnings)):
        say(line)
    name = json.loads(start.settings["policy.model_name"])
    if options.as_json:
        settings = [f"{key}={value}" for key, value in rows.settings.items() if key != _HELD_OUT]
        facts = {"output": output, "task": task, "model": name, "data": settings, "device": device}
        write_json({**facts, "notes": notes, "misfit": rows.problem or None})
    if not (options.as_json or rows.problem):
        _print_commands(output, table["trainer"], start, rows)
    return not rows.problem


def _usable_gpus() -> int:
    import torch

    # More than one GPU needs the extra `ray`.
    return min(torch.cuda.device_count(), 1 if find_spec("ray") is None else 1024)


def _absent_judge(name: str) -> str:
    if name != "results/rm":
        return (
            f"the reward model {name} is no directory here, so it is read from the Hugging Face hub"
        )
    return (
        f"the reward model {name} does not exist yet: laurel init --task rm and laurel rm train "
        "it; or name another one with --reward-model"
    )


def _columns_of(words: Sequence[str]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for word in words:
        form = _COLUMN_WORD.fullmatch(word)
        if form is None:
            raise ConfigError(
                f"{word!r}: only the columns of rows (data.prompt_key=COLUMN and the like) and "
                "data.on_bad_row can be set here; every other key is set in the file"
            )
        columns[form[1]] = form[2]
    return columns


def _check_files(output: Path, schema: Path, schema_words: str, *, force: bool) -> None:
    """Check that the configuration and the schema beside it can be written, and may be."""
    check_output(output, read_from="")
    if output.exists() and not force:
        raise ConfigError(
            f"{output} exists already; name another file with --output, or add --force to "
            "overwrite it"
        )
    check_output(schema, read_from="")
    if schema.exists() and not force and schema.read_bytes() != schema_words.encode():
        raise ConfigError(
            f"{schema} exists already with another content; name a file in another directory with "
            "--output, or add --force to overwrite it"
        )


def _print_commands(output: Path, trainer: str, model: Choice, rows: Choice) -> None:
    """Print the commands that come next."""
    name = json.loads(model.settings["policy.model_name"])
    config = shlex.join(["--config", str(output)])
    if "data.train_data_path" in rows.settings:
        check = [json.loads(rows.settings["data.train_data_path"]), "--for", trainer]
        check += ["--model", name] if name else []
        settings_of_rows = [*rows.settings.items(), *model.settings.items()]
        is_read = re.compile(r"data\.(.*_key|on_bad_row)|policy\.tokenizer\..*").fullmatch
        check += [f"{key}={value}" for key, value in settings_of_rows if is_read(key)]
        shown = "show the first row, in tokens" if name else "show the first row"
        print(f"laurel data check {shlex.join(check)}   # {shown}")
    print(f"laurel plan {config}   # check that it fits the machine")
    if rows.stops_at:
        print(f"laurel {trainer} {config} data.on_bad_row=skip   # train on the other rows")
    else:
        print(f"laurel {trainer} {config}   # train")


def _ask_on_terminal(question: str, default: str) -> str:
    print(question, end=" ", file=sys.stderr, flush=True)
    try:
        return input().strip() or default
    except EOFError:
        raise ConfigError("no answer; nothing was written") from None


def _known_task(name: str) -> str:
    if name in TASKS:
        return name
    near = nearest(name, TASKS)
    hint = f" Did you mean {near}?" if near else ""
    raise ConfigError(f"{name!r} is no task.{hint} Choose one of {', '.join(TASKS)}")


def _model(text: str, *, trainer: str) -> Choice:
    if text == "scratch":
        note = "the model is small and randomly initialized; its tokenizer is trained on the data"
        if trainer == "grpo":
            note += ". It writes noise at first: warm it up with laurel sft on examples"
        return Choice(settings={"policy.model_name": "null"}, notes=[note])
    # With a slash at its end it is a directory, and never a name of the hub.
    is_path = text.endswith("/") and not text.startswith(("/", "~", "."))
    if not is_model_file(text):
        check_not_missing(f"./{text}" if is_path else text, key="--model")
    quiet_libraries()
    if not (is_model_file(text) or Path(text).expanduser().is_dir()):
        note = f"{text} is no directory here, so it is read from the Hugging Face hub; unchecked"
        choice = Choice(settings={"policy.model_name": json.dumps(text)}, notes=[note])
        with suppress(ModelError):  # the hub need not be reached before the run
            return _sized(replace(choice, notes=[f"{note} but for its configuration"]), text)
        return choice
    with speaking({"policy.model_name": "--model"}):
        from laurel.models.tokenizer import load_tokenizer

        place = find_model(text)
        is_model = (Path(text).expanduser() / "config.json").is_file()
        name = text if is_model or place.file is not None else os.path.relpath(place.name)
        settings, notes = {"policy.model_name": json.dumps(name)}, list(place.notes)

        try:
            load_tokenizer(
                TokenizerConfig(), model_name=name, trust_remote_code=False, pad_may_end=True
            )
        except ModelError:
            settings["policy.tokenizer.chat_template"] = "chatml"
            notes.append(f"{name} has no chat template: the configuration chooses chatml")
        return _sized(Choice(settings=settings, notes=notes), place.name)


def _sized(choice: Choice, name: str) -> Choice:
    """Add what the configuration of a model says of its size, for which no weight is read."""
    from laurel.models.loading.pretrained import count_parameters, read_config
    from laurel.models.spec import ModelSpec

    network = read_config(ModelSpec(), name).get_text_config()
    return replace(
        choice,
        longest=getattr(network, "max_position_embeddings", None) or math.inf,
        num_parameters=count_parameters(ModelSpec(name=name)),
    )


def _rows(text: str, *, task: Mapping[str, Any], own_columns: Mapping[str, str]) -> Choice:
    is_set = not (text.startswith((".", "/", "~")) or Path(text).exists())
    if not is_set or text.lower().removesuffix(".gz").endswith(tuple(READERS)):
        return _rows_in(text, task, own_columns)
    sets = [name for name, entry in DATASET_CLASSES.items() if entry.hub.name]
    if task["trainer"] == "grpo":
        known = {name: task_set(name) for name in names_of_sets()}
        sets = [name for name, one in known.items() if one is not None and one.hub.name]
        sets += plugins.names("rows")
    if text in sets:
        if text in plugins.names("rows"):
            rows = plugins.find(plugins.Rows, text)
            settings = {"data.dataset_name": text, "data.env_name": text, **rows.first_settings}
            notes = [f"{rows.to_do}; see docs/other_environments.md"] if rows.to_do else []
            return Choice(settings=settings, notes=notes)
        note = f"{text} is downloaded from the Hugging Face hub when the run starts"
        settings = {"data.dataset_name": text}
        if task["trainer"] == "rm" and DATASET_CLASSES[text].has_validation:
            settings[_HELD_OUT] = "0.0"
        return Choice(settings=settings, notes=[note])
    if "/" not in text:
        near = nearest(text, sets)
        hint = f" Did you mean {near}?" if near else ""
        raise DataError(
            f"--data {text}: there is no file and no data set of this name.{hint} "
            f"The data sets are {', '.join(sets)}; or give a file, or a hub name (owner/name)"
        )
    note = f"{text} is no file here, so it is read from the hub; laurel data check {text} checks it"
    return Choice(settings={"data.train_data_path": json.dumps(text)}, notes=[note])


def _rows_in(path: str, task: Mapping[str, Any], own_columns: Mapping[str, str]) -> Choice:
    judge = task["settings"].get("data.env_name")
    overrides = [f"{key}={column}" for key, column in own_columns.items()]
    overrides += [f"data.env_name={judge}"] if judge else []
    examine_data = plugins.find(plugins.Command, "data check").for_programs().examine_data
    findings, columns = examine_data(path, task["trainer"], overrides), []
    if not findings.is_usable:
        near = next((hint for hint in findings.near if hint.trainer == task["trainer"]), None)
        suggested = near.settings if near is not None else ()
        columns = [setting for setting in suggested if not setting.startswith("data.env_name=")]
        findings = examine_data(path, task["trainer"], [*columns, *overrides])
    reading = findings.readings[0]
    settings = {"data.train_data_path": json.dumps(path)}
    settings |= dict(setting.split("=", 1) for setting in (*columns, *reading.settings))
    settings.pop("data.env_name", None)
    report = reading.report
    if report is None:
        why = f"{shorten_middle(reading.problem, 300)}; run laurel data check {shlex.quote(path)}"
        names = [*map(str, findings.first)] if task["trainer"] == "rm" and not own_columns else []
        return Choice(settings=settings, notes=[], problem=why, columns=names)
    what = findings.known.name if findings.known is not None else report.dataset_class
    num_rows = counted(report.num_read, "row")
    notes = [f"{path}: {what}, {report.num_kept:,} of {num_rows} can be used"]
    if columns:
        notes.append(f"its columns are set by {', '.join(columns)}")
    if NOT_WHAT_IS_RIGHT in report.notes:
        notes.append(f"{path} holds preferences: {NOT_WHAT_IS_RIGHT}")
    stops_at = ""
    if reading.num_malformed:
        first = report.dropped["malformed"].examples[0]
        what = f"the run leaves out {first} and the like"
        if own_columns.get("data.on_bad_row") != "skip":
            stops_at = first
            what = f"the run stops at {first}: fix it, or set data.on_bad_row: skip"
        notes.append(f"{counted_that(reading.num_malformed, 'row', 'are')} malformed, and {what}")
    # About 20 rows for validation, but at least 5 % and at most 20 % of all.
    share = min(0.2, max(0.05, math.ceil(2000 / report.num_kept) / 100))
    share = share if report.num_prompts > 1 else 0.0
    settings[_HELD_OUT] = f"{share}"
    if round(share * report.num_kept) < 20:
        notes.append(
            f"only about {share * report.num_kept:.0f} rows are held out for validation, too few "
            "for a precise result: name more in data.val_data_path if you have them"
        )
    return Choice(settings=settings, notes=notes, stops_at=stops_at)


def _write(
    output: Path,
    schema_name: str,
    task: str,
    model: Choice,
    rows: Choice,
    judge: str,
    num_gpus: int,
) -> None:
    table, device = TASKS[task], "gpu" if num_gpus else "cpu"
    own: dict[str, Any] = {
        "policy.precision": "bfloat16" if num_gpus else "float32",
        "checkpointing.checkpoint_dir": f"results/{output.stem}",
        _HELD_OUT: 0.05,
        "cluster.gpus_per_node": max(1, num_gpus),
    }
    own |= table["settings"] | table[device]
    own["policy.max_total_sequence_length"] = min(
        model.longest, own["policy.max_total_sequence_length"]
    )
    if task == "grpo-rm":
        own["env.reward_model.model_name"] = judge
        own["env.reward_model.precision"] = own["policy.precision"]
    choices = {**model.settings, **rows.settings}
    is_new = choices["policy.model_name"] == "null"
    scratch, small = _TABLE["scratch"], _TABLE["small"]
    special: dict[str, Any] = {}
    about: dict[str, str] = {}
    if is_new:
        special, about = scratch[device] | table["scratch"], scratch["about"]
    elif is_small(model.num_parameters):
        special = table.get("small") or {"policy.optimizer.kwargs.lr": RATE_OF_SMALL}
        about = small["about"]
    settings = {key: json.dumps(value) for key, value in (own | special).items()} | choices
    overrides = [f"{key}={value}" for key, value in settings.items()]
    config = load_config(SCHEMAS[table["trainer"]], None, overrides).config
    keys = {*_TABLE["common_keys"], *table.get("grpo_keys", ()), *table["keys"], *choices, *special}
    of_sets = type(config["data"]).short_keys()
    keys = {"data.train" if key.removeprefix("data.") in of_sets else key for key in keys}
    text = to_yaml(config, describe=True, keys=keys, more=about)
    if rows.columns:
        names = visible(", ".join(rows.columns))
        question = (
            "Which columns hold the prompt, the two answers and a system message? The rows have "
            f"{names}."
        )
        lines = textwrap.wrap(question, 96) + [
            f"{key.partition('.')[2]}: COLUMN" for key in COLUMN_KEYS
        ]
        commented = "".join(f"    # {line}\n" for line in lines)
        text = _TRAINING_ROWS.sub(lambda match: match[0] + commented, text)
    command = f"laurel {table['trainer']} --config {output}"
    with replace_file(output) as stream:
        stream.write(
            f"# yaml-language-server: $schema={schema_name}\n"
            f"# {table['about'].capitalize()}: {command}\n#\n"
            "# These are the keys that are changed most often. All keys, with their meaning:\n"
            f"#   laurel config --for {table['trainer']} --config {output} --describe\n"
            "# Any key can be changed on the command line: policy.model_name=...\n\n"
            + _BEFORE_SECTION.sub(r"\1\n", text)
        )
    assert load_config(SCHEMAS[table["trainer"]], output).config == config
