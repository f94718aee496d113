"""Runs `laurel config import`: prints what became of each key, and writes the configuration."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from laurel.config.load import entry, literal
from laurel.extensions.importing.rules import Imported, KeyOutcome, is_secret, shown
from laurel.extensions.importing.sources import (
    STDIN,
    ImportReport,
    ImportRequest,
    import_configuration,
)
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
            for why in dict.fromkeys(outcome.why for outcome in entries):
                keys = ", ".join(key_text(outcome) for outcome in entries if outcome.why == why)
                yield f"  {keys}: {why}"
        elif status == "not carried":
            yield from (
                f"  {key_text(outcome)}: {' '.join(outcome.why.split())}" for outcome in entries
            )
        else:
            for outcome in entries:
                key = key_text(outcome) if outcome.is_said else outcome.key
                to = ", ".join(f"{ours}={shown(ours, value)}" for ours, value in outcome.to.items())
                yield f"  {key}" if list(outcome.to) == [outcome.key] else f"  {key} -> {to}"
                if outcome.why:
                    yield f"      {outcome.why}"
    if output is not None:
        yield f"wrote {output}; run it: laurel {imported.run} --config {output}"


def import_facts(report: ImportReport, output: Path | None) -> dict[str, Any]:
    """Return the JSON-compatible values that `laurel config import --json` prints."""
    imported = report.imported

    def facts(status: str) -> list[dict[str, Any]]:
        rows = []
        for outcome in imported.with_status(status):
            value = "(not shown)" if is_secret(outcome.key) and outcome.value else outcome.value
            fact: dict[str, Any] = {"key": outcome.key, "value": value}
            fact |= {"to": outcome.to} if outcome.to else {}
            fact |= {"why": outcome.why} if outcome.why else {}
            rows.append(fact)
        return rows

    return {
        "from": report.system,
        "system": imported.system,
        "for": imported.run,
        "recognized_by": report.by or None,
        "carried": facts("carried"),
        "defaults": facts("default"),
        "not_needed": facts("not needed"),
        "not_carried": facts("not carried"),
        "configuration": dict(imported.values),
        "written": None if output is None else str(output),
    }


_WIDTH = 100


def to_text(imported: Imported, *, source: str, output: str) -> str:
    """Return an imported configuration as YAML for `laurel rm|sft|grpo --config`."""
    return "".join((*_header(imported, source, output), "\n", *_block(imported, _nested(imported))))


def _header(imported: Imported, source: str, output: str) -> Iterator[str]:
    yield f"# From {imported.system} ({source}), written by laurel config import.\n"
    yield f"# Run it: laurel {imported.run} --config {output}\n"
    lost = imported.with_status("not carried")
    if not lost:
        yield "# Everything was carried or is not needed.\n"
        return
    yield f"#\n# Not carried ({len(lost)}):\n"
    for outcome in lost:
        # What a source holds may have line breaks, which would end the comment.
        flat = " ".join(f"{key_text(outcome)}: {outcome.why}".split())
        for line in textwrap.wrap(
            flat,
            _WIDTH,
            initial_indent="#   ",
            subsequent_indent="#     ",
            break_on_hyphens=False,
            break_long_words=False,
        ):
            yield line + "\n"


def key_text(outcome: KeyOutcome) -> str:
    """Return `key=value` as the source has it, or a note that the source leaves the key out."""
    if not outcome.is_known:
        return outcome.key
    if not outcome.is_said:
        return (
            f"{outcome.key} (left out)"
            if outcome.value is None
            else (f"{outcome.key} (left out: {shown(outcome.key, outcome.value)})")
        )
    return f"{outcome.key}={shown(outcome.key, outcome.value)}"


def _nested(imported: Imported) -> dict[str, Any]:
    """Nest dotted keys; each leaf is a tuple of the dotted key and its value."""
    tree: dict[str, Any] = {}
    for dotted, value in imported.values.items():
        level = tree
        *blocks, last = dotted.split(".")
        for block in blocks:
            level = level.setdefault(block, {})
        level[last] = (dotted, value)
    order = list(type(imported.config).model_fields)
    return dict(sorted(tree.items(), key=lambda item: order.index(item[0])))


def _block(imported: Imported, tree: Mapping[str, Any], indent: int = 0) -> Iterator[str]:
    margin = "  " * indent
    for name, child in tree.items():
        if isinstance(child, dict):
            yield f"{margin}{name}:\n"
            yield from _block(imported, child, indent + 1)
            continue
        dotted, value = child
        text = entry(name, value if imported.keeps_references else literal(value))
        about = f"  # {imported.origins[dotted]}" if imported.origins[dotted] else ""
        lines = text.rstrip("\n").split("\n")
        if len(lines) == 1:
            yield f"{margin}{lines[0]}{about}\n"
        else:
            yield f"{margin}{lines[0]}{'' if '|' in lines[0] else about}\n"
            yield from (f"{margin}{line}\n" for line in lines[1:])
