"""Ray clusters, and slots that are reserved on them.

Only this module, `ray_group.py` and `ray_actor.py` import Ray.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from laurel.errors import ConfigError, MissingDependencyError, WorkerError
from laurel.sandbox.scratch import ScratchFolder
from laurel.workers.rendezvous import LOOPBACK
from laurel.workers.reservations import (
    PLACING,
    SETTLING,
    NodeState,
    Resources,
    refusal,
    room,
    shortfall,
)

try:
    import ray
    from ray._private.state import state as ray_state
    from ray.exceptions import RayError
    from ray.util.placement_group import (
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )
except ImportError as error:
    raise MissingDependencyError.of("ray", extra="ray", purpose="more than one worker") from error

KNOCKING = 5.0
"""Seconds for a running cluster to answer."""
NOTICING = 60.0
"""Seconds for Ray to notice that a node is gone."""
ANSWERING = 3.0
"""Seconds for a node to accept a connection."""
START_ATTEMPTS = 2
"""Attempts to start a cluster on this machine, which may be too busy for Ray."""
ANY_NODE = "unknown"
"""The node of a slot that is spread evenly over the nodes with others of its role."""


_log = logging.getLogger(__name__)


class RayCluster:
    """A Ray cluster that this process uses: its own, or a running one.

    Its own has no dashboard, keeps its files in a folder that goes with it, and ends with this
    process; where that is killed, workers and servers end within seconds, Ray's two agents
    within about a minute, and the folder is removed by the next one. On Linux Ray listens on all
    interfaces whatever it is configured to, so the cluster answers only to a token, made for it
    alone and known to this process and its children (or to the user's, where RAY_AUTH_TOKEN or
    RAY_AUTH_TOKEN_PATH is set).
    A cluster that runs already is used with the token that the user has for it.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        cpus: int | None = None,
        gpus: int | None = None,
        object_store_bytes: int | None = None,
    ) -> None:
        """Start a cluster on this machine, or connect to one.

        Args:
            address: Address of a running cluster, e.g. `auto`; None: start one, or use the one that
                this process is already connected to.
            cpus: Slots for CPU workers of a cluster that is started; None: the cores.
            gpus: Number of GPU slots; None: the GPUs of the machine.
            object_store_bytes: Shared memory of a cluster that is started; None: Ray's choice.

        Raises:
            ConfigError: There is no cluster at the address.
        """
        self._owns_connection = not ray.is_initialized()
        self._folder: ScratchFolder | None = None
        self._reservations: list[Reservation] = []
        self._is_open = True
        if not self._owns_connection:
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves them on a busy machine
        os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")  # else `print` is Ray's from then on
        quiet = {"configure_logging": False, "log_to_driver": False, "logging_level": "ERROR"}
        self._let_go = threading.Event()
        with _kept_signals():
            if address is None:
                start = partial(self._start, cpus, gpus, object_store_bytes, quiet)
                in_a_thread_that_stays(start, until=self._let_go)
            else:
                self._connect(address, quiet)

    def _connect(self, address: str, quiet: dict[str, Any]) -> None:
        host, _, port = address.rpartition(":")
        try:
            if host and port.isdigit():  # Ray itself would ask for minutes
                socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCKING).close()
            ray.init(address=address, **quiet)
        except (OSError, RayError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"no Ray cluster answers at {address!r}: {error}. Start one (`ray start --head`), "
                "or give no address to have one on this machine"
            ) from error

    def _start(
        self, cpus: int | None, gpus: int | None, store: int | None, quiet: dict[str, Any]
    ) -> None:
        # Ray asks for a token by itself, unless RAY_AUTH_MODE says otherwise; it would keep one in
        # the home directory.
        if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        logging.getLogger("ray").setLevel(logging.ERROR)
        sizes = {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": store}
        for attempt in range(START_ATTEMPTS):
            # Sockets live in it, whose paths may have 107 characters at most.
            self._folder = ScratchFolder("ray")
            try:
                ray.init(
                    address="local",
                    include_dashboard=False,
                    dashboard_host=LOOPBACK,
                    _temp_dir=str(self._folder.path),
                    **sizes,
                    **quiet,
                )
                return
            except BaseException as error:
                ray.shutdown()
                end_those_of(str(self._folder.path))
                self._folder.remove()
                # Ray gives its own processes half a minute, which a busy machine may exceed.
                if attempt + 1 == START_ATTEMPTS or "timed out during startup" not in str(error):
                    raise

    def nodes(self) -> list[NodeState]:
        """List the nodes that are alive, the head first, then by address."""
        alive = [node for node in ray.nodes() if node["Alive"]]
        alive.sort(
            key=lambda node: (
                "node:__internal_head__" not in node["Resources"],
                node["NodeManagerAddress"],
                node["NodeID"],
            )
        )
        free = ray_state.available_resources_per_node()
        held = _held_by_role()
        return [
            NodeState(
                id=node["NodeID"],
                address=node["NodeManagerAddress"],
                total=node["Resources"],
                free=free.get(node["NodeID"], {}),
                held=held.get(node["NodeID"], {}),
                # Ray gives each node a label with its own number, which identifies no property.
                labels=frozenset(
                    f"{key}={value}"
                    for key, value in node.get("Labels", {}).items()
                    if key != "ray.io/node-id"
                ),
            )
            for node in alive
        ]

    def wait_until_settled(self) -> None:
        """Wait until every node that Ray lists answers, or for a minute.

        Ray lists a dead node as alive until its health checks fail, which takes some twenty
        seconds. Workers placed there meanwhile never start.
        """
        deadline = time.monotonic() + NOTICING
        is_logged = False
        while silent := [node for node in ray.nodes() if node["Alive"] and not _answers(node)]:
            names = ", ".join(
                sorted(f"node {n['NodeID'][:8]} ({n['NodeManagerAddress']})" for n in silent)
            )
            if time.monotonic() > deadline:
                _log.warning("%s: Ray lists it, and it does not answer", names)
                return
            if not is_logged:
                _log.warning(
                    "%s does not answer; waiting %.0f s at most for Ray to notice, or for it to "
                    "come back",
                    names,
                    NOTICING,
                )
                is_logged = True
            time.sleep(0.5)

    def reserve(
        self,
        role: str,
        workers: int,
        each: Resources,
        *,
        nodes: Sequence[int] | None = None,
        patience: float | None = None,
    ) -> Reservation:
        """Reserve slots before anything is loaded into them.

        Args:
            nodes: Index into `nodes()` for each rank; None: as close together as possible.
            patience: Seconds to wait for what is not there: nodes that an autoscaler adds, or
                another job to end. None: none for what the cluster has not, a moment for what
                is just being given back.

        Raises:
            ConfigError: It does not fit; the message says what is free and who holds the rest.
        """
        states = self.nodes()

        def lacking(amounts: Callable[[NodeState], Mapping[str, float]]) -> str | None:
            rooms = [room(each, amounts(state)) for state in states]
            return shortfall(workers, each, rooms, nodes=nodes)

        why = lacking(lambda state: state.total)
        if why and (patience is None or (nodes is not None and max(nodes) >= len(states))):
            raise ConfigError(refusal(role, workers, each, states, why, busy=False))
        group = placement_group(
            [each.amounts()] * workers,
            strategy="PACK",
            name=f"{_NAME}{role}:{secrets.token_hex(4)}",  # no two may have the same
            bundle_label_selector=[{"ray.io/node-id": states[n].id} for n in nodes]
            if nodes is not None
            else None,
        )
        placed_in_time = group.wait(SETTLING if patience is None else patience)
        # A cluster that has the room may still be slow to give it: a node has just joined, or the
        # machine is busy. That is no reason to refuse what fits.
        deadline = time.monotonic() + PLACING
        while not placed_in_time and time.monotonic() < deadline:
            states = self.nodes()
            if lacking(lambda state: state.free) is not None:
                break
            placed_in_time = group.wait(1.0)
        if not placed_in_time:
            remove_placement_group(group)
            states = self.nodes()
            why = lacking(lambda state: state.free) or "the cluster could not place them"
            busy = lacking(lambda state: state.total) is None
            raise ConfigError(refusal(role, workers, each, states, why, busy=busy))
        placed = placement_group_table(group)["bundles_to_node_id"]
        bundles, devices = list(range(workers)), [""] * workers
        if each.gpus >= 1:
            try:
                bundles, devices = _in_device_order(group, [placed[b] for b in bundles], each.gpus)
            except RayError as error:
                remove_placement_group(group)
                raise ConfigError(f"slots of {role} were lost: {error}. {_LOST}") from error
        reservation = Reservation(
            role=role,
            each=each,
            group=group,
            bundles=bundles,
            devices=devices,
            node_ids=[placed[bundle] for bundle in bundles],
        )
        self._reservations.append(reservation)
        return reservation

    def shutdown(self) -> None:
        """Release all slots and end everything in them; end the cluster if it is our own."""
        if not self._is_open:
            return
        self._is_open = False
        if ray.is_initialized():
            for reservation in self._reservations:
                reservation.release()
            if self._owns_connection:
                with _kept_signals():
                    ray.shutdown()
        if self._owns_connection:
            self._let_go.set()
        if self._folder:
            self._folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


@dataclass(kw_only=True)
class Reservation:
    """The slots of a group, one per rank, reserved or not.

    Those that are reserved outlive the groups that run in them.
    """

    role: str
    each: Resources
    node_ids: list[str]
    """The node of each rank; ANY_NODE leaves it to Ray, where the slots are not reserved."""
    group: Any = None
    """Ray's placement group; None: the slots are not reserved."""
    bundles: list[int] = field(default_factory=list)
    """Bundle of the placement group, of each rank."""
    share: float = 1.0
    """Part of each slot; groups of other roles have the rest."""
    devices: list[str] | None = None
    """GPUs of each rank, as in CUDA_VISIBLE_DEVICES; None: not yet determined."""
    slots_each: int = 1
    """Slots of a rank; its process is in the first, and has the GPUs of all."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.node_ids)

    def strategy(self, rank: int) -> Any:
        """Return Ray's scheduling strategy of a rank's process."""
        if self.group is not None:
            return PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self.bundles[rank]
            )
        if self.node_ids[rank] == ANY_NODE:
            return "SPREAD"
        return NodeAffinitySchedulingStrategy(self.node_ids[rank], soft=False)

    def part(self, role: str, ranks: Sequence[int], *, share: float | None = None) -> Reservation:
        """Take some of this reservation's slots, or a share of each, for a role.

        They are released with the reservation.

        Args:
            ranks: Ranks of this reservation, in the order of the new one.
            share: The fraction of each slot; None takes all that this reservation has.
        """
        return replace(
            self,
            role=role,
            share=self.share if share is None else share,
            node_ids=[self.node_ids[rank] for rank in ranks],
            bundles=[self.bundles[rank] for rank in ranks],
            devices=self.devices and [self.devices[rank] for rank in ranks],
        )

    def joined(self, slots_each: int) -> Reservation:
        """Join neighbouring slots: fewer ranks with `slots_each` slots each.

        A rank's process may start others that compute in its other slots, which stay reserved.

        Raises:
            ConfigError: They do not divide, or slots of a rank are on several nodes.
        """
        starts = range(0, self.size, slots_each)
        parts = [slice(start, start + slots_each) for start in starts]
        if self.size % slots_each or any(len(set(self.node_ids[part])) > 1 for part in parts):
            raise ConfigError(
                f"{self.role}: the {self.size} slots cannot be divided into {slots_each} on one "
                "node for each rank; ask for a multiple of that on every node"
            )
        return replace(
            self,
            slots_each=self.slots_each * slots_each,
            node_ids=[self.node_ids[start] for start in starts],
            bundles=[self.bundles[start] for start in starts],
            devices=self.devices and [",".join(self.devices[part]) for part in parts],
        )

    def release(self) -> None:
        """Release the slots, with all parts of them; processes in them are killed. Idempotent."""
        with suppress(RayError):
            remove_placement_group(self.group)


def _answers(node: Mapping[str, Any]) -> bool:
    # The process of Ray's on a node accepts connections.
    try:
        address = (node["NodeManagerAddress"], node["NodeManagerPort"])
        socket.create_connection(address, timeout=ANSWERING).close()
    except OSError:
        return False
    return True


def is_connected() -> bool:
    """Report whether this process uses a cluster, which a new `RayCluster` would then use."""
    return bool(ray.is_initialized())


def joined_cluster() -> RayCluster:
    """Return the cluster that this process uses, as an object that does not end it.

    Raises:
        WorkerError: It uses none (any more). `RayCluster()` would start one: a replica that is
            started again while a run ends would begin a cluster that nobody ends.
    """
    if not is_connected():
        raise WorkerError("the Ray cluster of this process has ended")
    return RayCluster()


_LOST = "A node went away again at once: look at `ray status`, then run the same command"
_NAME = "laurel:"


def _held_by_role() -> dict[str, dict[str, dict[str, float]]]:
    # Node -> role -> resource -> amount, of all placement groups of the cluster.
    held: dict[str, dict[str, dict[str, float]]] = {}
    for entry in placement_group_table().values():
        if entry["state"] != "CREATED":
            continue
        name = entry["name"]
        ours = name.removeprefix(_NAME).rpartition(":")[0]
        role = ours if name.startswith(_NAME) else f"the placement group {name!r}"
        for index, node in entry["bundles_to_node_id"].items():
            mine = held.setdefault(node, {}).setdefault(role, {})
            for resource, amount in entry["bundles"][index].items():
                mine[resource] = mine.get(resource, 0.0) + amount
    return held


def _in_device_order(
    group: Any, node_ids: Sequence[str], gpus: float
) -> tuple[list[int], list[str]]:
    # Ray numbers the bundles of a node in any order; ranks follow the order of GPUs.
    asking = [
        ray.remote(_gpus)
        .options(
            num_cpus=0,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            ),
        )
        .remote()
        for bundle in range(len(node_ids))
    ]
    found = ray.get(asking)
    order = sorted(range(len(node_ids)), key=lambda b: (node_ids.index(node_ids[b]), found[b]))
    # A node keeps its places among the ranks.
    places = sorted(range(len(node_ids)), key=lambda b: (node_ids.index(node_ids[b]), b))
    bundles = [0] * len(node_ids)
    for rank, bundle in zip(places, order, strict=True):
        bundles[rank] = bundle
    return bundles, [",".join(number for _, number in found[bundle]) for bundle in bundles]


def _gpus() -> list[tuple[int, str]]:
    # As numbers, so that they sort.
    return sorted((len(str(number)), str(number)) for number in ray.get_gpu_ids())


@contextmanager
def _kept_signals() -> Iterator[None]:
    # Ray takes SIGTERM for itself; Laurel's own handler stays.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


# The processes of a Ray cluster of our own: whose end is theirs, and which are left over.


def in_a_thread_that_stays(start: Callable[[], None], *, until: threading.Event) -> None:
    """Start processes that outlive the calling thread.

    On Linux, Ray has its processes killed when the thread that started them ends, and Ray ends a
    process whose cluster is gone a minute later, without a message. The main thread lasts as long
    as the process; for any other, one that waits stands in.

    Args:
        start: Starts them.
        until: Set when they are needed no more.

    Raises:
        BaseException: Any exception of `start`.
    """
    if threading.current_thread() is threading.main_thread():
        start()
        return
    done, errors = threading.Event(), list[BaseException]()

    def stay() -> None:
        try:
            start()
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()
        if not errors:
            until.wait()

    threading.Thread(target=stay, name="laurel-ray", daemon=True).start()
    done.wait()
    if errors:
        raise errors[0]


def end_those_of(folder: str) -> None:
    """Kill the processes of a cluster that did not come up; Ray would keep them.

    They have the cluster's folder in their command line.
    """
    psutil: Any = importlib.import_module("psutil")
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(folder in argument for argument in process.cmdline()):
                process.kill()
                process.wait(5)
