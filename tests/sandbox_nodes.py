"""Nodes of a cluster that are not there: each is a worker of this process, and may die or hang."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from typing import Any

from laurel.errors import ConfigError, WorkerError
from laurel.extensions.code.sandbox.detection import Detection
from laurel.extensions.code.sandbox.tiers import Tier
from laurel.workers.calls import Failure, GroupCalls, Outcome, WorkerCall, attempt, error_of
from laurel.workers.rendezvous import RankPlace
from laurel.workers.reservations import ClusterNodes, NodeState


class ThreadedGroup(GroupCalls):
    """A `WorkerGroup` of one whose calls run side by side, each in a thread of its own."""

    def __init__(self, role: str, worker: Any) -> None:
        self.role, self.size, self.worker = role, 1, worker
        self.calls: list[WorkerCall] = []
        self.over = threading.Event()
        self.failure: WorkerError | None = None
        self.frozen = threading.Event()
        """Set: it answers nothing any more."""

    def _submit(self, calls: Mapping[int, WorkerCall]) -> _Pending:
        if self.failure is not None:
            raise self.failure
        if self.over.is_set():
            raise WorkerError(f"{self.role}: the group has been shut down", role=self.role)
        # As if it were sent.
        method, args, kwargs = pickle.loads(pickle.dumps(tuple(calls[0])))
        self.calls.append(WorkerCall(method, args, kwargs))
        return _Pending(self, self.calls[-1])

    def end(self, kind: Any, limit: float = 0.0) -> WorkerError:
        """Die, or be ended for being late."""
        if self.failure is None:
            told = [Failure(kind=kind, rank=0, summary="process 7 is gone")]
            self.failure = error_of(self.role, 1, "call", told, limit=limit)
        self.shutdown()
        return self.failure

    def alive(self) -> list[bool]:
        return [not self.over.is_set()]

    def shutdown(self) -> None:
        if not self.over.is_set():
            self.over.set()
            self.worker.shutdown()


class _Pending:
    def __init__(self, group: ThreadedGroup, call: WorkerCall) -> None:
        self.group, self.call = group, call
        self.outcome: list[Outcome] = []
        self.moved = threading.Event()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        outcome = attempt(self.group.worker, self.call, rank=0)
        self.outcome.append(pickle.loads(pickle.dumps(outcome)))
        self.moved.set()

    def done(self) -> bool:
        return self.moved.is_set() or self.group.over.is_set()

    def wait(self, *, timeout: float | None = None) -> list[Any]:
        left = 60.0 if timeout is None else timeout
        while left > 0 and not self.group.over.is_set():
            if self.moved.wait(0.02) and not self.group.frozen.is_set():
                break
            left -= 0.02
        if self.group.failure is not None:
            raise self.group.failure
        if not self.moved.is_set() or self.group.frozen.is_set():
            raise self.group.end("died" if self.group.over.is_set() else "late", timeout or 60.0)
        (outcome,) = self.outcome
        if isinstance(outcome, Failure):
            raise error_of(self.group.role, 1, self.call.method, [outcome], limit=left)
        return [outcome.value]


class PretendedNodes:
    """A cluster's nodes, by name. What they find of themselves may be told."""

    def __init__(self, *names: str, found: Mapping[str, Tier | None] | None = None) -> None:
        self.names = list(names)
        self.found = dict(found or {})
        self.groups: dict[str, list[ThreadedGroup]] = {name: [] for name in names}
        """Of each node, the newest last."""
        self.is_only_this = False
        self.broken: dict[str, str] = {}
        """Why nothing can be started on a node."""

    @property
    def cluster(self) -> ClusterNodes:
        return ClusterNodes(
            alive=self.alive, make=self.make, is_only_this=lambda: self.is_only_this
        )

    def alive(self) -> list[NodeState]:
        return [NodeState(id=n, address=f"10.0.0.{n}", total={}, free={}) for n in self.names]

    def make(
        self, role: str, node_id: str, worker_class: Any, *, at_a_time: int, limit: float
    ) -> ThreadedGroup:
        if node_id in self.broken:
            raise ConfigError(self.broken[node_id])
        worker = worker_class(RankPlace(role=role))
        if node_id in self.found:
            found = Detection(tier=self.found[node_id], reasons={"namespaces": "EPERM"})
            worker.find = lambda num_workers, limits_mb: (found, num_workers)
        group = ThreadedGroup(role, worker)
        self.groups[node_id].append(group)
        return group

    def newest(self, name: str) -> ThreadedGroup:
        return self.groups[name][-1]

    def zygotes(self, name: str) -> list[int]:
        """The processes of a node's zygotes that live."""
        pool = self.newest(name).worker._pool
        return [] if pool is None else pool.process_ids()

    def calls(self) -> list[WorkerCall]:
        """All that was ever sent to a node."""
        return [c for groups in self.groups.values() for group in groups for c in group.calls]
