"""Limits what a process may use, and with Landlock the files that it may open."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import sys
import sysconfig
from collections.abc import Iterable

from laurel.sandbox.inside import kernel

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo")


def readable_paths() -> list[str]:
    """Return the directories that this interpreter needs, and no others."""
    own = [
        os.path.join(sys.base_prefix, "lib"),
        os.path.join(sys.base_exec_prefix, "lib"),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
    ]
    paths = [path for path in dict.fromkeys([*_SYSTEM, *own]) if os.path.isdir(path)]
    return [
        path
        for path in paths
        if os.path.islink(path)
        or not any(path != other and path.startswith(f"{other}/") for other in paths)
    ]


def set_limit(which: int, soft: int, hard: int) -> None:
    """Set a limit of this process, up to its present hard one."""
    highest = resource.getrlimit(which)[1]
    if highest != resource.RLIM_INFINITY:
        soft, hard = min(soft, highest), min(hard, highest)
    resource.setrlimit(which, (soft, hard))


# Landlock limits the files that a program may open, even without a root of its own.

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_FIRST_RIGHTS = (1 << 13) - 1
# Version of the interface, and the right that it brought: refer, truncate, ioctl of devices.
_RIGHTS_SINCE = ((2, 1 << 13), (3, 1 << 14), (5, 1 << 15))
_NET_RIGHTS = 0b11  # bind and connect of TCP
_SCOPES = 0b11  # abstract unix sockets and signals: only those of programs in the same domain
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
    """Return the version of the kernel's Landlock interface; raise OSError if there is none."""
    return kernel.call("landlock_create_ruleset", None, 0, 1)


def restrict(
    readable: Iterable[str],
    devices: Iterable[str],
    writable: Iterable[str],
    executable: Iterable[str] = (),
) -> None:
    """Limit permanently the files that this process can open, after it gave up new privileges.

    Args:
        readable: The directories and files that may be read, with all below them.
        devices: The files that may be read and written.
        writable: The directories in which all but execution is allowed.
        executable: The files that may be executed, and read.

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
            may_list = _READ_DIR if os.path.isdir(path) else 0
            _allow(descriptor, path, _READ_FILE | may_list)
        for path in executable:
            _allow(descriptor, path, _READ_FILE | _EXECUTE)
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
