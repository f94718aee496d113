"""Reads the rows of reward-model benchmarks: a prompt, its answers, and which are correct."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

from laurel import plugins
from laurel.config.data import BenchmarkName, DatasetConfig
from laurel.data.columns import ColumnNotes
from laurel.data.preferences import DATASET_CLASSES, infer_class
from laurel.data.sources import (
    Row,
    UnusableRow,
    locate,
    read_rows,
)
from laurel.errors import DataError
from laurel.types import Group, Preference

LABELS_STEPS = "These label each step: laurel rm trains and validates with them"
"""Said of rows that no benchmark and no comparison of answers reads."""

ANSWER_LISTS = ("completions", "responses")
"""The columns that may hold a list of several answers to one prompt."""
VERDICTS = ("correct", "passed", "is_correct")
"""The columns that may hold a list with one entry per answer: whether that answer is correct."""
_VERDICTS = frozenset({*VERDICTS, "label", "total_completions"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRow:
    """A row of a benchmark: a prompt and its answers, whose correct ranking is known."""

    id: str
    """The row's id, which is unique among the rows read together and stable between reads."""
    group: Group
    ranks_G: tuple[int, ...]
    """The rank of each answer, where lower is better; 0 or 1 if rows only say what is correct."""
    subset: str | None = None
    margin: float | None = None
    steps: tuple[str, ...] = ()
    """The steps of the answer, where the benchmark is about steps."""
    first_error: int | None = None
    """The index of the first wrong step; None if there is none, or the rows do not say."""
    partner: str | None = None
    """What two rows have alike of which neither counts without the other; None for other rows."""
    source: str
    """The row's place: `file:line`, or `name[index]` if the format has no lines."""


class HubPart(NamedTuple):
    """One split of a data set on the Hugging Face hub, from which a benchmark's rows are read."""

    name: str
    split: str
    subset: str | None = None
    """The benchmark subset that its rows belong to, if the rows do not name one themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkForm:
    """Describes how a benchmark's rows are written, and where they are read from by default."""

    name: BenchmarkName
    title: str
    written: str
    """An example of a row, which error messages show."""
    read: Callable[[Row], BenchmarkRow]
    hub: tuple[HubPart, ...] = ()
    subset_of_file: Callable[[str], str | None] = lambda name: None
    """Returns the subset that a file's name stands for; None if the name stands for none."""


def read_benchmark(
    form: BenchmarkForm,
    paths: Sequence[str],
    *,
    split: str | None = None,
    limit: int | None = None,
    say: Callable[[str], object] = lambda note: None,
) -> list[BenchmarkRow]:
    """Read all rows of a benchmark from files, directories or hub data sets.

    Args:
        paths: Files (.jsonl, .json, .csv, .parquet, .arrow; also .gz), directories written by
            `datasets.save_to_disk`, or names on the hub. If empty, the benchmark's own place on
            the hub is read.
        split: The split of a directory or a hub data set; None is the benchmark's own, or `train`.
        limit: The largest number of rows of each path, a share of each subset (`limit_rows`).

    Raises:
        DataError: A file or a row cannot be used; the message names the place and what is expected.
    """
    if not paths and not form.hub:
        raise DataError(f"no data is named; add --data with a file whose rows are {form.written}")
    parts: list[HubPart] = []
    for path in paths:
        own = [part for part in form.hub if part.name == path and split in (None, part.split)]
        subset = form.subset_of_file(os.path.basename(os.path.normpath(path)))
        parts += own or [HubPart(path, split or "train", subset)]
    rows: list[BenchmarkRow] = []
    seen: set[str] = set()
    for part in parts or form.hub:
        notes = ColumnNotes()
        read: list[BenchmarkRow] = []
        for row in _rows(form, part, notes):
            # Different subsets, and even one file, may repeat ids.
            own_id, number = row.id, 1
            if own_id in seen and row.partner is not None:
                raise DataError(
                    f"{row.source}: there is a row with the id {own_id} already, and rows of "
                    f"{row.subset} find their partners by it. Is a file given twice?"
                )
            if own_id in seen and row.subset:
                own_id = f"{row.subset}/{row.id}"
            first = own_id
            while own_id in seen:
                number += 1
                own_id = f"{first}#{number}"
            seen.add(own_id)
            read.append(replace(row, id=own_id))
        kept = read if limit is None else limit_rows(read, limit)
        if read and not kept:
            raise DataError(
                f"{part.name}: of its {len(read):,} rows, at most {limit:,} are none, since those "
                "with the same partner stay together; allow more"
            )
        rows += kept
        for note in notes.notes():
            say(f"{part.name}: {note}")
    return rows


