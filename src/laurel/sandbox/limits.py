"""Finds the cores and the memory that this process may use within the limits of its container."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_NO_LIMIT = 2**60  # so many bytes or more mean no limit in version 1 of control groups


def available_cores() -> int:
    """Return how many cores this process may use, by its affinity and its container's quota."""
    cores = _affine_cores()
    # Threads beyond the quota would not compute more: the kernel stops all of them in turns.
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def has_no_gpu(*, root: Path = Path("/")) -> bool:
    """Report, without importing torch, whether this machine certainly has no GPU for torch.

    False does not guarantee a GPU: a driver may be missing, or torch may be built without CUDA.

    Args:
        root: The directory that contains `dev`.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return True
    # NVIDIA's driver; the driver of WSL; Tegra's; AMD's
    known = ("nvidia[0-9]*", "dxg", "nvhost-gpu", "nvgpu", "kfd")
    return sys.platform == "linux" and not any(any((root / "dev").glob(name)) for name in known)


def cpu_quota(*, root: Path = Path("/")) -> float | None:
    """Return how many cores' worth of CPU time this process's control groups allow; None: no limit.

    Args:
        root: The directory that contains `proc` and `sys`.
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
    """Return how many bytes this process's control groups allow; None: no limit.

    Args:
        root: The directory that contains `proc` and `sys`.
    """
    found: list[int] = []
    for folder, version in _groups("memory", root):
        with suppress(OSError, ValueError):
            limit = _group_limit(folder, version)
            if limit is not None:
                found.append(limit)
    return min(found, default=None)


def available_memory(*, root: Path = Path("/")) -> int | None:
    """Return how many bytes this process can use without swapping or being killed; None: unknown.

    It is the minimum of the bytes that the machine and each control group with a limit have left.

    Args:
        root: The directory that contains `proc` and `sys`.
    """
    found: list[int] = []
    with suppress(OSError, ValueError):
        machine = _numbers(root / "proc/meminfo").get("MemAvailable:")
        if machine is not None:
            found.append(machine << 10)
    for folder, version in _groups("memory", root):
        with suppress(OSError, ValueError):
            limit = _group_limit(folder, version)
            if limit is not None:
                found.append(max(0, limit - _group_use(folder, version)))
    return min(found, default=None)


def _group_limit(folder: Path, version: int) -> int | None:
    name = "memory.max" if version == 2 else "memory.limit_in_bytes"
    limit = (folder / name).read_text(encoding="ascii").strip()
    return int(limit) if limit != "max" and int(limit) < _NO_LIMIT else None


def _group_use(folder: Path, version: int) -> int:
    """Return the bytes that a group uses, without cached files that the kernel would drop first.

    With these, a group that has read much data would always look full. `MemAvailable` excludes them
    too.
    """
    name = "memory.current" if version == 2 else "memory.usage_in_bytes"
    use = int((folder / name).read_text(encoding="ascii"))
    with suppress(OSError, ValueError):  # no memory.stat: everything counts
        # In version 1 only the totals include the groups inside, as the use does.
        cached = "inactive_file" if version == 2 else "total_inactive_file"
        use -= _numbers(folder / "memory.stat").get(cached, 0)
    return max(0, use)


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers by name of a file with lines such as `name 12` or `name: 12 kB`."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def _affine_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Yield this process's control group and its ancestors under a controller, with the version.

    In a container the path may be the host's: then the folder of the group does not exist, but
    those of its ancestors, up to the top, do.
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
