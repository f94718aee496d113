"""`laurel data check`: what a data file is, which command it fits, what its first row becomes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.table import Table
from rich.text import Text

from laurel.cli.data_reading import RawRows, Reading, look_at, readings_of
from laurel.cli.first_row import FirstRow, plain_row, tokenised_row
from laurel.cli.json_output import write_json
from laurel.cli.local_scorer import find_local
from laurel.cli.token_view import row_as_facts, show_row
from laurel.config.overrides import COLUMN_KEYS, columns_of
from laurel.data.benchmark_columns import ON_HUB
from laurel.data.benchmark_rows import BEST_OF_N, read_benchmark
from laurel.data.conversations import read_scoring_rows
from laurel.data.known_formats import FORMATS, KnownFormat, Trainer
from laurel.data.near_misses import KEYS_OF_COLUMNS, Suggestion, could_be_named, suggestions
from laurel.data.task_needs import NOT_WHAT_IS_RIGHT
from laurel.errors import DataError, Terms, UserError, speaking
from laurel.observe.console import make_console, message_console, shorten_middle, visible
from laurel.observe.counts import counted
from laurel.observe.hub import check_fetchable
from laurel.rewards.load import check_not_missing

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.config.grpo_training import GRPORun

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
        raw=raw, known=known, readings=readings, others=others,
        near=[one for one in near if trainer is None or one.trainer in (None, trainer)],
    )  # fmt: skip


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
                command="eval pairs", num_rows=judged.num_kept + num_again,
                remark=f"; it keeps the {counted(num_again, 'duplicate')} that rm leaves out"
                if num_again else "",
            )
        )  # fmt: skip
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
            "count": raw.unreadable.count, "examples": list(raw.unreadable.examples)
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
        "references": None if references is None else {
            "found": references.num_found,
            "run": references.num_run,
            "failed": list(references.failed),
            "problem": references.problem or None,
        },
        "first_row": None if row is None else row_as_facts(row),
    }  # fmt: skip


def _reading_facts(reading: Reading) -> dict[str, Any]:
    return {
        "fits": reading.fits,
        "problem": reading.problem or None,
        "settings": list(reading.settings),
        "malformed": reading.num_malformed,
        "environments": reading.environments,
        "report": None if reading.report is None else reading.report.to_dict(),
    }
