"""Limits the total size of a program's files if it has no file system of limited size.

The kernel asks the job's monitor before each system call that can create, enlarge or otherwise
change a file (seccomp's user notifications), and the call waits for the answer. An allowed call is
charged with the most that it can add. When that exceeds the limit, the program is stopped for a
moment, and the real size of its files is measured, including removed ones that are still open. So
the limit is exact, and removed files no longer count.

Calls whose charge cannot be computed from their arguments are refused (`REFUSED` and
`seccomp.meter_program`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping

from laurel.sandbox.inside import kernel
from laurel.sandbox.inside.syscall_numbers import ALLOWED

_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_NOTIFICATION = struct.Struct("QIIiIQ6Q")
_RESPONSE = struct.Struct("QqiI")
_GO_ON = 1
_AT_FDCWD = -100
_HERE = _AT_FDCWD & 0xFFFFFFFF
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_FOLLOW = 0x100
_NOW, _OMIT = (1 << 30) - 1, (1 << 30) - 2
_PATH_MAX = 4096
_PAGE = 4096
_PIECE = 1 << 16
_STOP_SECONDS = 10.0  # time after which a program that cannot be stopped is ended

# Calls by which a file can grow by at most as many bytes as an argument says.
_BYTES_AT = {"write": 2, "pwrite64": 2, "fallocate": 3, "sendfile": 3, "copy_file_range": 4}
_GROWING = frozenset({*_BYTES_AT, "ftruncate"})
_MAKING = frozenset(
    {"open", "openat", "creat", "mkdir", "mkdirat", "link", "linkat", "symlink", "symlinkat"}
)
# Landlock lets these through to any file of the same account, so the monitor makes them itself, on
# files of the program alone.
_BY_MONITOR = frozenset({"chmod", "fchmod", "fchmodat", "utimensat", "truncate"})
ASKED = _GROWING | _MAKING | _BY_MONITOR
REFUSED = frozenset({"openat2", "writev", "pwritev", "sendmsg", "utime", "utimes", "futimesat"})
"""The system calls that are always refused.

