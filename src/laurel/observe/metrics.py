"""Computes metrics of a reward model from its scores, for training and validation.

Each metric is computed once over all pairs or completions that are passed in, and is never a mean
of means, so pass a whole step or a whole validation set. Sums use `math.fsum` in float64, so the
result does not depend on the order of batches. Standard deviations are those of the population
(divided by n, not n - 1), and are computed in two passes.

An undefined metric is absent. It is never 0.0 or NaN, so that the best checkpoint cannot be one
that was not measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from laurel.types import Conversation

FloatArray = npt.NDArray[np.float64]

PREFERENCE_METRICS = (
    "loss",
    "accuracy",
    "rewards_chosen_mean",
    "rewards_rejected_mean",
    "rewards_mean",
    "rewards_std",
    "margin_mean",
    "margin_std",
    "score_ties",
    "ece",
    "top1",
    "score_length_correlation",
    "longer_wins_baseline",
    "num_valid_samples",
    "num_nonfinite",
)
"""The loss, and every name that `preference_metrics` can return."""

STEP_METRICS = (
    "step_accuracy",
    "erroneous_accuracy",
    "correct_accuracy",
    "first_error_f1",
    "num_valid_samples",
)
"""Every name that `step_metrics` can return."""

NUM_CALIBRATION_BINS = 10

_LARGEST_SCORE = float(np.finfo(np.float32).max)
"""The largest float32; by the scoring contract scores are float32, so a larger one overflowed."""

_LOWER_IS_BETTER = re.compile(
    r"(^|[/_:])(loss|ece|mse|mse/[^/]+|score_ties|tie_share|num_nonfinite|grad_norm|time)$"
)
_ATTRIBUTE_CORRELATION = re.compile(r"(^|[/_:])pearson/[^/]+$")


class _Pairs(NamedTuple):
    """The pairs of completions that differ in rank and have two finite scores."""

    better_P: FloatArray
    worse_P: FloatArray
    better_lengths_P: FloatArray
    worse_lengths_P: FloatArray


def preference_metrics(
    scores_BG: Sequence[Sequence[float]],
    ranks_BG: Sequence[Sequence[int]],
    lengths_BG: Sequence[Sequence[int]] | None = None,
) -> dict[str, float]:
    """Compare scores with the annotators' ranks (lower is better), over all groups together.

    `lengths_BG` are the lengths of the answers, in any unit. The metrics are:

    - `accuracy`: the share of pairs of different rank whose better side scores strictly higher.
      Equal scores count as wrong, and `score_ties` is their share.
    - `rewards_chosen_mean`, `rewards_rejected_mean`: means over the better and the worse sides.
    - `rewards_mean`, `rewards_std`: over completions. `margin_mean`, `margin_std`: over pairs.
    - `ece`: the expected calibration error, as `calibration_error` defines it.
    - `top1`: the share of groups of more than two whose best completion scores strictly highest.
    - `score_length_correlation`: Spearman's, over completions. `longer_wins_baseline`: the mean
      `longer_credit` over pairs; equal lengths count half.
    - `num_valid_samples`: the number of pairs. `num_nonfinite`: the number of scores that are NaN
      or infinite, which no other metric counts; it is absent if there are none.

    Without a valid pair, only `num_valid_samples` = 0 is present.
    """
    _check_sizes("ranks", scores_BG, ranks_BG)
    if lengths_BG is not None:
        _check_sizes("lengths", scores_BG, lengths_BG)
    metrics: dict[str, float] = {}
    pairs = _pairs(scores_BG, ranks_BG, lengths_BG)
    if len(pairs.better_P):
        margins_P = pairs.better_P - pairs.worse_P
        metrics |= {
            "accuracy": _mean(margins_P > 0),
            "rewards_chosen_mean": _mean(pairs.better_P),
            "rewards_rejected_mean": _mean(pairs.worse_P),
            "margin_mean": _mean(margins_P),
            "margin_std": _std(margins_P),
            "score_ties": _mean(margins_P == 0),
            "ece": calibration_error(reliability(margins_P)),
        }
        scores_N = np.array([score for scores_G in scores_BG for score in scores_G], np.float64)
        used_N = np.array([_is_usable(score) for score in scores_N])
        metrics |= {"rewards_mean": _mean(scores_N[used_N]), "rewards_std": _std(scores_N[used_N])}
        if lengths_BG is not None:
            lengths_N = np.array([length for lengths_G in lengths_BG for length in lengths_G])
            correlation = spearman(scores_N[used_N], lengths_N[used_N])
            if correlation is not None:
                metrics["score_length_correlation"] = correlation
            lengths = zip(pairs.better_lengths_P, pairs.worse_lengths_P, strict=True)
            metrics["longer_wins_baseline"] = _mean([longer_credit(*both) for both in lengths])
        hits = _top1_hits(scores_BG, ranks_BG)
        if hits:
            metrics["top1"] = _mean(hits)
    metrics["num_valid_samples"] = float(len(pairs.better_P))
    num_nonfinite = sum(not _is_usable(score) for scores_G in scores_BG for score in scores_G)
    if num_nonfinite:
        metrics["num_nonfinite"] = float(num_nonfinite)
    return metrics


def step_metrics(
    values_NS: Sequence[Sequence[float]], labels_NS: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Compare the values of steps with their labels, which are probabilities or NaN.

    - `step_accuracy`: the share of steps whose value is on the label's side of 1/2. Labels of 1/2
      and values that are NaN or infinite do not count.
    - `erroneous_accuracy`, `correct_accuracy`, `first_error_f1`: the figures of ProcessBench
      (`first_error_metrics`) at the threshold 1/2, over answers whose steps are all labelled.
    - `num_valid_samples`: the number of steps that `step_accuracy` counts.
    """
    _check_sizes("labels", values_NS, labels_NS)
    right = [
        (value >= 0.5) == (label > 0.5)
        for values_S, labels_S in zip(values_NS, labels_NS, strict=True)
        for value, label in zip(values_S, labels_S, strict=True)
        if (label > 0.5 or label < 0.5) and math.isfinite(value)
    ]
    whole = [
        (first_below(values_S, 0.5), first_below(labels_S, 0.5))
        for values_S, labels_S in zip(values_NS, labels_NS, strict=True)
        if not any(map(math.isnan, labels_S)) and all(map(math.isfinite, values_S))
    ]
    metrics = {"step_accuracy": _mean(right)} if right else {}
    metrics["num_valid_samples"] = float(len(right))
    return metrics | first_error_metrics(*zip(*whole, strict=True)) if whole else metrics


