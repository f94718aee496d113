"""Becomes a shell that may start programs, in a process that has given up all other rights."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping, Sequence

from laurel.sandbox.inside import confinement, kernel, seccomp
from laurel.sandbox.inside.confinement import DEVICES, readable_paths

_ALSO_READABLE = ("/etc/ld.so.cache", "/etc/localtime", "/etc/passwd")
_MORE_PROCESSES = 256


def main(
    report: int,
    command: Sequence[str],
    *,
    readable: Sequence[str],
    executable: Sequence[str],
    writable: Sequence[str],
    canary: str,
    limits: Mapping[str, int],
) -> None:
    """Execute a command in this process, confined; write to `report` why that is impossible.

    Args:
        report: A descriptor, which the command does not get.
        command: The path of the program, and its arguments.
        readable: The directories and files that the command may read, beside the system's.
        executable: The programs that may be executed.
        writable: The directories that may be written to.
        canary: A file that could be written to if the files of the machine were not closed off.
        limits: The limits of each process, by the kernel's names, in seconds or bytes.
    """
    try:
        os.set_inheritable(report, False)
        with open("/proc/loadavg") as file:
            running = int(file.read().split()[3].partition("/")[2])
        most_of = {"RLIMIT_CORE": 0, "RLIMIT_NPROC": running + _MORE_PROCESSES, **limits}
        for name, most in most_of.items():
            confinement.set_limit(getattr(resource, name), most, most)
        kernel.renounce_privileges()
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # bash keeps it
        allowed = [*readable_paths(), *_ALSO_READABLE, *readable]
        confinement.restrict(allowed, DEVICES, writable, executable)
        seccomp.install_for_processes()
        _check(canary)
        os.execv(command[0], [*command])
    except OSError as error:
        os.write(report, str(error).encode())


def _check(canary: str) -> None:
    """Raise OSError unless files and the network were seen to be closed off."""
    attempts: dict[str, Callable[[], object]] = {
        "files": lambda: os.open(canary, os.O_WRONLY),
        "the network": lambda: socket.socket(),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except OSError:
            continue
        raise OSError(f"{name} could be reached from inside")
