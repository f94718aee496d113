"""Controls a zygote from the process that submits programs."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from laurel.extensions.code.sandbox.control_group import ControlGroup, GroupPlace
from laurel.extensions.code.sandbox.inside.messages import receive, send
from laurel.extensions.code.sandbox.jobs import Limits
from laurel.sandbox.inside.boxes import remove_box
from laurel.sandbox.inside_process import SandboxStartError, inside_command, own_interpreter

_ZYGOTE = "laurel.extensions.code.sandbox.inside.zygote"
START_SECONDS = 60.0
"""The time that a zygote has to start, which is long because the machine may be busy."""
END_SECONDS = 5.0
GRACE_SECONDS = 10.0
"""The time that a monitor may take beyond the limit of wall time of its job."""
_LONGEST_REPLY = 1 << 14
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    # Otherwise the order of a set of texts, and verdicts that depend on it, would be random.
    "PYTHONHASHSEED": "0",
    # One arena, as each more would take 64 MB of a program's address space.
    "MALLOC_ARENA_MAX": "1",
    # Otherwise each fork would look up the functions of the C library again.
    "LD_BIND_NOW": "1",
}


class SandboxLostError(RuntimeError):
    """Raised if the sandbox itself failed during a job, or before it."""


class SandboxLateError(SandboxLostError):
    """Raised if a program had not started when its wall time was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOutcome:
    """How a process that ran a program ended, as its monitor saw it."""

    ended_by: str
    """The cause of the end: `exit` (by itself); `wall`, `stdout`, `stderr` or `result` (it reached
    that limit); `cancel`; `disk` (its files cannot be measured); or `memory` (the kernel killed it,
    because its control group had none left).
    """
    exit_code: int | None = None
    signal: int | None = None
    cpu_s: float | None = None
    wall_s: float = 0.0
    max_rss_kb: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    result: bytes = b""
    truncated: frozenset[str] = field(default_factory=frozenset)


class RunningJob:
    """A running program; only one thread may use this object."""

    def __init__(
        self, link: socket.socket, limits: Limits, group: ControlGroup | None = None
    ) -> None:
        self._link = link
        self._group = group
        self._killed_before = group.num_killed() if group else 0
        self._deadline = time.monotonic() + limits.wall_s + GRACE_SECONDS

    def outcome(self) -> ProcessOutcome:
        """Wait until the job ends, and return its outcome.

        Raises:
            SandboxLostError: The job could not be isolated, or its monitor is gone or late.
        """
        try:
            header, parts = receive(self._link, self._deadline)
        except TimeoutError as error:
            raise SandboxLostError("the monitor of the program does not answer") from error
        except OSError as error:
            raise SandboxLostError("the monitor of the program is gone") from error
        finally:
            self._link.close()
        # The kernel ends a program whose control group has no memory left.
        lacked_memory = (
            self._group is not None
            and header.get("signal") == signal.SIGKILL
            and self._group.num_killed() > self._killed_before
        )
        if not header["ready"]:
            if header.get("ended_by") in ("wall", "cancel") and not header["said"]:
                raise SandboxLateError("the program did not start in time")
            raise SandboxLostError(header["said"] or "the program could not be started")
        stdout, stderr, result = parts
        return ProcessOutcome(
            ended_by="memory" if lacked_memory else header["ended_by"],
            exit_code=header.get("exit_code"),
            signal=header.get("signal"),
            cpu_s=header.get("cpu_s"),
            wall_s=header["wall_s"],
            max_rss_kb=header.get("max_rss_kb", 0),
            stdout=stdout,
            stderr=stderr,
            result=result,
            truncated=frozenset(header["truncated"]),
        )

    def cancel(self) -> None:
        """End the program; `outcome` can still be called."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the program, and discard its outcome; further calls do nothing."""
        self._link.close()


