"""Which slots each role gets where `cluster.placement` says so.

Roles that name their slots get those; roles that say how many are packed into what is then free,
the fullest places first; the others have what is left. In what is free the policy takes the first
slots and the others the last ones, as the rules of `division` do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from laurel.config.grpo import GRPORun
from laurel.config.policy import PlacementConfig, RolePlacement
from laurel.planning.roles import (
    Change,
    Claim,
    Misfit,
    RoleName,
    Run,
    Slot,
    as_ranges,
    as_typed,
    claim_of,
    grid,
    place,
    roles_of,
    title,
    where,
    with_changes,
)

# --------------------------------------------------------------------------------------------------
# What explicit placements get wrong, and the changes that mend it. Each change was tried.

PLACEMENT = "cluster.placement"
RULES = f"{PLACEMENT}=null, so that the rules place the roles"
Kind = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A misfit before its mends were tried."""

    kind: Kind
    """What it is about, without the numbers."""
    text: str
    proposals: tuple[Change, ...] = ()
    """Changes that may mend it, the likeliest first."""
    advice: tuple[str, ...] = ()
    """Mends that cannot be tried."""
    is_fatal: bool = True


def mended(
    config: Run, problems: Sequence[Problem], problems_of: Callable[[Run], Sequence[Problem]]
) -> Iterator[Misfit]:
    """The problems with those of their proposals that mend them and break nothing else.

    Args:
        config: The run.
        problems: Of its placement.
        problems_of: Finds those of a changed run.
    """
    before = {problem.kind for problem in problems_of(config) if problem.is_fatal}
    for problem in problems:
        accepted: list[Change] = []
        for change in problem.proposals:
            # More of the same, or the same key with another value, helps nobody.
            if any(
                mend.items() <= change.items() or mend.keys() == change.keys() for mend in accepted
            ):
                continue
            found = problems_of(with_changes(config, change))
            after = {other.kind for other in found if other.is_fatal}
            if problem.kind not in {p.kind for p in found} and after <= before:
                accepted.append(change)
        mends = (*map(as_typed, accepted), *problem.advice) or (RULES,)
        yield Misfit(problem=problem.text, mends=mends, is_fatal=problem.is_fatal)


def key_of(name: RoleName) -> str:
    """Where a role is placed."""
    return f"{PLACEMENT}.{name}"


# -------------------------------------------------------------------------------- nodes and labels


def no_such_nodes(name: RoleName, nodes: Sequence[int], num_nodes: int) -> Problem:
    """Some of the nodes are not there."""
    key, inside = f"{key_of(name)}.nodes", [node for node in nodes if node < num_nodes]
    outside = [node for node in nodes if node >= num_nodes]
    return Problem(
        kind=("nodes", name),
        text=f"{as_typed({key: nodes})}: there is no node {as_ranges(outside)}; "
        f"cluster.num_nodes={num_nodes} are counted from 0 to {num_nodes - 1}",
        proposals=(
            *({key: found} for found in [inside] if found),
            {"cluster.num_nodes": max(nodes) + 1},
            {key: None},
        ),
    )


def label_of_no_node(label: str, nodes: Iterable[int], num_nodes: int) -> Problem:
    """A label is said of nodes that are not there."""
    outside = sorted(node for node in nodes if not 0 <= node < num_nodes)
    return Problem(
        kind=("labelled", label),
        text=f"cluster.labels gives {label} to node {as_ranges(outside)}; "
        f"cluster.num_nodes={num_nodes} are counted from 0 to {num_nodes - 1}",
        proposals=({"cluster.num_nodes": outside[-1] + 1},) if outside[-1] >= num_nodes else (),
        advice=(f"take node {as_ranges(outside)} out of the list of {label}",),
    )


