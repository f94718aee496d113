"""A judge as a source of scores (`laurel.scorers`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laurel.errors import ConfigError, key_of
from laurel.plugins import ScorerServices, ScoreSource

if TYPE_CHECKING:
    from laurel.config.environments import JudgeConfig
    from laurel.protocols import Scorer


SECTION = "env.reward_model"
"""The section that a judge stands in."""


class Judge(ScoreSource):
    """A language model that is asked for a score, whose settings are `JudgeConfig`."""

    def check(self, section: JudgeConfig, where: str) -> None:
        """Check the template."""
        from laurel.extensions.judges.served import JudgePrompt

        JudgePrompt(section, where=where)

    def make(self, section: JudgeConfig, services: ScorerServices) -> Scorer:
        """Ask the servers for a first verdict, or load the judge."""
        source = services.source
        if source.urls is None:
            if services.is_elsewhere:
                raise ConfigError(source.lacks_slot(key_of(SECTION)))
            from laurel.extensions.judges.loaded import open_model_judge

            return open_model_judge(
                source, device=services.device, where=services.where, say=services.say
            )
        from laurel.extensions.judges.served import JudgeScorer
        from laurel.rewards.open import api_key_of, checked_servers

        judge = JudgeScorer(source, api_key=api_key_of(source, SECTION), where=services.where)
        return checked_servers(judge, source, contract=None, where=SECTION, say=services.say)
