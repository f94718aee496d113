"""Runs `laurel sweep`: shows its trials, and writes the best configuration and a page."""

from __future__ import annotations

import html
import io
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from laurel.errors import counted
from laurel.extensions.sweep.options import SweepOptions
from laurel.extensions.sweep.sweep import BEST, InterruptedSweep, Sweep, TrialOutcome
from laurel.observe.console import (
    format_number,
    make_console,
    message_console,
    new_table,
    print_command,
    print_table,
    visible,
)
from laurel.observe.files import replace_file
from laurel.observe.json_output import write_json
from laurel.observe.progress import ProgressWords, TrainingProgress
from laurel.run.reward_model import rate_note

PAGE = "report.html"
SHOWN_TRIALS = 20
"""The number of trials in the table on the screen; the page has all."""


def run_sweep(options: SweepOptions) -> None:
    """Run the trials that are left, and set the exit code of the process.

    The exit code is 130 after Ctrl-C; the same command goes on where it ended.

    Raises:
        UserError: A setting, a directory or a package cannot be used.
        TrainingError: No trial has a value.
    """
    console = message_console(stderr=options.as_json)
    started = time.monotonic()
    sweep = Sweep(options)
    with ExitStack() as stack:
        sweep.open(stack)
        for warning in sweep.warnings:
            console.print(f"warning: {warning}")
        finished = sweep.outcomes()
        num_runs = max(1, options.num_folds) * options.num_seeds
        console.print(
            f"sweep   {counted(sweep.total, 'trial')} of {counted(num_runs, 'run')} each, "
            f"{'the highest' if sweep.selection.higher_is_better else 'the lowest'} "
            f"{sweep.selection.key} wins; in {options.output}",
            soft_wrap=True,
        )
        if sweep.rate_kept is not None:
            console.print(rate_note(sweep.rate_kept, "as the sweep began"), soft_wrap=True)
        if finished:
            console.print(f"going on after {counted(len(finished), 'finished trial')}")
        progress = TrainingProgress(
            sweep.total, len(finished), console, words=ProgressWords("runs", "trial", "sweeping")
        )
        metric = (sweep.selection.key or "").rpartition("_")[2]

        def show(outcome: TrialOutcome) -> None:
            finished.append(outcome)
            params = ", ".join(f"{key}={_value(value)}" for key, value in outcome.params.items())
            if outcome.failure is not None:
                progress.message(f"trial {outcome.number} failed ({params}): {outcome.failure}")
            else:
                progress.message(
                    f"trial {outcome.number} {outcome.state}  {_mean(outcome)}  {params}",
                    is_routine=True,
                )
            values = {} if outcome.mean is None else {metric: outcome.mean}
            progress.step(len(finished), values, pairs=num_runs, tokens=0)

        try:
            with progress:
                sweep.run(show, partial(progress.message, is_routine=True))
        except (InterruptedSweep, KeyboardInterrupt) as error:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            name = error.args[0] if error.args else "SIGINT"
            print(
                f"stopped by {name} after {counted(len(finished), 'finished trial')}; run it again "
                "to go on",
                file=sys.stderr,
            )
            sys.exit(130 if name == "SIGINT" else 0)
        outcomes = sweep.outcomes()
        best = sweep.best(outcomes)
        path = options.output / BEST
        with replace_file(path) as file:
            file.write(sweep.winner_yaml(best))
        page = options.output / PAGE
        with replace_file(page) as file:
            file.write(sweep_page(sweep, outcomes, best))
    if options.as_json:
        write_json(
            {
                "output": options.output,
                "metric": sweep.selection.key,
                "higher_is_better": sweep.selection.higher_is_better,
                "best": _fields(best),
                "config": path,
                "report": page,
                "num_failed": sum(outcome.state == "failed" for outcome in outcomes),
                "num_pruned": sum(outcome.state == "pruned" for outcome in outcomes),
                "seconds": time.monotonic() - started,
                "trials": [_fields(outcome) for outcome in outcomes],
            }
        )
    else:
        _print_result(sweep, outcomes, best, options.output)


def _print_result(
    sweep: Sweep, outcomes: Sequence[TrialOutcome], best: TrialOutcome, directory: Path
) -> None:
    console, path = make_console(), directory / BEST
    ranked = ranked_trials(outcomes, higher_is_better=sweep.selection.higher_is_better)
    header, rows = table_of(sweep, ranked)
    table = new_table(f"{sweep.selection.key}, best first", *header)
    for row in rows[:SHOWN_TRIALS]:
        table.add_row(*row)
    print_table(console, table)
    for outcome in outcomes:
        if outcome.failure is not None:
            console.print(
                visible(f"failed  trial {outcome.number}: {outcome.failure}"), soft_wrap=True
            )
    console.print(f"best    {path}  (trial {best.number})", soft_wrap=True)
    console.print(f"report  {directory / PAGE}", soft_wrap=True)
    print_command(console, "use it  ", f"laurel rm --config {path}")


