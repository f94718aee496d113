"""Runs `laurel data check`: shows a file's format, the commands that can read it, and a row."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from laurel import plugins
from laurel.config.load import COLUMN_KEYS, load_config
from laurel.config.schemas import SCHEMAS
from laurel.data.conversations import DemonstrationData, Dialogue, load_demonstration_data
from laurel.data.report import MAX_EXAMPLES, MAX_SOURCES, LeftOut, RowReport
from laurel.data.sources import Row, UnusableRow, locate, read_rows
from laurel.data.tasks import (
    NO_NEEDS,
    NOT_WHAT_IS_RIGHT,
    TaskData,
    environments_named,
    keys_of_tests,
    load_task_data,
    tests_in,
)
from laurel.environments.registry import row_sources, shown_tools
from laurel.errors import ConfigError, DataError, UserError, counted, speaking
from laurel.extensions.data_check.formats import (
    FORMATS,
    TRAINERS,
    KnownFormat,
    Suggestion,
    Trainer,
    recognise,
    suggestions,
)
from laurel.extensions.data_check.references import References, check_tests, run_references
from laurel.observe.console import (
    UNBROKEN,
    is_unbroken,
    make_console,
    message_console,
    print_command,
    quiet_libraries,
    shorten_middle,
    visible,
)
from laurel.observe.hub import check_fetchable
from laurel.observe.json_output import write_json
from laurel.rewards.spec import find_model
from laurel.run.model import model_spec
from laurel.run.reward_model import load_data, tokenise
from laurel.run.specs import OPTIONS
from laurel.run.tasks import fit_prompts, needs_of
from laurel.types import Conversation, Preference, Task

if TYPE_CHECKING:
    from laurel.config.environments import EnvironmentsConfig
    from laurel.data.conversations import DialogueReport
    from laurel.data.report import DataReport, TaskReport
    from laurel.models.chat import ChatFormat
    from laurel.models.scoring import ScoringContract
    from laurel.types import Mask, TokenIds, ToolSchemas


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The result of reading a data file the way one training command reads it."""

    trainer: Trainer
    config: Any
    """The run configuration that the file is read with, including `settings`."""
    settings: tuple[str, ...] = ()
    """The settings that the command needs, besides the path, to read the file."""
    report: RowReport | None = None
    """The data report of the rows; None if no row is left, and then `problem` says why."""
    problem: str = ""
    rows: Sequence[Preference | Dialogue | Task] = ()
    """The rows that remain for the command after checks and filters."""
    environments: Mapping[str, int] = field(default_factory=dict)
    """The environments that can grade the tasks, each with the number of its tasks (GRPO only)."""

    @property
    def num_malformed(self) -> int:
        """Count the malformed rows, at which a run stops unless `data.on_bad_row` is `skip`."""
        left_out = self.report.dropped.get("malformed") if self.report is not None else None
        return 0 if left_out is None else left_out.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything that `laurel data check` found out about a file."""

    path: str
    num_rows: int
    unreadable: LeftOut
    """The rows that cannot be parsed: invalid JSON, no object, or a wrong number of cells."""
    first: Row
    known: KnownFormat | None
    readings: list[Reading]
    evaluation: str | None
    """The `laurel eval` command that reads the file; None if the user asked about a trainer."""
    near: list[Suggestion]
    overrides: Sequence[str]

    @property
    def names_columns(self) -> bool:
        """Report whether an override names a column."""
        return any(
            key.startswith("data.") and key.endswith("_key") for key in _values_of(self.overrides)
        )

    @property
    def is_usable(self) -> bool:
        """Report whether any of the examined commands can use at least one row."""
        return self.shown is not None or self.evaluation is not None

    @property
    def shown(self) -> Reading | None:
        """Return the first reading that keeps a row, whose first row is printed, or None."""
        return next((reading for reading in self.readings if reading.report is not None), None)


def _values_of(overrides: Sequence[str]) -> dict[str, str]:
    return dict(override.lstrip("+").partition("=")[::2] for override in overrides)


def examine_data(path: str, trainer: Trainer | None, overrides: Sequence[str] = ()) -> Findings:
    """Read a whole file, recognize its format, and try to read it as training commands do.

    With `trainer`, only that command is tried.

    Raises:
        UserError: There is no file or no row, or no command understands the overrides.
    """
    if path in plugins.names("rows"):
        return _examine_made(path, overrides)
    unreadable, first_problem = LeftOut(), ""

    def leave_out(source: str, problem: UnusableRow) -> None:
        nonlocal first_problem
        unreadable.add_row(source, problem.kind)
        first_problem = first_problem or f"{locate(path, source)}: {problem.message}"

    first: Row = {}
    num_rows = 0
    for _, row in read_rows(path, on_bad_row=leave_out):
        first = first if num_rows else row
        num_rows += 1
    if not num_rows:
        count = counted(unreadable.count, "row")
        raise DataError(f"{path}: none of its {count} can be read; the first: {first_problem}")
    configured, problems = [], []
    for command in TRAINERS if trainer is None else (trainer,):
        try:
            configured.append(_configured(path, first, command, overrides))
        except ConfigError as problem:
            # An override may be a key of some commands only; the others are left out.
            problems.append(str(problem) if trainer else f"laurel {command}: {problem}")
    if not configured:
        raise ConfigError("\n".join(problems))
    known = configured[0][1]
    readings = [_read_as(reading, known) for reading, _ in configured]
    # Rows that only a prompt is read from may hold more, unless the environment is named.
    has_environment = "data.env_name" in _values_of(overrides)
    is_clear = known is not None and (known.name != "prompts" or has_environment)
    near = [] if is_clear else suggestions(first)
    findings = Findings(
        path=path,
        num_rows=num_rows + unreadable.count,
        unreadable=unreadable,
        first=first,
        known=known,
        readings=readings,
        evaluation=known.evaluation if known is not None and trainer is None else None,
        near=[hint for hint in near if trainer is None or hint.trainer in (None, trainer)],
        overrides=overrides,
    )
    # An evaluation reads the named columns, too, and pairs as `laurel rm` does.
    is_lost = findings.names_columns and readings[0].report is None
    return replace(findings, evaluation=None) if is_lost else findings


def _examine_made(name: str, overrides: Sequence[str]) -> Findings:
    """Read the first rows of a set that the package of an environment makes."""
    settings = (f"data.dataset_name={name}",)
    config = load_config(SCHEMAS["grpo"], None, [*settings, *overrides]).config
    reading = _read_as(Reading(trainer="grpo", config=config, settings=settings), None)
    if reading.report is None:
        raise DataError(reading.problem)
    return Findings(
        path=name,
        num_rows=reading.report.num_read,
        unreadable=LeftOut(),
        first={},
        known=None,
        readings=[reading],
        evaluation=None,
        near=[],
        overrides=overrides,
    )


def _configured(
    path: str, first: Row, trainer: Trainer, overrides: Sequence[str]
) -> tuple[Reading, KnownFormat | None]:
    """Configure a command to read the file, and recognize the first row's format."""
    base = [f"data.train_data_path={json.dumps(path)}"]
    data = load_config(SCHEMAS[trainer], None, [*base, *overrides]).config.data  # type: ignore[attr-defined]
    (rows,) = data.train_sets()
    # Formats are recognised by the default names of columns, so the columns that `data` names get
    # these.
    columns = {
        field_of_key.default: getattr(rows, key)
        for key, field_of_key in type(rows).model_fields.items()
        if key.endswith("_key") and isinstance(field_of_key.default, str)
    }
    columns = {name: column for name, column in columns.items() if column in first}
    renamed = {name: value for name, value in first.items() if columns.get(name, name) == name}
    renamed |= {name: first[column] for name, column in columns.items()}
    known = recognise(renamed)
    settings = tuple(known.trainers.get(trainer, ())) if known is not None else ()
    if trainer == "grpo" and not any(setting.startswith("data.env_name=") for setting in settings):
        # The reward model environment needs nothing but prompts.
        settings = (*settings, "data.env_name=reward_model")
    override_values = _values_of(overrides)
    settings = tuple(
        setting for setting in settings if setting.partition("=")[0] not in override_values
    )
    # Every row is read: a run would stop at a malformed one, and hold some out for validation.
    options = ["data.on_bad_row=skip", "data.split_validation_size=0"]
    options = [option for option in options if option.partition("=")[0] not in override_values]
    config = load_config(SCHEMAS[trainer], None, [*base, *options, *settings, *overrides]).config
    return Reading(trainer=trainer, config=config, settings=settings), known


