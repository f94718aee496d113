"""Configuration files and command-line overrides, read into the sections of a schema.

The steps, each in a file of its own::

    source         YAML files and what they inherit  -> a tree that knows every value's line
    overrides      a.b=c, +a.b=c, ++a.b=c, ~a.b      -> the same tree, changed
    interpolation  ${other.key}, ${mul:a,b}, ${oc.env:NAME,default}
    check          tree + schema -> sections, or everything that is wrong in one error
    written        sections -> YAML that reads back as the same sections
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from laurel.config.check import Checker
from laurel.config.nemo_rl import Move, adapt, fates_of
from laurel.config.other_names import at_their_place
from laurel.config.overrides import Override, apply_overrides
from laurel.config.section import Section
from laurel.config.shape import with_defaults
from laurel.config.source import read_file
from laurel.config.tree import DEFAULT, Node
from laurel.config.written import to_yaml
from laurel.errors import ConfigError

__all__ = ["LoadedConfig", "check_tree", "load_config", "to_yaml"]

T = TypeVar("T", bound=Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig(Generic[T]):
    """A configuration that fits its schema, and what should be said about it."""

    config: T
    warnings: tuple[str, ...]
    """A line for each of: what was translated, what is lost, what is ignored and loses nothing,
    what has no effect beside other settings, what is null and has its default."""
    ignored: tuple[str, ...] = ()
    """Keys of other systems' files that mean nothing here, lost or not."""
    said: Node = field(default_factory=lambda: Node(value={}, place=DEFAULT))
    """What file and overrides say, in Laurel's own terms, without defaults."""
    moves: tuple[Move, ...] = ()
    """What they say in other terms, and where it went."""


def load_config(
    schema: type[T], path: Path | None = None, overrides: Sequence[str | Override] = ()
) -> LoadedConfig[T]:
    """Read a configuration file and change it by overrides; without a file, the schema's defaults.

    Raises ConfigError. What is wrong with keys and values is told all at once, each with the file
    and line, or the override, that it came from.
    """
    tree = read_file(path) if path is not None else Node(value={}, place=DEFAULT)
    problems: list[str] = []
    tree = at_their_place(schema, tree, problems)
    filled = apply_overrides(schema, with_defaults(schema, tree), overrides, problems)
    adapted = adapt(schema, filled, problems)
    checker = Checker(schema, adapted.tree, problems)
    config = checker.section(schema, adapted.tree)
    if problems or not isinstance(config, schema):
        raise ConfigError(_all_of(problems))
    return LoadedConfig(
        config=config,
        warnings=(*adapted.sentences, *warnings_of(checker, adapted.tree)),
        ignored=tuple(checker.ignored),
        said=adapted.tree,
        moves=tuple(adapted.moves),
    )


def check_tree(schema: type[T], tree: Node) -> T:
    """A configuration made by a program, with its places as they are in the messages.

    Raises:
        ConfigError: What is wrong, all at once.
    """
    problems: list[str] = []
    tree = with_defaults(schema, tree)
    config = Checker(schema, tree, problems).section(schema, tree)
    if problems or not isinstance(config, schema):
        raise ConfigError(_all_of(problems))
    return config


def _all_of(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    in_order = sorted(problems, key=_file_and_line)
    return f"{len(problems)} problems in the configuration:\n  " + "\n  ".join(in_order)


def _file_and_line(problem: str) -> tuple[bool, str, int]:
    """Files first, by line; then overrides, as they were given."""
    place = re.match(r"(?!override ')(.+?):(\d+): ", problem)
    return (False, place[1], int(place[2])) if place else (True, "", 0)


def warnings_of(checker: Checker, tree: Node) -> Iterator[str]:
    """What a checked tree says that is lost, ignored, without effect or null."""
    fates = fates_of(tree, checker.ignored)
    lost = {fate.key: fate.why for fate in fates if fate.is_lost}
    if lost:
        told = "; ".join(f"{key} ({why})" for key, why in lost.items())
        yield f"these settings are not carried over: {told}"
    nothing = [
        key for key in checker.ignored if not any(one == key or _is_in(one, key) for one in lost)
    ]
    if nothing:
        yield f"these keys mean nothing here and are ignored: {', '.join(nothing)}"
    if checker.without_effect:
        told = "; ".join(f"{key} ({why})" for key, why in checker.without_effect.items())
        yield f"these settings have no effect beside the others: {told}"
    if checker.nulls:
        told = ", ".join(f"{key}={value}" for key, value in checker.nulls.items())
        yield f"these keys are null, which leaves them at their defaults: {told}"


def _is_in(key: str, block: str) -> bool:
    return key.startswith(f"{block}.")
