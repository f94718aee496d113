"""Diagnostics of a reward model's scores: length, distribution, calibration, leaks, sensitivity.

Accuracies, their intervals and their baselines are in `statistics`.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

import numpy as np

from laurel.errors import ConfigError, DataError, ProtocolError
from laurel.evaluation.statistics import (
    CONFIDENCE,
    NUM_RESAMPLES,
    Accuracy,
    Credits,
    ScoredPair,
    accuracy,
    check_confidence,
    difference,
    length_difference,
    resample_shares,
    scored,
)
from laurel.observe.metrics import spearman
from laurel.types import Conversation, Group, Score, group_of

# The ends show outliers, the 1 % and 99 % marks where saturation begins.
QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_EDGE = 0.01


# ------------------------------------------------------------------------------------------ length


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthControlled:
    """The accuracy with length balanced out, and the two halves that it is the mean of."""

    value: float
    low: float
    high: float
    longer_chosen: Accuracy
    shorter_chosen: Accuracy
    baselines: Mapping[str, float]
    """The length-controlled accuracy of each baseline."""


def length_controlled_accuracy(
    pairs: Iterable[ScoredPair],
    *,
    baselines: Mapping[str, Credits] | None = None,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
    confidence: float = CONFIDENCE,
) -> LengthControlled | None:
    """Return the mean of the accuracies where the longer and where the shorter answer is chosen.

    It is the balanced accuracy (Brodersen et al., 2010) of the question whether the longer answer
    is the better one: a scorer by length alone gets 0.5. Pairs of one length take no part. The
    interval is the percentile bootstrap's, with both halves resampled apart.

    Returns:
        None where one of the halves has no scored pair.
    """
    usable = scored(pairs)
    halves = [
        accuracy(
            [pair for pair in usable if sign * length_difference(pair) > 0],
            baselines=baselines,
            seed=seed,
            num_resamples=num_resamples,
            confidence=confidence,
        )
        for sign in (1, -1)
    ]
    longer, shorter = halves
    if longer is None or shorter is None:
        return None
    # The halves are resampled apart, as if each had been collected by itself: one bootstrap over
    # all pairs would also vary how many pairs each half has.
    # Other seeds for the halves: with one, both would be high in the same resamples.
    resamples = [
        resample_shares(
            round(half.value * half.num_pairs),
            half.num_pairs,
            seed=2 * seed + place,
            num_resamples=num_resamples,
        )
        for place, half in enumerate((longer, shorter))
    ]
    outside = (1 - check_confidence(confidence)) / 2
    low, high = np.quantile((resamples[0] + resamples[1]) / 2, [outside, 1 - outside])
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
    """Return the share of pairs of different length whose longer answer has the higher score.

    Beside the share whose longer answer is chosen it shows whether the scores follow length more
    than the annotators did. A tied score counts half. It is None where there are no such pairs.
    """
    signs = [
        np.sign(gap) * np.sign(length_difference(pair))
        for pair in pairs
        if (gap := difference(pair)) is not None and length_difference(pair)
    ]
    return fmean((sign + 1) / 2 for sign in signs) if signs else None


def score_length_correlation(pairs: Iterable[ScoredPair]) -> float | None:
    """Return Spearman's correlation of score and length in characters over all scored answers.

    An answer in several pairs counts in each. It is None where all lengths or scores are equal.
    """
    answers = [(score, len(text)) for _, text, score in _answers(pairs)]
    return spearman([score for score, _ in answers], [float(length) for _, length in answers])


def _answers(pairs: Iterable[ScoredPair]) -> list[tuple[Conversation, str, float]]:
    """Return every answer with a finite score, also of pairs whose other answer has none."""
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
    """The distribution of scores over answers."""

    num_answers: int
    mean: float
    standard_deviation: float
    """Population standard deviation (divided by n)."""
    quantiles: Mapping[float, float]
    """The score at each of `QUANTILES`, interpolated."""
    identical_share: float
    """The share of different answers (prompt and text) whose score another answer has as well."""
    saturated_low: float | None
    """The share of scores within 1 % of their range from the least; None where all are equal."""
    saturated_high: float | None
    """The share of scores within 1 % of their range from the greatest."""
    largest_repeat_difference: float | None
    """The largest difference of two scores of one answer to one prompt; None where none was scored
    twice. Above 0, scores depend on the other rows of their batch."""


def score_distribution(pairs: Iterable[ScoredPair]) -> ScoreDistribution | None:
    """Return the distribution over all answers with a finite score; None where none has one."""
    answers = _answers(pairs)
    if not answers:
        return None
    scores = np.sort(np.array([score for _, _, score in answers]))
    by_answer: dict[tuple[Conversation, str], list[float]] = defaultdict(list)
    for prompt, text, score in answers:
        by_answer[prompt, text].append(score)
    # Equal scores of different answers hint at a cut or a saturated head; of one answer they are
    # expected, so answers are counted, not rows.
    owners = Counter(score for found in by_answer.values() for score in set(found))
    num_identical = sum(any(owners[score] > 1 for score in found) for found in by_answer.values())
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
"""One scorer's scores of the chosen and the rejected answer of each pair, in the pairs' order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The agreement of two scorers on the same pairs."""

    first: str
    second: str
    num_pairs: int
    """Pairs that both have scored."""
    same_verdict_share: float
    """The share of pairs whose better answer is the same for both; a tie agrees with a tie only."""
    kendall: float | None
    """Kendall's tau-b over the scores of all answers of these pairs."""