def unknown_label(name: RoleName, wish: RolePlacement, label: str, known: list[str]) -> Problem:
    """No node has the label."""
    key = f"{key_of(name)}.labels"
    rest = [other for other in wish.labels if other != label]
    near = get_close_matches(label, known, n=1, cutoff=0.5) or known[:1]
    return Problem(
        kind=("label", name, label),
        text=f"{key}: no node has the label {label}; "
        + (f"cluster.labels knows {', '.join(known)}" if known else "cluster.labels is empty"),
        proposals=(*({key: [*rest, other]} for other in near), {key: rest}),
        advice=(f"cluster.labels={{{label}: [0]}} with the nodes that have it",),
    )


def without_labels(name: RoleName, wish: RolePlacement, nodes: Sequence[int]) -> Problem:
    """Nodes that are named have not all labels that are asked for; or no node has them all."""
    key = key_of(name)
    named = f"node {as_ranges(nodes)}" if wish.nodes is not None and nodes else "no node"
    verb = "lacks one" if nodes else "has all"
    left = [n for n in wish.nodes if n not in nodes] if isinstance(wish.nodes, list) else []
    return Problem(
        kind=("labels", name),
        text=f"{as_typed({f'{key}.labels': wish.labels})}: {named} {verb} of them",
        proposals=(
            *({f"{key}.nodes": nodes} for nodes in [left] if nodes),
            {f"{key}.nodes": None},
            {f"{key}.labels": []},
        ),
    )


# ------------------------------------------------------------------------------------------- slots


def no_such_slots(name: RoleName, slots: Sequence[int], total: int) -> Problem:
    """Some of the slots are not there."""
    key, inside = f"{key_of(name)}.slots", [index for index in slots if index < total]
    outside = [index for index in slots if index >= total]
    return Problem(
        kind=("slots", name),
        text=f"{as_typed({key: slots})}: a node has no slot {as_ranges(outside)}; "
        f"cluster.gpus_per_node={total} are counted from 0 to {total - 1}",
        proposals=(
            *({key: found} for found in [inside] if found),
            {"cluster.gpus_per_node": max(slots) + 1},
            {key: None},
        ),
    )


def too_few_slots(
    name: RoleName, wish: RolePlacement, total: int, rooms: Mapping[int, int], num_slots: int
) -> Problem:
    """Nodes that have fewer free slots than every node is asked for.

    Args:
        name: Of the role.
        wish: As it was written.
        total: Slots of a node.
        rooms: Free slots of each node that was asked.
        num_slots: Asked of each of them.
    """
    key, least = key_of(name), min(rooms.values())
    short = [node for node, room in rooms.items() if room < num_slots]
    enough = [node for node in rooms if node not in short]
    have = "has" if len(short) == 1 else "have"
    return Problem(
        kind=("room", name),
        text=f"{key}.slots={num_slots} of each node: node {as_ranges(short)} {have} "
        f"{least if len(short) == 1 else f'{least} or more, but fewer,'} that are free",
        proposals=(
            *({f"{key}.slots": number} for number in range(least, 0, -1)),
            *({f"{key}.nodes": nodes} for nodes in [enough] if enough),
            {"cluster.gpus_per_node": total + num_slots - least},
            *turns(name, wish),
        ),
    )


def too_few_nodes(
    name: RoleName, wish: RolePlacement, num_nodes: int, found: int, asked: str
) -> Problem:
    """Fewer nodes have room than are asked for."""
    key, number = key_of(name), wish.nodes
    assert isinstance(number, int)
    fewer: Iterator[dict[str, Any]] = ({f"{key}.nodes": n} for n in range(found, 0, -1))
    return Problem(
        kind=("room", name),
        text=f"{key}.nodes={number}: {found or 'none'} of the nodes "
        f"{'has' if found < 2 else 'have'} {asked} free",
        proposals=(
            *fewer,
            {"cluster.num_nodes": num_nodes + number - found},
            *turns(name, wish),
        ),
    )


