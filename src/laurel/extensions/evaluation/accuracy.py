"""Accuracy on scored pairs, how sure it is, and the figures of subsets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from laurel.evaluation.statistics import Figure, ScoredList, ScoredPair, share
from laurel.observe.metrics import longer_credit

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
Credits = Mapping[str, float]
"""A baseline's credit for each pair, by the pair's id: 1 right, 0 wrong, 0.5 cannot say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """A share of pairs that are right, its confidence interval, and its baselines.

    A tie is wrong, as in RewardBench.
    """

    value: float
    low: float
    high: float
    num_pairs: int
    """Pairs with both scores; no others take part."""
    num_ties: int
    baselines: Mapping[str, float]
    """The accuracy of each baseline on the same pairs."""


def difference(pair: ScoredPair) -> float | None:
    """Return the score of the chosen answer less that of the rejected one.

    It is None where a score is missing or not finite.
    """
    if pair.score_chosen is None or pair.score_rejected is None:
        return None
    if not (math.isfinite(pair.score_chosen) and math.isfinite(pair.score_rejected)):
        return None
    return pair.score_chosen - pair.score_rejected


def scored(pairs: Iterable[ScoredPair]) -> list[ScoredPair]:
    """Return the pairs that have both scores."""
    return [pair for pair in pairs if difference(pair) is not None]


def accuracy(
    pairs: Iterable[ScoredPair],
    *,
    baselines: Mapping[str, Credits] | None = None,
) -> Accuracy | None:
    """Return the share of the pairs whose chosen answer scores strictly higher.

    The interval is that of the percentile bootstrap over pairs: quantiles of the accuracy of
    `NUM_RESAMPLES` sets of as many pairs, sampled with replacement (`resample_shares`). Pairs count
    as independent; where many share a prompt, the true interval is wider.

    Returns:
        None where no pair has both scores.
    """
    usable = scored(pairs)
    if not usable:
        return None
    num_right = sum(bool(pair.is_right) for pair in usable)
    low, high = interval_of_share(num_right, len(usable))
    return Accuracy(
        value=num_right / len(usable),
        low=low,
        high=high,
        num_pairs=len(usable),
        num_ties=sum(difference(pair) == 0 for pair in usable),
        baselines={
            name: fmean(credits[pair.id] for pair in usable)
            for name, credits in (baselines or {}).items()
        },
    )


def interval_of_share(num_right: int, num_pairs: int) -> tuple[float, float]:
    """Return the bootstrap's interval of a share, as `accuracy` defines it.

    Where all are right, or none is, it is the interval of Clopper and Pearson (1934).
    """
    # At these ends every resample is the same and the bootstrap would claim to be certain. The
    # exact interval has a closed form there.
    if num_right in (0, num_pairs):
        slack = ((1 - CONFIDENCE) / 2) ** (1 / num_pairs)
        return (slack, 1.0) if num_right else (0.0, 1.0 - slack)
    return percentile_interval(resample_shares(num_right, num_pairs, seed=0))


def percentile_interval(resamples: Floats) -> tuple[float, float]:
    """Return the quantiles of resampled values that leave out as much on either side."""
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resamples, [outside, 1 - outside])
    return float(low), float(high)


def resample_shares(num_right: int, num_pairs: int, *, seed: int) -> Floats:
    """Return the shares of right pairs in `NUM_RESAMPLES` sets sampled with replacement."""
    # How many of n pairs sampled from n are right, when k of those are, is binomial of n and k/n.
    # Sampling that number needs no loop over pairs, and their order cannot matter.
    generator = np.random.default_rng(seed)
    return generator.binomial(num_pairs, num_right / num_pairs, size=NUM_RESAMPLES) / num_pairs


def shares_by_subset(rows: Iterable[tuple[str | None, float | None]]) -> dict[str, Figure]:
    """Return the mean credit of each subset, in the order in which subsets first appear.

    Rows without a subset are skipped.
    """
    by_subset: dict[str, list[float | None]] = {}
    for subset, credit in rows:
        if subset is not None:
            by_subset.setdefault(subset, []).append(credit)
    return {name: share(name, credits) for name, credits in by_subset.items()}


def mean_figure(name: str, figures: Sequence[Figure]) -> Figure:
    """Return the plain mean of figures; its value is None where one of them, or all, are absent."""
    # A mean over the present figures alone would be a figure of another benchmark.
    values = [figure.value for figure in figures if figure.value is not None]
    return Figure(
        name=name,
        value=fmean(values) if values and len(values) == len(figures) else None,
        num_rows=sum(figure.num_rows for figure in figures),
        num_failures=sum(figure.num_failures for figure in figures),
    )


def pair_credits(pairs: Iterable[ScoredPair]) -> dict[str, float | None]:
    """Return 1 for each pair that is right, 0 for each other, None where there is no verdict."""
    return {pair.id: None if pair.is_right is None else float(pair.is_right) for pair in pairs}


def pairs_by_length(pairs: Iterable[ScoredPair]) -> list[ScoredPair]:
    """Return the pairs with the number of characters of each answer as its score.

    A pair that failed stays failed, so that a figure and its baseline use the same rows.
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
    """Return the lists with the number of characters of each completion as its score."""
    return [
        one
        if one.whole_scores_G is None
        else replace(one, scores_G=tuple(float(len(text)) for text in one.completions_G))
        for one in lists
    ]


def longer_wins(pairs: Iterable[ScoredPair]) -> dict[str, float]:
    """Return the credit of each pair for a scorer that prefers the longer answer, in characters.

    Answers of one length count half, as in the data report.
    """
    return {pair.id: longer_credit(len(pair.chosen), len(pair.rejected)) for pair in pairs}
