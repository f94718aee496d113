"""The kinds of environments by name, as plug-ins, which import an environment when it is made."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

from laurel.config.environments import (
    CodeEnvironmentConfig,
    MathEnvironmentConfig,
    RewardModelEnvironmentConfig,
)
from laurel.plugins import EnvironmentKind, EnvironmentServices

if TYPE_CHECKING:
    from laurel.protocols import Environment

Needs = Collection[Literal["answers", "tests"]]


class Math(EnvironmentKind):
    """Answers that are checked against a known one."""

    section = MathEnvironmentConfig

    def make(self, section: MathEnvironmentConfig, services: EnvironmentServices) -> Environment:
        """Return the environment."""
        from laurel.environments.math_environment import MathEnvironment

        return MathEnvironment(section)

    def needs(self, section: MathEnvironmentConfig) -> Needs:
        """Return that tasks have answers."""
        return ["answers"]


class Code(EnvironmentKind):
    """Programs of the policy, run in a sandbox."""

    section = CodeEnvironmentConfig

    def check(self, section: CodeEnvironmentConfig, run: Any, where: str) -> None:
        """Check that there are as many turns as attempts."""
        attempts, turns = section.max_attempts, run.grpo.max_rollout_turns
        if attempts > turns:
            raise ValueError(
                f"{where}.max_attempts={attempts} takes as many turns, and there are "
                f"grpo.max_rollout_turns={turns}; set that to {attempts}, or ask for fewer attempts"
            )

    def make(self, section: CodeEnvironmentConfig, services: EnvironmentServices) -> Environment:
        """Return the environment."""
        from laurel.environments.code_environment import CodeEnvironment

        return CodeEnvironment(
            section,
            nodes=services.nodes,
            timeout_seconds=services.timeout_seconds,
            max_observation_chars=services.max_observation_chars,
        )

    def needs(self, section: CodeEnvironmentConfig) -> Needs:
        """Return that tasks have tests."""
        return ["tests"]


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