class ZygoteProcess:
    """A zygote that starts jobs, and that is restarted when it dies; thread-safe."""

    def __init__(
        self,
        layers: frozenset[str],
        *,
        interpreter: str | None = None,
        scratch: str | None = None,
        place: GroupPlace | None = None,
    ) -> None:
        """Set up a zygote without starting it.

        Args:
            layers: The layers to use, if the machine supports them.
            interpreter: The Python that runs programs; by default the one that runs this.
            scratch: The directory for temporary directories; by default the system's.
            place: The place where the zygote gets a control group; by default it has none.
        """
        self.wanted = layers
        self.layers: frozenset[str] = frozenset()
        """The layers in use, which are known once the zygote has started."""
        self.reasons: Mapping[str, str] = {}
        """The reason why each other layer is not in use."""
        self._interpreter = interpreter or own_interpreter()
        self._parent_of_scratch = scratch
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._scratch: str | None = None
        self._place = place
        self._group: ControlGroup | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id of the zygote; None while it has no process."""
        with self._lock:
            return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the zygote unless it is alive; raise `SandboxStartError` if that fails."""
        with self._lock:
            if self._closed:
                raise SandboxStartError("the sandbox has been shut down")
            if self._process is not None and self._process.poll() is not None:
                self._stop()
            if self._process is None:
                self._start()

    def run(
        self,
        header: Mapping[str, Any],
        *parts: bytes,
        limits: Limits,
        stdin: bytes = b"",
        channel: socket.socket | None = None,
    ) -> RunningJob:
        """Start a program.

        Args:
            header: The kind of the job, and the fields of that kind.
            parts: The source of the program, and the other parts of its kind.
            channel: One end of a connection for the program; the caller's descriptor stays open.

        Raises:
            SandboxLostError: The zygote died twice.
            SandboxStartError: The zygote does not start.
        """
        for _ in range(2):
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                with self._lock, there:
                    self.start()
                    assert self._control is not None
                    group = self._group
                    if group is not None:
                        group.allow(limits)
                    given = [there.fileno()] + ([channel.fileno()] if channel else [])
                    socket.send_fds(self._control, [b"j"], given)
                send(here, {**header, "limits": limits.message()}, *parts, stdin)
            except OSError:
                here.close()
                with self._lock:
                    self._stop()
                continue
            except BaseException:
                here.close()
                raise
            return RunningJob(here, limits, group)
        raise SandboxLostError("the sandbox dies as soon as it has started")

    def one(
        self, header: Mapping[str, Any], *parts: bytes, limits: Limits, stdin: bytes = b""
    ) -> ProcessOutcome:
        """Run a program to its end.

        Args:
            header: The kind of the job, `script` or `call`, and the fields of that kind.
            parts: The source of the program, and the other parts of its kind.

        Raises:
            SandboxLostError: The sandbox failed, and not the program.
            SandboxStartError: The sandbox does not start.
        """
        running = self.run(header, *parts, limits=limits, stdin=stdin)
        try:
            return running.outcome()
        finally:
            running.close()

    def pair(
        self,
        code: bytes,
        header: Mapping[str, Any],
        *parts: bytes,
        limits: Limits,
        is_waiting: Callable[[ProcessOutcome], bool],
    ) -> tuple[ProcessOutcome, ProcessOutcome]:
        """Run tests that call a program, with a process for the tests and one for the program.

        Args:
            parts: The source of the tests, and their other parts.
            is_waiting: Returns, for the outcome of the tests, whether to wait for the program's own
                end, which explains a missing answer. Otherwise the program is killed.

        Returns:
            The outcomes of the tests and of the program.

        Raises:
            SandboxLostError: The sandbox failed, and not the program.
            SandboxStartError: The sandbox does not start.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours, theirs:
            candidate = self.run({"kind": "serve"}, code, limits=limits, channel=theirs)
            try:
                tester = self.run(header, *parts, limits=limits, channel=ours)
                # Otherwise neither would see that the other is gone.
                ours.close()
                theirs.close()
                try:
                    verdict = tester.outcome()
                finally:
                    tester.close()
                if not is_waiting(verdict):
                    candidate.cancel()
                return verdict, candidate.outcome()
            finally:
                candidate.close()

    def discard(self) -> None:
        """End the zygote and its programs; the next job starts a new zygote."""
        with self._lock:
            self._stop()

    def close(self) -> None:
        """End the zygote and its programs permanently; further calls do nothing."""
        with self._lock:
            self._closed = True
            self._stop()

    def _start(self) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._scratch = tempfile.mkdtemp(prefix="laurel-sandbox-", dir=self._parent_of_scratch)
        with tempfile.TemporaryFile() as output, there:
            self._process = subprocess.Popen(
                inside_command(self._interpreter, _ZYGOTE, str(there.fileno())),
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                cwd="/",
                env=_ENVIRONMENT,
                start_new_session=True,  # Ctrl-C is for the trainer, which saves before it ends
            )
            there.close()
            try:
                if self._place is not None:  # before it starts anything
                    self._group = ControlGroup(self._place)
                    self._group.allow(Limits())
                    self._group.take(self._process.pid)
                here.settimeout(START_SECONDS)
                request = {"layers": sorted(self.wanted), "scratch": self._scratch}
                here.sendall(json.dumps(request).encode())
                received = b""
                while not received.endswith(b"\n"):
                    part = here.recv(_LONGEST_REPLY)
                    if not part:
                        raise SandboxStartError("its process ended")
                    received += part
                reply = json.loads(received)
                if "failed" in reply:
                    raise SandboxStartError(reply["failed"])
                self.layers, self.reasons = frozenset(reply["layers"]), reply["reasons"]
            except (OSError, ValueError, SandboxStartError) as error:
                here.close()
                self._stop()
                output.seek(0)
                last = output.read().decode(errors="replace").strip()[-2000:]
                raise SandboxStartError(
                    f"the sandbox does not start: {error}" + (f"\n{last}" if last else "")
                ) from error
        self._control = here
        if "namespaces" in self.layers:
            self._remove_scratch()  # it stays empty, and might be left behind later

    def _stop(self) -> None:
        """End the zygote and its jobs, whose outcomes then raise an error."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._group is not None:
            self._group.end()
            self._group = None
        self._remove_scratch()

    def _remove_scratch(self) -> None:
        if self._scratch is not None:
            with contextlib.suppress(OSError):  # a program's own account may own its files
                remove_box(self._scratch)
            self._scratch = None


