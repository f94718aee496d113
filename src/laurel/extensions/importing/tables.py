"""Imports what a table and its rules know: the systems whose keys are not Laurel's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from laurel.config.schemas import Kind
from laurel.config.yaml_tree import MISSING
from laurel.errors import ConfigError
from laurel.extensions.importing.rules import (
    Imported,
    MappingTable,
    Source,
    import_said,
    read_tables,
)
from laurel.extensions.importing.translation import Translation
from laurel.plugins import Importer

_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,([^{}]*))?\}")


class TableImporter(Importer):
    """A system whose keys stand in a table beside this file, which rules translate."""

    table: ClassVar[str]
    """The name of the table's file, without `.yaml`."""
    rules: ClassVar[Mapping[Kind, type[Translation]]]
    """The rules by the kind of run that a program of the system is."""

    @cached_property
    def tables(self) -> Mapping[Kind, MappingTable]:
        """Return what is known of the keys, by the kind of run."""
        return read_tables(self.table)

    def own_keys(self, values: Mapping[str, Any]) -> list[str]:
        """Return the keys of a file that any of the tables has."""
        own: list[str] = []
        for table in self.tables.values():
            exact = {key for key in table.known if not key.endswith(".*")} | {*table.other_names}
            own += [key for key in _flat(values, table) if key in exact and key not in own]
        return own

    def make(self, section: None, source: Source) -> Imported:
        """Return what the rules make of a source."""
        run, by = _run(source, self.tables, self.title)
        values, lost = _source_values(self.tables[run], source)
        work = self.rules[run](
            system=self.title,
            run=run,
            table=self.tables[run],
            said=values,
            devices=source.devices or (source.command.devices if source.command else None),
            total_steps=source.total_steps,
            program=source.command.program if source.command else "",
        )
        for key, why in lost.items():
            work.refuse(key, why)
            work.entries[work.table.full(key)].is_known = False
        return replace(import_said(work), recognized_by=by)


def _run(source: Source, tables: Mapping[Kind, MappingTable], title: str) -> tuple[Kind, str]:
    if source.command is not None:
        run: Kind = source.command.run  # type: ignore[assignment]
        if source.run not in (None, run):
            raise ConfigError(
                f"{source.name}: {source.command.program} is laurel {run}, not {source.run}; "
                "leave --for out"
            )
        return run, ""
    if source.run is not None:
        if source.run not in tables:
            raise ConfigError(
                f"{title} has no {source.run} that is imported; --for {'|'.join(tables)}"
            )
        return source.run, ""
    if len(tables) == 1:
        return next(iter(tables)), ""
    keys_of: dict[Kind, list[str]] = {}
    for kind, table in tables.items():
        new = table.other_names
        keys = _flat(source.values, table)
        keys_of[kind] = [key for key in keys if new.get(key, key) in table.own_keys]
    kinds = [kind for kind, keys in keys_of.items() if keys]
    if len(kinds) != 1:
        several = ", ".join(f"{kind} ({keys_of[kind][0]})" for kind in kinds)
        why = f"it has keys of several: {several}" if kinds else "nothing in it tells"
        raise ConfigError(f"{source.name}: which run is it for? {why}; --for {'|'.join(tables)}")
    return kinds[0], f"read as a file for laurel {kinds[0]}: {keys_of[kinds[0]][0]}"


def _source_values(table: MappingTable, source: Source) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values by the table's keys, and the keys whose values cannot be determined."""
    names = table.other_names
    by_key: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    lost: dict[str, str] = {}
    for key, value in _flat(source.values, table).items():
        name = names.get(key, key)
        if (part := table.mapping_of(key)) is not None:
            above, *within = part
            by_key[above] = _merged(key, by_key.get(above) or {}, within, value)
            spelled[above] = key
            continue
        if name in by_key and by_key[name] != value:
            raise ConfigError(
                f"{key} is another name of {spelled[name]}, and they differ: {by_key[name]!r} and "
                f"{value!r}; keep one"
            )
        by_key[name], spelled[name] = value, key
    for key in list(by_key):
        _resolve(by_key, key, key, by_key, table, lost)
    if source.command is not None:
        lost |= {names.get(key, key): why for key, why in source.command.unresolved.items()}
    return by_key, lost


def _merged(key: str, values: Any, names: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a mapping with a value at the end of several names."""
    if not isinstance(values, dict):
        raise ConfigError(f"{key}: {values!r} stands above it, which has no keys")
    first, *rest = names
    return {**values, first: _merged(key, values.get(first, {}), rest, value) if rest else value}


def _resolve(
    mapping: dict[str, Any],
    name: str,
    key: str,
    values: Mapping[str, Any],
    table: MappingTable,
    lost: dict[str, str],
) -> None:
    """Replace references to other keys in a mapping's value, and in the mappings below it.

    A value whose reference cannot be resolved is dropped; `key` is its whole name.
    """

    def value_of(match: re.Match[str]) -> Any:
        other, default = match[1], match[2]
        value = values.get(other, table.defaults.get(other, default))
        return None if isinstance(value, str) and "${" in value else value

    text = mapping[name]
    if isinstance(text, dict):
        mapping[name] = inner = dict(text)
        for below in text:
            _resolve(inner, below, f"{key}.{below}", values, table, lost)
        return
    if not isinstance(text, str) or "${" not in text:
        return
    if whole := _REFERENCE.fullmatch(text):
        value = value_of(whole)
    else:
        parts = {match[0]: value_of(match) for match in _REFERENCE.finditer(text)}
        value = None if None in parts.values() else text
        for part, there in parts.items():
            value = value.replace(part, str(there)) if value is not None else None
    if value is None or (isinstance(value, str) and "${" in value):
        del mapping[name]
        lost[key] = f"{text} refers to what the file does not hold: write its value"
    else:
        mapping[name] = value


def _flat(
    values: Mapping[str, Any], table: MappingTable, prefix: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Flatten nested keys to dotted ones, except for mappings that the table takes as a whole."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = ".".join((*prefix, str(name)))
        if value is MISSING:
            continue
        if isinstance(value, dict) and value and key not in table.known:
            flat |= _flat(value, table, (*prefix, str(name)))
        else:
            flat[key] = value
    return flat
