"""Accuracy on scored pairs, and how sure it is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from laurel.errors import ConfigError
from laurel.evaluation.scored_pairs import ScoredPair

NUM_DRAWS = 2000
CONFIDENCE = 0.95

Credits = Mapping[str, float]
"""What a baseline gets of each pair, by the pair's id: 1 right, 0 wrong, 0.5 cannot say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """A share of pairs that are right, its confidence interval, and what it is to be held against.

    As RewardBench counts: a tie is wrong.
    """

    value: float
    low: float
    high: float
    num_pairs: int
    """Pairs that both scores are known of. No others take part."""
    num_ties: int
    baselines: Mapping[str, float]
    """The accuracy of each baseline on the same pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The accuracy on some of the pairs."""

    name: str
    lowest: float | None
    """Least value among its pairs of what they were sorted by; None for slices by name."""
    highest: float | None
    accuracy: Accuracy


def difference(pair: ScoredPair) -> float | None:
    """The score of the chosen answer less that of the rejected one.

    None where a score is missing or not finite: no number can be made of it.
    """
    if pair.score_chosen is None or pair.score_rejected is None:
        return None
    if not (math.isfinite(pair.score_chosen) and math.isfinite(pair.score_rejected)):
        return None
    return pair.score_chosen - pair.score_rejected


def scored(pairs: Iterable[ScoredPair]) -> list[ScoredPair]:
    """The pairs that both scores are known of."""
    return [pair for pair in pairs if difference(pair) is not None]


def failures(pairs: Iterable[ScoredPair]) -> dict[str, int]:
    """How many pairs have no verdict, by the reason, the most frequent first."""
    return dict(
        Counter(
            pair.failure or "no finite score" for pair in pairs if difference(pair) is None
        ).most_common()
    )


def accuracy(
    pairs: Iterable[ScoredPair],
    *,
    baselines: Mapping[str, Credits] | None = None,
    seed: int = 0,
    num_draws: int = NUM_DRAWS,
    confidence: float = CONFIDENCE,
) -> Accuracy | None:
    """The share of the pairs whose chosen answer has strictly more.

    Its interval is that of the percentile bootstrap over pairs: quantiles of the accuracy of
    `num_draws` sets of as many pairs, drawn with replacement. See `draw_shares`. Pairs count as
    independent; where many have one prompt, the truth is wider.

    Returns:
        None where no pair has both scores.
    """
    judged = scored(pairs)
    if not judged:
        return None
    num_right = sum(bool(pair.is_right) for pair in judged)
    low, high = interval_of_share(
        num_right, len(judged), seed=seed, num_draws=num_draws, confidence=confidence
    )
    return Accuracy(
        value=num_right / len(judged),
        low=low,
        high=high,
        num_pairs=len(judged),
        num_ties=sum(difference(pair) == 0 for pair in judged),
        baselines={
            name: fmean(credits[pair.id] for pair in judged)
            for name, credits in (baselines or {}).items()
        },
    )


def interval_of_share(
    num_right: int,
    num_pairs: int,
    *,
    seed: int = 0,
    num_draws: int = NUM_DRAWS,
    confidence: float = CONFIDENCE,
) -> tuple[float, float]:
    """The bootstrap's interval of a share; see `accuracy`.

    Where all are right, or none is, every draw is the same and the bootstrap claims to be certain.
    There the interval of Clopper and Pearson (1934), which has a closed form at these ends, takes
    its place.
    """
    outside = (1 - check_confidence(confidence)) / 2
    if num_right in (0, num_pairs):
        slack = outside ** (1 / num_pairs)
        return (slack, 1.0) if num_right else (0.0, 1.0 - slack)
    shares = draw_shares(num_right, num_pairs, seed=seed, num_draws=num_draws)
    low, high = np.quantile(shares, [outside, 1 - outside])
    return float(low), float(high)


def draw_shares(num_right: int, num_pairs: int, *, seed: int, num_draws: int) -> np.ndarray:
    """Shares of right ones in sets of pairs drawn with replacement.

    How many of n pairs drawn from n are right, when k of those are, is binomial of n and k/n. So
    that is drawn, not the pairs one by one; and their order cannot matter.
    """
    generator = np.random.default_rng(seed)
    return generator.binomial(num_pairs, num_right / num_pairs, size=num_draws) / num_pairs


def check_confidence(confidence: float) -> float:
    """The confidence as it is, or an error that says what it may be."""
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence}: must lie between 0 and 1, e.g. 0.95")
    return confidence


def accuracy_by_name(
    pairs: Iterable[ScoredPair],
    names: Mapping[str, str],
    *,
    baselines: Mapping[str, Credits] | None = None,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> list[Slice]:
    """The accuracy of each kind of pairs, in the order of the kinds' names.

    Args:
        pairs: Those without both scores take no part.
        names: The kind of each pair by its id; pairs without an entry are in no slice.
        baselines: See `Credits`.
        seed: Of the bootstrap.
        confidence: Of the intervals.
    """
    members: dict[str, list[ScoredPair]] = {}
    for pair in pairs:
        if pair.id in names:
            members.setdefault(names[pair.id], []).append(pair)
    slices = []
    for name, inside in sorted(members.items()):
        found = accuracy(inside, baselines=baselines, seed=seed, confidence=confidence)
        if found is not None:
            slices.append(Slice(name=name, lowest=None, highest=None, accuracy=found))
    return slices


def accuracy_by_value(
    pairs: Iterable[ScoredPair],
    values: Mapping[str, float],
    *,
    num_bins: int = 5,
    baselines: Mapping[str, Credits] | None = None,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> list[Slice]:
    """The accuracy in bins of about as many pairs each, from the lowest values to the highest.

    Pairs of one value are never parted; where there are no more than `num_bins` values, each has
    a bin of its own.

    Args:
        pairs: Those without both scores take no part.
        values: Of each pair by its id; pairs without an entry are in no bin.
        num_bins: The most there can be.
        baselines: See `Credits`.
        seed: Of the bootstrap.
        confidence: Of the intervals.
    """
    if num_bins < 1:
        raise ConfigError(f"num_bins={num_bins}: must be at least 1")
    placed = [pair for pair in scored(pairs) if pair.id in values]
    slices = []
    for lowest, highest in bins_of([values[pair.id] for pair in placed], num_bins):
        inside = [pair for pair in placed if lowest <= values[pair.id] <= highest]
        found = accuracy(inside, baselines=baselines, seed=seed, confidence=confidence)
        if found is not None:
            name = f"{lowest:g}" if lowest == highest else f"{lowest:g} to {highest:g}"
            slices.append(Slice(name=name, lowest=lowest, highest=highest, accuracy=found))
    return slices


def bins_of(values: Sequence[float], num_bins: int) -> list[tuple[float, float]]:
    """The least and the greatest value of each bin; see `accuracy_by_value`."""
    ordered = sorted(values)
    distinct = sorted(set(ordered))
    if len(distinct) <= num_bins:
        return [(value, value) for value in distinct]
    # A bin starts at the value that stands first in its share of the row, if that is a new one.
    starts = sorted({ordered[len(ordered) * index // num_bins] for index in range(num_bins)})
    positions = [distinct.index(start) for start in starts]
    ends = [*(position - 1 for position in positions[1:]), len(distinct) - 1]
    return [(start, distinct[end]) for start, end in zip(starts, ends, strict=True)]
