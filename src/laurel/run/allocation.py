"""Reserves slots of a Ray cluster for a run's roles, and starts their workers in them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from laurel.config.policy import ClusterConfig, RoleName
from laurel.errors import ConfigError
from laurel.planning.plan import Plan, where
from laurel.run.request import PlannedAllocation
from laurel.workers.reservations import (
    SETTLING,
    NodeNeed,
    NodeState,
    Resources,
    match,
    refusal,
    room,
)

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.models.spec import ParallelShape
    from laurel.protocols import WorkerGroup
    from laurel.workers.ray_cluster import RayCluster, Reservation
    from laurel.workers.ray_group import RayGroup


BESIDE_GPUS = Resources(cpus=0.1)
"""The resources of a worker that has no slot, in a run whose slots are GPUs."""
# Roles may have all CPUs, and Ray spreads over nodes only what takes a resource.
BESIDE_CPUS = Resources(cpus=0, others={"memory": 2**28})
"""The resources of a worker that has no slot, in a run whose slots are CPUs; memory in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Allocation:
    """The slots that each role of a run has on Ray."""

    plan: Plan
    reservations: Mapping[RoleName, Reservation]
    """The reserved slots of each role."""
    stack: ExitStack
    """The exit stack that ends all worker groups."""

    def num_slots(self, role: RoleName) -> int:
        """Return the number of slots that a role has."""
        return self.reservations[role].size

    def take_turns(self, role: RoleName) -> bool:
        """Report whether a role shares the policy's slots, so that the two must take turns."""
        found = self.plan.role(role)
        return found is not None and found.shares_with == "policy"

    def shape_of(self, role: RoleName) -> ParallelShape:
        """Return how a role's model is spread over its ranks.

        A trained model is sharded over its data-parallel ranks; a scoring model is whole on each.
        """
        from laurel.models.spec import ParallelShape

        found = self.plan.role(role)
        assert found is not None, f"{role} has no place"
        mesh = found.mesh
        if role == "policy":
            return ParallelShape(dp_shard=mesh.dp, cp=mesh.cp, tp=mesh.tp)
        return ParallelShape(dp_replicate=mesh.dp, tp=mesh.tp)

    def group(
        self,
        role: RoleName,
        worker_class: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        slots_each: int = 1,
        share: float = 1.0,
        name: str | None = None,
        **kwargs: Any,
    ) -> WorkerGroup:
        """Start a group of workers in the slots of a role; the group ends with the run.

        `ranks` are the slots to use (None uses all), and `slots_each` neighbours of one node are
        for each worker. `share` is the fraction of the role's share of each slot that the workers
        get, and `name` stands for the role in messages.
        """
        from laurel.workers.ray_group import RayGroup

        title = name or role
        if ranks is not None:
            title = f"{title} {','.join(map(str, ranks))}"
        part = self.slots(role, title, ranks, share=share).joined(slots_each)
        return self._kept(RayGroup(part, worker_class, *args, **kwargs))

    def slots(
        self, role: RoleName, title: str, ranks: Sequence[int] | None = None, *, share: float = 1.0
    ) -> Reservation:
        """Return some slots of a role, or a fraction of each, under a title for messages."""
        slots = self.reservations[role]
        chosen = range(slots.size) if ranks is None else ranks
        return slots.part(title, chosen, share=whole_units(slots.share * share))

    def group_of_one(
        self, role: str, worker_class: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> WorkerGroup:
        """Start one worker without a slot, spread over the cluster's nodes with others of its role.

        The worker ends with the run.
        """
        from laurel.workers.ray_actor import SpreadGroup

        slot = next(iter(self.reservations.values())).each
        each = BESIDE_GPUS if slot.gpus else BESIDE_CPUS
        return self._kept(SpreadGroup(role, each, worker_class, *args, **kwargs))

    def _kept(self, group: RayGroup) -> WorkerGroup:
        self.stack.callback(group.shutdown)
        return group

    def describe(self) -> list[str]:
        """Return one line of text per role and its slots."""
        return [
            f"{role.name}: {where(role.slots)}"
            + (f", in turns with {role.shares_with}" if role.shares_with else "")
            for role in self.plan.roles
        ]


def open_allocation(planned: PlannedAllocation, stack: ExitStack, console: Console) -> Allocation:
    """Start or join the cluster, and reserve all slots before anything is loaded.

    Raises:
        ConfigError: Slots are missing; the message says what is free and who holds the rest.
        MissingDependencyError: Ray is not installed.
    """
    plan, settings = planned.plan, planned.config.cluster
    with console.status("reserving slots"):
        cluster = stack.enter_context(open_cluster(plan, settings))
        cluster.wait_until_settled()
        reservations = reserve_roles(
            plan, cluster, device_of(settings, cluster), patience=settings.patience_seconds
        )
    return Allocation(plan=plan, reservations=reservations, stack=stack)


Device = Literal["cpu", "cuda"]
LOOKING = 0.25
"""Seconds between checks of a cluster that is not ready."""


def open_cluster(
    plan: Plan, config: ClusterConfig, *, object_store_bytes: int | None = None
) -> RayCluster:
    """Connect to the Ray cluster of a run, or start one on this machine.

    A new cluster has as many CPU slots as the plan asks for, however few cores there are, and
    the GPUs of the machine.

    Raises:
        ConfigError: Nothing answers at the address; or there is none, and the plan has several
            nodes.
    """
    from laurel.sandbox.limits import available_cores
    from laurel.workers.ray_cluster import RayCluster, is_connected

    if config.address is not None:
        return RayCluster(config.address)
    if plan.num_nodes > 1 and not is_connected():
        raise ConfigError(
            f"cluster.num_nodes={plan.num_nodes} needs a Ray cluster, and cluster.address names "
            "none. Start one (`ray up examples/clusters/ray_up.yaml`, `ray start --head` and "
            "`ray start --address=...` on the others, or examples/clusters/slurm.sbatch) and set "
            "cluster.address=auto on one of its machines, or cluster.address=HOST:PORT; see "
            "docs/clusters.md"
        )
    return RayCluster(
        cpus=max(plan.slots_per_node, available_cores()),
        gpus=0 if config.device == "cpu" else None,
        object_store_bytes=object_store_bytes,
    )


def device_of(config: ClusterConfig, cluster: RayCluster) -> Device:
    """Choose the kind of slot on this cluster: `auto` means GPUs if any node has one."""
    if config.device != "auto":
        return config.device
    return "cuda" if any(state.total.get("GPU") for state in cluster.nodes()) else "cpu"


def reserve_roles(
    plan: Plan, cluster: RayCluster, device: Device, *, patience: float | None = None
) -> dict[RoleName, Reservation]:
    """Reserve all slots of all roles, or none.

    They are reserved in one piece, so that two runs cannot hold half of what they need each, and
    the GPUs of a node are its slots in order. Roles that have parts of the same slots, or take
    turns on them, have shares of them.

    Args:
        patience: Seconds to wait for nodes that are missing or slots that are taken; None: not for
            what the cluster has not, and a moment for what is just being given back.

    Raises:
        ConfigError: It has not got them; the message says what is free and who holds the rest.
    """
    each = Resources(cpus=0, gpus=1) if device == "cuda" else Resources(cpus=1)
    slots = sorted({slot for role in plan.roles for slot in role.slots})
    title = ", ".join(role.name for role in plan.roles)
    node_of = _find_nodes(plan, cluster, each, title, patience)
    whole = cluster.reserve(
        title, len(slots), each, nodes=[node_of[slot.node] for slot in slots], patience=patience
    )
    rank_of = {slot: rank for rank, slot in enumerate(slots)}
    turns = Counter(role.shares_with or role.name for role in plan.roles)
    return {
        role.name: whole.part(
            role.name,
            [rank_of[slot] for slot in role.slots],
            share=whole_units(role.fraction / turns[role.shares_with or role.name]),
        )
        for role in plan.roles
    }


def whole_units(part: float) -> float:
    """Round a part of a slot down: clusters count in ten-thousandths.

    Parts must not sum to more than the whole.
    """
    return math.floor(part * 1e4 + 1e-6) / 1e4


def _find_nodes(
    plan: Plan, cluster: RayCluster, each: Resources, title: str, patience: float | None
) -> dict[int, int]:
    # Maps each node of the plan to one of the cluster.
    counts = Counter(slot.node for slot in {s for role in plan.roles for s in role.slots})
    nodes = sorted(counts)
    needs = [NodeNeed(slots=counts[n], labels=plan.labels.get(n, frozenset())) for n in nodes]
    start = time.monotonic()
    while True:
        states = cluster.nodes()
        free = _matched(needs, states, [state.free for state in states], each)
        total = _matched(needs, states, [state.total for state in states], each)
        is_there = len(total) == len(needs) and len(states) >= plan.num_nodes
        if is_there and len(free) == len(needs):
            return {nodes[need]: node for need, node in free.items()}
        limit = (SETTLING if is_there else 0.0) if patience is None else patience
        if time.monotonic() - start >= limit:
            break
        time.sleep(LOOKING)
    why = f"cluster.num_nodes={plan.num_nodes}, and the Ray cluster has {len(states)}"
    if len(states) >= plan.num_nodes:
        served = free if is_there else total
        lacking = next(need for need in range(len(needs)) if need not in served)
        asked = " with ".join((f"{needs[lacking].slots} of them", *sorted(needs[lacking].labels)))
        why = f"for node {nodes[lacking]} of the plan there is none that has {asked}"
    raise ConfigError(refusal(title, sum(counts.values()), each, states, why, busy=is_there))


def _matched(
    needs: Sequence[NodeNeed],
    states: Sequence[NodeState],
    amounts: Sequence[Mapping[str, float]],
    each: Resources,
) -> dict[int, int]:
    rooms = [room(each, amount) for amount in amounts]
    return match(needs, rooms, [state.labels for state in states])
