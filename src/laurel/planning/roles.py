"""The slots of a role, the mesh of its ranks, and the conflicts that prevent a placement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd

from laurel.config.policy import RoleName
from laurel.planning.request import RoleRequest


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Slot:
    """A place for one rank: a GPU of a node, or a CPU process on a node without GPUs."""

    node: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The parallel sizes of a role's ranks, from dp (the slowest axis) to tp (the fastest)."""

    dp: int
    """Data-parallel size: ranks that divide the batch. In training they also divide weights,
    gradients and optimizer states."""
    pp: int = 1
    """Pipeline-parallel size: ranks that divide the layers among them."""
    cp: int = 1
    """Context-parallel size: ranks that divide each sequence."""
    tp: int = 1
    """Tensor-parallel size: ranks that divide each layer."""

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self.dp * self.group_size

    @property
    def group_size(self) -> int:
        """The number of ranks that together hold one copy of the model."""
        return self.pp * self.cp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Something that the run requests and that the cluster or model cannot meet, with a fix."""

    problem: str
    """A sentence on what does not fit, with the configuration keys."""
    fix: str
    """The nearest setting that fits, as `key=value` where one can be named."""
    is_fatal: bool = True
    """Whether the run cannot start; if False, it can, but slots lie idle or wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """The slots of one role, and the mesh of its ranks on them."""

    name: RoleName
    slots: tuple[Slot, ...]
    """Slots in the order of their ranks; the ranks of a group are neighbours."""
    mesh: Mesh
    shares_with: RoleName | None = None
    """The role that owns these slots, with which this one takes turns; None: they are its own."""
    fraction: float = 1.0
    """Fraction of each slot that the role uses; another role may use the rest at the same time."""

    @property
    def groups(self) -> tuple[tuple[Slot, ...], ...]:
        """The slots in groups, each of which holds one copy of the model."""
        size = self.mesh.group_size
        return tuple(self.slots[i : i + size] for i in range(0, len(self.slots), size))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRequirement:
    """The slots assigned to one role, by the rules or by `cluster.placement`.

    `place_role` arranges the role's ranks on them.
    """

    role: RoleRequest
    slots: tuple[Slot, ...]
    """Slots in the order of their ranks."""
    shares_with: RoleName | None = None
    fraction: float = 1.0
    is_placed: bool = True
    """Whether there is room; if False, `place_role` only checks whether groups divide the slots."""


def grid(nodes: Iterable[int], indices: Iterable[int]) -> tuple[Slot, ...]:
    """Return the slots with these indices on each of these nodes, node by node."""
    indices = tuple(indices)
    return tuple(Slot(node=node, index=index) for node in nodes for index in indices)


def place_role(requirement: RoleRequirement, conflicts: list[Conflict]) -> RolePlan | None:
    """Arrange a role's ranks on its slots as a mesh.

    Args:
        conflicts: The list to which conflicts are appended.

    Returns:
        The role's plan; None if its groups do not fit the slots, or if there is no room.
    """
    role, num_slots = requirement.role, len(requirement.slots)
    name, each = role.name, role.group_size
    sizes = {"pipeline": role.pp, "context": role.cp, "tensor": role.tp}
    group = " x ".join(
        f"{role.parallel_key}.{axis}_parallel_size={size}"
        for axis, size in sizes.items()
        if size > 1
    )
    if num_slots % each:
        conflicts.append(
            Conflict(
                problem=f"{group}: groups of {each} do not divide the {num_slots} slots of {name}",
                fix=_nearest_tp(role, num_slots) or f"a multiple of {each} slots for {name}",
            )
        )
        return None
    if not requirement.is_placed:
        return None
    counts = Counter(slot.node for slot in requirement.slots).values()
    if any(count % each for count in counts):
        is_fatal, least, most = name == "generation", min(counts), max(counts)
        why = "the network between nodes is slow"
        if is_fatal:
            why = "vLLM starts the processes of one replica on one node"
        conflicts.append(
            Conflict(
                problem=f"{group}: groups of {each} slots reach over nodes, of which each has "
                f"{least if least == most else f'{least} to {most}'} for {name}; {why}",
                fix=_nearest_tp(role, gcd(*counts))
                or f"a multiple of {each} slots of each node for {name}",
                is_fatal=is_fatal,
            )
        )
        if is_fatal:
            return None
    mesh = Mesh(dp=num_slots // each, pp=role.pp, cp=role.cp, tp=role.tp)
    return RolePlan(
        name=name,
        slots=requirement.slots,
        mesh=mesh,
        shares_with=requirement.shares_with,
        fraction=requirement.fraction,
    )


def _nearest_tp(role: RoleRequest, num_slots: int) -> str | None:
    """Return the setting of the nearest tensor-parallel size that fits the slots, if any does."""
    rest = role.pp * role.cp
    if num_slots % rest:
        return None
    size = min(divisors(num_slots // rest), key=lambda size: abs(size - role.tp))
    return f"{role.parallel_key}.tensor_parallel_size={size}"


def title(name: RoleName) -> str:
    """Return the name of a role with spaces instead of underscores, for messages."""
    return name.replace("_", " ")


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def where(slots: Iterable[Slot]) -> str:
    """Describe slots in words, such as `node 0, slots 4-7; nodes 1-3, slots 0-7 of each`."""
    indices: dict[int, list[int]] = {}
    for slot in sorted(slots):
        indices.setdefault(slot.node, []).append(slot.index)
    alike: dict[str, list[int]] = {}
    for node, found in indices.items():
        slots_of_node = f"slot{'s' if len(found) > 1 else ''} {as_ranges(found)}"
        alike.setdefault(slots_of_node, []).append(node)
    return "; ".join(
        f"node {nodes[0]}, {said}"
        if len(nodes) == 1
        else f"nodes {as_ranges(nodes)}, {said} of each"
        for said, nodes in alike.items()
    )


def as_ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers as ranges, such as `0-3,6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