The arguments of the first three do not show their size; a message can pass on an open file; and for
the last, the C library has another call.
"""


class Meter:
    """Tracks how much a program may still write, and answers its system calls on files."""

    def __init__(
        self,
        listener: int,
        pid: int,
        box: str,
        outputs: Mapping[tuple[int, int], Callable[[bytes], str]],
        *,
        megabytes: int,
        inodes: int,
    ) -> None:
        """Take the descriptor at which the kernel asks.

        Args:
            listener: The descriptor at which the kernel asks about calls.
            pid: The process of the program, a child of this process.
            box: The program's directory.
            outputs: Functions that take a piece of an output, by device and inode of its pipe. Each
                returns the output's name when it is full, otherwise an empty text.
            megabytes: The limit of the total size of the program's files.
            inodes: The limit of their number, including directories and links.
        """
        self.listener = listener
        self._pid = pid
        self._box = os.path.realpath(box)
        self._outputs = outputs
        self._limit = megabytes << 20
        self._most_files = inodes
        self._bytes = self._files = 0  # measured, and charged since then
        self._is_fresh = False  # measured, and no call answered since then
        # A call may touch a block at either end of what it writes, or one of a directory.
        self._block = 2 * max(4096, os.statvfs(box).f_frsize)
        column = kernel.machine()
        assert column is not None
        self._names = {ALLOWED[name][column]: name for name in ASKED}
        self._acts: Mapping[str, Callable[..., None]] = {
            "chmod": lambda path, mode, *_: self._change(_HERE, path, mode),
            "fchmod": lambda descriptor, mode, *_: self._change(descriptor, None, mode),
            "fchmodat": lambda folder, path, mode, *_: self._change(folder, path, mode),
            "utimensat": self._set_times,
            "truncate": self._truncate,
        }

    def answer(self) -> str:
        """Answer one call; return why the program must end (`disk`, a full output), or ""."""
        notification = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(self.listener, _RECEIVE, notification)
        except OSError:  # the caller was interrupted, or is gone
            return ""
        call_id, _, _, number, _, _, *arguments = _NOTIFICATION.unpack(notification)
        name = self._names[number]
        size, files = self._block, int(name in _MAKING)
        if name in _BYTES_AT:
            size += arguments[_BYTES_AT[name]]
        if self._bytes + size > self._limit or self._files + files > self._most_files:
            if name == "write" and (take := self._output(arguments[0])):
                return self._write_for(call_id, take, arguments[1], arguments[2])
            if not self._is_fresh:
                self._is_fresh = True
                return self._measure()  # which interrupts the call, so that it is repeated
            self._is_fresh = False
            self._reply(call_id, error=errno.ENOSPC)
            return ""
        self._is_fresh = False
        self._bytes += size
        self._files += files
        if name in self._acts:
            try:
                self._acts[name](*arguments)
            except (OSError, ValueError, OverflowError, struct.error) as error:
                self._reply(call_id, error=getattr(error, "errno", None) or errno.EINVAL)
            else:
                self._reply(call_id)
        else:
            self._reply(call_id, flags=_GO_ON)
        return ""

    def close(self) -> None:
        """Stop answering the program's system calls."""
        os.close(self.listener)

    def _reply(self, call_id: int, *, value: int = 0, error: int = 0, flags: int = 0) -> None:
        with contextlib.suppress(OSError):  # it was interrupted meanwhile
            fcntl.ioctl(self.listener, _SEND, _RESPONSE.pack(call_id, value, -error, flags))

    def _output(self, descriptor: int) -> Callable[[bytes], str] | None:
        """Return the function that takes the output of a descriptor of the program, if any."""
        try:
            found = os.stat(f"/proc/{self._pid}/fd/{ctypes.c_int(descriptor).value}")
        except OSError:
            return None
        return self._outputs.get((found.st_dev, found.st_ino))

    def _write_for(
        self, call_id: int, take: Callable[[bytes], str], address: int, size: int
    ) -> str:
        # A program with full files cannot write by itself: another thread could replace the
        # output's descriptor by a file's meanwhile.
        try:
            piece = self._memory(address, min(size, _PIECE))
        except (OSError, ValueError, OverflowError):
            self._reply(call_id, error=errno.EFAULT)
            return ""
        full = take(piece)
        self._reply(call_id, value=len(piece))
        return full

    def _measure(self) -> str:
        """Stop the program, and replace the charges by the real size; return what `answer` does."""
        stopped = self._stop()
        if not stopped:
            return "disk" if stopped is None else ""
        try:
            seen: set[tuple[int, int]] = set()
            size, files = self._below_the_box(seen)
            more, removed = self._open_but_removed(seen)
            self._bytes, self._files = size + more, files + removed
        except OSError:  # an unmeasurable size counts as over the limit
            return "disk"
        finally:
            os.kill(self._pid, signal.SIGCONT)
        return ""

    def _stop(self) -> bool | None:
        """Stop all threads of the program after their calls.

        Return False if the program has ended, and None if it does not stop.
        """
        wanted = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
        deadline = time.monotonic() + _STOP_SECONDS
        while time.monotonic() < deadline:
            os.kill(self._pid, signal.SIGSTOP)  # again: a thread may have sent SIGCONT
            for _ in range(20):
                if (found := os.waitid(os.P_PID, self._pid, wanted)) is not None:
                    return found.si_code == os.CLD_STOPPED
                time.sleep(0.0005)
        return None

    def _below_the_box(self, seen: set[tuple[int, int]]) -> tuple[int, int]:
        """Return the size and the number of all files in the box, with few open directories."""
        size = files = 0
        folder = os.open(self._box, _FOLDER)
        try:
            waiting: list[list[str]] = []
            while True:
                below = []
                for name in os.listdir(folder):
                    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    files += 1
                    if (found.st_dev, found.st_ino) not in seen:
                        seen.add((found.st_dev, found.st_ino))
                        size += found.st_blocks * 512
                    if stat.S_ISDIR(found.st_mode):
                        below.append(name)
                        if found.st_mode & 0o700 != 0o700:  # otherwise it hides its contents
                            os.chmod(name, stat.S_IMODE(found.st_mode) | 0o700, dir_fd=folder)
                waiting.append(below)
                while waiting and not waiting[-1]:
                    waiting.pop()
                    if waiting:
                        folder = _change_folder(folder, "..")
                if not waiting:
                    return size, files
                folder = _change_folder(folder, waiting[-1].pop())
        finally:
            os.close(folder)

    def _open_but_removed(self, seen: set[tuple[int, int]]) -> tuple[int, int]:
        size = files = 0
        for name in os.listdir(f"/proc/{self._pid}/fd"):
            try:
                found = os.stat(f"/proc/{self._pid}/fd/{name}")
            except FileNotFoundError:
                continue
            is_one = stat.S_ISREG(found.st_mode) and found.st_nlink == 0
            if is_one and (found.st_dev, found.st_ino) not in seen:
                seen.add((found.st_dev, found.st_ino))
                size += found.st_blocks * 512
                files += 1
        with open(f"/proc/{self._pid}/maps", "rb") as maps:
            for line in maps:
                if line.endswith(b" (deleted)\n") and os.fsencode(self._box) in line:
                    inode = int(line.split(maxsplit=5)[4])
                    if inode not in {one for _, one in seen}:  # known by its mapping only
                        size += self._limit
                        files += 1
        return size, files

    def _change(self, folder: int, path: int | None, mode: int) -> None:
        with self._own(folder, path) as (name, found):
            mode &= 0o777
            if stat.S_ISDIR(found.st_mode):
                mode |= 0o700  # its contents are measured
            os.chmod(name, mode)

    def _set_times(self, folder: int, path: int, times: int, flags: int, *_: int) -> None:
        follow = not flags & _NO_FOLLOW
        with self._own(folder, path or None, follow=follow) as (name, found):
            now = time.time_ns()
            given = [(0, _NOW), (0, _NOW)]
            if times:
                values = struct.unpack("4q", self._memory(times, 32))
                given = [(values[0], values[1]), (values[2], values[3])]
            old = (found.st_atime_ns, found.st_mtime_ns)
            access, change = (
                now if part == _NOW else before if part == _OMIT else seconds * 10**9 + part
                for (seconds, part), before in zip(given, old, strict=True)
            )
            os.utime(name, ns=(access, change))

    def _truncate(self, path: int, length: int, *_: int) -> None:
        if length > self._limit:
            raise OSError(errno.EFBIG, "too large")
        with self._own(_HERE, path) as (name, _found):
            os.truncate(name, length)

    @contextlib.contextmanager
    def _own(
        self, folder: int, path: int | None, *, follow: bool = True
    ) -> Iterator[tuple[str, os.stat_result]]:
        """Open a file of the program; yield a stable name for it, and its status.

        Args:
            folder: A descriptor of the program, or `_HERE`.
            path: The address of the name in the program's memory; None: the descriptor itself.
            follow: Whether to follow a link.

        Raises:
            OSError: There is no such file, or it is not in the box.
        """
        folder = ctypes.c_int(folder & 0xFFFFFFFF).value
        start = f"/proc/{self._pid}/" + ("cwd" if folder == _AT_FDCWD else f"fd/{folder}")
        target = os.open(start, os.O_PATH | os.O_CLOEXEC)
        try:
            if path is not None:
                flags = os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
                found = os.open(self._text(path), flags, dir_fd=target)
                os.close(target)
                target = found
            name = f"/proc/self/fd/{target}"
            # Links into the box cannot be made (Landlock), so all that is there is the program's.
            where = os.readlink(name)
            if where != self._box and not where.startswith(f"{self._box}/"):
                raise PermissionError(errno.EPERM, "not a file of the program")
            yield name, os.fstat(target)
        finally:
            os.close(target)

    def _text(self, address: int) -> bytes:
        """Return the name of a file that the program's memory holds at an address."""
        text = b""
        while len(text) < _PATH_MAX:
            # To the end of a page: the next may not be mapped.
            part = self._memory(address + len(text), _PAGE - (address + len(text)) % _PAGE)
            text += part
            if b"\0" in part or not part:
                return text.partition(b"\0")[0]
        raise OSError(errno.ENAMETOOLONG, "a name without an end")

    def _memory(self, address: int, size: int) -> bytes:
        with open(f"/proc/{self._pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(size)


def _change_folder(folder: int, name: str) -> int:
    """Close an open directory, and open another by its name in it."""
    there = os.open(name, _FOLDER, dir_fd=folder)
    os.close(folder)
    return there