def _read_as(reading: Reading, known: KnownFormat | None) -> Reading:
    """Read the file as the command does; record unusable rows as a `problem` instead of raising."""
    config = reading.config
    try:
        if reading.trainer == "rm":
            pairs = load_data(config)
            return replace(reading, report=pairs.reports["train"], rows=pairs.train)
        if reading.trainer == "sft":
            chats = load_demonstration_data(config.data)
            return replace(reading, report=chats.reports["train"], rows=chats.train)
        env = config.data.env_name
        tasks = load_task_data(
            config.data,
            default_environment=config.default_environment,
            environments=config.env.names(),
            # Without an environment, the tasks that each environment can grade are counted below.
            needs=NO_NEEDS
            if env is None
            else needs_of(config.env, *environments_named(config.data.sets(), env)),
            sources=row_sources(config.env),
        )
        check_tests(tasks, config.env)
    except DataError as problem:
        return replace(reading, problem=str(problem))
    counts = {
        "math": sum("ground_truth" in task.metadata for task in tasks.train),
        **{
            name: sum(name in tests_in(task.metadata, NO_NEEDS).values() for task in tasks.train)
            for name in keys_of_tests().values()
        },
        "reward_model": len(tasks.train),
    }
    if known is not None and "rm" in known.trainers:
        # A preferred answer is not the only right one, so it cannot grade other answers.
        del counts["math"]
    if config.data.train_sets()[0].dataset_name in plugins.names("rows"):
        counts = Counter(task.environment for task in tasks.train)
    environments = {name: count for name, count in counts.items() if count}
    report = tasks.reports["train"]
    return replace(reading, report=report, rows=tasks.train, environments=environments)


