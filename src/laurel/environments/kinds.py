"""The kinds of environments by name, as plug-ins, which import an environment when it is made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

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
from laurel.plugins import EnvironmentKind, EnvironmentServices, Rows

if TYPE_CHECKING:
    from laurel.config.data import TaskSetConfig
    from laurel.config.environments import EnvironmentsConfig
    from laurel.data.tasks import MadeRows
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

    def make(self, section: CodeEnvironmentConfig, services: EnvironmentServices) -> Environment:
        """Return the environment."""
        from laurel.environments.code_environment import CodeEnvironment

        return CodeEnvironment(section, nodes=services.nodes)

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


# The data sets that packages of environments make.


class ReasoningGymRows(Rows):
    """Generated tasks of reasoning_gym."""

    first_settings: ClassVar[Mapping[str, str]] = {"data.tasks": "{chain_sum: 1.0}"}
    to_do = "data.tasks names its generators and their weights"

    def make(self, chosen: TaskSetConfig, environments: EnvironmentsConfig) -> MadeRows:
        """Return the rows."""
        from laurel.environments.reasoning_gym import made_rows

        return made_rows(chosen, environments.reasoning_gym)


class VerifiersRows(Rows):
    """The tasks of a taskset of verifiers."""

    first_settings: ClassVar[Mapping[str, str]] = {"env.verifiers": "{verifiers: {id: PACKAGE}}"}
    to_do = "write the installed package of the taskset into env.verifiers.verifiers.id"

    def make(self, chosen: TaskSetConfig, environments: EnvironmentsConfig) -> MadeRows:
        """Return the rows."""
        from laurel.environments.verifiers import taskset_rows

        return taskset_rows(chosen, environments.verifiers)


class OpenEnvRows(Rows):
    """A task for each seed of a server of OpenEnv."""

    first_settings: ClassVar[Mapping[str, str]] = {
        "env.openenv": "{openenv: {url: 'http://127.0.0.1:8000'}}",
        "data.max_samples": "100",
    }
    to_do = (
        "write the address of the server into env.openenv.openenv.url, and how many seeds make a "
        "task into data.max_samples"
    )

    def make(self, chosen: TaskSetConfig, environments: EnvironmentsConfig) -> MadeRows:
        """Return the rows."""
        from laurel.environments.session_servers import session_rows

        return session_rows(chosen, environments.openenv, kind="openenv")


class OpenRewardRows(Rows):
    """The tasks of a server of the Open Reward Standard."""

    first_settings: ClassVar[Mapping[str, str]] = {
        "env.openreward": "{openreward: {url: 'http://127.0.0.1:8080'}}"
    }
    to_do = "write the address of the server into env.openreward.openreward.url"

    def make(self, chosen: TaskSetConfig, environments: EnvironmentsConfig) -> MadeRows:
        """Return the rows."""
        from laurel.environments.session_servers import session_rows

        return session_rows(chosen, environments.openreward, kind="openreward")