def nothing_left(
    name: RoleName,
    wishes: Mapping[RoleName, RolePlacement],
    taken: Mapping[RoleName, int],
    num_nodes: int,
    total: int,
    group: int,
) -> Problem:
    """A role that was to have what the others leave, and they leave nothing.

    Args:
        name: Of the role.
        wishes: Of all roles that have slots of their own.
        taken: Slots of those that have chosen.
        num_nodes: Of the cluster.
        total: Slots of a node.
        group: Slots that the role needs at least.
    """
    others = [other for other in wishes if other != name]
    held = ", ".join(f"{title(other)} {count}" for other, count in taken.items())
    shared = [{f"{key_of(other)}.shares": name} for other in others if name == "policy"]
    open_too = {key: value for change in shared for key, value in change.items()}
    left = round(1 - wishes[name].fraction, 4)
    parts = [{f"{key_of(other)}.fraction": left} for other in others if left > 0]
    most = round(1 - max((wishes[other].fraction for other in taken), default=1), 4)
    return Problem(
        kind=("left", name),
        text=f"no slot is left for {title(name)}: of {num_nodes} x {total} slots are taken: {held}",
        proposals=(
            {"cluster.num_nodes": num_nodes + 1},
            {"cluster.gpus_per_node": total + group},
            *turns(name, wishes[name]),
            *shared,
            open_too,
            *({f"{key_of(name)}.fraction": part} for part in [most] if part > 0),
            *parts,
        ),
    )


def overlap(
    slots: Sequence[Slot], wishes: Mapping[RoleName, RolePlacement], free: Mapping[int, list[int]]
) -> Problem:
    """Slots that several roles have more of than there is.

    Args:
        slots: They.
        wishes: Of each role that has them.
        free: Slots of each node that nobody has.
    """
    names, load = list(wishes), sum(wish.fraction for wish in wishes.values())
    said = " and ".join(f"{title(name)} ({wish.fraction:g})" for name, wish in wishes.items())
    proposals: list[Change] = []
    for name, wish in wishes.items():
        nodes = {slot.node for slot in slots}
        spare = sorted(set.intersection(*(set(free[node]) for node in nodes)))
        if isinstance(wish.slots, list) and len(spare) >= len(wish.slots):
            proposals.append({f"{key_of(name)}.slots": spare[: len(wish.slots)]})
    together: dict[str, Any] = {}
    for name in names[1:]:
        proposals += [c for c in turns(name, wishes[name]) if names[0] in c.values()]
        together |= {f"{key_of(name)}.shares": names[0], f"{key_of(name)}.fraction": 1.0}
    proposals.append(together)
    for name, wish in wishes.items():
        if (left := round(1 - load + wish.fraction, 4)) > 0:
            proposals.append({f"{key_of(name)}.fraction": left})
    part = math.floor(1e4 / len(names)) / 1e4
    proposals.append({f"{key_of(name)}.fraction": part for name in names})
    return Problem(
        kind=("overlap", *names),
        text=f"{said} together have {load:g} of each slot of {where(slots)}",
        proposals=tuple(proposals),
    )


def turns(name: RoleName, wish: RolePlacement) -> Iterator[Change]:
    """Share the slots of another role, instead of having some."""
    key = key_of(name)
    owners: dict[RoleName, tuple[RoleName, ...]] = {
        "policy": (),
        "generation": ("policy",),
        "reward_model": ("policy", "generation"),
    }
    whole = {f"{key}.fraction": 1.0} if wish.fraction < 1 else {}
    said = {"nodes": wish.nodes, "slots": wish.slots}
    open_again: dict[str, Any] = {f"{key}.{name}": None for name, value in said.items() if value}
    open_again |= {f"{key}.labels": []} if wish.labels else {}
    for owner in owners[name]:
        yield {f"{key}.shares": owner, **whole}
        yield {f"{key}.shares": owner, **whole, **open_again}


# ------------------------------------------------------------------------------------------ shares


def not_among(name: RoleName, wish: RolePlacement, owner: RoleName, field: str) -> Problem:
    """A role picks nodes or slots of another one that has not got them."""
    key = f"{key_of(name)}.{field}"
    return Problem(
        kind=("shares", name, field),
        text=f"{as_typed({key: getattr(wish, field)})} with shares={owner}: {title(owner)} has not "
        "got them all",
        proposals=({key: None}, {f"{key_of(name)}.shares": None}),
    )


