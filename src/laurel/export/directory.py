"""A directory of results that is there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from laurel.errors import ConfigError, DataError, LaurelError, key_of, setting_of
from laurel.models.checkpoint.manifest import sync_directory
from laurel.models.checkpoint.store import delete, is_disk_error

MARK = "config.json"
"""What a directory that may be overwritten holds: that of a model does."""


def check_target(path: Path, *, overwrite: bool, read_from: str) -> Path:
    """Refuse a directory that could not be written, before any work is done.

    Args:
        path: What was asked for.
        overwrite: Whether a model that is there may be replaced.
        read_from: The directory or name that is read.

    Returns:
        The path, links followed.

    Raises:
        ConfigError: Something is there, or it would take the place of what is read.
        DataError: It cannot be made there.
    """
    asked = setting_of("--output", path)
    target = Path(os.path.realpath(path.expanduser()))
    source = Path(os.path.realpath(Path(read_from).expanduser()))
    if source.is_dir() and (target == source or target in source.parents):
        raise ConfigError(f"{asked} is, or holds, the model that is read ({source}); name another")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise ConfigError(
                f"{asked} is there and not empty; name another directory, or add "
                f"{key_of('--overwrite')} to replace it"
            )
        if not (target / MARK).is_file():
            raise ConfigError(
                f"{asked} holds no model ({MARK}), so {key_of('--overwrite')} does not delete "
                "it; name "
                "another directory, or delete it yourself"
            )
    elif target.exists() and not target.is_dir():
        raise ConfigError(f"{asked} is a file; name a directory")
    there = target.parent
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise DataError(f"{asked} cannot be made: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise DataError(f"{asked} cannot be written: no permission in {there}")
    return target


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """An empty directory that takes its place, or that of an older one, only when all is well.

    Raises:
        DataError: The disk is full or refuses; what was there before is as it was.
    """
    identity = uuid4().hex
    fresh = target.with_name(f".tmp-{target.name}-{identity}")
    aside = target.with_name(f".old-{target.name}-{identity}")
    try:
        fresh.mkdir(parents=True)
        yield fresh
        _sync(fresh)
        if target.exists():
            target.rename(aside)
        try:
            fresh.rename(target)
        except BaseException:
            if aside.exists():
                aside.rename(target)
            raise
        sync_directory(target.parent)
    except BaseException as error:
        delete(fresh)
        if is_disk_error(error) and not isinstance(error, LaurelError):
            raise DataError(f"{target} cannot be written: {error}") from error
        raise
    delete(aside)


def _sync(directory: Path) -> None:
    """Force all that lies in a directory to the disk."""
    for folder, _, names in os.walk(directory):
        for name in names:
            with (Path(folder) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(folder))
