"""Runs one job from outside of it: starts it, enforces its limits, ends it, and reports.

The zygote forks the monitor into the job's namespaces, where it is pid 1: when it ends, everything
in them ends, and nothing in them can signal it. It forks the process that runs the program. Both
are *armed* ahead of time: they are fully isolated, and wait for the only job that they will run.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import select
import signal
import socket
import time
from typing import Any

from laurel.extensions.code.sandbox.inside import jail, kinds
from laurel.extensions.code.sandbox.inside.messages import receive, send
from laurel.extensions.code.sandbox.inside.meter import Meter
from laurel.extensions.code.sandbox.inside.rights import (
    CHANNEL_FD,
    WORK_FD,
    Confinement,
    confine,
    limit,
)
from laurel.sandbox.inside import kernel
from laurel.sandbox.inside.boxes import make_box, remove_box

ARMED, WATCHING, RUNNING = "laurel-armed", "laurel-monitor", "laurel-program"
"""The names of the processes, for people and for tests."""
_AT_ONCE = 1 << 16
_STATUS_CAP = 1 << 12
_OUTPUTS = ("stdout", "stderr", "result")
_READY = b"ready"
# Sent first where a program is metered, with the descriptor at which its calls are answered.
_METERED = b"m"
# Size of an armed box, which is resized for a job that wants another.
_BOX_MB, _BOX_INODES = 32, 2048
# Replacements of a program that is killed while it waits for its order.
_REPLACEMENTS = 3


def monitor(setting: Confinement, scratch: str, orders: socket.socket) -> None:
    """Prepare for one job, wait for it, and run it.

    Args:
        scratch: The directory for the jobs' root directories if there are no namespaces.
        orders: The connection from the zygote. It passes a connection to the client with the order,
            and another descriptor for the program, if any. When the client closes its connection,
            or shuts down its side of it, the job is ended. When the zygote closes this connection,
            nothing is run.
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.set_name(ARMED)
    namespaces = "namespaces" in setting.layers
    box = jail.BOX if namespaces else make_box(scratch)
    try:
        watched, problem = None, ""
        try:
            if namespaces:
                jail.own_box(_BOX_MB, _BOX_INODES)
            else:
                kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            watched = _Watched(setting, box)
        except OSError as error:
            problem = str(error)
        for _ in range(_REPLACEMENTS + 1):
            if _has_order(orders, watched):
                break
            assert watched is not None
            watched = watched.again(setting, box)  # another process killed it
        else:
            return  # the zygote arms another monitor
        message, descriptors, _, _ = socket.recv_fds(orders, 1, 2)
        if not message:  # no order will come
            return
        link = socket.socket(fileno=descriptors[0])
        channel = descriptors[1] if len(descriptors) > 1 else None
        kernel.set_name(WATCHING)
        try:
            if watched is None:
                raise OSError(problem)
            if watched.is_lost():  # it was killed just before the order came
                watched = watched.again(setting, box)
            _do(watched, setting, link, channel)
        except BaseException as error:
            with contextlib.suppress(OSError):
                send(link, {"ready": False, "said": f"{type(error).__name__}: {error}"})
    finally:
        if not namespaces:
            _end_descendants()
            remove_box(box)


