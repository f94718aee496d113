"""What explicit placements get wrong, and the changes that mend it. Each change was tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from laurel.config.placement import RolePlacement
from laurel.distributed.changes import Change, as_typed, with_changes
from laurel.distributed.claims import Run
from laurel.distributed.roles import Misfit, RoleName, Slot, as_ranges, title, where

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
        "policy": (), "generation": ("policy",), "reward_model": ("policy", "generation")
    }  # fmt: skip
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
