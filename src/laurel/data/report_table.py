"""How a data report looks in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from laurel.observe.counts import counted

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from laurel.data.report import DataReport, LeftOut, LengthSummary, RowReport

_WIDTH = 80
_LABEL = 24
_NARROW = 60
"""Below it, half of the width is for labels, and notes have lines of their own."""
_NOTE = "note"


def table_of(report: DataReport) -> RenderableType:
    """The report's lines: a title, then what each figure is and its value."""
    return lay_out(report, _figures(report))


def lay_out(report: RowReport, figures: Iterable[tuple[str, str]]) -> RenderableType:
    """The rows of any report, then its own figures, each with its label."""
    return _Lines(report, tuple(figures))


class _Lines:
    """A report as wide as there is room for, of which nothing is cut off."""

    def __init__(self, report: RowReport, figures: tuple[tuple[str, str], ...]) -> None:
        self._report = report
        self._figures = figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report, width = self._report, min(_WIDTH, options.max_width)
        yield Text(f"Data '{report.name}'", style="bold")
        about = ", ".join(part for part in (report.dataset_class, report.origin) if part)
        if about:
            yield Text(about, style="dim", overflow="fold")
        is_narrow = width < _NARROW
        table = _table(width, width // 2 - 2 if is_narrow else _LABEL)
        for label, value in (*_rows(report), *self._figures):
            # Text, not str: a source such as name[17] must not be taken for markup.
            table.add_row(Text(label), Text(value))
        # Sentences have little room beside long labels.
        notes = _table(width, len(_NOTE)) if is_narrow else table
        for note in report.notes:
            notes.add_row(Text(_NOTE, style="yellow"), Text(note))
        yield table
        if is_narrow and report.notes:
            yield notes


def _table(width: int, label_width: int) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), width=width)
    table.add_column(ratio=None, width=label_width, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    return table


def _rows(report: RowReport) -> Iterator[tuple[str, str]]:
    yield "rows read", f"{report.num_read:,}"
    yield "rows kept", f"{report.num_kept:,}"
    yield "rows left out", f"{report.num_dropped:,}"
    for reason, left_out in report.dropped.items():
        yield f"  {reason}", f"{left_out.count:,}  ({_examples(left_out, report.origin)})"
        for kind, count in left_out.kinds.most_common():
            yield "", f"  {count:,} x {kind}"


def _figures(report: DataReport) -> Iterator[tuple[str, str]]:
    figures = report.figures
    if not figures.num_completions:
        return
    yield "different prompts", f"{report.num_prompts:,}"
    yield "answers per row", _distribution(dict(sorted(figures.num_completions.items())))
    if report.longer_wins_share is not None:
        decided = figures.num_pairs - figures.num_tied_pairs
        yield "longer answer wins", f"{report.longer_wins_share:.1%} of {counted(decided, 'pair')}"
    if report.tied_pairs_share is not None:
        pairs = counted(figures.num_pairs, "pair")
        yield "tied pairs", f"{report.tied_pairs_share:.1%} of {pairs}"
    if report.characters is not None:
        yield "length in characters", length_line(report.characters)
    if report.tokens is not None:
        yield "length in tokens", length_line(report.tokens)
    if report.num_truncated or report.tokens is not None:
        total = len(figures.characters)
        yield "cut to fit", f"{report.num_truncated:,} of {counted(total, 'conversation')}"


def _examples(left_out: LeftOut, origin: str) -> str:
    """The first sources; only their lines where all come from the one file of the report."""
    more = ", ..." if left_out.count > len(left_out.examples) else ""
    places = [source.removeprefix(f"{origin}:") for source in left_out.examples]
    if all(place.isdecimal() for place in places):
        return f"line{'s' if left_out.count > 1 else ''} {', '.join(places)}{more}"
    return ", ".join(left_out.examples) + more


def _distribution(counts: dict[int, int]) -> str:
    if len(counts) == 1:
        return f"{next(iter(counts))}"
    shown = [f"{size} ({counted(count, 'row')})" for size, count in list(counts.items())[:6]]
    return ", ".join(shown) + (", ..." if len(counts) > 6 else "")


def length_line(lengths: LengthSummary) -> str:
    """A summary in one line."""
    return (
        f"median {lengths.median:,.0f}, mean {lengths.mean:,.0f}, 95% under {lengths.p95:,.0f}, "
        f"from {lengths.minimum:,} to {lengths.maximum:,}"
    )
