"""Which files a program may open, by Landlock: held even where there is no root of its own."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable

from laurel.environments.sandbox.inside import kernel

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_FIRST_RIGHTS = (1 << 13) - 1
_RIGHTS_SINCE = ((2, 1 << 13), (3, 1 << 14), (5, 1 << 15))
"""Version of the interface, and the right that it brought: refer, truncate, ioctl of devices."""
_NET_RIGHTS = 0b11
"""Bind and connect of TCP."""
_SCOPES = 0b11
"""Abstract unix sockets and signals: only those of programs in the same domain."""
_RIGHTS_ON_DEVICES = _READ_FILE | _WRITE_FILE | 1 << 14
_RULE_PATH_BENEATH = 1


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("fs", ctypes.c_uint64),
        ("net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


@functools.cache
def version() -> int:
    """Of the kernel's interface; OSError where there is none."""
    return kernel.call("landlock_create_ruleset", None, 0, 1)


def restrict(readable: Iterable[str], devices: Iterable[str], writable: Iterable[str]) -> None:
    """Let this process open nothing else from now on. It must have given up new privileges.

    Args:
        readable: Directories to read, with all below them.
        devices: Files to read and write.
        writable: Directories to do anything in but execute.

    Raises:
        OSError: The kernel refused.
    """
    abi = version()
    rights = _FIRST_RIGHTS
    for since, right in _RIGHTS_SINCE:
        if abi >= since:
            rights |= right
    ruleset = _Ruleset(rights, _NET_RIGHTS if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    # Older kernels do not know the later fields, and refuse them unless they are 0.
    descriptor = kernel.call(
        "landlock_create_ruleset", ctypes.byref(ruleset), ctypes.sizeof(ruleset), 0
    )
    try:
        for path in readable:
            _allow(descriptor, path, _READ_FILE | _READ_DIR)
        for path in devices:
            _allow(descriptor, path, _RIGHTS_ON_DEVICES & rights)
        for path in writable:
            _allow(descriptor, path, rights & ~_EXECUTE)
        kernel.call("landlock_restrict_self", descriptor, 0)
    finally:
        os.close(descriptor)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rule = _PathBeneath(rights, target)
        kernel.call("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(target)