SLACK = 1e-6
"""Of fractions that are added up."""
Taken = dict[RoleName, tuple[Slot, ...]]


def claims_of_placement(config: Run, misfits: list[Misfit]) -> list[Claim]:
    """What each role is to have; what cannot be had goes to the misfits."""
    board = _play(config)
    misfits += mended(config, board.problems, _all_problems)
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
            text=f"{key_of(name)}: this run has no {title(name)}; nothing is set aside",
            proposals=({key_of(name): None},),
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
            where = key_of(name)
            apart = {f"{where}.nodes": nodes or 1, f"{where}.slots": slots}
            board.problems.append(
                Problem(
                    kind=("forgotten", name),
                    text=f"{asked}, and {PLACEMENT} does not name {title(name)}, which "
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
            board.problems.append(label_of_no_node(label, nodes, board.num_nodes))
    return found


def _candidates(
    name: RoleName, wish: RolePlacement, labels: Mapping[str, set[int]], board: _Board
) -> list[int]:
    """The nodes that a role may be on."""
    nodes = list(range(board.num_nodes))
    if isinstance(wish.nodes, list):
        nodes = [node for node in wish.nodes if node < board.num_nodes]
        if len(nodes) < len(wish.nodes):
            board.problems.append(no_such_nodes(name, wish.nodes, board.num_nodes))
    known = [label for label in wish.labels if label in labels]
    board.problems += [
        unknown_label(name, wish, label, sorted(labels))
        for label in wish.labels
        if label not in labels
    ]
    fitting = [node for node in nodes if all(node in labels[label] for label in known)]
    lacking = [node for node in nodes if node not in fitting]
    if nodes and (not fitting or (isinstance(wish.nodes, list) and lacking)):
        named = lacking if isinstance(wish.nodes, list) else []
        board.problems.append(without_labels(name, wish, named))
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
    return nothing_left(name, wishes, counts, board.num_nodes, board.total, group)


def _named(
    name: RoleName, wish: RolePlacement, indices: list[int], candidates: list[int], board: _Board
) -> tuple[Slot, ...]:
    """Particular slots of each node."""
    there = [index for index in indices if index < board.total]
    if len(there) < len(indices):
        board.problems.append(no_such_slots(name, indices, board.total))
    if not isinstance(wish.nodes, int):
        return grid(candidates, there)
    free = {node: set(board.usable(node, wish.fraction)) for node in candidates}
    fitting = [node for node in candidates if free[node].issuperset(there)]
    if len(fitting) < wish.nodes:
        asked = f"slots [{as_ranges(indices)}]"
        board.problems.append(too_few_nodes(name, wish, board.num_nodes, len(fitting), asked))
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
            board.problems.append(too_few_nodes(name, wish, board.num_nodes, len(fitting), said))
            return ()
        nodes = _fullest(name, wish.nodes, fitting, board)
    elif min(rooms.values()) < asked:
        board.problems.append(too_few_slots(name, wish, board.total, rooms, asked))
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
        board.problems.append(overlap(slots, {name: wishes[name] for name in names}, free))


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
        board.problems.append(not_among(name, wish, wish.shares, "nodes"))
        return ()
    nodes = nodes[:least] if isinstance(wish.nodes, int) else nodes
    if wish.slots is None:
        return tuple(slot for slot in owned if slot.node in nodes)
    if isinstance(wish.slots, list):
        fits = all(set(wish.slots) <= set(has[node]) for node in nodes)
    else:
        fits = all(wish.slots <= len(has[node]) for node in nodes)
    if not fits:
        board.problems.append(not_among(name, wish, wish.shares, "slots"))
        return ()
    if isinstance(wish.slots, list):
        return grid(nodes, wish.slots)
    return tuple(slot for node in nodes for slot in grid([node], has[node][: wish.slots]))
