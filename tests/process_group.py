"""A worker group of forked processes: what Ray's actors are, started in a fraction of the time."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from laurel.errors import WorkerError
from laurel.workers.calls import (
    Failure,
    GroupCalls,
    Outcome,
    Shared,
    Success,
    WorkerCall,
    with_shared,
)
from laurel.workers.rendezvous import LOOPBACK, RankPlace
from laurel.workers.worker_actor import WorkerActor
from parallel_runs import start_server


class ProcessGroup(GroupCalls):
    """A `WorkerGroup` whose ranks are processes of this machine, for tests."""

    def __init__(
        self,
        role: str,
        size: int,
        worker_class: Callable[..., Any],
        *args: Any,
        limit: float = 60.0,
        blaming: float = 5.0,
        **kwargs: Any,
    ) -> None:
        self.role, self.size, self.limit, self._blaming = role, size, limit, blaming
        self._asked = [0] * size
        self._answers: list[dict[int, Any]] = [{} for _ in range(size)]
        start_server()
        context = multiprocessing.get_context("forkserver")
        pairs = [context.Pipe() for _ in range(size)]
        self._pipes = [mine for mine, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(theirs, rank), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()  # or the end of a process would not be seen
        try:
            self._build(pickle.dumps((worker_class, WorkerCall("", args, kwargs))))
        except BaseException:
            self._kill()
            raise

    def _build(self, payload: bytes) -> None:
        port, listener = 0, None
        if self.size > 1:
            port, listener = self._collect({0: self._ask(0, "bind", LOOPBACK)}, "", None)[0]
        numbers = {}
        for rank in range(self.size):
            place = RankPlace(
                role=self.role,
                rank=rank,
                world_size=self.size,
                local_rank=rank,
                master_port=port,
                listener=listener if rank == 0 else None,
            )
            environment = place.environment()
            numbers[rank] = self._ask(rank, "build", payload, place, environment)
        self._collect(numbers, "", None)

    def _ask(self, rank: int, method: str, *args: Any) -> int:
        number = self._asked[rank]
        self._asked[rank] += 1
        with suppress(OSError):  # its process is gone: whoever waits for the answer will see it
            self._pipes[rank].send((number, method, args))
        return number

    def _submit(self, calls: Mapping[int, WorkerCall]) -> _Asked:
        self._check_open()
        bare = {
            rank: with_shared(call, [a.value for a in call.args if isinstance(a, Shared)])
            for rank, call in calls.items()
        }
        numbers = {r: self._ask(r, "run", pickle.dumps((None, c))) for r, c in bare.items()}
        return _Asked(self, numbers, next(iter(calls.values())).method)

    def _collect(self, numbers: Mapping[int, int], method: str, timeout: float | None) -> list[Any]:
        limit = self.limit if timeout is None else timeout
        end = time.monotonic() + limit
        results, failures = [], []
        for rank, number in numbers.items():
            outcome = self._answer(rank, number, end)
            if isinstance(outcome, Failure):
                failures.append(outcome)
                end = min(end, time.monotonic() + self._blaming)
            else:
                results.append(outcome.value)
        if not failures:
            return results
        self._raise(method, failures, limit=limit)

    def _answer(self, rank: int, number: int, end: float) -> Outcome:
        pipe, answers = self._pipes[rank], self._answers[rank]
        while number not in answers:
            if not pipe.poll(max(0.0, end - time.monotonic())):
                return Failure(kind="late", rank=rank)
            try:
                found, answer = pipe.recv()
            except (EOFError, OSError):
                return Failure(kind="died", rank=rank, summary="its process is gone")
            answers[found] = answer
        answer = answers.pop(number)
        if not isinstance(answer, bytes):
            return Success(answer)
        outcome: Outcome = pickle.loads(answer)
        return outcome

    def _has(self, rank: int, number: int) -> bool:
        """Whether its answer has come, or none will."""
        pipe, answers = self._pipes[rank], self._answers[rank]
        try:
            while number not in answers and pipe.poll(0):
                found, answer = pipe.recv()
                answers[found] = answer
        except (EOFError, OSError):
            return True
        return number in answers

    def alive(self) -> list[bool]:
        return [self._is_open and process.is_alive() for process in self._processes]

    def _close(self) -> None:
        if self._failure is None:
            numbers = {rank: self._ask(rank, "close") for rank in range(self.size)}
            with suppress(WorkerError):
                self._collect(numbers, "shutdown", 10.0)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)


class _Asked:
    def __init__(self, group: ProcessGroup, numbers: Mapping[int, int], method: str) -> None:
        self._group, self._numbers, self._method = group, numbers, method

    def done(self) -> bool:
        return all(self._group._has(rank, number) for rank, number in self._numbers.items())

    def wait(self, *, timeout: float | None = None) -> list[Any]:
        return self._group._collect(self._numbers, self._method, timeout)


def _serve(pipe: Connection, rank: int) -> None:
    """Do what is asked, one after the other, until nobody is there to ask."""
    os.environ["OMP_NUM_THREADS"] = "1"
    actor = WorkerActor(rank, [])
    while True:
        try:
            number, method, args = pipe.recv()
        except EOFError:
            return
        pipe.send((number, getattr(actor, method)(*args)))
