"""`laurel data check`: what a data file is, which command it fits, what its first row becomes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from laurel.config.load import load_config
from laurel.config.overrides import COLUMN_KEYS, column_overrides
from laurel.config.schemas import SCHEMAS
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
from laurel.errors import ConfigError, DataError, Terms, UserError, counted, speaking
from laurel.observe.console import (
    make_console,
    message_console,
    quiet_libraries,
    shorten_middle,
    visible,
)
from laurel.observe.hub import check_fetchable
from laurel.observe.json_output import write_json
from laurel.rewards.spec import check_not_missing, find_model
from laurel.run.reward_model import load_data
from laurel.run.specs import OPTIONS, model_spec
from laurel.run.tasks import check_tests, needs_of
from laurel.types import Conversation, Message, Preference, Task

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.models.chat import ChatFormat
    from laurel.types import Mask, TokenIds

_REASON_LENGTH = 300
_MOST_REFERENCES = 200
"""Programs that are run: half a minute at most where they are as quick as most."""


# --------------------------------------------------------------------------------------------------
# A data file, read as each command would read it: does it fit, and what is lost?


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one command makes of a file."""

    trainer: Trainer
    config: Any
    """The run's configuration, with the file and what the command has to be told."""
    settings: tuple[str, ...] = ()
    """What it has to be told besides the path."""
    report: DataReport | TextReport | None = None
    """None where no row is left."""
    problem: str = ""
    """Why no row is left."""
    rows: Sequence[Preference | Dialogue | Task] = ()
    """The rows that the command would use."""
    environments: Mapping[str, int] = field(default_factory=dict)
    """GRPO: environments of Laurel's that could judge, and how many tasks each."""

    @property
    def num_malformed(self) -> int:
        """Rows at which a run would stop unless it is told to leave them out."""
        left_out = self.report.dropped.get("malformed") if self.report is not None else None
        return 0 if left_out is None else left_out.count


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

    found: int
    run: int = 0
    failed: tuple[str, ...] = ()
    """Of each that fails: where it stands, and how it fails."""
    problem: str | None = None
    """Why none was run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that is known of a file."""

    path: str
    num_rows: int
    unreadable: LeftOut
    """Rows that cannot be read: no JSON, no object, a wrong number of cells."""
    first: Row
    """The first row, as it stands in the file."""
    known: KnownFormat | None
    readings: list[Reading]
    others: list[OtherUse]
    near: list[Suggestion]

    @property
    def is_usable(self) -> bool:
        """Whether any of the commands that were asked about can use a row."""
        return self.shown is not None or any(use.num_rows for use in self.others)

    @property
    def shown(self) -> Reading | None:
        """The reading whose first row is shown."""
        return next((one for one in self.readings if one.report is not None), None)


def examine_data(path: str, trainer: Trainer | None, overrides: Sequence[str] = ()) -> Findings:
    """Read a whole file, find its format, and try it with every command or the one named.

    Raises:
        UserError: No file, no rows, or overrides that no command understands.
    """
    unreadable, said = LeftOut(), ""

    def tell(source: str, problem: UnusableRow) -> None:
        nonlocal said
        unreadable.add(LeftOut(1, [source]))
        said = said or f"{locate(path, source)}: {problem.message}"

    first: Row = {}
    num_rows = 0
    for _, row in read_rows(path, on_bad_row=tell):
        first = first if num_rows else row
        num_rows += 1
    if not num_rows:
        count = counted(unreadable.count, "row")
        raise DataError(f"{path}: none of its {count} can be read; the first: {said}")
    known, readings = _readings(path, first, trainer, overrides)
    others = [] if trainer else _other_uses(path, known, readings, _column_keys(overrides))
    # Rows that are read only as prompts may have been meant for more, unless it is said who judges.
    is_said = any(one.lstrip("+").startswith("data.env_name=") for one in overrides)
    is_clear = known is not None and (known.name != "prompts" or is_said)
    near = [] if is_clear else suggestions(first)
    return Findings(
        path=path,
        num_rows=num_rows + unreadable.count,
        unreadable=unreadable,
        first=first,
        known=known,
        readings=readings,
        others=others,
        near=[one for one in near if trainer is None or one.trainer in (None, trainer)],
    )


