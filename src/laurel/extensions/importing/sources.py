"""Imports a configuration: recognizes which system wrote the file, and reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from laurel.config.load import load_config
from laurel.config.nemo_rl import unread_keys
from laurel.config.schemas import SCHEMAS, Kind
from laurel.config.yaml_tree import (
    DEFAULT,
    MISSING,
    YamlNode,
    plain_values,
    read_document,
    read_file,
)
from laurel.errors import ConfigError, no_file_at
from laurel.extensions.importing import openrlhf, trl, verl
from laurel.extensions.importing.commands import PROGRAMS, Command, find_command
from laurel.extensions.importing.rules import (
    Imported,
    KeyOutcome,
    MappingTable,
    import_said,
    read_tables,
)

System = Literal["trl", "openrlhf", "verl", "nemo-rl"]

TITLES: Mapping[System, str] = {
    "trl": "TRL",
    "openrlhf": "OpenRLHF",
    "verl": "verl",
    "nemo-rl": "NeMo RL",
}
_RULES = {"trl": trl.PROGRAMS, "openrlhf": openrlhf.PROGRAMS, "verl": verl.PROGRAMS}
TABLES: Mapping[str, Mapping[Kind, MappingTable]] = {name: read_tables(name) for name in _RULES}
"""The mapping tables by system and kind of run; NeMo RL needs none, as Laurel shares its keys."""

STDIN = "-"
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,([^{}]*))?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """What to import, with facts that the source may lack, such as its number of steps."""

    path: Path
    text: str | None = None
    """The text of the source, if the path is `-` (standard input)."""
    system: System | None = None
    run: Kind | None = None
    devices: int | None = None
    total_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """The result of `import_configuration`, with the system that the source was recognized as."""

    imported: Imported
    system: System
    by: str
    """The clue by which the system was recognized; empty if the user named the system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A parsed source before any translation."""

    values: Mapping[str, Any]
    """The values, nested as in the file."""
    command: Command | None = None


def import_configuration(request: ImportRequest) -> ImportReport:
    """Translate a configuration of another system into Laurel's.

    Raises:
        ConfigError: The file cannot be read, belongs to no known system or not to the one that the
            user named, or does not make a valid configuration.
    """
    name = "stdin" if str(request.path) == STDIN else str(request.path)
    read = _read(request, name)
    system, by = _system(request, read, name)
    if request.devices is not None and system != "trl":
        raise ConfigError(
            f"--devices is for TRL, whose files do not say it; {TITLES[system]}'s do: leave it out"
        )
    if system == "nemo-rl":
        if str(request.path) == STDIN:
            raise ConfigError(
                "a file of NeMo RL may name others (defaults), and is read by its name"
            )
        kinds: tuple[Kind, ...] = ("grpo", "sft", "rm")
        kinds_found = [kind for kind in kinds if kind in read.values]
        imported = _import_nemo_rl(request.path, request.run or [*kinds_found, *kinds[-1:]][0])
        return ImportReport(imported=imported, system=system, by=by)
    run, run_by = _run(request, read, system, name)
    table = TABLES[system][run]
    said, lost = _said(table, read)
    command = read.command
    work = _RULES[system][run](
        system=TITLES[system],
        run=run,
        table=table,
        said=said,
        devices=request.devices or (command.devices if command else None),
        total_steps=request.total_steps,
    )
    for key, why in lost.items():
        work.refuse(key, why)
    imported = import_said(work)
    return ImportReport(
        imported=imported, system=system, by="; ".join(part for part in (by, run_by) if part)
    )


def _read(request: ImportRequest, name: str) -> _Read:
    text = request.text if request.text is not None else _text(request.path)
    suffix = request.path.suffix.lower()
    if suffix == ".json":
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name}:{error.lineno}: not JSON: {error.msg}") from None
        return _Read(values=_mapping(values, name))
    if suffix not in (".yaml", ".yml"):
        command = find_command(text, name)
        if command is not None:
            return _Read(values=command.values, command=command)
    try:
        values = plain_values(read_document(text, name))
    except ConfigError as error:
        if suffix in (".yaml", ".yml"):
            raise
        raise ConfigError(
            f"{name}: neither a command line of a program that is known ({PROGRAMS}) nor YAML: "
            f"{str(error).removeprefix(name)}"
        ) from None
    values = _mapping(values, name)
    if "defaults" in values and request.text is None:
        # A file of NeMo RL inherits the files that it names; Hydra's `defaults` are not followed.
        with suppress(ConfigError):
            whole = plain_values(read_file(request.path))
            values = whole if "policy" in whole else values
    return _Read(values=values)


def _text(path: Path) -> str:
    if (problem := no_file_at(path)) is not None:
        raise ConfigError(problem)
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; - is stdin") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; name the file of a configuration") from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"{path} is not text; training_args.bin is a pickle, which Laurel does not open: dump "
            "it as JSON, training_args.to_json_string()"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _mapping(values: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(values, dict) or not values:
        raise ConfigError(
            f"{name}: neither a mapping of keys (YAML, JSON) nor a command line of a program that "
            f"is known: {PROGRAMS}"
        )
    return values


def _system(request: ImportRequest, read: _Read, name: str) -> tuple[System, str]:
    said = request.system
    if read.command is not None:
        found: System | None = read.command.system  # type: ignore[assignment]
        by = f"the program {read.command.program}"
    else:
        found, by = _system_of_keys(read.values)
    if said is None:
        if found is None:
            known = ", ".join(TITLES.values())
            raise ConfigError(f"{name}: none of its keys tells where it is from ({known}): --from")
        return found, f"read as {TITLES[found]}: {by}"
    is_none = read.command is None and not _known(said, read.values)
    if found is not None and found != said and (read.command is not None or is_none):
        raise ConfigError(
            f"{name} is not of {TITLES[said]}: {by} {'are' if ',' in by else 'is'} of "
            f"{TITLES[found]}; --from {found}, or leave it out"
        )
    if is_none:
        raise ConfigError(f"{name}: no key of {TITLES[said]} is in it")
    return said, ""


def _system_of_keys(values: Mapping[str, Any]) -> tuple[System | None, str]:
    known = {system: _known(system, values) for system in TITLES}
    if known["nemo-rl"]:
        return "nemo-rl", "its sections " + ", ".join(known["nemo-rl"][:3])
    most = max(map(len, known.values()))
    best = [system for system, keys in known.items() if len(keys) == most]
    if not most or len(best) > 1:
        return None, ""
    return best[0], "its keys " + ", ".join(known[best[0]][:3])


def _known(system: System, values: Mapping[str, Any]) -> list[str]:
    """List the keys of a source that a system knows."""
    if system == "nemo-rl":
        sections = [key for key in values if key in _SECTIONS and isinstance(values[key], dict)]
        return sections if "policy" in sections else []
    found: list[str] = []
    for table in TABLES[system].values():
        exact = {key for key in table.known if not key.endswith(".*")} | {*table.other_names}
        found += [key for key in _flat(values, table) if key in exact and key not in found]
    return found


_SECTIONS = ("policy", "rm", "sft", "grpo", "loss_fn", "env", "checkpointing", "cluster")
"""The sections of NeMo RL's files; no other system has a section `policy`."""


