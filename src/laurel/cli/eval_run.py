"""`laurel eval reward-bench` and its siblings: rows in, scores, figures and their baseline out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from laurel.cli.diagnose import diagnostics_report, print_diagnostics
from laurel.cli.eval_request import Request
from laurel.cli.eval_results import Evaluation, check_directory, write_results
from laurel.cli.eval_scoring import OpenScorer, check_model, open_scorer
from laurel.cli.eval_tables import print_compatibility, print_evaluation, print_matrix
from laurel.cli.json_output import write_json
from laurel.config.benchmarks import BenchmarkName
from laurel.data.benchmark_rows import BenchmarkRow
from laurel.errors import ConfigError, setting_of
from laurel.evaluation import rm_bench
from laurel.evaluation.benchmarks import (
    BENCHMARKS,
    TrainingPairs,
    preference_rows,
    reduce_scores,
    training_pairs,
)
from laurel.evaluation.measured import Measured
from laurel.observe.console import make_console, message_console, visible
from laurel.types import Score

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.models.rewardbench_format import RewardBenchContract

_WITNESSES = 8
"""Rows that the noise of scores is measured on."""


def run_benchmark(name: BenchmarkName, request: Request) -> int:
    """Score the rows of a benchmark, and show and write what came of it; see `evaluated`.

    Returns:
        The exit code: 1 where a completion has no score, else 0.

    Raises:
        UserError: A model, a row, a file or a setting that cannot be used.
    """
    console = message_console()
    evaluation = evaluated(name, request, console)
    if request.as_json:
        write_json(evaluation.report())
    else:
        show_evaluation(evaluation)
    say_failures(evaluation, console)
    return 1 if evaluation.failures else 0


def evaluated(name: BenchmarkName, request: Request, console: Console) -> Evaluation:
    """Score the rows of a benchmark, and write what came of it where files are asked for.

    What needs no model is checked first.

    Args:
        name: The benchmark.
        request: What is asked for.
        console: Told what was loaded and written, and how far it is.

    Raises:
        UserError: A model, a row, a file or a setting that cannot be used.
    """
    check_request(request)
    told: list[str] = []
    with console.status("reading the rows"):
        rows = BENCHMARKS[name].read(request, told.append)
        training = _training(request)
    for said in told:
        console.print(f"note    {visible(said)}", soft_wrap=True)
    if training is not None:
        for note in training.notes:
            console.print(f"note    {visible(note)}", soft_wrap=True)
    started = time.monotonic()
    with open_scorer(request.scorer, console) as scorer:
        evaluation = evaluate(name, rows, request, scorer, started=started, training=training)
    write_evaluation(evaluation, request, console)
    return evaluation


def check_request(request: Request) -> None:
    """What can be told before any row is read.

    Raises:
        UserError: A model that is not there, or a directory that cannot be written.
    """
    check_model(request.scorer)
    for name in request.members:
        check_model(replace(request.scorer, model=name))
    models = [request.scorer.model, *request.members]
    for name in dict.fromkeys(models):
        if models.count(name) > 1:
            raise ConfigError(
                f"{setting_of('--member', name)}: it is named twice, and agrees with itself"
            )
    if request.output is not None:
        check_directory(request.output)


def evaluate(
    name: BenchmarkName,
    rows: Sequence[BenchmarkRow],
    request: Request,
    scorer: OpenScorer,
    *,
    started: float,
    training: TrainingPairs | None = None,
) -> Evaluation:
    """Score rows, and compute all that there is to show.

    Args:
        name: The benchmark.
        rows: Its rows.
        request: What else is asked for.
        scorer: Who scores them.
        started: When the work on them began, by `time.monotonic`.
        training: What the model was trained on, if that is asked for.

    Raises:
        UserError: Rows of which nothing can be computed.
    """
    benchmark = BENCHMARKS[name]
    scores = scorer.score([row.group for row in rows])
    seconds = time.monotonic() - started
    found = reduce_scores(benchmark, rows, scores, request)
    every = [score for scores_G in scores for score in scores_G]
    details = {
        **benchmark.details(found.rows),
        **_diagnosed(rows, found.rows, request, scorer, training),
    }
    by_contract = None
    if scorer.reference is not None:
        by_contract, told = _beside_contract(name, rows, scores, request, scorer, scorer.reference)
        details["compatibility"] = told
    return Evaluation(
        benchmark=name,
        title=benchmark.title,
        model=request.scorer.model,
        data=request.data,
        measured=found.measured,
        baseline=found.baseline,
        by_contract=by_contract,
        rows=found.rows,
        num_completions=len(every),
        num_truncated=sum(score.truncated for score in every),
        failures=tuple(
            f"{row.group.id}: {score.failure}"
            for row, scores_G in zip(rows, scores, strict=True)
            for score in scores_G
            if score.failure is not None
        ),
        seconds=seconds,
        details=details,
    )


def _beside_contract(
    name: BenchmarkName,
    rows: Sequence[BenchmarkRow],
    scores: Sequence[tuple[Score, ...]],
    request: Request,
    scorer: OpenScorer,
    reference: RewardBenchContract,
) -> tuple[Measured, dict[str, Any]]:
    """The figures by the model's own contract, and where the tokens differ from its tokens.

    Rows are scored once more where the model reads other tokens; the other scores are the same.
    """
    from laurel.evaluation.compatibility import differences, summary

    with scorer.console.status("comparing the tokens with those of the scoring contract"):
        found = differences(reference, [row.group for row in rows])
    others = [
        place
        for place, row in enumerate(found)
        if any(one is not None and one.is_read for one in row)
    ]
    by_contract = list(scores)
    again = scorer.score_by_contract([rows[place].group for place in others])
    for place, scores_G in zip(others, again, strict=True):
        by_contract[place] = scores_G
    form = reference.form
    told = {
        "program": form.program,
        "max_length": form.max_length,
        "truncation_side": form.truncation_side,
        **summary(found),
    }
    return reduce_scores(BENCHMARKS[name], rows, by_contract, request).measured, told


def _diagnosed(
    rows: Sequence[BenchmarkRow],
    scored: Sequence[Any],
    request: Request,
    scorer: OpenScorer,
    training: TrainingPairs | None,
) -> dict[str, dict[str, Any]]:
    """What else the scores of pairs say; nothing where nobody asks."""
    if not request.is_diagnosed:
        return {}
    translated = None
    plain = replace(request, margin_key=None)
    if request.other_language is not None:
        others = preference_rows(replace(plain, data=(request.other_language,)), lambda said: None)
        translated = _pairs_scored(others, request, scorer)
    members = {request.scorer.model: _column(scored)} if request.members else {}
    for name in request.members:
        with open_scorer(replace(request.scorer, model=name), scorer.console) as member:
            members[name] = _column(_pairs_scored(rows, request, member))
    from laurel.environments.noise_floor import measure_noise

    noise = None
    with suppress(ValueError):  # nothing of it can be scored
        noise = measure_noise(scorer.score_now_quietly, [row.group for row in rows[:_WITNESSES]])
    status = scorer.console.status("computing diagnostics")
    with status if not request.sensitivity else nullcontext():
        report = diagnostics_report(
            scored, training=None if training is None else training.pairs,
            notes=() if training is None else training.notes,
            score=scorer.score if request.sensitivity else None,
            members=members, in_other_language=translated, noise=noise,
        )  # fmt: skip
    return {"diagnostics": report}


def _training(request: Request) -> TrainingPairs | None:
    """What the model was trained on, read before anything is scored."""
    if not request.train_data:
        return None
    return training_pairs(
        replace(request, data=request.train_data, margin_key=None, max_samples=None)
    )


def _pairs_scored(
    rows: Sequence[BenchmarkRow], request: Request, scorer: OpenScorer
) -> Sequence[Any]:
    scores = scorer.score([row.group for row in rows])
    return reduce_scores(BENCHMARKS["pairs"], rows, scores, request).rows


def _column(pairs: Sequence[Any]) -> list[tuple[float | None, float | None]]:
    return [(pair.score_chosen, pair.score_rejected) for pair in pairs]


# ---------------------------------------------------------------------------------------- showing


def write_evaluation(evaluation: Evaluation, request: Request, console: Console) -> None:
    """Write the files of an evaluation, if any are asked for.

    Raises:
        DataError: One cannot be written.
    """
    if request.output is not None:
        for path in write_results(request.output, evaluation):
            console.print(f"written to {path}", soft_wrap=True)


def show_evaluation(evaluation: Evaluation) -> None:
    """Its tables, on standard output."""
    console, details = make_console(), evaluation.details
    print_evaluation(console, evaluation)
    if "compatibility" in details:
        print_compatibility(console, details["compatibility"], num_rows=len(evaluation.rows))
    if "matrix" in details:
        print_matrix(console, details["matrix"], rm_bench.STYLES)
    if "diagnostics" in details:
        print_diagnostics(console, details["diagnostics"])


def say_failures(evaluation: Evaluation, console: Console) -> None:
    """How many completions have no score, and why the first has none."""
    if evaluation.failures:
        console.print(
            f"FAILED  {len(evaluation.failures):,} of {evaluation.num_completions:,} completions "
            f"have no score; the first: {visible(evaluation.failures[0])}",
            soft_wrap=True,
        )
