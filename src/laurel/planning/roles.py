"""What a role is given: slots, the mesh of its ranks, or the reason why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd

from laurel.planning.request import RoleName, RoleRequest


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Slot:
    """A GPU, or a CPU process where there are none."""

    node: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """How the ranks of a role are arranged; the last axis varies fastest."""

    dp: int
    """Ranks that share the batch. In training they also share weights, gradients, optimizer."""
    pp: int = 1
    """Ranks that share the layers."""
    cp: int = 1
    """Ranks that share each sequence."""
    tp: int = 1
    """Ranks that share each layer."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.dp * self.group_size

    @property
    def group_size(self) -> int:
        """The number of ranks that together hold one copy of the model."""
        return self.pp * self.cp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Something that a run asks for and the cluster, or the model, has no place for."""

    problem: str
    """What does not fit, with the keys."""
    fix: str
    """The nearest setting that fits, `key=value` where one can be named."""
    is_fatal: bool = True
    """False: it can run, but slots lie idle or wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """What one role gets."""

    name: RoleName
    slots: tuple[Slot, ...]
    """In the order of their ranks: the ranks of a group are neighbours."""
    mesh: Mesh
    shares_with: RoleName | None = None
    """The role that these slots belong to, and that it takes turns with."""
    fraction: float = 1.0
    """Part of each slot; another role may have the rest, at the same time."""

    @property
    def groups(self) -> tuple[tuple[Slot, ...], ...]:
        """The slots in groups, each of which holds one copy of the model."""
        size = self.mesh.group_size
        return tuple(self.slots[i : i + size] for i in range(0, len(self.slots), size))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRequirement:
    """Slots for one role, as the rules or an explicit placement have it."""

    role: RoleRequest
    slots: tuple[Slot, ...]
    """In the order of their ranks."""
    shares_with: RoleName | None = None
    fraction: float = 1.0
    is_placed: bool = True
    """False: there is no room; it is only checked whether its ranks could be arranged."""


def grid(nodes: Iterable[int], indices: Iterable[int]) -> tuple[Slot, ...]:
    """The slots with these indices on each of these nodes, node by node."""
    indices = tuple(indices)
    return tuple(Slot(node=node, index=index) for node in nodes for index in indices)


def place_role(requirement: RoleRequirement, conflicts: list[Conflict]) -> RolePlan | None:
    """The requirement's slots as a mesh; None if they cannot be arranged, or there is no room."""
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
    """The tensor-parallel size with which groups divide so many slots; None: there is none."""
    rest = role.pp * role.cp
    if num_slots % rest:
        return None
    size = min(divisors(num_slots // rest), key=lambda size: abs(size - role.tp))
    return f"{role.parallel_key}.tensor_parallel_size={size}"


def title(name: RoleName) -> str:
    """Return the name of a role with spaces instead of underscores, for messages."""
    return name.replace("_", " ")


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, rising."""
    return [size for size in range(1, number + 1) if number % size == 0]


def where(slots: Iterable[Slot]) -> str:
    """Slots in words: `node 0, slots 4-7; nodes 1-3, slots 0-7 of each`."""
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
    """Rising numbers, `0-3,6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
