"""Evaluations for programs: what `laurel.api` does with `laurel eval`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laurel.errors import ConfigError
from laurel.evaluation.results import Evaluation
from laurel.extensions.evaluation.run import (
    EvalScorer,
    EvaluationRequest,
    evaluated,
    show_evaluation,
)
from laurel.observe.console import say_on
from laurel.rewards.spec import ScorerSpec
from laurel.run.specs import read_judge

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.config.data import BenchmarkName

__all__ = ["evaluate_model", "show"]

show = show_evaluation


def evaluate_model(
    benchmark: BenchmarkName,
    model: str,
    data: Sequence[str | Path],
    console: Console,
    *,
    judge: str | Path | None,
    scorer_options: ScorerSpec | None,
    cpu_threads: int | None,
    **fields: Any,
) -> Evaluation:
    """Evaluate a reward model, as `laurel.api.evaluate` does."""
    options = scorer_options or ScorerSpec()
    section = None
    if judge is not None:
        section = read_judge(Path(judge), say=say_on(console))
        if model or replace(options, device="auto") != ScorerSpec():
            raise ConfigError(
                "judge names what scores: leave out model, and all of scorer_options but device"
            )
    scorer = EvalScorer(
        model=model if section is None else section.called,
        judge=section,
        options=options,
        cpu_threads=cpu_threads,
    )
    request = EvaluationRequest(
        scorer=scorer,
        data=tuple(map(str, data)),
        **fields,
    )
    return evaluated(benchmark, request, console)
