"""Processes that do one item at a time, each of which can be killed in the middle of it.

All processes of a pool are forked from one that has imported what they need and does nothing else
(the zygote), so that another one takes milliseconds::

    this process ==control socket==> zygote --fork--> process
          \\=============== a socket for each ===========/
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import pkgutil
import queue
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from laurel.errors import ConfigError, EnvironmentFailedError, LaurelError, UserError

START_SECONDS = 120.0
"""Limit for a process to be ready: it may import a large library from a slow disk."""
_END_SECONDS = 5.0
_LOOK_FOR_PARENT_SECONDS = 1.0
_AT_ONCE = 1 << 16
_LONGEST_ORDER = 1_000
_PR_SET_PDEATHSIG = 1


class ProcessDiedError(RuntimeError):
    """The process died of an item, or by another's hand while it did it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessWork:
    """What the processes of a pool do."""

    name: str
    """What the pool is, for messages."""
    prepare: str
    """`module:function`, called once with the settings in the zygote. What it returns is called
    without arguments in every process, and gives what is called with each item."""
    settings: Any = None
    """Plain data that JSON can carry, as items and results are."""
    attempts: int = 1
    """Processes that may die of an item before it is given up."""
    items_of_a_life: int | None = None
    """Items after which a fresh process takes the place of one."""
    memory_limit: int | None = None
    """Address space of a process, in bytes. One that has filled half of it is replaced."""
    environment: Mapping[str, str] | None = None
    """All variables that the processes have; None: those of this process."""


class ProcessPool:
    """Does items side by side, each within its limit.

    Processes are started when the first item comes. They end with `close`, with the last reference
    to the pool, and with this process, however it ends. Any thread may use it.

    The standard library's forkserver with pebble's pool does not do: there is one forkserver in a
    process for everybody, with that process's environment and its main program, which is run once
    more in each child; and pebble kills a process but not what that has started, and fails all that
    waits when an idle process dies.
    """

    def __init__(self, work: ProcessWork, *, num_workers: int, timeout_seconds: float) -> None:
        """Start nothing yet.

        Args:
            work: What is done.
            num_workers: Processes.
            timeout_seconds: Limit of one item, from the moment that a ready process has it.
        """
        self.num_workers = num_workers
        self._state = _State(work, timeout_seconds)
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _close, self._state, self._threads)

    def start(self) -> None:
        """Start one process, to see whether that can be done.

        Raises:
            ConfigError: The work refuses its settings.
            EnvironmentFailedError: The process does not start.
        """
        self._state.idle.append(self._state.zygote.start_worker())

    def submit(self, item: Any) -> Future[Any]:
        """Have an item done.

        Returns:
            The result to come. Instead, the future raises `TimeoutError` where the item took more
            than its limit, `ProcessDiedError` where the process died, and the errors of `start`.

        Raises:
            EnvironmentFailedError: The pool is closed.
            TypeError: JSON cannot carry the item, or (`ValueError`) the item contains itself.
        """
        message = json.dumps(item).encode() + b"\n"
        with self._starting:
            if self._state.zygote.closed:
                raise self._state.zygote.closed_error()
            for index in range(len(self._threads), self.num_workers):
                # A thread must not know the pool: that would keep it from being collected.
                thread = threading.Thread(
                    target=_serve, args=(self._state,), name=f"laurel-pool-{index}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
            future: Future[Any] = Future()
            self._state.items.put((message, future))
        return future

    def process_ids(self) -> list[int]:
        """The processes alive now, the zygote first."""
        return self._state.zygote.process_ids()

    def close(self) -> None:
        """End the processes. Items that run or wait fail. Idempotent."""
        with self._starting:
            self._finalizer()


class _State:
    """What the threads of a pool share."""

    def __init__(self, work: ProcessWork, timeout_seconds: float) -> None:
        self.work = work
        self.timeout_seconds = timeout_seconds
        self.items: queue.SimpleQueue[tuple[bytes, Future[Any]] | None] = queue.SimpleQueue()
        self.zygote = _Zygote(work)
        self.idle: list[_Worker] = []
        self.owner = os.getpid()


def _serve(state: _State) -> None:
    """Do one item after the other, each in a process that has nothing else to do."""
    while (item := state.items.get()) is not None:
        message, future = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(_result(state, message))
            except BaseException as error:
                future.set_exception(error)
        # Else this thread would hold the future, and what it answers for, while it waits.
        del item, message, future


def _result(state: _State, message: bytes) -> Any:
    for _ in range(state.work.attempts):
        worker = _ready_worker(state)
        try:
            reply = worker.ask(message, time.monotonic() + state.timeout_seconds)
        except TimeoutError:
            state.zygote.end_worker(worker)
            raise TimeoutError(f"it took more than {state.timeout_seconds:g} s") from None
        except OSError:
            state.zygote.end_worker(worker)
            continue
        if reply["retires"]:
            state.zygote.end_worker(worker)
        else:
            state.idle.append(worker)
        return reply["result"]
    if state.zygote.closed:
        raise state.zygote.closed_error()
    raise ProcessDiedError(f"{state.work.name}: the process died")


def _ready_worker(state: _State) -> _Worker:
    while True:
        try:
            worker = state.idle.pop()
        except IndexError:
            return state.zygote.start_worker()
        if worker.lives():
            return worker
        state.zygote.end_worker(worker)  # no item is to blame for that


def _close(state: _State, threads: list[threading.Thread]) -> None:
    if state.zygote.closed or os.getpid() != state.owner:  # a fork of the trainer has only copies
        return
    state.zygote.close()
    with suppress(queue.Empty):
        while True:
            item = state.items.get_nowait()
            if item is not None and item[1].set_running_or_notify_cancel():
                item[1].set_exception(state.zygote.closed_error())
    for _ in threads:
        state.items.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_END_SECONDS)


