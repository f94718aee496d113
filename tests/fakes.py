"""Small stand-ins for the seams, which keep every promise of theirs without a model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from laurel.types import Conversation, Group, Score


class WordScorer:
    """A scorer that reads words: a token is a word, the score the mean length of the kept ones.

    It cuts on the left, cannot read a turn of the role `tool`, and gives NaN where a kept word is
    the `poison`.
    """

    def __init__(self, *, max_length: int = 64, weight: float = 1.0, poison: str = "") -> None:
        self.max_length = max_length
        self.weight = weight
        self.poison = poison

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        return [
            tuple(self._score(group.conversation(i)) for i in range(len(group.completions_G)))
            for group in groups
        ]

    def _score(self, conversation: Conversation) -> Score:
        if any(message.role == "tool" for message in conversation):
            return Score(value=None, failure="no tools")
        words = [word for m in conversation for word in (m.role, *m.content.split())]
        kept = words[-self.max_length :]
        is_cut = len(kept) < len(words)
        value = self.weight * math.fsum(map(len, kept)) / len(kept)
        if self.poison in kept:
            value = math.nan
        if not math.isfinite(value):
            return Score(value=None, num_tokens=len(kept), truncated=is_cut, failure="not finite")
        return Score(value=value, values_K=(value,), num_tokens=len(kept), truncated=is_cut)
