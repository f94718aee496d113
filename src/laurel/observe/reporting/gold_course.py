"""How the gold metric of a run went: whether it fell, and by more than chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from laurel.observe.gold import gold_metric
from laurel.observe.reporting.finding import MIN_STEPS
from laurel.observe.run_record import RunRecord, Series

LEAST_FALL = 0.02
"""Share of the peak that a fall is at least."""
FALL_OF_FEW = 0.1
"""The same where there are too few values to tell chance: `grpo.health.gold_drop` by default."""


class GoldCourse(NamedTuple):
    """The gold metric at the beginning, at its best and at the end: means of a tenth of its values.

    With fewer than twenty values each is a single one.
    """

    name: str
    first: float
    peak: float
    peak_step: float
    last: float
    fell: bool
    """The end lies below the best by more than chance explains."""

    @property
    def is_lower(self) -> bool:
        """Whether the end lies below the beginning, or fell from its peak."""
        return self.fell or self.last < self.first


def gold_course(record: RunRecord) -> GoldCourse | None:
    """The course of the gold metric; None where the run has none, or it was measured once."""
    name = gold_metric(record.settings, record.names())
    series = record.series(name) if name is not None else None
    if name is None or series is None or len(series.values) < 2:
        return None
    window = max(1, len(series.values) // 10)
    means = [
        fmean(series.values[end - window : end]) for end in range(window, len(series.values) + 1)
    ]
    # Of equal ones the latest: its checkpoint has learned the most.
    best = max(range(len(means)), key=lambda index: (means[index], index))
    least = max(LEAST_FALL * abs(means[best]), _chance(record, name, series, window, means[best]))
    return GoldCourse(
        name=name,
        first=means[0],
        peak=means[best],
        peak_step=series.steps[best + window - 1],
        last=means[-1],
        fell=means[best] - means[-1] > least,
    )


def _chance(record: RunRecord, name: str, series: Series, window: int, peak: float) -> float:
    """How far the difference of two means of a window may be from 0 by chance.

    Three standard errors, as the peak is the best of many windows. The spread of single values is
    that of the differences between neighbours, which a slow drift hardly widens.
    """
    if len(series.values) >= MIN_STEPS:
        return 3 * math.sqrt(2 / window) * _spread(series.values)
    counts = record.series(f"{name.rpartition('/')[0]}/num_samples").values
    if name.endswith("/accuracy") and counts and counts[-1] > 0:
        return 3 * math.sqrt(2 * max(peak * (1 - peak), 0.01) / counts[-1])
    return FALL_OF_FEW * abs(peak)


def _spread(values: Sequence[float]) -> float:
    steps = [abs(after - before) for before, after in pairwise(values)]
    return 1.4826 * median(steps) / math.sqrt(2)
