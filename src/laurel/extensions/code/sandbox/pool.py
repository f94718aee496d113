"""Runs many programs concurrently, each in its own sandbox; results are in the order of jobs."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self

from laurel.extensions.code.sandbox.control_group import GroupPlace
from laurel.extensions.code.sandbox.grading import grade
from laurel.extensions.code.sandbox.jobs import SandboxJob, SandboxResult, Status
from laurel.extensions.code.sandbox.tiers import Tier
from laurel.extensions.code.sandbox.zygote_process import (
    END_SECONDS,
    BoundedZygote,
    SandboxLostError,
    TimeIsUpError,
    ZygoteProcess,
)
from laurel.sandbox.inside_process import SandboxStartError
from laurel.sandbox.limits import available_memory

ATTEMPTS = 2
_SHARE_OF_MEMORY = 0.7
# Seconds that any job has: a process takes hundredths, which become tenths on a busy machine.
_LEAST_SHARE = 0.5
CLOSED = "the sandbox has been shut down"


class ProgramPool(ABC):
    """Runs jobs concurrently: a `SandboxPool` on this machine, or a pool of several machines."""

    tier: Tier
    """The tier in which jobs run; of several machines, that of the worst."""
    num_workers: int
    """The number of concurrent jobs."""

    @abstractmethod
    def submit(
        self, job: SandboxJob, *, deadline: float | None = None, batch: int = 1
    ) -> Future[SandboxResult]:
        """Queue a job, and return its future; block while the backlog is full.

        Args:
            deadline: The time of `time.monotonic` by which the job must end, or it is a
                SANDBOX_ERROR. While others wait, a job has only a share of the time until then. If
                that is not enough, it is tried again after the others, each time with twice as
                much, so that a slow program delays only itself.
            batch: The number of jobs that are submitted together, including this one.
        """

    def run(
        self, jobs: Sequence[SandboxJob], *, timeout_s: float | None = None
    ) -> list[SandboxResult]:
        """Run jobs, and return their results in order.

        Args:
            timeout_s: The seconds after which remaining jobs are SANDBOX_ERRORs instead of running.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        futures = [self.submit(job, deadline=deadline, batch=len(jobs)) for job in jobs]
        return [future.result() for future in futures]

    @abstractmethod
    def close(self) -> None:
        """End all processes; queued and running jobs become SANDBOX_ERRORs.

        Further calls do nothing.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SandboxPool(ProgramPool):
    """Runs jobs concurrently on this machine.

    The first jobs start the zygotes. These end at `close`, with the last reference to the pool, or
    with this process, however it ends.
    """

    def __init__(
        self,
        *,
        tier: Tier,
        num_workers: int,
        backlog: int = 1024,
        interpreter: str | None = None,
        scratch: str | None = None,
        place: GroupPlace | None = None,
    ) -> None:
        """Set up a pool without starting processes.

        Args:
            tier: The tier that this machine was found to support, or a weaker one. If a layer of it
                is no longer available, every job is a SANDBOX_ERROR; no job runs in fewer layers.
            backlog: The number of queued jobs from which on `submit` blocks; 0 for any number.
            interpreter: The Python that runs programs; by default the one that runs this.
            scratch: The directory for temporary directories; by default the system's.
            place: The place where each zygote gets a control group; by default it has none.
        """
        self.tier = tier
        self.num_workers = num_workers
        zygotes = [
            ZygoteProcess(tier.layers, interpreter=interpreter, scratch=scratch, place=place)
            for _ in range(num_workers)
        ]
        self._state = _State(tier, backlog, zygotes)
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _close, self._state, self._threads)

    def submit(
        self, job: SandboxJob, *, deadline: float | None = None, batch: int = 1
    ) -> Future[SandboxResult]:
        """Queue a job, as `ProgramPool.submit` describes."""
        future: Future[SandboxResult] = Future()
        with self._starting:
            if not self._threads and not self._state.closed:
                for index, zygote in enumerate(self._state.zygotes):
                    # A thread must not reference the pool: that would keep it from being collected.
                    thread = threading.Thread(
                        target=_serve,
                        args=(self._state, zygote),
                        name=f"laurel-sandbox-{index}",
                        daemon=True,
                    )
                    self._threads.append(thread)
                    thread.start()
        while not self._state.closed:
            try:
                self._state.jobs.put(_Waiting(job, deadline, future, batch), timeout=0.5)
            except queue.Full:
                if deadline is not None and time.monotonic() > deadline:
                    future.set_result(
                        failed_result(job, self.tier, "its turn did not come in time")
                    )
                    return future
            else:
                if self._state.closed:
                    _fail_waiting(self._state)
                return future
        future.set_result(failed_result(job, self.tier, CLOSED))
        return future

    def process_ids(self) -> list[int]:
        """Return the process ids of the running zygotes."""
        return [pid for zygote in self._state.zygotes if (pid := zygote.pid) is not None]

    def close(self) -> None:
        """End all processes, as `ProgramPool.close` describes."""
        with self._starting:
            self._finalizer()


def affordable_workers(wanted: int, limits_mb: int) -> int:
    """Return how many workers, at least 1, fit into memory if each program uses its limit.

    Args:
        limits_mb: The memory and disk limits of one program together.
    """
    free = available_memory()
    if free is None:
        return wanted
    # Two processes run at once where tests are split from the program.
    return max(1, min(wanted, int((free >> 20) * _SHARE_OF_MEMORY) // (2 * limits_mb)))


@dataclass(slots=True, eq=False)
class _Waiting:
    """A job in the queue, with its future and its deadline."""

    job: SandboxJob
    deadline: float | None
    future: Future[SandboxResult]
    batch: int = 1
    attempts: int = 0  # number of attempts so far
    is_begun: bool = False
    # Seconds after which it was last ended in favour of others; the next share is twice that.
    share: float = 0.0
    # Whether it may be ended in favour of others; otherwise it may run until the deadline.
    may_be_ended: bool = True

    def begins(self) -> bool:
        """Mark the future as running; return False if it was cancelled."""
        self.is_begun = self.is_begun or self.future.set_running_or_notify_cancel()
        return self.is_begun


class _State:
    """The state that the threads of a pool share."""

    def __init__(self, tier: Tier, backlog: int, zygotes: list[ZygoteProcess]) -> None:
        self.tier = tier
        self.zygotes = zygotes
        self.jobs: queue.Queue[_Waiting | None] = queue.Queue(backlog)
        self.closed = False
        self.owner = os.getpid()


def _serve(state: _State, zygote: ZygoteProcess) -> None:
    """Run queued jobs one after the other in a zygote."""
    while not state.closed and (item := state.jobs.get()) is not None:
        if item.begins():
            result = _result(state, zygote, item)
            if result is _LATER:
                try:
                    state.jobs.put_nowait(item)
                    continue
                except queue.Full:  # waiting for room could be waiting for all other workers
                    item.may_be_ended = False
                    result = _result(state, zygote, item)
                    assert result is not _LATER
            item.future.set_result(result)
        # Otherwise this thread would hold the job and the result while it waits.
        del item
    zygote.close()


_LATER = SandboxResult(id="", status=Status.SANDBOX_ERROR, reason="it is tried again later")


def _result(state: _State, zygote: ZygoteProcess, item: _Waiting) -> SandboxResult:
    """Return the result of a job, or `_LATER` if its share of time is over and others wait."""
    if item.deadline is not None and time.monotonic() > item.deadline:
        return failed_result(item.job, state.tier, "its turn did not come in time")
    until = item.deadline
    share = _share_of_time(state, item) if item.may_be_ended else None
    if share is not None:
        item.share = share
        until = time.monotonic() + share
    try:
        return _attempt(state, BoundedZygote(zygote, until), item)
    except TimeIsUpError:
        if share is None:
            return failed_result(item.job, state.tier, "the deadline came while it ran")
        item.attempts = 0
        return _LATER


def _share_of_time(state: _State, item: _Waiting) -> float | None:
    """Return the seconds that a job may take while others wait; None: no limit."""
    num_runners = len(state.zygotes)
    waiting = state.jobs.qsize()
    if not item.share:  # others of its batch may not be in the queue yet
        waiting = max(waiting, item.batch - num_runners)
    if item.deadline is None or waiting <= 0:
        return None
    left = item.deadline - time.monotonic()
    # Half of the time at first, which leaves the other half for second attempts.
    share = max(_LEAST_SHARE, left / 2 * num_runners / (waiting + num_runners), 2 * item.share)
    return share if share < left else None


def _attempt(state: _State, runner: BoundedZygote, item: _Waiting) -> SandboxResult:
    """Run a job; if the sandbox fails, try once more, and then return a failure."""
    job, reason, tier = item.job, CLOSED, state.tier
    while item.attempts < ATTEMPTS:
        if state.closed:
            break
        try:
            item.attempts += 1
            runner.start()
            if not tier.layers <= runner.layers:
                missing = ", ".join(sorted(tier.layers - runner.layers))
                raise SandboxStartError(f"it has lost a layer that it had: {missing}")
            return grade(job, runner, tier=tier.value, attempt=item.attempts)
        except TimeIsUpError:
            raise
        except (SandboxLostError, SandboxStartError) as error:
            reason = str(error)
            runner.discard()  # its zygote may be stuck
        except Exception as error:  # whatever a program caused, the step goes on
            reason = f"{type(error).__name__}: {error}"
    return failed_result(job, tier, reason, attempt=max(1, item.attempts))


def failed_result(job: SandboxJob, tier: Tier, reason: str, *, attempt: int = 1) -> SandboxResult:
    """Return the SANDBOX_ERROR of a job that the sandbox has failed."""
    return SandboxResult(
        id=job.id, status=Status.SANDBOX_ERROR, tier=tier.value, attempt=attempt, reason=reason
    )


def _fail_waiting(state: _State) -> None:
    """Fail the queued jobs, which no thread will run any more."""
    while True:
        try:
            item = state.jobs.get_nowait()
        except queue.Empty:
            return
        if item is not None and item.begins():
            item.future.set_result(failed_result(item.job, state.tier, CLOSED))


def _close(state: _State, threads: list[threading.Thread]) -> None:
    if state.closed or os.getpid() != state.owner:  # a fork of the trainer has only copies
        return
    state.closed = True
    _fail_waiting(state)
    for _ in threads:
        try:
            state.jobs.put_nowait(None)
        except queue.Full:
            break
    for zygote in state.zygotes:
        zygote.close()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(END_SECONDS)
    _fail_waiting(state)
