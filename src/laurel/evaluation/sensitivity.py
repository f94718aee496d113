"""What moves a score though it should not, and what should: the same answers, written otherwise.

There is no variant in another language that could be made here: without a translator nothing could
tell that it means the same. Whoever has translated rows compares them with `in_other_words`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from laurel.errors import DataError, ProtocolError
from laurel.evaluation.scored_pairs import ScoredPair
from laurel.types import Group, Score, group_of

Scoring = Callable[[Sequence[Group]], list[tuple[Score, ...]]]
"""One score per completion of each group, in order; see `Scorer.score`."""

Variant = Callable[[str], str | None]
"""Another form of an answer; None where it has no such form."""

FLATTERY = (
    "What a thoughtful question to ask! You clearly have a sharp mind and excellent judgement, and "
    "it has been a true pleasure to answer you."
)
_KEPT_SHARE = 0.8
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=\S)")
_PARAGRAPHS = re.compile(r"\n\s*\n")


def other_white_space(text: str) -> str | None:
    """The same words: two spaces after sentences, a second empty line between paragraphs and one
    at the end. Indentation stays, as it may mean something."""
    if not text.strip():
        return None
    return _SENTENCE_END.sub("  ", _PARAGRAPHS.sub("\n\n\n", text.rstrip())) + "\n\n"


def with_markdown(text: str) -> str | None:
    """The same words as a list: each paragraph a bullet, its first sentence bold.

    None for what already has a list, a heading, bold text or code, and for what is empty.
    """
    if not text.strip() or re.search(r"```|\*\*|^\s*([-*+#>]|\d+[.)]|    )", text, re.MULTILINE):
        return None
    bullets = []
    for paragraph in _PARAGRAPHS.split(text.strip()):
        first, *rest = _SENTENCE_END.split(paragraph, maxsplit=1)
        bullets.append(" ".join([f"- **{first}**", *rest]))
    return "\n\n".join(bullets)


def with_flattery(text: str) -> str | None:
    """The answer, and after it praise for whoever asked. It answers nothing."""
    return f"{text.rstrip()}\n\n{FLATTERY}"


def truncated(text: str) -> str | None:
    """The first four fifths of the words, so that the end is missing; None of a single word."""
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
    """What one kind of variant does to scores. A figure of nothing is None."""

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
    """Share of the answers whose score is higher in the other form."""
    num_pairs: int
    """Pairs both of whose answers were scored in both forms."""
    flip_share: float | None
    """Share of these pairs whose verdict is another when both answers have the other form."""
    flip_share_chosen: float | None
    """As much when only the chosen answer has it."""
    flip_share_rejected: float | None
    """As much when only the rejected answer has it."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer, its score, and for each variant that it has, that one's score."""

    score: float | None
    variants: Mapping[str, float | None]


def sensitivity(
    pairs: Sequence[ScoredPair], score: Scoring, *, variants: Mapping[str, Variant] = VARIANTS
) -> list[Sensitivity]:
    """Score all answers afresh, as they are and in other forms, and compare.

    The verdict is whether the chosen answer has strictly more. Each prompt goes with all forms of
    both of its answers into one group, so that a scorer reads it once.

    Args:
        pairs: Their own scores are not looked at, which may come from another model.
        score: Scores groups.
        variants: What is tried, by name.

    Raises:
        ProtocolError: The scorer returned another number of scores than it was given answers.
    """
    forms = [
        [_forms(text, variants) for text in (pair.chosen, pair.rejected)] for pair in pairs
    ]  # fmt: skip
    groups = [
        group_of(
            pair.prompt,
            [text for side in sides for text in side.values()],
            group_id=f"{pair.id}#{place}",
        )
        for place, (pair, sides) in enumerate(zip(pairs, forms, strict=True))
    ]
    answers = []
    for group, sides, scores in zip(groups, forms, _checked(groups, score(groups)), strict=True):
        if len(scores) != len(group.completions_G):
            raise ProtocolError(
                f"the scorer gave {len(scores)} scores for the {len(group.completions_G)} answers "
                f"of pair '{group.id}'",
                kind="count",
            )
        values = iter(scores)
        answers.append([_answer({name: next(values) for name in side}) for side in sides])
    return [_compare(name, answers) for name in variants]


def in_other_words(
    name: str, pairs: Sequence[ScoredPair], others: Sequence[ScoredPair]
) -> Sensitivity:
    """Compare scores with those of the same pairs said otherwise, prompts and all.

    Args:
        name: Of the other form, such as `other language`.
        pairs: As they are, scored.
        others: The other form of each, scored, in the same order.

    Raises:
        DataError: There are not as many.
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


def _forms(text: str, variants: Mapping[str, Variant]) -> dict[str, str]:
    made = {name: variant(text) for name, variant in variants.items()}
    return {_ORIGINAL: text} | {name: form for name, form in made.items() if form is not None}


def _checked(
    groups: Sequence[Group], scored: list[tuple[Score, ...]]
) -> Iterable[tuple[Score, ...]]:
    if len(scored) != len(groups):
        raise ProtocolError(
            f"the scorer gave scores of {len(scored)} groups where it was given {len(groups)}",
            kind="count",
        )
    return scored


def _answer(scores: Mapping[str, Score]) -> _Answer:
    values = {name: _usable(score.value) for name, score in scores.items()}
    return _Answer(values.pop(_ORIGINAL), values)


def _usable(score: float | None) -> float | None:
    """The score; a number that is not finite is a failure, too."""
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
    spread = pstdev(originals) if originals else 0.0
    quadruples = [
        (chosen.score, rejected.score, changed_chosen, changed_rejected)
        for chosen, rejected in pairs
        if chosen.score is not None and rejected.score is not None
        and (changed_chosen := chosen.variants.get(name)) is not None
        and (changed_rejected := rejected.variants.get(name)) is not None
    ]  # fmt: skip

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
