"""What a process gives up before it runs a program, in an order that leaves the means for the rest:
files, limits, rights, then the files that it may open and the calls that it may make."""

from __future__ import annotations

import math
import os
import resource
import signal
from dataclasses import dataclass
from typing import Any

from laurel.environments.sandbox.inside import kernel, landlock, seccomp
from laurel.environments.sandbox.inside.jail import DEVICES

RESULT_FD = 3
CHANNEL_FD = 4
WORK_FD = 5
"""Over which the program comes; closed before it starts."""
_LIMITS = {
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
    resource.RLIMIT_SIGPENDING: 256,
    resource.RLIMIT_STACK: 64 << 20,
}
"""Of every job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How this zygote confines.

    Args:
        layers: Those that are on.
        readable: Directories that a program may read.
        counts_processes: Whether a limit on processes counts those of this sandbox only.
    """

    layers: frozenset[str]
    readable: tuple[str, ...]
    counts_processes: bool


def confine(setting: Setting, box: str) -> None:
    """Give up everything; only descriptors up to `WORK_FD` are kept. What is left to be done is
    `limit`.

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
    for which, most in _LIMITS.items():
        _set_limit(which, most, most)
    kernel.drop_capabilities()  # the zygote has seen to it that they cannot be had again
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    if "landlock" in setting.layers:
        landlock.restrict(setting.readable, DEVICES, [box])
    if "seccomp" in setting.layers:
        seccomp.install(os.getpid(), without=refused_calls(setting))


def settle_environment(box: str) -> None:
    """The variables that programs see, but for their box where it is another."""
    os.environ.clear()
    os.environ.update(HOME=box, TMPDIR=box, LANG="C.UTF-8", PATH="/usr/bin:/bin")


def refused_calls(setting: Setting) -> frozenset[str]:
    """System calls that are refused besides."""
    return frozenset() if "namespaces" in setting.layers else seccomp.ON_FOREIGN_FILES


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
