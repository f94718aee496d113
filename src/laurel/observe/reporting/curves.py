"""Long curves made short enough to draw, and honest about it.

A curve of many points is drawn twice: as a line of rolling means in a band of rolling quantiles,
and beneath it as the lowest and the highest value of each stretch of steps, so that no peak is
lost, however short it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from laurel.observe.run_record import Series

FEW_POINTS = 60
"""Up to so many, a curve is drawn as it was logged."""
NUM_PLACES = 300
"""Points of a smoothed curve, and stretches of one drawn by its extremes: what fits a screen."""
SMOOTHED_SHARE = 25
"""A rolling window holds one in so many of a curve's points."""
LOW, HIGH = 0.1, 0.9
"""The band holds what lies between these quantiles of a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoothed:
    """Rolling means, and the quantiles around them, at the same steps."""

    mean: Series
    low: Series
    high: Series
    window: int
    """Points that each mean is of."""


def extremes(series: Series, num_stretches: int = NUM_PLACES) -> Series:
    """The lowest and the highest point of each stretch, in the order in which they were logged.

    A curve of up to two points a stretch is returned as it is.
    """
    count = len(series.steps)
    if count <= 2 * num_stretches:
        return series
    values = np.array(series.values)
    kept: list[int] = []
    edges = np.linspace(0, count, num_stretches + 1).astype(int)
    for start, end in pairwise(edges):
        part = values[start:end]
        kept += sorted({start + int(part.argmin()), start + int(part.argmax())})
    # The ends are what a reader looks for first.
    places = sorted({0, *kept, count - 1})
    return Series(
        steps=tuple(series.steps[i] for i in places), values=tuple(series.values[i] for i in places)
    )


def smooth(series: Series, num_places: int = NUM_PLACES) -> Smoothed | None:
    """The curve without its noise; None where it has few points.

    Windows are centred. At the ends they are one-sided as far as they must, never filled up with
    values that nobody logged.
    """
    count = len(series.steps)
    if count <= FEW_POINTS:
        return None
    window = max(5, count // SMOOTHED_SHARE)
    values = np.array(series.values)
    places = np.unique(np.linspace(0, count - 1, min(count, num_places)).round().astype(int))
    parts = [values[max(0, i - window // 2) : i + window // 2 + 1] for i in places]
    steps = tuple(series.steps[i] for i in places)
    low, high = np.array([np.quantile(part, (LOW, HIGH)) for part in parts]).T
    return Smoothed(
        mean=Series(steps=steps, values=tuple(float(part.mean()) for part in parts)),
        low=Series(steps=steps, values=tuple(map(float, low))),
        high=Series(steps=steps, values=tuple(map(float, high))),
        window=2 * (window // 2) + 1,
    )


def over_seeds(several: Sequence[Series]) -> Smoothed | None:
    """Means over runs, with the lowest and the highest of them, at the steps that all logged.

    None where they share no step.
    """
    tables = [dict(zip(series.steps, series.values, strict=True)) for series in several]
    shared = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    if not shared:
        return None
    values = np.array([[table[step] for step in shared] for table in tables])
    steps = tuple(shared)
    return Smoothed(
        mean=Series(steps=steps, values=tuple(map(float, values.mean(axis=0)))),
        low=Series(steps=steps, values=tuple(map(float, values.min(axis=0)))),
        high=Series(steps=steps, values=tuple(map(float, values.max(axis=0)))),
        window=1,
    )
