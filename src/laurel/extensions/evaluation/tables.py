"""Prints the results of evaluations as tables, and compares two stored results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from laurel.errors import ConfigError, counted, counted_that
from laurel.extensions.evaluation.comparisons import paired_test
from laurel.extensions.evaluation.results import StoredResult, read_result
from laurel.observe.console import (
    make_console,
    new_table,
    print_table,
    shorten_middle,
    visible,
)
from laurel.observe.json_output import write_json
from laurel.observe.report.diagnostics import diagnostic_tables

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.evaluation.results import Evaluation
    from laurel.evaluation.statistics import Figure


_LONGEST_NAME = 40


def print_evaluation(console: Console, evaluation: Evaluation) -> None:
    """Print a table of subsets, sections and the final score, each beside the length baseline."""
    measured = evaluation.measured
    contract = [] if evaluation.by_contract is None else ["by contract"]
    columns = ("", "score", *contract, evaluation.baseline_name, "rows", "failed")
    table = new_table(f"{evaluation.title}: {evaluation.model}", *columns)
    sections = [figure for figure in measured.sections if not figure.is_aside]
    asides = [figure for figure in measured.sections if figure.is_aside]
    for figures in (measured.subsets, sections, (measured.final,), asides):
        for index, figure in enumerate(figures, start=1):
            _add(table, evaluation, figure, ends=index == len(figures))
    print_table(console, table)
    for note in measured.notes:
        console.print(Text(f"note    {visible(note)}"), soft_wrap=True)
    if evaluation.num_truncated:
        console.print(
            f"note    {counted_that(evaluation.num_truncated, 'conversation', 'were')} cut to fit"
        )
    rate = evaluation.num_completions / max(evaluation.seconds, 1e-9)
    console.print(
        f"scored  {counted(evaluation.num_completions, 'completion')} in "
        f"{evaluation.seconds:.1f} s, loading included ({rate:,.1f}/s)"
    )


def print_compatibility(console: Console, facts: Mapping[str, Any], *, num_rows: int) -> None:
    """Print in how many rows another program's tokens differ from those of the contract.

    The reasons for the differences are printed as well.
    """
    console.print(
        f"format  {facts['program']}, {facts['max_length']:,} tokens, cut on the "
        f"{facts['truncation_side']}: other tokens than by the scoring contract in "
        f"{facts['num_rows']:,} of {counted(num_rows, 'row')} "
        f"({counted(facts['num_completions'], 'answer')}); the model reads others in "
        f"{facts['num_rows_read_differently']:,} ({facts['num_completions_read_differently']:,})",
        soft_wrap=True,
    )
    for reason, rows in facts["reasons"].items():
        shown = f"{counted(rows['num_rows'], 'row')} ({counted(rows['num_completions'], 'answer')})"
        console.print(f"        {reason}: {shown}", soft_wrap=True)


def print_judge(console: Console, facts: Mapping[str, Any]) -> None:
    """Print how often a judge's verdict changed with the position, and what else it reported."""
    words = {
        "position_flips": "verdicts that change with the position",
        "word_mass": "probability of the two words",
        "unreadable": "replies without a score, of each question",
        "spread": "standard deviation of the samples",
        "failed_comparisons": "comparisons that failed, where some did",
    }
    figures = [f"{text} {facts[name]:.3f}" for name, text in words.items() if name in facts]
    if figures:
        console.print(f"judge   {'; '.join(figures)}", soft_wrap=True)
    if facts.get("position_flips", 0.0) > 0.5:
        console.print(
            "warning: where most verdicts change with the position, the judge prefers a position "
            "to an answer, and its accuracy says nothing of the answers",
            soft_wrap=True,
        )


def print_matrix(
    console: Console, matrix: Sequence[Sequence[float]] | None, styles: Sequence[str]
) -> None:
    """Print the share of rows in which one style's correct answer beats another's wrong answer.

    Lines of the table are the styles of correct answers, columns those of wrong answers.
    """
    if matrix is None:
        return
    table = new_table("right answer (line) against wrong answer (column), by style", "", *styles)
    for style, row in zip(styles, matrix, strict=True):
        table.add_row(style, *(share_text(value) for value in row))
    print_table(console, table)


def name_text(name: str) -> Text:
    """Return a name that comes from a file, shortened to fit a line of a table."""
    return Text(shorten_middle(name, _LONGEST_NAME))


def share_text(value: float | None) -> str:
    """Format a share with four decimals; None, which means that there were no rows, as `absent`."""
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


