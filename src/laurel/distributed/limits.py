"""What this process may use of its machine: cores and memory, by the limits of its container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_NO_LIMIT = 2**60
"""From so many bytes on, version 1 of control groups means none."""


def available_cores() -> int:
    """Cores that this process may use: of its affinity, no more than its container's quota allows.

    Threads beyond the quota would not compute more: the kernel stops all of them in turns.
    """
    cores = _affine_cores()
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(*, root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the control groups of this process allow; None: no limit.

    Args:
        root: Where `proc` and `sys` are.
    """
    found: list[float] = []
    for folder, version in _groups("cpu", root):
        with suppress(OSError, ValueError):
            if version == 2:
                quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
                period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
            if quota not in ("max", "-1"):
                found.append(int(quota) / int(period))
    return min(found, default=None)


def memory_limit(*, root: Path = Path("/")) -> int | None:
    """Bytes that the control groups of this process allow it; None: no limit.

    Args:
        root: Where `proc` and `sys` are.
    """
    found: list[int] = []
    for folder, version in _groups("memory", root):
        with suppress(OSError, ValueError):
            name = "memory.max" if version == 2 else "memory.limit_in_bytes"
            limit = (folder / name).read_text(encoding="ascii").strip()
            if limit != "max" and int(limit) < _NO_LIMIT:
                found.append(int(limit))
    return min(found, default=None)


def _affine_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """The groups of this process under a controller, with those around them; 1 or 2: the version.

    A container may see its group under the host's name while its own tree begins at that group: the
    folder is not there then, and what is around it, the top at last, is.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    top = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            tree, version = top, 2
        elif controller in controllers.split(","):
            trees = (top / controller, top / controllers)
            tree = next((one for one in trees if one.is_dir()), trees[0])
            version = 1
        else:
            continue
        folder = tree / path.lstrip("/")
        yield folder, version
        while folder != tree:
            folder = folder.parent
            yield folder, version
