"""Control groups: found, tried, limiting all programs of a sandbox together, and gone with it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from laurel.extensions.code.sandbox import control_group
from laurel.extensions.code.sandbox.control_group import (
    ControlGroup,
    GroupPlace,
    Hierarchy,
    chosen_place,
    find_place,
    group_words,
    seen_to_hold,
)
from laurel.extensions.code.sandbox.grading import grade
from laurel.extensions.code.sandbox.jobs import Limits, SandboxJob, Status
from laurel.extensions.code.sandbox.zygote_process import ZygoteProcess
from sandbox_processes import wait_until

MIB = 1 << 20
BOTH = frozenset({"memory", "pids"})


@pytest.fixture(scope="module")
def place():
    found, reason = chosen_place("auto")
    if found is None or found.controllers != BOTH:
        pytest.skip(f"control groups for memory and processes cannot be made here: {reason}")
    return found


def folders(place):
    """Groups that this process has made and not removed."""
    made = f"laurel-{os.getpid()}-*"
    return [path for one in place.hierarchies for path in one.folder.glob(made)]


def machine(root, groups, mounts):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text(mounts)
    return root


def version_2(folder, controllers, handed_on):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.controllers").write_text(controllers)
    (folder / "cgroup.subtree_control").write_text(handed_on)
    return folder


V2_MOUNT = "30 23 0:28 {base} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def test_a_delegated_scope_hands_on_both(tmp_path):
    root = machine(tmp_path, "0::/user.slice/run.scope\n", V2_MOUNT.format(base="/"))
    own = version_2(
        tmp_path / "sys/fs/cgroup/user.slice/run.scope", "cpu memory pids", "memory pids"
    )
    assert find_place(root=root) == (GroupPlace((Hierarchy(own, 2, BOTH),)), "")
    assert sorted(path.name for path in own.iterdir()) == [
        "cgroup.controllers",
        "cgroup.subtree_control",
    ], "nothing is left there"


def test_beside_the_leaf_that_this_process_is_in(tmp_path):
    root = machine(tmp_path, "0::/service/main\n", V2_MOUNT.format(base="/service"))
    mounted = tmp_path / "sys/fs/cgroup"
    version_2(mounted / "main", "memory pids", "")
    (mounted / "main/cgroup.subtree_control").unlink()  # as the kernel: EBUSY, or not ours
    version_2(mounted, "memory pids", "pids memory")
    assert find_place(root=root)[0] == GroupPlace((Hierarchy(mounted, 2, BOTH),))


def test_what_is_not_handed_on_is_asked_for(tmp_path):
    root = machine(tmp_path, "0::/\n", V2_MOUNT.format(base="/"))
    own = version_2(tmp_path / "sys/fs/cgroup", "cpu memory", "")
    place, reason = find_place(root=root)
    # A plain file keeps what was written last; the kernel would add it to what it has.
    assert (own / "cgroup.subtree_control").read_text() == "+memory"
    assert (place, reason) == (GroupPlace(()), "memory and pids not delegated to this account")


def test_a_hierarchy_for_each_controller(tmp_path):
    mounts = "".join(
        f"3{n} 31 0:3{n} / /sys/fs/cgroup/{name} rw,relatime - cgroup cgroup rw,{name}\n"
        for n, name in enumerate(("cpu", "memory", "pids"))
    )
    root = machine(tmp_path, "8:pids:/\n4:memory:/a/b\n1:cpu:/\n", mounts)
    memory, pids = tmp_path / "sys/fs/cgroup/memory/a/b", tmp_path / "sys/fs/cgroup/pids"
    memory.mkdir(parents=True)
    assert find_place(root=root) == (
        GroupPlace((Hierarchy(memory, 1, frozenset({"memory"})),)),
        "pids not delegated to this account",
    )
    pids.mkdir()
    found, reason = find_place(root=root)
    assert (found.controllers, reason) == (BOTH, "")
    assert found.sentence() == "memory and pids (version 1)"


def test_a_machine_without_any(tmp_path):
    assert find_place(root=tmp_path)[0].controllers == frozenset()


def test_a_directory_that_limits_nothing_is_found_out(tmp_path):
    given = version_2(tmp_path / "mine", "memory pids", "memory pids")
    found, reason = find_place(str(given))
    assert (found.controllers, reason) == (BOTH, "")
    held, reason = seen_to_hold(found)
    assert held.controllers == frozenset()
    assert "memory does not hold: [Errno 2]" in reason
    assert "pids does not hold: [Errno 2]" in reason
    with pytest.raises(Exception, match=r"(?s)sandbox\.cgroup=.*mine: memory does.*Delegate=yes"):
        chosen_place(str(given))
    with pytest.raises(Exception, match=r"gives no groups with memory or pids to this account"):
        chosen_place(str(tmp_path / "nothing"))


def test_switched_off():
    assert group_words(*chosen_place("off")) == "no: it is switched off"


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """A directory in which a new one has the files that the kernel would put there."""
    made = Path.mkdir

    def mkdir(self, *args, **options):
        made(self)
        for name in ("cgroup.procs", "memory.max", "memory.swap.max", "pids.max", "cgroup.kill"):
            (self / name).touch()
        (self / "memory.events").write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    return tmp_path


def test_what_version_2_is_told(pretended, monkeypatch):
    group = ControlGroup(GroupPlace((Hierarchy(pretended, 2, BOTH),)))
    (folder,) = pretended.iterdir()
    group.allow(Limits(mem_mb=512, disk_mb=32, threads=60))
    group.take(1234)
    told = {path.name: path.read_text() for path in folder.iterdir()}
    # The zygote's 128 MB, and two programs of 512 + 32 each; 16 processes, and two of 60 threads
    # with four processes around each.
    assert told["memory.max"] == str((128 + 2 * 544) * MIB)
    assert (told["memory.swap.max"], told["pids.max"]) == ("0", str(16 + 2 * 64))
    assert told["cgroup.procs"] == "1234"
    assert group.num_killed() == 3
    group.allow(Limits(mem_mb=64))
    assert (folder / "memory.max").read_text() == told["memory.max"], "it never shrinks"
    group.allow(Limits(mem_mb=1024))
    assert (folder / "memory.max").read_text() == str((128 + 2 * 1056) * MIB)

    def rmdir(self):
        assert (self / "cgroup.kill").read_text() == "1"
        for path in self.iterdir():
            path.unlink()
        os.rmdir(self)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    group.end()
    group.end()
    assert not list(pretended.iterdir())


def test_the_kill_of_version_2_is_the_kernels():
    unified = Path("/sys/fs/cgroup/unified")
    here = GroupPlace((Hierarchy(unified if unified.exists() else unified.parent, 2, frozenset()),))
    try:
        group = ControlGroup(here)
    except OSError as error:
        pytest.skip(f"no group of version 2 can be made here: {error}")
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as process:
        try:
            group.take(process.pid)
            group.end()
            assert process.wait(30) == -signal.SIGKILL
        finally:
            process.kill()
    assert not folders(here)


def test_all_of_a_sandbox_is_in_its_group_and_the_group_ends_with_it(place):
    with closing(ZygoteProcess(frozenset(), place=place)) as zygote:
        job = SandboxJob(code="print(1)")
        assert grade(job, zygote, tier="0", attempt=1).status is Status.OK
        made = folders(place)
        assert len(made) == len(place.hierarchies)
        for folder in made:

            def inside(folder=folder):
                return {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}

            assert zygote.pid in inside()
            wait_until(lambda inside=inside: len(inside()) > 1)  # monitors that wait for a program
        zygote.discard()
        assert not folders(place)
        assert grade(job, zygote, tier="0", attempt=1).status is Status.OK
        assert len(folders(place)) == len(place.hierarchies), "the next one has another"
    assert not folders(place)


def test_a_program_that_the_kernel_ended_for_memory_is_said_to_be(place, monkeypatch):
    """Its own limit of address space would let it go on."""
    monkeypatch.setattr(control_group, "_ZYGOTE_MB", 96)
    monkeypatch.setattr(control_group, "_AT_A_TIME", 0)
    zygote = ZygoteProcess(frozenset(), place=place)
    hungry = "x = bytearray(400 << 20)\nx[::4096] = bytes([1]) * len(x[::4096])\nprint('had it')"
    limits = Limits(mem_mb=2048, cpu_s=30, wall_s=60)
    try:
        zygote.start()
        first = zygote.pid
        result = grade(SandboxJob(code=hungry, limits=limits), zygote, tier="0", attempt=1)
        assert (result.status, result.stdout) == (Status.MEMORY_LIMIT, "")
        killed = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
        result = grade(SandboxJob(code=killed, limits=limits), zygote, tier="0", attempt=1)
        assert result.status is Status.KILLED, "that one was not the kernel's"
        modest = grade(SandboxJob(code="print(1)", limits=limits), zygote, tier="0", attempt=1)
        assert (modest.status, zygote.pid) == (Status.OK, first)
    finally:
        zygote.close()


def test_processes_are_counted_over_all_programs(place, monkeypatch):
    monkeypatch.setattr(control_group, "_AT_A_TIME", 0)
    zygote = ZygoteProcess(frozenset(), place=place)
    code = (
        "import threading, time\nstarted = 0\ntry:\n    for _ in range(40):\n"
        "        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()\n"
        "        started += 1\nexcept RuntimeError:\n    print(started < 16)"
    )
    try:
        result = grade(SandboxJob(code=code), zygote, tier="0", attempt=1)
        assert (result.status, result.stdout) == (Status.OK, "True\n")
    finally:
        zygote.close()


def test_what_is_left_in_a_group_ends_with_it(place):
    group = ControlGroup(place)
    deaf = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-S", "-c", deaf]) as process:
        try:
            group.take(process.pid)
            group.end()
            assert process.wait(30) == -signal.SIGKILL
        finally:
            process.kill()
    assert not folders(place)


def test_groups_of_processes_that_were_killed_are_removed(place):
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        process.wait()
    folder = place.hierarchies[0].folder
    old, young = (folder / f"laurel-{process.pid}-{n:08x}" for n in (1, 2))
    others = folder / "laurel-not-ours"
    for path in (old, young, others):
        path.mkdir()
    try:
        long_ago = time.time() - 3600
        os.utime(old, (long_ago, long_ago))
        os.utime(others, (long_ago, long_ago))
        ControlGroup(place).end()
        assert (old.exists(), young.exists(), others.exists()) == (False, True, True)
    finally:
        for path in (old, young, others):
            if path.exists():
                path.rmdir()
