"""`laurel data check`: what a data file is, which command it fits, what its first row becomes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from rich.table import Table
from rich.text import Text

from laurel.config.grpo import GRPORun
from laurel.config.load import load_config
from laurel.config.overrides import COLUMN_KEYS, columns_of
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.schemas import SCHEMAS
from laurel.config.sft import SFTRun
from laurel.data.benchmarks import BEST_OF_N, ON_HUB, read_benchmark
from laurel.data.conversations import Dialogue, load_demonstration_data, read_scoring_rows
from laurel.data.formats import (
    FORMATS,
    KEYS_OF_COLUMNS,
    TRAINERS,
    KnownFormat,
    Suggestion,
    Trainer,
    could_be_named,
    recognise,
    suggestions,
)
from laurel.data.report import DataReport, LeftOut, TextReport
from laurel.data.sources import Row, UnusableRow, locate, read_rows
from laurel.data.task_formats import OWN_TESTS
from laurel.data.tasks import NO_NEEDS, NOT_WHAT_IS_RIGHT, load_task_data
from laurel.errors import ConfigError, DataError, Terms, UserError, speaking
from laurel.observe.console import make_console, message_console, shorten_middle, visible
from laurel.observe.counts import counted
from laurel.observe.hub import check_fetchable
from laurel.observe.json_output import write_json
from laurel.rewards.open import check_not_missing
from laurel.run.reward_model import load_data
from laurel.run.scorer import find_local
from laurel.run.specs import model_spec
from laurel.run.tasks import check_tests, needs_of
from laurel.types import Conversation, Message, Preference, Task

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.config.tree import Section
    from laurel.models.chat import ChatFormat
    from laurel.types import Mask, TokenIds


# --------------------------------------------------------------------------------------------------
# A data file, read as each command would read it: does it fit, and what is lost?


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRows:
    """What stands in a file, before anybody makes anything of it."""

    path: str
    num_rows: int
    unreadable: LeftOut
    """Rows that are no rows: no JSON, no object, a wrong number of cells."""
    first: Row
    first_source: str

    @property
    def columns(self) -> list[str]:
        """Those of the first row."""
        return [str(column) for column in self.first]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one command makes of a file."""

    trainer: Trainer
    config: Section
    """The run's configuration, with the file and what the command has to be told."""
    settings: tuple[str, ...] = ()
    """What it has to be told besides the path."""
    report: DataReport | TextReport | None = None
    """None where no row is left."""
    problem: str = ""
    """Why no row is left."""
    first: Preference | Dialogue | Task | None = None
    """The first row that it would use."""
    environments: dict[str, int] = field(default_factory=dict)
    """GRPO: environments of Laurel's that could judge, and how many tasks each."""
    tasks: Sequence[Task] = ()
    """GRPO: the rows that it would use."""

    @property
    def fits(self) -> bool:
        """Whether any row can be used."""
        return self.report is not None

    @property
    def num_malformed(self) -> int:
        """Rows at which a run would stop unless it is told to leave them out."""
        left_out = self.report.dropped.get("malformed") if self.report is not None else None
        return 0 if left_out is None else left_out.count


def look_at(path: str) -> RawRows:
    """Read a file, a directory or a hub data set from end to end.

    Raises:
        DataError: There is no such thing, or not a single row in it.
    """
    unreadable = LeftOut()
    said: list[str] = []

    def tell(source: str, problem: UnusableRow) -> None:
        unreadable.add(LeftOut(1, [source]))
        said.append(f"{locate(path, source)}: {problem.message}")
        del said[1:]

    first: tuple[str, Row] | None = None
    num_rows = 0
    for source, row in read_rows(path, on_bad_row=tell):
        first = first or (source, row)
        num_rows += 1
    if first is None:
        raise DataError(
            f"{path}: none of its {counted(unreadable.count, 'row')} can be read; "
            f"the first: {said[0]}"
        )
    return RawRows(
        path=path,
        num_rows=num_rows + unreadable.count,
        unreadable=unreadable,
        first=first[1],
        first_source=first[0],
    )


def configured(
    raw: RawRows, trainers: Sequence[Trainer], overrides: Sequence[str]
) -> dict[Trainer, tuple[Section, tuple[str, ...], KnownFormat | None]]:
    """For each command its configuration, what it has to be told, and the form of the rows.

    Args:
        raw: The file.
        trainers: The commands that are asked about.
        overrides: What the user says; a key that a command does not have leaves that command out.

    Raises:
        ConfigError: No command understands the overrides.
    """
    found: dict[Trainer, tuple[Section, tuple[str, ...], KnownFormat | None]] = {}
    problems: list[str] = []
    for trainer in trainers:
        try:
            found[trainer] = _configured(raw, trainer, overrides)
        except ConfigError as problem:
            problems.append(str(problem) if len(trainers) == 1 else f"laurel {trainer}: {problem}")
    if not found:
        raise ConfigError("\n".join(problems))
    return found


