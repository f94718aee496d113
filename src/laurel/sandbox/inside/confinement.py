"""Takes all rights from a process before it runs a program.

The order leaves the rights that later steps need: files, limits, rights, then the files that it may
open, and the system calls that it may make.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import resource
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from laurel.sandbox.inside import kernel, meter, seccomp
from laurel.sandbox.inside.jail import DEVICES

RESULT_FD = 3
CHANNEL_FD = 4
WORK_FD = 5  # brings the program; closed before it starts
# Limits of every job.
_LIMITS = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
    resource.RLIMIT_SIGPENDING: 256,
    resource.RLIMIT_STACK: 64 << 20,
}
_FEWEST_DESCRIPTORS, _MOST_DESCRIPTORS = 16, 64
_IN_SOCKETS = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """The settings with which a zygote confines its programs.

    Args:
        readable: The directories that a program may read.
        counts_processes: Whether a limit on processes counts only those of this sandbox.
        metered: Whether a `meter.Meter` answers system calls on files, because programs have no
            file system of limited size.
        descriptors: The limit of open files and sockets of a program.
    """

    layers: frozenset[str]
    readable: tuple[str, ...]
    counts_processes: bool
    metered: bool
    descriptors: int

    @property
    def may_write(self) -> bool:
        """Whether a program may write files, which requires that their total size is limited."""
        return self.metered or "namespaces" in self.layers


def confine(setting: Confinement, box: str, give: Callable[[int], object]) -> None:
    """Give up all rights, and all descriptors above `WORK_FD`; only `limit` can follow.

    Args:
        box: The only directory that may be written to.
        give: Called, if programs are metered, with the descriptor at which calls are answered,
            which is closed afterwards.

    Raises:
        OSError: A layer that must be in use is not available.
    """
    os.closerange(WORK_FD + 1, 1 << 20)
    os.chdir(box)
    os.umask(0o077)
    for name in ("HOME", "TMPDIR"):
        if os.environ.get(name) != box:
            os.environ[name] = box
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    set_limit(resource.RLIMIT_NOFILE, setting.descriptors, setting.descriptors)
    for which, most in _LIMITS.items():
        set_limit(which, most, most)
    kernel.drop_capabilities()  # the zygote has made sure that they cannot be regained
    # Otherwise its monitor could not read its files. Other programs cannot reach it by Landlock and
    # the filter, both of which a metered one has.
    kernel.prctl(kernel.PR_SET_DUMPABLE, int(setting.metered))
    if "landlock" in setting.layers:
        readable = setting.readable if setting.may_write else (*setting.readable, box)
        restrict(readable, DEVICES, [box] if setting.may_write else [])
    if setting.metered:
        listener = seccomp.install_meter()
        give(listener)
        os.close(listener)
    if "seccomp" in setting.layers:
        seccomp.install(os.getpid(), without=refused_calls(setting))


def settle_environment(box: str) -> None:
    """Set the environment variables of programs; only those about the box change later."""
    os.environ.clear()
    os.environ.update(HOME=box, TMPDIR=box, LANG="C.UTF-8", PATH="/usr/bin:/bin")


def affordable_descriptors() -> int:
    """Return how many sockets a program may open, so that their buffers need only a few megabytes.

    Nothing else limits these buffers.
    """
    try:
        with open("/proc/sys/net/core/wmem_default") as file:
            each = int(file.read())
    except (OSError, ValueError):
        return _MOST_DESCRIPTORS
    return min(_MOST_DESCRIPTORS, max(_FEWEST_DESCRIPTORS, _IN_SOCKETS // each))


def refused_calls(setting: Confinement) -> frozenset[str]:
    """Return the system calls that must be refused besides those never allowed."""
    if "namespaces" in setting.layers:
        return frozenset()
    return meter.REFUSED if setting.metered else seccomp.ON_FOREIGN_FILES


def limit(setting: Confinement, limits: dict[str, Any]) -> None:
    """Apply the limits of a job; possible after all rights have been given up.

    Raises:
        OSError: The kernel refused.
    """
    seconds = max(1, math.ceil(limits["cpu_s"]))
    wanted = {
        resource.RLIMIT_AS: int(limits["mem_mb"]) << 20,
        resource.RLIMIT_FSIZE: int(limits["disk_mb"]) << 20,
    }
    if setting.counts_processes:
        wanted[resource.RLIMIT_NPROC] = int(limits["threads"]) + 4
    for which, most in wanted.items():
        set_limit(which, most, most)
    # The soft limit ends the program with a signal that says why; the hard one in any case.
    set_limit(resource.RLIMIT_CPU, seconds, seconds + 1)


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
