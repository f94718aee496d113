"""Runs the zygote, the process from which jobs are forked.

It is a new Python process (`python -P -s -S -B`) in its own session, with a clean environment, and
no open file but a socket. It never runs a program itself, and holds nothing of value to one. It
ends when the process that started it ends, and its jobs end with it.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import select
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from laurel.extensions.code.sandbox.inside import jail, kinds, meter, monitor
from laurel.extensions.code.sandbox.inside.rights import (
    Confinement,
    affordable_descriptors,
    refused_calls,
    settle_environment,
)
from laurel.sandbox.inside import confinement, kernel, seccomp

PRELOADED = (
    "abc",
    "array",
    "bisect",
    "calendar",
    "cmath",
    "collections",
    "contextlib",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "inspect",
    "io",
    "itertools",
    "json",
    "linecache",
    "math",
    "numbers",
    "operator",
    "queue",
    "random",
    "re",
    "statistics",
    "string",
    "struct",
    "textwrap",
    "threading",
    "time",
    "traceback",
    "types",
    "typing",
    "uuid",
)
"""The modules that programs import most often, which are imported ahead."""
_LOOK_FOR_PARENT_MS = 1000
_LONGEST_REQUEST = 4096
# Monitors that wait for a job: two run at once where tests are split from a program.
_ARMED = 2
_ATTEMPTS = 3
_FIRST_ACCOUNT = 0x70000000


def main(control_fd: int) -> None:
    """Serve the process at the other end of a socket until that process ends."""
    parent = os.getppid()
    control = socket.socket(fileno=control_fd)
    request = json.loads(control.recv(_LONGEST_REQUEST))
    try:
        setting, reasons = _take_layers(frozenset(request["layers"]), request["scratch"])
    except OSError as error:
        control.sendall(json.dumps({"failed": str(error)}).encode() + b"\n")
        return
    for name in PRELOADED:
        importlib.import_module(name)
    reply = {
        "layers": sorted(setting.layers),
        "reasons": reasons,
        "python": sys.version.split()[0],
        "uid": os.geteuid(),
    }
    control.sendall(json.dumps(reply).encode() + b"\n")
    settle_environment(jail.BOX)
    kinds.hide()
    # Memory that is read after a fork is copied, so only the program collects garbage.
    gc.collect()
    gc.disable()
    gc.freeze()
    _serve(control, setting, request["scratch"], parent)


def _serve(control: socket.socket, setting: Confinement, scratch: str, parent: int) -> None:
    armed: deque[socket.socket] = deque()
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while os.getppid() == parent or "namespaces" in setting.layers:
        if poll.poll(_LOOK_FOR_PARENT_MS if len(armed) == _ARMED else 0):
            message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
            if not message:
                return
            with contextlib.suppress(OSError):  # the client sees that its connection is closed
                _hand_over(descriptors, armed, setting, scratch)
        elif len(armed) < _ARMED:
            try:
                armed.append(_arm(setting, scratch))
            except OSError:  # no process available: later, or when it is needed
                poll.poll(_LOOK_FOR_PARENT_MS)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _arm(setting: Confinement, scratch: str) -> socket.socket:
    """Start the monitor of a future job; return the socket for its order."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pid = kernel.fork_apart(jail.OF_A_JOB) if "namespaces" in setting.layers else os.fork()
    if pid == 0:
        try:
            # Keep no connection of other jobs: neither to their monitors nor to their clients.
            os.closerange(3, theirs.fileno())
            os.closerange(theirs.fileno() + 1, 1 << 20)
            monitor.monitor(setting, scratch, theirs)
        finally:
            os._exit(0)
    theirs.close()
    return ours


def _hand_over(
    descriptors: list[int], armed: deque[socket.socket], setting: Confinement, scratch: str
) -> None:
    """Pass a job to an armed monitor, or to the next one if that has died."""
    try:
        for _ in range(_ARMED + _ATTEMPTS):
            with armed.popleft() if armed else _arm(setting, scratch) as orders:
                try:
                    socket.send_fds(orders, [b"j"], descriptors)
                    return
                except OSError:
                    continue
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _take_layers(wanted: frozenset[str], scratch: str) -> tuple[Confinement, dict[str, str]]:
    """Set up the wanted layers as far as possible, and return why the others are missing."""
    # A user of its own: programs of one sandbox cannot reach those of another.
    descriptors = affordable_descriptors()  # read while /proc is there
    account = _FIRST_ACCOUNT + os.getpid() if os.geteuid() == 0 else None
    reasons: dict[str, str] = {}
    have = set()
    tries: dict[str, Any] = {
        "namespaces": lambda: _try_namespaces(scratch, account),
        "landlock": lambda: confinement.restrict([], [], []),
        "seccomp": lambda: seccomp.install(os.getpid()),
    }
    for name, attempt in tries.items():
        reason = _reason_against(attempt) if name in wanted else "it is switched off"
        if reason:
            reasons[name] = reason
        else:
            have.add(name)
    # Targets of links are in the list themselves.
    readable = tuple(path for path in confinement.readable_paths() if not os.path.islink(path))
    if "namespaces" in have:
        jail.enter(scratch, account)
        # In namespaces of its own the kernel counts this sandbox's processes apart.
        counts = True
    else:
        counts = False
        if account is not None:
            os.chown(scratch, account, account)

            def read_as() -> None:
                jail.become(account)
                for path in [*readable, scratch]:
                    os.listdir(path)

            counts = not _reason_against(read_as)
        if account is not None and counts:
            jail.become(account)
        elif account is not None:
            os.chown(scratch, 0, 0)
            reasons["account"] = (
                "Python, or the directory for temporary files, lies where only root can read it, "
                "so programs run as root, without its rights"
            )
    kernel.renounce_privileges()
    metered = have == {"landlock", "seccomp"}
    if metered and (number := _try_meter()):
        metered = False
        reasons["files"] = (
            "nothing here can limit all files of a program together, so programs can write none "
            f"(seccomp: {os.strerror(number)})"
        )
    setting = Confinement(
        layers=frozenset(have),
        readable=readable,
        counts_processes=counts,
        metered=metered,
        descriptors=descriptors,
    )
    column = kernel.machine()
    if column is not None:
        seccomp.prepared(column, refused_calls(setting))
    return setting, reasons


def _try_namespaces(scratch: str, account: int | None) -> None:
    jail.enter(scratch, account)
    reason = _reason_against(
        lambda: jail.own_box(1, 16), fork=lambda: kernel.fork_apart(jail.OF_A_JOB)
    )
    if reason:
        raise OSError(reason)


def _try_meter() -> int:
    """Try in a child whether files can be metered; return the error number, or 0.

    The child cannot write anything afterwards, because nothing would answer its calls.
    """
    pid = os.fork()
    if pid == 0:
        number = 0
        try:
            seccomp.install_meter(meter.ASKED)
        except OSError as error:
            number = error.errno or errno.EPERM
        finally:
            os._exit(number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _reason_against(attempt: Callable[[], object], fork: Callable[[], int] = os.fork) -> str:
    """Try an action in a child; return why it fails, or an empty text if it succeeds."""
    reading, writing = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            attempt()
            os.write(writing, b"ok")
        except BaseException as error:
            os.write(writing, str(error)[:500].encode() or b"failed")
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        answer = file.read().decode()
    os.waitpid(pid, 0)
    return "" if answer == "ok" else answer or "the process that tried it died"