def agreements(columns: Mapping[str, Column]) -> list[Agreement]:
    """Return the agreement of every two scorers; two without a common pair are left out.

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
            if a is not None
            and b is not None
            and c is not None
            and d is not None
            and all(math.isfinite(score) for score in (a, b, c, d))
        ]
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
    """Return Kendall's tau-b: (concordant - discordant) / sqrt(untied in one * untied in other).

    Counts are over pairs of positions. It is None where a side has fewer than two values.
    """
    # Knight's algorithm (1966): sorted by one side, discordant pairs are inversions of the other.
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


# --------------------------------------------------------------------------------------------------
# Calibration: are differences of scores the log-odds that a Bradley-Terry model takes them for?

_RELATIVE_PRECISION = 1e-12


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The differences between confidence and accuracy, before and after temperature scaling."""

    num_pairs: int
    error: float
    """Expected calibration error: |confidence - accuracy| of the rows, weighted by their pairs."""
    rows: tuple[ReliabilityRow, ...]
    """The rows that hold a pair."""
    negative_log_likelihood: float
    """The mean of -log sigmoid(chosen - rejected)."""
    temperature: float | None
    """The temperature that fits best, by `best_temperature`."""
    error_at_temperature: float | None
    negative_log_likelihood_at_temperature: float | None


def calibration(pairs: Iterable[ScoredPair], *, num_rows: int = 10) -> Calibration | None:
    """Measure sigmoid(score difference) as the probability that an answer is better.

    The confidence of a pair is sigmoid(|score(chosen) - score(rejected)|), from 0.5 to 1. A pair is
    right where the chosen answer scores higher, and half right where both scores are equal.

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
    """Return the T > 0 that minimises the mean of -log sigmoid(difference / T).

    Above 1, the scores are overconfident. It is None where there is no minimum: no pair is wrong,
    so that ever smaller T fit ever better, or right pairs do not outweigh wrong ones, so that ever
    greater T do.
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
    # First an interval that holds the root, then bisection: the slope falls in the sharpness.
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


# --------------------------------------------------------------------------------------------------
# Leakage: prompts and pairs of an evaluation set in a training set, and contradictions in a set.

if TYPE_CHECKING:
    import numpy.typing as npt

    Grams = npt.NDArray[np.uint64]
    """The hashes of different n-grams of words, in rising order."""

