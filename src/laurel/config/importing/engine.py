"""Converts another system's configuration into a checked one, with a status for every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from laurel.config.importing.commands import LAUNCHER_FILE
from laurel.config.importing.rules import KeyOutcome, MappingTable, Work
from laurel.config.load import check_tree
from laurel.config.schema_info import with_defaults
from laurel.config.schemas import SCHEMAS, Kind
from laurel.config.yaml_tree import Section, YamlNode, nearest, plain_values
from laurel.errors import ConfigError

WHOLE = ("policy.optimizer", "policy.scheduler")
"""Keys whose parts replace all of ours together, and so are written together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A configuration of another system in ours."""

    system: str
    run: Kind
    values: Mapping[str, Any]
    """By our keys, dotted: what the file says and, of the other system's defaults, what differs
    from ours."""
    origins: Mapping[str, str]
    """Where each is from, for people."""
    entries: tuple[KeyOutcome, ...]
    """Every key that the source says, and the defaults that matter, in the order of the table."""
    config: Section
    """The same, checked by the schema."""

    def with_status(self, status: str) -> list[KeyOutcome]:
        """The entries of one of the lists: carried, default, not needed, not carried."""
        return [entry for entry in self.entries if entry.status == status]


def import_said(table: MappingTable, work: Work, run: Kind) -> Imported:
    """Give every key of the source its status, and check what comes out.

    Raises:
        ConfigError: A value, or what the values together would be; the message names the key of
            the source.
    """
    for rule in table.rules:
        rule.convert(work)
    for key in work.said:
        if key not in work.entries:
            _without_rule(table, work, key)
    _drop_our_defaults(work, SCHEMAS[run])
    tree = _nested(work.values, f"what {work.system} says")
    config, _ = check_tree(SCHEMAS[run], with_defaults(SCHEMAS[run], tree))
    order = {key: i for i, key in enumerate(table.known())}
    entries = sorted(work.entries.values(), key=lambda e: order.get(e.key, len(order)))
    return Imported(
        system=work.system,
        run=run,
        config=config,
        values={key: plain_values(node) for key, node in work.values.items()},
        origins={key: work.origins[key] for key in work.values},
        entries=tuple(entries),
    )


def _without_rule(table: MappingTable, work: Work, key: str) -> None:
    if table.rule_of(key) is not None:
        work.unneeded(key, "it has no effect beside the other keys of this file")
        return
    if key == LAUNCHER_FILE:
        work.refuse(
            key,
            "the launcher's own file is not read; how many machines and devices there are is "
            "in the section cluster, how weights are spread over them in policy.dtensor_cfg",
        )
        return
    near = nearest(key, [k for k in table.known() if not k.endswith(".*")])
    hint = f"; did you mean {near}?" if near else ""
    work.refuse(key, f"not known to this version of Laurel's table of {work.system}{hint}")


def _drop_our_defaults(work: Work, schema: type[Section]) -> None:
    """Leave out what nobody said and what is ours anyway."""
    ours = schema().model_dump(mode="json")
    units = {to: next((w for w in WHOLE if to.startswith(w)), to) for to in work.values}
    needed: set[str] = set()
    for to, unit in units.items():
        is_ours = default_at(ours, to) == plain_values(work.values[to])
        if work.came_from[to] or not is_ours:
            needed.add(unit)
    for to, unit in units.items():
        if unit not in needed:
            del work.values[to]
    for key, entry in list(work.entries.items()):
        if entry.status == "default":
            entry.to = {
                to: value
                for to, value in entry.to.items()
                if to in work.values and default_at(ours, to) != plain_values(work.values[to])
            }
            if not entry.to:
                del work.entries[key]


def default_at(ours: Any, dotted: str) -> Any:
    """Return the value of a dotted key in a dumped configuration; None where there is none."""
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
