"""A worker group of one, in a process of its own on this machine, without Ray."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from laurel.errors import WorkerError
from laurel.workers.calls import (
    ENDING,
    Failure,
    GroupCalls,
    Outcome,
    WorkerCall,
    failure_of,
    without_shared,
)
from laurel.workers.rendezvous import RankPlace


class SpawnedGroup(GroupCalls):
    """A `WorkerGroup` whose one worker lives in a process started by this one.

    The process ends with this one, however it ends: it reads from a pipe that this one holds.
    """

    def __init__(
        self,
        role: str,
        worker_class: Callable[..., Any],
        *args: Any,
        limit: float = 1800.0,
        cpu_threads: int | None = None,
        local_rank: int = 0,
        **kwargs: Any,
    ) -> None:
        """Start the process and make the worker `worker_class(place, *args, **kwargs)`.

        Args:
            worker_class: A class that can be imported.
            limit: Seconds until a call is late, where the call does not say.
            cpu_threads: Threads of its arithmetic; None: as in this process.
            local_rank: Which GPU it takes, where there are any.

        Raises:
            WorkerError: The worker could not be made.
        """
        self.role, self.size = role, 1
        self._limit = limit
        self._lock = threading.Lock()
        self._count = 0
        self._owed: dict[int, Future[Outcome]] = {}
        self._pipe, theirs = Pipe()
        threads = {} if cpu_threads is None else {"OMP_NUM_THREADS": str(cpu_threads)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "laurel.workers.spawned", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, **threads},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()  # or the end of the process would not be seen
        threading.Thread(target=self._listen, name=f"laurel-{role}", daemon=True).start()
        try:
            self._pipe.send(sys.path)
            payload = pickle.dumps((worker_class, WorkerCall("", args, kwargs)))
            place = RankPlace(role=role, local_rank=local_rank)
            self._ask("build", "", payload, place, place.environment()).wait()
        except BaseException:
            self._kill()
            raise

    def _ask(self, what: str, method: str, *arguments: Any) -> _Asked:
        future: Future[Outcome] = Future()
        is_gone = False
        with self._lock:
            number = self._count
            self._count += 1
            self._owed[number] = future
            try:
                self._pipe.send((number, what, arguments))
            except OSError:  # and the thread that listens may have seen it before this was owed
                is_gone = True
        if is_gone or self._process.poll() is not None:
            self._give_up()
        return _Asked(self, method, future)

    def _submit(self, calls: Mapping[int, WorkerCall]) -> _Asked:
        self._check_open()
        call, shared = without_shared(calls[0])
        values = [one.carried(pickle.dumps) for one in shared]
        return self._ask("run", call.method, pickle.dumps((None, call)), *values)

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, answer = self._pipe.recv()
                with self._lock:
                    future = self._owed.pop(number, None)
                if future is None:  # its caller has seen the end of the process before
                    continue
                try:
                    outcome: Outcome = pickle.loads(answer)
                except Exception as error:  # an exception's class may want more than its text
                    outcome = failure_of(error, rank=0)
                future.set_result(outcome)
        self._give_up()

    def _give_up(self) -> None:
        # The process is gone: no outstanding answer will come.
        with self._lock:
            owed, self._owed = self._owed, {}
        if owed:
            with suppress(subprocess.TimeoutExpired):  # its pipe is closed a moment before
                self._process.wait(1.0)
            gone = Failure(kind="died", rank=0, summary=self.death() or "its process is gone")
            for future in owed.values():
                future.set_result(gone)

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def death(self) -> str | None:
        """Explain how the process ended; None where it lives."""
        status = self._process.poll()
        if status is None:
            return None
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        return f"its process is gone ({how})"

    def alive(self) -> list[bool]:
        """Report whether the process lives."""
        return [self._is_open and self._process.poll() is None]

    def _close(self) -> None:
        if self._failure is None:
            with suppress(WorkerError):
                self._ask("close", "shutdown").wait(timeout=ENDING)
        self._kill()

    def _kill(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if self._is_open or self._failure else ENDING)
        self._process.kill()
        self._process.wait()
        self._give_up()


class _Asked:
    def __init__(self, group: SpawnedGroup, method: str, future: Future[Outcome]) -> None:
        self._group, self._method, self._future = group, method, future

    def done(self) -> bool:
        return self._future.done()

    def wait(self, *, timeout: float | None = None) -> list[Any]:
        limit = self._group._limit if timeout is None else timeout
        try:
            outcome = self._future.result(limit)
        except TimeoutError:
            outcome = Failure(kind="late", rank=0)
        if isinstance(outcome, Failure):
            self._group._raise(self._method, [outcome], limit=limit)
        return [outcome.value]


# The process of a `SpawnedGroup`: does what is asked, one after the other, until nobody asks.


def serve_calls(asked: Connection) -> None:
    """Answer every call with its number; end with the process that asks."""
    from laurel.workers.worker_actor import WorkerActor

    calls: SimpleQueue[Any] = SimpleQueue()

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                calls.put(asked.recv())
        os._exit(1)  # the process that asks is gone, perhaps in the middle of a call

    actor = WorkerActor(0, asked.recv())
    threading.Thread(target=listen, name="laurel-calls", daemon=True).start()
    while True:
        number, method, arguments = calls.get()
        if method == "run":  # its shared values come as they were made ready
            arguments = (arguments[0], *map(pickle.loads, arguments[1:]))
        answer: Any = getattr(actor, method)(*arguments)
        with suppress(OSError):
            asked.send((number, answer))
        if method == "close":
            return


if __name__ == "__main__":
    serve_calls(Connection(int(sys.argv[1])))