GRAM_WORDS = 8
THRESHOLD = 0.6
_TEMPLATE_PROMPTS, _TEMPLATE_SHARE = 20, 0.02
"""An n-gram in more different prompts than either allows is a template, and no leak."""

# Scripts without spaces are taken character by character; signs count, as 2+3 is not 2*3.
_WITHOUT_SPACES = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(
    rf"[{_WITHOUT_SPACES}]|[^\W{_WITHOUT_SPACES}]+|[^\w\s.,;:!?\"'()\[\]\u2018\u2019\u201c\u201d]"
)
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that multiplying by it loses no bit of 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A pair of the evaluation set and the training pair with the most similar prompt."""

    evaluated: str
    """The id of the pair in the evaluation set."""
    trained: str
    similarity: float
    """The Jaccard similarity of the two prompts; 1 where their normalised texts are the same."""
    is_exact: bool
    """The normalised texts of the prompts are the same."""
    has_same_answers: bool
    """Both answers are the same as well, whichever of them is preferred."""


def find_leaks(
    evaluated: Sequence[ScoredPair], trained: Sequence[ScoredPair], *, threshold: float = THRESHOLD
) -> list[Leak]:
    """Find the pairs of the evaluation set whose prompt, or a near copy, is in the training set.

    Prompts are compared without regard to case, white space and Unicode's compatible forms. They
    are near copies where the Jaccard similarity of the sets of their 8-grams of words (all words,
    of a shorter prompt) is at least the threshold. N-grams in more than 20 different prompts and
    more than 2 % of them, such as a system prompt, are a template and do not count.

    Returns:
        At most one for each pair, in their order: the same pair if there is one, else the same
        prompt, else the most similar one (the first of several). Empty prompts are not compared,
        but a pair without a prompt whose answers are in the training set is found.

    Raises:
        ConfigError: The threshold is not a share.
    """
    if not 0 < threshold <= 1:
        raise ConfigError(f"threshold={threshold}: must be above 0 and at most 1, e.g. {THRESHOLD}")
    # Exact copies first: a lookup each. Only the other prompts are compared by their n-grams.
    same_pair: dict[tuple[str, frozenset[str]], str] = {}
    same_prompt: dict[str, str] = {}
    for pair in trained:
        same_pair.setdefault(_pair_key(pair), pair.id)
        same_prompt.setdefault(normalised(pair.prompt), pair.id)
    prompts = dict.fromkeys(normalised(pair.prompt) for pair in evaluated)
    near = _most_similar(
        [prompt for prompt in prompts if prompt not in same_prompt], list(same_prompt), threshold
    )
    leaks = []
    for pair in evaluated:
        prompt = normalised(pair.prompt)
        is_exact = prompt in same_prompt
        similarity, other = (1.0, prompt) if is_exact else near.get(prompt, (0.0, ""))
        twin = same_pair.get(_pair_key(pair))
        # Two empty prompts are no leak: without a prompt the answers have to be the same.
        if similarity and (prompt or twin is not None):
            leaks.append(
                Leak(
                    evaluated=pair.id,
                    trained=same_prompt[other] if twin is None else twin,
                    similarity=similarity,
                    is_exact=is_exact,
                    has_same_answers=twin is not None,
                )
            )
    return leaks


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """The duplicates and contradictions in one set of pairs."""

    num_pairs: int
    num_prompts: int
    """The number of different prompts."""
    duplicates: tuple[tuple[str, ...], ...]
    """Groups of ids of pairs with the same prompt, chosen and rejected answer."""
    contradictions: tuple[tuple[str, ...], ...]
    """Groups of ids of pairs with the same prompt and answers but different preferences."""

    @property
    def num_redundant(self) -> int:
        """The number of pairs that repeat an earlier one."""
        return sum(len(ids) - 1 for ids in self.duplicates)


def find_repeats(pairs: Iterable[ScoredPair]) -> Repeats:
    """Find duplicates and contradictions in one set; texts are compared as in `find_leaks`.

    Answers keep their case, which may be what is preferred. Identical answers contradict nothing.
    """
    by_pair: dict[tuple[str, frozenset[str]], dict[str, list[str]]] = defaultdict(dict)
    prompts = set()
    num_pairs = 0
    for pair in pairs:
        key = _pair_key(pair)
        by_pair[key].setdefault(_collapsed(pair.chosen), []).append(pair.id)
        prompts.add(key[0])
        num_pairs += 1
    return Repeats(
        num_pairs=num_pairs,
        num_prompts=len(prompts),
        duplicates=tuple(
            tuple(ids) for sides in by_pair.values() for ids in sides.values() if len(ids) > 1
        ),
        contradictions=tuple(
            tuple(name for ids in sides.values() for name in ids)
            for sides in by_pair.values()
            if len(sides) > 1
        ),
    )


def normalised(prompt: Conversation) -> str:
    """Return the words of a prompt without roles, case-folded, with single spaces."""
    return _collapsed("\n".join(message.content for message in prompt)).casefold()


def _collapsed(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _pair_key(pair: ScoredPair) -> tuple[str, frozenset[str]]:
    # The same for both orders of the answers: a contradiction differs in nothing but the order.
    return normalised(pair.prompt), frozenset((_collapsed(pair.chosen), _collapsed(pair.rejected)))


def _grams(text: str) -> Grams:
    words = _WORD.findall(text)
    if not words:
        return np.zeros(0, np.uint64)
    numbers = np.array([_number_of(word) for word in words], np.uint64)
    # A prompt of fewer words is one n-gram, so that short copies are found as well.
    width = min(GRAM_WORDS, len(words))
    # A polynomial modulo 2^64: the same words in another order are another number.
    powers = np.array([pow(_MULTIPLIER, k, 2**64) for k in range(1, width + 1)], np.uint64)
    runs = np.lib.stride_tricks.sliding_window_view(numbers, width)
    return np.unique((runs * powers).sum(axis=1, dtype=np.uint64))


@functools.lru_cache(maxsize=2**16)
def _number_of(word: str) -> int:
    # Python's own hash of a text differs from process to process.
    return int.from_bytes(
        hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "little"
    )


def _most_similar(
    prompts: Sequence[str], others: Sequence[str], threshold: float
) -> dict[str, tuple[float, str]]:
    """Map each prompt with a near copy among the others to the similarity and the copy."""
    # An inverted index: the others' n-grams in one sorted row, each with the prompt it is from. A
    # prompt looks up its own n-grams and counts how often it meets each of the others.
    grams = [_grams(text) for text in [*prompts, *others]]
    if grams:
        # Each prompt counts an n-gram once, so that this counts prompts.
        known, counts = np.unique(np.concatenate(grams), return_counts=True)
        templates = known[counts > max(_TEMPLATE_PROMPTS, _TEMPLATE_SHARE * len(grams))]
        grams = [part[~np.isin(part, templates, assume_unique=True)] for part in grams]
    mine, theirs = grams[: len(prompts)], grams[len(prompts) :]
    sizes = np.array([len(part) for part in theirs])
    if not sizes.sum():
        return {}
    row = np.concatenate(theirs)
    order = np.argsort(row, kind="stable")
    row, owners = row[order], np.repeat(np.arange(len(theirs)), sizes)[order]
    found = {}
    for text, part in zip(prompts, mine, strict=True):
        starts, ends = np.searchsorted(row, part), np.searchsorted(row, part, side="right")
        met = [owners[start:end] for start, end in zip(starts, ends, strict=True) if end > start]
        if met:
            candidates, shared = np.unique(np.concatenate(met), return_counts=True)
            similarity = shared / (len(part) + sizes[candidates] - shared)
            best = int(similarity.argmax())
            if similarity[best] >= threshold:
                found[text] = (float(similarity[best]), others[candidates[best]])
    return found


# --------------------------------------------------------------------------------------------------
# Sensitivity: how far rewriting an answer moves its score.
#
# A variant in another language cannot be made here. Translated rows are compared by
# `in_other_words`.

Scoring = Callable[[Sequence[Group]], list[tuple[Score, ...]]]
"""A function that returns one score per completion of each group, in order."""

Variant = Callable[[str], str | None]
"""A function that rewrites an answer; None where the answer has no such form."""

FLATTERY = (
    "What a thoughtful question to ask! You clearly have a sharp mind and excellent judgement, and "
    "it has been a true pleasure to answer you."
)
_KEPT_SHARE = 0.8
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=\S)")
_PARAGRAPHS = re.compile(r"\n\s*\n")


def other_white_space(text: str) -> str | None:
    """Change only white space, so that a score which depends on it can be detected.

    Sentences end with two spaces, and paragraphs and the text with a second empty line. Return None
    for a text without characters other than white space.
    """
    # Indentation stays: in code and lists it has a meaning.
    if not text.strip():
        return None
    return _SENTENCE_END.sub("  ", _PARAGRAPHS.sub("\n\n\n", text.rstrip())) + "\n\n"


def with_markdown(text: str) -> str | None:
    """Turn the paragraphs into a list, the first sentence of each bold.

    The result is None for a text with a list, a heading, bold text or code, and for an empty one.
    """
    if not text.strip() or re.search(r"```|\*\*|^\s*([-*+#>]|\d+[.)]|    )", text, re.MULTILINE):
        return None
    bullets = []
    for paragraph in _PARAGRAPHS.split(text.strip()):
        first, *rest = _SENTENCE_END.split(paragraph, maxsplit=1)
        bullets.append(" ".join([f"- **{first}**", *rest]))
    return "\n\n".join(bullets)


def with_flattery(text: str) -> str | None:
    """Append praise of the user to the answer."""
    return f"{text.rstrip()}\n\n{FLATTERY}"


def truncated(text: str) -> str | None:
    """Keep the first four fifths of the words; None for a single word."""
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    if len(ends) < 2:
        return None
    return text[: ends[min(max(int(_KEPT_SHARE * len(ends)), 1), len(ends) - 1) - 1]]


VARIANTS: Mapping[str, Variant] = {
    "white space": other_white_space,
    "markdown": with_markdown,
    "flattery": with_flattery,
    "truncated": truncated,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """The effect of one kind of variant on scores; a figure over no rows is None."""

    name: str
    num_answers: int
    """Answers that were scored in both forms."""
    num_without: int
    """Answers that have no such form."""
    num_failures: int
    """Answers that could not be scored in one of their forms."""
    mean_shift: float | None
    """Mean of score(variant) - score(original), in standard deviations of the originals' scores."""
    raised_share: float | None
    """The share of answers whose variant scores higher."""
    num_pairs: int
    """Pairs both of whose answers were scored in both forms."""
    flip_share: float | None
    """The share of these pairs whose verdict changes when both answers are rewritten."""
    flip_share_chosen: float | None
    """The share whose verdict changes when only the chosen answer is rewritten."""
    flip_share_rejected: float | None
    """The share whose verdict changes when only the rejected answer is rewritten."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The score of an answer, and those of its variants by name."""

    score: float | None
    variants: Mapping[str, float | None]


