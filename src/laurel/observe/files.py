"""A file of results that is there whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO, cast

from laurel.errors import DataError, LaurelError, setting_of


def check_output(path: Path, *, read_from: str) -> None:
    """Refuse an output file that could not be written, before any work is done.

    Raises:
        DataError: Its directory is missing or closed to us, it is a directory, or it is the file
            that is read.
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
    """Write a text file that takes its place, or that of an older one, only when all is written.

    A name that ends in `.gz` is compressed. A device or pipe is written as it comes.

    Raises:
        DataError: The disk is full or refuses; what was there before is as it was.
    """
    target = Path(os.path.realpath(path.expanduser()))
    is_special = _is_special(target)
    written = target if is_special else target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with written.open("wb") as raw, _text(raw, compress=target.suffix == ".gz") as text:
            yield text
        if not is_special:
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


def _text(raw: IO[bytes], *, compress: bool) -> TextIO:
    stream = cast("IO[bytes]", gzip.GzipFile(fileobj=raw, mode="wb")) if compress else raw
    return io.TextIOWrapper(stream, encoding="utf-8", newline="\n")


def _is_special(path: Path) -> bool:
    """Whether the path is there and is no plain file: renaming over a device would replace it."""
    return path.exists() and not path.is_file()
