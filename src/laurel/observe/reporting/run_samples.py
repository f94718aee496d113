"""The tables of samples of a run, from the files that it left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from laurel.observe.counts import counted
from laurel.observe.loggers import SAMPLES_FILE
from laurel.observe.reporting.samples import Chooser, SampleTable, before_and_after, table_of
from laurel.observe.run_record import COMPLETIONS_DIRECTORY, RunRecord, completion_files

_NUM_COMPARED = 300
"""Prompts of a table of before and after, at most: so many are more than anybody reads."""


class RunSamples:
    """Reads the samples of one run, again and again while it goes on.

    The files of completions are read once each: a step that was written does not change.
    """

    def __init__(self) -> None:
        self._completions = Chooser()
        self._read: dict[Path, tuple[int, int]] = {}
        self._unreadable: set[Path] = set()

    def tables(self, record: RunRecord) -> list[SampleTable]:
        """Before and after first, then what was logged at validations, then the training."""
        by_table: dict[str, list[Mapping[str, Any]]] = {}
        for line in record.samples:
            of_table = by_table.setdefault(str(line.get("table", "samples")), [])
            of_table.append({"step": line.get("step"), **line["row"]})
        tables = []
        for name, rows in by_table.items():
            compared = before_and_after(f"Before and after: {name}", rows)
            if compared is not None:
                tables.append(_cut(compared))
        for name, rows in by_table.items():
            chooser = Chooser()
            for row in rows:
                chooser.add(row)
            tables.append(table_of(name, chooser, where=SAMPLES_FILE))
        training = self._training(record)
        if training is not None:
            tables.append(training)
        return tables

    def _training(self, record: RunRecord) -> SampleTable | None:
        files = completion_files(record.path, record.num_steps)
        stamps = {file: stamp for file in files if (stamp := _stamp(file)) is not None}
        if any(stamps.get(file) != stamp for file, stamp in self._read.items()):
            # A resume wrote a step again: what was chosen may no longer be so.
            self._completions, self._read = Chooser(), {}
        self._unreadable = set()
        for file, stamp in stamps.items():
            if file not in self._read:
                self._take(file, stamp)
        if not self._completions.num_rows:
            return None
        where = f"{COMPLETIONS_DIRECTORY}/*.parquet"
        table = table_of("Completions of the training", self._completions, where=where)
        if not self._unreadable:
            return table
        names = ", ".join(sorted(file.name for file in self._unreadable)[:3])
        return SampleTable(
            title=table.title, columns=table.columns, kinds=table.kinds, rows=table.rows,
            num_rows=table.num_rows,
            note=f"{table.note} {counted(len(self._unreadable), 'file')} could not be read: "
            f"{names}.",
        )  # fmt: skip

    def _take(self, file: Path, stamp: tuple[int, int]) -> None:
        """The rows of a file. One that is being written, or that a kill cut short, has none yet."""
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


def _stamp(file: Path) -> tuple[int, int] | None:
    """What tells one state of a file from another; None where it is gone."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _cut(table: SampleTable) -> SampleTable:
    if len(table.rows) <= _NUM_COMPARED:
        return table
    return SampleTable(
        title=table.title, columns=table.columns, kinds=table.kinds,
        rows=table.rows[:_NUM_COMPARED], num_rows=table.num_rows,
        note=f"{table.note} The first {_NUM_COMPARED:,} are here.",
    )  # fmt: skip
