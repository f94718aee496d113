"""Runs `laurel config import`: prints what became of each key, and writes the configuration."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from laurel.config.importing.rules import is_secret, shown
from laurel.config.importing.sources import (
    STDIN,
    TITLES,
    ImportReport,
    ImportRequest,
    import_configuration,
)
from laurel.config.importing.text import said, to_text
from laurel.observe.files import check_output, replace_file
from laurel.observe.json_output import write_json

_LISTS = (
    ("carried", "carried"),
    ("default", "written, because its default there differs from Laurel's"),
    ("not needed", "not needed"),
    ("not carried", "not carried"),
)


def run_import(request: ImportRequest, *, output: Path | None, as_json: bool) -> None:
    """Import a configuration, print what became of each key, and write the result.

    Without `output`, the configuration goes to standard output and the lists to standard error.

    Raises:
        ConfigError: The source cannot be imported, as in `import_configuration`.
        DataError: The output cannot be written.
    """
    source = str(request.path)
    if output is not None:
        check_output(output, read_from=source)
    if source == STDIN:
        request = replace(request, text=sys.stdin.read())
    report = import_configuration(request)
    name = "stdin" if source == STDIN else request.path.name
    text = to_text(report.imported, source=name, output=str(output or "FILE"))
    if output is not None:
        with replace_file(output) as file:
            file.write(text)
    if as_json:
        write_json(import_facts(report, output))
        return
    lists = "".join(f"{line}\n" for line in as_lines(report, output))
    if output is None:
        sys.stderr.write(lists)
        sys.stdout.write(text)
    else:
        sys.stdout.write(lists)


def as_lines(report: ImportReport, output: Path | None) -> Iterator[str]:
    """Yield the text report of an import: what became of every key of the source."""
    imported = report.imported
    if report.by:
        yield report.by
    for status, heading in _LISTS:
        entries = imported.with_status(status)
        if not entries and status != "not carried":
            continue
        yield f"{heading} ({len(entries)})"
        if status == "not needed":
            for why in dict.fromkeys(one.why for one in entries):
                keys = ", ".join(said(one) for one in entries if one.why == why)
                yield f"  {keys}: {why}"
        elif status == "not carried":
            yield from (f"  {said(one)}: {' '.join(one.why.split())}" for one in entries)
        else:
            for one in entries:
                key = said(one) if one.is_said else one.key
                to = ", ".join(f"{ours}={shown(ours, value)}" for ours, value in one.to.items())
                yield f"  {key}" if list(one.to) == [one.key] else f"  {key} -> {to}"
                if one.why:
                    yield f"      {one.why}"
    if output is not None:
        yield f"wrote {output}; run it: laurel {imported.run} --config {output}"


def import_facts(report: ImportReport, output: Path | None) -> dict[str, Any]:
    """Return the JSON-compatible values that `laurel config import --json` prints."""
    imported = report.imported

    def facts(status: str) -> list[dict[str, Any]]:
        found = []
        for one in imported.with_status(status):
            value = "(not shown)" if is_secret(one.key) and one.value else one.value
            fact: dict[str, Any] = {"key": one.key, "value": value}
            fact |= {"to": one.to} if one.to else {}
            fact |= {"why": one.why} if one.why else {}
            found.append(fact)
        return found

    return {
        "from": report.system,
        "system": TITLES[report.system],
        "for": imported.run,
        "recognized_by": report.by or None,
        "carried": facts("carried"),
        "defaults": facts("default"),
        "not_needed": facts("not needed"),
        "not_carried": facts("not carried"),
        "configuration": dict(imported.values),
        "written": None if output is None else str(output),
    }
