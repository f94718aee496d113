"""Creates the sample tables of a report: selected rows of a run, and comparisons over training.

A page with all texts of a long run would take minutes to open. So a table holds the rows that a
reader would look for, a random sample of the others, and the numbers of both.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import random
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from laurel.errors import counted, counted_that
from laurel.observe.console import PairRow, shorten_middle, visible
from laurel.observe.loggers import SAMPLES_FILE
from laurel.observe.run_record import COMPLETIONS_DIRECTORY, RunRecord, completion_files

NUM_OF_A_KIND = 200
"""The number of rows of each kind: the first, the last, the best, ..."""
NUM_RANDOM = 2_000
_TEXT_LENGTH = 1_500
"""The number of characters of a text that are shown; a longer text is cut in its middle."""

Row = Mapping[str, Any]

_LEFT_OUT = frozenset({"task", "group", "weight_version", "num_turns", "environment"})
_HEADINGS = {
    "step": "step",
    "prompt": "prompt",
    "completion": "completion",
    "reward": "reward",
    "better": "chosen",
    "better_score": "score of chosen",
    "worse": "rejected",
    "worse_score": "score of rejected",
    "margin": "margin",
    "verdict": "verdict",
    "answer": "answer",
    "expected": "expected",
    "advantage": "advantage",
    "failure": "failure",
    "truncated": "truncated",
    "num_tokens": "tokens",
}
"""The headings of the columns that come first, in this order, before any others."""
NUMBERS = frozenset(
    {
        "step",
        "reward",
        "better_score",
        "worse_score",
        "margin",
        "advantage",
        "num_tokens",
        "reward before",
        "reward after",
        "change",
        "margin before",
        "margin after",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """A table of rows that can be sorted and searched."""

    title: str
    columns: Sequence[str]
    """The headings of the columns."""
    kinds: Sequence[str]
    """`number` or `text` for each column."""
    rows: Sequence[Sequence[str | float | None]]
    """The cells of each row: numbers, and texts with hidden characters as escapes."""
    num_rows: int
    """The number of rows before the selection."""
    note: str = ""


@dataclass(slots=True)
class Chooser:
    """Selects a few rows of a run, which are added one by one.

    It keeps the rows with the highest and the lowest values, those whose value differs most from
    the truth, the first, the last, and a uniform random sample of all rows.
    """

    num_of_a_kind: int = NUM_OF_A_KIND
    num_random: int = NUM_RANDOM
    num_rows: int = 0
    _first: list[tuple[int, Row]] = field(default_factory=list)
    _last: deque[tuple[int, Row]] = field(default_factory=deque)
    _heaps: dict[str, list[tuple[float, int, Row]]] = field(default_factory=dict)
    _random: list[tuple[int, Row]] = field(default_factory=list)
    _generator: random.Random = field(default_factory=lambda: random.Random(0))
    _numbers: count[int] = field(default_factory=count)

    @property
    def num_sampled(self) -> int:
        """The number of rows that are in the random sample so far."""
        return len(self._random)

    def add(self, row: Row) -> None:
        """Add the next row."""
        number = next(self._numbers)
        self.num_rows += 1
        if len(self._first) < self.num_of_a_kind:
            self._first.append((number, row))
        self._last.append((number, row))
        if len(self._last) > self.num_of_a_kind:
            self._last.popleft()
        for kind, value in _values(row):
            heap = self._heaps.setdefault(kind, [])
            # Of equal values the earlier row stays. The number is unique, so that rows are never
            # compared.
            heapq.heappush(heap, (value, -number, row))
            if len(heap) > self.num_of_a_kind:
                heapq.heappop(heap)
        if len(self._random) < self.num_random:
            self._random.append((number, row))
        else:
            # Reservoir sampling (Vitter's algorithm R): each row so far is equally likely kept.
            position = self._generator.randrange(self.num_rows)
            if position < self.num_random:
                self._random[position] = (number, row)

    def chosen(self) -> list[tuple[Row, tuple[str, ...]]]:
        """Return the kept rows in their original order, each with the reasons for keeping it."""
        kinds: dict[int, tuple[Row, list[str]]] = {}
        for kind, rows in (
            ("first", self._first),
            ("last", self._last),
            *((kind, [(-n, row) for _, n, row in heap]) for kind, heap in self._heaps.items()),
            ("random", self._random),
        ):
            for number, row in rows:
                kinds.setdefault(number, (row, []))[1].append(kind)
        return [(row, tuple(why)) for _, (row, why) in sorted(kinds.items())]


def _values(row: Row) -> Iterable[tuple[str, float]]:
    """Yield the reasons for which a row may be kept, each with the value that ranks the row."""
    reward = _finite(row.get("reward"))
    if reward is not None:
        yield "highest reward", reward
        yield "lowest reward", -reward
    advantage = _finite(row.get("advantage"))
    if advantage is not None:
        yield "furthest from its group", abs(advantage)
    better, worse = _finite(row.get("better_score")), _finite(row.get("worse_score"))
    if better is not None and worse is not None:
        yield "most wrong", worse - better
        yield "surest", better - worse
    if row.get("failure"):
        yield "failed", 0.0


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def sample_table(title: str, chooser: Chooser, *, where: str) -> SampleTable:
    """Return the table of the selected rows."""
    selected = chooser.chosen()
    rows = [_with_verdict(row) for row, _ in selected]
    names = _columns(rows)
    is_part = len(selected) < chooser.num_rows
    cells = [[_cell(name, row.get(name)) for name in names] for row in rows]
    headings = [_HEADINGS.get(name, name.replace("_", " ")) for name in names]
    kinds = ["number" if name in NUMBERS else "text" for name in names]
    note = f"All {counted(chooser.num_rows, 'sample')}."
    if is_part:
        headings.append("chosen for")
        kinds.append("text")
        for row, (_, why) in zip(cells, selected, strict=True):
            row.append(", ".join(why))
        note = (
            f"{len(selected):,} of {chooser.num_rows:,} samples: up to {chooser.num_of_a_kind} of "
            f"each kind named in the last column, and {chooser.num_sampled:,} at random. "
            f"All are in {where}."
        )
    return SampleTable(
        title=title, columns=headings, kinds=kinds, rows=cells, num_rows=chooser.num_rows, note=note
    )


def before_and_after(title: str, rows: Sequence[Row]) -> SampleTable | None:
    """Return a table of the answers to the same prompts at the first and at the last step.

    Pairs are compared by their margins. None if no prompt occurs at two steps.
    """
    steps = sorted({row["step"] for row in rows if isinstance(row.get("step"), int | float)})
    if len(steps) < 2:
        return None
    before, after = (_by_prompt(rows, step) for step in (steps[0], steps[-1]))
    shared = [key for key in before if key in after]
    if not shared:
        return None
    is_pairs = "better_score" in before[shared[0]]
    names = _PAIR_COLUMNS if is_pairs else _COLUMNS
    cells = [_compared(before[key], after[key], is_pairs=is_pairs) for key in shared]
    return SampleTable(
        title=title,
        columns=names,
        kinds=["number" if name in NUMBERS else "text" for name in names],
        rows=cells,
        num_rows=len(cells),
        note=f"The first answer to each prompt at step {steps[0]:,.0f} and at step "
        f"{steps[-1]:,.0f}; {counted_that(len(cells), 'prompt', 'were')} seen at both."
        if not is_pairs
        else f"The same pairs at step {steps[0]:,.0f} and at step {steps[-1]:,.0f}: "
        f"{len(cells):,} of them. A margin above 0 is right.",
    )


_COLUMNS = (
    "prompt",
    "expected",
    "before",
    "reward before",
    "after",
    "reward after",
    "change",
)
_PAIR_COLUMNS = ("prompt", "chosen", "rejected", "margin before", "margin after", "change")


def _by_prompt(rows: Sequence[Row], step: float) -> dict[tuple[str, ...], Row]:
    # The first row of each prompt at a step; in pairs, both answers belong to the key.
    first_rows: dict[tuple[str, ...], Row] = {}
    for row in rows:
        if row.get("step") == step:
            names = ("task", "prompt", "better", "worse")
            first_rows.setdefault(tuple(str(row.get(name, "")) for name in names), row)
    return first_rows


def _compared(before: Row, after: Row, *, is_pairs: bool) -> list[str | float | None]:
    first, last = (
        _margin(row) if is_pairs else _finite(row.get("reward")) for row in (before, after)
    )
    change = None if first is None or last is None else last - first
    if is_pairs:
        texts = [_text(before.get(name)) for name in ("prompt", "better", "worse")]
        return [*texts, first, last, change]
    task = [_text(before.get(name)) for name in ("prompt", "expected")]
    return [*task, _answer(before), first, _answer(after), last, change]


def _answer(row: Row) -> str:
    text = _text(row.get("completion"))
    if row.get("failure"):
        return f"{text} [failed: {_text(row['failure'])}]"
    return f"{text} [cut off]" if row.get("truncated") else text


def _margin(row: Row) -> float | None:
    better, worse = _finite(row.get("better_score")), _finite(row.get("worse_score"))
    return None if better is None or worse is None else better - worse


def _with_verdict(row: Row) -> Row:
    """Return the row of a pair with its margin and verdict; other rows are unchanged."""
    if "better_score" not in row or "worse_score" not in row:
        return row
    scores = [_finite(row[name]) for name in ("better_score", "worse_score")]
    pair = PairRow(
        prompt="",
        better="",
        worse="",
        better_score=math.nan if scores[0] is None else scores[0],
        worse_score=math.nan if scores[1] is None else scores[1],
    )
    return {**row, "margin": _margin(row), "verdict": pair.verdict}


def _columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns that are not empty, the most important first."""
    names = dict.fromkeys(
        name
        for row in rows
        for name, value in row.items()
        # 0 counts as content; None, an empty text and "no" do not.
        if name not in _LEFT_OUT and value is not None and value is not False and value != ""
    )
    first = [name for name in _HEADINGS if name in names]
    return [*first, *(name for name in names if name not in _HEADINGS)]


