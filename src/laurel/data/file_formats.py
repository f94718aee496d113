"""How each file format is read into rows."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import IO, Any, NoReturn

from laurel.data.cells import Row, UnusableRow, kind_of
from laurel.errors import DataError

Rows = Iterator[tuple[str, Row]]
Complain = Callable[[str, UnusableRow], None]
"""Told the source of a row that cannot be read, and why; returns where reading may go on."""
Reader = Callable[[IO[bytes], str, Complain], Rows]
"""Takes the opened file, its path, and whom to tell of bad rows."""

# Strings are matched first, so that a NaN inside one is not taken for the bare word.
_BARE_WORD = re.compile(r'"(?:\\.|[^"\\])*"|(-?Infinity|NaN)')
_LONGEST_CELL = 2**31 - 1


class _NotANumber(ValueError):
    """A bare NaN or Infinity, which Python's parser takes and JSON does not know."""


def _refuse(word: str) -> NoReturn:
    raise _NotANumber(word)


def _parse(content: str) -> Any:
    """The value of a JSON text. Raises json.JSONDecodeError alone."""
    try:
        return json.loads(content, parse_constant=_refuse)
    except json.JSONDecodeError:
        raise
    except _NotANumber as problem:
        places = [match.start(1) for match in _BARE_WORD.finditer(content) if match.group(1)]
        place = places[0] if places else 0
        raise json.JSONDecodeError(f"{problem} is no JSON value", content, place) from None
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", content, 0) from None
    except ValueError as problem:  # a number with more digits than Python converts
        raise json.JSONDecodeError(str(problem), content, 0) from None


def _near(problem: json.JSONDecodeError) -> str:
    start, end = max(problem.pos - 30, 0), problem.pos + 30
    snippet = problem.doc[start:end]
    return f"{'…' if start else ''}{snippet}{'…' if end < len(problem.doc) else ''}".strip("\r\n")


def _json_line(raw: bytes) -> Row:
    try:
        content = raw.decode()
    except UnicodeDecodeError as problem:
        raise UnusableRow(
            "not UTF-8",
            f"byte {problem.start + 1} of the line (0x{raw[problem.start]:02x}) is not UTF-8",
            remedy="Convert the file to UTF-8",
        ) from None
    try:
        row = _parse(content)
    except json.JSONDecodeError as problem:
        raise UnusableRow(
            "not JSON",
            f"column {problem.pos + 1}: not JSON ({problem.msg}), near {_near(problem)!r}",
            remedy="Mend the line (each line is one JSON object)",
        ) from None
    return _as_row(row)


def _as_row(value: Any) -> Row:
    if not isinstance(value, dict):
        raise UnusableRow(
            "not an object",
            f"the row is {kind_of(value)} where an object {{key: value}} is expected",
        )
    return value


def json_lines(stream: IO[bytes], path: str, complain: Complain) -> Rows:
    """One object per line; blank lines are passed over."""
    label = os.path.basename(path)
    for number, raw in enumerate(stream, start=1):
        line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        if line.isspace() or not line:
            continue
        source = f"{label}:{number}"
        try:
            row = _json_line(line)
        except UnusableRow as problem:
            complain(source, problem)
            continue
        yield source, row


def json_file(stream: IO[bytes], path: str, complain: Complain) -> Rows:
    """An array of objects, or one object per line."""
    raw = stream.read().removeprefix(codecs.BOM_UTF8)
    if not raw.lstrip().startswith(b"["):
        yield from json_lines(io.BytesIO(raw), path, complain)
        return
    try:
        values = _parse(raw.decode())
    except UnicodeDecodeError as problem:
        line = raw.count(b"\n", 0, problem.start) + 1
        raise DataError(
            f"{path}:{line}: byte {problem.start + 1} of the file (0x{raw[problem.start]:02x}) is "
            "not UTF-8; convert the file to UTF-8"
        ) from None
    except json.JSONDecodeError as problem:
        raise DataError(
            f"{path}:{problem.lineno}: column {problem.colno}: not JSON ({problem.msg}), near "
            f"{_near(problem)!r}. Mend the array, or write one object per line so that a bad row "
            "can be left out"
        ) from None
    for index, value in enumerate(values):
        source = f"{os.path.basename(path)}[{index}]"
        try:
            row = _as_row(value)
        except UnusableRow as problem:
            complain(source, problem)
            continue
        yield source, row


