"""Keys that other systems spell in another way, taken to where they belong."""

from __future__ import annotations

from collections.abc import Sequence

from laurel.config.section import Section
from laurel.config.tree import DEFAULT, Node, find


def at_their_place(schema: type[Section], tree: Node, problems: list[str]) -> Node:
    """A tree whose keys have the schema's names; both spellings of one key are a problem."""
    for said, meant in schema.other_names.items():
        found, there = find(tree, said.split(".")), find(tree, meant.split("."))
        if found is None:
            continue
        if there is not None:
            problems.append(
                f"{found.place}: {said}: is another name of {meant}, which is set in {there.place}"
            )
        tree = _without(tree, said.split("."))
        tree = _with(tree, meant.split("."), found)
    return tree


def spelled_here(schema: type[Section], keys: Sequence[str]) -> tuple[str, ...]:
    """The keys of an override in the schema's spelling."""
    return tuple(schema.other_names.get(".".join(keys), ".".join(keys)).split("."))


def _without(block: Node, path: Sequence[str]) -> Node:
    """The block without that key, and without what is then empty on the way to it."""
    key, *rest = path
    children = dict(block.value)
    if rest:
        children[key] = _without(children[key], rest)
    if not rest or not children[key].value:
        del children[key]
    return Node(value=children, place=block.place)


def _with(block: Node, path: Sequence[str], child: Node) -> Node:
    key, *rest = path
    children = dict(block.value) if isinstance(block.value, dict) else {}
    if rest:
        child = _with(children.get(key, Node(value={}, place=DEFAULT)), rest, child)
    return Node(value={**children, key: child}, place=block.place)
