"""Runs programs on every node of a cluster, each with a pool of sandboxes."""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from laurel.errors import ConfigError, LaurelError, WorkerError
from laurel.extensions.code.opening import BACKLOG, accepted_tier, say_tier
from laurel.extensions.code.sandbox.control_group import chosen_place
from laurel.extensions.code.sandbox.detection import Detection, detect
from laurel.extensions.code.sandbox.jobs import SandboxJob, SandboxResult
from laurel.extensions.code.sandbox.pool import (
    ATTEMPTS,
    CLOSED,
    ProgramPool,
    SandboxPool,
    affordable_workers,
    failed_result,
)
from laurel.extensions.code.sandbox.tiers import Tier
from laurel.extensions.code.sandbox.zygote_process import END_SECONDS
from laurel.extensions.code.settings import SandboxConfig
from laurel.protocols import WorkerGroup
from laurel.sandbox.limits import available_cores
from laurel.workers.reservations import ClusterNodes, NodeState
from laurel.workers.supervisor import Restarts

if TYPE_CHECKING:
    from laurel.workers.rendezvous import RankPlace

_log = logging.getLogger(__name__)

MAX_RESTARTS = 8
"""The maximum number of restarts of all nodes together."""
OPENING_SECONDS = 180.0
"""The time that a node has to start its process, and again to try its canaries."""
MARGIN_SECONDS = 60.0
"""The time that a call may take beyond its wait before the node's process counts as lost."""
COLLECT_SECONDS = 5.0
"""The time that one call waits for results."""
AT_A_TIME = 8
"""The number of concurrent calls to a node."""


class NodeWorker:
    """Holds the pool of a node, in a process on that node; this class does not know Ray."""

    def __init__(self, place: RankPlace) -> None:
        """Start without a pool."""
        self._pool: SandboxPool | None = None
        self._ended: queue.SimpleQueue[tuple[int, SandboxResult] | None] = queue.SimpleQueue()

    def find(self, num_workers: int, limits_mb: int) -> tuple[Detection, int]:
        """Return how well this node isolates programs, and how many it can run concurrently.

        Args:
            limits_mb: The memory and disk limits of one program together.
        """
        return detect(), affordable_workers(min(num_workers, available_cores()), limits_mb)

    def prepare(self, tier: Tier, num_workers: int, cgroup: str) -> None:
        """Create the pool; each sandbox starts only when it gets its first program.

        Args:
            tier: The tier that was found here, whose layers every sandbox must have.
            cgroup: The control group, as in `SandboxConfig.cgroup`.

        Raises:
            ConfigError: This node has no such control group.
        """
        place, _ = chosen_place(cgroup)
        # The caller limits the backlog: a call that waited here would block the others.
        self._pool = SandboxPool(tier=tier, num_workers=num_workers, backlog=0, place=place)

    def submit(self, number: int, job: SandboxJob, seconds: float | None, batch: int) -> None:
        """Queue a job.

        `number` comes back with the result, and `batch` jobs are submitted to this node together.
        """
        assert self._pool is not None
        deadline = None if seconds is None else time.monotonic() + seconds
        future = self._pool.submit(job, deadline=deadline, batch=batch)
        future.add_done_callback(lambda done: self._ended.put((number, done.result())))

    def collect(self, seconds: float) -> list[tuple[int, SandboxResult]]:
        """Wait for a result, and return all finished results, each with its number."""
        found = []
        with suppress(queue.Empty):
            found.append(self._ended.get(timeout=seconds))
            while True:
                found.append(self._ended.get_nowait())
        return [one for one in found if one is not None]

    def shutdown(self) -> None:
        """End the pool permanently, with its running programs."""
        if self._pool is not None:
            self._pool.close()
        self._ended.put(None)  # wakes a waiting `collect`


@dataclass(slots=True, eq=False)
class _Sent:
    """A job that a node has, or that waits for a node."""

    job: SandboxJob
    deadline: float | None
    batch: int
    future: Future[SandboxResult]
    losses: int = 0  # number of lost node processes that may have run it