def _tokenised(reading: Reading, model: str) -> Reading:
    """Tokenize the rows as the command does with this model, which may leave out more of them."""
    if reading.report is None:
        return reading
    from laurel.run.sft import tokenise_dialogues

    config, rows, report = reading.config, list(reading.rows), reading.report
    console = Console(quiet=True)
    try:
        if reading.trainer == "rm":
            contract, _ = _contract_of(config, model)
            samples = tokenise(
                cast("list[Preference]", rows),
                contract=contract,
                report=cast("DataReport", report),
                overlong=config.data.overlong,
                on_bad_row=config.data.on_bad_row,
                console=console,
            )
            return replace(reading, rows=[sample.preference for sample in samples])
        chat = _chat_of(config.policy, model)
        if reading.trainer == "sft":
            dialogues = cast("list[Dialogue]", rows)
            data = DemonstrationData(dialogues, [], {"train": cast("DialogueReport", report)})
            learned = tokenise_dialogues(config, data, "train", chat, console)
            kept_ids = {sample.tokens.id for sample in learned}
            return replace(
                reading, rows=[dialogue for dialogue in dialogues if dialogue.source in kept_ids]
            )
        tasks = TaskData(
            train=cast("list[Task]", rows),
            validation=[],
            reports={"train": cast("TaskReport", report)},
        )
        # To know its functions, an environment may have to be started.
        fit_prompts(tasks, chat, config, cache(lambda name: _schemas_of(name, config.env)))
        return replace(reading, rows=tasks.train)
    except DataError as problem:
        return replace(reading, report=None, problem=str(problem))


