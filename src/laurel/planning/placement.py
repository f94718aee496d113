"""Assigns slots to roles where `cluster.placement` specifies them.

Roles that name their slots get those. Roles that give a number are packed into the free slots, the
fullest nodes first. The remaining roles get what is left. Among free slots the policy takes the
first and the others the last, as the rules of `plan` do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from laurel.config.policy import RoleName, RolePlacement
from laurel.planning.request import ClusterRequest
from laurel.planning.roles import Conflict, RoleRequirement, Slot, as_ranges, grid, title, where

PLACEMENT = "cluster.placement"
SLACK = 1e-6
"""Tolerance for rounding errors in sums of fractions of a slot."""


def placed_requirements(
    request: ClusterRequest, placement: Mapping[RoleName, RolePlacement], conflicts: list[Conflict]
) -> list[RoleRequirement]:
    """Assign slots to every role as `cluster.placement` specifies.

    Args:
        conflicts: The list to which a conflict is appended for all that cannot be placed.

    Returns:
        The slots of each role that has any.
    """
    return _Board(request, placement, conflicts).requirements()


class _Board:
    """The free part of every slot while slots are assigned."""

    def __init__(
        self,
        request: ClusterRequest,
        placement: Mapping[RoleName, RolePlacement],
        conflicts: list[Conflict],
    ) -> None:
        self.request, self.conflicts = request, conflicts
        self.num_nodes, self.total = request.num_nodes, request.slots_per_node
        self.free = [[1.0] * self.total for _ in range(self.num_nodes)]
        self.labels = self._labels()
        self.wishes: dict[RoleName, RolePlacement] = {}
        for name in placement:
            if self.request.role(name) is None:
                problem = f"{_key(name)}: this run has no {title(name)}; nothing is set aside"
                self._refuse(problem, f"{_key(name)}=null", is_fatal=False)
        for role in self.request.roles:
            name, own = role.name, role.own
            shares = None if name == "policy" else "policy"
            self.wishes[name] = placement.get(name) or RolePlacement(shares=shares)
            if own is not None and name not in placement:
                slots = "null" if own.per_node is None else own.per_node
                self._refuse(
                    f"{own.key} asks for slots, and {PLACEMENT} does not name {title(name)}, which "
                    "would share the policy's",
                    f"{_key(name)}.nodes={own.nodes or 1} {_key(name)}.slots={slots}",
                )
        self.taken: dict[RoleName, tuple[Slot, ...]] = dict.fromkeys(self.wishes, ())

    def requirements(self) -> list[RoleRequirement]:
        """Assign slots to all roles."""
        owners = [name for name, wish in self.wishes.items() if wish.shares is None]
        for name in sorted(owners, key=self._openness):
            wish = self.wishes[name]
            self.taken[name] = self._choose(name, wish)
            for slot in self.taken[name]:
                self.free[slot.node][slot.index] -= wish.fraction
        self._find_overlaps(owners)
        for name, wish in self.wishes.items():
            if wish.shares is not None and self.taken[wish.shares]:
                self.taken[name] = self._share(name, wish, self.taken[wish.shares])
        requirements = []
        for role in self.request.roles:
            wish = self.wishes[role.name]
            owner = wish.shares and (self.wishes[wish.shares].shares or wish.shares)
            fraction = self.wishes[owner or role.name].fraction
            if slots := self.taken[role.name]:
                requirements.append(
                    RoleRequirement(role=role, slots=slots, shares_with=owner, fraction=fraction)
                )
        return requirements

    def _refuse(self, problem: str, fix: str, *, is_fatal: bool = True) -> None:
        self.conflicts.append(Conflict(problem=problem, fix=fix, is_fatal=is_fatal))

    def _labels(self) -> dict[str, set[int]]:
        found = {}
        for label, nodes in self.request.labels.items():
            found[label] = {node for node in nodes if 0 <= node < self.num_nodes}
            if outside := as_ranges(sorted(set(nodes) - found[label])):
                self._refuse(
                    f"cluster.labels gives {label} to node {outside}; {self._counted_nodes()}",
                    f"take node {outside} out of the list of {label}",
                )
        return found

    def _openness(self, name: RoleName) -> tuple[int, int, int]:
        """Return a sort key: roles with more specific placements choose first."""
        wish, kinds = self.wishes[name], {list: 0, int: 1, type(None): 2}
        nodes = 0 if wish.labels else kinds[type(wish.nodes)]
        turn = ("reward_model", "generation", "policy").index(name)
        return kinds[type(wish.slots)], nodes, turn

    def _candidates(self, name: RoleName, wish: RolePlacement) -> list[int]:
        """Return the nodes that a role may use."""
        key, nodes = _key(name), list(range(self.num_nodes))
        if isinstance(wish.nodes, list):
            nodes = [node for node in wish.nodes if node < self.num_nodes]
            if outside := wish.nodes[len(nodes) :]:
                self._refuse(
                    f"{key}.nodes={_list(wish.nodes)}: there is no node {as_ranges(outside)}; "
                    f"{self._counted_nodes()}",
                    f"{key}.nodes={_list(nodes)}" if nodes else f"{key}.nodes=null",
                )
        fitting = nodes
        for label in wish.labels:
            if label in self.labels:
                fitting = [node for node in fitting if node in self.labels[label]]
            else:
                self._refuse_label(name, wish, label)
        lacking = [node for node in nodes if node not in fitting]
        if isinstance(wish.nodes, list) and lacking:
            self._refuse(
                f"{key}.labels={_list(wish.labels)}: node {as_ranges(lacking)} lacks one of them",
                f"{key}.nodes={_list(fitting)}" if fitting else f"{key}.labels=[]",
            )
        elif nodes and not fitting:
            problem = f"{key}.labels={_list(wish.labels)}: no node has all of them"
            self._refuse(problem, f"{key}.labels=[]")
        return fitting

    def _refuse_label(self, name: RoleName, wish: RolePlacement, label: str) -> None:
        """Add the conflict that no node has the label."""
        key, known = f"{_key(name)}.labels", sorted(self.labels)
        near = get_close_matches(label, known, n=1, cutoff=0.5)
        known_ones = (
            f"cluster.labels knows {', '.join(known)}" if known else "cluster.labels is empty"
        )
        fix = f"cluster.labels={{{label}: [0]}} with the nodes that have it"
        if near:
            fix = f"{key}={_list([other for other in wish.labels if other != label] + near)}"
        self._refuse(f"{key}: no node has the label {label}; {known_ones}", fix)

    def _counted_nodes(self) -> str:
        return f"cluster.num_nodes={self.num_nodes} are counted from 0 to {self.num_nodes - 1}"

    def _choose(self, name: RoleName, wish: RolePlacement) -> tuple[Slot, ...]:
        """Return the slots of a role that has its own; empty if there are not enough."""
        nodes = self._candidates(name, wish)
        if not nodes:
            return ()
        if isinstance(wish.slots, list):
            return self._named(name, wish, wish.slots, nodes)
        if wish.slots is not None or isinstance(wish.nodes, int):
            return self._packed(name, wish, nodes)
        left = [slot for n in nodes for slot in grid([n], self._usable(n, wish.fraction))]
        if not left:
            held = {other: len(slots) for other, slots in self.taken.items() if slots}
            said = ", ".join(f"{title(other)} {count}" for other, count in held.items())
            most = max(free for node in nodes for free in self.free[node])
            if most > SLACK:
                fix = f"{_key(name)}.fraction={math.floor(most * 1e4 + SLACK) / 1e4:g}"
            else:
                fix = self._in_turns(name)
            self._refuse(
                f"no slot is left for {title(name)}: of {self.num_nodes} x {self.total} slots are "
                f"taken: {said}",
                fix,
            )
        return tuple(left)

    def _named(
        self, name: RoleName, wish: RolePlacement, indices: list[int], nodes: list[int]
    ) -> tuple[Slot, ...]:
        """Return particular slots of each node."""
        there = [index for index in indices if index < self.total]
        if outside := indices[len(there) :]:
            key = f"{_key(name)}.slots"
            self._refuse(
                f"{key}={_list(indices)}: a node has no slot {as_ranges(outside)}; "
                f"cluster.gpus_per_node={self.total} are counted from 0 to {self.total - 1}",
                f"{key}={_list(there)}" if there else f"{key}=null",
            )
        if not isinstance(wish.nodes, int):
            return grid(nodes, there)
        fitting = [n for n in nodes if set(there) <= set(self._usable(n, wish.fraction))]
        if len(fitting) < wish.nodes:
            asked = f"slots [{as_ranges(indices)}]"
            return self._refuse_nodes(name, wish.nodes, len(fitting), asked, self._in_turns(name))
        return grid(self._fullest(name, wish.nodes, fitting), there)

    def _packed(self, name: RoleName, wish: RolePlacement, nodes: list[int]) -> tuple[Slot, ...]:
        """Return so many slots of each node, or whole nodes if no number of slots is given."""
        asked = wish.slots if isinstance(wish.slots, int) else self.total
        rooms = {node: len(self._usable(node, wish.fraction)) for node in nodes}
        short = [node for node in nodes if rooms[node] < asked]
        key = f"{_key(name)}.slots"
        if isinstance(wish.nodes, int):
            fitting = [node for node in nodes if rooms[node] >= asked]
            if len(fitting) < wish.nodes:
                most = max(rooms.values())
                number = min(wish.nodes, list(rooms.values()).count(most))
                fix = f"{_key(name)}.nodes={number} {key}={most}"
                fix = fix if most else self._in_turns(name)
                said = f"{asked} slots" if asked < self.total else f"all {asked} slots"
                return self._refuse_nodes(name, wish.nodes, len(fitting), said, fix)
            nodes = self._fullest(name, wish.nodes, fitting)
        elif short:
            least = min(rooms.values())
            have = f"has {least}" if len(short) == 1 else f"have {least} or more, but fewer,"
            self._refuse(
                f"{key}={asked} of each node: node {as_ranges(short)} {have} that are free",
                f"{key}={least}" if least else self._in_turns(name),
            )
            return ()
        return tuple(slot for n in nodes for slot in self._last_or_first(name, asked, n))

    def _refuse_nodes(
        self, name: RoleName, number: int, found: int, asked: str, fix: str
    ) -> tuple[Slot, ...]:
        """Add the conflict that too few nodes have room for a role.

        The fix is used where no node has room.
        """
        key, have = f"{_key(name)}.nodes", "has" if found < 2 else "have"
        self._refuse(
            f"{key}={number}: {found or 'none'} of the nodes {have} {asked} free",
            f"{key}={found}" if found else fix,
        )
        return ()

    def _fullest(self, name: RoleName, number: int, nodes: list[int]) -> list[int]:
        """Return the fullest nodes; among equals the policy gets the first, others the last."""
        way = 1 if name == "policy" else -1
        ordered = sorted(nodes, key=lambda node: (sum(self.free[node]), way * node))
        return sorted(ordered[:number])

    def _last_or_first(self, name: RoleName, number: int, node: int) -> tuple[Slot, ...]:
        """Return the fullest slots of a node, in the same order."""
        way, free = (1 if name == "policy" else -1), self.free[node]
        usable = self._usable(node, self.wishes[name].fraction)
        chosen = sorted(usable, key=lambda index: (free[index], way * index))[:number]
        return grid([node], sorted(chosen))

    def _usable(self, node: int, fraction: float) -> list[int]:
        """Return the slots of a node of which at least this fraction is free."""
        slots = enumerate(self.free[node])
        return [index for index, free in slots if free >= fraction - SLACK]

    def _in_turns(self, name: RoleName) -> str:
        """Return the settings with which a role shares the policy's slots.

        For the policy itself they are those of the other roles that have slots of their own.
        """
        others = [n for n, wish in self.wishes.items() if n != "policy" and wish.shares is None]
        settings = []
        for other in others if name == "policy" else [name]:
            settings.append(f"{_key(other)}.shares=policy")
            if self.wishes[other].fraction < 1:
                settings.append(f"{_key(other)}.fraction=1")
        slots = self.wishes[name].slots
        if isinstance(slots, int) and slots > self.total:
            settings.append(f"{_key(name)}.slots={self.total}")
        return " ".join(settings)

    def _find_overlaps(self, owners: Iterable[RoleName]) -> None:
        """Add a conflict for slots of which the roles together ask for more than one whole."""
        holders: dict[Slot, list[RoleName]] = {}
        for name in owners:
            for slot in self.taken[name]:
                if self.free[slot.node][slot.index] < -SLACK:
                    holders.setdefault(slot, []).append(name)
        groups: dict[tuple[RoleName, ...], list[Slot]] = {}
        for slot in sorted(holders):
            groups.setdefault(tuple(holders[slot]), []).append(slot)
        for names, slots in groups.items():
            load = sum(self.wishes[name].fraction for name in names)
            said = " and ".join(f"{title(n)} ({self.wishes[n].fraction:g})" for n in names)
            self._refuse(
                f"{said} together have {load:g} of each slot of {where(slots)}",
                self._apart(names, {slot.node for slot in slots}),
            )

    def _apart(self, names: Sequence[RoleName], nodes: set[int]) -> str:
        """Suggest unused slots of these nodes for one role, or an equal part of them for each."""
        spare = sorted(set.intersection(*(set(self._usable(node, 1.0)) for node in nodes)))
        for name in names:
            slots = self.wishes[name].slots
            if isinstance(slots, list) and len(spare) >= len(slots):
                return f"{_key(name)}.slots={_list(spare[: len(slots)])}"
        part = math.floor(1e4 / len(names)) / 1e4
        return " ".join(f"{_key(name)}.fraction={part:g}" for name in names)

    def _share(
        self, name: RoleName, wish: RolePlacement, owned: tuple[Slot, ...]
    ) -> tuple[Slot, ...]:
        """Return the slots that a role shares with another: all of them, or those that it picks."""
        has: dict[int, list[int]] = {}
        for slot in owned:
            has.setdefault(slot.node, []).append(slot.index)
        nodes = [node for node in self._candidates(name, wish) if node in has]
        wanted = wish.nodes if isinstance(wish.nodes, list) else []
        least = wish.nodes if isinstance(wish.nodes, int) else 1
        if len(nodes) < least or not has.keys() >= set(wanted):
            return self._refuse_pick(name, wish, "nodes", wish.nodes)
        nodes = nodes[:least] if isinstance(wish.nodes, int) else nodes
        if wish.slots is None:
            return tuple(slot for slot in owned if slot.node in nodes)
        picks = {
            node: wish.slots if isinstance(wish.slots, list) else has[node][: wish.slots]
            for node in nodes
        }
        count = len(wish.slots) if isinstance(wish.slots, list) else wish.slots
        if any(len(set(picks[node]) & set(has[node])) < count for node in nodes):
            return self._refuse_pick(name, wish, "slots", wish.slots)
        return tuple(slot for node in nodes for slot in grid([node], picks[node]))

    def _refuse_pick(
        self, name: RoleName, wish: RolePlacement, field: str, picked: int | list[int] | None
    ) -> tuple[Slot, ...]:
        """Add the conflict that a role picks nodes or slots that the role it shares with lacks."""
        assert wish.shares is not None
        key, labels_matter = f"{_key(name)}.{field}", wish.labels and field == "nodes"
        said = _list(picked) if isinstance(picked, list) else "null" if picked is None else picked
        self._refuse(
            f"{key}={said} with shares={wish.shares}: {title(wish.shares)} has not got them all",
            f"{key}=null" + (f" {_key(name)}.labels=[]" if labels_matter else ""),
        )
        return ()


def _key(name: RoleName) -> str:
    return f"{PLACEMENT}.{name}"


def _list(items: Iterable[object]) -> str:
    """Format a list as it is typed on the command line."""
    return f"[{','.join(map(str, items))}]"