class NodePool(ProgramPool):
    """Runs jobs on all nodes; each result has the tier of its node."""

    def __init__(
        self,
        config: SandboxConfig,
        nodes: ClusterNodes,
        *,
        num_workers: int = 8,
        say: Callable[[str], None] = _log.warning,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        """Start processes on all nodes concurrently, and let each try its canaries.

        The number of workers is that of every node, and `max_restarts` that of all nodes together.

        Raises:
            ConfigError: Nodes isolate programs less than the section requires; the message names
                them.
            WorkerError: A process could not be started.
        """
        self._nodes = _Nodes(config, num_workers, nodes, say, max_restarts)
        self._finalizer = weakref.finalize(self, self._nodes.close)
        self.tier = self._nodes.tier
        self.num_workers = self._nodes.num_left()
        alike: dict[str, list[_Node]] = {}
        for node in self._nodes.members:
            alike.setdefault(node.detection.sentence(), []).append(node)
        for same in alike.values():
            addresses = ", ".join(node.address for node in same)
            say_tier(same[0].detection, same[0].tier, where=f"{addresses}: ")
        count = len(self._nodes.members)
        _log.info("%d sandbox workers on %d nodes", self.num_workers, count)

    def submit(
        self, job: SandboxJob, *, deadline: float | None = None, batch: int = 1
    ) -> Future[SandboxResult]:
        """Queue a job, as `ProgramPool.submit` describes."""
        return self._nodes.submit(_Sent(job, deadline, batch, Future()))

    def close(self) -> None:
        """End all processes, as `ProgramPool.close` describes."""
        self._finalizer()


class _Nodes:
    # The threads share this and not the pool, or the pool would never be collected.

    def __init__(
        self,
        config: SandboxConfig,
        num_workers: int,
        cluster: ClusterNodes,
        say: Callable[[str], None],
        max_restarts: int,
    ) -> None:
        self.config = config
        self.num_workers = num_workers
        self.cluster = cluster
        self.say = say
        self.restarts = Restarts(max_restarts, say)
        self.closed = False
        # Held while nodes or jobs are read or changed.
        self.changed = threading.Condition()
        self.members = [_Node(self, state) for state in cluster.alive()]
        self._waiting: deque[_Sent] = deque()  # jobs for which no node is ready
        self._owner = os.getpid()
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        self.tier = max((node.tier for node in self.members), key=list(Tier).index)
        for node in self.members:
            node.thread.start()

    def _open(self) -> None:
        if not self.members:
            raise ConfigError(
                "programs cannot be run: the cluster has no node that is alive; look at `ray "
                "status`, and start its nodes"
            )
        with ThreadPoolExecutor(len(self.members)) as threads:
            openings = [threads.submit(node.open) for node in self.members]
        refused = []
        for node, opening in zip(self.members, openings, strict=True):
            error = opening.exception()
            if isinstance(error, ConfigError):
                refused.append(f"{node.address}: {error}")
            elif error is not None:
                raise error
        if refused:
            raise ConfigError("\n".join(["not every node can run programs", *refused]))

    def num_left(self) -> int:
        """Return how many concurrent programs the remaining nodes can run."""
        return sum(node.num_workers for node in self.members if node.gone is None)

    def submit(self, sent: _Sent) -> Future[SandboxResult]:
        """Queue a job; block while the backlog is full."""
        with self.changed:
            while not self.closed:
                unfinished = sum(len(node.outstanding) for node in self.members)
                if len(self._waiting) + unfinished < BACKLOG + self.num_left():
                    break
                left = None if sent.deadline is None else sent.deadline - time.monotonic()
                if left is not None and left <= 0:
                    self.fail(sent, "its turn did not come in time")
                    return sent.future
                self.changed.wait(left)
        self.place(sent)
        return sent.future

    def place(self, *jobs: _Sent) -> None:
        """Send each job to the node with the least load for its size."""
        for sent in jobs:
            with self.changed:
                living = [node for node in self.members if node.gone is None]
                ready = [node for node in living if node.group is not None]
                if self.closed or not living:
                    self.fail(sent, CLOSED if self.closed else f"{self.members[-1].gone}")
                elif ready:
                    node = min(ready, key=lambda node: len(node.outstanding) / node.num_workers)
                    node.give(sent)
                else:
                    self._waiting.append(sent)

    def place_waiting(self) -> None:
        """Place the jobs that waited until a node came back or was given up."""
        with self.changed:
            waiting, self._waiting = self._waiting, deque()
        self.place(*waiting)

    def fail(self, sent: _Sent, reason: str) -> None:
        """Fail a job that no node has run."""
        attempt = max(1, sent.losses)
        self.end(sent, failed_result(sent.job, self.tier, reason, attempt=attempt))

    def end(self, sent: _Sent, result: SandboxResult) -> None:
        """Set the result of a job."""
        with self.changed:
            self.changed.notify_all()  # a caller may wait for room in the backlog
        if sent.future.set_running_or_notify_cancel():
            sent.future.set_result(result)

    def close(self) -> None:
        """End all processes and their programs permanently; further calls do nothing."""
        if os.getpid() != self._owner:  # a fork has only copies
            return
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for node in self.members:
            node.close()
        self.place_waiting()


class _Node:
    """The state of a node, which the process of the run holds."""

    def __init__(self, nodes: _Nodes, state: NodeState) -> None:
        self.address = f"node {state.address} ({state.id[:8]})"
        self.name = f"sandbox of {self.address}"
        self.last_failure: str | None = None
        self.detection = Detection(tier=None)
        self.tier = Tier.LIMITS_ONLY
        self.num_workers = 0
        self.group: WorkerGroup | None = None  # its process, if it has one
        self.gone: str | None = None  # why it was given up
        # Jobs that its process has, in the order in which they were sent.
        self.outstanding: dict[int, _Sent] = {}
        self.thread = threading.Thread(target=self._serve, name="laurel-node", daemon=True)
        self._id = state.id
        self._nodes = nodes
        self._number = 0

    def open(self) -> None:
        """Start the process of the node, and find out how well the node isolates programs.

        Raises:
            ConfigError: The node isolates programs less than is required.
            WorkerError: The process could not be started.
        """
        config = self._nodes.config
        self.group = self._made()
        limits_mb = config.memory_mb + config.disk_mb
        found = self.group.call_one(0, "find", self._nodes.num_workers, limits_mb)
        self.detection, self.num_workers = found
        self.tier = accepted_tier(config, self.detection)
        self._prepare(self.group)

    def give(self, sent: _Sent) -> None:
        """Send a job to the process of the node; the caller holds the lock."""
        assert self.group is not None
        self._number += 1
        self.outstanding[self._number] = sent
        seconds = None if sent.deadline is None else sent.deadline - time.monotonic()
        share = math.ceil(sent.batch * self.num_workers / self._nodes.num_left())
        # No result is awaited: where this call fails, the one that collects results fails too.
        try:
            self.group.start_one(0, "submit", self._number, sent.job, seconds, share)
        except WorkerError:
            pass
        except Exception as error:  # a job that cannot be sent
            del self.outstanding[self._number]
            self._nodes.fail(sent, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End the process of the node; further calls do nothing."""
        with self._nodes.changed:
            group = self.group
        if group is not None:
            group.shutdown()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(END_SECONDS + MARGIN_SECONDS)

    def _serve(self) -> None:
        """Collect results of the node's jobs until the pool is closed or the node is given up."""
        while (group := self.group) is not None:
            try:
                limit = COLLECT_SECONDS + MARGIN_SECONDS
                found = group.call_one(0, "collect", COLLECT_SECONDS, timeout=limit)
            except WorkerError as error:
                self._hand_over(group, error)
                self._restart(error)
                continue
            for number, result in found:
                self.last_failure = None
                with self._nodes.changed:
                    sent = self.outstanding.pop(number)
                self._nodes.end(sent, replace(result, attempt=result.attempt + sent.losses))

    def _hand_over(self, group: WorkerGroup, error: WorkerError) -> None:
        with self._nodes.changed:
            self.group = None
            had, self.outstanding = list(self.outstanding.values()), {}
        for sent in had[: self.num_workers]:  # these may have been running, and be the cause
            sent.losses += 1
        for sent in had:
            if sent.losses < ATTEMPTS or self._nodes.closed:
                self._nodes.place(sent)
            else:
                self._nodes.fail(sent, str(error).partition("\n")[0])
        group.shutdown()

    def _restart(self, loss: LaurelError) -> None:
        nodes = self._nodes
        while not nodes.closed:
            try:
                is_there = self._id in {state.id for state in nodes.cluster.alive()}
            except LaurelError:  # the cluster itself has ended
                is_there = False
            if is_there:
                counted = nodes.restarts.after(loss, self)
                refused = None if counted.refused is None else str(counted)
            else:
                refused = f"{self.name} was lost: the node has left the cluster"
            if refused is not None:
                with nodes.changed:
                    self.gone = refused
                nodes.say(
                    f"{refused}. Its {self.num_workers} sandbox workers are given up; there are "
                    f"{nodes.num_left()} on other nodes"
                )
                break
            group = None
            try:
                group = self._made()
                self._prepare(group)
            except LaurelError as error:
                loss = error
            else:
                with nodes.changed:
                    if not nodes.closed:
                        self.group = group
                        break
            if group is not None:
                group.shutdown()
        nodes.place_waiting()

    def _made(self) -> WorkerGroup:
        return self._nodes.cluster.make(
            self.name, self._id, NodeWorker, at_a_time=AT_A_TIME, limit=OPENING_SECONDS
        )

    def _prepare(self, group: WorkerGroup) -> None:
        group.call_one(0, "prepare", self.tier, self.num_workers, self._nodes.config.cgroup)
