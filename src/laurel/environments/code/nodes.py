"""Programs on every node of a cluster: a pool of sandboxes on each, and who is asked for what."""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from laurel.config.environments import SandboxConfig
from laurel.environments.code.sandbox import accepted_tier, say_tier
from laurel.errors import ConfigError, LaurelError, WorkerError
from laurel.protocols import WorkerGroup
from laurel.sandbox.detection import Detection, detect
from laurel.sandbox.group_trial import chosen_place
from laurel.sandbox.jobs import SandboxJob, SandboxResult, Status
from laurel.sandbox.limits import available_cores
from laurel.sandbox.pool import ATTEMPTS, CLOSED, SandboxPool, affordable_workers
from laurel.sandbox.tiers import Tier
from laurel.sandbox.zygote_process import END_SECONDS
from laurel.workers.reservations import NodeState
from laurel.workers.supervisor import Restarts

if TYPE_CHECKING:
    from laurel.workers.rendezvous import RankPlace

_log = logging.getLogger(__name__)

MAX_RESTARTS = 8
"""Of all nodes together."""
OPENING_SECONDS = 180.0
"""Limit for a node to start its process, and then to try its canaries."""
MARGIN_SECONDS = 60.0
"""What a call to a node may take beyond what is waited for there, on one that is busy with other
things; with a later one its process is lost."""
COLLECT_SECONDS = 5.0
"""How long a node is asked for results before it is asked again."""
AT_A_TIME = 8
"""Calls to a node at a time."""


@dataclass(frozen=True, slots=True)
class ClusterNodes:
    """The nodes of a cluster, and how a worker is started on one."""

    alive: Callable[[], Sequence[NodeState]]
    """Those that are there."""
    make: Callable[..., WorkerGroup]
    """A group of one: `(role, node_id, worker_class, *, at_a_time, limit)`. Its calls may be made
    by several threads, `at_a_time` of them at once."""
    is_only_this: Callable[[], bool]
    """Whether the one node that there is, is where this process runs: then a pool of its own is
    quicker."""


class NodeWorker:
    """The pool of one node, held by a process there that knows nothing of Ray."""

    def __init__(self, place: RankPlace) -> None:
        """Have no pool yet.

        Args:
            place: Where it is.
        """
        self._pool: SandboxPool | None = None
        self._ended: queue.SimpleQueue[tuple[int, SandboxResult] | None] = queue.SimpleQueue()

    def find(self, num_workers: int, limits_mb: int) -> tuple[Detection, int]:
        """How well this node locks programs in, and how many it runs at a time.

        Args:
            num_workers: As many as are wanted.
            limits_mb: Memory and disk of one program.
        """
        return detect(), affordable_workers(min(num_workers, available_cores()), limits_mb)

    def prepare(self, tier: Tier, num_workers: int, cgroup: str) -> None:
        """Have a pool, whose sandboxes start with their first programs.

        Args:
            tier: The one that was found here, whose layers each must have.
            num_workers: Programs at a time.
            cgroup: See `SandboxConfig.cgroup`.

        Raises:
            ConfigError: This node has no such control group.
        """
        place, _ = chosen_place(cgroup)
        # Whoever asks bounds the backlog: a call that waited here would hold up the others.
        self._pool = SandboxPool(tier=tier, num_workers=num_workers, backlog=0, place=place)

    def submit(self, number: int, job: SandboxJob, seconds: float | None, batch: int) -> None:
        """Run a job some time.

        Args:
            number: That its result is given with.
            job: What to run.
            seconds: Until its deadline; None: it has none.
            batch: How many are submitted here together.
        """
        assert self._pool is not None
        deadline = None if seconds is None else time.monotonic() + seconds
        future = self._pool.submit(job, deadline=deadline, batch=batch)
        future.add_done_callback(lambda done: self._ended.put((number, done.result())))

    def collect(self, seconds: float) -> list[tuple[int, SandboxResult]]:
        """The results that have come, each with its number; waits for the first."""
        found = []
        with suppress(queue.Empty):
            found.append(self._ended.get(timeout=seconds))
            while True:
                found.append(self._ended.get_nowait())
        return [one for one in found if one is not None]

    def shutdown(self) -> None:
        """End the pool for good, with what it runs."""
        if self._pool is not None:
            self._pool.close()
        self._ended.put(None)  # for a call that waits


@dataclass(slots=True, eq=False)
class _Sent:
    """A job that is with a node, or waits for one."""

    job: SandboxJob
    deadline: float | None
    batch: int
    future: Future[SandboxResult]
    losses: int = 0
    """How often the process of a node was lost that may have run it."""