def _cell(name: str, value: object) -> str | float | None:
    if name in NUMBERS:
        return _finite(value)
    if isinstance(value, bool):
        return "yes" if value else ""
    return _text(value)


def _text(value: object) -> str:
    return "" if value is None else shorten_text(str(value), _TEXT_LENGTH)


def within(tables: Sequence[SampleTable], num_bytes: int) -> list[SampleTable]:
    """Drop rows of tables whose total size is too large for one page.

    Every table loses the same share of its size, and notes it. Randomly sampled rows are dropped
    first, then rows at even intervals.
    """
    sizes = [_size(table.rows) for table in tables]
    if sum(sizes) <= num_bytes:
        return list(tables)
    # Tables shrink in proportion, so a small table keeps as large a share as a large one.
    share = num_bytes / sum(sizes)
    return [
        _thinned(table, math.floor(size * share)) for table, size in zip(tables, sizes, strict=True)
    ]


def _thinned(table: SampleTable, num_bytes: int) -> SampleTable:
    # The last cell of a selected row holds the reasons for keeping it.
    selected = [index for index, row in enumerate(table.rows) if row and row[-1] != "random"]
    random_rows = [index for index, row in enumerate(table.rows) if row and row[-1] == "random"]
    room = num_bytes - _size([table.rows[index] for index in selected])
    if room > 0 and random_rows:
        size = _size([table.rows[index] for index in random_rows])
        indices = sorted([*selected, *_evenly(random_rows, room / size)])
    else:
        indices = _evenly(selected, num_bytes / _size([table.rows[index] for index in selected]))
    return replace(
        table,
        rows=[table.rows[index] for index in indices],
        note=f"{table.note} To keep the page small, {len(indices):,} of these "
        f"{len(table.rows):,} are here.",
    )


