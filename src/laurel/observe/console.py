"""Writes output to a terminal: consoles, line breaks, and tables of metrics, pairs and scores.

Texts of models and data sets are shown literally: markup in them has no effect, and control
characters appear as escapes, so that no text can colour, clear or reorder the screen.
"""

from __future__ import annotations

import io
import logging
import math
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from laurel.errors import counted
from laurel.types import Conversation, Preference, RolloutGroup

if TYPE_CHECKING:
    import numpy as np

_PROMPT_LENGTH = 240
_ANSWER_LENGTH = 320
_REORDERING = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""The marks that make a terminal reorder the text around them."""
_FOLDED_WIDTH = 24
"""The number of cells to which a column whose words may be broken can be narrowed."""
_WORD = re.compile(r"^ *\S+|\S+", re.MULTILINE)
_ITEM = re.compile(r"\S+(?: \S+)*")
"""An item, such as a label or a name with its number: text between gaps of at least two spaces."""
_PIECE = re.compile(r"[^(/=,:;&?]*[(/=,:;&?]+|[^(/=,:;&?]+")
"""A piece of a word that is wider than a line, up to a separator after which it may be broken."""
_URGENT = re.compile(r"(warning|FAILED)\b")
BASELINES = {"longer_wins_baseline": "longer answer", "bag_of_words_baseline": "bag of words"}
"""The metrics of baselines, and the words for them beside an accuracy."""
_VERDICT_STYLES = {"right": "green", "wrong": "red", "tie": "yellow", "unknown": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """A row of a logged table, whose columns are the fields of its class."""

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Return the names of the cells, for `MetricLogger.log_table`."""
        return tuple(field.name for field in fields(cls))

    @property
    def cells(self) -> tuple[object, ...]:
        """The values of the row, in the order of `columns`."""
        return astuple(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow(TableRow):
    """A pair of answers and their scores, for `print_pairs` and for a logged table."""

    prompt: str
    better: str
    worse: str
    better_score: float
    worse_score: float

    @classmethod
    def of(cls, preference: Preference, scores_G: Sequence[float]) -> PairRow | None:
        """Return the row of the best and the worst completion; None if all have the same rank."""
        ranks_G = preference.ranks_G
        best, worst = ranks_G.index(min(ranks_G)), ranks_G.index(max(ranks_G))
        if ranks_G[best] == ranks_G[worst]:
            return None
        group = preference.group
        return cls(
            prompt=conversation_text(group.prompt),
            better=conversation_text(group.completions_G[best].messages),
            worse=conversation_text(group.completions_G[worst].messages),
            better_score=float(scores_G[best]),
            worse_score=float(scores_G[worst]),
        )

    @property
    def verdict(self) -> Literal["right", "wrong", "tie", "unknown"]:
        """Whether the scores agree with the annotators; unknown if a score is not finite."""
        if not (math.isfinite(self.better_score) and math.isfinite(self.worse_score)):
            return "unknown"
        if self.better_score == self.worse_score:
            return "tie"
        return "right" if self.better_score > self.worse_score else "wrong"


_NOTEBOOK_WIDTH = 92
"""The width of lines in characters; a cell of JupyterLab 1,300 pixels wide breaks lines at 95."""


class _Screen(Console):
    """A console that keeps live displays and their control codes out of files and dumb terminals.

    With FORCE_COLOR rich treats any file as a terminal; it then gets colours, but no display.
    """

    def __init__(self, *, stderr: bool, is_quiet: bool) -> None:
        # A notebook's kernel sets FORCE_COLOR, which would make a terminal of its stream.
        stream = sys.stderr if stderr else sys.stdout
        is_notebook = type(stream).__module__.startswith("ipykernel.")
        super().__init__(
            stderr=stderr,
            markup=False,
            emoji=False,
            highlight=False,
            force_jupyter=False,
            force_terminal=False if is_notebook else None,
            width=_NOTEBOOK_WIDTH if is_notebook and "COLUMNS" not in os.environ else None,
        )
        self._is_notebook = is_notebook
        self._is_quiet = is_quiet
        self.is_interactive = self.is_interactive and self.file.isatty() and not is_quiet

    def print(self, *objects: Any, **options: Any) -> None:
        if self._is_quiet and not (objects and _URGENT.match(str(objects[0]))):
            return
        # A file's lines stay whole, to be searched. A terminal would break them within words, and
        # so would a notebook, which has no end of a line to wrap at.
        if is_unbroken(self) and all(isinstance(one, str | Text) for one in objects):
            options = {"soft_wrap": True, **options}
        elif not (self.is_for_file and options.get("soft_wrap")):
            objects = tuple(_fitted(one, self.width) for one in objects)
        if self.is_for_file:
            with self.capture() as captured:
                super().print(*objects, **{"crop": not is_unbroken(self), **options})
            try:
                # The cells of tables end in blanks.
                self.file.write(re.sub(r" +(?=\n)", "", captured.get()))
                self.file.flush()
            except BrokenPipeError:
                self.on_broken_pipe()
            return
        super().print(*objects, **options)

    @property
    def is_for_file(self) -> bool:
        """Whether the lines go into a file or a pipe."""
        return not self._is_notebook and not self.file.isatty()

    def status(self, status: Any, **options: Any) -> Status:
        if self.is_interactive:
            return super().status(status, **options)
        return Status(status, console=silent_console())


UNBROKEN = 10_000
"""The width of tables whose lines are not broken."""


def is_unbroken(console: Console) -> bool:
    """Whether lines may have any length: they go into a file, and the user has set no width."""
    return isinstance(console, _Screen) and console.is_for_file and "COLUMNS" not in os.environ


def _fitted(shown: Any, width: int) -> Any:
    if isinstance(shown, str):
        return wrapped(shown, width)
    if isinstance(shown, Text) and not shown.no_wrap and not shown.spans:
        return Text(wrapped(shown.plain, width), style=shown.style)
    return shown


def wrapped(text: str, width: int, *, indent: str | None = None, end: str = "") -> str:
    r"""Break lines that are wider than a terminal, between words and never within a number.

    Items between two spaces (`loss 0.25`) stay whole if they fit. A word that is wider than a line,
    such as a path, is broken after one of its separators.

    Args:
        width: The width of a line in cells.
        indent: The text before continued lines; None indents them to the column after a short
            label.
        end: The text at the end of lines that are continued, such as ` \` in a command.
    """
    return "\n".join(
        line if cell_len(line) <= width else _broken(line, width, indent, end)
        for line in text.split("\n")
    )


def _broken(line: str, width: int, indent: str | None, end: str) -> str:
    if indent is None:
        columns = re.match(r" {3,}|(?:\S+ )?\S+ {2,}", line)
        indent = " " * (columns.end() if columns and columns.end() <= min(14, width // 4) else 2)
    lines = [""]

    def fits(text: str, after: str | None = None) -> bool:
        return cell_len((lines[-1] if after is None else after) + text + end) <= width

    def begin(mark: str) -> None:
        lines[-1] += mark
        lines.append(indent)

    before = 0
    for place, item in enumerate(_ITEM.finditer(line)):
        gap, before = line[before : item.start()], item.end()
        # After a label alone the item begins on the same line.
        if place > 1 and not fits(gap + item[0]) and fits(item[0], indent):
            begin(end)
            gap = ""
        for word in item[0].split(" "):
            pieces = [word]
            if not fits(word, indent):
                room = width - cell_len(indent + end)
                pieces = [part for one in _PIECE.findall(word) for part in chop_cells(one, room)]
            if not fits(gap + pieces[0]):
                begin(end)
                gap = ""
            lines[-1] += gap + pieces[0]
            for piece in pieces[1:]:
                if not fits(piece):
                    begin(end.strip())
                lines[-1] += piece
            gap = " "
    return "\n".join(lines)


def print_command(console: Console, label: str, command: str) -> None:
    r"""Print a command that can be pasted; a terminal shows it in lines that end in ` \`."""
    text = visible(f"{label}{command}")
    # Within quotes a backslash would be a part of the argument.
    if console.file.isatty() and "'" not in command:
        text = wrapped(text, console.width, indent="", end=" \\")
    console.print(Text(text, no_wrap=True), soft_wrap=True)


def make_console(*, stderr: bool = False) -> Console:
    """Create the console for a command's results, without markup and highlighting.

    It respects NO_COLOR. A character that the stream cannot encode is shown as an escape instead of
    ending the run. In a notebook the console writes plain lines, as into a file, so that saved
    outputs can be compared, and no widgets are needed.
    """
    return _screen(stderr=stderr, is_quiet=False)


def message_console(*, stderr: bool = True) -> Console:
    """Create the console for messages, not results; `laurel --quiet` shows only urgent ones.

    Urgent messages are lines that begin with `warning` or `FAILED`, and those of `print_urgent`.
    """
    return _screen(stderr=stderr, is_quiet=verbosity() == "quiet")


def print_urgent(console: Console, text: str) -> None:
    """Print a line even if the command was started with `--quiet`."""
    if isinstance(console, _Screen) and not console.is_for_file:
        text = wrapped(text, console.width)
    Console.print(console, text, markup=False, highlight=False, soft_wrap=True)


def _screen(*, stderr: bool, is_quiet: bool) -> Console:
    # A byte that the terminal's encoding lacks must not end a run of hours.
    stream = sys.stderr if stderr else sys.stdout
    reconfigure = getattr(stream, "reconfigure", None)  # a captured stream may not have it
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    return _Screen(stderr=stderr, is_quiet=is_quiet)


def silent_console() -> Console:
    """Create a console whose output is discarded."""
    return Console(file=io.StringIO(), force_jupyter=False, force_terminal=False)


def print_pairs(
    console: Console, title: str, rows: Sequence[PairRow], *, is_brief: bool = False
) -> None:
    """Print pairs: the prompt and whether the scores are right, then both answers.

    Args:
        is_brief: Whether to print one line for the scores of a pair and one for each text, without
            a title.
    """
    if not rows:
        console.print(Text(f"{visible(title)}: no pairs"))
        return
    if is_brief:
        for row in rows:
            scores = " against ".join(map(format_number, (row.better_score, row.worse_score)))
            console.print(Text(f"  {row.verdict:<7} {scores}"), soft_wrap=True)
            for label in ("prompt", "better", "worse"):
                head = f"    {label:<8}"
                shown = shorten_end(getattr(row, label), max(60, console.width - len(head)))
                console.print(Text(head + shown), soft_wrap=True)
        return
    table = new_table(title, "", "score")
    table.add_column("text", overflow="fold")
    for row in rows:
        verdict = Text(row.verdict, style=_VERDICT_STYLES[row.verdict])
        prompt = Text(shorten_middle(row.prompt, _PROMPT_LENGTH), style="dim")
        table.add_row("prompt", verdict, prompt)
        table.add_row("better", format_number(row.better_score), _answer(row.better))
        worse = _answer(row.worse)
        table.add_row("worse", format_number(row.worse_score), worse, end_section=True)
    print_table(console, table)


def print_line(console: Console, text: str) -> None:
    """Print one line, shortened in its middle to the width of the terminal."""
    console.print(Text(shorten_middle(text, max(16, console.width))), soft_wrap=True)


def format_number(value: float) -> str:
    """Format a number with four significant digits.

    Whole numbers below 1,000 stay whole; from 1,000 up there are no decimals.
    """
    number = float(value)
    if not math.isfinite(number):
        return "NaN" if math.isnan(number) else "inf" if number > 0 else "-inf"
    if number.is_integer() and abs(number) < 1000:
        return str(int(number))
    # From here four digits round to a thousand, which is written without decimals.
    if 999.95 <= abs(number) < 1e9:
        return f"{number:,.0f}"
    return f"{number:#.4g}"


def accuracy_words(figures: Mapping[str, float]) -> str | None:
    """Describe an accuracy with its baselines and number of pairs; None if there is no accuracy.

    Args:
        figures: The metrics of one validation set, by their names without a prefix.
    """
    accuracy, count = figures.get("accuracy"), figures.get("num_valid_samples")
    rows = figures.get("num_rows")  # benchmarks log this one
    if accuracy is None:
        return None
    # Only reward models are validated on pairs, and only they have these metrics.
    has_pairs = "longer_wins_baseline" in figures or "margin_mean" in figures
    said = f"accuracy {accuracy:.4f}"
    if count is not None:
        said += f" of {counted(round(count), 'pair' if has_pairs else 'completion')}"
    elif rows is not None:
        said += f" of {counted(round(rows), 'row')}"
    if not has_pairs and figures.get("truncation_rate"):
        # Environments count these as wrong in an accuracy of their own, whatever their reward is.
        said += ", with those cut off"
    beside = [
        f"{label} {figures[name]:.4f}" for name, label in BASELINES.items() if name in figures
    ]
    return f"{said} ({', '.join(beside)})" if beside else said


def format_parameters(count: int) -> str:
    """Format a number of parameters: `33.6M`, or `41 thousand` for a small model."""
    return f"{count / 1e6:.1f}M" if count >= 100_000 else f"{count / 1e3:.3g} thousand"


def shorten_middle(text: str, length: int) -> str:
    """Shorten a text to `length` visible characters: its start, ` ... ` and its end."""
    # The question stands at the end of a long prompt, its subject at the start.
    if length < 16:
        raise ValueError(f"length is {length}; at least 16 are needed to show both ends")
    # Escaping a book to show a line of it would take a while.
    if len(text) > 2 * length:
        text = text[:length] + text[-length:]
        shown = visible(text[:length]) + visible(text[length:])
        is_cut = True
    else:
        shown = visible(text)
        is_cut = len(shown) > length
    if not is_cut:
        return shown
    rest = length - len(" ... ")
    head = rest // 2
    return shown[:head] + " ... " + shown[len(shown) - (rest - head) :]


def shorten_end(text: str, width: int) -> str:
    """Shorten a text to `width` cells and add ` ...`, after a whole word if possible."""
    shown = visible(text[: width + 1])
    if len(text) <= width + 1 and cell_len(shown) <= width:
        return shown
    # Marks without a width of their own make no line.
    start = next(iter(chop_cells(shown, width - len(" ..."))), shown)
    head, blank, _ = start.rpartition(" ")
    # A long word, or a language without blanks, is cut within.
    return (head if blank and 2 * cell_len(head) > width else start.rstrip()) + " ..."


def say_on(console: Console) -> Callable[[str], None]:
    """Return a function that prints lines on a console, with hidden characters as escapes."""

    def say(text: str) -> None:
        console.print(Text("\n".join(map(visible, text.split("\n")))), soft_wrap=True)

    return say


def visible(text: str) -> str:
    r"""Show control, reordering and unpaired characters of a text as escapes: a newline as `\n`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode("ascii")
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in _REORDERING
        else character
        for character in text
    )


def conversation_text(conversation: Conversation) -> str:
    """Return a conversation as one text, with roles if there are several messages."""
    if len(conversation) == 1:
        return conversation[0].content
    return "\n".join(f"{message.role}: {message.content}" for message in conversation)


def new_table(title: str, *columns: str) -> Table:
    """Create a table with a column of names and columns of numbers, for `print_table`."""
    table = Table(
        title=Text(visible(title)) if title else None,
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_header=any(columns),
    )
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table without breaking a word or number, however narrow the terminal is.

    Columns are narrowed to their longest word, then the gaps between them are. If that is not
    enough, each cell gets its own line, after its heading.
    """
    if table.title is not None:
        console.print(Text(wrapped(_plain(table.title), console.width), style="table.title"))
        table.title = None
    # rich would take width from all columns alike, and break numbers to do so.
    columns = [[_plain(column.header), *map(_plain, column.cells)] for column in table.columns]
    whole = [max(map(cell_len, "\n".join(cells).split("\n"))) for cells in columns]
    least = [max(map(cell_len, _WORD.findall("\n".join(cells))), default=0) for cells in columns]
    # What a model wrote may be one word of any length.
    least = [
        min(width, _FOLDED_WIDTH) if column.overflow == "fold" else width
        for column, width in zip(table.columns, least, strict=True)
    ]
    table.expand = False
    # The usual gaps are tried first, then the least: gaps are narrowed before numbers are broken.
    for padding in (table.padding, (0, 0)):
        table.padding = padding
        unlimited = console.options.update(max_width=100_000)
        gaps = console.measure(table, options=unlimited).maximum - sum(whole)
        room = console.width - gaps - sum(least)
        if room >= 0:
            for column, width in zip(table.columns, _shared(room, least, whole), strict=True):
                column.width, column.ratio, column.no_wrap = width, None, False
            console.print(table)
            return
    headings = [cells[0] for cells in columns]
    label = max(map(cell_len, headings[1:]), default=0)
    for cells in list(zip(*columns, strict=True))[1:]:
        console.print(Text(wrapped(cells[0].strip(), console.width)))
        for heading, cell in list(zip(headings, cells, strict=True))[1:]:
            if cell:
                console.print(Text(wrapped(f"   {heading:<{label}}  {cell}", console.width)))


def _plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


# rich's own collapse takes the widest column down first, below the longest word of others.
def _shared(room: int, least: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Return the widths of columns, between their least and whole widths, that fill the room.

    If the room is too small for all, columns share evenly what exceeds the least widths.
    """
    widths = list(least)
    while room > 0 and (open_ones := [i for i, width in enumerate(widths) if width < whole[i]]):
        for i in open_ones:
            more = min(whole[i] - widths[i], max(1, room // len(open_ones)), room)
            widths[i] += more
            room -= more
    return widths


def _answer(text: str) -> Text:
    return Text(shorten_middle(text, _ANSWER_LENGTH)) if text else Text("(empty)", style="dim")


# Completions with their rewards: a table on screen, a parquet file a step.


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRow(TableRow):
    """One rollout as a row of a table."""

    step: int
    task: str
    """The id of the task."""
    group: str
    environment: str
    prompt: str
    completion: str
    """The text of all turns, as `completion_text` joins them."""
    reward: float | None
    advantage: float | None = None
    """Of a completion with advantages per step, the mean over its tokens."""
    answer: str | None = None
    expected: str | None = None
    """The known answer; None if there is none."""
    truncated: bool = False
    failure: str | None = None
    num_tokens: int = 0
    num_turns: int = 1
    weight_version: int = 0
    step_rewards: list[float] | None = None
    """Rewards of its steps; None where the environment gives none."""
    step_ends: list[int] | None = None
    """The number of tokens of the completion up to the end of each step."""
    num_sequences: int = 1
    """More than one where the chat template rewrites earlier turns."""


def completion_rows(
    groups: Sequence[RolloutGroup],
    *,
    step: int,
    advantages_BG: Sequence[Sequence[float]] | Sequence[np.ndarray] | None = None,
) -> list[CompletionRow]:
    """Return the rollouts of groups as rows of a table."""
    rows = []
    for b, group in enumerate(groups):
        expected = group.task.metadata.get("ground_truth")
        for g, rollout in enumerate(group.rollouts_G):
            steps = rollout.steps
            rows.append(
                CompletionRow(
                    step=step,
                    task=group.task.id,
                    group=group.id,
                    environment=group.task.environment,
                    prompt="\n".join(m.content for m in group.task.prompt),
                    completion=completion_text(rollout.messages),
                    reward=rollout.reward,
                    advantage=None if advantages_BG is None else float(advantages_BG[b][g]),
                    answer=rollout.answer,
                    expected=None if expected is None else str(expected),
                    truncated=rollout.truncated,
                    failure=rollout.failure,
                    num_tokens=int(rollout.mask_L.sum()),
                    num_turns=rollout.num_turns,
                    weight_version=rollout.weight_version,
                    step_rewards=None if steps is None else [step.value for step in steps],
                    step_ends=None if steps is None else [step.end for step in steps],
                    num_sequences=rollout.num_sequences,
                )
            )
    return rows


def completion_text(messages: Conversation) -> str:
    """Join the turns after a prompt to one text, such as `x [environment] wrong [policy] y`.

    A single turn has no mark of its role.
    """
    # Only changes of the speaker are marked, so that a single turn reads as it was written.
    text, speaker = "", "policy"
    for message in messages:
        by = "policy" if message.role == "assistant" else "environment"
        if by != speaker:
            text += f" [{by}] "
        text, speaker = text + message.content, by
    return text


def print_completions(
    console: Console, title: str, rows: Sequence[CompletionRow], *, is_brief: bool = False
) -> None:
    """Print completions with their rewards.

    Args:
        is_brief: Whether to print one line for each completion, without a title.
    """
    if is_brief:
        for row in rows:
            said = "failed" if row.reward is None else f"reward {format_number(row.reward)}"
            print_line(console, f"  {said}  {row.prompt} | {row.completion}")
        return
    table = Table(title=title, show_lines=True)
    table.add_column("prompt", overflow="fold")
    table.add_column("completion", overflow="fold")
    table.add_column("reward", justify="right", overflow="fold")
    for row in rows:
        reward = Text("-" if row.reward is None else format_number(row.reward))
        if row.failure is not None:
            reward = Text(f"failed: {visible(row.failure)}", style="yellow")
        completion = Text(visible(shorten_middle(row.completion, _ANSWER_LENGTH)))
        if row.truncated:
            completion.append(" [cut off]", style="yellow")
        table.add_row(Text(visible(shorten_middle(row.prompt, _PROMPT_LENGTH))), completion, reward)
    print_table(console, table)


ROWS_AT_A_TIME = 512


def write_completions(path: Path, rows: Sequence[CompletionRow]) -> None:
    """Write the rows as a parquet file, which pandas, polars and duckdb can read."""
    import pyarrow
    from pyarrow import parquet

    arrow: Any = pyarrow
    kinds = {"int": arrow.int64(), "float": arrow.float64(), "bool": arrow.bool_()}
    kinds |= {f"list[{name}]": arrow.list_(kinds[name]) for name in ("int", "float")}
    schema = arrow.schema(
        [
            (name, kinds.get(str(field.type).removesuffix(" | None"), arrow.string()))
            for name, field in CompletionRow.__dataclass_fields__.items()
        ]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    writer_of: Any = parquet.ParquetWriter
    with writer_of(path, schema) as writer:
        # The parts are written one after the other, and use the same memory.
        for first in range(0, len(rows), ROWS_AT_A_TIME):
            arrays = []
            for column in schema:
                values = [getattr(row, column.name) for row in rows[first : first + ROWS_AT_A_TIME]]
                try:
                    array = arrow.array(values, column.type)
                except UnicodeEncodeError:  # an unpaired surrogate, as broken data may have
                    values = [v and v.encode("utf-8", "backslashreplace").decode() for v in values]
                    array = arrow.array(values, column.type)
                arrays.append(array)
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))


# Verbosity: `laurel --quiet` and `laurel --verbose`, for the whole process.

Verbosity = Literal["quiet", "normal", "verbose"]
"""`quiet` prints errors, warnings and results. `verbose` also prints the debug messages of Laurel's
loggers, and the tracebacks of errors."""

_verbosity: Verbosity = "normal"


class _ToStderr(logging.Handler):
    # This looks up standard error for each record, because a live display replaces it meanwhile.
    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


_handler = _ToStderr()
_handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))


def verbosity() -> Verbosity:
    """Return the verbosity of this process."""
    return _verbosity


def set_verbosity(wanted: Verbosity) -> None:
    """Set the verbosity of this process; existing consoles keep theirs."""
    global _verbosity
    _verbosity = wanted
    # The handler is removed first, so that a second call does not print each message twice.
    logger = logging.getLogger("laurel")
    logger.removeHandler(_handler)
    logger.setLevel(logging.NOTSET)
    if wanted == "verbose":
        logger.addHandler(_handler)
        logger.setLevel(logging.DEBUG)


def quiet_libraries() -> None:
    """Switch off the progress bars and the warnings of libraries."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    for name in ("torch", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
