"""Parses and applies command-line overrides: `a.b=c`, `+a.b=c`, `++a.b=c` and `~a.b`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from laurel.config.schema_info import (
    Kinds,
    changes_default,
    default_node,
    is_mapping,
    kind_that_fits,
    names_in,
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
    is_named_as_data,
    overlay,
    read_text,
    with_key,
)
from laurel.errors import ConfigError

_FORM = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=]*)(?:(?P<equals>=)(?P<value>.*))?", re.DOTALL)


COLUMN_KEYS = ("data.prompt_key", "data.chosen_key", "data.rejected_key", "data.system_key")
"""The keys that name the columns of preferences, which all commands that read such rows accept."""
COLUMNS_IN_WORDS = ", ".join(f"{key}=COLUMN" for key in COLUMN_KEYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A parsed override: one change of one configuration key."""

    text: str
    sign: str
    """The sign: `+` adds a key, `++` adds or changes it, `~` deletes it, none changes it."""
    keys: tuple[str, ...]
    value: YamlNode | None
    """The key's new value; None deletes the key."""
    place: str
    """The name of the override in error messages."""


def apply_overrides(
    schema: type[Section], tree: YamlNode, overrides: Sequence[str | Override], problems: list[str]
) -> YamlNode:
    """Apply overrides to a tree in order, and return the changed tree.

    Overrides that cannot be applied are added to `problems`. A section that the tree lacks starts
    from the schema's defaults, so that a change of one key leaves its siblings as they were.
    """
    for said in overrides:
        try:
            override = parse_override(said) if isinstance(said, str) else said
            key = ".".join(override.keys)
            keys = tuple(schema.other_names.get(key, key).split("."))
            tree, keys = _at_short_keys(schema, tree, override, keys)
            tree = _changed(schema, tree, replace(override, keys=keys))
        except ConfigError as error:
            problems.append(str(error))
    return tree


def _at_short_keys(
    schema: type[Section], tree: YamlNode, override: Override, keys: tuple[str, ...]
) -> tuple[YamlNode, tuple[str, ...]]:
    """Return where a short key is set in the tree, and the tree without what would outdo it."""
    *above, last = keys
    block = find_node(tree, above)
    if len(above) != 1 or override.value is None or block is None:
        return tree, keys
    section = sole_section(step_into((schema,), above[0]).kinds)
    if section is None or last not in section.short_keys() or not isinstance(block.value, dict):
        return tree, keys
    block, below = section.place_of_short(block, last)
    return with_key(tree, above, block), (*above, *below)


def parse_override(text: str, *, place: str | None = None) -> Override:
    """Parse the text of an override.

    Args:
        place: Its name in messages; None quotes the text.

    Raises:
        ConfigError: The text is no override.
    """
    place = place or f"override '{text}'"
    form = _FORM.fullmatch(text)
    assert form is not None  # the pattern fits every text
    sign, key, value = form["sign"] or "", form["key"].strip(), form["value"]
    keys = tuple(re.sub(r"\[(\d+)\]", r".\1", key).split("."))
    if not form["equals"] and text.endswith((".yaml", ".yml", ".json")):
        raise ConfigError(
            f"{place}: a configuration file is given as --config {text}; overrides are "
            "written section.key=value"
        )
    if not form["equals"] and is_named_as_data(text):
        raise ConfigError(
            f"{place}: a file of data to train on is given as data.train_data_path={text}; "
            "overrides are written section.key=value"
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
    text = text.strip()
    as_text = YamlNode(text, place)
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


def column_overrides(
    overrides: Sequence[str | Override], *, or_bad_rows: bool = False, remedy: str = ""
) -> dict[str, str]:
    """Return the column names that overrides set, by their keys in the `data` section.

    With `or_bad_rows`, `data.on_bad_row` may be set as well. `remedy` is the caller's last sentence
    about a word that sets nothing; `{word}` in it stands for the word.

    Raises:
        ConfigError: An override sets another key.
    """
    columns: dict[str, str] = {}
    more = "; or set data.on_bad_row=skip" if or_bad_rows else ""
    for one in overrides:
        # What looks like a key without a value is one; a file may be called data.jsonl.
        if isinstance(one, str) and not re.match(r"[~+-]|.*=|data\.\w+_\w+$", one, re.DOTALL):
            raise ConfigError(
                f"'{one}' is neither an option nor a column ({COLUMNS_IN_WORDS}{more}). "
                + remedy.format(word=one)
            )
        said = parse_override(one) if isinstance(one, str) else one
        key = ".".join(said.keys)
        value = None if said.value is None else said.value.text or said.value.value
        is_bad_rows = or_bad_rows and key == "data.on_bad_row" and value in ("error", "skip")
        if (key not in COLUMN_KEYS and not is_bad_rows) or said.value is None:
            raise ConfigError(
                f"{said.place}: there is no configuration here, and only the columns of rows "
                f"can be named: {COLUMNS_IN_WORDS}{more}"
            )
        columns[said.keys[-1]] = str(value)
    return columns


def overrides_of(settings: Mapping[str, Any]) -> list[Override]:
    """Convert keys and values that a Python program sets to overrides; messages name these keys.

    Args:
        settings: Dotted keys with texts, paths, numbers, booleans, None, and lists and mappings of
            those. A key need not exist yet; a sign before it is refused.

    Raises:
        ConfigError: A key or a value has another form.
    """

    def as_text(value: object) -> str:
        if isinstance(value, PurePath):
            return str(value)
        raise TypeError(f"{type(value).__name__} cannot be written in a configuration")

    found: list[Override] = []
    for key, value in settings.items():
        if not isinstance(key, str) or not re.match(r"[^+~=\s][^=]*$", key):
            raise ConfigError(
                f"setting {key!r}: write it as 'section.key', without a sign before it"
            )
        try:
            written = json.dumps(value, ensure_ascii=False, allow_nan=False, default=as_text)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"setting '{key}': {error}; it may be a text, a path, a finite number, True, "
                "False, None, or a list or mapping of those"
            ) from error
        found.append(parse_override(f"++{key}={written}", place=f"setting '{key}'"))
    return found


