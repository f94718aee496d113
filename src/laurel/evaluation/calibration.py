"""Whether differences of scores mean the probabilities that a Bradley-Terry model says they do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from laurel.errors import ConfigError
from laurel.evaluation.intervals import difference
from laurel.evaluation.scored_pairs import ScoredPair

_RELATIVE_PRECISION = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityRow:
    """The pairs whose confidence lies in one range: at least `start`, and below `end`."""

    start: float
    end: float
    """The last row holds a confidence of 1, too."""
    num_pairs: int
    confidence: float
    """Mean of the confidence."""
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How far confidence and accuracy are apart."""

    num_pairs: int
    error: float
    """Expected calibration error: |confidence - accuracy| of the rows, weighted by their pairs."""
    rows: tuple[ReliabilityRow, ...]
    """Only those that hold a pair."""
    negative_log_likelihood: float
    """Mean of -log sigmoid(chosen - rejected)."""
    temperature: float | None
    """See `best_temperature`."""
    error_at_temperature: float | None
    negative_log_likelihood_at_temperature: float | None


def calibration(pairs: Iterable[ScoredPair], *, num_rows: int = 10) -> Calibration | None:
    """The calibration of sigmoid(score difference) as the probability that an answer is better.

    The confidence of a pair is sigmoid(|score(chosen) - score(rejected)|), from 0.5 to 1; it is
    right where the chosen answer has more, and half right where both have the same, for then its
    confidence is 0.5 whichever answer is called the better.

    Returns:
        None where no pair has both scores.
    """
    if num_rows < 1:
        raise ConfigError(f"num_rows={num_rows}: a reliability table needs at least 1 row")
    differences = [gap for pair in pairs if (gap := difference(pair)) is not None]
    if not differences:
        return None
    rows = _reliability(differences, num_rows)
    temperature = best_temperature(differences)
    scaled = None if temperature is None else [gap / temperature for gap in differences]
    return Calibration(
        num_pairs=len(differences),
        error=_error(rows),
        rows=rows,
        negative_log_likelihood=_loss(differences),
        temperature=temperature,
        error_at_temperature=None if scaled is None else _error(_reliability(scaled, num_rows)),
        negative_log_likelihood_at_temperature=None if scaled is None else _loss(scaled),
    )


def best_temperature(differences: list[float]) -> float | None:
    """The T > 0 that minimises the mean of -log sigmoid(difference / T), which has one minimum.

    More than 1: the scores are too sure of themselves. None where no temperature does: no pair is
    wrong, so that ever smaller ones fit ever better, or right ones do not outweigh wrong ones, so
    that ever greater ones do.
    """
    if min(differences, default=0.0) >= 0 or math.fsum(differences) <= 0:
        return None
    # In units of the largest, so that nothing overflows. The sharpness 1/T is where the slope of
    # the loss, which falls in it, crosses zero.
    unit = max(abs(gap) for gap in differences)
    gaps = [gap / unit for gap in differences]

    def gain(sharpness: float) -> float:
        return math.fsum(gap * _sigmoid(-sharpness * gap) for gap in gaps)

    low, high = 0.0, 1.0
    while gain(high) > 0:
        low, high = high, 2 * high
    while high - low > _RELATIVE_PRECISION * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return unit / high


def _reliability(differences: list[float], num_rows: int) -> tuple[ReliabilityRow, ...]:
    inside: dict[int, list[tuple[float, float]]] = {}
    for gap in differences:
        confidence = _sigmoid(abs(gap))
        row = min(int((confidence - 0.5) * 2 * num_rows), num_rows - 1)
        inside.setdefault(row, []).append((confidence, 0.5 if gap == 0 else float(gap > 0)))
    return tuple(
        ReliabilityRow(
            start=0.5 + row / (2 * num_rows),
            end=0.5 + (row + 1) / (2 * num_rows),
            num_pairs=len(members),
            confidence=fmean(confidence for confidence, _ in members),
            accuracy=fmean(right for _, right in members),
        )
        for row, members in sorted(inside.items())
    )


def _error(rows: tuple[ReliabilityRow, ...]) -> float:
    total = sum(row.num_pairs for row in rows)
    return math.fsum(row.num_pairs * abs(row.confidence - row.accuracy) for row in rows) / total


def _loss(differences: list[float]) -> float:
    return fmean(max(-gap, 0.0) + math.log1p(math.exp(-abs(gap))) for gap in differences)


def _sigmoid(value: float) -> float:
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    return math.exp(value) / (1 + math.exp(value))
