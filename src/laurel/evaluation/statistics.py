"""What is scored: pairs and lists; the figures of an evaluation; and a bag of words."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from statistics import fmean
from typing import TYPE_CHECKING, Self

import numpy as np

from laurel.errors import DataError
from laurel.observe.console import conversation_text
from laurel.types import Message, Preference

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Indices = npt.NDArray[np.int64]

DECAY = 0.01
"""The strength of the weight decay of the bag of words."""


# The result of an evaluation: figures, each with the number of its rows and of failed rows.


MeasuredCredits = Mapping[str, float | None]
"""The credit of each row, 0 to 1, by its id; None where it could not be scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A named number; its value is None where no row contributes."""

    name: str
    value: float | None
    num_rows: int = 0
    """Rows that contribute; failed rows do not."""
    num_failures: int = 0
    """Rows that could not be scored."""
    is_aside: bool = False
    """The figure describes the rows; no other score is computed from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of one evaluation."""

    subsets: tuple[Figure, ...]
    sections: tuple[Figure, ...] = ()
    """Figures computed from subsets."""
    final: Figure
    notes: tuple[str, ...] = ()
    """Caveats that a reader needs beside the figures."""
    credits: MeasuredCredits = field(default_factory=dict)


def share(name: str, credits: Iterable[float | None]) -> Figure:
    """Return the mean credit of rows; failed rows are counted and take no part."""
    every = list(credits)
    known = [credit for credit in every if credit is not None]
    return Figure(
        name=name,
        value=fmean(known) if known else None,
        num_rows=len(known),
        num_failures=len(every) - len(known),
    )


# A preference pair with the scores of both of its answers.


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPair:
    """A preference pair with its scores: the input of every evaluation on pairs."""

    id: str
    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    score_chosen: float | None
    """None where the answer could not be scored."""
    score_rejected: float | None
    subset: str | None = None
    margin: float | None = None
    """How strongly the annotators preferred the chosen answer."""
    failure: str | None = None
    """The reason why a score is missing."""

    @property
    def is_right(self) -> bool | None:
        """Tell whether the chosen answer scores strictly higher; a tie is wrong, as in RewardBench.

        It is None where a score is missing: a failure is not a verdict.
        """
        if self.score_chosen is None or self.score_rejected is None:
            return None
        return self.score_chosen > self.score_rejected


# Baselines that know nothing of quality, printed beside every accuracy: length, and single words.

_WORD = re.compile(r"\w+|[^\w\s]")
_MOST_STEPS = 300
_SMALL_GRADIENT = 1e-4
"""Training ends when the gradient's norm falls to this share of the first one."""


