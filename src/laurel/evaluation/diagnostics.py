"""What the scores of a reward model look like: length, spread, saturation, and its siblings.

Accuracies and their intervals are in `intervals`, what to hold them against in `baselines`, the
probabilities behind them in `calibration`, and what data sets share in `leakage`.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

import numpy as np

from laurel.errors import DataError
from laurel.evaluation.baselines import length_difference
from laurel.evaluation.intervals import (
    CONFIDENCE,
    NUM_DRAWS,
    Accuracy,
    Credits,
    accuracy,
    check_confidence,
    difference,
    draw_shares,
    scored,
)
from laurel.evaluation.scored_pairs import ScoredPair
from laurel.types import Conversation

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_EDGE = 0.01


# ------------------------------------------------------------------------------------------ length


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthControlled:
    """The accuracy where length is of no use, and the two halves that it is the mean of."""

    value: float
    low: float
    high: float
    longer_chosen: Accuracy
    shorter_chosen: Accuracy
    baselines: Mapping[str, float]
    """The same of each baseline."""


def length_controlled_accuracy(
    pairs: Iterable[ScoredPair],
    *,
    baselines: Mapping[str, Credits] | None = None,
    seed: int = 0,
    num_draws: int = NUM_DRAWS,
    confidence: float = CONFIDENCE,
) -> LengthControlled | None:
    """`(accuracy where the longer answer is chosen + accuracy where the shorter one is) / 2`.

    It is the balanced accuracy (Brodersen et al., 2010) of the question whether the longer answer
    is the better one: whoever goes by length alone gets 0.5. Pairs of one length take no part. Its
    interval is the percentile bootstrap's, with both halves drawn apart.

    Returns:
        None where one of the halves has no scored pair.
    """
    judged = scored(pairs)
    halves = [
        accuracy(
            [pair for pair in judged if sign * length_difference(pair) > 0],
            baselines=baselines,
            seed=seed,
            num_draws=num_draws,
            confidence=confidence,
        )
        for sign in (1, -1)
    ]
    longer, shorter = halves
    if longer is None or shorter is None:
        return None
    # Other seeds for the halves: with one, both would be high in the same draws.
    draws = [
        draw_shares(round(half.value * half.num_pairs), half.num_pairs,
                    seed=2 * seed + place, num_draws=num_draws)
        for place, half in enumerate((longer, shorter))
    ]  # fmt: skip
    outside = (1 - check_confidence(confidence)) / 2
    low, high = np.quantile((draws[0] + draws[1]) / 2, [outside, 1 - outside])
    return LengthControlled(
        value=(longer.value + shorter.value) / 2,
        low=float(low),
        high=float(high),
        longer_chosen=longer,
        shorter_chosen=shorter,
        baselines={
            name: (value + shorter.baselines[name]) / 2 for name, value in longer.baselines.items()
        },
    )


def longer_scored_higher(pairs: Iterable[ScoredPair]) -> float | None:
    """The share of pairs, of those of different length, whose longer answer has the higher score.

    Beside the share of those whose longer answer is chosen it says whether the scores follow
    length more than the people did. A tied score counts half. None where there are no such pairs.
    """
    signs = [
        np.sign(gap) * np.sign(length_difference(pair))
        for pair in pairs
        if (gap := difference(pair)) is not None and length_difference(pair)
    ]
    return fmean((sign + 1) / 2 for sign in signs) if signs else None


def score_length_correlation(pairs: Iterable[ScoredPair]) -> float | None:
    """Spearman's correlation of score and length in characters, over all answers that have a score.

    An answer in several pairs counts in each. None where all lengths or all scores are the same.
    """
    answers = [(score, len(text)) for _, text, score in _answers(pairs)]
    return spearman([score for score, _ in answers], [float(length) for _, length in answers])


def spearman(values: Sequence[float], others: Sequence[float]) -> float | None:
    """Pearson's correlation of the ranks; equal values share the mean of theirs.

    None where either side has fewer than two different values.
    """
    ranks, other_ranks = (_ranks(side) for side in (values, others))
    deviations, other_deviations = ranks - ranks.mean(), other_ranks - other_ranks.mean()
    scale = math.sqrt(float(deviations @ deviations) * float(other_deviations @ other_deviations))
    if scale == 0:
        return None
    # Rounding must not carry it past its bounds.
    return max(-1.0, min(1.0, float(deviations @ other_deviations) / scale))


def _ranks(values: Sequence[float]) -> np.ndarray:
    if not len(values):
        return np.zeros(1)
    _, place, counts = np.unique(np.array(values), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place]


def _answers(pairs: Iterable[ScoredPair]) -> list[tuple[Conversation, str, float]]:
    """Every answer with a finite score, also of pairs whose other answer has none."""
    return [
        (pair.prompt, text, score)
        for pair in pairs
        for text, score in (
            (pair.chosen, pair.score_chosen),
            (pair.rejected, pair.score_rejected),
        )
        if score is not None and math.isfinite(score)
    ]


# ------------------------------------------------------------------------------------------ scores


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreDistribution:
    """Where scores lie."""

    num_answers: int
    mean: float
    standard_deviation: float
    """Of all of them around their mean (divided by their number)."""
    quantiles: Mapping[float, float]
    """Score at each of `QUANTILES`, interpolated."""
    identical_share: float
    """Share of the different answers (prompt and text) whose score another one has, too."""
    saturated_low: float | None
    """Share of the scores within 1 % of their range from the least; None where all are equal."""
    saturated_high: float | None
    """As much from the greatest."""
    largest_repeat_difference: float | None
    """The most that scores of one answer to one prompt differ by; None where none was scored
    twice. Other than 0, scores depend on what they are computed beside."""


def score_distribution(pairs: Iterable[ScoredPair]) -> ScoreDistribution | None:
    """The distribution over all answers that have a finite score; None where none has."""
    answers = _answers(pairs)
    if not answers:
        return None
    scores = np.sort(np.array([score for _, _, score in answers]))
    by_answer: dict[tuple[Conversation, str], list[float]] = defaultdict(list)
    for prompt, text, score in answers:
        by_answer[prompt, text].append(score)
    owners = Counter(score for found in by_answer.values() for score in set(found))
    num_identical = sum(
        any(owners[score] > 1 for score in found) for found in by_answer.values()
    )  # fmt: skip
    repeats = [max(found) - min(found) for found in by_answer.values() if len(found) > 1]
    least, greatest = float(scores[0]), float(scores[-1])
    edge = _EDGE * (greatest - least)
    return ScoreDistribution(
        num_answers=len(scores),
        mean=float(scores.mean()),
        standard_deviation=float(scores.std()),
        quantiles=dict(zip(QUANTILES, np.quantile(scores, QUANTILES).tolist(), strict=True)),
        identical_share=num_identical / len(by_answer),
        saturated_low=float(np.mean(scores <= least + edge)) if edge else None,
        saturated_high=float(np.mean(scores >= greatest - edge)) if edge else None,
        largest_repeat_difference=max(repeats, default=None),
    )


# ---------------------------------------------------------------------------------------- ensemble


Column = Sequence[tuple[float | None, float | None]]
"""What one scorer says of the chosen and the rejected answer of each pair, in the pairs' order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far two scorers say the same of the same pairs."""

    first: str
    second: str
    num_pairs: int
    """Those that both have scored."""
    same_verdict_share: float
    """Share of them whose better answer is the same for both; a tie agrees with a tie only."""
    kendall: float | None
    """Tau-b over the scores of all answers of these pairs; see `kendall`."""


