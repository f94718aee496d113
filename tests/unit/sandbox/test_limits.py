"""The limits of a container, in both forms that the kernel has for them."""

import pytest

from laurel.sandbox import limits
from laurel.sandbox.limits import available_cores, available_memory, cpu_quota, memory_limit


def make(root, groups, **files):
    """A root with these groups of the process and these files below `/sys/fs/cgroup`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_version_2_at_the_top_and_around(tmp_path):
    files = {"cpu.max": "250000 100000", "memory.max": str(2**30)}
    root = make(tmp_path / "top", "0::/\n", **files)
    assert cpu_quota(root=root) == 2.5
    assert memory_limit(root=root) == 2**30
    inner = {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000", "a/b/memory.max": "4096"}
    root = make(tmp_path / "inner", "0::/a/b\n", **files, **inner)
    assert cpu_quota(root=root) == 1.5, "the least of the group and those around it"
    assert memory_limit(root=root) == 4096


def test_a_group_that_only_the_host_sees(tmp_path):
    root = make(tmp_path, "0::/docker/0123abc\n", **{"cpu.max": "100000 100000"})
    assert cpu_quota(root=root) == 1.0


def test_version_1(tmp_path):
    groups = "4:memory:/one\n2:cpu,cpuacct:/one\n1:name=systemd:/\n0::/\n"
    root = make(
        tmp_path,
        groups,
        **{
            "cpu,cpuacct/one/cpu.cfs_quota_us": "50000",
            "memory/one/memory.limit_in_bytes": "8192",
            "cpu,cpuacct/one/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert cpu_quota(root=root) == 0.5
    assert memory_limit(root=root) == 8192


def with_memory(root, kilobytes):
    """The same root, of a machine that has so much left."""
    text = f"MemTotal: 99999999 kB\nMemAvailable:   {kilobytes} kB\nHugePages_Total: 0\n"
    (root / "proc/meminfo").write_text(text)
    return root


def test_memory_left_is_the_least_of_the_machine_and_the_groups(tmp_path):
    files = {
        "a/memory.max": "10000",
        "a/memory.current": "8500",
        "a/b/memory.max": "4096",
        "a/b/memory.current": "1000",
        "memory.current": "99999999",
    }
    root = with_memory(make(tmp_path / "groups", "0::/a/b\n", **files), 64)
    assert available_memory(root=root) == 1500, "the group around this one has less left"
    assert available_memory(root=with_memory(root, 1)) == 1024, "the machine has less left"
    (root / "sys/fs/cgroup/a/memory.current").write_text("10001\n")
    assert available_memory(root=root) == 0


def test_cached_files_that_the_kernel_would_give_up_are_no_use_of_memory(tmp_path):
    files = {
        "memory.max": "10000",
        "memory.current": "9900",
        "memory.stat": "anon 900\nfile 9000\ninactive_file 8000",
    }
    root = with_memory(make(tmp_path / "v2", "0::/\n", **files), 64)
    assert available_memory(root=root) == 10000 - 1900
    files = {
        "memory/one/memory.limit_in_bytes": "10000",
        "memory/one/memory.usage_in_bytes": "9900",
        "memory/one/memory.stat": "inactive_file 1\ntotal_inactive_file 8000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "99999999",
    }
    root = with_memory(make(tmp_path / "v1", "4:memory:/one\n", **files), 64)
    assert available_memory(root=root) == 10000 - 1900


def test_memory_left_without_limits_or_without_an_answer(tmp_path):
    root = make(tmp_path / "none", "0::/\n", **{"memory.max": "max", "memory.current": "5"})
    assert available_memory(root=root) is None
    assert available_memory(root=with_memory(root, 3)) == 3072
    root = make(tmp_path / "limit", "0::/\n", **{"memory.max": "9000"})
    assert available_memory(root=with_memory(root, 3)) == 3072, "how much is used is not known"
    assert available_memory(root=tmp_path / "nothing") is None


def test_no_limit(tmp_path):
    root = make(tmp_path / "none", "0::/\n", **{"cpu.max": "max 100000", "memory.max": "max"})
    assert cpu_quota(root=root) is memory_limit(root=root) is None
    assert cpu_quota(root=tmp_path) is memory_limit(root=tmp_path) is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (2.5, 2), (0.5, 1), (64.0, 8)])
def test_threads_are_no_more_than_the_quota_pays_for(monkeypatch, quota, cores):
    monkeypatch.setattr(limits, "_affine_cores", lambda: 8)
    monkeypatch.setattr(limits, "cpu_quota", lambda: quota)
    assert available_cores() == cores
