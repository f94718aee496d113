"""Reads rows, each with its place, from local files, saved data sets and the Hugging Face hub."""

from __future__ import annotations

import codecs
import contextlib
import csv
import difflib
import glob
import gzip
import importlib
import inspect
import io
import itertools
import json
import logging
import math
import os
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Generic, NoReturn, TypeGuard, TypeVar, cast

from laurel.config.data import DatasetConfig, TaskSetConfig
from laurel.config.sft import DemonstrationSetConfig
from laurel.errors import DataError, counted, setting_of
from laurel.observe.forks import ForkGuard
from laurel.observe.hub import WITHOUT_ASKING, why_not_fetched
from laurel.observe.user_code import import_object
from laurel.types import Conversation, Message

# --------------------------------------------------------------------------------------------------
# Takes typed values out of a row, or says what is wrong with it.

Row = Mapping[str, Any]

LEAVE_OUT = "set data.on_bad_row=skip to leave such rows out and count them"


class UnusableRow(Exception):
    """Raised for a row that cannot be used; only `laurel.data` and readers of rows catch it.

    `message` states the problem, `kind` is the short phrase that such rows are counted under, and
    `remedy` is advice that replaces the general advice to fix the row. `lacks_columns` is True if
    the expected columns may exist under other names.
    """

    def __init__(
        self, kind: str, message: str, *, remedy: str = "Fix the row", lacks_columns: bool = False
    ) -> None:
        super().__init__(kind, message, remedy)
        self.kind = kind
        self.message = message
        self.remedy = remedy
        self.lacks_columns = lacks_columns

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy}, or {LEAVE_OUT}."