def _configured(
    raw: RawRows, trainer: Trainer, overrides: Sequence[str]
) -> tuple[Section, tuple[str, ...], KnownFormat | None]:
    base = [f"data.train_data_path={json.dumps(raw.path)}"]
    said = load_config(SCHEMAS[trainer], None, [*base, *overrides]).config
    known = recognise(_as_called(raw.first, cast("Any", said).data))
    settings = tuple(known.trainers.get(trainer, ())) if known is not None else ()
    if trainer == "grpo" and not any(one.startswith("data.env_name=") for one in settings):
        settings = (*settings, "data.env_name=reward_model")  # which needs nothing but prompts
    keys = {setting.partition("=")[0] for setting in overrides}
    settings = tuple(one for one in settings if one.partition("=")[0] not in keys)
    options = ["data.on_bad_row=skip"] if "data.on_bad_row" not in keys else []
    if "data.split_validation_size" not in keys:
        options.append("data.split_validation_size=0")  # all rows are looked at
    config = load_config(SCHEMAS[trainer], None, [*base, *options, *settings, *overrides]).config
    return config, settings, known


def _as_called(row: Row, data: Any) -> Row:
    """The row with the columns that `data` names under the names that they have by default."""
    renamed = dict(row)
    for key, field_of_key in type(data).model_fields.items():
        column, default = getattr(data, key), field_of_key.default
        if key.endswith("_key") and isinstance(default, str) and column in row:
            renamed[default] = row[column]
    return renamed


# ----------------------------------------------------------------------------------- as each reads


def read_as(trainer: Trainer, config: Section, settings: tuple[str, ...] = ()) -> Reading:
    """What a command makes of the file that its configuration names. Nothing is raised for rows."""
    try:
        if isinstance(config, RewardTrainingRun):
            return _read_preferences(config, settings)
        if isinstance(config, SFTRun):
            return _read_demonstrations(config, settings)
        return _read_tasks(cast("GRPORun", config), settings)
    except DataError as problem:
        return Reading(trainer=trainer, config=config, settings=settings, problem=str(problem))


def _read_preferences(config: RewardTrainingRun, settings: tuple[str, ...]) -> Reading:
    data = load_data(config)
    return Reading(
        trainer="rm",
        config=config,
        settings=settings,
        report=data.reports["train"],
        first=data.train[0],
    )


def _read_demonstrations(config: SFTRun, settings: tuple[str, ...]) -> Reading:
    data = load_demonstration_data(config.data)
    return Reading(
        trainer="sft",
        config=config,
        settings=settings,
        report=data.reports["train"],
        first=data.train[0],
    )


def _read_tasks(config: GRPORun, settings: tuple[str, ...]) -> Reading:
    data = load_task_data(
        config.data,
        default_environment=config.default_environment,
        environments=config.env.names(),
        # Where nobody has said who judges, what each environment lacks is counted afterwards.
        needs=needs_of(config.env) if config.data.env_name is not None else NO_NEEDS,
    )
    check_tests(data, config.env.code)
    return Reading(
        trainer="grpo",
        config=config,
        settings=settings,
        report=data.reports["train"],
        first=data.train[0],
        environments=_environments_of(data.train),
        tasks=data.train,
    )


def _environments_of(tasks: Sequence[Task]) -> dict[str, int]:
    counts = {
        "math": sum("ground_truth" in task.metadata for task in tasks),
        "code": sum(any(key in task.metadata for key in OWN_TESTS) for task in tasks),
        "reward_model": len(tasks),
    }
    return {name: count for name, count in counts.items() if count}


def readings_of(
    raw: RawRows, *, trainer: Trainer | None, overrides: Sequence[str] = ()
) -> tuple[KnownFormat | None, list[Reading]]:
    """The form of a file, and what each command (or one) makes of it.

    Raises:
        ConfigError: No command understands the overrides.
    """
    asked = TRAINERS if trainer is None else (trainer,)
    found = configured(raw, asked, overrides)
    known = next(iter(found.values()))[2]
    readings = [read_as(one, config, settings) for one, (config, settings, _) in found.items()]
    if known is not None and "rm" in known.trainers:
        # What people preferred is an answer to imitate, not one to check others by.
        for reading in readings:
            reading.environments.pop("math", None)
    return known, readings


