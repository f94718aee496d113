"""Answers questions about a schema's keys: their types, neighbours, defaults and descriptions."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from laurel.config.other_systems import foreign_keys
from laurel.config.plugged import NO_SETTINGS, NameOf, field_of, known_keys
from laurel.config.yaml_tree import (
    BY_NAME,
    DEFAULT,
    IN_LIST,
    Removed,
    Section,
    YamlNode,
    dotted,
    graft,
    nearest,
    overlay,
    plain_values,
)
from laurel.errors import ConfigError

Kinds = tuple[Any, ...]
"""The alternatives of a type: `int | list[str] | None` is `(int, list[str], NoneType)`."""


def kinds_of(annotation: Any) -> Kinds:
    """Return the alternatives of a type annotation, with nested unions flattened."""
    origin = get_origin(annotation)
    if origin is Annotated:
        kind, *marks = get_args(annotation)
        return _names_of(marks) or kinds_of(kind)
    if origin in (Union, types.UnionType):
        return tuple(kind for part in get_args(annotation) for kind in kinds_of(part))
    return (annotation,)


def kinds_of_field(field: FieldInfo) -> Kinds:
    """Return what a key's value may be written as; the names of plug-ins count as its words."""
    kinds = _names_of(field.metadata) or kinds_of(field.annotation)
    if IN_LIST not in field.metadata and BY_NAME not in field.metadata:
        return kinds
    inside = tuple(sections_of([one for kind in kinds for one in item_kinds(kind) or ()]))
    listed: Any = list[Union[inside]]  # type: ignore[valid-type]  # noqa: UP007
    return (*inside, *((listed,) if BY_NAME in field.metadata else ()), *kinds)


def _names_of(marks: Sequence[Any]) -> Kinds:
    named = next((mark for mark in marks if isinstance(mark, NameOf)), None)
    return () if named is None else (Literal[tuple(named.words)],)


def sections_of(kinds: Sequence[Any]) -> list[type[Section]]:
    """Return those alternatives of a key's type that are sections."""
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def sole_section(kinds: Kinds) -> type[Section] | None:
    """Return the section that a key always holds (or null); None if it may hold something else.

    A section with required keys, such as `NamedCall`, counts as None, because it is set as a whole.
    """
    sections = sections_of(kinds)
    if len(sections) != 1 or len([kind for kind in kinds if kind is not types.NoneType]) != 1:
        return None
    is_call = any(field.is_required() for field in sections[0].model_fields.values())
    return None if is_call else sections[0]


def changes_default(default: Any, node: YamlNode) -> bool:
    """Report whether a mapping lacks a key that the default's section requires.

    Such a mapping changes the default: `{kwargs: {lr: 1e-4}}` keeps the optimizer and its other
    arguments. One that names an optimizer replaces it.
    """
    if not isinstance(default, Section) or not isinstance(node.value, dict):
        return False
    fields = type(default).model_fields
    return any(fields[key].is_required() for key in fields.keys() - node.value.keys())


def item_kinds(kind: Any) -> Kinds | None:
    """Return the alternatives of a list's or mapping's items; None if the type is neither."""
    arguments = get_args(kind)
    if get_origin(kind) in (list, tuple):
        return kinds_of(arguments[0])
    if get_origin(kind) is dict:
        return kinds_of(arguments[1])
    return None


def names_in(kind: Any) -> tuple[Any, ...]:
    """Return the keys that a mapping has by its type; none if the user chooses them."""
    return get_args(get_args(kind)[0]) if is_mapping(kind) and get_args(kind) else ()


def is_mapping(kind: Any) -> bool:
    """Report whether a type is a mapping with keys that the user chooses."""
    origin: Any = get_origin(kind)
    return kind is dict or origin is dict


