"""Checkpoints under real kills, real full disks and real rivals: each writer is a process."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import checkpoint_writer
import runs
from checkpoint_writer import NAMES, content, save_behind, writer
from laurel.errors import CheckpointError
from laurel.models.checkpoint.manifest import INFO_NAME
from laurel.models.checkpoint.store import CheckpointStore, verify
from saved_steps import save_step

PROGRAM = Path(checkpoint_writer.__file__)


@contextlib.contextmanager
def running(root, *, prefix=(), **job):
    """The process of a writer; killed, if it is still there, at the end."""
    process = subprocess.Popen(
        [*prefix, sys.executable, str(PROGRAM), json.dumps({"root": str(root), **job})],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def run(root, *, prefix=(), **job):
    """The exit status and the output of a writer that ends by itself."""
    if prefix:
        with running(root, prefix=prefix, **job) as process:
            output, _ = process.communicate(timeout=180)
        return process.returncode, output
    done = runs.run([json.dumps({"root": str(root), **job})], program=[str(PROGRAM)])
    return done.returncode, done.stdout + done.stderr


def write_here(root, **job):
    """The same in this process."""
    checkpoint_writer.main({"root": str(root), **job})


def wait_for(process, word):
    for line in process.stdout:
        if line.startswith(word):
            return line.split()[1]
    raise AssertionError(f"the writer ended before it said '{word}'")


def assert_whole(path, step, generation, size):
    verify(path)
    for name in NAMES:
        assert (path / name).read_bytes() == content(name, step, generation, size)
    assert json.loads((path / INFO_NAME).read_text()) == {"total_steps": step}


def assert_settled(root):
    """A new writer gets the lock, finds every step whole, and nothing left over."""
    with CheckpointStore(root) as store:
        assert store.newest_whole().skipped == ()
        for step in store.steps():
            verify(store.path_of(step))
        assert [path.name for path in root.iterdir() if path.name.startswith(".")] == [".lock"]
        return store.steps()


BEFORE = [
    "begin",
    "written",
    "file:model.safetensors",
    "file:policy/tokenizer.json",
    "fsynced",
    "manifest",
]


@pytest.mark.slow_parameters(*BEFORE[0:1], *BEFORE[2:], "best", "prune:step_1", "pruned")
@pytest.mark.parametrize(
    ("phase", "steps_after", "in_background"),
    [(phase, [1, 2], False) for phase in BEFORE]
    + [(phase, [1, 2, 3], False) for phase in ("renamed", "best", "prune:step_1")]
    + [("deleting:step_1", [2, 3], False), ("pruned", [2, 3], False)]
    + [("written", [1, 2], True), ("manifest", [1, 2], True), ("renamed", [1, 2, 3], True)],
)
def test_a_kill_in_a_save_leaves_the_old_ones_or_the_new_one_too(
    tmp_path, phase, steps_after, in_background
):
    with CheckpointStore(tmp_path) as store:
        for step in (1, 2):
            save_step(store, step, writer(step, 1, 1000), metric=-step, info={"total_steps": step})
    job = {"first_step": 3, "steps": [3], "keep_top_k": 1, "in_background": in_background}
    status, _ = run(tmp_path, **job, die_at=phase)
    assert status == -signal.SIGKILL

    newest = CheckpointStore(tmp_path).newest_whole()  # as a reader sees it at once
    assert newest.skipped == ()
    assert_whole(newest.path, steps_after[-1], 1, 1000)
    assert assert_settled(tmp_path) == steps_after
    write_here(tmp_path, **job)
    assert assert_settled(tmp_path) == [2, 3]


@pytest.mark.parametrize(
    ("phase", "generation", "in_background"),
    [(phase, 1, False) for phase in BEFORE]
    + [("renamed-old", 2, False), ("renamed", 2, False), ("best", 2, False)]
    + [("manifest", 1, True), ("renamed-old", 2, True)],
)
def test_a_kill_in_a_replacement_leaves_the_old_or_the_new(
    tmp_path, phase, generation, in_background
):
    with CheckpointStore(tmp_path) as store:
        save_step(store, 5, writer(5, 1, 1000), metric=0.0, info={"total_steps": 5})
    job = {"first_step": 5, "steps": [5], "generation": 2, "in_background": in_background}
    status, _ = run(tmp_path, **job, die_at=phase)
    assert status == -signal.SIGKILL

    assert CheckpointStore(tmp_path).newest_whole().skipped == ()
    assert assert_settled(tmp_path) == [5]
    assert_whole(tmp_path / "step_5", 5, generation, 1000)


@pytest.mark.slow
def test_kills_at_random_moments_never_cost_a_finished_checkpoint(tmp_path):
    moments = random.Random(7)
    size, saved, in_mid_save = 400_000, -1, 0
    for number in range(8):
        job = {"size": size, "keep_top_k": 2, "in_background": number % 2 == 1}
        with running(tmp_path, first_step=saved + 1, endless=True, **job) as process:
            first = wait_for(process, "saved")
            time.sleep(moments.uniform(0.0, 0.12))
            process.kill()
            # The kill may cut the last line short.
            lines = [line.split() for line in process.stdout if line.endswith("\n")]
        finished = [int(number) for word, number in lines if word == "saved"]
        saved = max([int(first), *finished])
        newest = CheckpointStore(tmp_path).newest_whole()
        assert newest.skipped == ()
        in_mid_save += any(path.name.startswith((".tmp", ".del")) for path in tmp_path.iterdir())
        # The save that was cut off may have been complete already, but no older one is newest.
        assert newest.path in (tmp_path / f"step_{saved}", tmp_path / f"step_{saved + 1}")
        saved = int(newest.path.name.removeprefix("step_"))
        assert_whole(newest.path, saved, 1, size)
    assert_settled(tmp_path)
    assert in_mid_save > 2, "the kills missed the saves, so nothing was tested"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to name descriptors")
def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path):
    root = tmp_path / "results" / "rm"  # both folders are made by the writer
    status, output = run(root, steps=[4], first_step=4, trace=True)
    assert status == 0
    lines = [line.split() for line in output.splitlines() if line.split()[0] in ("fsync", "rename")]
    done = [(what, *(os.path.relpath(path, root) for path in paths)) for what, *paths in lines]
    (temporary,) = {source for what, source, *target in done if target == ["step_4"]}
    assert done == [
        ("fsync", ".."),
        ("fsync", "../.."),
        *[
            ("fsync", f"{temporary}/{name}")
            for name in (
                "model.safetensors",
                "optimizer.safetensors",
                "training_info.json",
                "policy/tokenizer.json",
                "policy",
            )
        ],
        ("fsync", temporary),
        ("fsync", f"{temporary}/MANIFEST.json"),
        ("fsync", temporary),
        ("rename", temporary, "step_4"),
        ("fsync", "."),
        ("rename", done[-1][1], "best"),
    ]


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(disk):
    with contextlib.suppress(OSError):
        (disk / "ballast").write_bytes(bytes(4_000_000))


@pytest.mark.parametrize("in_background", [False, True])
def test_a_disk_that_is_really_full_costs_only_the_new_checkpoint(tiny_disk, in_background):
    zeros = np.zeros(2_500_000, dtype=np.uint8)
    with CheckpointStore(tiny_disk) as store:
        save = partial(save_behind if in_background else save_step, store)
        save(1, writer(1, 1, 200_000), info={"total_steps": 1})
        for write in (
            writer(2, 1, 1_500_000),
            lambda directory: save_file({"zeros": zeros}, directory / "model.safetensors"),
        ):
            with pytest.raises(CheckpointError, match="No space left on device"):
                save(2, write)
            assert_whole(tiny_disk / "step_1", 1, 1, 200_000)
            assert sorted(path.name for path in tiny_disk.iterdir()) == [".lock", "step_1"]
        fill(tiny_disk)
        with pytest.raises(CheckpointError, match="MB free and"):
            save(2, writer(2, 1, 1))
        (tiny_disk / "ballast").unlink()
        save(3, writer(3, 1, 200_000), info={"total_steps": 3})
        assert_whole(tiny_disk / "step_3", 3, 1, 200_000)


def test_a_disk_that_was_full_before_the_start_can_still_be_locked(tiny_disk):
    fill(tiny_disk)
    with CheckpointStore(tiny_disk) as store, pytest.raises(CheckpointError, match="No space"):
        save_step(store, 1, writer(1, 1, 200_000))


@pytest.mark.slow
def test_a_file_size_limit_is_an_error_of_the_disk(tmp_path):
    write_here(tmp_path, steps=[0], size=1000)
    status, output = run(tmp_path, first_step=1, steps=[1], size=50_000, largest_file=20_000)
    assert status == 2
    assert "refused the checkpoint of step 1 could not be saved" in output
    assert "File too large" in output
    assert assert_settled(tmp_path) == [0]


@pytest.fixture
def ordinary():
    """Prefix of a command, so that permissions hold for it as they do for an ordinary user."""
    if os.geteuid() != 0:
        return []
    prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    if shutil.which("setpriv") is None or subprocess.run([*prefix, "true"]).returncode:
        pytest.skip("root may write anywhere, and setpriv cannot stop it here")
    return prefix


@pytest.fixture
def frozen(tmp_path):
    """A directory in which folders may be write-protected; they are freed at the end."""
    root = tmp_path / "frozen"
    root.mkdir()
    yield root
    for folder, _, _ in os.walk(root):
        os.chmod(folder, 0o755)


def test_a_directory_that_cannot_be_written_is_refused_at_the_start(frozen, ordinary):
    frozen.chmod(0o555)
    status, output = run(frozen, prefix=ordinary, steps=[0])
    assert status == 2
    assert f"refused cannot write checkpoints to '{frozen}'" in output
    assert "Permission denied" in output


def test_a_directory_that_cannot_be_read_is_not_taken_for_an_empty_one(frozen, ordinary):
    write_here(frozen, steps=[0])
    frozen.chmod(0o300)
    program = (
        "import sys; from laurel.models.checkpoint.store import CheckpointStore;"
        "CheckpointStore(sys.argv[1]).newest_whole()"
    )
    command = [*ordinary, sys.executable, "-c", program, str(frozen)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert f"CheckpointError: '{frozen}' cannot be read: Permission denied." in done.stderr


def test_a_directory_that_becomes_read_only_refuses_the_save_only(frozen, ordinary):
    assert run(frozen, prefix=ordinary, steps=[0])[0] == 0
    status, output = run(frozen, prefix=ordinary, first_step=1, steps=[1], root_mode=0o555)
    assert status == 2
    assert "refused the checkpoint of step 1 could not be saved" in output
    frozen.chmod(0o755)
    assert_whole(frozen / "step_0", 0, 1, 1000)


def test_what_cannot_be_deleted_does_not_stop_the_run(frozen, ordinary):
    status, output = run(frozen, prefix=ordinary, steps=[0, 1, 2, 3], frozen=[0], keep_top_k=1)
    assert status == 0
    assert "could not be deleted whole" in output
    assert "Permission denied" in output
    assert output.count("saved") == 4
    assert_whole(frozen / "step_3", 3, 1, 1000)
    assert CheckpointStore(frozen).steps() == [2, 3]


def test_a_file_that_cannot_be_read_is_named(frozen, ordinary):
    write_here(frozen, steps=[0])
    (frozen / "step_0/model.safetensors").chmod(0)
    program = "import sys; from laurel.models.checkpoint.store import verify; verify(sys.argv[1])"
    command = [*ordinary, sys.executable, "-c", program, str(frozen / "step_0")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "step_0/model.safetensors cannot be read (Permission denied)" in done.stderr


@pytest.mark.slow
def test_two_processes_cannot_write_to_one_directory(tmp_path):
    with running(tmp_path, steps=[0], linger=600) as first:
        pid = wait_for(first, "ready")
        wait_for(first, "saved")
        status, output = run(tmp_path, first_step=1, steps=[1])
        assert status == 2
        assert f"refused '{tmp_path}' is being written by process {pid} on " in output
        assert_whole(CheckpointStore(tmp_path).newest_whole().path, 0, 1, 1000)  # readers may
        first.kill()
        first.wait()
        write_here(tmp_path, first_step=1, steps=[1])
    assert assert_settled(tmp_path) == [0, 1]


def test_the_lock_dies_with_its_holder_though_a_forked_worker_lives_on(tmp_path):
    with running(tmp_path, fork=True, linger=600) as first:
        child = int(wait_for(first, "child"))
        try:
            wait_for(first, "ready")
            with pytest.raises(CheckpointError, match=f"process {first.pid}"):
                CheckpointStore(tmp_path).__enter__()
            first.kill()
            first.wait()
            os.kill(child, 0)  # still there
            with CheckpointStore(tmp_path) as store:
                verify(save_step(store, 1, writer(1, 1, 10)))
        finally:
            os.kill(child, signal.SIGKILL)
