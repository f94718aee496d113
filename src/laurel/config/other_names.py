"""Keys that other systems spell in another way, taken to where they belong."""

from __future__ import annotations

from collections.abc import Sequence

from laurel.config.section import Section
from laurel.config.tree import Node, find, with_key, without_key


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
        tree = without_key(tree, said.split("."))
        tree = with_key(tree, meant.split("."), found)
    return tree


def spelled_here(schema: type[Section], keys: Sequence[str]) -> tuple[str, ...]:
    """The keys of an override in the schema's spelling."""
    return tuple(schema.other_names.get(".".join(keys), ".".join(keys)).split("."))