def first_below(values_S: Sequence[float], threshold: float) -> int:
    """Return the index of the first step whose value is below a threshold; -1 if none is."""
    return next((index for index, value in enumerate(values_S) if value < threshold), -1)


def first_error_metrics(found_N: Sequence[int], wanted_N: Sequence[int]) -> dict[str, float]:
    """Compute the figures of ProcessBench (Zheng et al. 2024, arXiv:2412.06559).

    - `erroneous_accuracy`: of the answers with an error, the share whose first error is found.
    - `correct_accuracy`: of the answers without one, the share in which none is found.
    - `first_error_f1`: the harmonic mean of the two.

    Args:
        found_N: The index of the first step that is found wrong in each answer, or -1.
        wanted_N: The index of the first step that is wrong, or -1.
    """
    hits: dict[bool, list[bool]] = {True: [], False: []}
    for found, wanted in zip(found_N, wanted_N, strict=True):
        hits[wanted >= 0].append(found == wanted)
    figures = {
        name: _mean(of_kind)
        for name, of_kind in (("erroneous_accuracy", hits[True]), ("correct_accuracy", hits[False]))
        if of_kind
    }
    if len(figures) == 2:
        one, other = figures.values()
        figures["first_error_f1"] = 2 * one * other / (one + other) if one + other else 0.0
    return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityRow:
    """The pairs whose confidence lies in one range: at least `start`, and below `end`."""

    start: float
    end: float
    """The upper edge, which only the last row contains."""
    num_pairs: int
    confidence: float
    """The mean confidence of these pairs."""
    accuracy: float


