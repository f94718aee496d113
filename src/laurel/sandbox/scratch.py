"""Temporary directories that do not outlive a process that was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path
from typing import Self

from laurel.sandbox.inside.boxes import remove_box

_OWNER = ".owner"


class ScratchFolder:
    """A temporary directory `laurel-NAME-...`; leaving its context, or `remove`, removes it.

    One whose process was killed is removed when the next of its name is made. The process holds a
    lock on a file in it, and not its number: another container that shares `/tmp` counts its own.
    """

    def __init__(self, name: str, parent: str | Path | None = None) -> None:
        """Make it in `parent`, or where temporary files are, and remove those left behind there."""
        parent = parent or tempfile.gettempdir()
        _remove_left(f"laurel-{name}-", parent)
        self.path = Path(tempfile.mkdtemp(prefix=f"laurel-{name}-", dir=parent)).resolve()
        owner = self.path / _OWNER
        self._lock: int | None = os.open(f"{owner}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks, where it stays if left
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(f"{owner}.new", owner)  # only now somebody may ask whether it is locked

    def remove(self) -> None:
        """Remove it, whatever is in it. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):
                remove_box(str(self.path))
            os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _remove_left(prefix: str, parent: str | Path) -> None:
    for entry in Path(parent).glob(f"{prefix}*"):
        # What is not ours, has no owner yet, or is being removed by another process.
        with contextlib.suppress(OSError):
            if entry.is_symlink() or entry.stat().st_uid != os.getuid():
                continue
            lock = os.open(entry / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_box(str(entry))
            finally:
                os.close(lock)
