"""Finding and checking the checkpoints in a directory, without a lock and without torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laurel.errors import CheckpointError
from laurel.models.manifest import MANIFEST_NAME, Manifest, find_problems, read_manifest

INFO_NAME = "training_info.json"

_STEP = re.compile(r"step_(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestCheckpoint:
    """Where a run goes on, and what was passed over on the way there."""

    path: Path | None
    """The newest whole checkpoint; None where there is none."""
    manifest: Manifest | None
    """What it holds; None exactly where `path` is."""
    skipped: tuple[str, ...]
    """Newer directories that cannot be used, newest first, each with the reason."""


def verify(path: str | os.PathLike[str], *, hashes: bool = True) -> Manifest:
    """Check a checkpoint directory against its manifest; sizes always, contents with `hashes`.

    Raises:
        CheckpointError: it is torn, altered or foreign. The message names the bad files and, where
            there is one, the newest earlier checkpoint that is whole.
    """
    directory = Path(os.path.realpath(path))
    try:
        return check_directory(directory, hashes=hashes)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_hint(directory, hashes=hashes)}") from None


def read_training_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `CheckpointStore.save` was given as `info`."""
    file = Path(path) / INFO_NAME
    try:
        info = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{file}' cannot be read: {error}") from error
    if not isinstance(info, dict):
        raise CheckpointError(f"'{file}' must hold a JSON object, not {type(info).__name__}")
    return info


def steps_to_keep(
    metrics: Mapping[int, float | None],
    *,
    keep_top_k: int | None,
    higher_is_better: bool,
    just_saved: int,
) -> set[int]:
    """Which of the steps in `metrics` stay.

    The best `keep_top_k` (ties: the newer; no metric: worse than any), the one just saved and the
    latest. At least two stay, so that a damaged one always has another behind it. Where no step
    has a metric that makes the most recent ones.
    """
    if keep_top_k is None:
        return set(metrics)
    latest_first = sorted(metrics, reverse=True)
    kept = {*best_first(metrics, higher_is_better)[:keep_top_k], *latest_first[:1]}
    if just_saved in metrics:
        kept.add(just_saved)
    return kept if len(kept) > 1 else {*kept, *latest_first[:2]}


def check_directory(directory: Path, *, hashes: bool) -> Manifest:
    """`verify` without the look at the neighbours."""
    try:
        os.scandir(directory).close()
    except OSError as error:
        raise CheckpointError(f"'{directory}' cannot be used: {error.strerror}.") from error
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        raise CheckpointError(f"'{directory}' cannot be used: {error}.") from error
    problems = find_problems(directory, manifest, hashes=hashes)
    match = _STEP.fullmatch(directory.name)
    if match and int(match[1]) != manifest.step:
        problems.insert(0, f"{MANIFEST_NAME} is of step {manifest.step}, not of step {match[1]}")
    if problems:
        raise CheckpointError(f"'{directory}' cannot be used: {'; '.join(problems)}.")
    return manifest


def is_whole(directory: Path) -> bool:
    """Whether every byte is as it was saved."""
    try:
        check_directory(directory, hashes=True)
    except CheckpointError:
        return False
    return True


def find_newest(root: Path, steps: Iterable[int], *, hashes: bool) -> NewestCheckpoint:
    """The newest of these steps that is whole."""
    skipped: list[str] = []
    for step in sorted(steps, reverse=True):
        path = root / f"step_{step}"
        try:
            manifest = check_directory(path, hashes=hashes)
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            return NewestCheckpoint(path=path, manifest=manifest, skipped=tuple(skipped))
    return NewestCheckpoint(path=None, manifest=None, skipped=tuple(skipped))


def steps_in(root: Path) -> list[int]:
    """Steps that have a directory here, in rising order; other names are passed over.

    Raises:
        CheckpointError: `root` exists and cannot be listed.
    """
    try:
        with os.scandir(root) as entries:
            found = [
                int(match[1])
                for entry in entries
                if (match := _STEP.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"'{root}' cannot be read: {error.strerror}.") from error
    return sorted(found)


def best_first(metrics: Mapping[int, float | None], higher_is_better: bool) -> list[int]:
    """The steps in order of rank: by metric, then the newer first; no metric is worse than any."""
    sign = -1.0 if higher_is_better else 1.0

    def rank(step: int) -> tuple[bool, float, int]:
        metric = metrics[step]
        return (metric is None, 0.0 if metric is None else sign * metric, -step)

    return sorted(metrics, key=rank)


def _hint(directory: Path, *, hashes: bool) -> str:
    """What could be used instead of a directory that cannot."""
    try:
        if directory.is_dir() and (inside := steps_in(directory)):
            return f" It holds checkpoints: name one of them, e.g. '{directory}/step_{inside[-1]}'."
        match = _STEP.fullmatch(directory.name)
        if match is None:
            return ""
        earlier = [step for step in steps_in(directory.parent) if step < int(match[1])]
    except OSError:
        return ""
    previous = find_newest(directory.parent, earlier, hashes=hashes).path
    return f" The newest whole checkpoint before it is '{previous}'." if previous else ""
