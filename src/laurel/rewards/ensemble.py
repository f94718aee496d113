"""Several scorers that judge the same completions, and one score from all of theirs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from laurel.protocols import Scorer
from laurel.rewards.blocking import afresh
from laurel.rewards.remote.replica import REASONS, close_scorer, failed
from laurel.rewards.scorer import ContractScorer
from laurel.types import Group, Score

if TYPE_CHECKING:
    pass


Combine = Literal["weighted_sum", "min", "mean_minus_std"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One of several scorers."""

    name: str
    """What its scores are called."""
    scorer: Scorer
    weight: float = 1.0
    """In a weighted sum."""
    mean: float = 0.0
    """Subtracted from its scores before they are combined."""
    std: float = 1.0
    """What they are then divided by."""


class EnsembleScorer:
    """A `Scorer` over scorers.

    `values_K` of a score, and its `parts` by name, are what each member said, before it was
    normalised. Where any member has failed, so has the ensemble, with the member's reason.
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
            members: With different names.
            combine: How their normalised scores become one: the sum, each times its weight; the
                least; or the mean minus some standard deviations (the sum of squares divided by
                the number of members).
            uncertainty_penalty: How many.
        """
        self.members = tuple(members)
        self._combine = combine
        self._penalty = uncertainty_penalty
        scorers = [member.scorer for member in members]
        self.reads_metadata = any(getattr(one, "reads_metadata", False) for one in scorers)
        self.judges_groups = any(getattr(one, "judges_groups", False) for one in scorers)
        declared = [noise for one in scorers if (noise := getattr(one, "noise", None)) is not None]
        self.noise: float | None = max(declared, default=None)
        """Where a member says how much its own is: the others could only be measured with it."""

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """See `protocols.Scorer`."""
        asked = (member.scorer.score(groups) for member in self.members)
        return self._of_all(await asyncio.gather(*asked))

    async def score_afresh(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """The same, of members that remember what they were asked as well."""
        asked = (afresh(member.scorer, groups) for member in self.members)
        return self._of_all(await asyncio.gather(*asked))

    @contextmanager
    def resting(self) -> Iterator[None]:
        """See `ContractScorer.resting`; of the members that can."""
        with ExitStack() as resting:
            for member in self.members:
                if isinstance(member.scorer, ContractScorer):
                    resting.enter_context(member.scorer.resting())
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
                return failed(_blamed(member.name, score.failure or "no score"))
            values_K.append(score.value)
        try:
            value = self._value(values_K)
        except (OverflowError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            return failed("nan: the scores of the models cannot be added up")
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
        """End the members. Idempotent."""
        for member in self.members:
            await close_scorer(member.scorer)


def _blamed(name: str, failure: str) -> str:
    """A member's failure with its name; the word that it is counted under stays in front."""
    word, colon, rest = failure.partition(":")
    if colon and word in REASONS:
        return f"{word}: {name}:{rest}"
    return f"{name}: {failure}"
