"""Applies a mapping table to another system's configuration, with a status for every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from laurel.config.importing.commands import LAUNCHER_FILE
from laurel.config.importing.rules import KeyOutcome, Work
from laurel.config.load import check_tree
from laurel.config.schema_info import with_defaults
from laurel.config.schemas import SCHEMAS, Kind
from laurel.config.yaml_tree import Section, YamlNode, nearest, plain_values
from laurel.errors import ConfigError

WHOLE = ("policy.optimizer", "policy.scheduler")
"""The keys whose blocks replace Laurel's defaults as a whole, so all their parts are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of an import: Laurel's configuration, and what became of each source key."""

    system: str
    run: Kind
    values: Mapping[str, Any]
    """The imported values by Laurel's dotted keys.

    These are the values in the source, and those defaults of the other system that differ from
    Laurel's.
    """
    origins: Mapping[str, str]
    """The origin of each value as text for people, by Laurel's dotted keys."""
    entries: tuple[KeyOutcome, ...]
    """The outcome of every key in the source, and of relevant defaults, in table order."""
    config: Section
    """The imported values, checked against the schema."""

    def with_status(self, status: str) -> list[KeyOutcome]:
        """Return the outcomes with one status: carried, default, not needed or not carried."""
        return [entry for entry in self.entries if entry.status == status]


def import_said(work: Work) -> Imported:
    """Apply a system's rules to the keys of the source, and check the resulting configuration.

    Raises:
        ConfigError: A value, or the combination of values, is invalid; the message names the key of
            the source.
    """
    try:
        work.translate()
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        if isinstance(error, ConfigError) or not work.last_read:
            raise
        raise work.problem(work.last_read, "it is not of the kind that belongs there") from None
    work.settle()
    for key in work.said:
        if key not in work.entries:
            _without_rule(work, key)
    run = work.run
    _drop_our_defaults(work, SCHEMAS[run])
    tree = _nested(work.values, f"what {work.system} says")
    config, _ = check_tree(SCHEMAS[run], with_defaults(SCHEMAS[run], tree))
    order = {key: i for i, key in enumerate(work.table.known)}
    entries = sorted(work.entries.values(), key=lambda e: order.get(e.key, len(order)))
    return Imported(
        system=work.system,
        run=run,
        config=config,
        values={key: plain_values(node) for key, node in work.values.items()},
        origins={key: work.origins[key] for key in work.values},
        entries=tuple(entries),
    )


def _without_rule(work: Work, key: str) -> None:
    if work.table.knows(key):
        work.skip("it has no effect beside the other keys of this file", key)
    elif key == LAUNCHER_FILE:
        work.refuse(
            key,
            "the launcher's own file is not read; how many machines and devices there are is "
            "in the section cluster, how weights are spread over them in policy.dtensor_cfg",
        )
    else:
        near = nearest(key, [k for k in work.table.known if not k.endswith(".*")])
        hint = f"; did you mean {near}?" if near else ""
        work.refuse(key, f"not known to this version of Laurel's table of {work.system}{hint}")


def _drop_our_defaults(work: Work, schema: type[Section]) -> None:
    """Leave out values that the source does not set and that equal Laurel's defaults."""
    ours = schema().model_dump(mode="json")
    new = {to for to, node in work.values.items() if default_at(ours, to) != plain_values(node)}
    units = {to: next((w for w in WHOLE if to.startswith(w)), to) for to in work.values}
    needed = {units[to] for to in work.values if to in work.decided or to in new}
    work.values = {to: node for to, node in work.values.items() if units[to] in needed}
    for key, entry in list(work.entries.items()):
        if entry.status == "default":
            entry.to = {to: value for to, value in entry.to.items() if to in new}
            if not entry.to:
                del work.entries[key]


def default_at(ours: Any, dotted: str) -> Any:
    """Return the value of a dotted key in a dumped configuration; None if there is none."""
    for part in dotted.split("."):
        ours = ours.get(part) if isinstance(ours, dict) else None
    return ours


def _nested(values: Mapping[str, YamlNode], place: str) -> YamlNode:
    tree: dict[str, YamlNode] = {}
    for dotted, node in values.items():
        *blocks, last = dotted.split(".")
        level = tree
        for block in blocks:
            below = level.setdefault(block, YamlNode({}, place))
            if not isinstance(below.value, dict):
                raise ConfigError(f"{place}: {dotted} and a key above it are both set; keep one")
            level = below.value
        level[last] = node
    return YamlNode(tree, place)