def _readings(
    path: str, first: Row, trainer: Trainer | None, overrides: Sequence[str]
) -> tuple[KnownFormat | None, list[Reading]]:
    """The format of a file, and what each command, or the one that is named, makes of it.

    A command that lacks an overridden key is left out.

    Raises:
        ConfigError: No command understands the overrides.
    """
    found, problems = [], []
    for one in TRAINERS if trainer is None else (trainer,):
        try:
            found.append(_configured(path, first, one, overrides))
        except ConfigError as problem:
            problems.append(str(problem) if trainer else f"laurel {one}: {problem}")
    if not found:
        raise ConfigError("\n".join(problems))
    known = found[0][1]
    return known, [_read_as(reading, known) for reading, _ in found]


def _configured(
    path: str, first: Row, trainer: Trainer, overrides: Sequence[str]
) -> tuple[Reading, KnownFormat | None]:
    """How a command would be configured to read the file, and the format of its first row."""
    base = [f"data.train_data_path={json.dumps(path)}"]
    said: Any = load_config(SCHEMAS[trainer], None, [*base, *overrides]).config
    known = recognise(_as_called(first, said.data))
    settings = tuple(known.trainers.get(trainer, ())) if known is not None else ()
    if trainer == "grpo" and not any(one.startswith("data.env_name=") for one in settings):
        settings = (*settings, "data.env_name=reward_model")  # which needs nothing but prompts
    keys = {setting.partition("=")[0] for setting in overrides}
    settings = tuple(one for one in settings if one.partition("=")[0] not in keys)
    # All rows are looked at, malformed ones and those of a validation set too.
    options = ["data.on_bad_row=skip", "data.split_validation_size=0"]
    options = [one for one in options if one.partition("=")[0] not in keys]
    config = load_config(SCHEMAS[trainer], None, [*base, *options, *settings, *overrides]).config
    return Reading(trainer=trainer, config=config, settings=settings), known


def _as_called(row: Row, data: Any) -> Row:
    """The row with the columns that `data` names under the names that they have by default."""
    renamed = dict(row)
    for key, field_of_key in type(data).model_fields.items():
        column, default = getattr(data, key), field_of_key.default
        if key.endswith("_key") and isinstance(default, str) and column in row:
            renamed[default] = row[column]
    return renamed


def _read_as(reading: Reading, known: KnownFormat | None) -> Reading:
    """What a command makes of the file that its configuration names. Nothing is raised for rows."""
    config = reading.config
    try:
        if reading.trainer == "rm":
            pairs = load_data(config)
            return replace(reading, report=pairs.reports["train"], rows=pairs.train)
        if reading.trainer == "sft":
            chats = load_demonstration_data(config.data)
            return replace(reading, report=chats.reports["train"], rows=chats.train)
        tasks = load_task_data(
            config.data,
            default_environment=config.default_environment,
            environments=config.env.names(),
            # Where nobody has said who judges, what each environment lacks is counted afterwards.
            needs=needs_of(config.env) if config.data.env_name is not None else NO_NEEDS,
        )
        check_tests(tasks, config.env.code)
    except DataError as problem:
        return replace(reading, problem=str(problem))
    counts = {
        "math": sum("ground_truth" in task.metadata for task in tasks.train),
        "code": sum(any(key in task.metadata for key in OWN_TESTS) for task in tasks.train),
        "reward_model": len(tasks.train),
    }
    if known is not None and "rm" in known.trainers:
        # What people preferred is an answer to imitate, not one to check others by.
        del counts["math"]
    environments = {name: count for name, count in counts.items() if count}
    report = tasks.reports["train"]
    return replace(reading, report=report, rows=tasks.train, environments=environments)


