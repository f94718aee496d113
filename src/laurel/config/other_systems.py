"""Settings of other systems in the files that Laurel reads, of which their importers know.

Importers are asked only where a file or an override has a key that is none of Laurel's, or is
refused: a run of Laurel's own keys imports none of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laurel import plugins
from laurel.config.yaml_tree import Section, YamlNode, find_node, graft, with_key
from laurel.errors import ConfigError
from laurel.plugins import Importer


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadKey:
    """A key of another system that Laurel ignores, with the reason."""

    key: str
    value: Any
    why: str
    is_lost: bool
    """True if ignoring the key makes the run differ from what the file asks for."""
    is_carried: bool = False
    """Whether other keys of Laurel say what it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A setting of another system that was translated."""

    key: str
    value: Any
    to: Mapping[str, Any]
    """The keys of Laurel that the setting was translated to, with their values."""


@dataclass(slots=True, kw_only=True)
class Adapted:
    """The values of a file after translation to Laurel's keys, with moves and warnings."""

    tree: YamlNode
    moves: list[Move] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any, *, by: str, was: Any) -> None:
        """Set one of Laurel's keys; `by` and `was` are the translated key and its value."""
        place = (find_node(self.tree, by.split(".")) or self.tree).place
        self.tree = with_key(self.tree, key.split("."), graft(value, place))
        same = next((move for move in self.moves if move.key == by), None)
        if same is None:
            self.moves.append(Move(key=by, value=was, to={key: value}))
        else:
            self.moves[self.moves.index(same)] = Move(key=by, value=was, to={**same.to, key: value})


def foreign_keys(section: type[Section]) -> dict[str, str]:
    """Return the keys of other systems that a section accepts and does not read, with reasons."""
    found = dict.fromkeys(section.foreign_keys, "it means nothing here")
    for importer in _importers():
        found |= importer.keys_beside(section)
    return found


def translate(schema: type[Section], tree: YamlNode, problems: list[str]) -> Adapted:
    """Translate the settings of a file from other systems' keys to Laurel's.

    Problems of the translation are added to `problems`.

    Raises:
        ConfigError: The file asks for features that Laurel does not have; all of them are named.
    """
    work = Adapted(tree=tree)
    for importer in _importers():
        importer.adapt(schema, work, problems)
    return work


def ignored_keys(tree: YamlNode, ignored: Sequence[str]) -> list[UnreadKey]:
    """List the keys of a tree that the sections accept but ignore, with reasons.

    Args:
        ignored: The ignored dotted keys. An importer may list a block by its parts.
    """
    return [one for importer in _importers() for one in importer.unread(tree, ignored)]


def _importers() -> list[Importer]:
    found: list[Importer] = []
    for name in plugins.names("importers"):
        with contextlib.suppress(ConfigError):  # which `laurel config import` reports
            found.append(plugins.find(Importer, name))
    return found