def kind_that_fits(kinds: Kinds, node: YamlNode) -> Any | None:
    """Choose the alternative that a written list or mapping is meant for; None if none fits.

    A mapping of mappings counts as several named sections, if the schema allows those, but for one
    whose keys all take mappings in a section: `{kwargs: {...}}`.
    """

    def holds_sections(kind: Any) -> bool:
        inside = item_kinds(kind) or ()
        return bool(sections_of(inside)) or any(map(holds_sections, inside))

    def num_known(section: type[Section]) -> int:
        own = known_keys(section)
        return sum(key in own or key in foreign_keys(section) for key in node.value)

    def takes_all(section: type[Section]) -> bool:
        fields = [field_of(section, key) for key in node.value]
        return all(field and any(map(is_mapping, kinds_of_field(field))) for field in fields)

    containers = sorted((kind for kind in kinds if item_kinds(kind)), key=holds_sections)[::-1]
    if isinstance(node.value, list):
        return next((kind for kind in containers if not is_mapping(kind)), None)
    named = next((kind for kind in containers if is_mapping(kind)), None)
    sections = sections_of(kinds)
    if not sections or (
        named
        and all(isinstance(v.value, dict) for v in node.value.values())
        and not (node.value and any(map(takes_all, sections)))
    ):
        return named
    all_known = (one for one in sections if node.value.keys() <= set(known_keys(one)))
    return next(all_known, None) or max(sections, key=num_known)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyInfo:
    """The result of looking up a key in a schema: whether it exists, and the values it may have."""

    standing: Literal["field", "foreign", "name", "unknown"]
    """Whether the key is a declared field, a known foreign key, a user-chosen name, or unknown."""
    kinds: Kinds = (Any,)
    field: FieldInfo | None = None


def step_into(kinds: Kinds, key: str | int) -> KeyInfo:
    """Look up `key` in a value of these alternatives; no alternatives mean an ignored part."""
    sections = sections_of(kinds)
    for section in sections:
        if (field := field_of(section, key)) is not None:
            return KeyInfo(standing="field", kinds=kinds_of_field(field), field=field)
    if not kinds or any(key in foreign_keys(section) for section in sections):
        return KeyInfo(standing="foreign", kinds=())
    for kind in kinds:
        if kind is Any or kind is dict:
            return KeyInfo(standing="name")
        inside = item_kinds(kind)
        if inside is not None and is_mapping(kind) == isinstance(key, str):
            is_known = key in names_in(kind)
            return KeyInfo(standing="field" if is_known else "name", kinds=inside)
    return KeyInfo(standing="unknown")


def default_node(field: FieldInfo | None) -> YamlNode | None:
    """Return the default of a key in the schema as a node.

    The node of a section has only the keys that the schema sets explicitly.
    """
    if field is None or field.is_required():
        return None
    default = field.get_default(call_default_factory=True)
    return None if default is None else _as_node(default, everything=False)


def _as_node(value: Any, *, everything: bool) -> YamlNode:
    is_section = isinstance(value, Section)
    return graft(value.model_dump(exclude_unset=not everything) if is_section else value, DEFAULT)


def with_defaults(
    schema: type[Section],
    node: YamlNode,
    *,
    default: Section | None = None,
    everything: bool = False,
) -> YamlNode:
    """Return a section's node with what is missing filled in from `default`.

    A file that sets one key of a section thereby keeps what the run's schema sets there explicitly
    (`checkpointing.checkpoint_dir: results/grpo`, where the section's own default is another).
    With `everything`, all keys are filled in.
    """
    children = dict(node.value)
    plugged = dict[str, FieldInfo]()
    for key in children:
        with contextlib.suppress(ConfigError):  # which the loader reports, with the line
            if (field := field_of(schema, key)) is not None:
                plugged[key] = field
    for name, field in {**schema.model_fields, **plugged}.items():
        child, section = children.get(name), sole_section(kinds_of(field.annotation))
        value = getattr(default, name, None)
        fills_in = default is not None and name in default.model_fields_set
        if not fills_in and not isinstance(value, Section) and not field.is_required():
            value = field.get_default(call_default_factory=True)
            fills_in = everything
        is_section = isinstance(value, Section)
        if child is None and (fills_in or (everything and is_section)):
            children[name] = _as_node(value, everything=everything)
        elif child is not None and section is not None:
            if child.value is None and is_section:
                child = YamlNode({}, child.place)
            if isinstance(child.value, dict):
                inner = value if is_section else None
                child = with_defaults(section, child, default=inner, everything=everything)
            children[name] = child
        elif child is not None and changes_default(value, child):
            children[name] = overlay(_as_node(value, everything=False), child)
    return YamlNode(children, node.place)