def _other_uses(
    path: str, known: KnownFormat | None, readings: Sequence[Reading], column_keys: Sequence[str]
) -> list[OtherUse]:
    """How many rows `laurel eval` and `laurel score` can read, or why they cannot."""

    def counting(command: str, count: Callable[[], int]) -> OtherUse:
        try:
            return OtherUse(command=command, num_rows=count())
        except DataError as error:
            return OtherUse(command=command, problem=str(error))

    uses: list[OtherUse] = []
    benchmark = known.evaluation if known is not None else None
    judged = next((one.report for one in readings if one.trainer == "rm"), None)
    if benchmark == "pairs" and judged is not None:
        again = judged.dropped.get("duplicate")
        num_again = 0 if again is None else again.count
        more = f"; it keeps the {counted(num_again, 'duplicate')} that rm leaves out"
        num_rows, remark = judged.num_kept + num_again, more if num_again else ""
        uses.append(OtherUse(command="eval pairs", num_rows=num_rows, remark=remark))
    elif benchmark is not None and benchmark != "pairs":
        form = {**ON_HUB, "best-of-n": BEST_OF_N}[benchmark]
        uses.append(counting(f"eval {benchmark}", lambda: len(read_benchmark(form, [path]))))
    columns = column_overrides(column_keys)
    uses.append(counting("score", lambda: sum(1 for _ in read_scoring_rows(path, columns=columns))))
    return uses


def _column_keys(overrides: Sequence[str]) -> list[str]:
    """Those that name columns of pairs, which other commands than `laurel rm` take as well."""
    said = [one.lstrip("+") for one in overrides]
    return [one for one in said if one.partition("=")[0] in COLUMN_KEYS]


def _run_references(readings: Sequence[Reading]) -> References | None:
    """What becomes of the rows' own programs; None where rows have none that could be run."""
    reading = next((one for one in readings if one.trainer == "grpo"), None)
    rows = reading.rows if reading is not None else ()
    tasks = [row for row in rows if isinstance(row, Task) and row.environment == "code"]
    tasks = [task for task in tasks if task.metadata.get("reference_solution") is not None]
    if not tasks or reading is None:
        return None
    from laurel.environments.code_environment import CodeEnvironment

    try:
        environment = CodeEnvironment(reading.config.env.code)
    except UserError as problem:  # this machine has no sandbox
        return References(found=len(tasks), problem=str(problem))
    try:
        rejected = environment.validate(tasks[:_MOST_REFERENCES])
    finally:
        environment.shutdown()
    failed = tuple(f"{one.task.source}: {one.reason}" for one in rejected)
    return References(found=len(tasks), run=min(len(tasks), _MOST_REFERENCES), failed=failed)


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
    if model:
        check_not_missing(model, key="--model")
        with speaking(OPTIONS):
            model = find_model(model).name
        if not Path(model).is_dir():
            check_fetchable(model, key="--model")
    with message_console().status(f"reading {path}"):
        findings = examine_data(path, trainer, overrides)
        row = problem = None
        if findings.shown is not None:
            row = plain_row(findings.shown)
            try:
                with speaking(Terms({"policy.model_name": "--model"})):
                    row = tokenised_row(findings.shown, model) if model else row
            except UserError as error:  # told after what was found
                problem = error
    with message_console().status("running the reference solutions"):
        references = _run_references(findings.readings)
    if as_json:
        write_json(_as_facts(findings, row, references))
    else:
        _show(make_console(), findings, row, overrides, references, has_model=bool(model))
    if problem is not None:
        raise problem
    return findings.is_usable


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
    _say(console, findings.path, "bold")
    rows = f"{findings.num_rows:,}"
    if findings.unreadable.count:
        places = ", ".join(findings.unreadable.examples)
        rows += f", of which {findings.unreadable.count:,} cannot be read ({places})"
    _line(console, "rows", rows)
    _line(console, "columns", visible(", ".join(map(str, findings.first))))
    known = findings.known
    form = "none that is known by default" if known is None else f"{known.name}: {known.says}"
    _line(console, "format", form)
    _show_fits(console, findings, overrides)
    if references is not None:
        _line(console, *_about_references(references))
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


def _grid(*columns: Mapping[str, Any], padding: int = 1) -> Table:
    table = Table(box=None, show_header=False, padding=(0, padding, 0, 0), pad_edge=False)
    for options in columns:
        table.add_column(**options)
    return table


_FIXED: Mapping[str, Any] = {"no_wrap": True}
_FOLDED: Mapping[str, Any] = {"overflow": "fold"}


