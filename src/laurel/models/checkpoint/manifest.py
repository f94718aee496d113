"""Reads, writes and checks the manifest of a checkpoint directory: its files, sizes and hashes.

`MANIFEST.json` is the last file written into a directory, so a directory with a manifest was
complete; sizes and hashes show whether it still is. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import laurel
from laurel.errors import CheckpointError
from laurel.observe.files import sync_directory, sync_tree

MANIFEST_NAME = "MANIFEST.json"
INFO_NAME = "training_info.json"
STEP_NAME = re.compile(r"step_(0|[1-9][0-9]*)")
FORMAT = "laurel-checkpoint"
FORMAT_VERSION = 1

_SHOWN_PROBLEMS = 5
_VERSIONED_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """The size and hash of a file when it was saved."""

    size: int
    """The size in bytes."""
    sha256: str
    """The SHA-256 hash in hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files of a checkpoint directory, and the metric that ranks it among other checkpoints."""

    step: int
    metric_name: str | None
    """The name of the metric that ranks checkpoints; only metrics of one name are compared."""
    metric: float | None
    """The value of the metric, which is finite; None if the run had none."""
    created_by: Mapping[str, str]
    """The versions of the software that wrote the checkpoint, by package."""
    files: Mapping[str, FileRecord]
    """The files by path relative to the directory, with forward slashes, without the manifest."""

    @property
    def num_bytes(self) -> int:
        """The total size of all files."""
        return sum(record.size for record in self.files.values())


@cache
def software_versions() -> dict[str, str]:
    """Collect the versions of the software that writes checkpoints, for `Manifest.created_by`."""
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
    """Fsync every file and folder below `directory`; return the size and hash of each file.

    Args:
        on_file: Called with the relative path of each file after its hash is computed.

    Raises:
        CheckpointError: An entry is neither a file nor a folder.
        OSError: The disk reports an error.
    """
    records = {}
    for name in list_files(directory):
        with (directory / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            records[name] = FileRecord(size=file.tell(), sha256=digest)
        on_file(name)
    sync_tree(directory)
    return records


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write and fsync the manifest; call this last, after `seal_files`."""
    with (directory / MANIFEST_NAME).open("w", encoding="ascii", newline="\n") as file:
        file.write(_render(manifest))
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a directory, and check that it is unaltered.

    Raises:
        CheckpointError: The manifest is missing, unreadable, altered, or of a format that this
            version cannot read. The message does not name the directory; the caller adds it.
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
        manifest = Manifest(
            step=fields["step"],
            metric_name=fields["metric_name"],
            metric=fields["metric"],
            created_by=dict(fields["created_by"]),
            files={name: FileRecord(**record) for name, record in fields["files"].items()},
        )
        unaltered = _render(manifest).encode("ascii") == content
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{MANIFEST_NAME} is damaged ({type(error).__name__}: {error})"
        ) from None
    if not unaltered:
        raise CheckpointError(f"{MANIFEST_NAME} has been altered since it was written")
    return manifest


def find_problems(directory: Path, manifest: Manifest, *, hashes: bool) -> list[str]:
    """List the differences between a directory and its manifest, one line per file.

    Missing files come first, then files that the manifest does not list, then changed files. A long
    list is cut short. Sizes are always compared. Contents are compared only with `hashes`, which
    reads all files.
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
    """Yield relative paths of the regular files below `directory`, sorted within each folder.

    Raises:
        CheckpointError: An entry is a link, a socket or the like, which no manifest can cover.
        OSError: A folder cannot be read.
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


def _raise(error: OSError) -> None:
    raise error


def verify_directory(directory: Path, *, hashes: bool) -> Manifest:
    """Check a checkpoint directory against its manifest, as `store.verify` does.

    The error message names no earlier checkpoint.

    Raises:
        CheckpointError: The directory is incomplete, altered or no checkpoint.
    """
    try:
        os.scandir(directory).close()
    except OSError as error:
        raise CheckpointError(f"'{directory}' cannot be used: {error.strerror}.") from error
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        raise CheckpointError(f"'{directory}' cannot be used: {error}.") from error
    problems = find_problems(directory, manifest, hashes=hashes)
    match = STEP_NAME.fullmatch(directory.name)
    if match and int(match[1]) != manifest.step:
        problems.insert(0, f"{MANIFEST_NAME} is of step {manifest.step}, not of step {match[1]}")
    if problems:
        raise CheckpointError(f"'{directory}' cannot be used: {'; '.join(problems)}.")
    return manifest


def is_whole(directory: Path) -> bool:
    """Report whether every file of a checkpoint has the size and hash of its manifest."""
    try:
        verify_directory(directory, hashes=True)
    except CheckpointError:
        return False
    return True