_WORDS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true or false values"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    dict: ("a mapping", "mappings"),
    list: ("a list", "lists"),
    types.NoneType: ("null", "nulls"),
}
_LIMITS = (("ge", "of at least"), ("gt", "greater than"), ("le", "of at most"), ("lt", "below"))


def describe_kinds(kinds: Kinds, metadata: Sequence[Any] = ()) -> str:
    """Describe a key's accepted values, such as `a whole number of at least 1, or null`."""
    limits = " and ".join(
        f"{phrase} {getattr(limit, name)}"
        for limit in metadata
        for name, phrase in _LIMITS
        if hasattr(limit, name)
    )
    words = [
        f"{_describe_one(kind)} {limits if kind in (int, float) else ''}".rstrip() for kind in kinds
    ]
    return ", or ".join(dict.fromkeys(words))


def choices_of(kinds: Kinds) -> list[str]:
    """Return the words among a key's accepted values; an empty list if there are none."""
    words: list[str] = []
    for kind in kinds:
        origin: Any = get_origin(kind)
        words += map(str, get_args(kind)) if origin is Literal else ()
    return words


def _describe_one(kind: Any, *, many: bool = False) -> str:
    if isinstance(kind, type) and issubclass(kind, Section):
        # Those without a default come first: one of them is what is missing.
        fields = sorted(kind.model_fields.items(), key=lambda item: not item[1].is_required())
        some_keys = ", ".join(name for name, _ in fields[:3])
        return "sections" if many else f"a section with keys like {some_keys}"
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments)
    if origin in (list, dict, tuple):
        word = _WORDS[dict if origin is dict else list][many]
        inside = [_describe_one(k, many=True) for k in item_kinds(kind) or () if k is not Any]
        return f"{word} of {' or '.join(dict.fromkeys(inside))}" if inside else word
    return _WORDS.get(kind, ("another value", "values"))[many]


def unknown_key(schema: type[Section], section: type[Section], key: str) -> str:
    """Return the error message for an unknown key of a section, with the most similar known key."""
    if key in section.removed:
        return f"there is no such key any more ({section.removed[key].instead}); leave it out"
    if key == "_override_":
        return "replaces whole sections only: write it directly below one of the file's first level"
    if key in section.other_commands:
        return f"unknown key; {section.other_commands[key]}"
    if key in known_keys(section):
        return NO_SETTINGS
    near = nearest(key, known_keys(section))
    if near is not None:
        return f"unknown key; did you mean '{near}'?"
    elsewhere = [dotted(path) for path in _all_paths(schema, ()) if path[-1] == key]
    if elsewhere:
        return f"unknown key here; it belongs at {' or '.join(elsewhere[:3])}"
    return f"unknown key; known here: {', '.join(known_keys(section))}"


def says_nothing(one: Removed, node: YamlNode) -> bool:
    """Report whether the value of a removed key asks for nothing but what holds now."""
    return _says(plain_values(node), one.was)


def _says(value: Any, what: Any) -> bool:
    """Report whether a value, or all that is written of a block, is null or equals another."""
    if isinstance(value, dict) and isinstance(what, dict):
        return all(key in what and _says(inside, what[key]) for key, inside in value.items())
    return value is None or (value == what and isinstance(value, bool) == isinstance(what, bool))


def _all_paths(schema: type[Section], prefix: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, field in schema.model_fields.items():  # plug-ins may not be importable
        yield (*prefix, name)
        section = sole_section(kinds_of(field.annotation))
        if section is not None:
            yield from _all_paths(section, (*prefix, name))
    for name in schema.short_keys():
        yield (*prefix, name)
