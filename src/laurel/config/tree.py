"""A configuration before it is checked: nested values that know where each was written."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

KeyPath = tuple[str | int, ...]
"""The way to a value from the top: keys of mappings, positions in lists."""

DEFAULT = "the schema's defaults"
"""The place of a value that nobody wrote."""


class _Marker:
    def __repr__(self) -> str:
        return "???"


MISSING = _Marker()
"""The value of a key whose file says `???`: to be given in another file or by an override."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """One value of a configuration and where it was written.

    `value` is `dict[str, Node]`, `list[Node]`, or a plain scalar.
    """

    value: Any
    place: str
    """`file.yaml:12`, or the override that set it."""
    text: str | None = None
    """How a scalar that is not text was spelled, for keys that want text (`revision: 12e3`)."""
    literal: bool = False
    """Holds no interpolation, whatever it looks like."""

    @property
    def reference(self) -> bool:
        """Whether the value is text with `${}` in it that has to be looked up."""
        return isinstance(self.value, str) and not self.literal and "${" in self.value


def graft(value: Any, place: str) -> Node:
    """Plain values as nodes that all have one place and are taken literally."""
    if isinstance(value, dict):
        children = {str(key): graft(child, place) for key, child in value.items()}
        return Node(value=children, place=place)
    if isinstance(value, list | tuple):
        return Node(value=[graft(child, place) for child in value], place=place)
    return Node(value=value, place=place, literal=True)


def plain(node: Node) -> Any:
    """The values without their places."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def overlay(parent: Node, child: Node) -> Node:
    """`child` laid over `parent`: mappings are merged key by key, all else is replaced."""
    if not isinstance(parent.value, dict) or not isinstance(child.value, dict):
        return child
    merged = dict(parent.value)
    for key, value in child.value.items():
        merged[key] = overlay(merged[key], value) if key in merged else value
    return Node(value=merged, place=child.place)


def find(node: Node, path: Iterable[str | int]) -> Node | None:
    """The node at `path`, or None where there is none."""
    for key in path:
        in_mapping = isinstance(node.value, dict) and key in node.value
        in_list = isinstance(node.value, list) and isinstance(key, int) and key < len(node.value)
        if not in_mapping and not in_list:
            return None
        node = node.value[key]
    return node


def with_key(block: Node, path: Sequence[str], child: Node) -> Node:
    """A block with `child` at `path`; what is in the way there gives way."""
    key, *rest = path
    children = dict(block.value) if isinstance(block.value, dict) else {}
    if rest:
        child = with_key(children.get(key, Node(value={}, place=DEFAULT)), rest, child)
    return Node(value={**children, key: child}, place=block.place)


def without_key(block: Node, path: Sequence[str]) -> Node:
    """A block without the key at `path`, and without what is then empty on the way to it."""
    key, *rest = path
    children = dict(block.value)
    if rest:
        children[key] = without_key(children[key], rest)
    if not rest or not children[key].value:
        del children[key]
    return Node(value=children, place=block.place)


def dotted(path: KeyPath) -> str:
    """`data.train[0].split`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def parts_of(key: str) -> list[str | int]:
    """The way that `dotted` wrote: `data.train[0].split` is data, train, 0, split."""
    found = re.findall(r"\[(\d+)\]|([^.\[\]]+)", key)
    return [int(index) if index else name for index, name in found]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, if one is like it at all."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)
