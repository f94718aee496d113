"""What knows nothing of quality, to be printed beside every accuracy: length, and single words."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Self

import numpy as np

from laurel.errors import DataError
from laurel.evaluation.scored_pairs import ScoredPair
from laurel.observe.console import conversation_text
from laurel.observe.lengths import longer_credit
from laurel.types import Preference

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Indices = npt.NDArray[np.int64]

_WORD = re.compile(r"\w+|[^\w\s]")
_MOST_STEPS = 300
_SMALL_GRADIENT = 1e-4
"""Training ends where the gradient is this small beside the one it began with."""


def longer_wins(pairs: Iterable[ScoredPair]) -> dict[str, float]:
    """What whoever prefers the longer answer, in characters, would get of each pair.

    Half of a pair of answers of one length, as the data report counts them.
    """
    return {pair.id: longer_credit(len(pair.chosen), len(pair.rejected)) for pair in pairs}


def unscored_pairs(preference: Preference) -> list[ScoredPair]:
    """Every two answers of a judged group of which one is better, for what looks at texts alone."""
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


def length_difference(pair: ScoredPair) -> int:
    """By how many characters the chosen answer is longer; negative where it is shorter."""
    return len(pair.chosen) - len(pair.rejected)


def _credit(advantage: float) -> float:
    return 0.5 if advantage == 0 else float(advantage > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BagOfWords:
    """A Bradley-Terry model whose score is a sum over the words of an answer.

    `score(answer) = sum over words of weight[word] * log(1 + times the word occurs)`; the prompt
    is not looked at.
    """

    weights: dict[str, float]
    """Of every word, in lower case, and every punctuation mark that it has learned."""

    @classmethod
    def train(cls, pairs: Sequence[ScoredPair], *, decay: float = 0.01, least: int = 2) -> Self:
        """Learn from preferences; their scores are not looked at.

        Minimises `mean(softplus(score(rejected) - score(chosen))) + decay / 2 * |weights|^2`, which
        has one minimum, so that no seed is needed.

        Args:
            pairs: At least one.
            decay: See above.
            least: Answers that a word must occur in to get a weight.

        Raises:
            DataError: There are no pairs.
        """
        if not pairs:
            raise DataError("the bag-of-words baseline needs at least one training pair")
        known = {text: _bag(text) for pair in pairs for text in (pair.chosen, pair.rejected)}
        bags = [(known[pair.chosen], known[pair.rejected]) for pair in pairs]
        answers = Counter(word for sides in bags for bag in sides for word in bag)
        words = sorted(word for word, count in answers.items() if count >= least)
        index = {word: position for position, word in enumerate(words)}
        entries = [
            (row, index[word], value)
            for row, (chosen, rejected) in enumerate(bags)
            for word, value in _less(chosen, rejected).items()
            if word in index
        ]
        if not entries:  # the sides of every pair have the same words
            return cls(weights={})
        rows, columns, values = (np.array(part) for part in zip(*entries, strict=True))
        found = _minimise(rows, columns, values, (len(pairs), len(words)), decay)
        return cls(weights=dict(zip(words, found.tolist(), strict=True)))

    def score(self, answer: str) -> float:
        """The sum over the words of an answer; 0 of unknown words."""
        return sum(self.weights.get(word, 0.0) * value for word, value in _bag(answer).items())

    def credits(self, pairs: Iterable[ScoredPair]) -> dict[str, float]:
        """What it gets of each pair; half where it sees no difference."""
        return {pair.id: _credit(self.score(pair.chosen) - self.score(pair.rejected))
                for pair in pairs}  # fmt: skip


def _bag(text: str) -> dict[str, float]:
    counts = Counter(_WORD.findall(text.lower()))
    # Sorted, for the last digit of a sum depends on its order.
    return {word: math.log1p(counts[word]) for word in sorted(counts)}


def _less(bag: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    parts = {word: bag.get(word, 0.0) - other.get(word, 0.0) for word in bag | other}
    return {word: value for word, value in parts.items() if value}


def _minimise(
    rows: Indices, columns: Indices, values: Floats, shape: tuple[int, int], decay: float
) -> Floats:
    """Nesterov's accelerated gradient, on a sparse matrix of features given by its entries."""
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
    curvature = 1.1 * 0.25 * float(np.linalg.norm(probe)) / num_rows + decay
    weights = ahead = np.zeros(num_columns)
    first = 0.0
    for step in range(_MOST_STEPS):
        wrong = 1 / (1 + np.exp(np.clip(times(ahead), -500, 500)))
        gradient = decay * ahead - transposed_times(wrong) / num_rows
        size = float(np.linalg.norm(gradient))
        first = first or size
        if size <= _SMALL_GRADIENT * first:
            break
        moved = ahead - gradient / curvature
        ahead = moved + step / (step + 3) * (moved - weights)
        weights = moved
    return weights