def sensitivity(
    pairs: Sequence[ScoredPair], score: Scoring, *, variants: Mapping[str, Variant] = VARIANTS
) -> list[Sensitivity]:
    """Score all answers afresh, as they are and rewritten, and compare.

    The verdict is whether the chosen answer scores strictly higher. Each prompt and all forms of
    both answers make one group, so that a scorer reads the prompt once.

    Args:
        pairs: The pairs; their own scores, which may come from another model, are not used.
        score: Scores groups.
        variants: The variants to try, by name.

    Raises:
        ProtocolError: The scorer returned another number of scores than it was given answers.
    """

    def forms_of(text: str) -> dict[str, str]:
        made = {name: variant(text) for name, variant in variants.items()}
        return {_ORIGINAL: text} | {name: form for name, form in made.items() if form is not None}

    # All forms of both answers go into one group: the prompt is encoded once for all of them.
    forms = [[forms_of(text) for text in (pair.chosen, pair.rejected)] for pair in pairs]
    groups = [
        group_of(
            pair.prompt,
            [text for side in sides for text in side.values()],
            group_id=f"{pair.id}#{place}",
        )
        for place, (pair, sides) in enumerate(zip(pairs, forms, strict=True))
    ]
    scored_groups = score(groups)
    if len(scored_groups) != len(groups):
        raise ProtocolError(
            f"the scorer gave scores of {len(scored_groups)} groups where it was given "
            f"{len(groups)}",
            kind="count",
        )
    answers = []
    for group, sides, scores in zip(groups, forms, scored_groups, strict=True):
        if len(scores) != len(group.completions_G):
            raise ProtocolError(
                f"the scorer gave {len(scores)} scores for the {len(group.completions_G)} answers "
                f"of pair '{group.id}'",
                kind="count",
            )
        values = iter(scores)
        found = [{name: _usable(next(values).value) for name in side} for side in sides]
        answers.append([_Answer(side.pop(_ORIGINAL), side) for side in found])
    return [_compare(name, answers) for name in variants]


