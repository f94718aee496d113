"""Compares two models on the same pairs, and one model on parts of the pairs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from laurel.evaluation.statistics import (
    MeasuredCredits,
    ScoredPair,
)
from laurel.extensions.evaluation.accuracy import (
    Accuracy,
    Credits,
    accuracy,
    difference,
    scored,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The accuracy on a subset of the pairs."""

    name: str
    lowest: float | None
    """Least value by which the pairs were sorted; None for slices by name."""
    highest: float | None
    accuracy: Accuracy


def failure_reasons(pairs: Iterable[ScoredPair]) -> dict[str, int]:
    """Count the pairs without a verdict by reason, the most frequent first."""
    return dict(
        Counter(
            pair.failure or "no finite score" for pair in pairs if difference(pair) is None
        ).most_common()
    )


def accuracy_by_name(
    pairs: Iterable[ScoredPair],
    names: Mapping[str, str],
    *,
    baselines: Mapping[str, Credits] | None = None,
) -> list[Slice]:
    """Return the accuracy of each kind of pairs, in the order of the kinds' names.

    Pairs without both scores, or without an entry in `names`, take no part.
    """
    members: dict[str, list[ScoredPair]] = {}
    for pair in pairs:
        if pair.id in names:
            members.setdefault(names[pair.id], []).append(pair)
    slices = []
    for name, inside in sorted(members.items()):
        measured = accuracy(inside, baselines=baselines)
        if measured is not None:
            slices.append(Slice(name=name, lowest=None, highest=None, accuracy=measured))
    return slices


def accuracy_by_value(
    pairs: Iterable[ScoredPair],
    values: Mapping[str, float],
    *,
    num_bins: int = 5,
    baselines: Mapping[str, Credits] | None = None,
) -> list[Slice]:
    """Return the accuracy in bins of about as many pairs each, from the lowest values up.

    Pairs of one value stay together; where there are no more than `num_bins` values, each has a bin
    of its own. Pairs without both scores, or without an entry in `values`, take no part.
    """
    usable = [pair for pair in scored(pairs) if pair.id in values]
    slices = []
    for lowest, highest in bins_of([values[pair.id] for pair in usable], num_bins):
        inside = [pair for pair in usable if lowest <= values[pair.id] <= highest]
        measured = accuracy(inside, baselines=baselines)
        if measured is not None:
            name = f"{lowest:g}" if lowest == highest else f"{lowest:g} to {highest:g}"
            slices.append(Slice(name=name, lowest=lowest, highest=highest, accuracy=measured))
    return slices


def bins_of(values: Sequence[float], num_bins: int) -> list[tuple[float, float]]:
    """Return the least and the greatest value of each bin of `accuracy_by_value`."""
    ordered = sorted(values)
    distinct = sorted(set(ordered))
    if len(distinct) <= num_bins:
        return [(value, value) for value in distinct]
    # Equal values stay in one bin, so bins can be fewer and uneven: a split value would be random.
    # A bin starts at the value that stands first in its share of the row, if that is a new one.
    starts = sorted({ordered[len(ordered) * index // num_bins] for index in range(num_bins)})
    positions = [distinct.index(start) for start in starts]
    ends = [*(position - 1 for position in positions[1:]), len(distinct) - 1]
    return [(start, distinct[end]) for start, end in zip(starts, ends, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest:
    """The comparison of two results row by row."""

    num_rows: int
    """Rows with a verdict in both results."""
    num_first_better: int
    num_second_better: int
    p_value: float
    """The probability of a difference as large or larger if neither were better."""


def paired_test(
    first: MeasuredCredits, second: MeasuredCredits, *, ids: Iterable[str] | None = None
) -> PairedTest:
    """Run McNemar's exact test on the rows that have a verdict in both results.

    Rows with fractional credit count for the result that gives more, which makes it the sign test;
    for rows that are right or wrong the two tests are the same.
    """
    row_ids = first.keys() if ids is None else ids
    num_rows = first_better = second_better = 0
    for row_id in row_ids:
        credit, other_credit = first.get(row_id), second.get(row_id)
        if credit is None or other_credit is None:
            continue
        num_rows += 1
        first_better += credit > other_credit
        second_better += other_credit > credit
    return PairedTest(
        num_rows=num_rows,
        num_first_better=first_better,
        num_second_better=second_better,
        p_value=sign_test(first_better, second_better),
    )


def sign_test(num_first: int, num_second: int) -> float:
    """Return the exact two-sided probability that a fair coin divides the throws so unevenly.

    Raises:
        ValueError: A count below 0.
    """
    if num_first < 0 or num_second < 0:
        raise ValueError(f"counts are {num_first} and {num_second}")
    throws = num_first + num_second
    # Whole numbers up to the division: exact for any count.
    as_uneven = sum(math.comb(throws, k) for k in range(min(num_first, num_second) + 1))
    return min(1.0, 2 * as_uneven / (1 << throws))


def length_difference(pair: ScoredPair) -> int:
    """Return the characters that the chosen answer is longer by; negative where it is shorter."""
    return len(pair.chosen) - len(pair.rejected)
