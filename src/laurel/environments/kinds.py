"""The kinds of environments by name, as plug-ins, which import an environment when it is made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from laurel.config.environments import (
    CodeEnvironmentConfig,
    MathEnvironmentConfig,
    OpenEnvConfig,
    OpenRewardConfig,
    ReasoningGymEnvironmentConfig,
    RewardModelEnvironmentConfig,
    SessionsConfig,
    ToolsConfig,
    VerifiersEnvironmentConfig,
)
from laurel.plugins import EnvironmentKind, EnvironmentServices, Rows

if TYPE_CHECKING:
    from laurel.config.data import TaskSetConfig
    from laurel.config.environments import EnvironmentsConfig
    from laurel.data.tasks import MadeRows
    from laurel.protocols import Environment
    from laurel.types import ToolSchemas

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

    def check(self, section: ToolsConfig, run: Any, where: str) -> None:
        """Check that there are turns for a call and an answer."""
        if section.functions and run.grpo.max_rollout_turns < 2:
            raise ValueError(
                f"{where}.functions: a call and the answer after it take two turns, and there is "
                f"grpo.max_rollout_turns={run.grpo.max_rollout_turns}; raise it"
            )

    def make(self, section: ToolsConfig, services: EnvironmentServices) -> Environment:
        """Return the environment."""
        from laurel.environments.tool_environment import ToolEnvironment

        return ToolEnvironment(section)

    def graded_by(self, section: ToolsConfig) -> str | None:
        """Return the environment that grades the final answer."""
        return section.graded_by

    def tools(self, section: ToolsConfig, services: EnvironmentServices) -> ToolSchemas:
        """Return the functions."""
        from laurel.environments.tool_environment import schemas_of

        return schemas_of(section)


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
    """Tasksets of verifiers, by names of your own; `data.dataset_name: verifiers` reads the tasks
    of the one that `data.env_name` names."""

    section = VerifiersEnvironmentConfig
    several = True

    def make(
        self, section: VerifiersEnvironmentConfig, services: EnvironmentServices
    ) -> Environment:
        """Return the environment."""
        from laurel.environments.verifiers import VerifiersEnvironment

        return VerifiersEnvironment(services.name, section, max_turns=services.max_turns)

    def tools(
        self, section: VerifiersEnvironmentConfig, services: EnvironmentServices
    ) -> ToolSchemas:
        """Return the tools of the taskset, which alone knows them."""
        environment = self.make(section, services)
        environment.shutdown()
        return environment.spec.tools


class OpenEnv(EnvironmentKind):
    """Servers of OpenEnv, by names of your own; `data.dataset_name: openenv` makes tasks with the
    one that `data.env_name` names."""

    section = OpenEnvConfig
    several = True

    def check(self, section: OpenEnvConfig, run: Any, where: str) -> None:
        """Check that sessions end in time."""
        _end_in_time(section, run, where)

    def make(self, section: OpenEnvConfig, services: EnvironmentServices) -> Environment:
        """Return the environment."""
        from laurel.environments.session_servers import open_sessions

        return open_sessions(services.name, section)


class OpenReward(EnvironmentKind):
    """Servers of the Open Reward Standard, by names of your own; `data.dataset_name: openreward`
    reads the tasks of the one that `data.env_name` names."""

    section = OpenRewardConfig
    several = True

    def check(self, section: OpenRewardConfig, run: Any, where: str) -> None:
        """Check that sessions end in time."""
        _end_in_time(section, run, where)

    def tools(self, section: OpenRewardConfig, services: EnvironmentServices) -> ToolSchemas:
        """Return the tools of the server, which alone knows them."""
        environment = self.make(section, services)
        environment.shutdown()
        return environment.spec.tools

    def make(self, section: OpenRewardConfig, services: EnvironmentServices) -> Environment:
        """Return the environment."""
        from laurel.environments.session_servers import open_sessions

        return open_sessions(services.name, section)


def _end_in_time(section: SessionsConfig, run: Any, where: str) -> None:
    # A step that a server lets wait, the outage, and the step again.
    longest = section.connect_patience + 2 * section.step_timeout
    if longest >= run.env.timeout_seconds:
        raise ValueError(
            f"{where}: connect_patience={section.connect_patience:g} and twice "
            f"step_timeout={section.step_timeout:g} have to be less than env.timeout_seconds="
            f"{run.env.timeout_seconds:g}, after which the completion has failed anyway"
        )


# The data sets that packages of environments make.


class ReasoningGymRows(Rows):
    """Generated tasks of reasoning_gym."""

    first_settings: ClassVar[Mapping[str, str]] = {"data.tasks": "{chain_sum: 1.0}"}
    to_do = "data.tasks names its generators and their weights"
    keys = ("tasks",)
    endless = True

    def make(self, chosen: TaskSetConfig, environments: EnvironmentsConfig) -> MadeRows:
        """Return the rows."""
        from laurel.environments.reasoning_gym import made_rows

        return made_rows(chosen, environments.settings_of(EnvironmentKind, "reasoning_gym")[1])


class VerifiersRows(Rows):
    """The tasks of a taskset of verifiers."""

    first_settings: ClassVar[Mapping[str, str]] = {"env.verifiers": "{verifiers: {id: PACKAGE}}"}
    to_do = "write the installed package of the taskset into env.verifiers.verifiers.id"

    def make(self, chosen: TaskSetConfig, environments: EnvironmentsConfig) -> MadeRows:
        """Return the rows."""
        from laurel.environments.verifiers import taskset_rows

        return taskset_rows(chosen, environments.get("verifiers", {}))


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

        return session_rows(chosen, environments.get("openenv", {}), kind="openenv")


class OpenRewardRows(Rows):
    """The tasks of a server of the Open Reward Standard."""

    first_settings: ClassVar[Mapping[str, str]] = {
        "env.openreward": "{openreward: {url: 'http://127.0.0.1:8080'}}"
    }
    to_do = "write the address of the server into env.openreward.openreward.url"

    def make(self, chosen: TaskSetConfig, environments: EnvironmentsConfig) -> MadeRows:
        """Return the rows."""
        from laurel.environments.session_servers import session_rows

        return session_rows(chosen, environments.get("openreward", {}), kind="openreward")