# --------------------------------------------------------------------------------------------------
# The zygote and its processes, seen from the process that asks them.


class _Worker:
    """One process, which one thread uses at a time."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self.pid = pid
        self.link = link

    def lives(self) -> bool:
        """Whether it can be asked; nothing may be under way."""
        self.link.settimeout(0)
        try:
            self.link.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def ask(self, message: bytes, deadline: float) -> dict[str, Any]:
        """The reply; TimeoutError where it is late, OSError where the process is gone."""
        self.link.settimeout(max(deadline - time.monotonic(), 1e-3))
        self.link.sendall(message)
        return _receive(self.link, deadline)


class _Zygote:
    """Starts and ends processes. Safe to use from several threads."""

    def __init__(self, work: ProcessWork) -> None:
        self.closed = False
        self._work = work
        self._lock = threading.RLock()  # the garbage collector may close it at any point
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._workers: dict[int, _Worker] = {}
        self._refusal: LaurelError | None = None

    def process_ids(self) -> list[int]:
        """The zygote and its processes, as far as they live."""
        with self._lock:
            return [*([self._process.pid] if self._process else []), *self._workers]

    def closed_error(self) -> EnvironmentFailedError:
        """What is raised where the pool has been closed."""
        return EnvironmentFailedError(f"{self._work.name} has been shut down")

    def start_worker(self) -> _Worker:
        """A process that is ready for its first item; see `ProcessPool.start` for the errors."""
        for _ in range(2):  # the second with a new zygote, where the first was killed
            with self._lock:
                control = self._running()
                here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    socket.send_fds(control, [b'{"order": "start"}'], [there.fileno()])
                    pid = _receive(control, time.monotonic() + START_SECONDS)["pid"]
                except OSError:
                    here.close()
                    self._stop()
                    continue
                finally:
                    there.close()
                worker = self._workers[pid] = _Worker(pid, here)
            try:
                self._refuse(_receive(here, time.monotonic() + START_SECONDS))
            except OSError:
                self.end_worker(worker)
            except LaurelError:
                self.end_worker(worker)
                raise
            else:
                return worker
        raise EnvironmentFailedError(
            f"{self._work.name}: the processes die as soon as they are started"
        )

    def end_worker(self, worker: _Worker) -> None:
        """Kill a process and what it has started, whatever it is doing."""
        with self._lock:
            worker.link.close()
            # By itself and not by its number, which another process may have by now.
            if self._workers.get(worker.pid) is not worker or self._control is None:
                return  # it went with its zygote
            del self._workers[worker.pid]
            try:
                _send(self._control, {"order": "end", "pid": worker.pid})
                _receive(self._control, time.monotonic() + _END_SECONDS)
            except OSError:
                self._stop()

    def close(self) -> None:
        """End everything. Idempotent; nothing can be started afterwards."""
        with self._lock:
            self.closed = True
            self._stop()

    # ------------------------------------------------------------------------- under the lock

    def _running(self) -> socket.socket:
        if self.closed:
            raise self.closed_error()
        if self._refusal is not None:
            raise self._refusal
        if self._control is None:
            try:
                self._control = self._start()
            except LaurelError as error:
                self._refusal = error  # it would be the same for every item
                raise
        return self._control

    def _start(self) -> socket.socket:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        work = self._work
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from laurel.workers.process_pool import be_zygote\n"
            f"be_zygote({there.fileno()}, {os.getpid()})"
        )
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=None if work.environment is None else dict(work.environment),
                start_new_session=True,  # Ctrl-C is for the trainer, which saves before it goes
            )
        try:
            # Not on its command line, which everybody can read.
            _send(
                here,
                {
                    "prepare": work.prepare,
                    "settings": work.settings,
                    "items_of_a_life": work.items_of_a_life,
                    "memory_limit": work.memory_limit,
                },
            )
            self._refuse(_receive(here, time.monotonic() + START_SECONDS))
        except (OSError, LaurelError) as error:
            here.close()
            self._stop()
            if isinstance(error, LaurelError):
                raise
            raise EnvironmentFailedError(f"{work.name} does not start: {error}") from error
        return here

    def _refuse(self, said: dict[str, Any]) -> None:
        """Raise what a process said of why it cannot be ready."""
        if said["refused"] is not None:
            if said["by_user"]:
                raise ConfigError(said["refused"])
            raise EnvironmentFailedError(f"{self._work.name} does not start: {said['refused']}")

    def _stop(self) -> None:
        """End the zygote, which ends its processes; the threads that wait for them see that."""
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


# --------------------------------------------------------------------------------------------------
# The zygote itself, and what runs in the processes that are forked from it.


def be_zygote(descriptor: int, parent: int) -> None:
    """Serve the process at the other end of a socket until it is gone.

    Args:
        descriptor: The socket's.
        parent: The process at the other end.
    """
    control = socket.socket(fileno=descriptor)
    asked = _receive(control)
    try:
        opening = pkgutil.resolve_name(asked["prepare"])(asked["settings"])
    except BaseException as error:
        _send(control, _refusal(error))
        return
    _send(control, {"refused": None})
    gc.collect()
    gc.freeze()  # pages that the processes share are not copied for the collector's sake
    own, workers = os.getpid(), set[int]()
    try:
        # A fork of the parent may hold its end of the socket open, so both are looked at.
        while os.getppid() == parent:
            if not select.select([control], [], [], _LOOK_FOR_PARENT_SECONDS)[0]:
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _LONGEST_ORDER, 1)
            if not message:
                return
            order = json.loads(message)
            if order["order"] == "start":
                pid = os.fork()
                if pid == 0:
                    control.close()
                    _be_worker(
                        descriptors[0],
                        own,
                        opening,
                        items_of_a_life=asked["items_of_a_life"],
                        memory_limit=asked["memory_limit"],
                    )
                os.close(descriptors[0])
                workers.add(pid)
                _send(control, {"pid": pid})
            else:
                _end(order["pid"], workers)
                _send(control, {})
    finally:
        for pid in list(workers):
            _end(pid, workers)


def _end(pid: int, workers: set[int]) -> None:
    """Kill a process with what it has started, and bury it. Until then its number is not given to
    another process, so nobody else can be hit."""
    if pid in workers:
        workers.discard(pid)
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not yet become a group of its own
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _be_worker(
    descriptor: int,
    zygote: int,
    opening: Callable[[], Callable[[Any], Any]],
    *,
    items_of_a_life: int | None,
    memory_limit: int | None,
) -> None:
    """Do one item after the other; never come back."""
    status = 1
    try:
        os.setpgid(0, 0)  # so that all that it starts can be killed with it
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != zygote:
                return
            if memory_limit is not None:
                resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        link = socket.socket(fileno=descriptor)
        try:
            work = opening()
        except BaseException as error:
            _send(link, _refusal(error))
            return
        _send(link, {"refused": None})
        for count in itertools.count(1):
            result = work(_receive(link))
            filled = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            retires = count == items_of_a_life or filled > (memory_limit or sys.maxsize) // 2
            _send(link, {"result": result, "retires": retires})
    finally:
        os._exit(status)


def _refusal(error: BaseException) -> dict[str, Any]:
    """An error in words, with whether what a person has set is to blame."""
    text = str(error) if isinstance(error, LaurelError) else f"{type(error).__name__}: {error}"
    return {"refused": text, "by_user": isinstance(error, UserError)}


# --------------------------------------------------------------------------------------------------
# Messages in either direction are lines of JSON. One is under way at a time, so whatever has come
# is one message.


def _send(link: socket.socket, message: object) -> None:
    """Send a message; OSError where the other end is gone."""
    link.sendall(json.dumps(message).encode() + b"\n")


def _receive(link: socket.socket, deadline: float | None = None) -> Any:
    """The next message.

    Args:
        link: The connection.
        deadline: Until when to wait, by `time.monotonic`; None waits for ever.

    Raises:
        TimeoutError: There was none before the deadline.
        ConnectionError: There will be none.
    """
    received = bytearray()
    while not received.endswith(b"\n"):
        if deadline is not None:
            link.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = link.recv(_AT_ONCE)
        if not part:
            raise ConnectionResetError("the process is gone")
        received += part
    return json.loads(received)