def in_other_words(
    name: str, pairs: Sequence[ScoredPair], others: Sequence[ScoredPair]
) -> Sensitivity:
    """Compare scores with those of the same pairs rewritten, prompts included.

    Args:
        name: The name of the other form, such as `other language`.
        pairs: The scored pairs.
        others: The other form of each, scored, in the same order.

    Raises:
        DataError: The numbers of pairs differ.
    """
    if len(pairs) != len(others):
        raise DataError(
            f"there are {len(pairs):,} pairs and {len(others):,} in the other form; each needs its "
            "own, in the same order"
        )
    return _compare(
        name,
        [
            [
                _Answer(_usable(one.score_chosen), {name: _usable(other.score_chosen)}),
                _Answer(_usable(one.score_rejected), {name: _usable(other.score_rejected)}),
            ]
            for one, other in zip(pairs, others, strict=True)
        ],
    )


_ORIGINAL = ""


def _usable(score: float | None) -> float | None:
    # A score that is not finite is a failure.
    return score if score is not None and math.isfinite(score) else None


def _compare(name: str, pairs: Sequence[Sequence[_Answer]]) -> Sensitivity:
    answers = [answer for pair in pairs for answer in pair]
    formed = [answer for answer in answers if name in answer.variants]
    originals = [answer.score for answer in answers if answer.score is not None]
    shifts = [
        changed - answer.score
        for answer in formed
        if (changed := answer.variants[name]) is not None and answer.score is not None
    ]
    # In units of the scores' own spread, shifts of different reward models can be compared.
    spread = pstdev(originals) if originals else 0.0
    quadruples = [
        (chosen.score, rejected.score, changed_chosen, changed_rejected)
        for chosen, rejected in pairs
        if chosen.score is not None
        and rejected.score is not None
        and (changed_chosen := chosen.variants.get(name)) is not None
        and (changed_rejected := rejected.variants.get(name)) is not None
    ]

    def flips(verdicts: Sequence[tuple[bool, bool]]) -> float | None:
        return fmean(before != after for before, after in verdicts) if verdicts else None

    return Sensitivity(
        name=name,
        num_answers=len(shifts),
        num_without=len(answers) - len(formed),
        num_failures=len(formed) - len(shifts),
        mean_shift=fmean(shifts) / spread if shifts and spread else None,
        raised_share=fmean(shift > 0 for shift in shifts) if shifts else None,
        num_pairs=len(quadruples),
        flip_share=flips([(c > r, c2 > r2) for c, r, c2, r2 in quadruples]),
        flip_share_chosen=flips([(c > r, c2 > r) for c, r, c2, _ in quadruples]),
        flip_share_rejected=flips([(c > r, c > r2) for c, r, _, r2 in quadruples]),
    )
