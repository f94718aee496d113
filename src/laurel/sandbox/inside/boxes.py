"""Creates and removes the directories of jobs if there are no namespaces."""

from __future__ import annotations

import contextlib
import os
import tempfile

_PULLED_UP = "laurel-pulled-up-"


def make_box(scratch: str) -> str:
    """Create an empty directory for a job, and return its path."""
    return tempfile.mkdtemp(prefix="box-", dir=scratch)


def remove_box(box: str) -> None:
    """Remove a directory, whatever its depth and permissions, without following links."""
    with contextlib.suppress(FileNotFoundError):
        top = os.open(box, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _empty(top)
        finally:
            os.close(top)
        os.rmdir(box)


def _empty(top: int) -> None:
    # Directories below are moved to the top before they are emptied, so that a deep tree, which a
    # program can create, needs neither stack nor descriptors.
    os.fchmod(top, 0o700)
    count = 0
    while names := os.listdir(top):
        for name in names:
            try:
                os.unlink(name, dir_fd=top)
                continue
            except OSError:
                os.chmod(name, 0o700, dir_fd=top)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            try:
                for below in os.listdir(inner):
                    try:
                        os.unlink(below, dir_fd=inner)
                    except OSError:
                        os.chmod(below, 0o700, dir_fd=inner)
                        count += 1
                        os.rename(below, f"{_PULLED_UP}{count}", src_dir_fd=inner, dst_dir_fd=top)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)
