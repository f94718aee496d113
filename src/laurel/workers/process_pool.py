"""A pool of processes that do one item at a time and can be killed in the middle of it.

All processes of a pool are forked from one that has done their imports and nothing else
(the zygote), so that a new one takes milliseconds::

    this process ==control==> zygote --fork--> process
          \\========= a connection for each =====/
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
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple

from laurel.errors import ConfigError, EnvironmentFailedError, LaurelError, UserError
from laurel.observe.user_code import ForkGuard

START_SECONDS = 120.0
"""Seconds for a process to become ready: it may import a large library from a slow disk."""
_END_SECONDS = 5.0
_LOOK_FOR_PARENT_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


class ProcessDiedError(RuntimeError):
    """Raised when the process of an item died, by the item or by a signal from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPoolSpec:
    """The work of a pool's processes, and its limits."""

    name: str
    """Name of the pool, for messages."""
    prepare: str
    """`module:function`, called once with the settings in the zygote. It returns a factory that
    every process calls without arguments; the factory returns the function of items.
    """
    num_workers: int
    timeout_seconds: float
    """Limit of one item in seconds, from the moment that a process has it."""
    settings: Any = None
    """Plain data that JSON can carry, as items and results are."""
    attempts: int = 1
    """Processes that may die of an item before it fails."""
    items_of_a_life: int | None = None
    """Items after which a process is replaced."""
    memory_limit: int | None = None
    """Address space of a process in bytes. A process that has filled half of it is replaced."""
    environment: Mapping[str, str] | None = None
    """All environment variables of the processes; None: those of this process."""