def required(row: Row, key: str, *, setting: str | None = None) -> Any:
    """Return the value of a column that a row must have.

    `setting` is the configuration key that can name another column, for the message.

    Raises:
        UnusableRow: The column is missing.
    """
    value = row.get(key)
    if value is not None:
        return value
    kind = f"missing key '{key}'"
    if key in row:
        raise UnusableRow(f"'{key}' is null", f"'{key}' is null")
    keys = [str(other) for other in row]
    message = f"the row has no '{key}'; its keys are: {', '.join(keys) or 'none'}"
    if setting is None:
        raise UnusableRow(kind, message)
    near = difflib.get_close_matches(key, keys, n=1)
    hint = f" ('{near[0]}'?)" if near else ""
    raise UnusableRow(
        kind,
        message,
        remedy=f"Set data.{setting} to the key that holds it{hint}",
        lacks_columns=True,
    )


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """Report whether a value is what JSON calls a list."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def unlike(value: Any, expected: str, *, what: str, form: str = "") -> UnusableRow:
    """Return the problem of a value that is not `expected`, such as `a list`.

    `what` names the value in messages, and `form` says what is expected in more detail.
    """
    return UnusableRow(
        f"{what} is not {expected}",
        f"{what} is {json_kind(value)} where {form or expected} is expected",
    )


def text(value: Any, *, what: str) -> str:
    """Return a value that must be text which UTF-8 can encode; `what` names it in messages.

    Raises:
        UnusableRow: The value is no such text.
    """
    if not isinstance(value, str):
        raise unlike(value, "text", what=what)
    # ASCII holds no surrogates, and to see that is quicker than to encode.
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as problem:
            broken = value[problem.start]
            raise UnusableRow(
                f"{what} holds half a character",
                f"{what} holds half of a surrogate pair (\\u{ord(broken):04x}) at character "
                f"{problem.start + 1}, which no tokenizer can read",
            ) from None
    return value


def integer(value: Any, *, what: str) -> int:
    """Return a value as a whole number; tables may hold it as `2.0` or `"2"`.

    Raises:
        UnusableRow: The value is no whole number.
    """
    number_value = number(value, what=what)
    if not number_value.is_integer():
        raise UnusableRow(
            f"{what} is not a whole number", f"{what} is {value!r} where a whole number is expected"
        )
    return int(number_value)


def number(value: Any, *, what: str) -> float:
    """Return a value as a finite number; a CSV file may hold it as text.

    Raises:
        UnusableRow: The value is no finite number.
    """
    result = math.nan
    # To Python `true` is 1.
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            result = float(value)
        except (ValueError, OverflowError):
            result = math.nan
    if not math.isfinite(result):
        shown = repr(value) if isinstance(value, int | float | str) else json_kind(value)
        raise UnusableRow(
            f"{what} is not a number", f"{what} is {shown:.60} where a finite number is expected"
        )
    return result


def number_at(row: Row, key: str, *, setting: str) -> float:
    """Return the number in column `key`; if there is no such column, `a-b` means a minus b.

    `setting` is the configuration key that names the column, for messages.
    """
    if key not in row:
        for place, character in enumerate(key):
            left, right = key[:place].strip(), key[place + 1 :].strip()
            if character == "-" and left in row and right in row:
                first = number(row[left], what=f"'{left}'")
                return first - number(row[right], what=f"'{right}'")
    return number(required(row, key, setting=setting), what=f"'{key}'")


def messages(value: Any, *, role: str, what: str) -> Conversation:
    """Return a value as a list of messages; plain text becomes one message of `role`.

    Raises:
        UnusableRow: The value is neither text nor messages.
    """
    if isinstance(value, str):
        return (Message(role, text(value, what=what)),)
    if not is_list(value):
        raise unlike(value, "text or messages", what=what, form="text or a list of messages")
    return tuple(_message(item, what=what) for item in value)


def _message(value: Any, *, what: str) -> Message:
    if not isinstance(value, Mapping) or "role" not in value or "content" not in value:
        shown = f"keys {', '.join(map(str, value))}" if isinstance(value, Mapping) else repr(value)
        raise UnusableRow(
            f"{what} holds something that is no message",
            f"{what} holds something that is no {{'role': ..., 'content': ...}}: {shown:.80}",
        )
    if value.get("tool_calls"):
        raise UnusableRow(
            f"{what} holds 'tool_calls'",
            f"{what} holds a message with 'tool_calls', which would be left out: write the calls "
            "into its content, as the chat template writes them (docs/tools.md)",
        )
    content = value["content"]
    if is_list(content):
        texts: list[str] = []
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or "text" not in part:
                raise UnusableRow(
                    f"{what} holds something other than text",
                    f"{what} holds a part that is not text: {part!r:.80}",
                )
            texts.append(text(part["text"], what=f"a turn in {what}"))
        content = "".join(texts)
    return Message(
        text(value["role"], what=f"a role in {what}"), text(content, what=f"a turn in {what}")
    )


def answer(conversation: Conversation, *, what: str) -> Conversation:
    """Return a conversation after checking that its last message is the assistant's.

    Raises:
        UnusableRow: The last message is not the assistant's.
    """
    if not conversation or conversation[-1].role != "assistant":
        last = f"'{conversation[-1].role}'" if conversation else "nothing"
        raise UnusableRow(
            f"{what} does not end with an assistant turn",
            f"{what} must end with a message of role 'assistant', and ends with {last}",
        )
    return conversation


def json_kind(value: Any) -> str:
    """Return what JSON calls a value's type, such as an object or a list, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, Sequence) else f"a {type(value).__name__}"


# --------------------------------------------------------------------------------------------------
# How each file format is read into rows.

Rows = Iterator[tuple[str, Row]]
Complain = Callable[[str, UnusableRow], None]
"""A function that is called for each unreadable row with its source and the problem.

Reading continues if it returns, and ends if it raises.
"""
Reader = Callable[[IO[bytes], str, Complain], Rows]
"""A function that yields the rows of an open file, given its path and a `Complain` for bad rows."""

# Strings are matched first, so that a NaN inside one is not taken for the bare word.
_BARE_WORD = re.compile(r'"(?:\\.|[^"\\])*"|(-?Infinity|NaN)')
_LONGEST_CELL = 2**31 - 1


class _NotANumber(ValueError):
    """Raised for a bare NaN or Infinity, which Python's parser accepts and JSON does not allow."""


def _refuse(word: str) -> NoReturn:
    raise _NotANumber(word)


def _parse(content: str) -> Any:
    """Parse a JSON text.

    Raises:
        json.JSONDecodeError: The text is not JSON; no other error is raised.
    """
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
            remedy="Fix the line (each line is one JSON object)",
        ) from None
    return as_row(row)


