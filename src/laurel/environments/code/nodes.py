"""A pool whose programs run on every node of a cluster."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, Protocol

from laurel.config.environments import SandboxConfig
from laurel.environments.code.sandbox import accepted_tier, say_tier
from laurel.errors import ConfigError, LaurelError, WorkerError
from laurel.protocols import WorkerGroup
from laurel.sandbox.detection import Detection, detect
from laurel.sandbox.grading import lacked_answer
from laurel.sandbox.group_trial import chosen_place
from laurel.sandbox.jobs import Limits
from laurel.sandbox.limits import available_cores
from laurel.sandbox.pool import SandboxPool, affordable_workers
from laurel.sandbox.runner import (
    ProcessOutcome,
    SandboxGoneError,
    SandboxLostError,
    SandboxStartError,
)
from laurel.sandbox.tiers import Tier
from laurel.sandbox.zygote_process import END_SECONDS, GRACE_SECONDS, START_SECONDS, ZygoteProcess
from laurel.workers.reservations import NodeState
from laurel.workers.supervisor import Restarts

if TYPE_CHECKING:
    from laurel.workers.rendezvous import RankPlace


_log = logging.getLogger(__name__)


def open_pool_on(config: SandboxConfig, nodes: ClusterNodes) -> SandboxPool:
    """A pool of `num_workers` on every node, each node in the best tier that it gives.

    Verdicts are drawn in this process. The pool's tier is that of the worst node; a result has that
    of its own.

    Args:
        config: What is asked for.
        nodes: Of the cluster.

    Raises:
        ConfigError: A node gives no tier that the configuration accepts.
        WorkerError: A node could not start its process.
    """
    node_set = NodeSet(
        nodes,
        num_workers=config.num_workers,
        limits_mb=config.memory_mb + config.disk_mb,
        accept=partial(accepted_tier, config),
        cgroup=config.cgroup,
    )
    alike: dict[str, list[str]] = {}
    for node in node_set.nodes:
        alike.setdefault(node.detection.sentence(), []).append(node.address)
    for node in node_set.nodes:
        addresses = alike.pop(node.detection.sentence(), None)
        if addresses is not None:
            say_tier(node.detection, node.tier, where=f"{', '.join(addresses)}: ")
    _log.info("%d sandbox workers on %d nodes", node_set.size, len(node_set.nodes))
    return SandboxPool(
        tier=node_set.tier,
        num_workers=node_set.size,
        backlog=config.backlog,
        make_runner=node_set.make_runner,
        end_runners=node_set.close,
    )


# --------------------------------------------------------------------------------------------------
# A process with zygotes on every node of a cluster, started again where it is lost.

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


class NodeSet:
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
        self.nodes = [SandboxNode(self, state) for state in nodes.alive()]
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


class SandboxNode:
    """A node, seen from the process of the run. Safe to use from several threads."""

    def __init__(self, node_set: NodeSet, state: NodeState) -> None:
        """Start nothing yet.

        Args:
            node_set: That it belongs to.
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
        self._node_set = node_set
        self._lock = threading.Lock()
        self._group: WorkerGroup | None = None
        self._loss: Exception = SandboxLostError("it was never started")

    def open(self) -> None:
        """Start its process, and find out how well it locks programs in.

        Raises:
            ConfigError: Not well enough.
            WorkerError: Its process could not be started.
        """
        node_set = self._node_set
        with self._lock:
            self._group = self._made()
            found = self._group.call_one(0, "find", node_set.num_workers, node_set.limits_mb)
            letter = found["tier"]
            self.detection = Detection(
                tier=None if letter is None else Tier(letter), reasons=found["reasons"]
            )
            self.tier = node_set.accept(self.detection)
            self.num_workers = found["num_workers"]
            self._prepare(self._group)

    def group(self) -> WorkerGroup:
        """Its process, which is started again where it was lost.

        Raises:
            SandboxGoneError: It is given up.
            SandboxStartError: All have been shut down.
        """
        with self._lock:
            if self._node_set.is_closed:
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
            if self._node_set.is_closed:
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
        node_set = self._node_set
        return node_set.nodes_of_cluster.make(
            self.name,
            self.id,
            NodeWorker,
            at_a_time=node_set.num_workers + _SPARE_CALLS,
            limit=OPENING_SECONDS,
        )

    def _prepare(self, group: WorkerGroup) -> None:
        group.call_one(0, "prepare", self.tier.value, self.num_workers, self._node_set.cgroup)

    def _restarted(self) -> WorkerGroup | None:
        """Another process; None where there is to be none."""
        while True:
            if self._node_set.is_closed:
                raise SandboxStartError(CLOSED)
            refused = self._refusal()
            if refused is not None:
                self.gone = refused
                self._node_set.say(
                    f"{refused}. Its {self.num_workers} sandbox workers are given up; there are "
                    f"{self._node_set.num_left()} on other nodes"
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
        if self.id not in {state.id for state in self._node_set.nodes_of_cluster.alive()}:
            return f"{self.name} was lost: the node has left the cluster"
        loss = self._node_set.restarts.after(self._loss, self)
        return None if loss.refused is None else str(loss)


# --------------------------------------------------------------------------------------------------
# Runs programs on another node: a `Runner` whose zygote is held by a process there.

CLOSED = "the sandbox has been shut down"
MARGIN_SECONDS = 20.0
"""What a call to a node may take beyond what is waited for there."""


class RunnerNode(Protocol):
    """What a runner knows of its node."""

    tier: Tier
    last_failure: str | None

    def group(self) -> WorkerGroup:
        """Its process, which is started again where it was lost."""

    def ask(self, group: WorkerGroup, method: str, *args: Any, limit: float) -> Any:
        """Have its process do something."""

    def discard(self, index: int) -> None:
        """End one of its zygotes, where its process lives."""


class NodeRunner:
    """One zygote of a node.

    The limits of a program are kept there. Here is only waited longer than that can take: a node
    that does not answer is lost, and so is a program that it had.
    """

    pid: int | None = None

    def __init__(self, node: RunnerNode, index: int) -> None:
        """Ask for nothing yet.

        Args:
            node: Where it is.
            index: Which of the node's zygotes it is.
        """
        self.layers: frozenset[str] = frozenset()
        self.starts = 0
        self._node = node
        self._index = index
        self._group: WorkerGroup | None = None
        """The process that the zygote was started in."""
        self._closed = False
        self._asking = threading.RLock()
        """Held while a call is under way."""

    @property
    def tier(self) -> Tier | None:
        """See `Runner`: nodes may have different ones."""
        return self._node.tier

    def start(self) -> None:
        """See `Runner`. A zygote that dies is started again where it is, with the next program."""
        with self._asking:
            if self._closed:
                raise SandboxStartError(CLOSED)
            group = self._node.group()
            if group is not self._group:
                limit = START_SECONDS + MARGIN_SECONDS
                self.layers = frozenset(self._ask(group, "start", limit=limit))
                self._group = group
                self.starts += 1

    def one(
        self, header: Mapping[str, Any], *parts: bytes, limits: Limits, stdin: bytes = b""
    ) -> ProcessOutcome:
        """See `Runner`."""
        return self._run("one", dict(header), parts, limits.message(), stdin, limits=limits)[0]

    def pair(
        self,
        code: bytes,
        header: Mapping[str, Any],
        *parts: bytes,
        limits: Limits,
        is_waiting: Callable[[ProcessOutcome], bool],
    ) -> tuple[ProcessOutcome, ProcessOutcome]:
        """See `Runner`. Whether the program is waited for is decided where it runs: functions do
        not travel, and what they hold might be an answer."""
        verdict, outcome = self._run(
            "pair", code, dict(header), parts, limits.message(), limits=limits
        )
        return verdict, outcome

    def discard(self) -> None:
        """See `Runner`."""
        with self._asking:
            if not self._closed:
                self._group = None
                self._node.discard(self._index)

    def close(self) -> None:
        """See `Runner`. Waits for the call that is under way, so that none is when the cluster is
        left."""
        if not self._closed:
            self._closed = True
            self._node.discard(self._index)
        with self._asking:
            pass

    def _run(self, method: str, *args: Any, limits: Limits) -> list[ProcessOutcome]:
        with self._asking:
            self.start()
            assert self._group is not None
            # The zygote there may have to be started first.
            limit = limits.wall_s + GRACE_SECONDS + START_SECONDS + MARGIN_SECONDS
            said = self._ask(self._group, method, *args, limit=limit)
            self._node.last_failure = None
            return [of_plain(one) for one in said]

    def _ask(self, group: WorkerGroup, method: str, *args: Any, limit: float) -> Any:
        kind, said = self._node.ask(group, method, self._index, *args, limit=limit)
        if kind == "lost":
            raise SandboxLostError(said)
        if kind == "not started":
            raise SandboxStartError(said)
        return said


# --------------------------------------------------------------------------------------------------
# The zygotes of one node, held by a process on it, for runners in the process of the run.

Kind = Literal["ran", "lost", "not started"]
Answer = tuple[Kind, Any]
"""What became of a call: plain data where it ran, and else why not."""


class NodeWorker:
    """Runs programs where it is. It knows neither Ray nor what answers are expected.

    Each zygote is used by one thread at a time; `discard` and `shutdown` may come from another.
    """

    def __init__(self, place: RankPlace) -> None:
        """Have no zygote yet.

        Args:
            place: Where it is.
        """
        self._tier = Tier.LIMITS_ONLY
        self._zygotes: list[ZygoteProcess] = []

    def find(self, num_workers: int, limits_mb: int) -> dict[str, Any]:
        """How well this node locks programs in, and how many it runs at a time.

        Args:
            num_workers: As many as are wanted.
            limits_mb: Memory and disk of one program.

        Returns:
            `tier` (its letter, or None) and `reasons` as in `Detection`, and `num_workers`.
        """
        found = detect()
        return {
            "tier": None if found.tier is None else found.tier.value,
            "reasons": dict(found.reasons),
            "num_workers": affordable_workers(min(num_workers, available_cores()), limits_mb),
        }

    def prepare(self, tier: str, num_workers: int, cgroup: str) -> None:
        """Have zygotes, which start with their first program.

        Args:
            tier: The letter of the one that was found here, whose layers each must have.
            num_workers: How many.
            cgroup: See `SandboxConfig.cgroup`.

        Raises:
            ConfigError: This node has no such control group.
        """
        self._tier = Tier(tier)
        place, _ = chosen_place(cgroup)
        self._zygotes = [ZygoteProcess(self._tier.layers, place=place) for _ in range(num_workers)]

    def start(self, index: int) -> Answer:
        """Start a zygote, unless it lives.

        Returns:
            The names of its layers.
        """
        return _answer(lambda: sorted(self._ready(index).layers))

    def one(
        self,
        index: int,
        header: Mapping[str, Any],
        parts: tuple[bytes, ...],
        limits: Mapping[str, Any],
        stdin: bytes,
    ) -> Answer:
        """See `Runner.one`.

        Returns:
            The outcome, in a list.
        """
        return _answer(
            lambda: [
                as_plain(
                    self._ready(index).one(header, *parts, limits=Limits(**limits), stdin=stdin)
                )
            ]
        )

    def pair(
        self,
        index: int,
        code: bytes,
        header: Mapping[str, Any],
        parts: tuple[bytes, ...],
        limits: Mapping[str, Any],
    ) -> Answer:
        """See `Runner.pair`.

        Returns:
            How the tests ended, and how the program did.
        """
        given = Limits(**limits)

        def ran() -> list[dict[str, Any]]:
            ended = self._ready(index).pair(
                code,
                header,
                *parts,
                limits=given,
                is_waiting=lambda verdict: lacked_answer(verdict, given),
            )
            return [as_plain(outcome) for outcome in ended]

        return _answer(ran)

    def discard(self, index: int) -> None:
        """End a zygote and what it runs; the next program starts it again."""
        self._zygotes[index].discard()

    def shutdown(self) -> None:
        """End all of them for good, with what they run."""
        for zygote in self._zygotes:
            zygote.close()

    def _ready(self, index: int) -> ZygoteProcess:
        """A zygote that lives, in all layers of this node's tier."""
        zygote = self._zygotes[index]
        zygote.start()
        if not self._tier.layers <= zygote.layers:
            missing = ", ".join(sorted(self._tier.layers - zygote.layers))
            raise SandboxStartError(f"it has lost a layer that it had: {missing}")
        return zygote


def as_plain(outcome: ProcessOutcome) -> dict[str, Any]:
    """An outcome as plain data."""
    plain = {field.name: getattr(outcome, field.name) for field in fields(ProcessOutcome)}
    return plain | {"truncated": sorted(outcome.truncated)}


def of_plain(said: Mapping[str, Any]) -> ProcessOutcome:
    """The outcome that plain data is."""
    return ProcessOutcome(**{**said, "truncated": frozenset(said["truncated"])})


def _answer(work: Callable[[], Any]) -> Answer:
    try:
        return "ran", work()
    except SandboxLostError as error:
        return "lost", str(error)
    except SandboxStartError as error:
        return "not started", str(error)