def unscored_pairs(preference: Preference) -> list[ScoredPair]:
    """Return every two answers of a ranked group of which one is better, without scores."""
    group, ranks_G = preference.group, preference.ranks_G
    texts = [conversation_text(one.messages) for one in group.completions_G]
    return [
        ScoredPair(
            id=f"{group.id}:{better}>{worse}",
            prompt=group.prompt,
            chosen=texts[better],
            rejected=texts[worse],
            score_chosen=None,
            score_rejected=None,
        )
        for better, worse in permutations(range(len(texts)), 2)
        if ranks_G[better] < ranks_G[worse]
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BagOfWords:
    """A Bradley-Terry model whose score is a sum over the words of an answer.

    `score(answer) = sum over words of weight[word] * log(1 + times the word occurs)`; the prompt
    is not looked at.
    """

    weights: dict[str, float]
    """The weight of every known word, in lower case, and punctuation mark."""

    @classmethod
    def train(cls, pairs: Sequence[ScoredPair]) -> Self:
        """Fit the weights to preferences; the pairs' own scores are not used.

        It minimises `mean(softplus(score(rejected) - score(chosen))) + DECAY / 2 * |weights|^2`,
        which has one minimum, so that no seed is needed.

        Raises:
            DataError: There are no pairs.
        """
        if not pairs:
            raise DataError("the bag-of-words baseline needs at least one training pair")
        # The same answer often stands in many pairs.
        known = {text: _bag(text) for pair in pairs for text in (pair.chosen, pair.rejected)}
        bags = [(known[pair.chosen], known[pair.rejected]) for pair in pairs]
        answers = Counter(word for sides in bags for bag in sides for word in bag)
        # A word of a single answer would only memorise its pair.
        words = sorted(word for word, count in answers.items() if count > 1)
        index = {word: position for position, word in enumerate(words)}
        entries = [
            (row, index[word], value)
            for row, (chosen, rejected) in enumerate(bags)
            for word in chosen | rejected
            if word in index and (value := chosen.get(word, 0.0) - rejected.get(word, 0.0))
        ]
        if not entries:  # the sides of every pair have the same words
            return cls(weights={})
        rows, columns, values = (np.array(part) for part in zip(*entries, strict=True))
        found = _minimise(rows, columns, values, (len(pairs), len(words)))
        return cls(weights=dict(zip(words, found.tolist(), strict=True)))

    def score(self, answer: str) -> float:
        """Return the sum over the words of an answer; unknown words count 0."""
        return sum(self.weights.get(word, 0.0) * value for word, value in _bag(answer).items())

    def credits(self, pairs: Iterable[ScoredPair]) -> dict[str, float]:
        """Return the credit of each pair; half where both scores are equal."""
        return {
            pair.id: float(np.heaviside(self.score(pair.chosen) - self.score(pair.rejected), 0.5))
            for pair in pairs
        }


def _bag(text: str) -> dict[str, float]:
    counts = Counter(_WORD.findall(text.lower()))
    # Sorted, for the last digit of a sum depends on its order.
    return {word: math.log1p(counts[word]) for word in sorted(counts)}


def _minimise(rows: Indices, columns: Indices, values: Floats, shape: tuple[int, int]) -> Floats:
    """Minimise by Nesterov's accelerated gradient, on a sparse matrix given by its entries."""
    num_rows, num_columns = shape

    def times(vector: Floats) -> Floats:
        sums = np.bincount(rows, values * vector[columns], num_rows)
        return sums.astype(np.float64, copy=False)

    def transposed_times(vector: Floats) -> Floats:
        sums = np.bincount(columns, values * vector[rows], num_columns)
        return sums.astype(np.float64, copy=False)

    # No curvature exceeds a quarter of the matrix's largest squared singular value; its bound by
    # the largest sums of rows and columns would be far too careful, so power iteration it is. It
    # starts anywhere; from ones it would come to nothing where every gain is another word's loss.
    probe = np.random.default_rng(0).standard_normal(num_columns)
    for _ in range(30):
        probe = transposed_times(times(probe / np.linalg.norm(probe)))
    curvature = 1.1 * 0.25 * float(np.linalg.norm(probe)) / num_rows + DECAY
    weights = ahead = np.zeros(num_columns)
    first = 0.0
    for step in range(_MOST_STEPS):
        # Beyond the clip the exponential overflows, and the sigmoid is 0 or 1 in float64 anyway.
        wrong = 1 / (1 + np.exp(np.clip(times(ahead), -500, 500)))
        gradient = DECAY * ahead - transposed_times(wrong) / num_rows
        size = float(np.linalg.norm(gradient))
        first = first or size
        if size <= _SMALL_GRADIENT * first:
            break
        moved = ahead - gradient / curvature
        ahead = moved + step / (step + 3) * (moved - weights)
        weights = moved
    return weights


# A prompt with any number of answers, right ones and wrong ones, and the score of each.


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredList:
    """Scored right and wrong answers to a prompt: the input of every evaluation on lists."""

    id: str
    prompt: tuple[Message, ...]
    completions_G: tuple[str, ...]
    is_right_G: tuple[bool, ...]
    scores_G: tuple[float | None, ...]
    """None where a completion could not be scored."""
    subset: str | None = None
    failure: str | None = None
    """The first reason why a score is missing."""

    def __post_init__(self) -> None:
        """Raise ValueError where the lists differ in length."""
        if not len(self.completions_G) == len(self.is_right_G) == len(self.scores_G) > 0:
            raise ValueError(
                f"{self.id}: {len(self.completions_G)} completions, {len(self.is_right_G)} "
                f"verdicts and {len(self.scores_G)} scores; one of each is needed per completion"
            )

    @property
    def whole_scores_G(self) -> tuple[float, ...] | None:
        """All scores of the list; None where one is missing, since the best is then unknown."""
        scores = tuple(score for score in self.scores_G if score is not None)
        return scores if len(scores) == len(self.scores_G) else None

    @property
    def first_credit(self) -> float | None:
        """The credit of a list whose first completion is the right one.

        It is 1 if that one alone scores highest, 1/k if it is among k that do, else 0; None where
        a score is missing.
        """
        scores_G = self.whole_scores_G
        if scores_G is None:
            return None
        best = max(scores_G)
        return 1 / scores_G.count(best) if scores_G[0] == best else 0.0

    @property
    def best_credit(self) -> float | None:
        """The probability that the best-scored is right, with ties broken by sampling."""
        scores_G = self.whole_scores_G
        if scores_G is None:
            return None
        best = max(scores_G)
        tied = [
            is_right
            for score, is_right in zip(scores_G, self.is_right_G, strict=True)
            if score == best
        ]
        return sum(tied) / len(tied)