def _line(console: Console, label: str, text: str, style: str = "") -> None:
    table = _grid({**_FIXED, "min_width": 8}, _FOLDED)
    table.add_row(Text(label, style=style), Text(text))
    console.print(table)


def _say(console: Console, text: str, style: str = "") -> None:
    """On one line, so that a command can be copied."""
    console.print(Text(visible(text), style=style), soft_wrap=True)


def _show_fits(console: Console, findings: Findings, overrides: Sequence[str]) -> None:
    for reading in findings.readings:
        label = f"{reading.trainer:<8}"
        if reading.report is None:
            _line(console, label, f"no: {_reason(reading.problem)}", "bold")
            continue
        _line(console, label, f"yes: {_counts(reading, findings.known, overrides)}", "bold")
        words = ["laurel", reading.trainer, f"data.train_data_path={findings.path}"]
        words += [*reading.settings, *overrides]
        if "data.env_name=reward_model" in words:
            words += ["env.reward_model.enabled=true", "env.reward_model.model_name=DIR"]
        _say(console, f"         {shlex.join(words)}")
        if NOT_WHAT_IS_RIGHT in reading.report.notes:
            _line(console, "warning", NOT_WHAT_IS_RIGHT, "bold")
    for use in findings.others:
        if use.num_rows:
            words = ["laurel", *use.command.split(), "--model", "DIR"]
            words += ["-d"] if use.command.startswith("eval") else []
            keys = _column_keys(overrides) if use.command in ("eval pairs", "score") else []
            rows = f"yes: {counted(use.num_rows, 'row')}{use.remark}"
            _line(console, use.command.partition(" ")[0], rows, "bold")
            _say(console, f"         {shlex.join([*words, findings.path, *keys])}")
        elif use.command.startswith("eval"):
            _line(console, "eval", f"no: {_reason(use.problem)}", "bold")


def _reason(problem: str) -> str:
    """Why nothing is left: what stands behind the name of the set, on one line."""
    _, found, rest = problem.partition("Left out: ")
    return shorten_middle(rest if found else problem, _REASON_LENGTH)


def _about_references(references: References) -> tuple[str, str, str]:
    found, num_failed = references.found, len(references.failed)
    if references.problem:
        rows = counted(found, "row")
        return "note", f"{rows} with a reference solution, not run: {references.problem}", ""
    of_all = "" if references.run == found else f" (of {found:,} in the file)"
    run = f"{counted(references.run, 'reference solution')}{of_all} run"
    if not num_failed:
        return "note", f"{run}: all pass the tests of their rows", ""
    fails = "fails the tests of its row" if num_failed == 1 else "fail the tests of their rows"
    first = references.failed[0]
    said = f"{run}: {num_failed:,} {fails}, and a run leaves that out. The first: {first}"
    return "warning", said, "bold"


def _counts(reading: Reading, known: KnownFormat | None, overrides: Sequence[str]) -> str:
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
    if not reading.num_malformed:
        return said
    first = report.dropped["malformed"].examples[0]
    on_bad_row = [one for one in overrides if one.lstrip("+").startswith("data.on_bad_row=")]
    if on_bad_row and on_bad_row[-1].endswith("=skip"):  # the last of several counts
        rows = counted(reading.num_malformed, "malformed row")
        return f"{said}. The run leaves out {rows}, the first at {first}"
    mend = "unless you mend the rows or set data.on_bad_row=skip"
    return f"{said}. The run stops at {first} {mend}"


def _show_near(console: Console, findings: Findings) -> None:
    check = ["laurel", "data", "check", findings.path, "--for"]
    for near in findings.near:
        _line(console, "hint", f"it looks like {near.says}", "bold")
        if near.trainer is not None:
            _say(console, f"         {shlex.join([*check, near.trainer, *near.settings])}")
    # Which keys name the columns of pairs, where nothing could be guessed.
    asked = next((one for one in findings.readings if one.trainer == "rm"), None)
    is_guessed = any(near.trainer in (None, "rm") for near in findings.near)
    if asked is None or asked.report is not None or is_guessed:
        return
    if could_be_named(findings.first, "rm"):
        _line(console, "hint", "if they are pairs of answers, say which column is which", "bold")
        keys = [f"{key}=COLUMN" for key in KEYS_OF_COLUMNS["rm"]]
        _say(console, f"         {shlex.join([*check, 'rm', *keys])}")


