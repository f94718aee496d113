"""The kinds of environments by name, as plug-ins, which import an environment when it is made."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from laurel.config.environments import RewardModelEnvironmentConfig
from laurel.plugins import EnvironmentKind, EnvironmentServices

if TYPE_CHECKING:
    from laurel.protocols import Environment

Needs = Collection[Literal["answers", "tests"]]


class ScoredByModel(EnvironmentKind):
    """Conversations scored by reward models, servers, a judge or a function."""

    section = RewardModelEnvironmentConfig

    def make(
        self, section: RewardModelEnvironmentConfig, services: EnvironmentServices
    ) -> Environment:
        """Return the environment."""
        from laurel.environments.reward_model_environment import RewardModelEnvironment

        return RewardModelEnvironment(
            section, device=services.device, opening=services.placement, say=services.say
        )

    def needs(self, section: RewardModelEnvironmentConfig) -> Needs:
        """Return that tasks have answers, if the answer's score is subtracted."""
        return ["answers"] if section.transform.subtract_reference else []
