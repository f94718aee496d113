"""Processes that check answers, each of which can be killed in the middle of one.

No thread can be stopped in the middle of a computation in C, and an alarm reaches only the main
thread and not that computation either. So whoever asks keeps the clock, and ends the process that
does not answer in time; the others do not notice.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from laurel.distributed.limits import available_cores
from laurel.environments.math_answers.processes import Worker, Zygote
from laurel.environments.math_answers.verdicts import Candidate, Checked
from laurel.errors import EnvironmentFailedError

ITEMS_OF_A_LIFE = 2_000
"""Answers that one process checks before a fresh one takes its place; its caches only grow."""
_SECONDS_TO_CLOSE = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
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

    def submit(self, question: Question) -> Future[Checked]:
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
        self.questions: queue.SimpleQueue[tuple[Question, Future[Checked]] | None]
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
    state: _State, question: Question, worker: Worker | None
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