def _changed(schema: type[Section], tree: YamlNode, override: Override) -> YamlNode:
    """Apply one override; blocks on the way to its key are copied, so the given tree stays."""
    path: KeyPath = ()

    def problem(message: str) -> ConfigError:
        return ConfigError(f"{override.place}: {dotted(path)}: {message}")

    def copied(block: YamlNode) -> YamlNode:
        place = override.place if block.place == DEFAULT else block.place
        return replace(block, value=copy(block.value), place=place)

    top = block = copied(tree)
    kinds: Kinds = (schema,)
    for name in override.keys:
        key: Any = name  # of a mapping; of a list it becomes a position
        if block.reference:
            raise problem(f"is '{block.value}'; set the key it names, or replace it")
        if isinstance(block.value, list):
            if not name.isdecimal() or int(name) >= len(block.value):
                first = f"; its first is {dotted((*path, 0))}" if block.value else ""
                raise problem(f"is a list of {len(block.value)}; it has no '{name}'{first}")
            key = int(name)
        elif not isinstance(block.value, dict):
            raise problem(f"is {block.value!r}, it has no keys")
        elif block.value and is_mapping(named := kind_that_fits(kinds, block)):
            kinds = (named,)  # what else may be written there has other keys
        path = (*path, key)
        is_last = len(path) == len(override.keys)
        step, child = step_into(kinds, key), find_node(block, [key])
        is_known = child is not None or step.standing in ("field", "foreign")
        if override.value is None:
            if child is None and (is_last or not is_known):
                raise problem("is not set, so it cannot be deleted")
            if is_last:
                del block.value[key]
                break
        elif not is_known and not override.sign:
            sections = sections_of(kinds) if step.standing == "unknown" else []
            if sections:
                raise problem(unknown_key(schema, sections[0], name))
            if known := [one for kind in kinds for one in names_in(kind)]:
                raise problem(f"unknown key; known here: {', '.join(known)}")
            raise problem(f"is not there to be changed; to add it: '+{override.text}'")
        place = DEFAULT if child is None else child.place
        if is_last and place != DEFAULT and override.sign == "+":
            raise problem(f"is already set in {place}; to change it leave out '+'")
        # A section that is not written begins with what the schema sets there explicitly. A mapping
        # is laid over it and over what files set, as that of another file would be.
        default = None if step.field is None else step.field.default
        is_section = sole_section(step.kinds) is not None or (
            is_last and override.value is not None and changes_default(default, override.value)
        )
        if child is None and (is_section or not is_last):
            child = default_node(step.field)
        if not is_last:
            is_empty = child is None or child.value is None or child.value is MISSING
            below = copied(YamlNode({}, DEFAULT) if child is None or is_empty else child)
        else:
            assert override.value is not None
            is_laid_over = child is not None and (place != DEFAULT or is_section)
            below = overlay(child, override.value) if child and is_laid_over else override.value
        block.value[key] = below
        block, kinds = below, step.kinds
    return top


def at_their_place(schema: type[Section], tree: YamlNode, problems: list[str]) -> YamlNode:
    """Rename keys with another system's spelling to the schema's names.

    A tree with both spellings of one key is reported in `problems`.
    """
    for said, meant in schema.other_names.items():
        keys = said.split(".")
        found, there = find_node(tree, keys), find_node(tree, meant.split("."))
        if found is None:
            continue
        if there is not None:
            problems.append(
                f"{found.place}: {said}: is another name of {meant}, which is set in {there.place}"
            )
        rest: dict[str, YamlNode] = {}
        while keys and not rest:  # blocks that have nothing else go, too
            *keys, last = keys
            block = find_node(tree, keys)
            assert block is not None
            rest = {key: child for key, child in block.value.items() if key != last}
            tree = with_key(tree, keys, YamlNode(rest, block.place))
        tree = with_key(tree, meant.split("."), found)
    return tree
