"""A process with zygotes on every node of a cluster, started again where it is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from laurel.distributed.reservations import NodeState
from laurel.distributed.restarts import Restarts
from laurel.environments.sandbox.detection import Detection
from laurel.environments.sandbox.node_runner import CLOSED, MARGIN_SECONDS, NodeRunner
from laurel.environments.sandbox.node_worker import NodeWorker
from laurel.environments.sandbox.runner import (
    SandboxGoneError,
    SandboxLostError,
    SandboxStartError,
)
from laurel.environments.sandbox.tiers import Tier
from laurel.environments.sandbox.zygote_process import END_SECONDS
from laurel.errors import ConfigError, LaurelError, WorkerError
from laurel.protocols import WorkerGroup

_log = logging.getLogger(__name__)

MAX_RESTARTS = 8
"""Of all nodes together."""
OPENING_SECONDS = 180.0
"""Limit for a node to start its process, and then to try its canaries."""
_SPARE_CALLS = 8
"""Calls beside programs that run: of those that end what is stuck."""


@dataclass(frozen=True, slots=True)
class ClusterNodes:
    """The nodes of a cluster, and how a worker is started on one."""

    alive: Callable[[], Sequence[NodeState]]
    """Those that are there."""
    make: Callable[..., WorkerGroup]
    """A group of one: `(role, node_id, worker_class, *, at_a_time, limit)`. Its calls may be made
    by several threads, `at_a_time` of them at once."""
    is_only_this: Callable[[], bool]
    """Whether the one node that there is, is where this process runs: then zygotes of its own are
    quicker."""


class NodeCrew:
    """The nodes that run programs for one pool."""

    def __init__(
        self,
        nodes: ClusterNodes,
        *,
        num_workers: int,
        limits_mb: int,
        accept: Callable[[Detection], Tier],
        cgroup: str = "auto",
        say: Callable[[str], None] = _log.warning,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        """Start a process on every node, at the same time, and have it try its canaries.

        Args:
            nodes: Of the cluster.
            num_workers: Programs at a time on each; fewer where it has fewer cores or the memory
                for fewer.
            limits_mb: Memory and disk of one program.
            accept: The tier to run in; `ConfigError` where it will not do.
            cgroup: See `SandboxConfig.cgroup`; each node looks for its own.
            say: Told of every restart, and of nodes that are given up.
            max_restarts: Of all nodes together.

        Raises:
            ConfigError: Nodes lock programs in less well than is asked for; all of them are told.
            WorkerError: A process could not be started.
        """
        self.nodes_of_cluster = nodes
        self.num_workers = num_workers
        self.limits_mb = limits_mb
        self.accept = accept
        self.cgroup = cgroup
        self.say = say
        self.restarts = Restarts(max_restarts, say)
        self.is_closed = False
        self.nodes = [CrewNode(self, state) for state in nodes.alive()]
        self._lock = threading.Lock()
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        # One of each node after the other, so that few programs are spread, too.
        rows = zip_longest(*([(n, i) for i in range(n.num_workers)] for n in self.nodes))
        self._places = [place for row in rows for place in row if place is not None]
        self._num_made = 0

    def _open(self) -> None:
        if not self.nodes:
            raise ConfigError(
                "programs cannot be run: the cluster has no node that is alive; look at `ray "
                "status`, and start its nodes"
            )
        refused = []
        with ThreadPoolExecutor(len(self.nodes)) as threads:
            openings = [threads.submit(node.open) for node in self.nodes]
        for node, opening in zip(self.nodes, openings, strict=True):
            error = opening.exception()
            if isinstance(error, ConfigError):
                refused.append(f"{node.address}: {error}")
            elif error is not None:
                raise error
        if refused:
            raise ConfigError("\n".join(["not every node can run programs", *refused]))

    @property
    def tier(self) -> Tier:
        """That of the node that has the worst."""
        return max((node.tier for node in self.nodes), key=list(Tier).index)

    @property
    def size(self) -> int:
        """Programs at a time, on all nodes."""
        return len(self._places)

    def make_runner(self) -> NodeRunner:
        """One of the runners, of each node in turn. Any thread."""
        with self._lock:
            node, index = self._places[self._num_made % self.size]
            self._num_made += 1
        return NodeRunner(node, index)

    def num_left(self) -> int:
        """Programs at a time, on the nodes that are not given up."""
        return sum(node.num_workers for node in self.nodes if node.gone is None)

    def close(self) -> None:
        """End all processes, with the programs that they run, for good. Idempotent."""
        self.is_closed = True
        for node in self.nodes:
            node.close()


class CrewNode:
    """A node, seen from the process of the run. Safe to use from several threads."""

    def __init__(self, crew: NodeCrew, state: NodeState) -> None:
        """Start nothing yet.

        Args:
            crew: That it belongs to.
            state: What the cluster says of it.
        """
        self.id = state.id
        self.address = f"node {state.address} ({state.id[:8]})"
        self.name = f"sandbox of {self.address}"
        self.last_failure: str | None = None
        self.detection = Detection(tier=None)
        self.tier = Tier.LIMITS_ONLY
        self.num_workers = 0
        self.gone: str | None = None
        """Why it is given up."""
        self._crew = crew
        self._lock = threading.Lock()
        self._group: WorkerGroup | None = None
        self._loss: Exception = SandboxLostError("it was never started")

    def open(self) -> None:
        """Start its process, and find out how well it locks programs in.

        Raises:
            ConfigError: Not well enough.
            WorkerError: Its process could not be started.
        """
        crew = self._crew
        with self._lock:
            self._group = self._made()
            found = self._group.call_one(0, "find", crew.num_workers, crew.limits_mb)
            letter = found["tier"]
            self.detection = Detection(
                tier=None if letter is None else Tier(letter), reasons=found["reasons"]
            )
            self.tier = crew.accept(self.detection)
            self.num_workers = found["num_workers"]
            self._prepare(self._group)

    def group(self) -> WorkerGroup:
        """Its process, which is started again where it was lost.

        Raises:
            SandboxGoneError: It is given up.
            SandboxStartError: All have been shut down.
        """
        with self._lock:
            if self._crew.is_closed:
                raise SandboxStartError(CLOSED)
            if self._group is None and self.gone is None:
                self._group = self._restarted()
            if self._group is None:
                raise SandboxGoneError(f"{self.gone}")
            return self._group

    def ask(self, group: WorkerGroup, method: str, *args: Any, limit: float) -> Any:
        """Have its process do something.

        Args:
            group: The process, from `group`.
            method: Of `NodeWorker`.
            args: For it.
            limit: Seconds until the process counts as lost, with all that it runs.

        Raises:
            SandboxLostError: The process is gone, or was ended for it was late.
            WorkerError: It raised.
        """
        try:
            return group.call_one(0, method, *args, timeout=limit)
        except WorkerError as error:
            if self._crew.is_closed:
                raise SandboxLostError(CLOSED) from error
            if not error.is_lost and self._group is group:
                raise
            self._lost(group, error)
            raise SandboxLostError(str(error).partition("\n")[0]) from error

    def discard(self, index: int) -> None:
        """End one of its zygotes, where its process lives."""
        group = self._group
        if group is not None:
            try:
                self.ask(group, "discard", index, limit=END_SECONDS + MARGIN_SECONDS)
            except WorkerError as error:
                self._lost(group, error)  # who cannot end it is ended with it
            except SandboxLostError:
                pass  # that ended it as well

    def close(self) -> None:
        """End its process. Idempotent."""
        with self._lock:
            group, self._group = self._group, None
            if group is not None:
                group.shutdown()

    def _lost(self, group: WorkerGroup, failure: WorkerError) -> None:
        with self._lock:
            if self._group is group:
                self._group, self._loss = None, failure
                group.shutdown()

    # ------------------------------------------------------------------------- under the lock

    def _made(self) -> WorkerGroup:
        crew = self._crew
        return crew.nodes_of_cluster.make(
            self.name, self.id, NodeWorker,
            at_a_time=crew.num_workers + _SPARE_CALLS, limit=OPENING_SECONDS,
        )  # fmt: skip

    def _prepare(self, group: WorkerGroup) -> None:
        group.call_one(0, "prepare", self.tier.value, self.num_workers, self._crew.cgroup)

    def _restarted(self) -> WorkerGroup | None:
        """Another process; None where there is to be none."""
        while True:
            if self._crew.is_closed:
                raise SandboxStartError(CLOSED)
            refused = self._refusal()
            if refused is not None:
                self.gone = refused
                self._crew.say(
                    f"{refused}. Its {self.num_workers} sandbox workers are given up; there are "
                    f"{self._crew.num_left()} on other nodes"
                )
                return None
            group = None
            try:
                group = self._made()
                self._prepare(group)
            except LaurelError as error:
                self._loss = error
                if group is not None:
                    group.shutdown()
            else:
                return group

    def _refusal(self) -> str | None:
        """Why its process is not started again; None: it is, and that has been said."""
        if self.id not in {state.id for state in self._crew.nodes_of_cluster.alive()}:
            return f"{self.name} was lost: the node has left the cluster"
        loss = self._crew.restarts.after(self._loss, self)
        return None if loss.refused is None else str(loss)
