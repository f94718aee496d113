"""Whether two results on the same rows differ by more than chance."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from laurel.evaluation.measured import Credits


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest:
    """Two results, row by row."""

    num_rows: int
    """Rows that both have a verdict on."""
    num_first_better: int
    num_second_better: int
    p_value: float
    """The chance of a difference as large or larger if neither were better."""


def compare(first: Credits, second: Credits, *, ids: Iterable[str] | None = None) -> PairedTest:
    """The exact test of McNemar on the rows that both results have a verdict on.

    Where a row can be worth more than 0 and less than 1, what counts is on which side it is worth
    more, which makes it the sign test; of rows that are right or wrong the two are the same.

    Args:
        first: What each row is worth.
        second: Likewise.
        ids: The rows to compare; None: all.
    """
    wanted = first.keys() if ids is None else ids
    num_rows = first_better = second_better = 0
    for row_id in wanted:
        one, other = first.get(row_id), second.get(row_id)
        if one is None or other is None:
            continue
        num_rows += 1
        first_better += one > other
        second_better += other > one
    return PairedTest(
        num_rows=num_rows,
        num_first_better=first_better,
        num_second_better=second_better,
        p_value=sign_test(first_better, second_better),
    )


def sign_test(num_first: int, num_second: int) -> float:
    """Two-sided chance that a fair coin divides so many throws so unevenly, exactly.

    Raises:
        ValueError: A count below 0.
    """
    if num_first < 0 or num_second < 0:
        raise ValueError(f"counts are {num_first} and {num_second}")
    throws = num_first + num_second
    as_uneven = sum(math.comb(throws, k) for k in range(min(num_first, num_second) + 1))
    return min(1.0, 2 * as_uneven / (1 << throws))