def as_row(value: Any) -> Row:
    """Return a row after checking that it is an object.

    Raises:
        UnusableRow: It is something else.
    """
    if not isinstance(value, Mapping):
        raise UnusableRow(
            "not an object",
            f"the row is {json_kind(value)} where an object {{key: value}} is expected",
        )
    return value


def json_lines(stream: IO[bytes], path: str, complain: Complain) -> Rows:
    """Read one JSON object per line; blank lines are skipped."""
    label = os.path.basename(path)
    for number, raw in enumerate(stream, start=1):
        # Some editors begin a file with a byte-order mark.
        line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        if line.isspace() or not line:
            continue
        yield from _one_row(f"{label}:{number}", _json_line, line, complain)


def _one_row(source: str, read: Callable[[Any], Row], value: Any, complain: Complain) -> Rows:
    try:
        row = read(value)
    except UnusableRow as problem:
        complain(source, problem)
    else:
        yield source, row


def json_file(stream: IO[bytes], path: str, complain: Complain) -> Rows:
    """Read a JSON array of objects, or one JSON object per line."""
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
            f"{_near(problem)!r}. Fix the array, or write one object per line so that a bad row "
            "can be left out"
        ) from None
    for index, value in enumerate(values):
        yield from _one_row(f"{os.path.basename(path)}[{index}]", as_row, value, complain)


def csv_file(stream: IO[bytes], path: str, complain: Complain) -> Rows:
    """Read comma-separated rows under a header; a cell may hold a list of messages as JSON."""
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
    for mark, name in ((";", "semicolons (;)"), ("\t", "tabs")):
        names = header[0].split(mark) if len(header) == 1 else []
        if len(names) > 1 and all(one.strip() for one in names):
            raise DataError(
                f"{path}:1: the columns are separated by {name}, where CSV has commas. Write the "
                "file again with commas between the columns (spreadsheets ask for the separator "
                "when they export), or as JSON lines"
            )
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
    """Return the text of a cell, or the messages or completions that it holds as JSON."""
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
    """Read the rows of a Parquet table."""
    import pyarrow.parquet
    from pyarrow.lib import ArrowException

    try:
        table: Any = pyarrow.parquet.ParquetFile(_seekable(stream))  # type: ignore[no-untyped-call]
        yield from _batches(table.iter_batches(), path)
    except ArrowException as problem:
        raise DataError(f"{path} is no Parquet file, or is damaged: {problem}") from problem


def arrow_file(stream: IO[bytes], path: str, complain: Complain) -> Rows:
    """Read the rows of an Arrow table in stream format (as `datasets` writes) or file format."""
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
    """Return the stream or, if it is compressed, its content, because reads are out of order."""
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


# Files that no data set has, and what a directory is that holds one.
_OTHER_DIRECTORIES = {
    "training_info.json": "a checkpoint",
    "model.safetensors": "a model",
    "model.safetensors.index.json": "a model",
}
# Directories below the one that is named: `results` holds `rm/step_10/policy`.
_DEEPEST_MARK = 3
_WHAT_TO_NAME = (
    f"Name a file of rows (it ends in {', '.join(READERS)}), or a directory that holds one"
)