def ranked_trials(
    outcomes: Sequence[TrialOutcome], *, higher_is_better: bool
) -> list[TrialOutcome]:
    """Return the trials with the best mean first, and those without one last."""

    def rank(outcome: TrialOutcome) -> tuple[bool, float, int]:
        mean = outcome.mean
        value = 0.0 if mean is None else -mean if higher_is_better else mean
        return mean is None, value, outcome.number

    return sorted(outcomes, key=rank)


def table_of(sweep: Sweep, outcomes: Sequence[TrialOutcome]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of trials."""
    keys = [dimension.key for dimension in sweep.dimensions]
    # The last parts of keys are enough where they differ.
    names = [key.rpartition(".")[2] for key in keys]
    names = names if len({*names}) == len(names) else keys
    rows = [
        [
            str(outcome.number),
            *(_value(outcome.params.get(key)) for key in keys),
            "-" if outcome.mean is None else f"{outcome.mean:.4f}",
            "" if outcome.half_width is None else f"{outcome.half_width:.4f}",
            str(len(outcome.values)),
            outcome.state,
            f"{outcome.seconds:.0f}",
        ]
        for outcome in outcomes
    ]
    return ["trial", *names, "mean", "95 % half width", "runs", "state", "seconds"], rows


def _value(value: str | float | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else format_number(value)


def _mean(outcome: TrialOutcome) -> str:
    if outcome.mean is None:
        return "-"
    half = outcome.half_width
    return f"{outcome.mean:.4f}" + ("" if half is None else f" +- {half:.4f}")


def _fields(outcome: TrialOutcome) -> dict[str, Any]:
    return {**asdict(outcome), "mean": outcome.mean, "half_width": outcome.half_width}


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color-scheme:light dark}table{border-collapse:collapse}td,th{padding:.15rem .7rem;"
    "text-align:right;border-bottom:1px solid #8884}svg{max-width:100%;background:#fff}"
)


def sweep_page(sweep: Sweep, outcomes: Sequence[TrialOutcome], best: TrialOutcome) -> str:
    """Return a page about a sweep: a picture of all trials with their intervals, and a table."""
    higher = sweep.selection.higher_is_better
    ranked = ranked_trials(outcomes, higher_is_better=higher)
    header, rows = table_of(sweep, ranked)

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    failures = "".join(
        f"<li>trial {outcome.number}: {html.escape(outcome.failure)}</li>"
        for outcome in outcomes
        if outcome.failure is not None
    )
    params = ", ".join(f"{key}={_value(value)}" for key, value in best.params.items())
    title = f"Sweep of {', '.join(dimension.key for dimension in sweep.dimensions)}"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>"
        f"<p>Best: trial {best.number}, {html.escape(params)}, with "
        f"{html.escape(sweep.selection.key or '')} {html.escape(_mean(best))}. An interval is that "
        "of the mean over a trial's runs (folds and seeds), 95 %, by Student's t; the best of many "
        "trials is a little too good. Each plot has all trials; the best one is red.</p>"
        f"{picture_of(sweep, ranked)}<table>{line(header, 'th')}"
        f"{''.join(line(row, 'td') for row in rows)}</table>"
        + (f"<h2>Failures</h2><ul>{failures}</ul>" if failures else "")
        + "</html>\n"
    )


def picture_of(sweep: Sweep, ranked: Sequence[TrialOutcome]) -> str:
    """Plot the means over each searched key, with intervals, as an `<svg>` element."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    complete = [outcome for outcome in ranked if outcome.mean is not None]
    number = len(sweep.dimensions)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sweep", "font.size": 9}):
        figure = Figure(figsize=(4.0 * min(number, 3), 3.0 * -(-number // 3)), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        for index, dimension in enumerate(sweep.dimensions, start=1):
            axes = figure.add_subplot(-(-number // 3), min(number, 3), index)
            names = list(dimension.choices)
            positions = [
                names.index(str(outcome.params[dimension.key]))
                if names
                else float(outcome.params[dimension.key])
                for outcome in complete
            ]
            axes.errorbar(
                positions,
                [outcome.mean or 0.0 for outcome in complete],
                yerr=[outcome.half_width or 0.0 for outcome in complete],
                fmt="o",
                capsize=3,
                markersize=4,
                color="#999999",
            )
            axes.plot(
                positions[:1],
                [outcome.mean or 0.0 for outcome in complete[:1]],
                "o",
                color="#c0392b",
            )
            if names:
                axes.set_xticks(range(len(names)), names)
                axes.set_xlim(-0.5, len(names) - 0.5)
            elif dimension.is_log:
                axes.set_xscale("log")
            axes.set_xlabel(dimension.key)
            axes.set_ylabel(sweep.selection.key or "")
        buffer = io.StringIO()
        write: Any = canvas.print_svg
        write(buffer, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
