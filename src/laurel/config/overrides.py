"""Changes from the command line: `a.b=c`, `+a.b=c`, `++a.b=c` and `~a.b`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from laurel.config.schema_info import (
    KeyInfo,
    Kinds,
    default_node,
    sections_of,
    sole_section,
    step_into,
    unknown_key,
)
from laurel.config.yaml_tree import (
    DEFAULT,
    MISSING,
    KeyPath,
    Section,
    YamlNode,
    dotted,
    find_node,
    overlay,
    read_text,
    with_key,
    without_key,
)
from laurel.errors import ConfigError

_FORM = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=]*)(?:(?P<equals>=)(?P<value>.*))?", re.DOTALL)


COLUMN_KEYS = ("data.prompt_key", "data.chosen_key", "data.rejected_key")
"""What names the columns of preferences, for all commands that read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One change, as the user typed it and in its parts."""

    text: str
    sign: str
    """Empty, `+`, `++` or `~`."""
    keys: tuple[str, ...]
    value: YamlNode | None
    """None where the key is deleted."""
    place: str
    """What messages say about where it was written."""


def apply_overrides(
    schema: type[Section], tree: YamlNode, overrides: Sequence[str | Override], problems: list[str]
) -> YamlNode:
    """The tree with the changes made in order; those that cannot be made are added to `problems`.

    A key that nobody wrote starts from the schema's own default, so that a change of one key
    leaves its siblings as they were.
    """
    for said in overrides:
        try:
            override = parse_override(said) if isinstance(said, str) else said
            override = replace(override, keys=spelled_here(schema, override.keys))
            tree = _Edit(schema, override).apply(tree, (schema,), ())
        except ConfigError as error:
            problems.append(str(error))
    return tree


def parse_override(text: str, *, place: str | None = None) -> Override:
    """The parts of an override. Raises ConfigError where it is none.

    Args:
        text: As on a command line.
        place: What messages call it; None: the override.
    """
    place = place or f"override '{text}'"
    form = _FORM.fullmatch(text)
    assert form is not None  # the pattern fits every text
    sign, key, value = form["sign"] or "", form["key"].strip(), form["value"]
    keys = tuple(key.split("."))
    if not form["equals"] and text.endswith((".yaml", ".yml", ".json")):
        raise ConfigError(
            f"{place}: a configuration file is given as --config {text}; overrides are "
            "written section.key=value"
        )
    if not all(keys) or any(part != part.strip() for part in keys):
        raise ConfigError(f"{place}: write it as section.key=value")
    if sign == "~" and form["equals"]:
        raise ConfigError(f"{place}: '~' deletes a key, it takes no value: ~{key}")
    if sign != "~" and not form["equals"]:
        raise ConfigError(f"{place}: a value is missing: {sign}{key}=value")
    node = None if sign == "~" else _parse_value(value, place)
    return Override(text=text, sign=sign, keys=keys, value=node, place=place)


def _parse_value(text: str, place: str) -> YamlNode:
    """A YAML scalar, `[list]` or `{mapping}`; anything else is text as it stands."""
    text = text.strip()
    as_text = YamlNode(value=text, place=place)
    if not text:
        return as_text
    try:
        node = read_text(text, place)
    except ConfigError as error:
        if text[0] in "[{'\"":
            raise ConfigError(f"{error}; put quotes around what is meant as text") from None
        return as_text
    if text[0] in "[{'\"":
        return node
    # `a: b` is a mapping to YAML, and `a #1` has a comment; on a command line both are text.
    is_whole = text == (node.value if node.text is None else node.text)
    return node if is_whole else as_text


def column_overrides(overrides: Sequence[str | Override]) -> dict[str, str]:
    """The columns that a command line or a program names, by their keys in the `data` section.

    Raises:
        ConfigError: Something that is no such key.
    """
    columns: dict[str, str] = {}
    for one in overrides:
        said = parse_override(one) if isinstance(one, str) else one
        key = ".".join(said.keys)
        if key not in COLUMN_KEYS or said.value is None:
            raise ConfigError(
                f"{said.place}: there is no configuration here, and only the columns of rows "
                f"can be named: {', '.join(f'{key}=COLUMN' for key in COLUMN_KEYS)}"
            )
        value = said.value.value if said.value.text is None else said.value.text
        columns[said.keys[-1]] = str(value)
    return columns


def overrides_of(settings: Mapping[str, Any]) -> list[Override]:
    """The changes that a program says as keys and values; messages name its keys as it did.

    Args:
        settings: Dotted keys with texts, paths, numbers, booleans, None, and lists and mappings of
            those. A key need not be there before; a sign in front of it is refused.

    Raises:
        ConfigError: A key or a value that has no such form.
    """
    return [_as_override(key, value) for key, value in settings.items()]


def _as_override(key: str, value: Any) -> Override:
    if not isinstance(key, str) or not re.match(r"[^+~=\s][^=]*$", key):
        raise ConfigError(f"setting {key!r}: write it as 'section.key', without a sign before it")
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_as_text)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"setting '{key}': {error}; it may be a text, a path, a finite number, True, False, "
            "None, or a list or mapping of those"
        ) from error
    return parse_override(f"++{key}={written}", place=f"setting '{key}'")


def _as_text(value: object) -> str:
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written in a configuration")


class _Edit:
    """Carries one override to its place; every block on the way is made anew."""

    def __init__(self, schema: type[Section], override: Override) -> None:
        self.schema = schema
        self.override = override

    def apply(self, block: YamlNode, kinds: Kinds, path: KeyPath) -> YamlNode:
        """The block at `path` with the change made in it or further down."""
        key = self._key_in(block, path)
        here = (*path, key)
        step, child = step_into(kinds, key), find_node(block, [key])
        if len(here) == len(self.override.keys):
            if self.override.value is None:
                return self._without(block, key, here)
            return self._with(block, key, self._final(child, step, kinds, here))
        if child is None or child.value is None or child.value is MISSING:
            start = default_node(step.field, DEFAULT) if child is None and step.field else None
            if start is None:
                self._may_add(child, step, kinds, here)
                start = YamlNode(value={}, place=self.override.place)
            child = start
        return self._with(block, key, self.apply(child, step.kinds, here))

    def _key_in(self, block: YamlNode, path: KeyPath) -> str | int:
        key = self.override.keys[len(path)]
        if block.reference:
            raise self._error(path, f"is '{block.value}'; set the key it names, or replace it")
        if isinstance(block.value, list):
            if not key.isdecimal() or int(key) >= len(block.value):
                raise self._error(path, f"is a list of {len(block.value)}; it has no '{key}'")
            return int(key)
        if not isinstance(block.value, dict):
            raise self._error(path, f"is {block.value!r}, it has no keys")
        return key

    def _final(
        self, child: YamlNode | None, step: KeyInfo, kinds: Kinds, here: KeyPath
    ) -> YamlNode:
        """The new value. A mapping is laid over what was written, as that of a file would be."""
        value = self.override.value
        assert value is not None
        written = child is not None and child.place != DEFAULT
        if self.override.sign == "+" and child is not None and written:
            raise self._error(here, f"is already set in {child.place}; to change it leave out '+'")
        self._may_add(child, step, kinds, here)
        if child is None and step.field is not None and sole_section(step.kinds):
            child = default_node(step.field, DEFAULT)
        if child is None or not (written or sole_section(step.kinds)):
            return value
        return overlay(child, value)

    def _may_add(self, child: YamlNode | None, step: KeyInfo, kinds: Kinds, here: KeyPath) -> None:
        """Refuse a key that neither the schema nor a file knows, unless the user said to add it."""
        if child is not None or step.standing in ("field", "foreign"):
            return
        if self.override.value is None:
            raise self._error(here, "is not set, so it cannot be deleted")
        sections = sections_of(kinds)
        if self.override.sign in ("+", "++"):
            return
        if sections and step.standing == "unknown":
            raise self._error(here, unknown_key(self.schema, sections[0], str(here[-1])))
        raise self._error(here, f"is not there to be changed; to add it: '+{self.override.text}'")

    def _without(self, block: YamlNode, key: str | int, here: KeyPath) -> YamlNode:
        if find_node(block, [key]) is None:
            raise self._error(here, "is not set, so it cannot be deleted")
        if isinstance(block.value, list):
            items = [item for index, item in enumerate(block.value) if index != key]
            return YamlNode(value=items, place=block.place)
        children = {name: child for name, child in block.value.items() if name != key}
        return YamlNode(value=children, place=self._place_of(block))

    def _with(self, block: YamlNode, key: str | int, child: YamlNode) -> YamlNode:
        if isinstance(block.value, list):
            items = [child if index == key else item for index, item in enumerate(block.value)]
            return YamlNode(value=items, place=self._place_of(block))
        return YamlNode(value={**block.value, key: child}, place=self._place_of(block))

    def _place_of(self, block: YamlNode) -> str:
        return self.override.place if block.place == DEFAULT else block.place

    def _error(self, path: KeyPath, message: str) -> ConfigError:
        return ConfigError(f"{self.override.place}: {dotted(path)}: {message}")


# --------------------------------------------------------------------------------------------------
# Keys that other systems spell in another way, taken to where they belong.


def at_their_place(schema: type[Section], tree: YamlNode, problems: list[str]) -> YamlNode:
    """A tree whose keys have the schema's names; both spellings of one key are a problem."""
    for said, meant in schema.other_names.items():
        found, there = find_node(tree, said.split(".")), find_node(tree, meant.split("."))
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