def read_rows(
    path_or_name: str,
    *,
    subset: str | None = None,
    split: str | None = None,
    on_bad_row: Complain | None = None,
) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a file, a directory or a hub data set, each with its source.

    A source is `train.jsonl.gz:17` (the line, from 1) for files made of lines and `name[17]` (the
    index, from 0) for others; `locate` turns it into a path. `split` is `train` by default;
    `subset` and `split` mean nothing to a single file. `on_bad_row` is called with each row that
    cannot be read; without it, such a row is an error.

    Raises:
        DataError: The place or a row cannot be read, or there are no rows.
    """
    path = os.path.expanduser(path_or_name)
    num_rows = 0

    def complain(source: str, problem: UnusableRow) -> None:
        nonlocal num_rows
        num_rows += 1
        if on_bad_row is None:
            raise DataError(f"{locate(path_or_name, source)}: {problem}")
        on_bad_row(source, problem)

    if os.path.isdir(path):
        rows = _directory_rows(path, subset=subset, split=split)
    elif os.path.exists(path):
        rows = _file_rows(path, complain)
    elif _looks_local(path):
        raise DataError(_absent(path))
    else:
        rows = _hub_rows(path_or_name, subset=subset, split=split)
    for row in rows:
        num_rows += 1
        yield row
    if num_rows == 0:
        raise DataError(f"{path_or_name} holds no rows; name a file, or a split, that has some")


def locate(path_or_name: str, source: str) -> str:
    """Return a source of `read_rows` with the directory of its file added, for messages."""
    if source.startswith(path_or_name):
        return source
    return os.path.join(os.path.dirname(os.path.normpath(path_or_name)), source)


def complaint(problem: UnusableRow, path: str | None, source: str, *, said: str = "") -> str:
    """Return the error message for a row that cannot be used, with the row's place.

    Args:
        problem: The problem of the row.
        path: The file or name that the rows come from; None if an object supplies them.
        source: The row's place, as `read_rows` gives it.
        said: Advice that replaces the usual advice about configuration keys.
    """
    where = source if path is None else locate(path, source)
    words = f"{where}: " + (f"{problem.message}. {said}" if said else str(problem))
    if problem.lacks_columns and path is not None and os.path.exists(path):
        words += f" What the columns could be: laurel data check {shlex.quote(path)}"
    return words


# ----------------------------------------------------------------------------------------- files


def _suffix(path: str) -> str:
    """Return the suffix that names the file's format, without `.gz`."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def _file_rows(path: str, complain: Complain) -> Rows:
    read = READERS.get(_suffix(path))
    if read is None:
        raise DataError(
            f"{path}: cannot tell the format from the name. Known endings are "
            f"{', '.join(READERS)}, each also with .gz"
        )
    # A stream that breaks off has no line of its own: the last row that was read shows the place.
    last = "the start"
    try:
        if os.path.getsize(path) == 0:
            raise DataError(
                f"{path} is empty (0 bytes). Write it again: each row a line (or as its format "
                "has it); laurel data check says what rows may hold"
            )
        is_gzip = path.lower().endswith(".gz")
        with cast("IO[bytes]", gzip.open(path)) if is_gzip else open(path, "rb") as stream:
            for source, row in read(stream, path, complain):
                last = source
                yield source, row
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise DataError(
            f"{path}: the gzip stream breaks off after {last} ({problem}). The file was not copied "
            "whole, or is no gzip file; fetch it again"
        ) from problem
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror or problem}") from problem


def _looks_local(path: str) -> bool:
    if path.startswith((".", os.sep)) or _suffix(path) in READERS:
        return True
    parent = os.path.dirname(path)
    return bool(parent) and os.path.isdir(parent)


def _absent(path: str) -> str:
    folder, wanted = os.path.split(os.path.normpath(path))
    if not os.path.isdir(folder or "."):
        return f"{path} does not exist, and neither does the directory {folder}"
    present = sorted(os.listdir(folder or "."))
    near = difflib.get_close_matches(wanted, present, n=3, cutoff=0.5)
    if not near:
        near = [name for name in present if _suffix(name) in READERS][:5]
    verb = "is" if len(near) == 1 else "are"
    hint = f"; there {verb} {', '.join(near)}" if near else ", and nothing there looks like data"
    return f"{path} does not exist in {folder or 'the working directory'}{hint}"


# ------------------------------------------------------------------------------ saved and on a hub


def _directory_rows(path: str, *, subset: str | None, split: str | None) -> Rows:
    saved = [
        name
        for name in ("dataset_dict.json", "state.json")
        if os.path.exists(os.path.join(path, name))
    ]
    label = os.path.basename(os.path.normpath(path))
    if not saved:
        if (other := _other_than_data(path)) is not None:
            raise DataError(f"{path} {other}. {_WHAT_TO_NAME}")
        yield from _hub_rows(path, subset=subset, split=split, label=label)
        return
    with _quiet():
        from datasets.load import load_from_disk

        try:
            dataset: Any = load_from_disk(path)
        except Exception as problem:
            raise DataError(f"{path} cannot be read: {_in_one_line(problem)}") from problem
    if isinstance(dataset, dict):
        chosen = split or "train"
        if chosen not in dataset:
            raise DataError(f"{path} has no split '{chosen}'; it has: {', '.join(dataset)}")
        dataset = dataset[chosen]
    yield from _dataset_rows(dataset, label)


