"""Takes all rights from a process before it runs a program.

The order leaves the rights that later steps need: files, limits, rights, then the files that it may
open, and the system calls that it may make.
"""

from __future__ import annotations

import math
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from laurel.extensions.code.sandbox.inside import meter
from laurel.sandbox.inside import kernel, seccomp
from laurel.sandbox.inside.confinement import DEVICES, restrict, set_limit

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
        listener = seccomp.install_meter(meter.ASKED)
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