def _show_formats(console: Console, findings: Findings) -> None:
    """What could have been given: what the commands take that were asked about."""
    asked = {reading.trainer for reading in findings.readings}
    known = findings.known
    if known is not None and known.trainers and not asked & known.trainers.keys():
        others = " and ".join(f"laurel {trainer}" for trainer in known.trainers)
        _line(console, "hint", f"this format is for {others}: leave --for out", "bold")
    whom = f" that laurel {next(iter(asked))} takes" if len(asked) == 1 else ""
    console.print(Text(f"\nFormats{whom}, by their columns", style="bold"))
    table = _grid(_FIXED, _FOLDED, padding=2)
    for one in FORMATS:
        if len(asked) > 1 or asked & one.trainers.keys():
            commands = [*one.trainers, *([f"eval {one.evaluation}"] if one.evaluation else [])]
            table.add_row(Text(one.name), Text(f"{one.columns}  ({', '.join(commands)})"))
    console.print(table)


# -------------------------------------------------------------------------------------- to programs


def _as_facts(
    findings: Findings, row: FirstRow | None, references: References | None
) -> dict[str, Any]:
    known, unreadable = findings.known, findings.unreadable
    fits = {
        one.trainer: {
            "fits": one.report is not None,
            "problem": one.problem or None,
            "settings": list(one.settings),
            "malformed": one.num_malformed,
            "environments": one.environments,
            "report": None if one.report is None else one.report.to_dict(),
        }
        for one in findings.readings
    }
    return {
        "file": findings.path,
        "rows": findings.num_rows,
        "rows_unreadable": {"count": unreadable.count, "examples": list(unreadable.examples)},
        "columns": list(map(str, findings.first)),
        "format": None if known is None else {"name": known.name, "says": known.says},
        "fits": fits,
        "other_commands": {
            use.command: {"rows": use.num_rows, "problem": use.problem or None}
            for use in findings.others
        },
        "suggestions": [
            {"says": one.says, "command": one.trainer, "settings": list(one.settings)}
            for one in findings.near
        ],
        "references": None if references is None else asdict(references),
        "first_row": None if row is None else asdict(row),
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
    in_loss: bool = False
    """Whether it counts in the loss."""
    pooled: bool = False
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
    cut = list(_cut(tokenizer, [int(one) for one in ids_L]))
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
                in_loss=learned_L is not None and bool(learned_L[token:end].any()),
                pooled=pools_last and end == len(ids_L),
            )
        )
        token, character = end, character + len(part)
    return pieces


def _cut(tokenizer: Any, ids: Sequence[int]) -> Iterator[tuple[tuple[int, ...], str]]:
    """Each token with its text. One decoded alone would lose a leading blank, or half a letter."""

    def text_of(tokens: list[int]) -> str:
        if not tokens:
            return ""
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(tokens, **options))

    pending: list[int] = []
    before: list[int] = []
    for place, token in enumerate(ids, 1):
        pending.append(token)
        text = text_of([*before, *pending])[len(text_of(before)) :]
        is_part = text.endswith("\ufffd") and len(pending) < _MOST_JOINED
        if not is_part or place == len(ids):
            yield tuple(pending), text
            before, pending = [token], []


# ------------------------------------------------------------------------------------------- roles


def _roles(
    text: str, conversation: Conversation, render: Callable[[Conversation], str]
) -> list[str]:
    """The role of each character."""
    whole = render(conversation)
    for is_stripped in (False, True):
        said = [one.content.strip() if is_stripped else one.content for one in conversation]
        roles = _copied(whole, said, conversation, render)
        start = whole.find(text)
        if roles is not None and start >= 0:
            return roles[start : start + len(text)]
    return _searched(text, conversation)