def _contract_of(config: Any, model: str) -> tuple[ScoringContract, list[str]]:
    from laurel.models.loading.reward_model import load_contract

    quiet_libraries()
    policy = config.policy
    return load_contract(
        replace(model_spec(policy), name=model),
        max_length=config.data.max_input_seq_length or policy.max_total_sequence_length,
        truncation_side=config.data.truncation_side,
        for_training=True,
    )


def _chat_of(policy: Any, model: str) -> ChatFormat:
    from laurel.models.chat import ChatFormat
    from laurel.models.tokenizer import load_tokenizer

    quiet_libraries()
    tokenizer = load_tokenizer(
        policy.tokenizer,
        model_name=model,
        trust_remote_code=policy.trust_remote_code,
        pad_may_end=True,
    )
    return ChatFormat(tokenizer, policy.tokenizer.chat_template_kwargs)


def _schemas_of(environment: str, config: EnvironmentsConfig) -> ToolSchemas:
    return tuple(schema for shown in shown_tools(environment, config) for schema in shown.schemas)


def run_data_check(
    path: str,
    *,
    trainer: Trainer | None,
    model: str,
    overrides: Sequence[str],
    as_json: bool,
) -> bool:
    """Print the findings about a file, and return whether at least one row is usable."""
    model_name = ""
    if model:
        with speaking(OPTIONS):
            place = find_model(model)
        for note in place.notes:
            message_console().print(note)
        model_name = place.name
        if not Path(model_name).is_dir():
            check_fetchable(model_name, key="--model")
    with message_console().status(f"reading {path}") as status:
        findings = examine_data(path, trainer, overrides)
        row = first_row(findings.shown, "") if findings.shown is not None else None
        problem = None
        if model_name and findings.shown is not None:
            status.update(f"tokenising {path}")
            try:
                with speaking({"policy.model_name": "--model"}):
                    readings = [_tokenised(reading, model_name) for reading in findings.readings]
                    findings = replace(findings, readings=readings)
                    if findings.shown is not None:
                        row = first_row(findings.shown, model_name)
            except UserError as error:
                problem = error  # raised after the findings are printed
    references = None
    grpo = next((reading for reading in findings.readings if reading.trainer == "grpo"), None)
    if grpo is not None:
        tasks = [task for task in grpo.rows if isinstance(task, Task)]
        with message_console().status("running the reference solutions"):
            references = run_references(tasks, grpo.config.env)
    if as_json:
        write_json(_as_facts(findings, row, references))
    else:
        _show(make_console(), findings, row, references, model=model)
    if problem is not None:
        raise problem
    return findings.is_usable


def _as_facts(
    findings: Findings, row: FirstRow | None, references: References | None
) -> dict[str, Any]:
    known = findings.known
    return {
        "file": findings.path,
        "rows": findings.num_rows,
        "rows_unreadable": findings.unreadable.to_dict(),
        "columns": list(map(str, findings.first)),
        "format": None if known is None else {"name": known.name, "says": known.says},
        "fits": {
            reading.trainer: {
                "fits": reading.report is not None,
                "problem": reading.problem or None,
                "settings": list(reading.settings),
                "malformed": reading.num_malformed,
                "environments": reading.environments,
                "report": None if reading.report is None else reading.report.to_dict(),
            }
            for reading in findings.readings
        },
        "evaluation": findings.evaluation,
        "references": None if references is None else asdict(references),
        "suggestions": [
            {
                "says": hint.says,
                "command": hint.trainer,
                "settings": list(hint.settings),
                "program": hint.program or None,
            }
            for hint in findings.near
        ],
        "first_row": None if row is None else asdict(row),
    }


_NAMES_MODEL = ("policy.model_name.", "policy.scratch.")
_TEXT_KEYS = "data.input_key and data.output_key (sft, grpo)"
_COLUMN_KEYS: dict[Trainer, str] = {
    "rm": f"{', '.join(COLUMN_KEYS)} (rm)",
    "sft": _TEXT_KEYS,
    "grpo": _TEXT_KEYS,
}


