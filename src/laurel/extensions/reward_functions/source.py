"""A function as a source of scores (`laurel.scorers`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from laurel import plugins
from laurel.plugins import ModelServing, ScorerServices, ScoreSource

if TYPE_CHECKING:
    from laurel.config.environments import FunctionConfig
    from laurel.extensions.reward_functions.scorer import FunctionScorer


class FunctionSource(ScoreSource):
    """A Python function, whose settings are `FunctionConfig`."""

    def make(self, section: FunctionConfig, services: ScorerServices) -> FunctionScorer:
        """Find the function."""
        from laurel.extensions.reward_functions.scorer import FunctionScorer

        served = None
        if services.server is not None:
            where = services.where.replace(".function", ".server")
            served = plugins.find(ModelServing, "router").make(
                services.server, replace(services, where=where)
            )
        try:
            return FunctionScorer(
                section,
                num_workers=services.num_workers,
                max_concurrent=services.source and services.source.max_concurrent,
                where=services.where,
                servers=served,
            )
        except BaseException:
            if served is not None:
                served.close()
            raise