def _run(request: ImportRequest, read: _Read, system: System, name: str) -> tuple[Kind, str]:
    tables = TABLES[system]
    if read.command is not None:
        run: Kind = read.command.run  # type: ignore[assignment]
        if request.run not in (None, run):
            raise ConfigError(
                f"{name}: {read.command.program} is laurel {run}, not {request.run}; "
                "leave --for out"
            )
        return run, ""
    if request.run is not None:
        if request.run not in tables:
            raise ConfigError(
                f"{TITLES[system]} has no {request.run} that is imported; --for {'|'.join(tables)}"
            )
        return request.run, ""
    if len(tables) == 1:
        return next(iter(tables)), ""
    keys_of: dict[Kind, list[str]] = {}
    for kind, table in tables.items():
        new = table.other_names
        keys = _flat(read.values, table)
        keys_of[kind] = [key for key in keys if new.get(key, key) in table.own_keys]
    found = [kind for kind, keys in keys_of.items() if keys]
    if len(found) != 1:
        several = ", ".join(f"{kind} ({keys_of[kind][0]})" for kind in found)
        why = f"it has keys of several: {several}" if found else "nothing in it tells"
        raise ConfigError(f"{name}: which run is it for? {why}; --for {'|'.join(tables)}")
    return found[0], f"read as a file for laurel {found[0]}: {keys_of[found[0]][0]}"