def reliability(margins_P: npt.ArrayLike) -> tuple[ReliabilityRow, ...]:
    """Divide pairs by their confidence into 10 bins of equal width over [0.5, 1].

    A margin is the score of the better side minus that of the worse. The model's confidence is
    sigmoid(|margin|). The model is right if the margin is above 0: a tie is wrong, as it is in
    every accuracy. Bins without a pair have no row.
    """
    margins = np.asarray(margins_P, dtype=np.float64)
    # With the absolute margin exp never overflows, and the confidence is at least one half.
    confidence_P = 1.0 / (1.0 + np.exp(-np.abs(margins)))
    last = NUM_CALIBRATION_BINS - 1
    bins_P = np.minimum((confidence_P - 0.5) * 2 * NUM_CALIBRATION_BINS, last).astype(int)
    return tuple(
        ReliabilityRow(
            start=0.5 + index / (2 * NUM_CALIBRATION_BINS),
            end=0.5 + (index + 1) / (2 * NUM_CALIBRATION_BINS),
            num_pairs=int(inside_P.sum()),
            confidence=_mean(confidence_P[inside_P]),
            accuracy=_mean(margins[inside_P] > 0),
        )
        for index in np.unique(bins_P).tolist()
        for inside_P in [bins_P == index]
    )


def calibration_error(rows: Sequence[ReliabilityRow]) -> float:
    """Return the expected calibration error of the rows of `reliability`, in [0, 1].

    It is the mean over pairs of |accuracy - mean confidence| of their row (Guo et al. 2017,
    arXiv 1706.04599). There must be at least one row.
    """
    total = sum(row.num_pairs for row in rows)
    return math.fsum(row.num_pairs * abs(row.confidence - row.accuracy) for row in rows) / total


def attribute_metrics(
    predictions_NK: npt.ArrayLike, targets_NK: npt.ArrayLike, names: Sequence[str]
) -> dict[str, float]:
    """Return mean squared error `mse/<name>` and correlation `pearson/<name>` of each attribute.

    A target of NaN was not rated. An attribute without targets has no metrics, and one with equal
    targets or equal predictions has no correlation. Predictions that are NaN or infinite are
    omitted, and counted in `num_nonfinite`.
    """
    predictions = np.asarray(predictions_NK, dtype=np.float64).reshape(-1, len(names))
    targets = np.asarray(targets_NK, dtype=np.float64).reshape(-1, len(names))
    if predictions.shape != targets.shape:
        raise ValueError(f"{len(predictions)} rows of predictions, {len(targets)} of targets")
    metrics: dict[str, float] = {}
    usable_NK = np.isfinite(predictions) & (np.abs(predictions) <= _LARGEST_SCORE)
    for index, name in enumerate(names):
        used_N = usable_NK[:, index] & np.isfinite(targets[:, index])
        predicted, wanted = predictions[used_N, index], targets[used_N, index]
        if len(wanted):
            metrics[f"mse/{name}"] = _mean((predicted - wanted) ** 2)
        correlation = _pearson(predicted, wanted)
        if correlation is not None:
            metrics[f"pearson/{name}"] = correlation
    if not usable_NK.all():
        metrics["num_nonfinite"] = float((~usable_NK).sum())
    return metrics


def is_lower_better(metric_name: str) -> bool:
    """Report whether a smaller value of this metric is better.

    It is for losses, errors, score ties, non-finite counts, gradient norms and times, in every form
    of the name: `loss`, `train/loss`, `validation-default_ece`, `val:validation-default_loss`.
    """
    if _ATTRIBUTE_CORRELATION.search(metric_name):
        return False
    if metric_name.startswith("timing/") and "per_sec" not in metric_name:
        return True
    return _LOWER_IS_BETTER.search(metric_name) is not None