_REASON_LENGTH = 300
_MOST_REFERENCES = 200
"""Programs that are run: half a minute at most where they are as quick as most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherUse:
    """A command that takes the file, but does not learn from it."""

    command: str
    num_rows: int = 0
    problem: str = ""
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """Programs that rows give as right, run by the tests of those rows."""

    num_run: int = 0
    num_found: int = 0
    failed: tuple[str, ...] = ()
    """Of each that fails: where it stands, and how it fails."""
    problem: str = ""
    """Why none was run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that is known of a file."""

    raw: RawRows
    known: KnownFormat | None
    readings: list[Reading]
    others: list[OtherUse]
    near: list[Suggestion]

    @property
    def is_usable(self) -> bool:
        """Whether any of the commands that were asked about can use a row."""
        return any(one.fits for one in self.readings) or any(use.num_rows for use in self.others)

    @property
    def shown(self) -> Reading | None:
        """The reading whose first row is shown."""
        return next((one for one in self.readings if one.fits), None)


def run_data_check(
    path: str,
    *,
    trainer: Trainer | None,
    model: str,
    overrides: Sequence[str],
    as_json: bool,
) -> bool:
    """Print what a file is; whether anything can be read from it.

    Args:
        path: A file, a directory or a hub name.
        trainer: The command that is asked about; None: all.
        model: Whose tokens to show; empty: none.
        overrides: Keys of the run's configuration, as its command is given them.
        as_json: Print one JSON object.

    Raises:
        UserError: No file, no rows, a model or an override that cannot be used.
    """
    name = _model_at(model)
    with message_console().status(f"reading {path}"):
        findings = examine(path, trainer, overrides)
        row, problem = _first_row(findings.shown, name)
    with message_console().status("running the reference solutions"):
        references = _run_references(findings.readings)
    if as_json:
        write_json(_as_facts(findings, row, references))
    else:
        _show(make_console(), findings, row, overrides, references, has_model=bool(name))
    if problem is not None:
        raise problem
    return findings.is_usable


def _model_at(model: str) -> str:
    if not model:
        return ""
    check_not_missing(model, key="--model")
    name = find_local(model).name
    if not Path(name).is_dir():
        check_fetchable(name, key="--model")
    return name


def _first_row(reading: Reading | None, model: str) -> tuple[FirstRow | None, UserError | None]:
    """The first row, in tokens where that is possible; and why it is not."""
    if reading is None:
        return None, None
    if not model:
        return plain_row(reading), None
    try:
        with speaking(Terms({"policy.model_name": "--model"})):
            return tokenised_row(reading, model), None
    except UserError as problem:
        return plain_row(reading), problem


def examine(path: str, trainer: Trainer | None, overrides: Sequence[str] = ()) -> Findings:
    """What a file is and who can use it.

    Raises:
        UserError: No file, no rows, or overrides that no command understands.
    """
    raw = look_at(path)
    known, readings = readings_of(raw, trainer=trainer, overrides=overrides)
    columns = columns_of(_column_keys(overrides))
    others = _other_uses(path, known, readings, columns) if trainer is None else []
    # Rows that are read only as prompts may have been meant for more, unless it is said who judges.
    is_said = any(one.lstrip("+").startswith("data.env_name=") for one in overrides)
    is_clear = known is not None and (known.name != "prompts" or is_said)
    near = [] if is_clear else suggestions(raw.first)
    return Findings(
        raw=raw,
        known=known,
        readings=readings,
        others=others,
        near=[one for one in near if trainer is None or one.trainer in (None, trainer)],
    )


def _other_uses(
    path: str,
    known: KnownFormat | None,
    readings: Sequence[Reading],
    columns: Mapping[str, str],
) -> list[OtherUse]:
    """`laurel eval` and `laurel score`."""
    uses: list[OtherUse] = []
    benchmark = known.evaluation if known is not None else None
    judged = next((one.report for one in readings if one.trainer == "rm"), None)
    if benchmark == "pairs" and judged is not None:
        again = judged.dropped.get("duplicate")
        num_again = 0 if again is None else again.count
        uses.append(
            OtherUse(
                command="eval pairs",
                num_rows=judged.num_kept + num_again,
                remark=f"; it keeps the {counted(num_again, 'duplicate')} that rm leaves out"
                if num_again
                else "",
            )
        )
    elif benchmark is not None and benchmark != "pairs":
        form = {**ON_HUB, "best-of-n": BEST_OF_N}[benchmark]
        try:
            num_rows = len(read_benchmark(form, [path]))
            uses.append(OtherUse(command=f"eval {benchmark}", num_rows=num_rows))
        except DataError as error:
            uses.append(OtherUse(command=f"eval {benchmark}", problem=str(error)))
    try:
        num_rows = sum(1 for _ in read_scoring_rows(path, columns=columns))
        uses.append(OtherUse(command="score", num_rows=num_rows))
    except DataError as error:
        uses.append(OtherUse(command="score", problem=str(error)))
    return uses


def _run_references(readings: Sequence[Reading]) -> References | None:
    """What becomes of the rows' own programs; None where rows have none that could be run."""
    reading = next((one for one in readings if one.trainer == "grpo"), None)
    if reading is None:
        return None
    tasks = [task for task in reading.tasks if task.environment == "code"]
    tasks = [task for task in tasks if task.metadata.get("reference_solution") is not None]
    if not tasks:
        return None
    from laurel.environments.code_environment import CodeEnvironment

    try:
        environment = CodeEnvironment(cast("GRPORun", reading.config).env.code)
    except UserError as problem:  # this machine, or the server that is named, locks nothing in
        return References(num_found=len(tasks), problem=str(problem))
    try:
        rejected = environment.validate(tasks[:_MOST_REFERENCES])
    finally:
        environment.shutdown()
    return References(
        num_run=min(len(tasks), _MOST_REFERENCES),
        num_found=len(tasks),
        failed=tuple(f"{one.task.source}: {one.reason}" for one in rejected),
    )


# --------------------------------------------------------------------------------------- to people


def _show(
    console: Console,
    findings: Findings,
    row: FirstRow | None,
    overrides: Sequence[str],
    references: References | None,
    *,
    has_model: bool,
) -> None:
    _show_file(console, findings)
    _show_fits(console, findings, overrides)
    _show_references(console, references)
    _show_near(console, findings)
    if not findings.is_usable:
        _show_formats(console, findings)
    reading = findings.shown
    if reading is None or reading.report is None or row is None:
        return
    console.print(reading.report.render())
    heading = f"First row, as laurel {reading.trainer} reads it ({row.source})"
    console.print(Text(f"\n{visible(heading)}", style="bold"))
    show_row(console, row)
    if not has_model:
        what = {"rm": "the pooled token", "sft": "what counts in the loss", "grpo": "the template"}
        hint = f"tokens and {what[reading.trainer]} need a model: add --model DIR"
        _line(console, "note", hint)


