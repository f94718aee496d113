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

        if services.server is not None:
            from laurel.errors import ConfigError
            from laurel.rewards.serving.servers import open_servers

            where = services.where.replace(".function", ".server")
            if services.is_elsewhere:
                raise ConfigError(services.server.lacks_slot(where))
            servers = open_servers(
                services.server, device=str(services.device), say=services.say, where=where
            )
            try:
                return FunctionScorer(
                    section,
                    num_workers=services.num_workers,
                    where=services.where,
                    servers=servers,
                )
            except BaseException:
                servers.close()
                raise
        return FunctionScorer(section, num_workers=services.num_workers, where=services.where)