def _hub_rows(
    name: str, *, subset: str | None, split: str | None, label: str | None = None
) -> Rows:
    with _quiet():
        from datasets.load import load_dataset

        if not os.path.isdir(name) and not _is_prepared(name):
            why = why_not_fetched(name, "dataset")
            if why is not None:
                raise DataError(_unreachable(name, why))
        try:
            dataset = load_dataset(name, subset, split=split or "train")
        except Exception as problem:
            # The library raises whatever its parts raise; each means that there are no rows.
            raise DataError(_hub_failure(name, subset, split or "train", problem)) from problem
    yield from _dataset_rows(dataset, label or name)


def _is_prepared(name: str) -> bool:
    # Data sets of this owner that were prepared here may load without the hub.
    from datasets import config

    owner, slash, _ = name.partition("/")
    return any(Path(config.HF_DATASETS_CACHE).glob(glob.escape(owner) + ("___*" if slash else "")))


def _unreachable(name: str, why: str) -> str:
    return (
        f"'{name}' is no file or directory here, so it was taken for a name on the hub, which "
        f"cannot be reached ({why}). Go online, or give the path of a local copy. {WITHOUT_ASKING}"
    )


def _hub_failure(name: str, subset: str | None, split: str, problem: Exception) -> str:
    said = _in_one_line(problem)
    asked = f"split '{split}'" + (f" of subset '{subset}'" if subset else "")
    if os.path.isdir(name):
        names = (name for _, _, files in os.walk(name) for name in files)
        if not any(_suffix(file) in READERS for file in names):
            return f"{name} is a directory with no data file in it. {_WHAT_TO_NAME}"
        return (
            f"{name} is a directory, and {asked} of it cannot be loaded: {said}. Give one of its "
            "files, or a directory written by datasets.save_to_disk"
        )
    taken = f"'{name}' is no file or directory here, so it was taken for a name on the hub, "
    if isinstance(problem, ConnectionError):
        return _unreachable(name, said)
    return f"{taken}where {asked} cannot be loaded: {said}"


def _other_than_data(directory: str) -> str | None:
    """Name the kind of a directory that other commands have written; None if it may hold data."""
    top = directory.rstrip(os.sep)
    for folder, inside, files in os.walk(directory):
        for mark, kind in _OTHER_DIRECTORIES.items():
            if mark in files:
                where = os.path.relpath(os.path.join(folder, mark), directory)
                return f"is the directory of {kind} (it holds {where}), and not of data"
        if folder.count(os.sep) - top.count(os.sep) >= _DEEPEST_MARK:
            # `os.walk` does not enter what is taken out of its list.
            inside.clear()
    return None


def _in_one_line(problem: Exception) -> str:
    said = " ".join(str(problem).split()) or "no reason given"
    return f"{type(problem).__name__}: {said[:400]}"


def _dataset_rows(dataset: Any, label: str) -> Rows:
    for index, row in enumerate(dataset):
        yield f"{label}[{index}]", row


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the progress bars and retry notices of the libraries."""
    reading, fetching = (
        importlib.import_module(f"{package}.utils.tqdm")
        for package in ("datasets", "huggingface_hub")
    )
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    # Only those that are on are switched on again.
    silenced = [bars for bars in (reading, fetching) if not bars.are_progress_bars_disabled()]
    for bars in silenced:
        bars.disable_progress_bars()
    try:
        yield
    finally:
        for bars in silenced:
            bars.enable_progress_bars()
        logger.setLevel(level)


# --------------------------------------------------------------------------------------------------
# Rows from a class or function of the user's own, named by its import path.

SetConfig = TypeVar("SetConfig", DatasetConfig, TaskSetConfig, DemonstrationSetConfig)

_ACTED_ON_HERE = frozenset(
    {
        "split",
        "prompt_file",
        "system_prompt_file",
        "system_prompt",
        "repeat",
        "seed",
        "split_validation_size",
        "processor",
        "env_name",
        "task_name",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRows(Generic[SetConfig]):
    """The rows that a class or function of the user supplies for one split."""

    rows: Iterable[Any]
    config: SetConfig
    """The configuration without the column names that the user's object has already applied."""
    task_name: str | None = None
    prompt_file: str | None = None
    system_prompt_file: str | None = None
    notes: list[str] = field(default_factory=list)


