"""Diagnostics of a reward model's scores: length, distribution, calibration, leaks, sensitivity.

Accuracies, their intervals and their baselines are in `statistics`.
"""

from __future__ import annotations

import bisect
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, combinations
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

import numpy as np

from laurel.errors import ConfigError, DataError, ProtocolError
from laurel.evaluation.statistics import (
    BagOfWords,
    ScoredPair,
)
from laurel.extensions.evaluation.accuracy import (
    CONFIDENCE,
    Accuracy,
    Credits,
    accuracy,
    difference,
    longer_wins,
    percentile_interval,
    resample_shares,
    scored,
)
from laurel.extensions.evaluation.comparisons import (
    accuracy_by_name,
    accuracy_by_value,
    failure_reasons,
    length_difference,
)
from laurel.observe.metrics import ReliabilityRow, calibration_error, reliability, spearman
from laurel.types import Conversation, Group, Score, group_of

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

EXAMPLES = 5
"""The number of leaks, of repeated pairs and of contradictions that a report names."""
# The ends show outliers, the 1 % and 99 % marks where saturation begins.
QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_EDGE = 0.01


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
) -> LengthControlled | None:
    """Return the mean of the accuracies where the longer and where the shorter answer is chosen.

    It is the balanced accuracy (Brodersen et al., 2010) of the question whether the longer answer
    is the better one: a scorer by length alone gets 0.5. Pairs of one length take no part. The
    interval is the percentile bootstrap's, with both halves resampled apart.

    Returns:
        None where one of the halves has no scored pair.
    """
    usable = scored(pairs)
    longer, shorter = (
        accuracy(
            [pair for pair in usable if sign * length_difference(pair) > 0], baselines=baselines
        )
        for sign in (1, -1)
    )
    if longer is None or shorter is None:
        return None
    # The halves are resampled apart, as if each had been collected by itself: one bootstrap over
    # all pairs would also vary how many pairs each half has.
    # Other seeds for the halves: with one, both would be high in the same resamples.
    resamples = [
        resample_shares(round(half.value * half.num_pairs), half.num_pairs, seed=seed)
        for seed, half in enumerate((longer, shorter))
    ]
    low, high = percentile_interval((resamples[0] + resamples[1]) / 2)
    return LengthControlled(
        value=(longer.value + shorter.value) / 2,
        low=low,
        high=high,
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
    owners = Counter(score for values in by_answer.values() for score in set(values))
    num_identical = sum(any(owners[score] > 1 for score in values) for values in by_answer.values())
    repeats = [max(values) - min(values) for values in by_answer.values() if len(values) > 1]
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
    result = []
    for (first, first_column), (second, second_column) in combinations(columns.items(), 2):
        pairs = [[*a, *b] for a, b in zip(first_column, second_column, strict=True)]
        both_N4 = np.array(pairs, np.float64).reshape(-1, 4)
        rows = both_N4[np.isfinite(both_N4).all(axis=-1)]
        if len(rows):
            a, b, c, d = rows.T
            result.append(
                Agreement(
                    first=first,
                    second=second,
                    num_pairs=len(rows),
                    same_verdict_share=float(np.mean(np.sign(a - b) == np.sign(c - d))),
                    kendall=kendall(rows[:, :2].ravel().tolist(), rows[:, 2:].ravel().tolist()),
                )
            )
    return result


def kendall(values: Sequence[float], others: Sequence[float]) -> float | None:
    """Return Kendall's tau-b: (concordant - discordant) / sqrt(untied in one * untied in other).

    Counts are over pairs of positions. It is None where a side has fewer than two values.
    """
    # Knight's algorithm (1966): sorted by one side, discordant pairs are inversions of the other.
    both = sorted(zip(values, others, strict=True))
    discordant = 0
    ahead: list[float] = []
    for _, other in both:
        # Of positions with one value the others come in rising order: none of them is ahead.
        discordant += len(ahead) - bisect.bisect_right(ahead, other)
        bisect.insort(ahead, other)
    total = math.comb(len(both), 2)
    tied, tied_other, tied_in_both = (
        sum(math.comb(count, 2) for count in Counter(side).values())
        for side in (values, others, both)
    )
    if total in (tied, tied_other):
        return None
    decided = total - tied - tied_other + tied_in_both
    return (decided - 2 * discordant) / math.sqrt((total - tied) * (total - tied_other))


# Calibration: are differences of scores the log-odds that a Bradley-Terry model takes them for?

_RELATIVE_PRECISION = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The differences between confidence and accuracy, before and after temperature scaling."""

    num_pairs: int
    error: float
    """The expected calibration error, as `calibration_error` defines it."""
    rows: tuple[ReliabilityRow, ...]
    """The rows that hold a pair."""
    negative_log_likelihood: float
    """The mean of -log sigmoid(chosen - rejected)."""
    temperature: float | None
    """The temperature that fits best, by `best_temperature`."""
    error_at_temperature: float | None
    negative_log_likelihood_at_temperature: float | None


def calibration(pairs: Iterable[ScoredPair]) -> Calibration | None:
    """Measure sigmoid(score difference) as the probability that an answer is better.

    The confidence of a pair is sigmoid(|score(chosen) - score(rejected)|), from 0.5 to 1. A pair is
    right where the chosen answer scores strictly higher, as in `accuracy`.

    Returns:
        None where no pair has both scores.
    """
    gaps = np.array([gap for pair in pairs if (gap := difference(pair)) is not None])
    if not gaps.size:
        return None
    rows = reliability(gaps)
    temperature = best_temperature(gaps.tolist())
    scaled = None if temperature is None else gaps / temperature
    return Calibration(
        num_pairs=gaps.size,
        error=calibration_error(rows),
        rows=rows,
        negative_log_likelihood=_loss(gaps),
        temperature=temperature,
        error_at_temperature=None if scaled is None else calibration_error(reliability(scaled)),
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
    gaps = np.array(differences) / unit

    def gain(sharpness: float) -> float:
        # The sigmoid of -sharpness * gap, in a form that does not overflow.
        return math.fsum(gaps * np.exp(-np.logaddexp(0, sharpness * gaps)))

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


def _loss(gaps: Floats) -> float:
    return float(np.logaddexp(0, -gaps).mean())


# Leakage: prompts and pairs of an evaluation set in a training set, and contradictions in a set.

GRAM_WORDS = 8
THRESHOLD = 0.6
_TEMPLATE_PROMPTS, _TEMPLATE_SHARE = 20, 0.02
"""An n-gram in more different prompts than either allows is a template, and no leak."""

# Scripts without spaces are taken character by character; signs count, as 2+3 is not 2*3.
_WITHOUT_SPACES = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(
    rf"[{_WITHOUT_SPACES}]|[^\W{_WITHOUT_SPACES}]+|[^\w\s.,;:!?\"'()\[\]\u2018\u2019\u201c\u201d]"
)


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
    num_redundant: int
    """The number of pairs that repeat an earlier one."""
    num_contradictory: int
    duplicates: tuple[tuple[str, ...], ...]
    """The first groups of ids of pairs with the same prompt, chosen and rejected answer."""
    contradictions: tuple[tuple[str, ...], ...]
    """The first groups of ids of pairs with the same prompt and answers but other preferences."""


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
    groups = [list(sides.values()) for sides in by_pair.values()]
    duplicates = [tuple(ids) for sides in groups for ids in sides if len(ids) > 1]
    contradictions = [tuple(chain(*sides)) for sides in groups if len(sides) > 1]
    return Repeats(
        num_pairs=num_pairs,
        num_prompts=len(prompts),
        num_redundant=sum(len(ids) - 1 for ids in duplicates),
        num_contradictory=sum(map(len, contradictions)),
        duplicates=tuple(duplicates[:EXAMPLES]),
        contradictions=tuple(contradictions[:EXAMPLES]),
    )


def normalised(prompt: Conversation) -> str:
    """Return the words of a prompt without roles, case-folded, with single spaces."""
    return _collapsed("\n".join(message.content for message in prompt)).casefold()


def _collapsed(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _pair_key(pair: ScoredPair) -> tuple[str, frozenset[str]]:
    # The same for both orders of the answers: a contradiction differs in nothing but the order.
    return normalised(pair.prompt), frozenset((_collapsed(pair.chosen), _collapsed(pair.rejected)))


def _grams(text: str) -> npt.NDArray[np.int64]:
    """Return the hashes of the different n-grams of a text's words, in rising order."""
    words = _WORD.findall(text)
    # A prompt of fewer words is one n-gram, so that short copies are found as well.
    width = min(GRAM_WORDS, len(words))
    runs = zip(*(words[start:] for start in range(width)), strict=False)
    return np.unique(np.fromiter(map(hash, runs), np.int64))


def _most_similar(
    prompts: Sequence[str], others: Sequence[str], threshold: float
) -> dict[str, tuple[float, str]]:
    """Map each prompt with a near copy among the others to the similarity and the copy."""
    # An inverted index: the others' n-grams in one sorted row, each with the prompt it is from. A
    # prompt looks up its own n-grams and counts how often it meets each of the others.
    grams = [_grams(text) for text in [*prompts, *others]]
    if grams:
        # Each prompt counts an n-gram once, so that this counts prompts.
        distinct, counts = np.unique(np.concatenate(grams), return_counts=True)
        templates = distinct[counts > max(_TEMPLATE_PROMPTS, _TEMPLATE_SHARE * len(grams))]
        grams = [part[~np.isin(part, templates, assume_unique=True)] for part in grams]
    mine, theirs = grams[: len(prompts)], grams[len(prompts) :]
    sizes = np.array([len(part) for part in theirs])
    if not sizes.sum():
        return {}
    row = np.concatenate(theirs)
    order = np.argsort(row, kind="stable")
    row, owners = row[order], np.repeat(np.arange(len(theirs)), sizes)[order]
    copies = {}
    for text, part in zip(prompts, mine, strict=True):
        starts, ends = np.searchsorted(row, part), np.searchsorted(row, part, side="right")
        owners_met = [
            owners[start:end] for start, end in zip(starts, ends, strict=True) if end > start
        ]
        if owners_met:
            candidates, shared = np.unique(np.concatenate(owners_met), return_counts=True)
            similarity = shared / (len(part) + sizes[candidates] - shared)
            best = int(similarity.argmax())
            if similarity[best] >= threshold:
                copies[text] = (float(similarity[best]), others[candidates[best]])
    return copies


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


def sensitivity(
    pairs: Sequence[ScoredPair], score: Scoring, *, variants: Mapping[str, Variant] = VARIANTS
) -> list[Sensitivity]:
    """Score all answers afresh, as they are and rewritten, and compare.

    The verdict is whether the chosen answer scores strictly higher. Each prompt and all forms of
    both answers make one group, so that a scorer reads the prompt once. The pairs' own scores,
    which may come from another model, are not used.

    Raises:
        ProtocolError: The scorer returned another number of scores than it was given answers.
    """
    # All forms of both answers go into one group: the prompt is encoded once for all of them.
    forms: list[Variant] = [str, *variants.values()]
    texts_PF2 = np.array(
        [
            [[form(text) for text in (pair.chosen, pair.rejected)] for form in forms]
            for pair in pairs
        ],
        object,
    ).reshape(len(pairs), len(forms), 2)
    is_made_PF2 = texts_PF2 != np.array(None)
    groups = [
        group_of(
            pair.prompt,
            texts_PF2[index, is_made_PF2[index]].tolist(),
            group_id=f"{pair.id}#{index}",
        )
        for index, pair in enumerate(pairs)
    ]
    scores = score(groups)
    counts, expected = [*map(len, scores)], [len(group.completions_G) for group in groups]
    if counts != expected:  # numpy would spread a single score over all answers
        raise ProtocolError(
            f"the scorer gave {counts} scores for groups of {expected} answers", kind="count"
        )
    scores_PF2 = np.full(is_made_PF2.shape, np.nan)
    scores_PF2[is_made_PF2] = [result.value for scores_G in scores for result in scores_G]
    scores_PF2[~np.isfinite(scores_PF2)] = np.nan  # a score that is not finite is a failure
    return [
        _compare(name, scores_PF2[:, 0], scores_PF2[:, index], is_made_PF2[:, index])
        for index, name in enumerate(variants, start=1)
    ]


def in_other_words(
    name: str, pairs: Sequence[ScoredPair], others: Sequence[ScoredPair]
) -> Sensitivity:
    """Compare scores with those of the same pairs rewritten, prompts included.

    Raises:
        DataError: The numbers of pairs differ.
    """
    if len(pairs) != len(others):
        raise DataError(
            f"there are {len(pairs):,} pairs and {len(others):,} in the other form; each needs its "
            "own, in the same order"
        )
    scores_2P2 = np.array(
        [[(pair.score_chosen, pair.score_rejected) for pair in form] for form in (pairs, others)],
        np.float64,
    ).reshape(2, -1, 2)
    scores_2P2[~np.isfinite(scores_2P2)] = np.nan
    originals_P2, changed_P2 = scores_2P2
    return _compare(name, originals_P2, changed_P2, np.ones_like(changed_P2, bool))


def _compare(
    name: str, originals_P2: Floats, changed_P2: Floats, is_made_P2: npt.NDArray[np.bool_]
) -> Sensitivity:
    shifts_P2 = changed_P2 - originals_P2
    is_scored_P2 = np.isfinite(shifts_P2)
    shifts = shifts_P2[is_scored_P2]
    # In units of the scores' own spread, shifts of different reward models can be compared.
    finite = originals_P2[np.isfinite(originals_P2)].tolist()
    spread = pstdev(finite) if finite else 0.0
    is_whole_P = is_scored_P2.all(axis=1)
    (chosen, rejected), (chosen2, rejected2) = originals_P2[is_whole_P].T, changed_P2[is_whole_P].T

    def mean(values: npt.NDArray[np.bool_]) -> float | None:
        return float(values.mean()) if values.size else None

    is_right = chosen > rejected
    return Sensitivity(
        name=name,
        num_answers=shifts.size,
        num_without=int((~is_made_P2).sum()),
        num_failures=int(is_made_P2.sum()) - shifts.size,
        mean_shift=float(shifts.mean()) / spread if shifts.size and spread else None,
        raised_share=mean(shifts > 0),
        num_pairs=chosen.size,
        flip_share=mean((chosen2 > rejected2) != is_right),
        flip_share_chosen=mean((chosen2 > rejected) != is_right),
        flip_share_rejected=mean((chosen > rejected2) != is_right),
    )


def diagnostics_report(
    pairs: Sequence[ScoredPair],
    *,
    training: Sequence[ScoredPair] | None = None,
    notes: Sequence[str] = (),
    members: Mapping[str, Column] | None = None,
    score: Scoring | None = None,
    in_other_language: Sequence[ScoredPair] | None = None,
    noise: float | None = None,
    reads_logits: bool = True,
) -> dict[str, Any]:
    """Compute all diagnostics of a reward model from its scores, as JSON-compatible values.

    A diagnostic without data is left out, together with its key.

    Args:
        pairs: The evaluated pairs; those without both scores are counted and otherwise ignored.
        training: The pairs that the model was trained on, for the bag-of-words baseline and the
            detection of leaks; their scores are not used.
        notes: Notes on what was left out of the training pairs.
        members: The scores of an ensemble's members, by name; see `agreements`.
        score: Scores other forms of the answers; without it the sensitivity is left out.
        in_other_language: The same pairs, translated and scored, in the same order.
        noise: The largest difference between scores that counts as noise; see `measure_noise`.
        reads_logits: Whether a difference of scores may be the logit of a preference; if not, as
            with the probabilities of a judge, the calibration is left out.

    Raises:
        DataError: Two pairs have the same id, or the number of scores or translated pairs differs
            from the number of pairs.
    """
    _check_pairs(pairs, members or {})
    baselines: dict[str, Credits] = {"longer wins": longer_wins(pairs)}
    if training:
        baselines["bag of words"] = BagOfWords.train(training).credits(pairs)
    lengths = {pair.id: float(length_difference(pair)) for pair in pairs}
    margins = {pair.id: pair.margin for pair in pairs if pair.margin is not None}
    subsets = {pair.id: pair.subset for pair in pairs if pair.subset is not None}
    leaks = find_leaks(pairs, training) if training else []
    is_leaked = {pair.id: "no" for pair in pairs}
    is_leaked |= {leak.evaluated: "yes" if leak.is_exact else "almost" for leak in leaks}
    gaps = [abs(gap) for pair in pairs if (gap := difference(pair)) is not None]
    sensitivities = sensitivity(pairs, score) if score is not None and pairs else []
    if in_other_language is not None:
        sensitivities.append(in_other_words("other language", pairs, in_other_language))
    report: dict[str, Any] = {
        "num_pairs": len(pairs),
        "num_failures": len(pairs) - len(gaps),
        "failures": failure_reasons(pairs),
        "confidence": CONFIDENCE,
        "accuracy": accuracy(pairs, baselines=baselines),
        "length_controlled_accuracy": length_controlled_accuracy(pairs, baselines=baselines),
        "by_length_difference": accuracy_by_value(pairs, lengths, baselines=baselines),
        "by_margin": accuracy_by_value(pairs, margins, baselines=baselines)
        if len(set(margins.values())) > 1
        else None,
        "by_subset": accuracy_by_name(pairs, subsets, baselines=baselines),
        "by_leak": accuracy_by_name(pairs, is_leaked, baselines=baselines) if leaks else None,
        "score_length_correlation": score_length_correlation(pairs),
        "longer_scored_higher": longer_scored_higher(pairs),
        "calibration": calibration(pairs) if reads_logits else None,
        "scores": score_distribution(pairs),
        "agreement": agreements(members or {}),
        "noise_floor": {"noise": noise, "within_share": fmean(gap <= noise for gap in gaps)}
        if noise is not None and gaps
        else None,
        "sensitivity": sensitivities,
        "evaluation_set": find_repeats(pairs),
        "training_set": asdict(find_repeats(training)) | {"notes": notes} if training else None,
        "leakage": {
            "num_same_prompt": sum(leak.is_exact for leak in leaks),
            "num_similar_prompt": sum(not leak.is_exact for leak in leaks),
            "num_same_pair": sum(leak.has_same_answers for leak in leaks),
            "examples": leaks[:EXAMPLES],
        }
        if training
        else None,
    }
    return {key: plain for key, value in report.items() if (plain := _plain(value)) is not None}


def _check_pairs(pairs: Sequence[ScoredPair], members: Mapping[str, Column]) -> None:
    for name, count in Counter(pair.id for pair in pairs).most_common(1):
        if count > 1:
            raise DataError(f"'{name}' is the id of {count} pairs; give each an id of its own")
    for name, column in members.items():
        if len(column) != len(pairs):
            raise DataError(
                f"member '{name}' has scores of {len(column)} pairs, but there are {len(pairs)}; "
                "give one row a pair, (None, None) where it has no scores"
            )


def _plain(value: Any) -> Any:
    """Convert a value to JSON-compatible ones without empty parts; None if nothing is left."""
    if hasattr(value, "__dataclass_fields__"):
        value = asdict(value)
    if isinstance(value, Mapping):
        parts = {
            f"{key:g}" if isinstance(key, float) else key: _plain(part)
            for key, part in value.items()
        }
        return {key: part for key, part in parts.items() if part is not None} or None
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value] or None
    return value
