"""Reports of `laurel eval` as tables: what was measured, beside baselines, and the diagnostics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laurel.observe.console import format_number
from laurel.observe.counts import counted

_MAX_LIST = 20
"""Entries of a list that are shown; the file has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A small table of texts; the first column names the rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationShown:
    """One report."""

    title: str
    line: str
    notes: Sequence[str]
    tables: Sequence[Table]


def evaluation_of(name: str, report: Mapping[str, Any]) -> EvaluationShown:
    """A report as a page shows it.

    Args:
        name: The file.
        report: What it holds.
    """
    final = report.get("final") or {}
    parts = [
        counted(report.get("num_rows", 0), "row"),
        f"model {report.get('model', 'unknown')}",
        name,
    ]
    if report.get("num_failures"):
        parts.insert(1, counted(report["num_failures"], "failure"))
    value = final.get("value")
    said = f": {_share(value)}" if value is not None else ""
    tables = [_figures(report, final)]
    diagnostics = report.get("diagnostics")
    if isinstance(diagnostics, Mapping):
        tables += diagnostic_tables(diagnostics)
    known = {"benchmark", "model", "data", "laurel", "seconds", "num_rows", "num_completions",
             "num_truncated", "num_failures", "first_failure", "subsets", "sections", "final",
             "notes", "diagnostics"}  # fmt: skip
    others = list(lines_of({key: value for key, value in report.items() if key not in known}))
    tables.append(Table(title="More", columns=("", ""), rows=others))
    return EvaluationShown(
        title=f"{report.get('benchmark', name)}{said}",
        line=", ".join(map(str, parts)),
        notes=[str(note) for note in report.get("notes") or ()],
        tables=[table for table in tables if table.rows],
    )


def _figures(report: Mapping[str, Any], final: Mapping[str, Any]) -> Table:
    entries = [*(report.get("subsets") or ()), *(report.get("sections") or ()), final]
    return Table(
        title="Figures",
        columns=("", "value", "longer wins", "rows", "failures"),
        rows=[
            (
                str(entry.get("name", "")), _share(entry.get("value")),
                _share(entry.get("longer_wins")), f"{entry.get('num_rows', 0):,}",
                f"{entry.get('num_failures', 0):,}",
            )
            for entry in entries if entry
        ],
    )  # fmt: skip


_SLICES = {
    "by_length_difference": "chosen longer by",
    "by_margin": "margin",
    "by_subset": "subset",
    "by_leak": "prompt in training set",
}


def diagnostic_tables(report: Mapping[str, Any]) -> list[Table]:
    """The diagnostics: accuracies in slices, calibration, and everything else by its name."""
    whole = report.get("accuracy") or {}
    names = list(whole.get("baselines") or {})
    controlled = report.get("length_controlled_accuracy") or {}
    slices: list[tuple[str, Mapping[str, Any]]] = [
        ("all", whole),
        ("either as often", controlled),
        ("longer chosen", controlled.get("longer_chosen") or {}),
        ("shorter chosen", controlled.get("shorter_chosen") or {}),
    ]
    for key, title in _SLICES.items():
        slices += [
            (f"{title}: {part.get('name')}", part.get("accuracy") or {})
            for part in report.get(key) or ()
        ]
    accuracies = [
        (
            label, f"{found.get('num_pairs', 0):,}" if "num_pairs" in found else "",
            _share(found.get("value")),
            f"{_share(found.get('low'))} to {_share(found.get('high'))}",
            *(_share((found.get("baselines") or {}).get(name)) for name in names),
        )
        for label, found in slices if found
    ]  # fmt: skip
    bins = [
        (
            f"{_share(row.get('start'))} to {_share(row.get('end'))}",
            f"{row.get('num_pairs', 0):,}", _share(row.get("confidence")),
            _share(row.get("accuracy")),
        )
        for row in (report.get("calibration") or {}).get("rows") or ()
    ]  # fmt: skip
    shown = {"accuracy", "length_controlled_accuracy", *_SLICES}
    others = {key: value for key, value in report.items() if key not in shown}
    if isinstance(others.get("calibration"), Mapping):
        found = others["calibration"]
        others["calibration"] = {key: value for key, value in found.items() if key != "rows"}
    interval = f"{report.get('confidence', 0.95):.0%} interval"
    return [
        Table(title="Accuracy", columns=("", "pairs", "accuracy", interval, *names),
              rows=accuracies),
        Table(title="Reliability", columns=("confidence", "pairs", "mean confidence", "accuracy"),
              rows=bins),
        Table(title="Diagnostics", columns=("", ""), rows=list(lines_of(others))),
    ]  # fmt: skip


def lines_of(report: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A tree of values as names and values, without what is empty."""
    for name, value in report.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from lines_of(value, f"{label}: ")
        elif value not in (None, "", []):
            yield label, plain(value)


def plain(value: object) -> str:
    """A value as people read it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        more = f", and {len(value) - _MAX_LIST:,} more" if len(value) > _MAX_LIST else ""
        return ", ".join(map(plain, value[:_MAX_LIST])) + more
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return format_number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _share(value: object) -> str:
    """A share in percent; what is none as a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–"
    return f"{100 * value:.1f}%" if 0 <= value <= 1 else format_number(value)
