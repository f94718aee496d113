"""Several scorers of the same completions, whose scores are combined into one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

from laurel.protocols import Scorer
from laurel.rewards.blocking import afresh
from laurel.rewards.remote.replica import REASONS, close_scorer, failed
from laurel.rewards.version import JOINED
from laurel.types import Group, Score

Combine = Literal["weighted_sum", "min", "mean_minus_std"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Holds one scorer of an ensemble."""

    name: str
    """Name of its scores in `parts`."""
    scorer: Scorer
    weight: float = 1.0
    """Weight in a weighted sum."""
    mean: float = 0.0
    """Subtracted from its scores before they are combined."""
    std: float = 1.0
    """Divisor of its scores after the mean is subtracted."""


class EnsembleScorer:
    """Combines the scores of several scorers into one.

    `values_K` of a score, and its `parts` by name, are the members' scores before normalisation.
    Where any member fails, the ensemble fails with the member's reason.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        combine: Combine = "weighted_sum",
        uncertainty_penalty: float = 1.0,
    ) -> None:
        """Take over scorers; `aclose` ends them.

        Args:
            members: The scorers, with different names.
            combine: How normalised scores are combined: the sum, each times its weight; the
                minimum; or the mean minus `uncertainty_penalty` standard deviations.
            uncertainty_penalty: Number of standard deviations (the sum of squares is divided by
                the number of members).
        """
        self.members = tuple(members)
        self._combine = combine
        self._penalty = uncertainty_penalty
        scorers = [member.scorer for member in members]
        self.reads_metadata = any(getattr(one, "reads_metadata", False) for one in scorers)
        self.judges_groups = any(getattr(one, "judges_groups", False) for one in scorers)
        self.rests = any(getattr(one, "rests", False) for one in scorers)
        declared = [noise for one in scorers if (noise := getattr(one, "noise", None)) is not None]
        # Members that declare no noise could only be measured together with the others.
        self.noise: float | None = max(declared, default=None)

    @property
    def version(self) -> str:
        """The versions of the members that have one, for which their files may be read."""
        versions = (getattr(member.scorer, "version", "") for member in self.members)
        return JOINED.join(filter(None, versions))

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """Score groups with every member at once."""
        asked = (member.scorer.score(groups) for member in self.members)
        return self._of_all(await asyncio.gather(*asked))

    async def score_afresh(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """Score groups without the members' caches."""
        asked = (afresh(member.scorer, groups) for member in self.members)
        return self._of_all(await asyncio.gather(*asked))

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Free the device memory of the members that support it, within the context."""
        with ExitStack() as resting:
            for member in self.members:
                rest = getattr(member.scorer, "resting", nullcontext)
                resting.enter_context(rest())
            yield

    def _of_all(self, found: Sequence[list[tuple[Score, ...]]]) -> list[tuple[Score, ...]]:
        return [
            tuple(self._combined(scores_K) for scores_K in zip(*of_members, strict=True))
            for of_members in zip(*found, strict=True)
        ]

    def _combined(self, scores_K: Sequence[Score]) -> Score:
        values_K: list[float] = []
        for member, score in zip(self.members, scores_K, strict=True):
            if score.value is None:
                failure = score.failure or "no score"
                word, colon, rest = failure.partition(":")
                # Failures are counted by their first word, so it stays in front.
                if colon and word in REASONS:
                    return failed(f"{word}: {member.name}:{rest}")
                return failed(f"{member.name}: {failure}")
            values_K.append(score.value)
        try:
            value = self._value(values_K)
        except (OverflowError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            return failed("nan: the scores of the models cannot be combined")
        named = dict(zip((member.name for member in self.members), values_K, strict=True))
        inner = {
            f"{member.name}/{name}": number
            for member, score in zip(self.members, scores_K, strict=True)
            for name, number in score.parts.items()
        }
        return Score(
            value=value,
            values_K=tuple(values_K),
            num_tokens=max(score.num_tokens for score in scores_K),
            truncated=any(score.truncated for score in scores_K),
            parts=named | inner,
        )

    def _value(self, values_K: Sequence[float]) -> float:
        normal_K = [
            (value - member.mean) / member.std
            for member, value in zip(self.members, values_K, strict=True)
        ]
        if self._combine == "min":
            return min(normal_K)
        if self._combine == "weighted_sum":
            weights = (member.weight for member in self.members)
            return math.fsum([w * value for w, value in zip(weights, normal_K, strict=True)])
        mean = math.fsum(normal_K) / len(normal_K)
        variance = math.fsum([(value - mean) ** 2 for value in normal_K]) / len(normal_K)
        return mean - self._penalty * math.sqrt(variance)

    async def aclose(self) -> None:
        """Close the members. Idempotent."""
        for member in self.members:
            await close_scorer(member.scorer)
