"""One writer per directory: a lock that the kernel frees when its holder dies, however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from laurel.errors import CheckpointError

LOCK_NAME = ".lock"

_held: set[int] = set()


def _close_in_child() -> None:
    # A forked child (a data-loading worker) shares the lock through its copy of the descriptor and
    # would keep it after the death of its parent.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class DirectoryLock:
    """Holds `directory/.lock` from `acquire` to `release`. The file itself stays for good."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_NAME
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """Whether this process, not one it was forked from, holds the lock."""
        return self._descriptor in _held

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            CheckpointError: somebody has it (the message says who), or the directory has no locks.
            OSError: the file cannot be opened.
        """
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 300, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise CheckpointError(
                f"'{self._path.parent}' is being written by {holder or 'another process'}. "
                "Wait for it to end or stop it, or give this run another directory."
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise CheckpointError(
                f"'{self._path}' cannot be locked ({error.strerror}): the file system has no "
                "locks, so nothing would keep two runs apart. Use a directory on another one."
            ) from error
        # Only informs: on a full disk the lock holds all the same.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._descriptor = descriptor
        _held.add(descriptor)

    def release(self) -> None:
        """Give the lock back; nothing happens where it is not held."""
        if self._descriptor is not None and self._descriptor in _held:
            _held.remove(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None
