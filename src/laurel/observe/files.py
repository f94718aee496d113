"""Writes files and directories atomically: complete or absent, even if the machine fails.

Each is written under a name that begins with a dot, forced to the disk, and only then renamed.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TextIO, cast
from uuid import uuid4

from laurel.errors import DataError, LaurelError, setting_of

# The Rust libraries that write weights and tokenizers report a full disk as a plain Exception.
_RUST_OS_ERROR = re.compile(r"\(os error \d+\)")

_log = logging.getLogger(__name__)


def check_output(path: Path, *, read_from: str) -> None:
    """Refuse an output file that could not be written, before any work is done.

    Raises:
        DataError: The file's directory is missing or not writable, the path is a directory, or the
            file is the input.
    """
    asked = setting_of("--output", path)
    target = Path(os.path.realpath(path.expanduser()))
    if target.is_dir():
        raise DataError(f"{asked} is a directory; name a file in it")
    if not target.parent.is_dir():
        raise DataError(f"{asked}: the directory {target.parent} does not exist")
    if os.path.exists(read_from) and target.exists() and os.path.samefile(read_from, target):
        raise DataError(f"{asked} is the file that is read; choose another name")
    if not os.access(target if _is_special(target) else target.parent, os.W_OK):
        raise DataError(f"{asked} cannot be written: no permission")


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[TextIO]:
    """Write a text file that replaces an older one only when it is complete.

    A file whose name ends in `.gz` is compressed. A device or pipe is written directly.

    Raises:
        DataError: The disk is full or reports an error; the older file is unchanged.
    """
    target = Path(os.path.realpath(path.expanduser()))
    is_special = _is_special(target)
    written = target if is_special else target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with written.open("wb") as raw:
            is_gzip = target.suffix == ".gz"
            stream = cast("IO[bytes]", gzip.GzipFile(fileobj=raw, mode="wb")) if is_gzip else raw
            with io.TextIOWrapper(stream, encoding="utf-8", newline="\n") as text:
                yield text
        if not is_special:
            # Synced before it is renamed: else a crash could leave the new name on an empty file.
            with written.open("rb") as whole:
                os.fsync(whole.fileno())
            written.replace(target)
    except (LaurelError, BrokenPipeError):
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        if not is_special:
            written.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    # Renaming over a device or a pipe would replace it.
    return path.exists() and not path.is_file()


@contextlib.contextmanager
def replace_directory(path: Path) -> Iterator[Path]:
    """Fill a directory that replaces an older one only when it is complete.

    Raises:
        DataError: The disk is full or reports an error; the older directory is unchanged.
    """
    identity = uuid4().hex
    fresh = path.with_name(f".tmp-{path.name}-{identity}")
    aside = path.with_name(f".old-{path.name}-{identity}")
    try:
        fresh.mkdir(parents=True)
        yield fresh
        sync_tree(fresh)
        put_in_place(fresh, path, aside)
    except BaseException as error:
        delete_directory(fresh)
        if is_disk_error(error) and not isinstance(error, LaurelError):
            raise DataError(f"{path} cannot be written: {error}") from error
        raise
    delete_directory(aside)


def put_in_place(
    fresh: Path, path: Path, aside: Path, *, on_phase: Callable[[str], object] = lambda phase: None
) -> None:
    """Rename `fresh`, whose content is on the disk, to `path`; an older one is renamed to `aside`.

    If renaming fails, the older one gets its name back. The phases are `renamed-old`, if there is
    an older one, and `renamed`.
    """
    had_older = os.path.lexists(path)
    if had_older:
        path.rename(aside)
    try:
        if had_older:
            on_phase("renamed-old")
        fresh.rename(path)
    except BaseException:
        if had_older:
            aside.rename(path)
        raise
    on_phase("renamed")
    sync_directory(path.parent)


def sync_tree(directory: Path) -> None:
    """Force a directory to the disk: the contents of files, then their names, inner ones first."""
    for folder, subfolders, names in os.walk(directory):
        subfolders.sort()
        for name in sorted(names):
            with (Path(folder) / name).open("rb") as file:
                os.fsync(file.fileno())
    for folder, _, _ in os.walk(directory, topdown=False):
        sync_directory(Path(folder))


def sync_directory(directory: Path) -> None:
    """Fsync a directory, so that the names in it survive a power failure.

    The contents of its files are not synced.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no such operation on a folder, and say so in this way.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def delete_directory(directory: Path) -> None:
    """Delete a directory; log the entries that cannot be deleted."""
    for pause in (0.1, 1.0, None):
        try:
            shutil.rmtree(directory)
        except OSError as error:
            if not os.path.lexists(directory):
                return
            # Another rank, a moment behind, may still write or rename files there.
            if pause is None or error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                _log.warning("'%s' could not be deleted whole: %s", directory, error)
                return
            time.sleep(pause)
        else:
            return


def is_disk_error(error: BaseException) -> bool:
    """Report whether an error of any library means that a disk is full or failing."""
    return isinstance(error, OSError) or _RUST_OS_ERROR.search(str(error)) is not None
