"""The thread that draws: requests come in, completions go out, and nothing waits for ever."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from laurel.engines.continuous_batch import ContinuousBatch, Finished, Ticket
from laurel.errors import EngineError


@dataclass(slots=True, eq=False)
class Job:
    """Work for a moment when no request is under way."""

    work: Callable[[], None]
    done: Callable[[BaseException | None], None]
    """Called in the worker's thread."""


class GenerationWorker:
    """Runs a batch in a thread of its own, from the first request on.

    Jobs come before requests that have not begun. `done` and `deliver` functions must not block.
    """

    def __init__(self, batch: ContinuousBatch) -> None:
        """Hold a batch that nobody else touches from now on."""
        self._batch = batch
        self._changed = threading.Condition()
        # All below is guarded by `_changed`.
        self._arriving: list[Ticket] = []
        self._waiting: deque[Ticket] = deque()
        self._jobs: deque[Job] = deque()
        self._aborts: deque[tuple[Ticket, Callable[[], None]]] = deque()
        self._open: set[Ticket] = set()
        self._is_asleep = False
        self._end: EngineError | None = None
        """Why there is no more to expect."""
        self._thread: threading.Thread | None = None
        self._gone: deque[Callable[[], None]] = deque()
        """To be called as soon as the model is free. Of the thread alone."""

    # ------------------------------------------------------------------------- from other threads

    def arrive(self, ticket: Ticket) -> None:
        """Announce a request. `hand_over` makes all that have arrived begin together."""
        with self._changed:
            self._check_alive()
            self._arriving.append(ticket)
            self._open.add(ticket)

    def hand_over(self) -> None:
        """Let the requests that have arrived begin, in order."""
        with self._changed:
            self._waiting.extend(self._arriving)
            self._arriving.clear()
            self._wake_up()

    def abort(self, ticket: Ticket, gone: Callable[[], None]) -> None:
        """Forget what is left of a request; `gone` is called when it takes no part any more."""
        with self._changed:
            if ticket in self._open and self._end is None:
                self._aborts.append((ticket, gone))
                self._wake_up()
                return
        gone()

    def submit(self, job: Job) -> None:
        """Have a job done."""
        with self._changed:
            self._check_alive()
            self._jobs.append(job)
            self._wake_up()

    def set_asleep(self, is_asleep: bool) -> None:
        """Keep requests waiting from now on, or no longer."""
        with self._changed:
            self._check_alive()
            self._is_asleep = is_asleep
            self._wake_up()

    def close(self) -> None:
        """End the thread; whatever is open gets an `EngineError`. Idempotent."""
        with self._changed:
            if self._end is None:
                self._end = EngineError("the generator was closed")
            thread = self._thread
            self._changed.notify_all()
        if thread is None:
            self._finish()
        elif thread is not threading.current_thread():
            thread.join()

    def _check_alive(self) -> None:
        if self._end is not None:
            raise EngineError(str(self._end)) from self._end.__cause__

    def _wake_up(self) -> None:
        if self._thread is None and self._end is None:
            self._thread = threading.Thread(target=self._run, name="laurel-generation", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    # ----------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        try:
            while self._wait():
                self._do_jobs()
                self._draw()
        except BaseException as error:  # whatever it is, nobody may be left waiting
            self._die(error)
        self._finish()

    def _die(self, error: BaseException) -> None:
        ended = error
        if not isinstance(ended, EngineError):
            ended = EngineError(f"the generator died of {type(error).__name__}: {error}")
            ended.__cause__ = error
        with self._changed:
            self._end = ended

    def _wait(self) -> bool:
        """Until there is something to do; false when it is time to end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._end or self._jobs or self._aborts or self._may_begin()
            )
            return self._end is None

    def _may_begin(self) -> bool:
        return bool(self._waiting) and not self._is_asleep and not self._jobs

    def _do_jobs(self) -> None:
        while True:
            with self._changed:
                if not self._jobs or self._end is not None:
                    return
                job = self._jobs.popleft()
            try:
                job.work()
            except BaseException as error:
                job.done(error)
                raise
            job.done(None)

    def _draw(self) -> None:
        """Until no request is under way.

        The last news go out when the model is as it was before: whoever gets them may train it.
        """
        self._take_aborts()
        finished: Finished = []
        if self._has_work():
            with self._batch.drawing():
                while self._has_work():
                    self._tell(finished)
                    finished = self._advance()
                    self._take_aborts()
        self._tell(finished)

    def _has_work(self) -> bool:
        with self._changed:
            return self._end is None and (not self._batch.is_idle or self._may_begin())

    def _advance(self) -> Finished:
        """Begin what there is room for, and draw one more token of everything."""
        with self._changed:
            candidates = deque(self._waiting if self._may_begin() else ())
        num_candidates = len(candidates)
        finished = self._batch.admit(candidates)
        with self._changed:
            for _ in range(num_candidates - len(candidates)):
                self._waiting.popleft()  # only this thread takes anything out
        if not self._batch.is_idle:
            finished += self._batch.step()
        return finished

    def _tell(self, finished: Finished) -> None:
        for ticket, generated in finished:
            ticket.num_delivered += 1
            if ticket.num_delivered == len(ticket.request.seeds_G):
                with self._changed:
                    self._open.discard(ticket)
            ticket.deliver(generated)
        while self._gone:
            self._gone.popleft()()

    def _take_aborts(self) -> None:
        with self._changed:
            aborts = list(self._aborts)
            self._aborts.clear()
            for ticket, gone in aborts:
                self._gone.append(gone)
                self._open.discard(ticket)
                if ticket in self._arriving:
                    self._arriving.remove(ticket)
                if ticket in self._waiting:
                    self._waiting.remove(ticket)
        for ticket, _ in aborts:
            self._batch.abort(ticket)

    def _finish(self) -> None:
        """Tell everybody who still expects something that nothing will come."""
        self._take_aborts()
        with self._changed:
            assert self._end is not None
            message, cause = str(self._end), self._end.__cause__
            left, jobs = list(self._open), list(self._jobs)
            self._open.clear()
            self._jobs.clear()
            self._arriving.clear()
            self._waiting.clear()

        def error() -> EngineError:
            mine = EngineError(message)
            mine.__cause__ = cause
            return mine

        self._tell([])
        for ticket in left:
            ticket.deliver(error())
        for job in jobs:
            job.done(error())
        self._batch.clear()
