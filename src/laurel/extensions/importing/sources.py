"""Imports a configuration: recognizes which system wrote the file, and reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laurel.config.schemas import Kind
from laurel.config.yaml_tree import plain_values, read_document, read_file
from laurel.errors import ConfigError, no_file_at
from laurel.extensions.importing.commands import PROGRAMS, CommandLine
from laurel.extensions.importing.rules import Imported, Source
from laurel.extensions.importing.scripts import find_command
from laurel.plugins import Importer, find, names

STDIN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """What to import, with facts that the source may lack, such as its number of steps."""

    path: Path
    text: str | None = None
    """The text of the source, if the path is `-` (standard input)."""
    system: str | None = None
    run: Kind | None = None
    devices: int | None = None
    total_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """The result of `import_configuration`, with the system that the source was recognized as."""

    imported: Imported
    system: str
    by: str
    """The clue by which the system was recognized; empty if the user named the system."""


def import_configuration(request: ImportRequest) -> ImportReport:
    """Translate a configuration of another system into Laurel's.

    Raises:
        ConfigError: The file cannot be read, belongs to no known system or not to the one that the
            user named, or does not make a valid configuration.
    """
    name = "stdin" if str(request.path) == STDIN else str(request.path)
    source = _read(request, name)
    system, by = _system(request, source)
    importer = find(Importer, system)
    if request.devices is not None and not importer.devices_of_option:
        others = [other.title for other in _importers().values() if other.devices_of_option]
        raise ConfigError(
            f"--devices is for {' and '.join(others)}, whose files do not say it; "
            f"{importer.title}'s do: leave it out"
        )
    imported: Imported = importer.make(None, source)
    assumed = source.command.assumed if source.command is not None else []
    clues = (by, imported.recognized_by, *assumed)
    return ImportReport(
        imported=imported, system=system, by="; ".join(part for part in clues if part)
    )


def _importers() -> dict[str, Importer]:
    # What cannot be used is said where its name is used.
    importers: dict[str, Importer] = {}
    for name in names("importers"):
        with suppress(ConfigError):
            importers[name] = find(Importer, name)
    return importers


def _read(request: ImportRequest, name: str) -> Source:
    def source(values: Mapping[str, Any], command: CommandLine | None = None) -> Source:
        return Source(
            name=name,
            path=None if str(request.path) == STDIN else request.path,
            values=values,
            command=command,
            run=request.run,
            devices=request.devices,
            total_steps=request.total_steps,
        )

    text = request.text if request.text is not None else _text(request.path)
    suffix = request.path.suffix.lower()
    if suffix == ".json":
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name}:{error.lineno}: not JSON: {error.msg}") from None
        return source(_mapping(values, name))
    if suffix not in (".yaml", ".yml"):
        command = find_command(text, name, source({}).path)
        if command is not None:
            return source(command.values, command)
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
    return source(values)


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


def _system(request: ImportRequest, source: Source) -> tuple[str, str]:
    requested, name, command = request.system, source.name, source.command
    importers = _importers()
    if requested is not None:
        importers[requested] = find(Importer, requested)
    keys_of = {system: importers[system].own_keys(source.values) for system in importers}
    if command is not None:
        recognized: str | None = command.system
        by = f"the program {command.program}"
    else:
        recognized = _system_of_keys(importers, keys_of)
        what = "sections" if recognized and importers[recognized].is_sure else "keys"
        by = f"its {what} " + ", ".join(keys_of[recognized][:3]) if recognized else ""
    if requested is None:
        if recognized is None:
            titles = ", ".join(importer.title for importer in importers.values())
            raise ConfigError(f"{name}: none of its keys tells where it is from ({titles}): --from")
        return recognized, f"read as {importers[recognized].title}: {by}"
    is_none = command is None and not keys_of[requested]
    if recognized is not None and recognized != requested and (command is not None or is_none):
        raise ConfigError(
            f"{name} is not of {importers[requested].title}: {by} {'are' if ',' in by else 'is'} "
            f"of {importers[recognized].title}; --from {recognized}, or leave it out"
        )
    if is_none:
        raise ConfigError(f"{name}: no key of {importers[requested].title} is in it")
    return requested, ""


def _system_of_keys(
    importers: Mapping[str, Importer], keys_of: Mapping[str, Sequence[str]]
) -> str | None:
    """Return the system that knows the most keys; None if there is none, or several."""
    if sure := [system for system in keys_of if keys_of[system] and importers[system].is_sure]:
        return sure[0]
    most = max(map(len, keys_of.values()))
    best = [system for system, keys in keys_of.items() if len(keys) == most]
    return best[0] if most and len(best) == 1 else None