class NodePool:
    """Runs jobs on all nodes; like a `SandboxPool`, but each result has the tier of its node."""

    def __init__(
        self,
        config: SandboxConfig,
        nodes: ClusterNodes,
        *,
        say: Callable[[str], None] = _log.warning,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        """Start a process on every node, at the same time, and have it try its canaries.

        Args:
            config: What is asked for; its number of workers is that of every node.
            nodes: Of the cluster.
            say: Told of every restart, and of nodes that are given up.
            max_restarts: Of all nodes together.

        Raises:
            ConfigError: Nodes lock programs in less well than is asked for; all of them are named.
            WorkerError: A process could not be started.
        """
        self._nodes = _Nodes(config, nodes, say, max_restarts)
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
        """The result to come; see `SandboxPool.submit`."""
        return self._nodes.submit(_Sent(job, deadline, batch, Future()))

    def run(
        self, jobs: Sequence[SandboxJob], *, timeout_s: float | None = None
    ) -> list[SandboxResult]:
        """The results, in the order of the jobs; see `SandboxPool.run`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        futures = [self.submit(job, deadline=deadline, batch=len(jobs)) for job in jobs]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End everything. Jobs that run or wait are SANDBOX_ERRORs. Idempotent."""
        self._finalizer()

    def __enter__(self) -> NodePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Nodes:
    """What the threads of a pool share; they must not know the pool, or it is never collected."""

    def __init__(
        self,
        config: SandboxConfig,
        cluster: ClusterNodes,
        say: Callable[[str], None],
        max_restarts: int,
    ) -> None:
        self.config = config
        self.cluster = cluster
        self.say = say
        self.restarts = Restarts(max_restarts, say)
        self.closed = False
        self.changed = threading.Condition()
        """Held where nodes or jobs are looked at or changed."""
        self.members = [_Node(self, state) for state in cluster.alive()]
        self._waiting: deque[_Sent] = deque()
        """Jobs that no node can have now."""
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
        """Programs at a time, on the nodes that are not given up."""
        return sum(node.num_workers for node in self.members if node.gone is None)

    def submit(self, sent: _Sent) -> Future[SandboxResult]:
        """Have a job run; waits while the backlog is full."""
        with self.changed:
            while not self.closed:
                unfinished = sum(len(node.outstanding) for node in self.members)
                if len(self._waiting) + unfinished < self.config.backlog + self.num_left():
                    break
                left = None if sent.deadline is None else sent.deadline - time.monotonic()
                if left is not None and left <= 0:
                    self.fail(sent, "its turn did not come in time")
                    return sent.future
                self.changed.wait(left)
        self.place(sent)
        return sent.future

    def place(self, *jobs: _Sent) -> None:
        """Give each job to the node that has the least to do for its size."""
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
        """Place what has waited for a node that has come back, or that is given up."""
        with self.changed:
            waiting, self._waiting = self._waiting, deque()
        self.place(*waiting)

    def fail(self, sent: _Sent, reason: str) -> None:
        """End a job that no node has run."""
        attempt = max(1, sent.losses)
        result = SandboxResult(id=sent.job.id, status=Status.SANDBOX_ERROR, reason=reason)
        self.end(sent, replace(result, tier=self.tier.value, attempt=attempt))

    def end(self, sent: _Sent, result: SandboxResult) -> None:
        """Hand out a result."""
        with self.changed:
            self.changed.notify_all()  # somebody may wait for room in the backlog
        if sent.future.set_running_or_notify_cancel():
            sent.future.set_result(result)

    def close(self) -> None:
        """End all processes, with the programs that they run, for good. Idempotent."""
        if os.getpid() != self._owner:  # a fork has only copies
            return
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for node in self.members:
            node.close()
        self.place_waiting()


class _Node:
    """A node, seen from the process of the run."""

    def __init__(self, nodes: _Nodes, state: NodeState) -> None:
        self.address = f"node {state.address} ({state.id[:8]})"
        self.name = f"sandbox of {self.address}"
        self.last_failure: str | None = None
        self.detection = Detection(tier=None)
        self.tier = Tier.LIMITS_ONLY
        self.num_workers = 0
        self.group: WorkerGroup | None = None
        """Its process; None while it has none."""
        self.gone: str | None = None
        """Why it is given up."""
        self.outstanding: dict[int, _Sent] = {}
        """What its process has, in the order in which it was given."""
        self.thread = threading.Thread(target=self._serve, name="laurel-node", daemon=True)
        self._id = state.id
        self._nodes = nodes
        self._number = 0

    def open(self) -> None:
        """Start its process, and find out how well it locks programs in.

        Raises:
            ConfigError: Not well enough.
            WorkerError: Its process could not be started.
        """
        config = self._nodes.config
        self.group = self._made()
        limits_mb = config.memory_mb + config.disk_mb
        found = self.group.call_one(0, "find", config.num_workers, limits_mb)
        self.detection, self.num_workers = found
        self.tier = accepted_tier(config, self.detection)
        self._prepare(self.group)

    def give(self, sent: _Sent) -> None:
        """Send a job to its process. The lock is held."""
        assert self.group is not None
        self._number += 1
        self.outstanding[self._number] = sent
        seconds = None if sent.deadline is None else sent.deadline - time.monotonic()
        share = math.ceil(sent.batch * self.num_workers / self._nodes.num_left())
        # Nobody waits for this call: where it fails, so does the one that waits for results.
        try:
            self.group.start_one(0, "submit", self._number, sent.job, seconds, share)
        except WorkerError:
            pass
        except Exception as error:  # what cannot travel
            del self.outstanding[self._number]
            self._nodes.fail(sent, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End its process. Idempotent."""
        with self._nodes.changed:
            group = self.group
        if group is not None:
            group.shutdown()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(END_SECONDS + MARGIN_SECONDS)

    def _serve(self) -> None:
        """Hand out its results, until the pool is closed or it is given up."""
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
        """Let others run what its process had."""
        with self._nodes.changed:
            self.group = None
            had, self.outstanding = list(self.outstanding.values()), {}
        for sent in had[: self.num_workers]:  # these may have been running, and be to blame
            sent.losses += 1
        for sent in had:
            if sent.losses < ATTEMPTS or self._nodes.closed:
                self._nodes.place(sent)
            else:
                self._nodes.fail(sent, str(error).partition("\n")[0])
        group.shutdown()

    def _restart(self, loss: LaurelError) -> None:
        """Start another process, unless there is to be none."""
        nodes = self._nodes
        while not nodes.closed:
            if self._id in {state.id for state in nodes.cluster.alive()}:
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
