"""Answers of a policy to the same prompts, before and after its training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """An answer, its score, and whether it is right."""

    text: str
    score: float | None = None
    """The score of a reward model; None if there is none."""
    is_right: bool | None = None
    """Whether the answer is right by the ground truth; None if unknown."""

    @property
    def verdict(self) -> str:
        """The word `right` or `wrong`, or an empty text if the truth is unknown."""
        return "" if self.is_right is None else "right" if self.is_right else "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A prompt with its answers before and after training."""

    prompt: str
    expected: str
    """The known answer; empty if there is none."""
    before: ScoredAnswer
    after: ScoredAnswer