def _said(table: MappingTable, read: _Read) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values by the table's keys, and the keys whose values cannot be determined."""
    names = table.other_names
    said: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    lost: dict[str, str] = {}
    for key, value in _flat(read.values, table).items():
        name = names.get(key, key)
        if name in said and said[name] != value:
            raise ConfigError(
                f"{key} is another name of {spelled[name]}, and they differ: {said[name]!r} and "
                f"{value!r}; keep one"
            )
        said[name], spelled[name] = value, key
    for key, value in list(said.items()):
        if isinstance(value, str) and "${" in value:
            _resolve(said, table, key, lost)
    if read.command is not None:
        for key, value in read.command.unresolved.items():
            name = names.get(key, key)
            said.pop(name, None)
            lost[name] = f"{value} holds a variable that the text does not set: write its value"
    return said, lost


def _resolve(said: dict[str, Any], table: MappingTable, key: str, lost: dict[str, str]) -> None:
    """Replace references to other keys; drop a key if its reference cannot be resolved."""

    def value_of(found: re.Match[str]) -> Any:
        name, default = found[1], found[2]
        value = said.get(name, table.defaults.get(name, default))
        return None if isinstance(value, str) and "${" in value else value

    text = said[key]
    if whole := _REFERENCE.fullmatch(text):
        value = value_of(whole)
    else:
        parts = {found[0]: value_of(found) for found in _REFERENCE.finditer(text)}
        value = None if None in parts.values() else text
        for part, there in parts.items():
            value = value.replace(part, str(there)) if value is not None else None
    if value is None or (isinstance(value, str) and "${" in value):
        del said[key]
        lost[key] = f"{text} refers to what the file does not hold: write its value"
    else:
        said[key] = value


def _flat(
    values: Mapping[str, Any], table: MappingTable, prefix: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Flatten nested keys to dotted ones, except for mappings that the table takes as a whole."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = ".".join((*prefix, str(name)))
        if value is MISSING:
            continue
        if isinstance(value, dict) and value and key not in table.known:
            found |= _flat(value, table, (*prefix, str(name)))
        else:
            found[key] = value
    return found


# NeMo RL's files, whose keys Laurel shares.


def _import_nemo_rl(path: Path, run: Kind) -> Imported:
    """Load a file of NeMo RL, and report which keys are translated, ignored or lost.

    Raises:
        ConfigError: The file is invalid, as in `load_config`.
    """
    loaded = load_config(SCHEMAS[run], path)
    moved = {move.key for move in loaded.moves}
    put = {key for move in loaded.moves for key in move.to}
    entries = [
        KeyOutcome(
            key=move.key,
            status="carried",
            value=move.value,
            to=dict(move.to),
            why="translated" if list(move.to) != [move.key] else "",
        )
        for move in loaded.moves
    ]
    values: dict[str, Any] = {}
    for key, value in _said_leaves(loaded.said, loaded.ignored, put):
        values[key] = value
        if key not in put:
            entries.append(KeyOutcome(key=key, status="carried", value=value, to={key: value}))
    entries += [
        KeyOutcome(
            key=one.key,
            value=one.value,
            why=one.why,
            status="not carried" if one.is_lost else "not needed",
        )
        for one in unread_keys(loaded.said, loaded.ignored)
        if one.key not in moved
    ]
    return Imported(
        system=TITLES["nemo-rl"],
        run=run,
        values=values,
        origins=dict.fromkeys(values, ""),
        entries=tuple(entries),
        config=loaded.config,
    )


_TAKEN_WHOLE = ("kwargs", "chat_template_kwargs", "hf_config_overrides", "labels")


def _said_leaves(
    tree: YamlNode, ignored: tuple[str, ...], whole: set[str], path: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield every key that is read, with its value; a block in `whole` is yielded as one key."""
    for name, child in tree.value.items():
        here = ".".join((*path, name))
        if here in ignored or child.place == DEFAULT:
            continue
        is_block = isinstance(child.value, dict) and child.value
        if is_block and name not in _TAKEN_WHOLE and here not in whole:
            yield from _said_leaves(child, ignored, whole, (*path, name))
        else:
            yield here, plain_values(child)
