"""A preference pair and what a reward model said of both of its answers."""

from __future__ import annotations

from dataclasses import dataclass

from laurel.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPair:
    """What every evaluation on pairs is computed from."""

    id: str
    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    score_chosen: float | None
    """None: it could not be scored."""
    score_rejected: float | None
    subset: str | None = None
    margin: float | None = None
    """By how much people, or whoever labelled it, preferred the chosen one."""
    failure: str | None = None
    """Why there is no score."""

    @property
    def is_right(self) -> bool | None:
        """Whether the chosen answer has strictly more, as RewardBench counts: a tie is wrong. None
        where a score is missing: a failure is not a verdict."""
        if self.score_chosen is None or self.score_rejected is None:
            return None
        return self.score_chosen > self.score_rejected
