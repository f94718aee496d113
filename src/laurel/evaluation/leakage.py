"""What data sets share that they should not: prompts, pairs, and preferences that contradict."""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from laurel.errors import ConfigError
from laurel.evaluation.scored_pairs import ScoredPair
from laurel.types import Conversation

if TYPE_CHECKING:
    import numpy.typing as npt

    Grams = npt.NDArray[np.uint64]
    """Numbers of different runs of words, in rising order."""

GRAM_WORDS = 8
THRESHOLD = 0.6
_TEMPLATE_PROMPTS, _TEMPLATE_SHARE = 20, 0.02
"""A run of words in more different prompts than either allows is a template, and no leak."""

# Scripts without spaces are taken character by character; signs count, as 2+3 is not 2*3.
_WITHOUT_SPACES = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(
    rf"[{_WITHOUT_SPACES}]|[^\W{_WITHOUT_SPACES}]+|[^\w\s.,;:!?\"'()\[\]\u2018\u2019\u201c\u201d]"
)
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that multiplying by it loses no bit of 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A pair of the evaluation set and the pair of the training set whose prompt is most like."""

    evaluated: str
    """The pair's id."""
    trained: str
    similarity: float
    """Of the two prompts: 1 where their normalised texts are the same, else see `find_leaks`."""
    is_exact: bool
    """The normalised texts of the prompts are the same."""
    has_same_answers: bool
    """Both answers are the same as well, whichever of them is preferred."""


def find_leaks(
    evaluated: Sequence[ScoredPair], trained: Sequence[ScoredPair], *, threshold: float = THRESHOLD
) -> list[Leak]:
    """The pairs of the evaluation set whose prompt, or almost, is in the training set, too.

    Prompts are the same where they are so without regard to case, white space and Unicode's
    compatible forms. They are nearly so where the Jaccard similarity of the sets of their runs of
    8 words (all words, of a shorter prompt) is at least the threshold. Runs that stand in more
    than 20 different prompts and more than 2 % of them, such as a system prompt, are a template
    and not looked at.

    Returns:
        At most one for each pair, in their order: the same pair if there is one, else the same
        prompt, else the most similar one (the first of several). Empty prompts are not compared,
        but a pair without a prompt whose answers are in the training set is found.

    Raises:
        ConfigError: The threshold is not a share.
    """
    if not 0 < threshold <= 1:
        raise ConfigError(f"threshold={threshold}: must be above 0 and at most 1, e.g. {THRESHOLD}")
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
        # That neither has a prompt is nothing that they share.
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
    """What one set says more than once."""

    num_pairs: int
    num_prompts: int
    """Different prompts."""
    duplicates: tuple[tuple[str, ...], ...]
    """Ids of pairs with the same prompt, chosen and rejected answer, together."""
    contradictions: tuple[tuple[str, ...], ...]
    """Ids of pairs with the same prompt and answers, together, that do not all prefer the same."""

    @property
    def num_redundant(self) -> int:
        """Pairs that say what another has said already."""
        return sum(len(ids) - 1 for ids in self.duplicates)


def find_repeats(pairs: Iterable[ScoredPair]) -> Repeats:
    """Duplicates and contradictions in one set; texts are compared as `find_leaks` compares them.

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
    """The words of a prompt without regard to who says them, case and white space."""
    return _collapsed("\n".join(message.content for message in prompt)).casefold()


def jaccard(text: str, other: str) -> float:
    """Similarity of two normalised prompts by their runs of words; 0 where either has no word."""
    one, two = _grams(text), _grams(other)
    shared = len(np.intersect1d(one, two, assume_unique=True))
    return shared / (len(one) + len(two) - shared) if shared else 0.0


def _collapsed(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _pair_key(pair: ScoredPair) -> tuple[str, frozenset[str]]:
    """Equal for pairs of the same answers to the same prompt, whichever is preferred."""
    return normalised(pair.prompt), frozenset((_collapsed(pair.chosen), _collapsed(pair.rejected)))


def _grams(text: str) -> Grams:
    words = _WORD.findall(text)
    if not words:
        return np.zeros(0, np.uint64)
    numbers = np.array([_number_of(word) for word in words], np.uint64)
    width = min(GRAM_WORDS, len(words))
    # A polynomial modulo 2^64: the same words in another order are another number.
    powers = np.array([pow(_MULTIPLIER, k, 2**64) for k in range(1, width + 1)], np.uint64)
    runs = np.lib.stride_tricks.sliding_window_view(numbers, width)
    return np.unique((runs * powers).sum(axis=1, dtype=np.uint64))


@functools.lru_cache(maxsize=2**16)
def _number_of(word: str) -> int:
    """A number of 64 bits that is the same in every process, unlike Python's own hash."""
    return int.from_bytes(
        hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "little"
    )


def _most_similar(
    prompts: Sequence[str], others: Sequence[str], threshold: float
) -> dict[str, tuple[float, str]]:
    """For each prompt that is like one of the others: how much, and which.

    The others' runs of words stand in one sorted row, each with the prompt that it is from. A
    prompt looks its own up there and counts how often it meets each of the others.
    """
    grams = _without_templates([_grams(text) for text in [*prompts, *others]])
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


def _without_templates(grams: Sequence[Grams]) -> list[Grams]:
    if not grams:
        return []
    known, counts = np.unique(np.concatenate(list(grams)), return_counts=True)
    most = max(_TEMPLATE_PROMPTS, _TEMPLATE_SHARE * len(grams))
    templates = known[counts > most]
    return [part[~np.isin(part, templates, assume_unique=True)] for part in grams]
