"""A sentence about a run, and the arithmetic that several rules share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from laurel.observe.counts import counted
from laurel.observe.run_record import Series

Weight = Literal["bad", "look", "good", "note"]
"""A problem, what may be one, what is well, and what is only to be known."""

MIN_STEPS = 20
"""With fewer, the beginning and the end of a curve are not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sentence or two about a run."""

    weight: Weight
    text: str


def beginning(series: Series) -> Sequence[float]:
    """The values of the first tenth of a curve."""
    return series.values[: max(1, len(series.values) // 10)]


def ending(series: Series) -> Sequence[float]:
    """The values of its last tenth."""
    return series.values[-max(1, len(series.values) // 10) :]


def variance(values: Sequence[float]) -> float:
    """Of the values as they are (divided by n)."""
    mean = fmean(values)
    return fmean((value - mean) ** 2 for value in values)


def steps(count: int) -> str:
    """E.g. `1 step`, `2,000 steps`."""
    return counted(count, "step")