def is_import_path(name: str) -> bool:
    """Report whether a name can only be an import path, because it has a dot or a colon."""
    return "." in name or ":" in name


def open_own(config: SetConfig) -> OwnRows[SetConfig]:
    """Call the class or function that the configuration names, and open the configured split.

    The split is `train` by default. A class is called with those values of the configuration that
    are set and that it accepts; it has `formatted_ds` (rows, or rows by split) and optionally
    `task_spec`. A function returns the rows, or rows by split, itself.

    Raises:
        DataError: The object cannot be imported or called, or has no such split.
    """
    path = config.dataset_name or ""
    made, accepted, ignored = _make(path, config)
    task = getattr(made, "task_spec", None)
    return OwnRows(
        rows=_guarded(_split_of(made, path, config.split or "train"), path),
        # Columns that the object itself has read are at their defaults here.
        config=type(config)(
            **config.model_dump(exclude_unset=True, exclude=set(filter(_is_column, accepted)))
        ),
        task_name=getattr(task, "task_name", None),
        prompt_file=getattr(task, "prompt_file", None),
        system_prompt_file=getattr(task, "system_prompt_file", None),
        notes=[f"{path} takes no {key}, so data.{key} has no effect" for key in ignored],
    )


def has_own_split(config: SetConfig, split: str) -> bool:
    """Report whether the user's class or function supplies rows by split and has the given one."""
    made, _, _ = _make(config.dataset_name or "", config)
    rows = getattr(made, "formatted_ds", made)
    return isinstance(rows, Mapping) and rows.get(split) is not None


def _is_column(key: str) -> bool:
    # Columns are looked up in the rows that the object gives, unless it asks for their names.
    return key.endswith("_key")


def _make(path: str, config: SetConfig) -> tuple[Any, set[str], list[str]]:
    """Call the class or function; return its result, the keys it accepts, and the ignored ones."""
    maker = import_object(path, where=setting_of("data.dataset_name", path), kind=DataError)
    if not callable(maker):
        raise DataError(
            f"{setting_of('data.dataset_name', path)} is a {type(maker).__name__}; "
            "it must be a class with formatted_ds, or a function that yields rows"
        )
    values = config.model_dump(exclude_defaults=True, exclude={"dataset_name", "max_samples"})
    try:
        parameters = dict(inspect.signature(maker).parameters)
    except (TypeError, ValueError):
        parameters = {}
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    accepted = {key: value for key, value in values.items() if takes_all or key in parameters}
    others = values.keys() - accepted.keys() - _ACTED_ON_HERE
    ignored = sorted(key for key in others if not _is_column(key))
    try:
        with ForkGuard():
            made = maker(**accepted)
    except Exception as problem:
        # The user's code may raise anything; all of it means that there are no rows.
        given = ", ".join(f"{key}={value!r}" for key, value in accepted.items())
        raise DataError(
            f"{setting_of('data.dataset_name', path)}: calling it with ({given}) raised "
            f"{type(problem).__name__}: {problem}"
        ) from problem
    return made, values.keys() & parameters.keys(), ignored


def _split_of(made: Any, path: str, split: str) -> Iterable[Any]:
    rows = made.formatted_ds if hasattr(made, "formatted_ds") else made
    if isinstance(rows, Mapping):
        present = [str(name) for name, value in rows.items() if value is not None]
        if split not in present:
            raise DataError(
                f"{setting_of('data.dataset_name', path)} has no split '{split}'; it has: "
                f"{', '.join(present) or 'none'}"
            )
        rows = rows[split]
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes):
        raise DataError(
            f"{setting_of('data.dataset_name', path)} gives a {type(rows).__name__} "
            "where rows are expected: a class must carry formatted_ds, a function must yield rows"
        )
    return rows


def _guarded(rows: Iterable[Any], path: str) -> Iterator[Any]:
    count = 0
    iterator = iter(rows)
    while True:
        try:
            with ForkGuard():
                row = next(iterator)
        except StopIteration:
            return
        except Exception as problem:
            raise DataError(
                f"{setting_of('data.dataset_name', path)} raised {type(problem).__name__} after "
                f"{counted(count, 'row')}: {problem}"
            ) from problem
        count += 1
        yield row
