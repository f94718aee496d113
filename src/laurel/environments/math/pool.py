"""Many responses at once, each against its known answer."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from laurel.environments.interface import Memory
from laurel.environments.math.answers import (
    Candidate,
    Checked,
    in_known_characters,
    is_absurd,
    is_unevaluated,
    read_answer,
    same_or_not,
    too_much_to_read,
)
from laurel.errors import EnvironmentFailedError
from laurel.sandbox.limits import available_cores

LONGEST_KNOWN_ANSWER = 10_000
_REMEMBERED = 50_000


@dataclass(frozen=True, slots=True)
class _Pending:
    """An answer that a worker has, and how its verdict will be remembered."""

    key: bytes
    future: Future[Checked]


class AnswerChecker:
    """Checks mathematical answers. May be called from several threads at once."""

    def __init__(
        self, *, num_workers: int, timeout_seconds: float, forbid_unevaluated: bool = True
    ) -> None:
        """Start nothing yet.

        Args:
            num_workers: Processes that check what takes a parser.
            timeout_seconds: Limit of one answer in them.
            forbid_unevaluated: See `MathEnvironmentConfig.forbid_unevaluated`.
        """
        self.pool = CheckingPool(num_workers=num_workers, timeout_seconds=timeout_seconds)
        self._forbid_unevaluated = forbid_unevaluated
        self._memory: Memory[Checked] = Memory(_REMEMBERED)

    def check(self, responses: Sequence[str], golds: Sequence[str]) -> list[Checked]:
        """The verdict on each response, in order."""
        under_way: dict[bytes, Future[Checked]] = {}
        begun = [
            self._begin(response, gold, under_way)
            for response, gold in zip(responses, golds, strict=True)
        ]
        return [self._finish(one) if isinstance(one, _Pending) else one for one in begun]

    def check_gold(self, golds: Sequence[str]) -> list[Checked]:
        """The verdict of the parser on each known answer given as the answer, without shortcuts."""
        texts = [in_known_characters(gold).strip() for gold in golds]
        begun = [_unusable(text) or self._ask(text, Candidate(text=text)) for text in texts]
        return [one if isinstance(one, Checked) else one.result() for one in begun]

    def close(self) -> None:
        """End the processes. Idempotent."""
        self.pool.close()

    def _begin(
        self, response: str, gold: str, under_way: dict[bytes, Future[Checked]]
    ) -> Checked | _Pending:
        gold = in_known_characters(gold).strip()
        unusable = _unusable(gold)
        if unusable is not None:
            return unusable
        candidate = read_answer(response)
        if candidate is None:
            return Checked(verdict="unparseable")
        known = self._without_parser(gold, candidate)
        if known is not None:
            return known
        key = _key(gold, candidate)
        remembered = self._memory.get(key)
        if remembered is not None:
            return remembered
        if key not in under_way:
            under_way[key] = self._ask(gold, candidate)
        return _Pending(key, under_way[key])

    def _without_parser(self, gold: str, candidate: Candidate) -> Checked | None:
        answer = candidate.text if candidate.boxed else None
        same = same_or_not(gold, candidate)
        if same is not None:
            text = answer if answer is not None else _last_word(candidate.text)
            return Checked(verdict="correct" if same else "incorrect", answer=text)
        if not candidate.boxed:
            return None
        if too_much_to_read(candidate.text):
            return Checked(verdict="unparseable")
        if self._forbid_unevaluated and is_unevaluated(answer or "") and not is_unevaluated(gold):
            return Checked(verdict="incorrect", answer=answer)
        if is_absurd(candidate.text) and not is_absurd(gold):
            return Checked(verdict="incorrect", answer=answer)
        return None

    def _ask(self, gold: str, candidate: Candidate) -> Future[Checked]:
        return self.pool.submit(
            CheckRequest(
                gold=gold, candidate=candidate, forbid_unevaluated=self._forbid_unevaluated
            )
        )

    def _finish(self, pending: _Pending) -> Checked:
        checked = pending.future.result()
        if checked.verdict not in ("timeout", "error"):  # these may end otherwise another time
            self._memory.put(pending.key, checked)
        return checked


def _unusable(gold: str) -> Checked | None:
    """The failure that a known answer is, whatever the response."""
    if not gold:
        return Checked(verdict="error", reason="the known answer is empty")
    if len(gold) > LONGEST_KNOWN_ANSWER:
        reason = f"the known answer has more than {LONGEST_KNOWN_ANSWER} characters"
        return Checked(verdict="error", reason=reason)
    return None


def _last_word(text: str) -> str:
    return text.split()[-1].strip("$.") or text.split()[-1]


def _key(gold: str, candidate: Candidate) -> bytes:
    digest = blake2b(digest_size=16)
    digest.update(repr((gold, candidate.text, candidate.boxed)).encode("ascii", "backslashreplace"))
    return digest.digest()


# --------------------------------------------------------------------------------------------------
# Processes that check answers, each of which can be killed in the middle of one.
#
# No thread can be stopped in the middle of a computation in C, and an alarm reaches only the main
# thread and not that computation either. So whoever asks keeps the clock, and ends the process that
# does not answer in time; the others do not notice.

ITEMS_OF_A_LIFE = 2_000
"""Answers that one process checks before a fresh one takes its place; its caches only grow."""
_SECONDS_TO_CLOSE = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """An answer to be checked by a parser."""

    gold: str
    candidate: Candidate
    forbid_unevaluated: bool = True

    def message(self) -> dict[str, Any]:
        """As the worker reads it."""
        return {
            "gold": self.gold,
            "text": self.candidate.text,
            "boxed": self.candidate.boxed,
            "forbid_unevaluated": self.forbid_unevaluated,
        }


class CheckingPool:
    """Checks answers side by side, each within its limit.

    Processes are started when the first question comes. They end with `close`, with the last
    reference to the pool, and with this process, however it ends.
    """

    def __init__(
        self, *, num_workers: int, timeout_seconds: float, items_of_a_life: int = ITEMS_OF_A_LIFE
    ) -> None:
        """Start nothing yet.

        Args:
            num_workers: Processes; at most one per core that this process may use.
            timeout_seconds: Limit of one answer, from the moment that a ready worker has it.
            items_of_a_life: Answers after which a process is replaced.
        """
        self.num_workers = min(num_workers, available_cores())
        self._state = _State(timeout_seconds, items_of_a_life)
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _close, self._state, self._threads)

    def submit(self, question: CheckRequest) -> Future[Checked]:
        """The verdict to come. Raises `EnvironmentFailedError`, from here or from the future, where
        the processes do not start or the pool is closed."""
        with self._starting:
            if self._state.closed:
                raise EnvironmentFailedError("the checker of answers has been shut down")
            if not self._threads:
                self._start_threads()
            future: Future[Checked] = Future()
            self._state.questions.put((question, future))
        return future

    def _start_threads(self) -> None:
        for index in range(self.num_workers):
            # A thread must not know the pool: that would keep it from being collected.
            thread = threading.Thread(
                target=_serve, args=(self._state,), name=f"laurel-answers-{index}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def process_ids(self) -> list[int]:
        """The processes alive now, the zygote first."""
        return self._state.zygote.process_ids()

    def close(self) -> None:
        """End the processes. Answers still being checked fail. Idempotent."""
        with self._starting:
            self._finalizer()


class _State:
    """What the threads of a pool share."""

    def __init__(self, timeout_seconds: float, items_of_a_life: int) -> None:
        self.timeout_seconds = timeout_seconds
        self.items_of_a_life = items_of_a_life
        self.questions: queue.SimpleQueue[tuple[CheckRequest, Future[Checked]] | None]
        self.questions = queue.SimpleQueue()
        self.zygote = Zygote()
        self.closed = False
        self.owner = os.getpid()


def _serve(state: _State) -> None:
    """One thread, which has at most one worker at a time."""
    worker: Worker | None = None
    while (item := state.questions.get()) is not None:
        question, future = item
        if not future.set_running_or_notify_cancel():
            continue
        try:
            checked, worker = _check(state, question, worker)
        except BaseException as error:
            if worker is not None:
                state.zygote.end_worker(worker)
                worker = None
            future.set_exception(error)
        else:
            future.set_result(checked)
        # Else this thread would hold the future, and what it answers for, while it waits.
        del item, question, future
    if worker is not None:
        state.zygote.end_worker(worker)


def _check(
    state: _State, question: CheckRequest, worker: Worker | None
) -> tuple[Checked, Worker | None]:
    """The verdict, and the worker for the next question, if it still lives."""
    message = question.message()
    for _ in range(2):
        if state.closed:
            raise EnvironmentFailedError("the checker of answers was shut down meanwhile")
        if worker is None:
            worker = state.zygote.start_worker()
        try:
            reply = worker.ask(message, time.monotonic() + state.timeout_seconds)
        except TimeoutError:
            state.zygote.end_worker(worker)
            return Checked(verdict="timeout", answer=_shown(question.candidate)), None
        except OSError:
            # The process died: by another's hand, or by this very answer. Ask a second one.
            state.zygote.end_worker(worker)
            worker = None
            continue
        checked = Checked(verdict=reply["verdict"], answer=reply["answer"], reason=reply["reason"])
        if reply["retire"] or worker.items >= state.items_of_a_life:
            state.zygote.end_worker(worker)
            worker = None
        return checked, worker
    if state.closed:
        raise EnvironmentFailedError("the checker of answers was shut down meanwhile")
    reason = "the process that checks answers died of this one twice"
    return Checked(verdict="error", answer=_shown(question.candidate), reason=reason), None


def _shown(candidate: Candidate) -> str | None:
    return candidate.text if candidate.boxed else None


def _close(state: _State, threads: list[threading.Thread]) -> None:
    if state.closed or os.getpid() != state.owner:  # a fork of the trainer has only copies
        return
    state.closed = True
    while True:
        try:
            item = state.questions.get_nowait()
        except queue.Empty:
            break
        if item is not None and item[1].set_running_or_notify_cancel():
            item[1].set_exception(EnvironmentFailedError("the checker of answers was shut down"))
    for _ in threads:
        state.questions.put(None)
    state.zygote.close()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_SECONDS_TO_CLOSE)


# --------------------------------------------------------------------------------------------------
# The zygote and its workers, seen from the process that asks them.

START_SECONDS = 120.0
"""Limit for a process to be ready: it imports a large library, perhaps from a slow disk."""
_END_SECONDS = 5.0
_KEPT_VARIABLES = (
    "PATH",
    "HOME",
    "TMPDIR",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONPYCACHEPREFIX",
    "PYTHONDONTWRITEBYTECODE",
)


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
        send_message(self._link, message)
        return self.reply(deadline)

    def reply(self, deadline: float) -> dict[str, Any]:
        """What the process says next; see `ask` for the errors."""
        return receive_message(self._link, deadline)

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
                    pid = receive_message(control, time.monotonic() + START_SECONDS)["pid"]
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
                send_message(self._control, {"do": "end", "pid": worker.pid})
                receive_message(self._control, time.monotonic() + _END_SECONDS)
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
            "from laurel.environments.math.comparison import main\n"
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
                _refuse_liar(receive_message(here, time.monotonic() + START_SECONDS))
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


# --------------------------------------------------------------------------------------------------
# Messages between this process and those that check answers: a line of JSON each.
#
# One message is under way at a time in either direction, so whatever has come is one message.

_AT_ONCE = 1 << 16


def send_message(link: socket.socket, message: object) -> None:
    """Send a message; OSError where the other end is gone."""
    link.sendall(json.dumps(message).encode() + b"\n")


def receive_message(link: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    """The next message.

    Args:
        link: The connection.
        deadline: Until when to wait, by `time.monotonic`; None waits for ever.

    Raises:
        TimeoutError: There was none before the deadline.
        ConnectionError: There will be none.
    """
    received = b""
    while not received.endswith(b"\n"):
        if deadline is not None:
            link.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = link.recv(_AT_ONCE)
        if not part:
            raise ConnectionResetError("the process is gone")
        received += part
    message: dict[str, Any] = json.loads(received)
    return message