def print_diagnostics(console: Console, report: Mapping[str, Any]) -> None:
    """Print a report of `diagnostics_report` as tables."""
    failed = f", {report['num_failures']:,} of them without a verdict"
    console.print(counted(report["num_pairs"], "pair") + (failed if report["num_failures"] else ""))
    for reason, count in report.get("failures", {}).items():
        console.print(Text(f"  {count:,} x {visible(reason)}", style="yellow"))
    for section in diagnostic_tables(report):
        table = new_table(section.title, *section.columns)
        for index, (first, *others) in enumerate(section.rows):
            style = "bold" if index in section.headings else ""
            table.add_row(Text(first, style=style), *map(Text, others))
        print_table(console, table)


ALL = "all rows"


def run_compare(benchmark: str, first_path: Path, second_path: Path, *, as_json: bool) -> int:
    """Print two stored results of the same evaluation side by side.

    Each path is any of the files that `--output` wrote. Rows with an outcome in both results are
    compared by McNemar's exact test, in each subset and over all. Without the outcomes of rows, as
    in files of accuracies alone, the test is left out.

    Raises:
        UserError: A file holds no result, or the two are of different evaluations.
    """
    first, second = read_result(first_path), read_result(second_path)
    for result in (first, second):
        if result.benchmark not in (None, benchmark) or (
            result.benchmark is None and benchmark != "reward-bench"
        ):
            raise ConfigError(
                f"{result.path} is a result of laurel eval {result.benchmark or 'reward-bench'}, "
                f"and not of laurel eval {benchmark}"
            )
    compared = _compared(first, second)
    if as_json:
        write_json(compared)
    else:
        _print(first, second, compared)
    return 0


def _compared(first: StoredResult, second: StoredResult) -> dict[str, Any]:
    tests = _tests(first, second)

    def entries(
        values: Mapping[str, float | None], other_values: Mapping[str, float | None]
    ) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "a": values.get(name),
                "b": other_values.get(name),
                **tests.get(name, {}),
            }
            for name in dict.fromkeys([*values, *other_values])
        ]

    return {
        "a": {"file": str(first.path), "model": first.model},
        "b": {"file": str(second.path), "model": second.model},
        "subsets": entries(first.subsets, second.subsets),
        "sections": entries(first.sections, second.sections),
        "all_rows": tests.get(ALL),
    }


def _tests(first: StoredResult, second: StoredResult) -> Mapping[str, dict[str, Any]]:
    """Test the difference in each subset and over all rows; empty without row outcomes."""
    if first.credits is None or second.credits is None:
        return {}
    by_subset: dict[str, list[str]] = {}
    for row_id, subset in first.subset_of.items():
        if subset is not None:
            by_subset.setdefault(subset, []).append(row_id)
    kinds: list[tuple[str, list[str] | None]] = [*by_subset.items(), (ALL, None)]
    tests = {}
    for name, ids in kinds:
        test = paired_test(first.credits, second.credits, ids=ids)
        tests[name] = {
            "num_rows": test.num_rows,
            "only_a": test.num_first_better,
            "only_b": test.num_second_better,
            "p": test.p_value,
        }
    return tests


def _print(first: StoredResult, second: StoredResult, compared: Mapping[str, Any]) -> None:
    console = make_console()
    for letter, result in (("A", first), ("B", second)):
        console.print(visible(f"{letter}: {result.model} ({result.path})"), soft_wrap=True)
    table = new_table("", "", "A", "B", "B - A", "only A", "only B", "p")
    for group in (compared["subsets"], compared["sections"]):
        for index, entry in enumerate(group, start=1):
            a, b = entry["a"], entry["b"]
            table.add_row(
                name_text(entry["name"]),
                share_text(a),
                share_text(b),
                "" if a is None or b is None else f"{b - a:+.4f}",
                *_test_cells(entry),
                end_section=index == len(group),
            )
    test = compared["all_rows"]
    if test is not None:
        table.add_row(ALL, "", "", "", *_test_cells(test))
    print_table(console, table)
    if test is None:
        without = [result for result in (first, second) if result.credits is None]
        console.print(
            "note    no test of significance: the rows' own scores are not beside "
            + " and ".join(visible(str(result.path)) for result in without),
            soft_wrap=True,
        )
        return
    console.print(
        f"rows    {counted_that(test['num_rows'], 'row', 'have')} a verdict in both; only A / only "
        "B: rows on which that one is better; p: exact McNemar, two-sided",
        soft_wrap=True,
    )
    absent = len({*(first.credits or ())} ^ {*(second.credits or ())})
    if absent:
        console.print(
            f"note    {counted_that(absent, 'row', 'stand')} in one of the two alone, not compared"
        )


def _test_cells(entry: Mapping[str, Any]) -> tuple[str, ...]:
    if "p" not in entry:
        return ("", "", "")
    return (f"{entry['only_a']:,}", f"{entry['only_b']:,}", f"{entry['p']:.3g}")
