"""What a process gives up before it runs a program, in an order that leaves the means for the rest:
files, limits, rights, then the files that it may open and the calls that it may make."""

from __future__ import annotations

import math
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from laurel.environments.sandbox.inside import kernel, landlock, meter, seccomp
from laurel.environments.sandbox.inside.jail import DEVICES

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
class Setting:
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


def confine(setting: Setting, box: str, give: Callable[[int], None]) -> None:
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
        landlock.restrict(readable, DEVICES, [box] if setting.may_write else [])
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


def refused_calls(setting: Setting) -> frozenset[str]:
    """System calls that are refused besides."""
    if "namespaces" in setting.layers:
        return frozenset()
    return meter.REFUSED if setting.metered else seccomp.ON_FOREIGN_FILES


def limit(setting: Setting, limits: dict[str, Any]) -> None:
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
