"""Scores for programs: what `laurel.api` does with `laurel score`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from laurel.config.load import column_overrides, overrides_of
from laurel.extensions.score.rows import scoring_row, with_steps_joined
from laurel.types import Score

if TYPE_CHECKING:
    from laurel.rewards.scorer import LocalScorer


def score_rows(
    open_model: Callable[[], LocalScorer],
    rows: Iterable[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> list[tuple[Score, ...]]:
    """Read rows, open the model and score them, as `laurel.api.score` says."""
    columns = column_overrides(overrides_of(settings), or_bad_rows=True)
    is_skip = columns.pop("on_bad_row", "error") == "skip"
    on_bad_row: Literal["error", "skip"] = "skip" if is_skip else "error"
    read = [
        scoring_row(
            dict(row),
            source=f"rows[{index}]",
            where=f"rows[{index}]",
            columns=columns,
            on_bad_row=on_bad_row,
        )
        for index, row in enumerate(rows)
    ]
    scorer = open_model()
    if (steps := scorer.contract.rules.steps) is not None:
        read = [with_steps_joined(row, steps.separator, on_bad_row) for row in read]
    scores = iter(scorer.score_now([row.group for row in read if row.problem is None]))
    return [
        next(scores) if row.problem is None else (Score(value=None, failure=row.problem),)
        for row in read
    ]