def _line(console: Console, label: str, text: str, style: str = "") -> None:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, min_width=8)
    table.add_column(overflow="fold")
    table.add_row(Text(label, style=style), Text(text))
    console.print(table)


def _say(console: Console, text: str, style: str = "") -> None:
    """On one line, so that a command can be copied."""
    console.print(Text(visible(text), style=style), soft_wrap=True)


def _show_file(console: Console, findings: Findings) -> None:
    raw, known = findings.raw, findings.known
    _say(console, raw.path, "bold")
    unreadable = raw.unreadable
    rows = f"{raw.num_rows:,}"
    if unreadable.count:
        places = ", ".join(unreadable.examples)
        rows += f", of which {unreadable.count:,} cannot be read ({places})"
    _line(console, "rows", rows)
    _line(console, "columns", visible(", ".join(raw.columns)))
    if known is None:
        _line(console, "format", "none that is known by default")
    else:
        _line(console, "format", f"{known.name}: {known.says}")


def _show_fits(console: Console, findings: Findings, overrides: Sequence[str]) -> None:
    for reading in findings.readings:
        label = f"{reading.trainer:<8}"
        if reading.report is None:
            _line(console, label, f"no: {_reason(reading.problem)}", style="bold")
            continue
        counts = _counts(reading, findings.known, leaves_out=_leaves_bad_rows_out(overrides))
        _line(console, label, f"yes: {counts}", style="bold")
        _say(console, f"         {_command(reading, findings.raw.path, overrides)}")
        if NOT_WHAT_IS_RIGHT in reading.report.notes:
            _line(console, "warning", NOT_WHAT_IS_RIGHT, style="bold")
    for use in findings.others:
        if use.num_rows:
            path = shlex.quote(findings.raw.path)
            option = f"-d {path}" if use.command.startswith("eval") else path
            if use.command in ("eval pairs", "score"):
                option += "".join(f" {shlex.quote(one)}" for one in _column_keys(overrides))
            rows = f"yes: {counted(use.num_rows, 'row')}{use.remark}"
            _line(console, use.command.partition(" ")[0], rows, style="bold")
            _say(console, f"         laurel {use.command} --model DIR {option}")
        elif use.command.startswith("eval"):
            _line(console, "eval", f"no: {_reason(use.problem)}", style="bold")


def _column_keys(overrides: Sequence[str]) -> list[str]:
    """Those that name columns of pairs, which other commands than `laurel rm` take as well."""
    said = [one.lstrip("+") for one in overrides]
    return [one for one in said if one.partition("=")[0] in COLUMN_KEYS]


def _show_references(console: Console, references: References | None) -> None:
    if references is None:
        return
    found = references.num_found
    if references.problem:
        said = f"{counted(found, 'row')} with a reference solution, not run: {references.problem}"
        _line(console, "note", said)
        return
    of_all = "" if references.num_run == found else f" (of {found:,} in the file)"
    run = f"{counted(references.num_run, 'reference solution')}{of_all} run"
    if not references.failed:
        _line(console, "note", f"{run}: all pass the tests of their rows")
        return
    num_failed = len(references.failed)
    fails = "fails the tests of its row" if num_failed == 1 else "fail the tests of their rows"
    said = (
        f"{run}: {num_failed:,} {fails}, and a run leaves that out. "
        f"The first: {references.failed[0]}"
    )
    _line(console, "warning", said, style="bold")


def _leaves_bad_rows_out(overrides: Sequence[str]) -> bool:
    """Whether the run is told to go on without malformed rows; the last of several counts."""
    said = [one.lstrip("+").partition("=") for one in overrides]
    values = [value for key, _, value in said if key == "data.on_bad_row"]
    return values[-1:] == ["skip"]


def _counts(reading: Reading, known: KnownFormat | None, *, leaves_out: bool) -> str:
    """How many rows, what of them, and what stops a run."""
    assert reading.report is not None
    report = reading.report
    said = f"{report.num_kept:,} of {counted(report.num_read, 'row')}"
    use = known.uses.get(reading.trainer) if known is not None else None
    if use:
        said += f"; {use}"
    if reading.environments:
        names = ", ".join(f"{name} ({n:,})" for name, n in reading.environments.items())
        said += f"; could be judged by {names}"
    if reading.num_malformed:
        left_out = report.dropped["malformed"]
        if leaves_out:
            said += (
                f". The run leaves out {counted(reading.num_malformed, 'malformed row')}, the "
                f"first at {left_out.examples[0]}"
            )
        else:
            said += (
                f". The run stops at {left_out.examples[0]} unless you mend the rows or set "
                "data.on_bad_row=skip"
            )
    return said


def _command(reading: Reading, path: str, overrides: Sequence[str]) -> str:
    words = ["laurel", reading.trainer, f"data.train_data_path={path}"]
    words += [*reading.settings, *overrides]
    if "data.env_name=reward_model" in words:
        words += ["env.reward_model.enabled=true", "env.reward_model.model_name=DIR"]
    return " ".join(map(shlex.quote, words))