def agreements(columns: Mapping[str, Column]) -> list[Agreement]:
    """The agreement of every two members; two that have no pair in common are left out.

    Raises:
        DataError: The columns differ in length.
    """
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            "every column of scores needs a row for each pair, but they differ in length: "
            + ", ".join(f"{name} has {length}" for name, length in lengths.items())
        )
    found = []
    for (first, column), (second, other) in combinations(columns.items(), 2):
        rows = [
            (a, b, c, d)
            for (a, b), (c, d) in zip(column, other, strict=True)
            if a is not None and b is not None and c is not None and d is not None
            and all(math.isfinite(score) for score in (a, b, c, d))
        ]  # fmt: skip
        if rows:
            found.append(
                Agreement(
                    first=first,
                    second=second,
                    num_pairs=len(rows),
                    same_verdict_share=fmean(
                        (a > b) - (a < b) == (c > d) - (c < d) for a, b, c, d in rows
                    ),
                    kendall=kendall(
                        [score for a, b, _, _ in rows for score in (a, b)],
                        [score for _, _, c, d in rows for score in (c, d)],
                    ),
                )
            )
    return found


def kendall(values: Sequence[float], others: Sequence[float]) -> float | None:
    """Kendall's tau-b: (concordant - discordant) / sqrt(untied in one * untied in the other).

    All counted over pairs of positions. None where either side has fewer than two different values.
    """
    both = sorted(zip(values, others, strict=True))
    discordant = 0
    seen: list[float] = []
    for _, other in both:
        # Of positions with one value the others come in rising order: none of them is ahead.
        discordant += len(seen) - bisect.bisect_right(seen, other)
        bisect.insort(seen, other)
    total = math.comb(len(both), 2)
    tied, tied_other, tied_in_both = (
        sum(math.comb(count, 2) for count in Counter(side).values())
        for side in (values, others, both)
    )
    if total in (tied, tied_other):
        return None
    decided = total - tied - tied_other + tied_in_both
    return (decided - 2 * discordant) / math.sqrt((total - tied) * (total - tied_other))