class ProcessPool:
    """A pool of processes that runs submitted items concurrently. Thread-safe.

    Processes are started with the first item. They end with `close`, with the last reference
    to the pool, and with this process, however it ends.
    """

    # Why neither the standard library's forkserver nor pebble: a process has one forkserver for
    # everybody, with its own variables (secrets among them), and each child runs the main program
    # once more; pebble kills a process but not what that has started, and fails all that waits
    # when idle processes die.

    def __init__(self, spec: ProcessPoolSpec) -> None:
        """Take the specification; nothing starts yet."""
        self.num_workers = spec.num_workers
        self._processes = _Processes(spec)
        self._items: _Items = queue.SimpleQueue()
        # Daemon threads and no executor: a program that ends would wait for the items of that.
        self._threads: list[threading.Thread] = []
        self._submitting = threading.Lock()
        # Neither it nor a thread may know the pool: that would keep it from being collected.
        self._finalizer = weakref.finalize(
            self, _end_all, self._processes, self._items, self._threads
        )

    def start(self) -> None:
        """Start one process, to see whether that succeeds.

        Raises:
            ConfigError: The prepared function refuses its settings.
            EnvironmentFailedError: The process does not start.
        """
        self._processes.idle.append(self._processes.start())

    def submit(self, item: Any) -> Future[Any]:
        """Submit an item.

        Returns:
            The result to come. Instead, the future raises `TimeoutError` where the item took more
            than its limit, `ProcessDiedError` where the process died, and the errors of `start`.

        Raises:
            EnvironmentFailedError: The pool is closed.
            TypeError: JSON cannot carry the item, or (`ValueError`) the item contains itself.
        """
        message = json.dumps(item).encode()
        future: Future[Any] = Future()
        with self._submitting:
            if not self._finalizer.alive:
                raise self._processes.closed_error()
            if len(self._threads) < self.num_workers:
                thread = threading.Thread(
                    target=_serve,
                    args=(self._processes, self._items),
                    name=f"laurel-pool-{len(self._threads)}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)
            self._items.put((future, message))
        return future

    def process_ids(self) -> list[int]:
        """List the process ids alive now, the zygote's first."""
        return self._processes.ids()

    def close(self) -> None:
        """End the processes. Items that run or wait fail. Idempotent."""
        with self._submitting:
            self._finalizer()
        for thread in self._threads:
            thread.join()


_Items = queue.SimpleQueue[tuple[Future[Any], bytes] | None]


def _serve(processes: _Processes, items: _Items) -> None:
    while (item := items.get()) is not None:
        future, message = item
        if future.set_running_or_notify_cancel():
            try:
                result = processes.result(message)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        del item, future  # otherwise this thread would hold them while it waits


def _end_all(processes: _Processes, items: _Items, threads: list[threading.Thread]) -> None:
    processes.close()
    for _ in threads:
        items.put(None)


class _Process(NamedTuple):
    # One thread uses a process at a time.
    pid: int
    link: Connection
    # Reports data to receive; a connection's own `poll` costs ten times as much.
    answers: select.poll
    # Numbers its items from 1; a reply has the number of its item.
    items: Iterator[int]


class _Processes:
    # The zygote and its processes, seen from this process. Thread-safe.
    def __init__(self, spec: ProcessPoolSpec) -> None:
        self.idle: list[_Process] = []
        self._spec = spec
        self._closed = False
        self._owner = os.getpid()
        self._lock = threading.RLock()  # the garbage collector may close it at any point
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None
        self._living: dict[int, _Process] = {}
        self._refusal: LaurelError | None = None

    def result(self, message: bytes) -> Any:
        for _ in range(self._spec.attempts):
            (process, number), reply = self._given(message), None
            is_late = not process.answers.poll(self._spec.timeout_seconds * 1e3)
            if not is_late:
                # It is gone; or an item that runs code has written its reply, which then may say
                # anything, but does not let the process live longer.
                with suppress(OSError, EOFError, ValueError, RecursionError):
                    reply = _receive(process.link)
            if not isinstance(reply, dict) or not {"result", "is_full"} <= reply.keys():
                reply = None
            # That of another item would shift all that follow.
            reply = reply if reply is not None and reply.get("number") == number else None
            is_used_up = number == self._spec.items_of_a_life
            if reply is None or is_used_up or reply["is_full"]:
                self.end(process)
            else:
                self.idle.append(process)
            if is_late:
                raise TimeoutError(f"it took more than {self._spec.timeout_seconds:g} s")
            if reply is not None:
                return reply["result"]
        if self._closed:
            raise self.closed_error()
        raise ProcessDiedError(f"{self._spec.name}: the process died")

    def _given(self, message: bytes) -> tuple[_Process, int]:
        while True:
            try:
                process, is_fresh = self.idle.pop(), False
            except IndexError:
                process, is_fresh = self.start(), True
            number = next(process.items)
            try:
                process.link.send_bytes(b"[%d, %b]" % (number, message))
            except OSError:
                if not is_fresh:  # it died while it had nothing to do, and no item is to blame
                    self.end(process)
                    continue
            return process, number

    def start(self) -> _Process:
        for _ in range(2):  # the second with a new zygote, where the first was killed
            with self._lock:
                control = self._running()
                here, there = Pipe()
                try:
                    _send(control, {"end": None})
                    send_handle(control, there.fileno(), None)
                    pid = _receive(control, START_SECONDS)
                except (OSError, EOFError):
                    self._stop()
                    continue
                finally:
                    there.close()
                answers = select.poll()
                answers.register(here, select.POLLIN)
                process = self._living[pid] = _Process(pid, here, answers, itertools.count(1))
            try:
                self._refuse(_receive(here, START_SECONDS))
            except (OSError, EOFError):
                self.end(process)
            except LaurelError:
                self.end(process)
                raise
            else:
                return process
        raise EnvironmentFailedError(f"{self._spec.name}: processes die as soon as they start")

    def end(self, process: _Process) -> None:
        # The process may be busy; its children are killed too.
        with self._lock:
            process.link.close()
            # By itself and not by its number, which another process may have by now.
            if self._living.get(process.pid) is process and self._control is not None:
                del self._living[process.pid]
                try:
                    _send(self._control, {"end": process.pid})
                    _receive(self._control, _END_SECONDS)
                except (OSError, EOFError):
                    self._stop()

    def ids(self) -> list[int]:
        with self._lock:
            return [*([self._zygote.pid] if self._zygote else []), *self._living]

    def close(self) -> None:
        if os.getpid() == self._owner:  # a fork of this process has only copies
            with self._lock:
                self._closed = True
                self._stop()

    def closed_error(self) -> EnvironmentFailedError:
        return EnvironmentFailedError(f"{self._spec.name} has been shut down")

    def _running(self) -> Connection:
        if self._closed:
            raise self.closed_error()
        if self._refusal is not None:  # it would be the same for every item
            raise self._refusal
        if self._control is not None:
            return self._control
        self._control, there = Pipe()
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from laurel.workers.process_pool import be_zygote\n"
            f"be_zygote({there.fileno()}, {os.getpid()})"
        )
        environment = self._spec.environment
        with there:
            self._zygote = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=None if environment is None else dict(environment),
                start_new_session=True,  # Ctrl-C is for the trainer, which saves before it goes
            )
        asked = ("prepare", "settings", "memory_limit")
        try:
            # Not on its command line, which everybody can read.
            _send(self._control, {name: getattr(self._spec, name) for name in asked})
            self._refuse(_receive(self._control, START_SECONDS))
        except (OSError, EOFError, LaurelError) as error:
            self._stop()
            if not isinstance(error, LaurelError):
                error = EnvironmentFailedError(f"{self._spec.name} does not start: it is gone")
            self._refusal = error
            raise error from None
        return self._control

    def _refuse(self, said: dict[str, Any]) -> None:
        if said["refused"] is not None:
            if said["is_setting"]:
                raise ConfigError(said["refused"])
            raise EnvironmentFailedError(f"{self._spec.name} does not start: {said['refused']}")

    def _stop(self) -> None:
        # The end of the zygote ends its processes; threads that wait for them notice.
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._zygote is not None:
            try:
                self._zygote.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._zygote.kill()
                self._zygote.wait()
            self._zygote = None
        self._living.clear()