def _reason(problem: str) -> str:
    """Why nothing is left: what stands behind the name of the set, on one line."""
    _, found, rest = problem.partition("Left out: ")
    return shorten_middle(rest if found else problem, _REASON_LENGTH)


def _show_near(console: Console, findings: Findings) -> None:
    for near in findings.near:
        _line(console, "hint", f"it looks like {near.says}", style="bold")
        if near.trainer is not None:
            words = ["laurel", "data", "check", findings.raw.path, "--for", near.trainer]
            _say(console, f"         {shlex.join([*words, *near.settings])}")
    _show_unnamed(console, findings)


def _show_unnamed(console: Console, findings: Findings) -> None:
    """Which keys name the columns of pairs, where nothing could be guessed."""
    asked = next((one for one in findings.readings if one.trainer == "rm"), None)
    is_guessed = any(near.trainer in (None, "rm") for near in findings.near)
    if asked is None or asked.fits or is_guessed or not could_be_named(findings.raw.first, "rm"):
        return
    _line(console, "hint", "if they are pairs of answers, say which column is which", style="bold")
    words = ["laurel", "data", "check", findings.raw.path, "--for", "rm"]
    keys = [f"{key}=COLUMN" for key in KEYS_OF_COLUMNS["rm"]]
    _say(console, f"         {shlex.join([*words, *keys])}")


def _show_formats(console: Console, findings: Findings) -> None:
    """What could have been given: what the commands take that were asked about."""
    asked = {reading.trainer for reading in findings.readings}
    known = findings.known
    if known is not None and known.trainers and not asked & known.trainers.keys():
        others = " and ".join(f"laurel {trainer}" for trainer in known.trainers)
        _line(console, "hint", f"this format is for {others}: leave --for out", style="bold")
    whom = f" that laurel {next(iter(asked))} takes" if len(asked) == 1 else ""
    console.print(Text(f"\nFormats{whom}, by their columns", style="bold"))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in FORMATS:
        if len(asked) == 1 and not asked & one.trainers.keys():
            continue
        commands = [*one.trainers, *([f"eval {one.evaluation}"] if one.evaluation else [])]
        table.add_row(Text(one.name), Text(f"{one.columns}  ({', '.join(commands)})"))
    console.print(table)


# -------------------------------------------------------------------------------------- to programs


def _as_facts(
    findings: Findings, row: FirstRow | None, references: References | None
) -> dict[str, Any]:
    raw, known = findings.raw, findings.known
    return {
        "file": raw.path,
        "rows": raw.num_rows,
        "rows_unreadable": {
            "count": raw.unreadable.count,
            "examples": list(raw.unreadable.examples),
        },
        "columns": raw.columns,
        "format": None if known is None else {"name": known.name, "says": known.says},
        "fits": {reading.trainer: _reading_facts(reading) for reading in findings.readings},
        "other_commands": {
            use.command: {"rows": use.num_rows, "problem": use.problem or None}
            for use in findings.others
        },
        "suggestions": [
            {"says": one.says, "command": one.trainer, "settings": list(one.settings)}
            for one in findings.near
        ],
        "references": None
        if references is None
        else {
            "found": references.num_found,
            "run": references.num_run,
            "failed": list(references.failed),
            "problem": references.problem or None,
        },
        "first_row": None if row is None else row_as_facts(row),
    }


def _reading_facts(reading: Reading) -> dict[str, Any]:
    return {
        "fits": reading.fits,
        "problem": reading.problem or None,
        "settings": list(reading.settings),
        "malformed": reading.num_malformed,
        "environments": reading.environments,
        "report": None if reading.report is None else reading.report.to_dict(),
    }


# --------------------------------------------------------------------------------------------------
# Tokens of a conversation as texts that can be shown, each with the role that it belongs to.

