"""Reserve the slots of a plan on a Ray cluster before anything is loaded."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from laurel.config.policy import ClusterConfig, RoleName
from laurel.errors import ConfigError
from laurel.planning.plan import Plan, plan_run
from laurel.planning.request import ClusterRequest
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
    from laurel.workers.ray_cluster import RayCluster, Reservation

Backend = Literal["local", "ray"]
Device = Literal["cpu", "cuda"]
LOOKING = 0.25
"""Seconds between checks of a cluster that is not ready."""


def plan_to_run(request: ClusterRequest) -> Plan:
    """Plan a run that is about to start.

    Raises:
        ConfigError: It does not fit; everything that does not is named, with the nearest setting
            that does.
    """
    plan = plan_run(request)
    if not plan.fits:
        conflicts = [conflict for conflict in plan.conflicts if conflict.is_fatal]
        lines = [f"  {conflict.problem}\n    fix  {conflict.fix}" for conflict in conflicts]
        raise ConfigError("\n".join(["the run does not fit its cluster", *lines]))
    return plan


def backend_of(plan: Plan, config: ClusterConfig) -> Backend:
    """Decide whether a run needs Ray: by `cluster.backend`, or for `auto` by the plan.

    Raises:
        ConfigError: It is to run in this process, and has more ranks or slots than one.
    """
    ranks = {role.name: len(role.slots) for role in plan.roles}
    is_one = max(ranks.values()) == 1 and len({s for role in plan.roles for s in role.slots}) == 1
    if config.backend == "auto":
        return "local" if is_one and config.address is None else "ray"
    if config.backend == "local" and not is_one:
        said = ", ".join(f"{name} {count}" for name, count in ranks.items())
        raise ConfigError(
            f"cluster.backend=local is one process on one slot, and the plan has more ({said} "
            "slots); set cluster.backend=ray, or cluster.gpus_per_node=1 cluster.num_nodes=1 and "
            "no resources of the roles' own"
        )
    return config.backend


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