def _evenly(indices: Sequence[int], share: float) -> list[int]:
    number = max(1, math.floor(len(indices) * min(1.0, share)))
    return [indices[index * len(indices) // number] for index in range(number)]


def _size(rows: Sequence[Sequence[str | float | None]]) -> int:
    return sum(
        len(cell.encode("utf-8", "replace")) if isinstance(cell, str) else 12
        for row in rows
        for cell in row
    )


_NUM_COMPARED = 300
"""The maximum number of prompts in a table of before and after: more than a reader looks at."""


class RunSamples:
    """Reads the samples of one run, repeatedly while the run goes on.

    Each file of completions is read once, because the file of a step does not change.
    """

    def __init__(self) -> None:
        self._completions = Chooser()
        self._read: dict[Path, tuple[int, int]] = {}
        self._unreadable: set[Path] = set()

    def tables(self, record: RunRecord) -> list[SampleTable]:
        """Return the tables of a run: before and after, then validations, then training."""
        by_table: dict[str, list[Mapping[str, Any]]] = {}
        for line in record.samples:
            of_table = by_table.setdefault(str(line.get("table", "samples")), [])
            of_table.append({"step": line.get("step"), **line["row"]})
        tables = []
        for name, rows in by_table.items():
            compared = before_and_after(f"Before and after: {name}", rows)
            if compared is not None:
                if len(compared.rows) > _NUM_COMPARED:
                    compared = replace(
                        compared,
                        rows=compared.rows[:_NUM_COMPARED],
                        note=f"{compared.note} The first {_NUM_COMPARED:,} are here.",
                    )
                tables.append(compared)
        for name, rows in by_table.items():
            chooser = Chooser()
            for row in rows:
                chooser.add(row)
            tables.append(sample_table(name, chooser, where=SAMPLES_FILE))
        training = self._training(record)
        if training is not None:
            tables.append(training)
        return tables

    def _training(self, record: RunRecord) -> SampleTable | None:
        stamps = stamps_of(completion_files(record.path, record.num_steps))
        if any(stamps.get(file) != stamp for file, stamp in self._read.items()):
            # A resumed run wrote a step again, so the selection may be outdated.
            self._completions, self._read = Chooser(), {}
        self._unreadable = set()
        for file, stamp in stamps.items():
            if file not in self._read:
                self._take(file, stamp)
        if not self._completions.num_rows:
            return None
        where = f"{COMPLETIONS_DIRECTORY}/*.parquet"
        table = sample_table("Completions of the training", self._completions, where=where)
        if not self._unreadable:
            return table
        names = ", ".join(sorted(file.name for file in self._unreadable)[:3])
        files = counted(len(self._unreadable), "file")
        return replace(table, note=f"{table.note} {files} could not be read: {names}.")

    def _take(self, file: Path, stamp: tuple[int, int]) -> None:
        # A file that is being written, or that a kill cut short, has no rows yet.
        import pyarrow

        arrow: Any = pyarrow
        try:
            rows = list(_rows(file))
        except (OSError, arrow.ArrowException):
            self._unreadable.add(file)
            return
        self._read[file] = stamp
        for row in rows:
            self._completions.add(row)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    from pyarrow import parquet

    # `read_table` looks for data sets in several files first, which takes longer than reading.
    open_file: Any = parquet.ParquetFile
    with open_file(file) as opened:
        yield from opened.read().to_pylist()


def stamps_of(files: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Return the time and the size of each file that exists; another stamp means other content."""
    stamps = {}
    for file in files:
        with contextlib.suppress(OSError):
            status = file.stat()
            stamps[file] = (status.st_mtime_ns, status.st_size)
    return stamps


_JOINERS = frozenset("\u200c\u200d")
"""The invisible characters that scripts and emoji need, and that hide nothing."""


def visible_lines(text: str) -> str:
    r"""Show hidden characters in the lines of a text as escapes: `\x1b`, `\u202e`, `\u200b`."""
    return "\n".join(_shown(line) for line in text.split("\n"))


def shorten_text(text: str, length: int) -> str:
    """Keep the start and the end of a text, `length` characters; escape hidden characters."""
    if len(text) <= length:
        return visible_lines(text)
    half = length // 2
    left_out = len(text) - 2 * half
    start, end = visible_lines(text[:half]), visible_lines(text[-half:])
    return f"{start} [... {left_out:,} characters ...] {end}"


def one_line(text: str, length: int) -> str:
    """Shorten a text to one line of `length` characters, with hidden characters as escapes."""
    return _shown(shorten_middle(text, length))


def script_json(value: object) -> str:
    """Return JSON for a `<script>` element, which no text in it can end."""
    # `</script>` and `<!--` would end the element, whatever the JSON around them.
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _shown(text: str) -> str:
    text = visible(text)
    if text.isascii():
        return text
    return "".join(
        char.encode("unicode_escape").decode("ascii")
        if unicodedata.category(char) == "Cf" and char not in _JOINERS
        else char
        for char in text
    )
