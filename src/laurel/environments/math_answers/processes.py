"""The zygote and its workers, seen from the process that asks them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from laurel.environments.math_answers.messages import receive, send
from laurel.errors import EnvironmentFailedError

START_SECONDS = 120.0
"""Limit for a process to be ready: it imports a large library, perhaps from a slow disk."""
_END_SECONDS = 5.0
_KEPT_VARIABLES = (
    "PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH",
    "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip


class Worker:
    """One process that checks answers, one at a time. Used by one thread."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self.pid = pid
        self.items = 0
        """Questions asked so far."""
        self._link = link

    def ask(self, message: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """The reply to a message.

        Raises:
            TimeoutError: There was none before the deadline (`time.monotonic`).
            OSError: The process is gone.
        """
        self.items += 1
        self._link.settimeout(max(deadline - time.monotonic(), 1e-3))
        send(self._link, message)
        return self.reply(deadline)

    def reply(self, deadline: float) -> dict[str, Any]:
        """What the process says next; see `ask` for the errors."""
        return receive(self._link, deadline)

    def close(self) -> None:
        """Close this end of the connection."""
        self._link.close()


class Zygote:
    """Starts and ends workers. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may close it at any point
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._workers: dict[int, Worker] = {}
        self._broken: EnvironmentFailedError | None = None
        self._closed = False

    def process_ids(self) -> list[int]:
        """The zygote and its workers, as far as they live."""
        with self._lock:
            return [*([self._process.pid] if self._process else []), *self._workers]

    def start_worker(self) -> Worker:
        """A worker that is ready for its first question.

        Raises:
            EnvironmentFailedError: It does not start, or gives wrong verdicts on known answers.
        """
        for _ in range(2):  # the second with a new zygote, where the first was killed
            with self._lock:
                control = self._running()
                here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    socket.send_fds(control, [b'{"do": "start"}'], [there.fileno()])
                    pid = receive(control, time.monotonic() + START_SECONDS)["pid"]
                except OSError:
                    here.close()
                    self._stop()
                    continue
                finally:
                    there.close()
                worker = self._workers[pid] = Worker(pid, here)
            try:
                _refuse_liar(worker.reply(time.monotonic() + START_SECONDS))
            except OSError:
                self.end_worker(worker)
                continue
            except EnvironmentFailedError:
                self.end_worker(worker)
                raise
            return worker
        raise EnvironmentFailedError("processes that check answers die as soon as they are started")

    def end_worker(self, worker: Worker) -> None:
        """Kill a worker, whatever it is doing."""
        with self._lock:
            worker.close()
            if self._workers.get(worker.pid) is not worker or self._control is None:
                return  # it went with its zygote
            del self._workers[worker.pid]
            try:
                send(self._control, {"do": "end", "pid": worker.pid})
                receive(self._control, time.monotonic() + _END_SECONDS)
            except OSError:
                self._stop()

    def close(self) -> None:
        """End everything. Idempotent; nothing can be started afterwards."""
        with self._lock:
            self._closed = True
            self._stop()

    # ------------------------------------------------------------------------- under the lock

    def _running(self) -> socket.socket:
        if self._closed:
            raise EnvironmentFailedError("the checker of answers has been shut down")
        if self._broken is not None:
            raise self._broken
        if self._control is None:
            try:
                self._control = self._start()
            except EnvironmentFailedError as error:
                self._broken = error  # it would be the same for every answer
                raise
        return self._control

    def _start(self) -> socket.socket:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from laurel.environments.math_answers.zygote import main\n"
            f"main({there.fileno()})"
        )
        with tempfile.TemporaryFile() as said, there:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the trainer, which saves before it goes
            )
            there.close()
            try:
                _refuse_liar(receive(here, time.monotonic() + START_SECONDS))
            except (OSError, EnvironmentFailedError) as error:
                here.close()
                self._stop()
                said.seek(0)
                last = said.read().decode(errors="replace").strip()[-2000:]
                raise EnvironmentFailedError(
                    f"the process that checks answers does not start: {error}"
                    + (f"\n{last}" if last else "")
                ) from error
        return here

    def _stop(self) -> None:
        """End the zygote, which ends its workers; the threads that wait for them see that."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._workers.clear()


def _environment() -> dict[str, str]:
    """What the processes need to find Python and libraries; no keys or tokens of the trainer."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    # Python integers: those of gmpy2 do long computations that nothing can interrupt.
    return {**kept, "SYMPY_GROUND_TYPES": "python", "MALLOC_ARENA_MAX": "1"}


def _refuse_liar(said: dict[str, Any]) -> None:
    if said["failed"]:
        raise EnvironmentFailedError(
            "math-verify gives wrong verdicts on known answers; is its version one that Laurel "
            f"is tested with? {'; '.join(said['failed'])}"
        )
