"""A function as a source of scores (`laurel.scorers`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laurel.plugins import ScorerServices, ScoreSource

if TYPE_CHECKING:
    from laurel.config.environments import FunctionConfig
    from laurel.rewards.function import FunctionScorer


class FunctionSource(ScoreSource):
    """A Python function, whose settings are `FunctionConfig`."""

    def make(self, section: FunctionConfig, services: ScorerServices) -> FunctionScorer:
        """Find the function."""
        from laurel.rewards.function import FunctionScorer

        return FunctionScorer(section, num_workers=services.num_workers, where=services.where)