def _copied(
    whole: str,
    said: Sequence[str],
    conversation: Conversation,
    render: Callable[[Conversation], str],
) -> list[str] | None:
    """The role of each character of a rendered conversation.

    The template is rendered with a mark in place of each message, and each mark is replaced by its
    message. None where that does not give the same text: the template changes the messages.
    """
    marks = [f"laurelmark{place}end" for place in range(len(conversation))]
    marked = [Message(one.role, mark) for one, mark in zip(conversation, marks, strict=True)]
    built, roles, rest = "", [], render(tuple(marked))
    for message, mark, content in zip(conversation, marks, said, strict=True):
        before, found, rest = rest.partition(mark)
        if not found:
            return None
        built += before + content
        roles += [TEMPLATE] * len(before) + [message.role] * len(content)
    return roles + [TEMPLATE] * len(rest) if built + rest == whole else None


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
class RowPart:
    """A stretch of the row: what all answers share, one of them, a whole conversation."""

    title: str
    messages: Conversation
    """What is said in it."""
    was_cut: bool = False
    """Whether the conversation was too long."""
    tokens: Sequence[Piece] = ()
    """Empty without a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRow:
    """The first row that a command would use."""

    source: str
    parts: Sequence[RowPart]
    notes: Sequence[str] = ()
    """What should be known of its tokens."""


def plain_row(reading: Reading) -> FirstRow:
    """The row without tokens."""
    row = reading.rows[0]
    if isinstance(row, Preference):
        parts = [RowPart(title="prompt", messages=row.group.prompt)]
        for index, completion in enumerate(row.group.completions_G):
            parts.append(RowPart(title=_answer_title(row, index), messages=completion.messages))
        return FirstRow(source=row.source, parts=parts)
    if isinstance(row, Dialogue):
        part = RowPart(title="conversation", messages=row.messages)
        return FirstRow(source=row.source, parts=[part])
    part = RowPart(title="prompt", messages=row.prompt)
    return FirstRow(source=row.source, parts=[part], notes=_about_task(row))


def tokenised_row(reading: Reading, model: str) -> FirstRow:
    """The row in the tokens of a model.

    Args:
        reading: With a first row.
        model: A directory or hub name; of its weights nothing is read.

    Raises:
        ModelError: No tokenizer or template that could be used.
        DataError: The template cannot render the row.
    """
    quiet_libraries()
    row = reading.rows[0]
    if isinstance(row, Preference):
        return _scored(row, reading.config, model)
    if isinstance(row, Dialogue):
        return _imitated(row, reading.config, model)
    return _asked(row, reading.config, model)


def _answer_title(row: Preference, index: int) -> str:
    rank = row.ranks_G[index]
    best, worst = min(row.ranks_G), max(row.ranks_G)
    word = "answer"
    if len(row.ranks_G) == 2 and best != worst:
        word = "better answer" if rank == best else "worse answer"
    return f"{word}, {index + 1} of {len(row.ranks_G)}, rank {rank}"


def _scored(row: Preference, run: Any, model: str) -> FirstRow:
    from laurel.models.loading.reward_model import load_contract

    contract, notes = load_contract(
        replace(model_spec(run.policy), name=model),
        max_length=run.data.max_input_seq_length or run.policy.max_total_sequence_length,
        truncation_side=run.data.truncation_side,
        for_training=True,
    )
    (tokens,) = contract.encode([row.group], sources=[row.source])
    pools_last = contract.rules.pooled == "last"
    num_shared = len(tokens.trunk_ids)
    parts: list[RowPart] = []
    for index, branch in enumerate(tokens.branches_ids_G):
        ids_L = np.concatenate((tokens.trunk_ids, branch))
        pieces = pieces_of(
            contract.tokenizer,
            ids_L,
            row.group.conversation(index),
            contract.render,
            pools_last=pools_last,
        )
        ends = np.cumsum([len(piece.ids) for piece in pieces])
        num_first = int(np.searchsorted(ends, num_shared)) + 1 if num_shared else 0
        shared, own = pieces[:num_first], pieces[num_first:]
        if index == 0 and shared:
            title = "prompt, computed once for all answers"
            parts.append(RowPart(title=title, messages=row.group.prompt, tokens=shared))
        parts.append(
            RowPart(
                title=_answer_title(row, index),
                messages=row.group.completions_G[index].messages,
                tokens=own,
                was_cut=bool(tokens.truncated_G[index]),
            )
        )
    if not pools_last:
        notes.append("this model pools by itself: the score is read from no single token")
    return FirstRow(source=row.source, parts=parts, notes=notes)


def _imitated(row: Dialogue, config: Any, model: str) -> FirstRow:
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
    part = RowPart(
        title="conversation", messages=row.messages, tokens=pieces, was_cut=learned.truncated
    )
    return FirstRow(source=row.source, parts=[part])


def _asked(row: Task, config: Any, model: str) -> FirstRow:
    chat = _chat(config, model)
    ids_L = chat.prompt_ids(row.prompt)
    pieces = pieces_of(
        chat.tokenizer, ids_L, row.prompt, lambda said: chat.render(said, prompt=True)
    )
    part = RowPart(title="prompt", messages=row.prompt, tokens=pieces)
    room = config.policy.max_total_sequence_length - len(ids_L)
    notes = (
        f"what the policy writes next counts in the loss: up to {max(room, 0):,} tokens of "
        f"policy.max_total_sequence_length={config.policy.max_total_sequence_length}",
        *_about_task(row),
    )
    return FirstRow(source=row.source, parts=[part], notes=notes)


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


def _chat(config: Any, model: str) -> ChatFormat:
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
    has_tokens = any(part.tokens for part in row.parts)
    separator = "│" if "utf" in (console.encoding or "").lower() else "|"
    for part in row.parts:
        console.print(Text(_title(part), style="bold"))
        wide = (_FIXED, {**_FIXED, "justify": "right"}, _FIXED, _FOLDED)
        table = _grid(*(wide if has_tokens else (_FIXED, _FOLDED)))
        for cells in _token_lines(part, separator) if has_tokens else _message_lines(part):
            table.add_row(*cells)
        console.print(table)
    if has_tokens:
        _show_legend(console, [piece for part in row.parts for piece in part.tokens], separator)
    for note in row.notes:
        console.print(Text(f"note     {visible(note)}"), soft_wrap=True)


def style_of(role: str) -> str:
    """The colours of a role; none for what the template writes."""
    return "" if role in (TEMPLATE, UNCLEAR) else ROLE_STYLES.get(role, OTHER_ROLE)


# ------------------------------------------------------------------------------------------- lines


def _title(part: RowPart) -> str:
    if not part.tokens:
        return part.title
    num_tokens = _count(part.tokens)
    cut = ", cut to fit" if part.was_cut else ""
    return f"{part.title}: {counted(num_tokens, 'token')}{cut}"


def _count(pieces: Iterable[Piece]) -> int:
    return sum(len(piece.ids) for piece in pieces)


def _message_lines(part: RowPart) -> Iterator[tuple[Text, ...]]:
    for message in part.messages:
        role = Text(f" {visible(message.role)} ", style=style_of(message.role))
        yield role, Text(shorten_middle(message.content, _TEXT_LENGTH) or "(empty)")


def _token_lines(part: RowPart, separator: str) -> Iterator[tuple[Text, ...]]:
    def kind(piece: Piece) -> tuple[str, bool, bool]:
        return piece.role, piece.in_loss, piece.pooled

    for (role, in_loss, pooled), group in groupby(part.tokens, kind):
        pieces = list(group)
        use = "score" if pooled else "loss" if in_loss else ""
        yield (
            Text(f" {visible(role)} ", style=style_of(role)),
            Text(str(_count(pieces))),
            Text(use, style=POOLED if pooled else LEARNED if in_loss else ""),
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
        if piece.in_loss:
            style = f"{LEARNED} {style}"
        if piece.pooled:
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
    if any(piece.in_loss for piece in pieces):
        lines.append(Text("").append("loss", LEARNED).append(": these tokens count in the loss"))
    if any(piece.pooled for piece in pieces):
        what = ": the token from which the reward model reads the score"
        lines.append(Text("").append("[score]", POOLED).append(what))
    for one in lines:
        console.print(Text("         ").append_text(one))
