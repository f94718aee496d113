"""The kinds of environments by name, as plug-ins, which import an environment when it is made."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from laurel.config.environments import (
    CodeEnvironmentConfig,
    MathEnvironmentConfig,
    OpenEnvConfig,
    OpenRewardConfig,
    ReasoningGymEnvironmentConfig,
    RewardModelEnvironmentConfig,
    ToolsConfig,
    VerifiersEnvironmentConfig,
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
        return ("answers",)


class Code(EnvironmentKind):
    """Programs of the policy, run in a sandbox."""

    section = CodeEnvironmentConfig

    def make(self, section: CodeEnvironmentConfig, services: EnvironmentServices) -> Environment:
        """Return the environment."""
        from laurel.environments.code_environment import CodeEnvironment

        return CodeEnvironment(section, nodes=services.nodes)

    def needs(self, section: CodeEnvironmentConfig) -> Needs:
        """Return that tasks have tests."""
        return ("tests",)


class RewardModel(EnvironmentKind):
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
        return ("answers",) if section.transform.subtract_reference else ()


class Tools(EnvironmentKind):
    """Functions that the policy calls before an answer that another environment grades."""

    section = ToolsConfig
    must_be_graded = True

    def make(self, section: ToolsConfig, services: EnvironmentServices) -> Environment:
        """Return the environment."""
        from laurel.environments.tool_environment import ToolEnvironment

        return ToolEnvironment(section)

    def graded_by(self, section: ToolsConfig) -> str | None:
        """Return the environment that grades the final answer."""
        return section.graded_by


class ReasoningGym(EnvironmentKind):
    """Answers to the generated tasks of reasoning_gym."""

    section = ReasoningGymEnvironmentConfig

    def make(
        self, section: ReasoningGymEnvironmentConfig, services: EnvironmentServices
    ) -> Environment:
        """Return the environment."""
        from laurel.environments.reasoning_gym import ReasoningGymEnvironment

        return ReasoningGymEnvironment(section)


class Verifiers(EnvironmentKind):
    """Tasksets of verifiers."""

    section = VerifiersEnvironmentConfig
    several = True

    def make(
        self, section: VerifiersEnvironmentConfig, services: EnvironmentServices
    ) -> Environment:
        """Return the environment."""
        from laurel.environments.verifiers import VerifiersEnvironment

        return VerifiersEnvironment(services.name, section, max_turns=services.max_turns)


class OpenEnv(EnvironmentKind):
    """Servers of OpenEnv."""

    section = OpenEnvConfig
    several = True

    def make(self, section: OpenEnvConfig, services: EnvironmentServices) -> Environment:
        """Return the environment."""
        from laurel.environments.session_servers import open_sessions

        return open_sessions(services.name, section)


class OpenReward(EnvironmentKind):
    """Servers of the Open Reward Standard."""

    section = OpenRewardConfig
    several = True

    def make(self, section: OpenRewardConfig, services: EnvironmentServices) -> Environment:
        """Return the environment."""
        from laurel.environments.session_servers import open_sessions

        return open_sessions(services.name, section)
