"""What workers need of a cluster, whether it has it, and who holds what is not free.

Arithmetic only: whoever runs the cluster says what its nodes have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SLACK = 1e-4
"""Clusters count in ten-thousandths."""
SETTLING = 5.0
"""Seconds to wait for what others are just giving back."""
PLACING = 60.0
"""Seconds to wait for a cluster to place what it has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one worker needs."""

    cpus: float = 1
    gpus: float = 0
    others: Mapping[str, float] = field(default_factory=dict)
    """Resources with names that the nodes of a cluster were given."""

    def amounts(self) -> dict[str, float]:
        """Each that is not zero, by the name that the cluster has for it."""
        named = {"CPU": self.cpus, "GPU": self.gpus, **self.others}
        return {name: float(amount) for name, amount in named.items() if amount}

    def __str__(self) -> str:
        return _amounts(self.amounts())


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A node: what it has, what is free, and what the reservations on it hold."""

    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    held: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Role -> what it has reserved here."""
    labels: frozenset[str] = frozenset()
    """`key=value`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeed:
    """What a node of a plan must have."""

    slots: int
    labels: frozenset[str] = frozenset()


def room(each: Resources, amounts: Mapping[str, float]) -> int:
    """How many workers there is room for."""
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
    """Why the workers do not fit into the nodes; None where they do.

    Args:
        workers: How many.
        each: What each needs.
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
    """As many needs as possible with a node each that has room and the labels, the first that do.

    Args:
        needs: Of the nodes of a plan.
        rooms: Slots of each node.
        labels: Of each node.

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
    """Everybody on the way moves one node on."""
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
    """The message of a reservation that failed: what is free on each node and who holds the rest.

    Args:
        role: Who asked.
        workers: For how many workers.
        each: What each needs.
        states: Of all nodes.
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
