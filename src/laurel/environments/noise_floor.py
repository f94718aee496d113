"""How far apart scores can be that mean the same: the noise of a scorer."""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from laurel.rewards.blocking import BlockingScorer
from laurel.rewards.contract_scorer import ContractScorer
from laurel.rewards.loop_scorer import LoopScorer
from laurel.types import Conversation, Group, Message, Score, group_of

MOST_WITNESSES = 8
"""Conversations that the noise is measured on."""

ScoreNow = Callable[[Sequence[Group]], list[tuple[Score, ...]]]

RESOLUTION = 2.0**-24
"""Half the distance of neighbouring float32 numbers, relative to their size: what rounding the
score itself can hide."""

PROBE = tuple(
    group_of((Message("user", asked),), answers, group_id=asked)
    for asked, answers in (
        ("Where does the laurel grow?", ("By the western gate.", "I could not say where it is.")),
        ("How many are two and two?", ("Four.", "Two and two are five, as everybody knows.")),
    )
)
"""What the noise is measured on where nothing else is at hand."""


class Witnesses:
    """A few of many conversations: chosen by what they say, for who comes first is chance."""

    def __init__(self) -> None:
        self._by_digest: dict[str, Conversation] = {}
        self._lock = threading.Lock()

    def add(self, conversations: Iterable[Conversation]) -> None:
        """Keep some of them, perhaps instead of others."""
        with self._lock:
            for conversation in conversations:
                digest = hashlib.blake2b(repr(conversation).encode("utf-8", "replace"))
                self._by_digest[digest.hexdigest()] = conversation
            while len(self._by_digest) > MOST_WITNESSES:
                del self._by_digest[max(self._by_digest)]

    def all(self) -> list[Conversation]:
        """Those that were kept, in an order of their own."""
        with self._lock:
            return [self._by_digest[digest] for digest in sorted(self._by_digest)]


def noise_of(scorer: ContractScorer | BlockingScorer, groups: Sequence[Group]) -> float:
    """The noise; 0 where it cannot be measured, as nothing of it can be scored."""
    if isinstance(scorer, LoopScorer):  # which would remember what it is asked several times
        return scorer.directly(lambda model: noise_of(model, groups))
    with contextlib.suppress(ValueError):
        if isinstance(scorer, BlockingScorer):
            return measure_noise(scorer.score_afresh, groups)
        if not scorer.has_exact_scores:
            return measure_noise(scorer.score_now, groups)
        # Not every device and not every kernel knows float64, or has the memory.
        with contextlib.suppress(RuntimeError, TypeError):
            return measure_noise(scorer.score_now, groups, exact=scorer.score_exactly)
        return measure_noise(scorer.score_now, groups)
    return 0.0


def measure_noise(
    score: ScoreNow, groups: Sequence[Group], *, exact: ScoreNow | None = None
) -> float:
    """The noise of a scorer, in units of its scores; about one standard deviation.

    A conversation has one true score, but sums are rounded, and how depends on what is said and on
    what is computed with it. So two things are measured, and the larger is the result; it is never
    less than a float32 number can resolve.

    - In different company: every conversation is scored beside the other answers to its prompt,
      entirely alone, with its prompt to itself among all others, and with everything in reversed
      order. The root mean square of the largest deviations from a conversation's own mean.
    - Against exact scores, where there are any: the standard deviation of the error among the
      answers to one prompt. An error that they share moves no comparison. Arithmetic that rounds
      the same way in any company, as bfloat16 on a CPU may, shows its noise only here.

    Args:
        score: Scores groups; see `Scorer.score`.
        groups: What is scored. Two prompts with two answers each are the least that makes every
            layout a different one.
        exact: Scores them in a higher precision.

    Raises:
        ValueError: No conversation could be scored.
    """
    together = score(groups)
    found = [_of_company(score, groups, together), RESOLUTION * _size(together)]
    if exact is not None:
        found.append(_of_rounding(together, exact(groups)))
    return max(found)


def _of_company(
    score: ScoreNow, groups: Sequence[Group], together: Sequence[tuple[Score, ...]]
) -> float:
    alone = [replace(g, completions_G=(c,)) for g in groups for c in g.completions_G]
    turned = [replace(g, completions_G=g.completions_G[::-1]) for g in groups[::-1]]
    layouts = [
        _values(together),
        [value for one in alone for value in _values(score([one]))],
        _values(score(alone)),
        _values(score(turned))[::-1],
    ]
    deviations = []
    for values in zip(*layouts, strict=True):
        scored = [value for value in values if value is not None]
        if len(scored) == len(layouts):
            mean = math.fsum(scored) / len(scored)
            deviations.append(max(abs(value - mean) for value in scored))
    if not deviations:
        raise ValueError("the noise of a scorer cannot be measured on what it cannot score")
    return _root_mean_square(deviations)


def _of_rounding(rounded: Sequence[tuple[Score, ...]], exact: Sequence[tuple[Score, ...]]) -> float:
    """Deviation of the errors within groups, pooled; over all where every group has only one."""
    errors_BG = [
        [a.value - b.value for a, b in zip(one, other, strict=True)
         if a.value is not None and b.value is not None]
        for one, other in zip(rounded, exact, strict=True)
    ]  # fmt: skip
    several = [errors_G for errors_G in errors_BG if len(errors_G) > 1]
    if not several:
        several = [[error for errors_G in errors_BG for error in errors_G]]
    squares, freedom = 0.0, 0
    for errors_G in several:
        mean = math.fsum(errors_G) / max(len(errors_G), 1)
        squares += math.fsum((error - mean) ** 2 for error in errors_G)
        freedom += len(errors_G) - 1
    return math.sqrt(squares / freedom) if freedom > 0 else 0.0


def _size(scored: Sequence[tuple[Score, ...]]) -> float:
    sizes = [value for value in _values(scored) if value is not None]
    return _root_mean_square(sizes) if sizes else 0.0


def _values(scored: Sequence[tuple[Score, ...]]) -> list[float | None]:
    return [score.value for scores_G in scored for score in scores_G]


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values) / len(values))
