"""Makes system calls for which Python has no function, by ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal

from laurel.sandbox.inside.syscall_numbers import NUMBERS_BY_MACHINE, OURS

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MS_REMOUNT = 32
MNT_DETACH = 2
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_FROM_EMPTY = 0x04
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_CAPBSET_DROP = 24
PR_SET_SECUREBITS = 28
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_libc.unshare.argtypes = [ctypes.c_int]
_libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]


@functools.cache
def machine() -> int | None:
    """Return the column of this machine in the tables of system call numbers.

    None if it is not in them, or if Python has another word size than the kernel.
    """
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    return NUMBERS_BY_MACHINE.get(os.uname().machine)


def call(name: str, *arguments: object) -> int:
    """Make one of the system calls in `OURS`.

    Args:
        arguments: Numbers, bytes, ctypes values or None.

    Raises:
        OSError: The kernel refused, or the machine is unknown.
    """
    column = machine()
    if column is None:
        raise OSError(0, f"no system call numbers for {os.uname().machine}")
    made = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return _checked(_libc.syscall(ctypes.c_long(OURS[name][column]), *made), name)


def prctl(option: int, first: int = 0, second: int = 0) -> int:
    """Call `prctl(2)`; raise OSError if the kernel refuses."""
    return _checked(_libc.prctl(option, first, second, 0, 0), f"prctl({option})")


def set_name(name: str) -> None:
    """Set the name of this process in lists of processes; at most 15 bytes."""
    text = ctypes.create_string_buffer(name.encode())
    prctl(PR_SET_NAME, ctypes.addressof(text))


def fork_apart(flags: int) -> int:
    """Fork a process of one thread into new namespaces, which `os.fork` cannot.

    The child may do little more than fork again, because neither Python nor the C library knows
    that it is another process.

    Raises:
        OSError: The kernel refused.
    """
    return call("clone", flags | signal.SIGCHLD, 0, 0, 0, 0)


def open_process(pid: int) -> int:
    """Open a descriptor that becomes readable when a process ends; OSError before Linux 5.3.

    Not every Python has `os.pidfd_open`.
    """
    return call("pidfd_open", pid, 0)


def unshare(flags: int) -> None:
    """Call `unshare(2)`; raise OSError if the kernel refuses."""
    _checked(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Call `mount(2)`; raise OSError if the kernel refuses."""
    done = _libc.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, flags, options.encode()
    )
    _checked(done, f"mount {target}")


def unmount(target: str) -> None:
    """Detach a mount and all below it; raise OSError if the kernel refuses."""
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def restrict_mounts(target: str, attributes: int) -> None:
    """Add attributes to a mount and all below it; OSError if refused, or before Linux 5.12."""
    wanted = _MountAttributes(attributes, 0, 0, 0)
    call(
        "mount_setattr",
        _AT_FDCWD,
        target.encode(),
        _AT_RECURSIVE,
        ctypes.byref(wanted),
        ctypes.sizeof(wanted),
    )


def cover_working_directory() -> None:
    """Mount a copy of the working directory's mounts over it, and make it the working directory.

    Mounts that were copied into a namespace are locked, but this copy is not. No path is used,
    because this account may not be allowed to follow it.
    """
    tree = call("open_tree", _AT_FDCWD, b".", _AT_RECURSIVE | _OPEN_TREE_CLONE)
    try:
        call("move_mount", tree, b"", _AT_FDCWD, b".", _MOVE_FROM_EMPTY)
        os.fchdir(tree)
    finally:
        os.close(tree)


def pivot_root(new: str, old: str) -> None:
    """Call `pivot_root(2)`; raise OSError if the kernel refuses."""
    call("pivot_root", new.encode(), old.encode())


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def renounce_privileges() -> None:
    """Prevent programs that this process executes from gaining rights that it does not have."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # beyond the kernel's last one, or without the right to do so
            break
    with contextlib.suppress(OSError):  # without the right to do so; no_new_privs does as much
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
        # NOROOT, NO_SETUID_FIXUP, KEEP_CAPS off, NO_CAP_AMBIENT_RAISE; each of them locked
        prctl(PR_SET_SECUREBITS, 0b11101111)


def drop_capabilities() -> None:
    """Give up every right of root permanently."""
    header = _CapabilityHeader(0x20080522, 0)
    call("capset", ctypes.byref(header), (ctypes.c_uint32 * 6)())


def _checked(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return int(result)
