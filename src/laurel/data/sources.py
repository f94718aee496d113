"""Rows from local files, saved data sets and the Hugging Face hub, each with where it stands."""

from __future__ import annotations

import contextlib
import difflib
import glob
import gzip
import importlib
import logging
import os
import shlex
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, cast

from laurel.data.cells import Row, UnusableRow
from laurel.data.file_formats import READERS, Complain, Rows
from laurel.errors import DataError
from laurel.observe.hub import WITHOUT_ASKING, why_not_fetched

_OTHER_DIRECTORIES = {
    "training_info.json": "a checkpoint",
    "model.safetensors": "a model",
    "model.safetensors.index.json": "a model",
}
"""Files that no data set has, and what a directory is that holds one."""
_DEEPEST_MARK = 3
"""Directories below the one that is named: `results` holds `rm/step_10/policy`."""
_WHAT_TO_NAME = (
    f"Name a file of rows (it ends in {', '.join(READERS)}), or a directory that holds one"
)


def read_rows(
    path_or_name: str,
    *,
    subset: str | None = None,
    split: str | None = None,
    on_bad_row: Literal["error", "skip"] | Complain = "error",
) -> Iterator[tuple[str, Row]]:
    """The rows of a file, a directory or a hub data set, each with its source.

    A source is `train.jsonl.gz:17` (the line, from 1) for files made of lines and `name[17]` (the
    index, from 0) for others; `locate` turns it into a path. `split` is `train` where none is said;
    `subset` and `split` mean nothing to a single file. `on_bad_row` may be a function that is told
    of each row that cannot be read. Raises DataError.
    """
    tell = _handler(on_bad_row, path_or_name)
    path = os.path.expanduser(path_or_name)
    num_rows = 0

    def complain(source: str, problem: UnusableRow) -> None:
        nonlocal num_rows
        num_rows += 1
        tell(source, problem)

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
    """A source of `read_rows` with the directory it stands in, for messages."""
    if source.startswith(path_or_name):
        return source
    return os.path.join(os.path.dirname(os.path.normpath(path_or_name)), source)


def complaint(problem: UnusableRow, path: str | None, source: str, *, said: str = "") -> str:
    """The error for a row, with where it stands.

    Args:
        problem: What is wrong with it.
        path: The file or name that the rows come from; None where an object gives them.
        source: The row, as `read_rows` names it.
        said: What to do, instead of keys of a configuration.
    """
    where = source if path is None else locate(path, source)
    words = f"{where}: " + (f"{problem.message}. {said}" if said else str(problem))
    if problem.lacks_columns and path is not None and os.path.exists(path):
        words += f" What the columns could be: laurel data check {shlex.quote(path)}"
    return words


def _handler(on_bad_row: Literal["error", "skip"] | Complain, name: str) -> Complain:
    def stop(source: str, problem: UnusableRow) -> None:
        raise DataError(f"{locate(name, source)}: {problem}")

    if on_bad_row == "error":
        return stop
    if on_bad_row == "skip":
        return lambda source, problem: None
    return on_bad_row


# ----------------------------------------------------------------------------------------- files


def _suffix(path: str) -> str:
    """The suffix that names the format, without `.gz`."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def _file_rows(path: str, complain: Complain) -> Rows:
    read = READERS.get(_suffix(path))
    if read is None:
        raise DataError(
            f"{path}: cannot tell the format from the name. Known endings are "
            f"{', '.join(READERS)}, each also with .gz"
        )
    last = "the start"
    try:
        if os.path.getsize(path) == 0:
            raise DataError(
                f"{path} is empty (0 bytes). Write it again: each row a line (or as its format "
                "has it); laurel data check says what rows may hold"
            )
        with _opened(path) as stream:
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


def _opened(path: str) -> IO[bytes]:
    if path.lower().endswith(".gz"):
        return cast("IO[bytes]", gzip.open(path))
    return open(path, "rb")


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
    hint = f"; there is {', '.join(near)}" if near else ", and nothing there looks like data"
    return f"{path} does not exist in {folder or 'the working directory'}{hint}"


# ------------------------------------------------------------------------------ saved and on a hub


def _directory_rows(path: str, *, subset: str | None, split: str | None) -> Rows:
    saved = [name for name in ("dataset_dict.json", "state.json")
             if os.path.exists(os.path.join(path, name))]  # fmt: skip
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
    """Whether something of this owner has been made ready here, which may need no hub."""
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
        if not _holds_files(name):
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
    """What a directory is that other commands have made; None where it may hold data."""
    top = directory.rstrip(os.sep)
    for folder, inside, files in os.walk(directory):
        for mark, kind in _OTHER_DIRECTORIES.items():
            if mark in files:
                where = os.path.relpath(os.path.join(folder, mark), directory)
                return f"is the directory of {kind} (it holds {where}), and not of data"
        if folder.count(os.sep) - top.count(os.sep) >= _DEEPEST_MARK:
            inside.clear()
    return None


def _holds_files(directory: str) -> bool:
    """Whether a file of rows is in a directory, or below it."""
    return any(_suffix(name) in READERS for _, _, files in os.walk(directory) for name in files)


def _in_one_line(problem: Exception) -> str:
    said = " ".join(str(problem).split()) or "no reason given"
    return f"{type(problem).__name__}: {said[:400]}"


def _dataset_rows(dataset: Any, label: str) -> Rows:
    for index, row in enumerate(dataset):
        yield f"{label}[{index}]", row


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the bars and the retry notices of the libraries off the screen."""
    reading, fetching = (
        importlib.import_module(f"{package}.utils.tqdm")
        for package in ("datasets", "huggingface_hub")
    )
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    silenced = [bars for bars in (reading, fetching) if not bars.are_progress_bars_disabled()]
    for bars in silenced:
        bars.disable_progress_bars()
    try:
        yield
    finally:
        for bars in silenced:
            bars.enable_progress_bars()
        logger.setLevel(level)
