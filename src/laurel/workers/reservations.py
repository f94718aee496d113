"""The resources that workers need, the shortfall of a cluster, and who holds the rest.

Arithmetic only: `ray_cluster` supplies the state of the nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from laurel.protocols import WorkerGroup

SLACK = 1e-4
"""Tolerance: clusters count in ten-thousandths."""
SETTLING = 5.0
"""Seconds to wait for resources that are just being released."""
PLACING = 60.0
"""Seconds to wait for a cluster to place workers that it has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources of one worker."""

    cpus: float = 1
    gpus: float = 0
    others: Mapping[str, float] = field(default_factory=dict)
    """Custom resources of the cluster's nodes, by name."""

    def amounts(self) -> dict[str, float]:
        """List the resources that are not zero, by the cluster's names."""
        named = {"CPU": self.cpus, "GPU": self.gpus, **self.others}
        return {name: float(amount) for name, amount in named.items() if amount}

    def __str__(self) -> str:
        return _amounts(self.amounts())


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A node: its resources, those that are free, and the reservations on it."""

    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    held: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Reserved resources by role."""
    labels: frozenset[str] = frozenset()
    """Labels as `key=value`."""


@dataclass(frozen=True, slots=True)
class ClusterNodes:
    """The nodes of a cluster, and the way in which a worker is started on one."""

    alive: Callable[[], Sequence[NodeState]]
    """A function that returns the nodes that are alive."""
    make: Callable[..., WorkerGroup]
    """A function `(role, node_id, worker_class, *, at_a_time, limit)` that creates a group of one
    worker. Several threads may call the worker, `at_a_time` of them at once.
    """
    is_only_this: Callable[[], bool]
    """A function that reports whether the only node is that of this process, for which a local pool
    is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeed:
    """The requirements of one node of a plan."""

    slots: int
    labels: frozenset[str] = frozenset()


def room(each: Resources, amounts: Mapping[str, float]) -> int:
    """Count the workers that there is room for."""
    needs = each.amounts()
    if not needs:
        return 2**31
    return min(
        math.floor((amounts.get(name, 0.0) + SLACK) / amount) for name, amount in needs.items()
    )


def shortfall(
    workers: int,
    each: Resources,
    rooms: Sequence[int],
    *,
    nodes: Sequence[int] | None = None,
) -> str | None:
    """Explain why the workers do not fit into the nodes; None where they do.

    Args:
        rooms: For how many of them each node has room.
        nodes: Index of the node of each rank; None where any will do.
    """
    if nodes is not None:
        for index in sorted(set(nodes)):
            if not 0 <= index < len(rooms):
                return f"node {index} does not exist: there are {len(rooms)}"
            wanted = list(nodes).count(index)
            if wanted > rooms[index]:
                return f"{wanted} are to be on node {index}, which has room for {rooms[index]}"
    elif workers > sum(rooms):
        return f"there is room for {sum(rooms)}"
    return None


def match(
    needs: Sequence[NodeNeed], rooms: Sequence[int], labels: Sequence[frozenset[str]]
) -> dict[int, int]:
    """Match as many needs as possible with nodes that have room and the labels, earlier ones first.

    Returns:
        Index of the need -> index of the node; short where no assignment serves all.
    """
    fitting = {
        need: [i for i, room in enumerate(rooms) if need.slots <= room and need.labels <= labels[i]]
        for need in set(needs)
    }
    owner: dict[int, int] = {}
    for first in range(len(needs)):
        # Who can be moved to another node makes room: a path of such moves to a node that is free.
        came: dict[int, int] = {}  # node -> the need that would have it
        waiting = [first]
        while waiting:
            need = waiting.pop(0)
            new = [node for node in fitting[needs[need]] if node not in came]
            came |= dict.fromkeys(new, need)
            free = next((node for node in new if node not in owner), None)
            if free is not None:
                _hand_over(free, first, came, owner)
                break
            waiting += [owner[node] for node in new]
    return {need: node for node, need in owner.items()}


def _hand_over(free: int, first: int, came: Mapping[int, int], owner: dict[int, int]) -> None:
    # Everybody on the augmenting path moves one node on.
    has = {need: node for node, need in owner.items()}
    node = free
    while True:
        need = came[node]
        owner[node] = need
        if need == first:
            return
        node = has[need]


def refusal(
    role: str, workers: int, each: Resources, states: Sequence[NodeState], why: str, *, busy: bool
) -> str:
    """Explain a failed reservation: the free resources of each node, and who holds the rest.

    Args:
        why: From `shortfall`.
        busy: Whether it would fit, were the cluster empty.
    """
    when = "now" if busy else "even on the empty cluster"
    lines = [f"cannot reserve {workers} x ({each}) for {role}: {why} {when}."]
    for index, state in enumerate(states):
        free = ", ".join(
            f"{state.free.get(name, 0.0):g} of {state.total.get(name, 0.0):g} {name}"
            for name in each.amounts()
        )
        where = ", ".join((state.address, *sorted(state.labels)))
        lines.append(f"  node {index} ({where}): {free} free{_holders(state, each)}")
    remedy = "end what holds them, or wait for it" if busy else "add nodes"
    lines.append(f"Ask for less (cluster.gpus_per_node, cluster.num_nodes), or {remedy}.")
    return "\n".join(lines)


def _holders(state: NodeState, each: Resources) -> str:
    names = each.amounts()
    rest = {n: state.total.get(n, 0.0) - state.free.get(n, 0.0) for n in names}
    parts = []
    for role, amounts in sorted(state.held.items()):
        mine = {name: amounts[name] for name in names if amounts.get(name)}
        if mine:
            parts.append(f"{role} ({_amounts(mine)})")
        for name, amount in mine.items():
            rest[name] -= amount
    other = {name: amount for name, amount in rest.items() if amount > SLACK}
    if other:
        parts.append(f"others ({_amounts(other)})")
    return f"; held by {', '.join(parts)}" if parts else ""


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items()) or "nothing"
