"""A prompt with any number of answers, right ones and wrong ones, and what was said of each."""

from __future__ import annotations

from dataclasses import dataclass

from laurel.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredList:
    """What every evaluation on lists is computed from; the sibling of `ScoredPair`."""

    id: str
    prompt: tuple[Message, ...]
    completions_G: tuple[str, ...]
    is_right_G: tuple[bool, ...]
    scores_G: tuple[float | None, ...]
    """None: it could not be scored."""
    subset: str | None = None
    failure: str | None = None
    """Why a score is missing; the first reason."""

    def __post_init__(self) -> None:
        """Refuse lists of different lengths, from which any figure would be nonsense."""
        if not len(self.completions_G) == len(self.is_right_G) == len(self.scores_G) > 0:
            raise ValueError(
                f"{self.id}: {len(self.completions_G)} completions, {len(self.is_right_G)} "
                f"verdicts and {len(self.scores_G)} scores; one of each is needed per completion"
            )

    @property
    def whole_scores_G(self) -> tuple[float, ...] | None:
        """Every score; None where one is missing, since then nobody knows which is the best."""
        scores = tuple(score for score in self.scores_G if score is not None)
        return scores if len(scores) == len(self.scores_G) else None

    @property
    def first_credit(self) -> float | None:
        """What the list is worth where its first completion is the right one: 1 if it alone has the
        most, 1/k if k share the most and it is among them, else 0. None where a score is missing.
        """
        scores_G = self.whole_scores_G
        if scores_G is None:
            return None
        best = max(scores_G)
        return 1 / scores_G.count(best) if scores_G[0] == best else 0.0

    @property
    def best_credit(self) -> float | None:
        """The chance that the best is right, where those that share the most are drawn from."""
        scores_G = self.whole_scores_G
        if scores_G is None:
            return None
        best = max(scores_G)
        drawn = [
            is_right
            for score, is_right in zip(scores_G, self.is_right_G, strict=True)
            if score == best
        ]
        return sum(drawn) / len(drawn)
