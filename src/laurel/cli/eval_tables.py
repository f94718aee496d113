"""Tables of evaluations: the figures of one, and two side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from laurel.observe.console import shorten_middle, visible
from laurel.observe.counts import counted, counted_that

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.cli.eval_results import Evaluation
    from laurel.evaluation.measured import Figure

_LONGEST_NAME = 40


def print_evaluation(console: Console, evaluation: Evaluation) -> None:
    """Subsets, sections and the final figure, each beside what length alone would have."""
    measured = evaluation.measured
    table = new_table(f"{evaluation.title}: {evaluation.model}")
    table.add_column("", no_wrap=True)
    columns = ["score", "longer wins", "rows", "failed"]
    if evaluation.by_contract is not None:
        columns.insert(1, "by contract")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    sections = [figure for figure in measured.sections if not figure.is_aside]
    asides = [figure for figure in measured.sections if figure.is_aside]
    for figures in (measured.subsets, sections, (measured.final,), asides):
        for place, figure in enumerate(figures, start=1):
            _add(table, evaluation, figure, ends=place == len(figures))
    console.print(table)
    for note in measured.notes:
        console.print(Text(f"note    {visible(note)}"), soft_wrap=True)
    if evaluation.num_truncated:
        console.print(
            f"note    {counted_that(evaluation.num_truncated, 'conversation', 'were')} cut to fit"
        )
    rate = evaluation.num_completions / max(evaluation.seconds, 1e-9)
    console.print(
        f"scored  {counted(evaluation.num_completions, 'completion')} in "
        f"{evaluation.seconds:.1f} s, loading included ({rate:,.0f}/s)"
    )


def print_compatibility(console: Console, told: Mapping[str, Any], *, num_rows: int) -> None:
    """In how many rows another program's tokens are not those of the scoring contract, and why."""
    console.print(
        f"format  {told['program']}, {told['max_length']:,} tokens, cut on the "
        f"{told['truncation_side']}: other tokens than by the scoring contract in "
        f"{told['num_rows']:,} of {counted(num_rows, 'row')} "
        f"({counted(told['num_completions'], 'answer')}); the model reads others in "
        f"{told['num_rows_read_differently']:,} ({told['num_completions_read_differently']:,})",
        soft_wrap=True,
    )
    for reason, found in told["reasons"].items():
        counts = (
            f"{counted(found['num_rows'], 'row')} ({counted(found['num_completions'], 'answer')})"
        )
        console.print(f"        {reason}: {counts}", soft_wrap=True)


def print_matrix(
    console: Console, matrix: Sequence[Sequence[float]] | None, styles: Sequence[str]
) -> None:
    """How often the right answer of a style (line) beats the wrong one of a style (column)."""
    if matrix is None:
        return
    table = new_table("right answer (line) against wrong answer (column), by style")
    table.add_column("", no_wrap=True)
    for style in styles:
        table.add_column(style, justify="right", no_wrap=True)
    for style, row in zip(styles, matrix, strict=True):
        table.add_row(style, *(share_text(value) for value in row))
    console.print(table)


def new_table(title: str) -> Table:
    """In the manner of `observe.console`."""
    return Table(title=Text(visible(title)), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def name_text(name: str) -> Text:
    """A name that came from a file, short enough for a line."""
    return Text(shorten_middle(name, _LONGEST_NAME))


def share_text(value: float | None) -> str:
    """Four decimals; nothing was there to take it over: `absent`."""
    return "absent" if value is None else f"{value:.4f}"


def _add(table: Table, evaluation: Evaluation, figure: Figure, *, ends: bool) -> None:
    by_contract = []
    if evaluation.by_contract is not None:
        by_contract.append(share_text(evaluation.under_contract(figure)))
    table.add_row(
        name_text(figure.name),
        share_text(figure.value),
        *by_contract,
        share_text(evaluation.beside(figure)),
        f"{figure.num_rows:,}",
        f"{figure.num_failures:,}" if figure.num_failures else "",
        end_section=ends,
    )