def _show(
    console: Console,
    findings: Findings,
    row: FirstRow | None,
    references: References | None,
    *,
    model: str,
) -> None:
    console.print(Text(visible(findings.path), style="bold"), soft_wrap=True)
    rows = f"{findings.num_rows:,}"
    if findings.unreadable.count:
        places = ", ".join(findings.unreadable.examples)
        rows += f", of which {findings.unreadable.count:,} cannot be read ({places})"
    _line(console, "rows", rows)
    _line(console, "columns", visible(", ".join(map(str, findings.first))))
    known = findings.known
    form = "none of the known ones" if known is None else f"{known.name}: {known.says}"
    _line(console, "format", form)
    _show_fits(console, findings, model)
    if references is not None:
        _show_references(console, references)
    if findings.evaluation is not None:
        _show_evaluation(console, findings)
    other_names = "other names? " if known is None else ""
    for near in findings.near:
        _line(console, "hint", f"{other_names}it looks like {near.says}", "bold")
        if near.trainer is not None:
            words = ["laurel", "data", "check", findings.path, "--for", near.trainer]
            print_command(console, " " * 9, shlex.join([*words, *near.settings]))
        if near.program:
            program = near.program.replace('"FILE"', json.dumps(findings.path))
            console.print(Text(program), soft_wrap=True)
    if known is None and not findings.near and findings.path not in plugins.names("rows"):
        keys = dict.fromkeys(_COLUMN_KEYS[reading.trainer] for reading in findings.readings)
        _line(console, "hint", f"other names? Name your columns: {'; '.join(keys)}", "bold")
    if not findings.is_usable:
        _show_formats(console, findings)
    reading = findings.shown
    if reading is None or reading.report is None or row is None:
        return
    console.print(reading.report.render())
    left_out = reading.report.dropped.values()
    if any(len(each) > MAX_EXAMPLES for dropped in left_out for each in dropped.sources.values()):
        note = f"--json names the rows that are left out, up to {MAX_SOURCES:,} of each kind"
        _line(console, "note", note)
    heading = f"First row, as laurel {reading.trainer} reads it ({row.source})"
    console.print(Text(f"\n{visible(heading)}", style="bold"))
    show_row(console, row)
    if not model:
        what = {"rm": "the pooled token", "sft": "what counts in the loss", "grpo": "the template"}
        hint = (
            "DIR is a model, a directory or a hub name: add --model DIR, which also shows tokens "
            f"and {what[reading.trainer]}"
        )
        _line(console, "note", hint)


def _line(console: Console, label: str, text: str | Text, style: str = "") -> None:
    width = UNBROKEN if is_unbroken(console) else None
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False, width=width)
    table.add_column(no_wrap=True, min_width=8)
    table.add_column(overflow="fold", ratio=None if width is None else 1)
    table.add_row(Text(visible(label), style=style), Text(text) if isinstance(text, str) else text)
    console.print(table)


def _show_fits(console: Console, findings: Findings, model: str) -> None:
    override_values = _values_of(findings.overrides)
    has_model = any(f"{key}.".startswith(_NAMES_MODEL) for key in override_values)
    for reading in findings.readings:
        if reading.report is None:
            # The problem begins with the name of the set, its rows, and what the first row lacks.
            before, _, why = reading.problem.partition("Left out: ")
            lacks = before.partition(": nothing is left of ")[2].partition(". ")[2]
            why = (lacks if findings.names_columns else "") + (why or reading.problem)
            _line(console, reading.trainer, f"no: {shorten_middle(why, 300)}", "bold")
            continue
        counts = _counts(reading, reading.report, findings)
        _line(console, reading.trainer, f"yes: {counts}", "bold")
        words = ["laurel", reading.trainer]
        words += (
            []
            if findings.path in plugins.names("rows")
            else [f"data.train_data_path={findings.path}"]
        )
        words += [*reading.settings, *findings.overrides]
        if not has_model:
            words.append(f"policy.model_name={model or 'DIR'}")
        if reading.num_malformed and "data.on_bad_row" not in override_values:
            words.append("data.on_bad_row=skip")
        if "data.env_name=reward_model" in words:
            words += ["env.reward_model.enabled=true", "env.reward_model.model_name=DIR"]
        print_command(console, " " * 9, shlex.join(words))
        if NOT_WHAT_IS_RIGHT in reading.report.notes:
            _line(console, "warning", NOT_WHAT_IS_RIGHT, "bold")