def _pairs(
    scores_BG: Sequence[Sequence[float]],
    ranks_BG: Sequence[Sequence[int]],
    lengths_BG: Sequence[Sequence[int]] | None,
) -> _Pairs:
    better: list[float] = []
    worse: list[float] = []
    better_lengths: list[float] = []
    worse_lengths: list[float] = []
    for group, (scores_G, ranks_G) in enumerate(zip(scores_BG, ranks_BG, strict=True)):
        used = [index for index, score in enumerate(scores_G) if _is_usable(score)]
        indices = [(i, j) for i in used for j in used if ranks_G[i] < ranks_G[j]]
        better += [float(scores_G[i]) for i, _ in indices]
        worse += [float(scores_G[j]) for _, j in indices]
        if lengths_BG is not None:
            better_lengths += [lengths_BG[group][i] for i, _ in indices]
            worse_lengths += [lengths_BG[group][j] for _, j in indices]
    return _Pairs(
        np.array(better, dtype=np.float64),
        np.array(worse, dtype=np.float64),
        np.array(better_lengths, dtype=np.float64),
        np.array(worse_lengths, dtype=np.float64),
    )


def _top1_hits(
    scores_BG: Sequence[Sequence[float]], ranks_BG: Sequence[Sequence[int]]
) -> list[bool]:
    # There is one entry for each group of more than two that has a best, and only usable scores.
    hits: list[bool] = []
    for scores_G, ranks_G in zip(scores_BG, ranks_BG, strict=True):
        if len(scores_G) <= 2 or len(set(ranks_G)) < 2 or not all(map(_is_usable, scores_G)):
            continue
        # Several may share the best rank: one of them has to beat all others.
        best_rank = min(ranks_G)
        best = [s for s, rank in zip(scores_G, ranks_G, strict=True) if rank == best_rank]
        others = [s for s, rank in zip(scores_G, ranks_G, strict=True) if rank != best_rank]
        hits.append(max(best) > max(others))
    return hits


def _is_usable(score: float) -> bool:
    return abs(score) <= _LARGEST_SCORE  # false for NaN too


def _check_sizes(
    what: str, scores_BG: Sequence[Sequence[float]], others_BG: Sequence[Sequence[float]]
) -> None:
    scores_sizes = [len(scores_G) for scores_G in scores_BG]
    other_sizes = [len(others_G) for others_G in others_BG]
    if scores_sizes != other_sizes:
        raise ValueError(f"group sizes of scores {scores_sizes} and {what} {other_sizes} differ")


def _mean(values: Iterable[float]) -> float:
    numbers = [float(value) for value in values]
    return math.fsum(numbers) / len(numbers)


def _std(values: FloatArray) -> float:
    shifted = values - values.min()  # exact for equal values, which a rounded mean is not
    return math.sqrt(_mean((shifted - _mean(shifted)) ** 2))


def _pearson(left: FloatArray, right: FloatArray) -> float | None:
    # The correlation is undefined if one side does not vary.
    if len(left) < 2 or left.min() == left.max() or right.min() == right.max():
        return None
    left_deviation, right_deviation = _unit_deviation(left), _unit_deviation(right)
    return max(-1.0, min(1.0, math.fsum(left_deviation * right_deviation)))


def _unit_deviation(values: FloatArray) -> FloatArray:
    shifted = values - values.min()
    shifted /= shifted.max()  # squares of tiny differences must not vanish
    deviation = shifted - _mean(shifted)
    return np.asarray(deviation / math.sqrt(math.fsum(deviation**2)))


def spearman(values: npt.ArrayLike, others: npt.ArrayLike) -> float | None:
    """Return Spearman's correlation, Pearson's of the ranks; None if one side does not vary."""
    return _pearson(_average_ranks(values), _average_ranks(others))


def _average_ranks(values: npt.ArrayLike) -> FloatArray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    return np.asarray(ranks[inverse], dtype=np.float64)


# The only definition of the length of an answer, and of the baseline that prefers the longer one.
#
# Data reports, validations, evaluations and model cards use it, so that their metrics of the same
# pairs are equal.


def answer_length(messages: Conversation) -> int:
    """Count the characters of messages, including those that truncation would cut off."""
    return sum(len(message.content) for message in messages)


def longer_credit(better_length: float, worse_length: float) -> float:
    """Return the credit of a scorer by length for a pair: 1, 0, or half for equal lengths."""
    return 0.5 if better_length == worse_length else float(better_length > worse_length)
