"""Lays out the reports of `laurel eval` as tables of the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from laurel.errors import counted
from laurel.observe.console import format_number
from laurel.observe.report.diagnostics import PageTable, diagnostic_tables

_MAX_LIST = 20
"""The maximum number of entries of a list that are shown; the file has all."""


def evaluation_of(name: str, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the template shows of a report of `laurel eval`, read from the file `name`."""
    final = report.get("final") or {}
    parts = [
        counted(report.get("num_rows", 0), "row"),
        f"model {report.get('model', 'unknown')}",
        name,
    ]
    if report.get("num_failures"):
        parts.insert(1, counted(report["num_failures"], "failure"))
    value = final.get("value")
    said = f": {percent_text(value)}" if value is not None else ""
    tables = [_figures(report, final)]
    diagnostics = report.get("diagnostics")
    if isinstance(diagnostics, Mapping):
        tables += diagnostic_tables(diagnostics)
        tables.append(
            PageTable(title="examples", columns=("", ""), rows=list(_examples(diagnostics)))
        )
    known = {
        "benchmark",
        "model",
        "data",
        "laurel",
        "seconds",
        "num_rows",
        "num_completions",
        "num_truncated",
        "num_failures",
        "first_failure",
        "subsets",
        "sections",
        "final",
        "notes",
        "diagnostics",
    }
    others = list(lines_of({key: value for key, value in report.items() if key not in known}))
    tables.append(PageTable(title="More", columns=("", ""), rows=others))
    return {
        "title": f"{report.get('benchmark', name)}{said}",
        "line": ", ".join(map(str, parts)),
        "notes": [str(note) for note in report.get("notes") or ()],
        "tables": [table for table in tables if table.rows],
    }


def _figures(report: Mapping[str, Any], final: Mapping[str, Any]) -> PageTable:
    entries = [*(report.get("subsets") or ()), *(report.get("sections") or ()), final]
    by_length = "longest step" if report.get("benchmark") == "process-bench" else "longer wins"
    return PageTable(
        title="Figures",
        columns=("", "value", by_length, "rows", "failures"),
        rows=[
            (
                str(entry.get("name", "")),
                percent_text(entry.get("value")),
                percent_text(entry.get("longer_wins")),
                f"{entry.get('num_rows', 0):,}",
                f"{entry.get('num_failures', 0):,}",
            )
            for entry in entries
            if entry
        ],
    )


def _examples(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what stands in no table: reasons of failures, and the rows that repeats name."""
    yield from lines_of({"failures": report.get("failures")})
    for name in ("evaluation_set", "training_set", "leakage"):
        found = report.get(name, {})
        yield from lines_of({name: {k: v for k, v in found.items() if isinstance(v, list)}})


def lines_of(report: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and values of a nested mapping, without empty values."""
    for name, value in report.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from lines_of(value, f"{label}: ")
        elif value not in (None, "", []):
            yield label, readable_value(value)


def readable_value(value: object) -> str:
    """Format a value for a reader."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {readable_value(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        more = f", and {len(value) - _MAX_LIST:,} more" if len(value) > _MAX_LIST else ""
        return ", ".join(map(readable_value, value[:_MAX_LIST])) + more
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return format_number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def percent_text(value: object) -> str:
    """Format a share as a percentage, and any other number as it is."""
    # A value outside of 0 to 1 is not a share.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–"
    return f"{100 * value:.1f}%" if 0 <= value <= 1 else format_number(value)
