"""Which slots each role gets where `cluster.placement` says so.

Roles that name their slots get those; roles that say how many are packed into what is then free,
the fullest places first; the others have what is left. In what is free the policy takes the first
slots and the others the last ones, as the rules of `division` do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from laurel.config.grpo_training import GRPORun
from laurel.config.placement import PlacementConfig, RolePlacement
from laurel.distributed import placement_misfits as told
from laurel.distributed.changes import Change
from laurel.distributed.claims import Run, claim_of, roles_of
from laurel.distributed.placement_misfits import Problem
from laurel.distributed.roles import Claim, Misfit, RoleName, Slot, as_ranges, grid, place, title

SLACK = 1e-6
"""Of fractions that are added up."""
Taken = dict[RoleName, tuple[Slot, ...]]


def claims_of_placement(config: Run, misfits: list[Misfit]) -> list[Claim]:
    """What each role is to have; what cannot be had goes to the misfits."""
    board = _play(config)
    misfits += told.mended(config, board.problems, _all_problems)
    return board.claims


def _all_problems(config: Run) -> list[Problem]:
    """Those of the placement, and the roles whose ranks cannot be arranged in it."""
    board = _play(config)
    misfits: list[Misfit] = []
    for claim in board.claims:
        if place(claim, misfits) is None:
            board.problems.append(Problem(kind=("arranged", claim.name), text=""))
    return board.problems


@dataclass(slots=True, kw_only=True)
class _Board:
    """The cluster while its slots are given out."""

    num_nodes: int
    total: int
    """Slots of a node."""
    free: list[list[float]]
    """Of each slot of each node."""
    problems: list[Problem] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)

    def usable(self, node: int, fraction: float) -> list[int]:
        """Slots of a node of which so much is free."""
        slots = enumerate(self.free[node])
        return [index for index, free in slots if free >= fraction - SLACK]


def _play(config: Run) -> _Board:
    """Give out the slots."""
    cluster = config.cluster
    nodes, total = cluster.num_nodes, cluster.gpus_per_node
    board = _Board(num_nodes=nodes, total=total, free=[[1.0] * total for _ in range(nodes)])
    labels = _labels(config, board)
    wishes = _wishes(config, board)
    owners = [name for name, wish in wishes.items() if wish.shares is None]
    taken: Taken = dict.fromkeys(wishes, ())
    for name in sorted(owners, key=lambda name: _openness(name, wishes[name])):
        candidates = _candidates(name, wishes[name], labels, board)
        if candidates:
            taken[name] = _choose(name, wishes[name], candidates, board)
            if not taken[name] and _is_open(wishes[name]):
                own = {owner: wishes[owner] for owner in owners}
                board.problems.append(_nothing_left(config, name, own, taken, board))
        for slot in taken[name]:
            board.free[slot.node][slot.index] -= wishes[name].fraction
    _find_overlaps({name: wishes[name] for name in owners}, taken, board)
    for name, wish in wishes.items():
        if wish.shares is not None:
            taken[name] = _share(name, wish, taken[wish.shares], labels, board)
    for name, wish in wishes.items():
        owner = wish.shares and (wishes[wish.shares].shares or wish.shares)
        if taken[name]:
            fraction = wishes[owner or name].fraction
            board.claims.append(
                claim_of(config, name, taken[name], shares_with=owner, fraction=fraction)
            )
    return board


def _openness(name: RoleName, wish: RolePlacement) -> tuple[int, int, int]:
    """Who leaves more open chooses later."""
    kinds = {list: 0, int: 1, type(None): 2}
    nodes = 0 if wish.labels else kinds[type(wish.nodes)]
    turn = ("reward_model", "generation", "policy").index(name)
    return kinds[type(wish.slots)], nodes, turn


# ------------------------------------------------------------------------------ what is asked for


def _wishes(config: Run, board: _Board) -> dict[RoleName, RolePlacement]:
    """The placement of each role of the run, also of those that are not named."""
    placement, roles = config.cluster.placement or PlacementConfig(), roles_of(config)
    said: dict[RoleName, RolePlacement | None] = {
        "policy": placement.policy,
        "generation": placement.generation,
        "reward_model": placement.reward_model,
    }
    board.problems += [
        Problem(
            kind=("no role", name),
            text=f"{told.key_of(name)}: this run has no {title(name)}; nothing is set aside",
            proposals=({told.key_of(name): None},),
            is_fatal=False,
        )
        for name, wish in said.items()
        if wish is not None and name not in roles
    ]
    if isinstance(config, GRPORun):
        _find_forgotten(config, [name for name in roles if said[name] is None], board)
    unsaid = {name: RolePlacement(shares=None if name == "policy" else "policy") for name in roles}
    return {name: said[name] or unsaid[name] for name in roles}


def _find_forgotten(config: GRPORun, unsaid: list[RoleName], board: _Board) -> None:
    """Roles that the placement does not name, and that have slots of their own elsewhere."""
    colocated, judge = config.policy.generation.colocated, config.env.reward_model.resources
    own: dict[RoleName, tuple[str, int | None, int | None, Change]] = {}
    if not colocated.enabled:
        key, resources = "policy.generation.colocated", colocated.resources
        asked = f"{key}.enabled=false"
        together: Change = {f"{key}.enabled": True}
        own["generation"] = (asked, resources.num_nodes, resources.gpus_per_node, together)
    key, sizes = "env.reward_model.resources", (judge.num_nodes, judge.gpus_per_node)
    if sizes != (None, None):
        together = {f"{key}.gpus_per_node": None, f"{key}.num_nodes": None}
        own["reward_model"] = (f"{key} is set", *sizes, together)
    for name in unsaid:
        if name in own:
            asked, nodes, slots, together = own[name]
            where = told.key_of(name)
            apart = {f"{where}.nodes": nodes or 1, f"{where}.slots": slots}
            board.problems.append(
                Problem(
                    kind=("forgotten", name),
                    text=f"{asked}, and {told.PLACEMENT} does not name {title(name)}, which "
                    "would share the policy's slots",
                    proposals=(apart, {f"{where}.shares": "policy"}, together),
                )
            )


def _labels(config: Run, board: _Board) -> dict[str, set[int]]:
    """The nodes of each label."""
    found = {}
    for label, nodes in config.cluster.labels.items():
        found[label] = {node for node in nodes if 0 <= node < board.num_nodes}
        if len(found[label]) < len(set(nodes)):
            board.problems.append(told.label_of_no_node(label, nodes, board.num_nodes))
    return found


def _candidates(
    name: RoleName, wish: RolePlacement, labels: Mapping[str, set[int]], board: _Board
) -> list[int]:
    """The nodes that a role may be on."""
    nodes = list(range(board.num_nodes))
    if isinstance(wish.nodes, list):
        nodes = [node for node in wish.nodes if node < board.num_nodes]
        if len(nodes) < len(wish.nodes):
            board.problems.append(told.no_such_nodes(name, wish.nodes, board.num_nodes))
    known = [label for label in wish.labels if label in labels]
    board.problems += [
        told.unknown_label(name, wish, label, sorted(labels))
        for label in wish.labels
        if label not in labels
    ]
    fitting = [node for node in nodes if all(node in labels[label] for label in known)]
    lacking = [node for node in nodes if node not in fitting]
    if nodes and (not fitting or (isinstance(wish.nodes, list) and lacking)):
        named = lacking if isinstance(wish.nodes, list) else []
        board.problems.append(told.without_labels(name, wish, named))
    return fitting


# -------------------------------------------------------------------------------- what is chosen


def _choose(
    name: RoleName, wish: RolePlacement, candidates: list[int], board: _Board
) -> tuple[Slot, ...]:
    """The slots of a role that has its own; empty where there are not enough."""
    if isinstance(wish.slots, list):
        return _named(name, wish, wish.slots, candidates, board)
    if not _is_open(wish):
        return _packed(name, wish, candidates, board)
    return tuple(
        slot for node in candidates for slot in grid([node], board.usable(node, wish.fraction))
    )


def _is_open(wish: RolePlacement) -> bool:
    """Whether the role has what is left."""
    return wish.slots is None and not isinstance(wish.nodes, int)


def _nothing_left(
    config: Run,
    name: RoleName,
    wishes: Mapping[RoleName, RolePlacement],
    taken: Taken,
    board: _Board,
) -> Problem:
    counts = {other: len(slots) for other, slots in taken.items() if slots}
    group = claim_of(config, name, ()).group_size
    return told.nothing_left(name, wishes, counts, board.num_nodes, board.total, group)


def _named(
    name: RoleName, wish: RolePlacement, indices: list[int], candidates: list[int], board: _Board
) -> tuple[Slot, ...]:
    """Particular slots of each node."""
    there = [index for index in indices if index < board.total]
    if len(there) < len(indices):
        board.problems.append(told.no_such_slots(name, indices, board.total))
    if not isinstance(wish.nodes, int):
        return grid(candidates, there)
    free = {node: set(board.usable(node, wish.fraction)) for node in candidates}
    fitting = [node for node in candidates if free[node].issuperset(there)]
    if len(fitting) < wish.nodes:
        asked = f"slots [{as_ranges(indices)}]"
        board.problems.append(told.too_few_nodes(name, wish, board.num_nodes, len(fitting), asked))
        return ()
    return grid(_fullest(name, wish.nodes, fitting, board), there)


def _packed(
    name: RoleName, wish: RolePlacement, candidates: list[int], board: _Board
) -> tuple[Slot, ...]:
    """So many slots of each node, or of so many nodes; whole nodes where slots are not said."""
    asked = wish.slots if isinstance(wish.slots, int) else board.total
    rooms = {node: len(board.usable(node, wish.fraction)) for node in candidates}
    nodes = candidates
    if isinstance(wish.nodes, int):
        fitting = [node for node in candidates if rooms[node] >= asked]
        if len(fitting) < wish.nodes:
            said = f"{asked} slots" if asked < board.total else f"all {asked} slots"
            board.problems.append(
                told.too_few_nodes(name, wish, board.num_nodes, len(fitting), said)
            )
            return ()
        nodes = _fullest(name, wish.nodes, fitting, board)
    elif min(rooms.values()) < asked:
        board.problems.append(told.too_few_slots(name, wish, board.total, rooms, asked))
        return ()
    return tuple(
        slot
        for node in nodes
        for slot in grid([node], _fullest_slots(name, asked, node, wish.fraction, board))
    )


def _fullest(name: RoleName, number: int, nodes: list[int], board: _Board) -> list[int]:
    """The nodes that are least free; of equals the policy has the first, the others the last."""
    way = 1 if name == "policy" else -1
    ordered = sorted(nodes, key=lambda node: (sum(board.free[node]), way * node))
    return sorted(ordered[:number])


def _fullest_slots(
    name: RoleName, number: int, node: int, fraction: float, board: _Board
) -> list[int]:
    """The same of the slots of a node."""
    way, free = (1 if name == "policy" else -1), board.free[node]
    usable = board.usable(node, fraction)
    return sorted(sorted(usable, key=lambda index: (free[index], way * index))[:number])


def _find_overlaps(wishes: Mapping[RoleName, RolePlacement], taken: Taken, board: _Board) -> None:
    """Slots of which the roles together have more than there is."""
    holders: dict[Slot, list[RoleName]] = {}
    for name in wishes:
        for slot in taken[name]:
            if board.free[slot.node][slot.index] < -SLACK:
                holders.setdefault(slot, []).append(name)
    groups: dict[tuple[RoleName, ...], list[Slot]] = {}
    for slot in sorted(holders):
        groups.setdefault(tuple(holders[slot]), []).append(slot)
    for names, slots in groups.items():
        free = {slot.node: board.usable(slot.node, 1.0) for slot in slots}
        board.problems.append(told.overlap(slots, {name: wishes[name] for name in names}, free))


def _share(
    name: RoleName,
    wish: RolePlacement,
    owned: tuple[Slot, ...],
    labels: Mapping[str, set[int]],
    board: _Board,
) -> tuple[Slot, ...]:
    """The slots of another role that a role takes turns with, or those of them that it picks."""
    if not owned:
        return ()
    assert wish.shares is not None
    has: dict[int, list[int]] = {}
    for slot in owned:
        has.setdefault(slot.node, []).append(slot.index)
    nodes = [node for node in _candidates(name, wish, labels, board) if node in has]
    wanted = wish.nodes if isinstance(wish.nodes, list) else []
    least = wish.nodes if isinstance(wish.nodes, int) else 1
    if len(nodes) < least or not has.keys() >= set(wanted):
        board.problems.append(told.not_among(name, wish, wish.shares, "nodes"))
        return ()
    nodes = nodes[:least] if isinstance(wish.nodes, int) else nodes
    if wish.slots is None:
        return tuple(slot for slot in owned if slot.node in nodes)
    if isinstance(wish.slots, list):
        fits = all(set(wish.slots) <= set(has[node]) for node in nodes)
    else:
        fits = all(wish.slots <= len(has[node]) for node in nodes)
    if not fits:
        board.problems.append(told.not_among(name, wish, wish.shares, "slots"))
        return ()
    if isinstance(wish.slots, list):
        return grid(nodes, wish.slots)
    return tuple(slot for node in nodes for slot in grid([node], has[node][: wish.slots]))