def _counts(reading: Reading, report: RowReport, findings: Findings) -> str:
    """Describe how many rows there are, what the command uses of them, and what stops a run."""
    text = f"{report.num_kept:,} of {counted(report.num_read, 'row')}"
    if use := findings.known and findings.known.uses.get(reading.trainer):
        text += f"; {use}"
    if reading.environments:
        names = ", ".join(f"{name} ({n:,})" for name, n in reading.environments.items())
        text += f"; could be graded by {names}"
    if not reading.num_malformed:
        return text
    first = report.dropped["malformed"].examples[0]
    if _values_of(findings.overrides).get("data.on_bad_row") == "skip":
        rows = counted(reading.num_malformed, "malformed row")
        return f"{text}. The run leaves out {rows}, the first at {first}"
    return f"{text}. The run stops at {first} unless you fix the rows or set data.on_bad_row=skip"


def _show_evaluation(console: Console, findings: Findings) -> None:
    rm = next((reading for reading in findings.readings if reading.trainer == "rm"), None)
    malformed = rm.report.dropped.get("malformed") if rm is not None and rm.report else None
    bad = malformed or findings.unreadable
    if bad.count:
        why = f"reads a file whole, and stops at {bad.examples[0]}: fix the rows or take them out"
        _line(console, "eval", f"no: laurel eval {findings.evaluation} {why}", "bold")
        return
    words = ["laurel", "eval", str(findings.evaluation), "--model", "DIR", "-d", findings.path]
    if findings.evaluation == "pairs":
        words += [
            override
            for override in findings.overrides
            if _values_of([override]).keys() <= {*COLUMN_KEYS}
        ]
    print_command(console, f"{'eval':<9}", shlex.join(words))


def _show_references(console: Console, references: References) -> None:
    num_found, num_failed = references.found, len(references.failed)
    if references.problem:
        rows = f"{counted(num_found, 'row')} with a reference solution"
        _line(console, "note", f"{rows}, not run: {references.problem}")
        return
    of_all = "" if references.run == num_found else f" (of {num_found:,} in the file)"
    run = f"{counted(references.run, 'reference solution')}{of_all} run"
    if not num_failed:
        _line(console, "note", f"{run}: all pass the tests of their rows")
        return
    fail = (
        "fails the tests of its row, and a run leaves that row out"
        if num_failed == 1
        else "fail the tests of their rows, and a run leaves these rows out"
    )
    first = f"The first: {references.failed[0]}"
    _line(console, "warning", f"{run}: {num_failed:,} {fail}. {first}", "bold")


