"""Runs a job on a machine that somebody else locks in: the keeper of its processes, and its report.

Only what this process does for itself is done here: limits, caps, the kill by the clock, separate
processes for a program and its tests. What a program can reach is the server's business.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from laurel.sandbox.inside import kinds
from laurel.sandbox.inside.confinement import CHANNEL_FD, RESULT_FD

_LOOK_SECONDS = 0.005
_OUTPUTS = ("stdout", "stderr", "result")


@dataclass
class _Child:
    """A process, and the files that its outputs go to."""

    pid: int
    files: dict[str, Any]
    began: float
    ended_by: str = "exit"
    status: int | None = None
    usage: Any = None


def main(order: dict[str, Any]) -> None:
    """Run what is ordered, print the report, and end this process.

    Args:
        order: `jobs` (one, or a program and the tests that call it; `header`, `parts` and `stdin`,
            base64 each), and the `limits` of each.
    """
    limits = order["limits"]
    children: list[_Child] = []
    ends: list[socket.socket | None] = [None]
    if len(order["jobs"]) == 2:
        ends = [*socket.socketpair()]
    for job, channel in zip(order["jobs"], ends, strict=True):
        children.append(_begin(job, limits, channel))
    for end in ends:
        if end is not None:
            end.close()
    last = children[-1]
    _watch(last, limits)
    if len(children) == 2:
        if not _is_waiting(last):
            _kill(children[0], "cancel")
        _watch(children[0], limits)
    report = [_report(child, limits) for child in children]
    # The mark has not been read until now, when nobody is left who could repeat it.
    mark = os.read(0, 100).decode().strip()
    sys.__stdout__.write(f"\n{mark}{json.dumps(report)}\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]
    os._exit(0)


def _begin(job: dict[str, Any], limits: dict[str, Any], channel: socket.socket | None) -> _Child:
    # They outlive this function.
    files = {name: tempfile.TemporaryFile() for name in _OUTPUTS}  # noqa: SIM115
    given = tempfile.TemporaryFile()  # noqa: SIM115
    given.write(base64.b64decode(job["stdin"]))
    given.seek(0)
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            _become(job, limits, [given, *files.values()], channel)
        finally:
            os._exit(70)
    given.close()
    return _Child(pid, files, began)


def _become(
    job: dict[str, Any], limits: dict[str, Any], files: list[Any], channel: socket.socket | None
) -> None:
    os.setsid()
    wanted = dict(zip((0, 1, 2, RESULT_FD), (one.fileno() for one in files), strict=True))
    if channel is not None:
        wanted[CHANNEL_FD] = channel.fileno()
    # First out of the way of the numbers that they shall have.
    high = {number: os.dup2(was, 100 + number) for number, was in wanted.items()}
    for number, was in high.items():
        os.dup2(was, number)
    os.closerange(max(wanted) + 1, 4096)
    cpu = max(1, int(limits["cpu_s"] + 0.999))
    for kind, most in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, int(limits["mem_mb"]) << 20),
        (resource.RLIMIT_FSIZE, int(limits["disk_mb"]) << 20),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # the server's own limit is lower
            resource.setrlimit(kind, (most, most + (kind == resource.RLIMIT_CPU)))
    with contextlib.suppress(OSError):
        os.chdir(tempfile.mkdtemp())
    kinds.hide()
    kinds.open_streams()
    kinds.run(job["header"], [base64.b64decode(part) for part in job["parts"]])


def _watch(child: _Child, limits: dict[str, Any]) -> None:
    """Wait for its end, or bring it about."""
    while child.status is None:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            child.status, child.usage = status, usage
            break
        if time.monotonic() - child.began > limits["wall_s"]:
            _kill(child, "wall")
        for name in _OUTPUTS:
            if os.fstat(child.files[name].fileno()).st_size > limits[f"{name}_kb"] << 10:
                _kill(child, name)
        time.sleep(_LOOK_SECONDS)
    with contextlib.suppress(OSError):  # what it has left behind
        os.killpg(child.pid, signal.SIGKILL)


def _kill(child: _Child, why: str) -> None:
    if child.ended_by == "exit":
        child.ended_by = why
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(child.pid, signal.SIGKILL)


def _is_waiting(tests: _Child) -> bool:
    """Whether the tests say that the program went away before it answered."""
    tests.files["result"].seek(0)
    try:
        return bool(json.loads(tests.files["result"].read()).get("why") == "gone")
    except (ValueError, AttributeError):
        return False


def _report(child: _Child, limits: dict[str, Any]) -> dict[str, Any]:
    assert child.status is not None
    code = os.waitstatus_to_exitcode(child.status)
    said: dict[str, Any] = {
        "ended_by": child.ended_by,
        "exit_code": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
        "cpu_s": child.usage.ru_utime + child.usage.ru_stime,
        "wall_s": time.monotonic() - child.began,
        "max_rss_kb": child.usage.ru_maxrss,
        "truncated": [],
    }
    for name in _OUTPUTS:
        child.files[name].seek(0)
        most = limits[f"{name}_kb"] << 10
        text = child.files[name].read(most + 1)
        if len(text) > most:
            said["truncated"].append(name)
        said[name] = base64.b64encode(text[:most]).decode()
    return said
