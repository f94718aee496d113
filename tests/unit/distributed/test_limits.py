"""The limits of a container, in both forms that the kernel has for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from laurel.distributed import limits
from laurel.distributed.limits import available_cores, cpu_quota, memory_limit


def make(root: Path, groups: str, **files: str) -> Path:
    """A root with these groups of the process and these files below `/sys/fs/cgroup`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_version_2_at_the_top_and_around(tmp_path: Path) -> None:
    files = {"cpu.max": "250000 100000", "memory.max": str(2**30)}
    root = make(tmp_path / "top", "0::/\n", **files)
    assert cpu_quota(root=root) == 2.5
    assert memory_limit(root=root) == 2**30
    inner = {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000", "a/b/memory.max": "4096"}
    root = make(tmp_path / "inner", "0::/a/b\n", **files, **inner)
    assert cpu_quota(root=root) == 1.5, "the least of the group and those around it"
    assert memory_limit(root=root) == 4096


def test_a_group_that_only_the_host_sees(tmp_path: Path) -> None:
    root = make(tmp_path, "0::/docker/0123abc\n", **{"cpu.max": "100000 100000"})
    assert cpu_quota(root=root) == 1.0


def test_version_1(tmp_path: Path) -> None:
    groups = "4:memory:/one\n2:cpu,cpuacct:/one\n1:name=systemd:/\n0::/\n"
    root = make(
        tmp_path, groups,
        **{"cpu,cpuacct/one/cpu.cfs_quota_us": "50000", "memory/one/memory.limit_in_bytes": "8192",
           "cpu,cpuacct/one/cpu.cfs_period_us": "100000",
           "cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000",
           "memory/memory.limit_in_bytes": "9223372036854771712"},
    )  # fmt: skip
    assert cpu_quota(root=root) == 0.5
    assert memory_limit(root=root) == 8192


def test_no_limit(tmp_path: Path) -> None:
    root = make(tmp_path / "none", "0::/\n", **{"cpu.max": "max 100000", "memory.max": "max"})
    assert cpu_quota(root=root) is memory_limit(root=root) is None
    assert cpu_quota(root=tmp_path) is memory_limit(root=tmp_path) is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (2.5, 2), (0.5, 1), (64.0, 8)])
def test_threads_are_no_more_than_the_quota_pays_for(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int
) -> None:
    monkeypatch.setattr(limits, "_affine_cores", lambda: 8)
    monkeypatch.setattr(limits, "cpu_quota", lambda: quota)
    assert available_cores() == cores