class TimeIsUpError(Exception):
    """Raised if the deadline of a call stopped a program before the program's own time limit."""


class BoundedZygote:
    """Runs programs in a zygote until a deadline, then raises `TimeIsUpError`."""

    def __init__(self, runner: ZygoteProcess, until: float | None) -> None:
        self._runner = runner
        self._until = until

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def one(self, *args: Any, limits: Limits, **options: Any) -> ProcessOutcome:
        """Run a program, as `ZygoteProcess` does."""
        bounded, is_shorter = self._bounded(limits)
        outcome = self._runner.one(*args, limits=bounded, **options)
        self._check(is_shorter, outcome)
        return outcome

    def pair(
        self, *args: Any, limits: Limits, **options: Any
    ) -> tuple[ProcessOutcome, ProcessOutcome]:
        """Run tests with a program, as `ZygoteProcess` does."""
        bounded, is_shorter = self._bounded(limits)
        found = self._runner.pair(*args, limits=bounded, **options)
        self._check(is_shorter, *found)
        return found

    def _bounded(self, limits: Limits) -> tuple[Limits, bool]:
        if self._until is None:
            return limits, False
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeIsUpError
        if left >= limits.wall_s:
            return limits, False
        return replace(limits, wall_s=left), True

    def _check(self, is_shorter: bool, *outcomes: ProcessOutcome) -> None:
        if is_shorter and any(outcome.ended_by == "wall" for outcome in outcomes):
            raise TimeIsUpError
