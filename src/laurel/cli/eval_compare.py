"""Two results of the same evaluation side by side, and whether they differ by more than chance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laurel.cli.eval_results import Result, read_result
from laurel.cli.eval_tables import name_text, new_table, share_text
from laurel.cli.json_output import write_json
from laurel.errors import ConfigError
from laurel.evaluation.significance import PairedTest, compare
from laurel.observe.console import make_console, visible
from laurel.observe.counts import counted_that

ALL = "all rows"


def run_compare(benchmark: str, first_path: Path, second_path: Path, *, as_json: bool) -> int:
    """Show two results of an evaluation.

    Each is any file that `--output` wrote. The rows that both have a verdict on are compared one by
    one with the exact test of McNemar, in each subset and over all. Files of accuracies alone are
    shown without that.

    Returns:
        The exit code, 0.

    Raises:
        UserError: A file that holds no result, or one of another evaluation.
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
    tests = _tests(first, second)
    names = [*dict.fromkeys([*first.subsets, *second.subsets])]
    sections = [*dict.fromkeys([*first.sections, *second.sections])]
    if as_json:
        write_json(_as_json(first, second, names, sections, tests))
    else:
        _print(first, second, names, sections, tests)
    return 0


def _tests(first: Result, second: Result) -> Mapping[str, PairedTest]:
    """Of each subset and of all rows; nothing where the rows of one are not there."""
    if first.credits is None or second.credits is None:
        return {}
    by_subset: dict[str, list[str]] = {}
    for row_id, subset in first.subset_of.items():
        if subset is not None:
            by_subset.setdefault(subset, []).append(row_id)
    tests = {
        subset: compare(first.credits, second.credits, ids=ids) for subset, ids in by_subset.items()
    }
    return {**tests, ALL: compare(first.credits, second.credits)}


def _print(
    first: Result,
    second: Result,
    names: list[str],
    sections: list[str],
    tests: Mapping[str, PairedTest],
) -> None:
    console = make_console()
    for letter, result in (("A", first), ("B", second)):
        console.print(visible(f"{letter}: {result.model} ({result.path})"), soft_wrap=True)
    table = new_table("")
    table.add_column("", no_wrap=True)
    for name in ("A", "B", "B - A", "only A", "only B", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for group, left, right in (
        (names, first.subsets, second.subsets),
        (sections, first.sections, second.sections),
    ):
        for place, name in enumerate(group, start=1):
            one, other = left.get(name), right.get(name)
            table.add_row(
                name_text(name), share_text(one), share_text(other), _difference(one, other),
                *_test_cells(tests.get(name)), end_section=place == len(group),
            )  # fmt: skip
    if ALL in tests:
        table.add_row(ALL, "", "", "", *_test_cells(tests[ALL]))
    console.print(table)
    if not tests:
        without = [result for result in (first, second) if result.credits is None]
        console.print(
            "note    no test of significance: the rows' own scores are not beside "
            + " and ".join(visible(str(result.path)) for result in without),
            soft_wrap=True,
        )
        return
    test = tests[ALL]
    console.print(
        f"rows    {counted_that(test.num_rows, 'row', 'have')} a verdict in both; only A / only "
        "B: rows on which that one is better; p: exact McNemar, two-sided",
        soft_wrap=True,
    )
    absent = _num_unpaired(first, second)
    if absent:
        console.print(
            f"note    {counted_that(absent, 'row', 'stand')} in one of the two alone, not compared"
        )


def _num_unpaired(first: Result, second: Result) -> int:
    ids = [set(result.credits or ()) for result in (first, second)]
    return len(ids[0] ^ ids[1])


def _difference(one: float | None, other: float | None) -> str:
    return "" if one is None or other is None else f"{other - one:+.4f}"


def _test_cells(test: PairedTest | None) -> tuple[str, str, str]:
    if test is None:
        return ("", "", "")
    return (f"{test.num_first_better:,}", f"{test.num_second_better:,}", f"{test.p_value:.3g}")


def _as_json(
    first: Result,
    second: Result,
    names: list[str],
    sections: list[str],
    tests: Mapping[str, PairedTest],
) -> dict[str, Any]:
    def entry(name: str, one: float | None, other: float | None) -> dict[str, Any]:
        return {"name": name, "a": one, "b": other, **_test_entry(tests.get(name))}

    return {
        "a": {"file": str(first.path), "model": first.model},
        "b": {"file": str(second.path), "model": second.model},
        "subsets": [entry(n, first.subsets.get(n), second.subsets.get(n)) for n in names],
        "sections": [entry(n, first.sections.get(n), second.sections.get(n)) for n in sections],
        "all_rows": _test_entry(tests.get(ALL)) or None,
    }


def _test_entry(test: PairedTest | None) -> dict[str, Any]:
    if test is None:
        return {}
    return {
        "num_rows": test.num_rows,
        "only_a": test.num_first_better,
        "only_b": test.num_second_better,
        "p": test.p_value,
    }
