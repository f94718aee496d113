"""What a process gives up before it runs a program, in an order that leaves the means for the rest:
files, limits, rights, then the files that it may open and the calls that it may make."""

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
WORK_FD = 5
"""Over which the program comes; closed before it starts."""
_LIMITS = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
    resource.RLIMIT_SIGPENDING: 256,
    resource.RLIMIT_STACK: 64 << 20,
}
"""Of every job."""
_FEWEST_DESCRIPTORS, _MOST_DESCRIPTORS = 16, 64
_IN_SOCKETS = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """How this zygote confines.

    Args:
        layers: Those that are on.
        readable: Directories that a program may read.
        counts_processes: Whether a limit on processes counts those of this sandbox only.
        metered: Whether a `meter.Meter` answers calls about files; it is for programs whose files
            are in no file system of their own.
        descriptors: How many files and sockets a program may have open.
    """

    layers: frozenset[str]
    readable: tuple[str, ...]
    counts_processes: bool
    metered: bool
    descriptors: int

    @property
    def may_write(self) -> bool:
        """Whether a program may have files: only where something limits all of them together."""
        return self.metered or "namespaces" in self.layers


def confine(setting: Confinement, box: str, give: Callable[[int], None]) -> None:
    """Give up everything; only descriptors up to `WORK_FD` are kept. What is left to be done is
    `limit`.

    Args:
        setting: How.
        box: The only directory that may be written to.
        give: Called where programs are metered, with the descriptor that calls are answered at;
            closed after.

    Raises:
        OSError: A layer that should be on cannot be had.
    """
    os.closerange(WORK_FD + 1, 1 << 20)
    os.chdir(box)
    os.umask(0o077)
    for name in ("HOME", "TMPDIR"):
        if os.environ.get(name) != box:
            os.environ[name] = box
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _set_limit(resource.RLIMIT_NOFILE, setting.descriptors, setting.descriptors)
    for which, most in _LIMITS.items():
        _set_limit(which, most, most)
    kernel.drop_capabilities()  # the zygote has seen to it that they cannot be had again
    # Else its monitor could not look at its files. Other programs cannot reach it by Landlock and
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
    """The variables that programs see, but for their box where it is another."""
    os.environ.clear()
    os.environ.update(HOME=box, TMPDIR=box, LANG="C.UTF-8", PATH="/usr/bin:/bin")


def affordable_descriptors() -> int:
    """How many sockets a program may have open, so that what waits in them is no more than some
    megabytes: nothing else limits that."""
    try:
        with open("/proc/sys/net/core/wmem_default") as file:
            each = int(file.read())
    except (OSError, ValueError):
        return _MOST_DESCRIPTORS
    return min(_MOST_DESCRIPTORS, max(_FEWEST_DESCRIPTORS, _IN_SOCKETS // each))


def refused_calls(setting: Confinement) -> frozenset[str]:
    """System calls that are refused besides."""
    if "namespaces" in setting.layers:
        return frozenset()
    return meter.REFUSED if setting.metered else seccomp.ON_FOREIGN_FILES


def limit(setting: Confinement, limits: dict[str, Any]) -> None:
    """Give up what a job in particular may not have. Can be done when all else is given up.

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
        _set_limit(which, most, most)
    # The soft one ends the program with a signal that says why; the hard one, whatever it does.
    _set_limit(resource.RLIMIT_CPU, seconds, seconds + 1)


def _set_limit(which: int, soft: int, hard: int) -> None:
    highest = resource.getrlimit(which)[1]
    if highest != resource.RLIM_INFINITY:
        soft, hard = min(soft, highest), min(hard, highest)
    resource.setrlimit(which, (soft, hard))


# --------------------------------------------------------------------------------------------------
# Which files a program may open, by Landlock: held even where there is no root of its own.

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
