"""The manifest of a checkpoint directory: which files it holds, byte for byte, and since when.

`MANIFEST.json` is the last file written into a directory, so one that has it is complete; sizes
and hashes tell whether it still is. Torch is not needed to read or check it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import laurel
from laurel.errors import CheckpointError

MANIFEST_NAME = "MANIFEST.json"
FORMAT = "laurel-checkpoint"
FORMAT_VERSION = 1

_SHOWN_PROBLEMS = 5
_VERSIONED_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a file was when it was saved."""

    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint directory holds and how it ranks among its neighbours."""

    step: int
    metric_name: str | None
    """Which number decides what is best; ranks are compared only where the names agree."""
    metric: float | None
    """Its value, always finite; None where the run had none."""
    created_by: Mapping[str, str]
    """Versions of the software that wrote it, by package."""
    files: Mapping[str, FileRecord]
    """By path relative to the directory, with forward slashes. The manifest is not in it."""

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(record.size for record in self.files.values())


@cache
def software_versions() -> dict[str, str]:
    """What writes checkpoints here: see `Manifest.created_by`."""
    found = {"laurel": laurel.__version__, "python": platform.python_version()}
    for package in _VERSIONED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def seal_files(
    directory: Path, *, on_file: Callable[[str], None] = lambda name: None
) -> dict[str, FileRecord]:
    """Force every file and folder below `directory` to the disk; return what the files are.

    Raises:
        CheckpointError: something in it is neither a file nor a folder.
        OSError: the disk refuses.
    """
    records = {}
    for name in list_files(directory):
        with (directory / name).open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            records[name] = FileRecord(size=file.tell(), sha256=digest)
        on_file(name)
    for folder, _, _ in os.walk(directory, topdown=False):
        sync_directory(Path(folder))
    return records


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, durably. Call it last, after `seal_files`."""
    with (directory / MANIFEST_NAME).open("w", encoding="ascii", newline="\n") as file:
        file.write(_render(manifest))
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def read_manifest(directory: Path) -> Manifest:
    """The manifest, itself unaltered.

    Raises:
        CheckpointError: it is missing, unreadable, altered, or of a format this version cannot
            read. The message has no directory in it: the caller says which.
    """
    try:
        content = (directory / MANIFEST_NAME).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"it has no {MANIFEST_NAME}, so it was not written by Laurel or never finished"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST_NAME} cannot be read ({error.strerror})") from error
    try:
        fields = json.loads(content)
        is_ours = fields["format"] == FORMAT
        version = fields["format_version"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{MANIFEST_NAME} is damaged or not Laurel's ({type(error).__name__}: {error})"
        ) from None
    if not is_ours:
        raise CheckpointError(f"{MANIFEST_NAME} is not Laurel's: its 'format' is not '{FORMAT}'")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{MANIFEST_NAME} has format version {version!r}, and this version of Laurel reads "
            f"{FORMAT_VERSION}; load it with the version that wrote it: {fields.get('created_by')}"
        )
    try:
        manifest = _parse(fields)
        unaltered = _render(manifest).encode("ascii") == content
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{MANIFEST_NAME} is damaged ({type(error).__name__}: {error})"
        ) from None
    if not unaltered:
        raise CheckpointError(f"{MANIFEST_NAME} has been altered since it was written")
    return manifest


def find_problems(directory: Path, manifest: Manifest, *, hashes: bool) -> list[str]:
    """What differs between the directory and its manifest: one line per bad file, worst first.

    Sizes are always compared; contents (a full read) only with `hashes`.
    """
    try:
        present = set(list_files(directory)) - {MANIFEST_NAME}
        problems = [f"{name} is missing" for name in sorted(manifest.files.keys() - present)]
        problems += [
            f"{name} is not in {MANIFEST_NAME} (move it elsewhere)"
            for name in sorted(present - manifest.files.keys())
        ]
        for name in sorted(present & manifest.files.keys()):
            problem = _compare(directory / name, manifest.files[name], hashes=hashes)
            if problem is not None:
                problems.append(f"{name} {problem}")
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [f"{error.filename or directory} cannot be read ({error.strerror})"]
    hidden = len(problems) - _SHOWN_PROBLEMS
    return problems if hidden <= 0 else [*problems[:_SHOWN_PROBLEMS], f"and {hidden} more"]


def list_files(directory: Path) -> Iterator[str]:
    """Relative paths of the regular files below `directory`, sorted within each folder.

    Raises:
        CheckpointError: there is a link, socket or the like, which a manifest cannot vouch for.
        OSError: a folder cannot be read.
    """
    for folder, subfolders, names in os.walk(directory, onerror=_raise):
        subfolders.sort()
        links = [name for name in subfolders if Path(folder, name).is_symlink()]
        for name in sorted(names) + links:
            path = Path(folder, name)
            relative = path.relative_to(directory).as_posix()
            if not stat.S_ISREG(path.lstat().st_mode):
                raise CheckpointError(f"{relative} is not a regular file (links are refused too)")
            yield relative


def sync_directory(directory: Path) -> None:
    """Force the names in a folder (not the files they name) to the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no such operation on a folder, and say so in this way.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def _compare(path: Path, record: FileRecord, *, hashes: bool) -> str | None:
    size = path.stat().st_size
    if size != record.size:
        return f"has {size} bytes where {MANIFEST_NAME} says {record.size}"
    if not hashes:
        return None
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return None if digest == record.sha256 else "has been altered (its SHA-256 differs)"


def _render(manifest: Manifest) -> str:
    fields = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(manifest)}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode("ascii")).hexdigest()
    return json.dumps({**fields, "sha256": digest}, indent=2, allow_nan=False) + "\n"


def _parse(fields: dict[str, Any]) -> Manifest:
    return Manifest(
        step=fields["step"],
        metric_name=fields["metric_name"],
        metric=fields["metric"],
        created_by=dict(fields["created_by"]),
        files={name: FileRecord(**record) for name, record in fields["files"].items()},
    )


def _raise(error: OSError) -> None:
    raise error
