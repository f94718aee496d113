"""Reward models that fail, for whole runs, by their import path."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from laurel.environments.reward_model_environment import RewardModelEnvironment
from laurel.models.spec import ModelSpec
from laurel.rewards.open import open_local
from laurel.rewards.spec import ScorerSpec
from laurel.types import Group, Score


class Flaky:
    """A scorer that fails at completions which a hash picks, each for one of two reasons."""

    def __init__(self, model_name: str, share: float) -> None:
        spec = ScorerSpec(model=ModelSpec(name=model_name), device="cpu")
        self._scorer = open_local(spec, say=lambda _: None)
        self._share = share

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        scored = await self._scorer.score(groups)
        return [
            tuple(self._perhaps(group, index, score) for index, score in enumerate(scores_G))
            for group, scores_G in zip(groups, scored, strict=True)
        ]

    def _perhaps(self, group: Group, index: int, score: Score) -> Score:
        picked = hashlib.blake2b(repr(group.conversation(index)).encode(), digest_size=2).digest()
        if picked[0] >= 256 * self._share:
            return score
        reason = "timeout: it took too long" if picked[1] % 2 else "nan: it gave nan"
        return replace(score, value=None, failure=reason)


class FlakyEnvironment(RewardModelEnvironment):
    """Judges with such a scorer."""

    def __init__(self, model_name: str, share: float = 0.3, **settings: Any) -> None:
        config = {"model_name": model_name, "precision": "float32", **settings}
        super().__init__(config, scorer=Flaky(model_name, share))
