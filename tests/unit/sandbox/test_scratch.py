"""Temporary directories, which go when their process was killed, and at no other time."""

from __future__ import annotations

import errno
import fcntl
import re
import signal
import subprocess
import sys
from pathlib import Path

import laurel
from laurel.sandbox.scratch import ScratchFolder

OWNS = """
import sys, time
from laurel.sandbox.scratch import ScratchFolder
folder = ScratchFolder("test", sys.argv[1])
(folder.path / "below").mkdir()
print(folder.path, flush=True)
time.sleep(60)
"""


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    others = tmp_path / "laurel-test-others"  # nobody has said whose it is
    others.mkdir()
    (tmp_path / "laurel-test-link").symlink_to(others)
    with ScratchFolder("test", tmp_path) as mine:
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNS, tmp_path], stdout=subprocess.PIPE, text=True
        )
        with owner:
            assert owner.stdout is not None
            left = Path(owner.stdout.readline().strip())
            ScratchFolder("test", tmp_path).remove()
            assert left.is_dir()
            assert mine.path.is_dir()
            owner.send_signal(signal.SIGKILL)
        assert left.is_dir()
        ScratchFolder("another", tmp_path).remove()
        assert left.is_dir()
        ScratchFolder("test", tmp_path).remove()
        assert not left.exists()
        assert mine.path.is_dir()
    mine.remove()  # again
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "laurel-test-link",
        "laurel-test-others",
    ]


def test_where_files_have_no_locks_there_is_one_all_the_same(tmp_path, monkeypatch):
    """As on Lustre without `flock`; no other process takes it for one that was left."""

    def lacks_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", lacks_locks)
    with ScratchFolder("test", tmp_path) as first:
        ScratchFolder("test", tmp_path).remove()
        assert first.path.is_dir()
    assert not list(tmp_path.iterdir())


def test_every_temporary_directory_is_one():
    """Those of the sandbox's jobs are empty, or within such a one."""
    makes = re.compile(r"mkdtemp\(|TemporaryDirectory\(")
    root = Path(laurel.__file__).parent
    found = {
        one.relative_to(root).as_posix()
        for one in root.rglob("*.py")
        if makes.search(one.read_text(encoding="utf-8"))
    }
    assert found == {
        "sandbox/scratch.py",
        "sandbox/inside/boxes.py",
        "extensions/code/sandbox/zygote_process.py",
    }