TEMPLATE = "template"
"""What the template writes around messages."""
UNCLEAR = "unclear"
"""What stands beside a message that was cut, or that the template changed."""
_MOST_JOINED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A token; or the tokens, if it takes several to make a character."""

    ids: tuple[int, ...]
    text: str
    role: str
    """Of the message; `TEMPLATE` or `UNCLEAR` where it is in none."""
    is_learned: bool = False
    """Whether it counts in the loss."""
    is_pooled: bool = False
    """Whether the score is read from it."""


def pieces_of(
    tokenizer: Any,
    ids_L: TokenIds,
    conversation: Conversation,
    render: Callable[[Conversation], str],
    *,
    learned_L: Mask | None = None,
    pools_last: bool = False,
) -> list[Piece]:
    """The tokens of a conversation, perhaps cut at either end.

    Args:
        tokenizer: Of the model.
        ids_L: int32 [L].
        conversation: What they say.
        render: The text of a conversation, as the model's template has it.
        learned_L: bool [L]: which count in the loss; None: none.
        pools_last: Whether the score is read from the last one.
    """
    cut = _cut(tokenizer, [int(one) for one in ids_L])
    text = "".join(part for _, part in cut)
    roles = _roles(text, conversation, render)
    pieces: list[Piece] = []
    token = character = 0
    for ids, part in cut:
        inside = roles[character : character + len(part)]
        # A token may reach over a border; then it is said to be where most of it is.
        role = max(dict.fromkeys(inside), key=inside.count) if inside else TEMPLATE
        end = token + len(ids)
        pieces.append(
            Piece(
                ids=ids,
                text=part,
                role=role,
                is_learned=learned_L is not None and bool(learned_L[token:end].any()),
                is_pooled=pools_last and end == len(ids_L),
            )
        )
        token, character = end, character + len(part)
    return pieces


def _cut(tokenizer: Any, ids: Sequence[int]) -> list[tuple[tuple[int, ...], str]]:
    """Each token with its text. One decoded alone would lose a leading blank, or half a letter."""
    cut: list[tuple[tuple[int, ...], str]] = []
    pending: list[int] = []
    before: list[int] = []
    for token in ids:
        pending.append(token)
        text = _decode(tokenizer, [*before, *pending])[len(_decode(tokenizer, before)) :]
        if text.endswith("\ufffd") and len(pending) < _MOST_JOINED:
            continue
        cut.append((tuple(pending), text))
        before, pending = [token], []
    if pending:
        text = _decode(tokenizer, [*before, *pending])[len(_decode(tokenizer, before)) :]
        cut.append((tuple(pending), text))
    return cut


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    if not ids:
        return ""
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


# ------------------------------------------------------------------------------------------- roles


def _roles(
    text: str, conversation: Conversation, render: Callable[[Conversation], str]
) -> list[str]:
    """The role of each character."""
    whole, spans = _rendered(conversation, render)
    start = whole.find(text) if spans is not None else -1
    if spans is None or start < 0:
        return _searched(text, conversation)
    roles = [TEMPLATE] * len(whole)
    for message, (first, end) in zip(conversation, spans, strict=True):
        roles[first:end] = [message.role] * (end - first)
    return roles[start : start + len(text)]


def _rendered(
    conversation: Conversation, render: Callable[[Conversation], str]
) -> tuple[str, list[tuple[int, int]] | None]:
    """The text, and where each message stands in it; None for a template that does more than copy.

    Marks are rendered in the place of the messages, and the messages put where the marks are.
    """
    whole = render(conversation)
    marks = [f"laurelmark{place}end" for place in range(len(conversation))]
    frame = render(
        tuple(Message(one.role, mark) for one, mark in zip(conversation, marks, strict=True))
    )
    for said in (
        [message.content for message in conversation],
        [message.content.strip() for message in conversation],
    ):
        spans: list[tuple[int, int]] = []
        built, rest = "", frame
        for mark, content in zip(marks, said, strict=True):
            before, found, rest = rest.partition(mark)
            if not found:
                break
            built += before
            spans.append((len(built), len(built) + len(content)))
            built += content
        if len(spans) == len(conversation) and built + rest == whole:
            return whole, spans
    return whole, None


def _searched(text: str, conversation: Conversation) -> list[str]:
    """Messages that are found one after the other; what is beside one that is not is unclear."""
    roles = [UNCLEAR] * len(text)
    position, is_clear = 0, True
    for message in conversation:
        content = message.content.strip()
        found = text.find(content, position) if content else -1
        if found < 0:
            is_clear = False
            continue
        if is_clear:
            roles[position:found] = [TEMPLATE] * (found - position)
        roles[found : found + len(content)] = [message.role] * len(content)
        position, is_clear = found + len(content), True
    if is_clear:
        roles[position:] = [TEMPLATE] * (len(text) - position)
    return roles


# --------------------------------------------------------------------------------------------------
# The first row of a data file as a command learns from it: rendered, in tokens, with its roles.


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of the row: what all answers share, one of them, a whole conversation."""

    title: str
    messages: Conversation
    """What is said in it."""
    pieces: tuple[Piece, ...] = ()
    """Its tokens; empty without a model."""
    was_cut: bool = False
    """Whether the conversation was too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRow:
    """The first row that a command would use."""

    source: str
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()
    """What should be known of its tokens."""


def plain_row(reading: Reading) -> FirstRow:
    """The row without tokens."""
    row = reading.first
    assert row is not None
    if isinstance(row, Preference):
        answers = tuple(
            Part(title=_answer_title(row, index), messages=completion.messages)
            for index, completion in enumerate(row.group.completions_G)
        )
        return FirstRow(
            source=row.source, parts=(Part(title="prompt", messages=row.group.prompt), *answers)
        )
    if isinstance(row, Dialogue):
        parts: tuple[Part, ...] = (Part(title="conversation", messages=row.messages),)
        return FirstRow(source=row.source, parts=parts)
    return FirstRow(
        source=row.source,
        parts=(Part(title="prompt", messages=row.prompt),),
        notes=_about_task(row),
    )


def tokenised_row(reading: Reading, model: str) -> FirstRow:
    """The row in the tokens of a model.

    Args:
        reading: With a first row.
        model: A directory or hub name; of its weights nothing is read.

    Raises:
        ModelError: No tokenizer or template that could be used.
        DataError: The template cannot render the row.
    """
    from laurel.observe.console import quiet_libraries

    quiet_libraries()
    row = reading.first
    if isinstance(row, Preference):
        return _scored(row, reading.config, model)
    if isinstance(row, Dialogue):
        return _imitated(row, cast("SFTRun", reading.config), model)
    assert row is not None
    return _asked(row, cast("GRPORun", reading.config), model)


def _answer_title(row: Preference, index: int) -> str:
    rank = row.ranks_G[index]
    best, worst = min(row.ranks_G), max(row.ranks_G)
    word = "answer"
    if len(row.ranks_G) == 2 and best != worst:
        word = "better answer" if rank == best else "worse answer"
    return f"{word}, {index + 1} of {len(row.ranks_G)}, rank {rank}"


def _scored(row: Preference, config: Any, model: str) -> FirstRow:
    from laurel.models.loading.reward_model import load_contract

    run = cast("RewardTrainingRun", config)
    contract, notes = load_contract(
        replace(model_spec(run.policy), name=model),
        max_length=run.data.max_input_seq_length or run.policy.max_total_sequence_length,
        truncation_side=run.data.truncation_side,
        for_training=True,
    )
    (tokens,) = contract.encode([row.group], sources=[row.source])
    pools_last = contract.rules.pooled == "last"
    num_shared = len(tokens.trunk_ids)
    parts: list[Part] = []
    for index, branch in enumerate(tokens.branches_ids_G):
        ids_L = np.concatenate((tokens.trunk_ids, branch))
        pieces = pieces_of(
            contract.tokenizer,
            ids_L,
            row.group.conversation(index),
            contract.render,
            pools_last=pools_last,
        )
        shared, own = _split(pieces, num_shared)
        if index == 0 and shared:
            title = "prompt, computed once for all answers"
            parts.append(Part(title=title, messages=row.group.prompt, pieces=shared))
        parts.append(
            Part(
                title=_answer_title(row, index),
                messages=row.group.completions_G[index].messages,
                pieces=own,
                was_cut=bool(tokens.truncated_G[index]),
            )
        )
    if not pools_last:
        notes.append("this model pools by itself: the score is read from no single token")
    return FirstRow(source=row.source, parts=tuple(parts), notes=tuple(notes))


def _split(pieces: list[Piece], num_tokens: int) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """The pieces of the first tokens, and the others."""
    seen = 0
    for place, piece in enumerate(pieces):
        if seen >= num_tokens:
            return tuple(pieces[:place]), tuple(pieces[place:])
        seen += len(piece.ids)
    return tuple(pieces), ()


def _imitated(row: Dialogue, config: SFTRun, model: str) -> FirstRow:
    chat = _chat(config, model)
    longest = config.data.max_input_seq_length or config.policy.max_total_sequence_length
    learned = chat.demonstration(
        row.messages,
        demonstration_id=row.source,
        max_length=longest,
        only_final=config.sft.only_unmask_final,
    )
    if learned is None:
        raise DataError(
            f"{row.source}: nothing of the answer is within {longest} tokens; raise "
            "policy.max_total_sequence_length"
        )
    (branch,) = learned.tokens.branches_ids_G
    trunk = learned.tokens.trunk_ids
    pieces = pieces_of(
        chat.tokenizer,
        np.concatenate((trunk, branch)),
        row.messages,
        chat.render,
        learned_L=np.concatenate((np.zeros(len(trunk), dtype=bool), learned.mask_L)),
    )
    part = Part(
        title="conversation", messages=row.messages, pieces=tuple(pieces), was_cut=learned.truncated
    )
    return FirstRow(source=row.source, parts=(part,))


def _asked(row: Task, config: GRPORun, model: str) -> FirstRow:
    chat = _chat(config, model)
    ids_L = chat.prompt_ids(row.prompt)
    pieces = pieces_of(
        chat.tokenizer, ids_L, row.prompt, lambda said: chat.render(said, prompt=True)
    )
    part = Part(title="prompt", messages=row.prompt, pieces=tuple(pieces))
    room = config.policy.max_total_sequence_length - len(ids_L)
    notes = (
        f"what the policy writes next counts in the loss: up to {max(room, 0):,} tokens of "
        f"policy.max_total_sequence_length={config.policy.max_total_sequence_length}",
        *_about_task(row),
    )
    return FirstRow(source=row.source, parts=(part,), notes=notes)


def _about_task(row: Task) -> tuple[str, ...]:
    said = []
    if "ground_truth" in row.metadata:
        said.append(f"the known answer is {str(row.metadata['ground_truth'])!r:.200}")
    tests = [
        key
        for key in ("test_code", "test_list", "stdio_tests", "call_tests")
        if key in row.metadata
    ]
    if tests:
        by = row.metadata.get("comparison")
        compared = f", compared as {by}" if by is not None else ""
        said.append(f"it brings tests: {', '.join(tests)}{compared}")
    return tuple(said)


def _chat(config: SFTRun | GRPORun, model: str) -> ChatFormat:
    from laurel.models.chat import ChatFormat
    from laurel.models.tokenizer import load_tokenizer

    policy = config.policy
    tokenizer = load_tokenizer(
        policy.tokenizer,
        model_name=model,
        trust_remote_code=policy.trust_remote_code,
        pad_may_end=True,
    )
    return ChatFormat(tokenizer, policy.tokenizer.chat_template_kwargs)


# --------------------------------------------------------------------------------------------------
# How tokens look on a terminal: by role, with those that count in the loss and the pooled one.
#
# Colour only repeats what the layout says: each line names its role, how many tokens it has and
# what they are for, so nothing is lost without colours. These are of a palette that people with any
# kind of colour vision can tell apart (Okabe and Ito, 2008), as backgrounds under black or white
# letters, so that they can be read on light and dark terminals.

ROLE_STYLES = {
    "system": "#000000 on #CC79A7",
    "user": "#000000 on #56B4E9",
    "assistant": "#000000 on #E69F00",
}
OTHER_ROLE = "#000000 on #F0E442"
LEARNED, POOLED = "bold underline", "bold #FFFFFF on #0072B2"
_HEAD, _TAIL = 80, 40
"""Tokens shown at each end of a long stretch."""
_TEXT_LENGTH = 600


def show_row(console: Console, row: FirstRow) -> None:
    """The row with its legend."""
    has_tokens = any(part.pieces for part in row.parts)
    separator = "│" if "utf" in (console.encoding or "").lower() else "|"
    for part in row.parts:
        console.print(Text(_title(part), style="bold"))
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column(no_wrap=True)
        if has_tokens:
            table.add_column(no_wrap=True, justify="right")
            table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for cells in _token_lines(part, separator) if has_tokens else _message_lines(part):
            table.add_row(*cells)
        console.print(table)
    if has_tokens:
        _show_legend(console, [piece for part in row.parts for piece in part.pieces], separator)
    for note in row.notes:
        console.print(Text(f"note     {visible(note)}"), soft_wrap=True)


def style_of(role: str) -> str:
    """The colours of a role; none for what the template writes."""
    return "" if role in (TEMPLATE, UNCLEAR) else ROLE_STYLES.get(role, OTHER_ROLE)


def row_as_facts(row: FirstRow) -> dict[str, Any]:
    """The row as plain values, for JSON; all tokens are in it."""
    return {
        "source": row.source,
        "parts": [
            {
                "title": part.title,
                "messages": [{"role": m.role, "content": m.content} for m in part.messages],
                "was_cut": part.was_cut,
                "tokens": [
                    {
                        "ids": list(piece.ids),
                        "text": piece.text,
                        "role": piece.role,
                        "in_loss": piece.is_learned,
                        "pooled": piece.is_pooled,
                    }
                    for piece in part.pieces
                ],
            }
            for part in row.parts
        ],
        "notes": list(row.notes),
    }


# ------------------------------------------------------------------------------------------- lines


def _title(part: Part) -> str:
    if not part.pieces:
        return part.title
    num_tokens = _count(part.pieces)
    cut = ", cut to fit" if part.was_cut else ""
    return f"{part.title}: {counted(num_tokens, 'token')}{cut}"


def _count(pieces: Iterable[Piece]) -> int:
    return sum(len(piece.ids) for piece in pieces)


def _message_lines(part: Part) -> Iterator[tuple[Text, ...]]:
    for message in part.messages:
        role = Text(f" {visible(message.role)} ", style=style_of(message.role))
        yield role, Text(shorten_middle(message.content, _TEXT_LENGTH) or "(empty)")


def _token_lines(part: Part, separator: str) -> Iterator[tuple[Text, ...]]:
    def kind(piece: Piece) -> tuple[str, bool, bool]:
        return piece.role, piece.is_learned, piece.is_pooled

    for (role, is_learned, is_pooled), group in groupby(part.pieces, kind):
        pieces = list(group)
        use = "score" if is_pooled else "loss" if is_learned else ""
        yield (
            Text(f" {visible(role)} ", style=style_of(role)),
            Text(str(_count(pieces))),
            Text(use, style=POOLED if is_pooled else LEARNED if is_learned else ""),
            _tokens(pieces, separator),
        )


def _tokens(pieces: Sequence[Piece], separator: str) -> Text:
    line = Text()
    hidden = range(_HEAD, len(pieces) - _TAIL)
    for place, piece in enumerate(pieces):
        if place in hidden:
            if place == hidden.start:
                left_out = _count(pieces[hidden.start : hidden.stop])
                line.append(f" ... {left_out:,} more tokens ... ", style="italic")
            continue
        if place and not (hidden and place == hidden.stop):
            line.append(separator)
        style = style_of(piece.role)
        if piece.is_learned:
            style = f"{LEARNED} {style}"
        if piece.is_pooled:
            line.append(f"[{visible(piece.text)}]", style=POOLED)
        else:
            line.append(visible(piece.text), style=style)
    return line


def _show_legend(console: Console, pieces: Sequence[Piece], separator: str) -> None:
    """What the marks mean; only those that occur."""
    roles = list(dict.fromkeys(piece.role for piece in pieces))
    line = Text("legend   ")
    for role in roles:
        if role not in (TEMPLATE, UNCLEAR):
            line.append(f" {visible(role)} ", style=style_of(role)).append("  ")
    console.print(line.append(f"{separator} stands between tokens"))
    meanings = {
        TEMPLATE: "what the chat template writes around messages",
        UNCLEAR: "beside a message that was cut, or that the template changed",
    }
    lines = [Text(f"{role}: {about}") for role, about in meanings.items() if role in roles]
    if any(piece.is_learned for piece in pieces):
        lines.append(Text("").append("loss", LEARNED).append(": these tokens count in the loss"))
    if any(piece.is_pooled for piece in pieces):
        what = ": the token from which the reward model reads the score"
        lines.append(Text("").append("[score]", POOLED).append(what))
    for one in lines:
        console.print(Text("         ").append_text(one))