def csv_file(stream: IO[bytes], path: str, complain: Complain) -> Rows:
    """Comma-separated, with a header line. A cell may hold a list of messages as JSON."""
    # The limit belongs to the process; prompts are longer than its default of 131072 characters.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    start = stream.readline().removeprefix(codecs.BOM_UTF8)
    lines = (line.decode(errors="surrogateescape") for line in itertools.chain([start], stream))
    reader = csv.reader(lines, strict=True)
    try:
        header = next(reader, [])
    except csv.Error as problem:
        raise DataError(f"{path}:1: the header is not CSV: {problem}") from None
    if len(set(header)) < len(header) or "" in header:
        raise DataError(
            f"{path}:1: the header must name each column once, and reads: {', '.join(header)}"
        )
    _check_separator(header, path)
    label = os.path.basename(path)
    while True:
        source = f"{label}:{reader.line_num + 1}"
        try:
            cells = next(reader)
            if cells:
                yield source, _csv_row(header, cells)
        except StopIteration:
            return
        except csv.Error as problem:
            complain(source, UnusableRow("not CSV", f"not CSV: {problem}"))
        except UnusableRow as problem:
            complain(source, problem)


def _check_separator(header: list[str], path: str) -> None:
    """Raise DataError for a header of one column that is a list of names between other marks."""
    for mark, name in ((";", "semicolons (;)"), ("\t", "tabs")):
        names = header[0].split(mark) if len(header) == 1 else []
        if len(names) > 1 and all(one.strip() for one in names):
            raise DataError(
                f"{path}:1: the columns are separated by {name}, where CSV has commas. Write the "
                "file again with commas between the columns (spreadsheets ask for the separator "
                "when they export), or as JSON lines"
            )


def _csv_row(header: list[str], cells: list[str]) -> Row:
    if len(cells) != len(header):
        raise UnusableRow(
            "wrong number of cells",
            f"the row has {len(cells)} cells where the header names {len(header)} columns",
        )
    for name, cell in zip(header, cells, strict=True):
        if not cell.isascii() and any("\udc80" <= character <= "\udcff" for character in cell):
            raise UnusableRow(
                "not UTF-8", f"'{name}' is not UTF-8", remedy="Convert the file to UTF-8"
            )
    return {name: _csv_cell(cell) for name, cell in zip(header, cells, strict=True)}


def _csv_cell(cell: str) -> Any:
    """The cell's text, or the messages or completions that it holds."""
    if not cell.startswith("[{"):
        return cell
    try:
        values = _parse(cell)
    except json.JSONDecodeError:
        return cell
    known = ({"role", "content"}, {"rank", "completion"}, {"completion", "attributes"})
    is_known = all(
        isinstance(value, dict) and any(keys <= value.keys() for keys in known) for value in values
    )
    return values if is_known else cell


def parquet_file(stream: IO[bytes], path: str, complain: Complain) -> Rows:
    """A Parquet table."""
    import pyarrow.parquet
    from pyarrow.lib import ArrowException

    try:
        table: Any = pyarrow.parquet.ParquetFile(_seekable(stream))  # type: ignore[no-untyped-call]
        yield from _batches(table.iter_batches(), path)
    except ArrowException as problem:
        raise DataError(f"{path} is no Parquet file, or is damaged: {problem}") from problem


def arrow_file(stream: IO[bytes], path: str, complain: Complain) -> Rows:
    """An Arrow table, in the stream form (as `datasets` writes it) or the file form."""
    from pyarrow.ipc import open_file, open_stream
    from pyarrow.lib import ArrowException

    content = _seekable(stream)
    try:
        magic = content.read(6)
        content.seek(0)
        if magic == b"ARROW1":
            table = open_file(content)  # type: ignore[no-untyped-call]
            batches = (table.get_batch(place) for place in range(table.num_record_batches))
        else:
            batches = iter(open_stream(content))  # type: ignore[no-untyped-call]
        yield from _batches(batches, path)
    except ArrowException as problem:
        raise DataError(f"{path} is no Arrow file, or is damaged: {problem}") from problem


def _seekable(stream: IO[bytes]) -> IO[bytes]:
    """The stream, or its content where it is compressed: these formats are read out of order."""
    return io.BytesIO(stream.read()) if isinstance(stream, gzip.GzipFile) else stream


def _batches(batches: Iterator[Any], path: str) -> Rows:
    label, index = os.path.basename(path), 0
    for batch in batches:
        for row in batch.to_pylist():
            yield f"{label}[{index}]", row
            index += 1


READERS: dict[str, Reader] = {
    ".jsonl": json_lines,
    ".json": json_file,
    ".csv": csv_file,
    ".parquet": parquet_file,
    ".arrow": arrow_file,
}
