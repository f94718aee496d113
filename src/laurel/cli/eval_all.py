"""`laurel eval all`: every benchmark whose rows are at hand, one after the other, and a summary."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laurel import __version__
from laurel.cli.eval_request import Request
from laurel.cli.eval_run import (
    check_request,
    evaluate,
    say_failures,
    show_evaluation,
    write_evaluation,
)
from laurel.cli.eval_scoring import open_scorer
from laurel.cli.eval_tables import new_table, share_text
from laurel.cli.json_output import write_json
from laurel.cli.output_file import replace_file
from laurel.config.benchmarks import BenchmarkName
from laurel.data.benchmark_columns import ON_HUB, benchmark_in
from laurel.errors import DataError, key_of
from laurel.evaluation.benchmarks import BENCHMARKS
from laurel.observe.console import make_console, message_console, visible
from laurel.observe.counts import counted

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.cli.eval_results import Evaluation
    from laurel.data.benchmark_rows import BenchmarkRow

FILE_NAME = "all-report.json"


def run_all(request: Request, *, hub: bool) -> int:
    """Evaluate a model on every benchmark whose rows are named, and on the hub's where asked.

    All rows are read before the model is loaded, which is done once.

    Args:
        request: Of all of them; its data may be rows of different benchmarks.
        hub: Read those that have a place of their own, and no rows here, from the hub.

    Returns:
        The exit code: 1 where a completion has no score, else 0.

    Raises:
        UserError: A model, a row, a file or a setting that cannot be used.
    """
    console = message_console()
    check_request(request)
    if not request.data and not hub:
        raise DataError(
            f"no rows are named; add {key_of('--data')} with files of any of the benchmarks "
            "(may be repeated), "
            "or --hub to read each benchmark from its own place on the hub"
        )
    told: list[str] = []
    with console.status("reading the rows"):
        asked = _asked(request, hub=hub)
        rows = {name: BENCHMARKS[name].read(one, told.append) for name, one in asked.items()}
    for said in told:
        console.print(f"note    {visible(said)}", soft_wrap=True)
    absent: list[BenchmarkName] = [name for name in BENCHMARKS if name not in asked]
    evaluations = _evaluated(asked, rows, request, console)
    if request.as_json:
        write_json(_report(evaluations, request, absent))
    else:
        for evaluation in evaluations:
            show_evaluation(evaluation)
        _print_summary(evaluations, absent)
    if request.output is not None:
        path = _write(request.output, _report(evaluations, request, absent))
        console.print(f"written to {path}", soft_wrap=True)
    for evaluation in evaluations:
        say_failures(evaluation, console)
    return 1 if any(evaluation.failures for evaluation in evaluations) else 0


def _asked(request: Request, *, hub: bool) -> dict[BenchmarkName, Request]:
    """What is asked of each benchmark that there are rows of, in the order of benchmarks."""
    paths: dict[BenchmarkName, list[str]] = {}
    for path in request.data:
        paths.setdefault(benchmark_in(path, split=request.split), []).append(path)
    asked = {}
    for name in BENCHMARKS:
        if name in paths:
            asked[name] = replace(request, data=tuple(paths[name]))
        elif hub and name in ON_HUB:
            asked[name] = replace(request, data=(), split=None)
    return asked


def _evaluated(
    asked: dict[BenchmarkName, Request],
    rows: dict[BenchmarkName, list[BenchmarkRow]],
    request: Request,
    console: Console,
) -> list[Evaluation]:
    evaluations = []
    started = time.monotonic()
    with open_scorer(request.scorer, console) as scorer:
        for name, one in asked.items():
            console.print(f"scoring {BENCHMARKS[name].title}: {counted(len(rows[name]), 'row')}")
            evaluation = evaluate(name, rows[name], one, scorer, started=started)
            write_evaluation(evaluation, one, console)
            evaluations.append(evaluation)
            started = time.monotonic()
    return evaluations


def _print_summary(evaluations: Sequence[Evaluation], absent: Sequence[BenchmarkName]) -> None:
    console = make_console()
    table = new_table(f"all: {evaluations[0].model}")
    table.add_column("", no_wrap=True)
    for name in ("score", "longer wins", "rows", "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in evaluations:
        final = one.measured.final
        table.add_row(
            one.title,
            share_text(final.value),
            share_text(one.beside(final)),
            f"{final.num_rows:,}",
            f"{final.num_failures:,}" if final.num_failures else "",
        )
    console.print(table)
    if absent:
        titles = ", ".join(f"{BENCHMARKS[name].title} ({name})" for name in absent)
        console.print(f"absent  {visible(titles)}: no rows of these", soft_wrap=True)


def _report(
    evaluations: Sequence[Evaluation], request: Request, absent: Sequence[BenchmarkName]
) -> dict[str, Any]:
    return {
        "model": request.scorer.model,
        "laurel": __version__,
        "data": list(request.data),
        "summary": [
            {
                "benchmark": one.benchmark,
                "title": one.title,
                "score": one.measured.final.value,
                "longer_wins": one.beside(one.measured.final),
                "num_rows": one.measured.final.num_rows,
                "num_failures": one.measured.final.num_failures,
            }
            for one in evaluations
        ],
        "absent": list(absent),
        "benchmarks": {one.benchmark: one.report() for one in evaluations},
    }


def _write(directory: Path, report: dict[str, Any]) -> Path:
    path = directory.expanduser() / FILE_NAME
    with replace_file(path) as file:
        json.dump(report, file, indent=4, allow_nan=False)
        file.write("\n")
    return path