def limit_rows(rows: Sequence[BenchmarkRow], limit: int) -> list[BenchmarkRow]:
    """Select at most `limit` rows, a share of each subset, evenly spaced, in their order.

    The selection is the same each time. Rows with the same partner stay together.
    """
    subsets = list(dict.fromkeys(row.subset for row in rows))
    units: dict[str, list[BenchmarkRow]] = {}
    # One subset after the other: where they take turns, every nth row may be of the same one.
    for row in sorted(rows, key=lambda row: subsets.index(row.subset)):
        unit = f"row {row.id}" if row.partner is None else f"partner {row.partner}"
        units.setdefault(unit, []).append(row)
    chosen: set[str] = set()
    seen = 0
    for together in units.values():
        seen += len(together)
        # As many as are due after so many, and no more.
        if len(chosen) + len(together) <= seen * limit // len(rows):
            chosen |= {row.id for row in together}
    return [row for row in rows if row.id in chosen]


def rows_of_preferences(
    preferences: Sequence[Preference], *, subset: str | None
) -> list[BenchmarkRow]:
    """Convert preferences to benchmark rows.

    Args:
        subset: The subset of all these rows, which also prefixes their ids; None is no subset.
    """
    return [
        BenchmarkRow(
            id=preference.source if subset is None else f"{subset}/{preference.source}",
            group=preference.group,
            ranks_G=preference.ranks_G,
            subset=subset,
            margin=preference.margin,
            source=preference.source,
        )
        for preference in preferences
    ]


def _rows(form: BenchmarkForm, part: HubPart, notes: ColumnNotes) -> Iterator[BenchmarkRow]:
    def refuse(source: str, problem: UnusableRow, row: Row | None = None) -> NoReturn:
        found = None if row is None else benchmark_of(row)
        hint = (
            "" if found in (None, form.name) else f". These look like rows for laurel eval {found}"
        )
        if row is not None and found is None and labels_steps(row):
            hint = f". {LABELS_STEPS}"
        raise DataError(
            f"{locate(part.name, source)}: {problem.message}. A row of {form.title} is "
            f"{form.written}{hint}"
        ) from problem

    for source, row in read_rows(part.name, split=part.split, on_bad_row=refuse):
        try:
            read = form.read(row)
        except UnusableRow as problem:
            refuse(source, problem, row)
        turns = (turn for one in read.group.completions_G for turn in one.messages)
        notes.look(source, row, (*read.group.prompt, *turns), others=read.steps, read=_VERDICTS)
        where = locate(part.name, source)
        yield replace(
            read,
            id=read.id or source,
            group=replace(read.group, id=where),
            source=where,
            subset=read.subset if part.subset is None else part.subset,
        )


def benchmark_of(row: Row) -> BenchmarkName | None:
    """Recognize the benchmark whose form a row has; None if the row is no preference at all."""
    for name in plugins.names("benchmarks"):
        if plugins.is_own("benchmarks", name):
            found: bool = plugins.find(plugins.BenchmarkKind, name).make(None, name).is_row(row)
            if found:
                return name
    is_preference = infer_class(row, DatasetConfig()) is not None and not labels_steps(row)
    return "pairs" if is_preference else None


def labels_steps(row: Row) -> bool:
    """Report whether a row labels the steps of its answers."""
    found = infer_class(row, DatasetConfig())
    return found is not None and DATASET_CLASSES[found[0]].read_steps is not None