def _has_order(orders: socket.socket, watched: _Watched | None) -> bool:
    """Wait for an order or for the end of the process; return whether an order came."""
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    if watched is not None:
        poll.register(watched.program_fd, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == orders.fileno():
                return True
            assert watched is not None
            if watched.is_lost():
                return False
            poll.unregister(descriptor)  # it could not be isolated: the report says why


def _do(watched: _Watched, setting: Confinement, link: socket.socket, channel: int | None) -> None:
    """Run the job that a connection sends, and reply with its report."""
    job, parts = receive(link)
    stdin = parts.pop()
    limits = job["limits"]
    if "namespaces" in setting.layers:
        megabytes, inodes = int(limits["disk_mb"]), int(limits["inodes"])
        if (megabytes, inodes) != (_BOX_MB, _BOX_INODES):
            jail.resize_box(megabytes, inodes)
    watched.begin(job, parts, stdin, channel)
    try:
        ended_by = watched.watch(link)
    finally:
        watched.end(apart="namespaces" in setting.layers)
    watched.drain()
    report = {**watched.report(ended_by), "ended_by": ended_by}
    send(link, report, *(bytes(watched.outputs[name]) for name in _OUTPUTS))


class _Watched:
    """The process of the program, its pipes, and their outputs."""

    def __init__(self, setting: Confinement, box: str) -> None:
        self.outputs = {name: bytearray() for name in _OUTPUTS}
        self.truncated: list[str] = []
        self.said = b""  # written by the process itself, before it runs the program
        self.usage: Any = None
        self.code = 0
        self.work, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        stdin, self.stdin_pipe = os.pipe()
        pipes = {name: os.pipe() for name in _OUTPUTS}
        monitor_id = os.getpid()
        self._setting, self._box = setting, box
        self._meter: Meter | None = None
        self.pid = os.fork()
        if self.pid == 0:
            given = {0: stdin, **{n: pipes[name][1] for n, name in enumerate(_OUTPUTS, 1)}}
            try:
                _run(setting, box, given, theirs.fileno(), monitor_id)
            finally:
                os._exit(70)
        self.program_fd = kernel.open_process(self.pid)
        theirs.close()
        for descriptor in (stdin, *(writing for _, writing in pipes.values())):
            os.close(descriptor)
        self.names = {reading: name for name, (reading, _) in pipes.items()}
        for descriptor in (*self.names, self.stdin_pipe):
            os.set_blocking(descriptor, False)

    def is_lost(self) -> bool:
        """Report whether the process has ended without reporting a reason."""
        poll = select.poll()
        poll.register(self.program_fd, select.POLLIN)
        if not poll.poll(0):
            return False
        self.hear()
        return not self.said.removeprefix(_METERED)

    def again(self, setting: Confinement, box: str) -> _Watched:
        """Start a new process in place of this one, which died; the job does not notice."""
        os.waitpid(self.pid, 0)
        self.work.close()
        for descriptor in (self.program_fd, self.stdin_pipe, *self.names):
            os.close(descriptor)
        return _Watched(setting, box)

    def begin(
        self, job: dict[str, Any], parts: list[bytes], stdin: bytes, channel: int | None
    ) -> None:
        """Start the program in the waiting process."""
        self.stdin = memoryview(stdin)
        limits = job["limits"]
        self.caps = {name: int(limits[f"{name}_kb"]) << 10 for name in _OUTPUTS}
        self.started = time.monotonic()
        self.deadline = self.started + limits["wall_s"]
        if self._setting.metered:
            self._take_meter(limits)
        with contextlib.suppress(OSError):  # it is gone, which `watch` notices
            socket.send_fds(self.work, [b"j"], [] if channel is None else [channel])
            send(self.work, job, *parts)
        if channel is not None:
            os.close(channel)  # otherwise its other end would never see it closed

    def _take_meter(self, limits: dict[str, Any]) -> None:
        """Receive the descriptor for answering calls, or the reason why isolation failed."""
        self.work.settimeout(limits["wall_s"])
        with contextlib.suppress(OSError):
            message, descriptors, _, _ = socket.recv_fds(self.work, len(_METERED), 1)
            if not descriptors:
                self.said += message
                return
            outputs = {}
            for reading in self.names:
                found = os.fstat(reading)
                outputs[found.st_dev, found.st_ino] = functools.partial(self._take, reading)
            self._meter = Meter(
                descriptors[0],
                self.pid,
                self._box,
                outputs,
                megabytes=int(limits["disk_mb"]),
                inodes=int(limits["inodes"]),
            )
        self.work.settimeout(None)

    def watch(self, link: socket.socket) -> str:
        """Wait until the job has ended or must end, and return why."""
        poll = select.poll()
        if self._meter is not None:
            poll.register(self._meter.listener, select.POLLIN)
        poll.register(link, select.POLLIN)
        poll.register(self.program_fd, select.POLLIN)
        for descriptor in self.names:
            poll.register(descriptor, select.POLLIN)
        if self.stdin:
            poll.register(self.stdin_pipe, select.POLLOUT)
        else:
            os.close(self.stdin_pipe)
        while True:
            left = self.deadline - time.monotonic()
            if left <= 0:
                return "wall"
            for descriptor, _ in poll.poll(left * 1000 + 1):
                if descriptor == link.fileno():
                    return "cancel"
                if descriptor == self.program_fd:
                    return "exit"
                if self._meter is not None and descriptor == self._meter.listener:
                    if why := self._meter.answer():
                        return why
                elif descriptor == self.stdin_pipe:
                    if not self._feed():
                        poll.unregister(descriptor)
                        os.close(descriptor)
                elif (read := self._read(descriptor)) != "more":
                    poll.unregister(descriptor)
                    if read == "full":
                        return self.names[descriptor]

    def end(self, *, apart: bool) -> None:
        """Kill the process with all its descendants, and wait for them.

        Args:
            apart: Whether it has its own namespaces, in which this process is pid 1.
        """
        with contextlib.suppress(ProcessLookupError):
            # -1 is all that this process can see but itself: this job's processes.
            os.kill(-1 if apart else self.pid, signal.SIGKILL)
        _, status, self.usage = os.wait4(self.pid, 0)
        self.code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(ChildProcessError):
            while apart:
                os.waitpid(-1, 0)
        if not apart:
            _end_descendants()

    def drain(self) -> None:
        """Read the rest of the pipes after all writers have ended."""
        for descriptor in self.names:
            while self._read(descriptor) == "more":
                pass
        self.hear()

    def hear(self) -> None:
        """Read what the process wrote before it ran the program."""
        self.work.setblocking(False)
        with contextlib.suppress(OSError):  # nothing, or it ended without reading its job
            while len(self.said) < _STATUS_CAP and (part := self.work.recv(_STATUS_CAP)):
                self.said += part

    def _read(self, descriptor: int) -> str:
        name = self.names[descriptor]
        try:
            part = os.read(descriptor, _AT_ONCE)
        except BlockingIOError:
            return "none"
        return self._keep(name, part) if part else "end"

    def _take(self, descriptor: int, piece: bytes) -> str:
        """Store a piece of an output that the `Meter` took instead of its pipe."""
        while (read := self._read(descriptor)) == "more":
            pass
        name = self.names[descriptor]
        return name if read == "full" or self._keep(name, piece) == "full" else ""

    def _keep(self, name: str, part: bytes) -> str:
        kept = self.outputs[name]
        kept += part[: self.caps[name] - len(kept)]
        if len(kept) < self.caps[name]:
            return "more"
        self.truncated.append(name)
        return "full"

    def _feed(self) -> bool:
        try:
            written = os.write(self.stdin_pipe, self.stdin[:_AT_ONCE])
        except OSError:  # the program has closed its stdin
            return False
        self.stdin = self.stdin[written:]
        return bool(self.stdin)

    def report(self, ended_by: str) -> dict[str, Any]:
        """Return the report on the program's end."""
        ours = ended_by != "exit"  # we killed it, so its end says nothing about the program
        return {
            "ready": self.said == _READY,
            "said": self.said.decode(errors="replace") if self.said != _READY else "",
            "truncated": self.truncated,
            "wall_s": time.monotonic() - self.started,
            "exit_code": None if ours or self.code < 0 else self.code,
            "signal": None if ours or self.code >= 0 else -self.code,
            "cpu_s": self.usage.ru_utime + self.usage.ru_stime,
            "max_rss_kb": self.usage.ru_maxrss,
        }


def _run(
    setting: Confinement, box: str, given: dict[int, int], work_fd: int, monitor_id: int
) -> None:
    """Give up all rights, wait for the job, and run it; this is the process of the program."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != monitor_id:
        return
    os.setsid()
    given = {**given, WORK_FD: work_fd}
    # First out of the way of the numbers that they will have.
    raised = {}
    for number, was in given.items():
        descriptor = os.dup(was)
        while descriptor <= WORK_FD:
            descriptor = os.dup(descriptor)
        raised[number] = descriptor
    for number, was in raised.items():
        os.dup2(was, number)
    with contextlib.suppress(OSError):
        os.close(CHANNEL_FD)
    work = socket.socket(fileno=WORK_FD)
    try:
        confine(setting, box, lambda listener: socket.send_fds(work, [_METERED], [listener]))
    except OSError as error:
        work.sendall(f"the program could not be isolated: {error}".encode())
        return
    kinds.open_streams()
    gc.enable()
    message, descriptors, _, _ = socket.recv_fds(work, 1, 1)
    if not message:
        return
    job, parts = receive(work)
    if descriptors and descriptors[0] != CHANNEL_FD:
        os.dup2(descriptors[0], CHANNEL_FD)
        os.close(descriptors[0])
    try:
        limit(setting, job["limits"])
    except OSError as error:
        work.sendall(f"the program could not be limited: {error}".encode())
        return
    kernel.set_name(RUNNING)
    work.sendall(_READY)
    work.close()
    kinds.run(job, parts)


def _end_descendants() -> None:
    """Kill and wait for all descendants of a job without namespaces, which this process adopts."""
    path = f"/proc/self/task/{os.getpid()}/children"
    while True:
        try:
            with open(path) as file:
                children = [int(pid) for pid in file.read().split()]
        except OSError:
            children = []
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0 if children else os.WNOHANG)
        except ChildProcessError:
            return
        if not children:
            return
