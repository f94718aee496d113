"""What an evaluation found: figures, each with the rows that it stands on and those that failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from laurel.evaluation.scored_lists import ScoredList
from laurel.evaluation.scored_pairs import ScoredPair

Credits = Mapping[str, float | None]
"""What each row is worth, 0 to 1, by its id; None: it could not be scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number, or that there is nothing to take it over."""

    name: str
    value: float | None
    num_rows: int = 0
    """Rows that it is taken over; those that failed are not among them."""
    num_failures: int = 0
    """Rows that it lacks because they could not be scored."""
    is_aside: bool = False
    """It says something about the rows, and is no score that others are made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of one evaluation."""

    subsets: tuple[Figure, ...]
    sections: tuple[Figure, ...] = ()
    """What is made of subsets."""
    final: Figure
    notes: tuple[str, ...] = ()
    """What a reader must know to believe the figures."""
    credits: Credits = field(default_factory=dict)


def share(name: str, credits: Iterable[float | None]) -> Figure:
    """The mean of what rows are worth; those that failed are counted and take no part."""
    every = list(credits)
    known = [credit for credit in every if credit is not None]
    return Figure(
        name=name,
        value=fmean(known) if known else None,
        num_rows=len(known),
        num_failures=len(every) - len(known),
    )


def shares_by_subset(rows: Iterable[tuple[str | None, float | None]]) -> dict[str, Figure]:
    """The share of each subset, in the order in which they first appear.

    Args:
        rows: The subset of each row, and what it is worth. Rows without a subset are passed over.
    """
    by_subset: dict[str, list[float | None]] = {}
    for subset, credit in rows:
        if subset is not None:
            by_subset.setdefault(subset, []).append(credit)
    return {name: share(name, credits) for name, credits in by_subset.items()}


def mean_of(name: str, figures: Sequence[Figure]) -> Figure:
    """The plain mean of figures; it has no value where one of them has none, or there is none."""
    values = [figure.value for figure in figures if figure.value is not None]
    return Figure(
        name=name,
        value=fmean(values) if values and len(values) == len(figures) else None,
        num_rows=sum(figure.num_rows for figure in figures),
        num_failures=sum(figure.num_failures for figure in figures),
    )


def pair_credits(pairs: Sequence[ScoredPair]) -> dict[str, float | None]:
    """1 for each pair that is right, 0 for each other, None where there is no verdict.

    Raises:
        ValueError: Two pairs share an id.
    """
    credits = {pair.id: None if pair.is_right is None else float(pair.is_right) for pair in pairs}
    if len(credits) < len(pairs):
        raise ValueError("two pairs share an id")
    return credits


# ------------------------------------------------------------------------- the baseline of length


def pairs_by_length(pairs: Iterable[ScoredPair]) -> list[ScoredPair]:
    """The same pairs as somebody scores them who likes long answers, and nothing else.

    Scores are numbers of characters. A pair that failed stays failed, so that a figure and its
    baseline stand on the same rows.
    """
    return [
        pair
        if pair.is_right is None
        else replace(
            pair, score_chosen=float(len(pair.chosen)), score_rejected=float(len(pair.rejected))
        )
        for pair in pairs
    ]


def lists_by_length(lists: Iterable[ScoredList]) -> list[ScoredList]:
    """The same for lists; see `pairs_by_length`."""
    return [
        one
        if one.whole_scores_G is None
        else replace(one, scores_G=tuple(float(len(text)) for text in one.completions_G))
        for one in lists
    ]