def _show_formats(console: Console, findings: Findings) -> None:
    trainers = {reading.trainer for reading in findings.readings}
    known = findings.known
    if known is not None and known.trainers and not trainers & known.trainers.keys():
        others = " and ".join(f"laurel {trainer}" for trainer in known.trainers)
        _line(console, "hint", f"this format is for {others}: leave --for out", "bold")
    by_command = f" that laurel {next(iter(trainers))} reads" if len(trainers) == 1 else ""
    console.print(Text(f"\nFormats{by_command}, by their columns", style="bold"))
    for form in FORMATS:
        if len(trainers) > 1 or trainers & form.trainers.keys():
            commands = [*form.trainers, *([f"eval {form.evaluation}"] if form.evaluation else [])]
            _line(console, form.name, f"{form.columns}  ({', '.join(commands)})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One token, or several that together encode one character, with its text for display."""

    ids: tuple[int, ...]
    text: str
    in_loss: bool = False
    pooled: bool = False
    """True if the reward model reads the score from this token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """A displayed part of a row: the shared prompt, one answer, or a whole conversation."""

    title: str
    messages: Conversation
    is_cut: bool = False
    """Whether it was cut to fit."""
    tokens: Sequence[Piece] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRow:
    """The first row that a command uses, prepared for display, with its place in the file."""

    source: str
    parts: Sequence[RowPart]
    notes: Sequence[str] = ()


def first_row(reading: Reading, model: str) -> FirstRow:
    """Prepare the first usable row of a reading for display.

    If `model` is a directory or a hub name, the row is also split into that model's tokens; the
    model's weights are not read.

    Raises:
        ModelError: The model has no usable tokenizer or template.
        DataError: The template cannot render the row.
    """
    row, config = reading.rows[0], reading.config
    policy = config.policy
    longest = config.data.max_input_seq_length or policy.max_total_sequence_length
    notes: list[str] = []
    if isinstance(row, Preference):
        parts = [RowPart(title="prompt", messages=row.group.prompt)]
        for index, completion in enumerate(row.group.completions_G):
            parts.append(RowPart(title=_answer_title(row, index), messages=completion.messages))
        if model:
            parts, notes = _scored(row, parts, config, model)
        return FirstRow(source=row.source, parts=parts, notes=notes)
    if isinstance(row, Task):
        part = RowPart(title="prompt", messages=row.prompt)
        notes = _about_task(row)
    else:
        part = RowPart(title="conversation", messages=row.messages)
    if not model:
        return FirstRow(source=row.source, parts=[part], notes=notes)
    from laurel.models.tool_calls import form_of

    chat = _chat_of(policy, model)
    tokenizer = chat.tokenizer
    if isinstance(row, Task):
        for shown in shown_tools(row.environment, config.env):
            form_of(tokenizer, where=shown.where)
        ids_L = chat.prompt_ids(row.prompt, tools=_schemas_of(row.environment, config.env))
        tokens = pieces_of(tokenizer, ids_L)
        most = policy.max_total_sequence_length
        note = (
            f"the policy's completion counts in the loss: up to {max(most - len(ids_L), 0):,} "
            f"tokens of policy.max_total_sequence_length={most}"
        )
        parts = [replace(part, tokens=tokens)]
        return FirstRow(source=row.source, parts=parts, notes=[note, *notes])
    learned = chat.demonstration(
        row.messages,
        demonstration_id=row.source,
        max_length=longest,
        only_final=config.sft.only_unmask_final,
        tools=row.tools,
    )
    if learned is None:
        raise DataError(
            f"{row.source}: no token of the answer is within the first {longest} tokens; raise "
            "policy.max_total_sequence_length"
        )
    trunk, branches = learned.tokens.trunk_ids, learned.tokens.branches_ids_G
    masks = np.split(learned.mask_L, np.cumsum(list(map(len, branches)))[:-1])
    parts = [
        replace(
            part,
            tokens=pieces_of(
                tokenizer,
                np.concatenate((trunk, branch)),
                learned_L=np.concatenate((np.zeros(len(trunk), dtype=bool), mask)),
            ),
            is_cut=is_cut,
        )
        for branch, mask, is_cut in zip(branches, masks, learned.tokens.truncated_G, strict=True)
    ]
    return FirstRow(source=row.source, parts=parts)


def _scored(
    row: Preference, parts: list[RowPart], run: Any, model: str
) -> tuple[list[RowPart], list[str]]:
    contract, notes = _contract_of(run, model)
    (tokens,) = contract.encode([row.group], sources=[row.source])
    pools_last = contract.rules.pooled == "last"
    num_trunk = len(tokens.trunk_ids)
    for index, branch in enumerate(tokens.branches_ids_G):
        pieces = pieces_of(
            contract.tokenizer,
            np.concatenate((tokens.trunk_ids, branch)),
            pools_last=pools_last,
        )
        ends = np.cumsum([len(piece.ids) for piece in pieces])
        shared = int(np.searchsorted(ends, num_trunk)) + 1 if num_trunk else 0
        title = "prompt, computed once for all answers"
        parts[0] = replace(parts[0], title=title, tokens=pieces[:shared])
        is_cut = tokens.truncated_G[index]
        parts[index + 1] = replace(parts[index + 1], tokens=pieces[shared:], is_cut=is_cut)
    if not pools_last:
        notes.append("this model pools itself: the score is read from no single token")
    return parts if num_trunk else parts[1:], notes


def _answer_title(row: Preference, index: int) -> str:
    if row.steps_GS is not None:
        labels = ["none" if np.isnan(label) else f"{label:g}" for label in row.steps_GS[index]]
        return (
            f"answer, {index + 1} of {len(row.ranks_G)}, labels of its steps: {', '.join(labels)}"
        )
    rank = row.ranks_G[index]
    best, worst = min(row.ranks_G), max(row.ranks_G)
    word = "answer"
    if len(row.ranks_G) == 2 and best != worst:
        word = "better answer" if rank == best else "worse answer"
    return f"{word}, {index + 1} of {len(row.ranks_G)}, rank {rank}"


def _about_task(row: Task) -> list[str]:
    facts = []
    if "ground_truth" in row.metadata:
        facts.append(f"the known answer is {str(row.metadata['ground_truth'])!r:.200}")
    tests = tests_in(row.metadata, NO_NEEDS)
    if tests:
        by = row.metadata.get("comparison")
        compared = f", compared as {by}" if by is not None else ""
        facts.append(f"it has tests: {', '.join(tests)}{compared}")
    return facts


def pieces_of(
    tokenizer: Any, ids_L: TokenIds, *, learned_L: Mask | None = None, pools_last: bool = False
) -> list[Piece]:
    """Split tokens into pieces with texts; mark those in the loss, and the last if it is pooled."""

    def decoded(tokens: list[int]) -> str:
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(tokens, **options)) if tokens else ""

    pieces: list[Piece] = []
    pending: list[int] = []
    before: list[int] = []
    for end, token in enumerate(map(int, ids_L), 1):
        pending.append(token)
        # Decoded alone, a token would lose its leading blank, and part of a character would become
        # a replacement character.
        text = decoded([*before, *pending])[len(decoded(before)) :]
        if text.endswith("\ufffd") and len(pending) < 8 and end < len(ids_L):
            continue
        in_loss = learned_L is not None and bool(learned_L[end - len(pending) : end].any())
        pooled = pools_last and end == len(ids_L)
        pieces.append(Piece(ids=tuple(pending), text=text, in_loss=in_loss, pooled=pooled))
        before, pending = [token], []
    return pieces


LEARNED, POOLED = "bold underline", "bold #FFFFFF on #0072B2"
_HEAD, _TAIL = 80, 40  # tokens shown at each end of a long stretch


def show_row(console: Console, row: FirstRow) -> None:
    """Print the messages of a row or, if it has them, its tokens with their role in training."""
    separator = "│" if "utf" in (console.encoding or "").lower() else "|"
    for part in row.parts:
        count = counted(sum(len(piece.ids) for piece in part.tokens), "token")
        cut = ", cut to fit" if part.is_cut else ""
        console.print(Text(f"{part.title}: {count}{cut}" if part.tokens else part.title, "bold"))
        for message in () if part.tokens else part.messages:
            _line(console, message.role, shorten_middle(message.content, 600) or "(empty)")
        for (learned, pooled), group in groupby(
            part.tokens, lambda piece: (piece.in_loss, piece.pooled)
        ):
            use = "score" if pooled else "loss" if learned else ""
            style = POOLED if pooled else LEARNED if learned else ""
            words = [Text(visible(piece.text), style) for piece in group]
            if len(words) > _HEAD + _TAIL:
                left_out = len(words) - _HEAD - _TAIL
                words[_HEAD:-_TAIL] = [Text(f" ... {left_out:,} more ... ", "italic")]
            _line(console, use, Text(separator).join(words), style)
    if any(part.tokens for part in row.parts):
        marks = "loss: these count in the loss; score: the score is read from this one"
        _line(console, "legend", f"{separator} stands between tokens; {marks}")
    for note in row.notes:
        console.print(Text(f"note     {visible(note)}"), soft_wrap=True)