# The zygote itself, and what runs in the processes that are forked from it.


def be_zygote(descriptor: int, parent: int) -> None:
    """Serve the process at the other end of a connection until it exits.

    Args:
        descriptor: The file descriptor of the connection.
        parent: The id of the process at the other end.
    """
    control, own, living = Connection(descriptor), os.getpid(), set[int]()
    asked = _receive(control)
    try:
        with ForkGuard():
            opening = pkgutil.resolve_name(asked["prepare"])(asked["settings"])
    except BaseException as error:
        _send(control, _refusal(error))
        return
    _send(control, {"refused": None})
    gc.collect()
    gc.freeze()  # pages that the processes share are not copied for the collector's sake
    try:
        # A fork of the parent may hold its end of the connection open, so both are looked at.
        while os.getppid() == parent:
            if not control.poll(_LOOK_FOR_PARENT_SECONDS):
                continue
            pid = _receive(control)["end"]
            if pid is not None:
                _kill(pid, living)
                _send(control, None)
                continue
            link = recv_handle(control)
            pid = os.fork()
            if pid == 0:
                control.close()
                _be_process(Connection(link), own, opening, asked["memory_limit"])
            os.close(link)
            living.add(pid)
            _send(control, pid)
    except (OSError, EOFError):
        pass  # nobody asks any more
    finally:
        for pid in list(living):
            _kill(pid, living)


def _kill(pid: int, living: set[int]) -> None:
    if pid in living:
        living.discard(pid)
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not yet become a group of its own
            os.kill(pid, signal.SIGKILL)
        # Until here its number was not given to another process, so nobody else can be hit.
        os.waitpid(pid, 0)


def _be_process(
    link: Connection,
    zygote: int,
    opening: Callable[[], Callable[[Any], Any]],
    memory_limit: int | None,
) -> None:
    try:
        os.setpgid(0, 0)  # so that all that it starts can be killed with it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != zygote:
                return
            if memory_limit is not None:
                resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
        # What an item forks cannot answer in its place, nor hide its death.
        os.register_at_fork(after_in_child=link.close)
        try:
            with ForkGuard():
                work = opening()
        except BaseException as error:
            _send(link, _refusal(error))
            return
        _send(link, {"refused": None})
        while True:
            number, item = _receive(link)
            with ForkGuard():
                result = work(item)
            filled = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            is_full = filled > (memory_limit or sys.maxsize) // 2
            _send(link, {"number": number, "result": result, "is_full": is_full})
    finally:
        os._exit(1)


def _refusal(error: BaseException) -> dict[str, Any]:
    text = str(error) if isinstance(error, LaurelError) else f"{type(error).__name__}: {error}"
    return {"refused": text, "is_setting": isinstance(error, UserError)}


def _send(link: Connection, message: object) -> None:
    link.send_bytes(json.dumps(message).encode())


def _receive(link: Connection, limit: float | None = None) -> Any:
    # EOFError or OSError where no message arrives within the limit.
    if limit is not None and not link.poll(limit):
        raise TimeoutError
    return json.loads(link.recv_bytes())
