"""Generated tasks of reasoning_gym as plug-ins: the environment, and the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from laurel.extensions.reasoning_gym.settings import ReasoningGymEnvironmentConfig
from laurel.plugins import EnvironmentKind, EnvironmentServices, Rows

if TYPE_CHECKING:
    from laurel.config.data import TaskSetConfig
    from laurel.config.environments import EnvironmentsConfig
    from laurel.data.tasks import MadeRows
    from laurel.protocols import Environment


class ReasoningGym(EnvironmentKind):
    """Answers to the generated tasks of reasoning_gym."""

    section = ReasoningGymEnvironmentConfig

    def make(
        self, section: ReasoningGymEnvironmentConfig, services: EnvironmentServices
    ) -> Environment:
        """Return the environment."""
        from laurel.extensions.reasoning_gym.environment import ReasoningGymEnvironment

        return ReasoningGymEnvironment(section)


class ReasoningGymRows(Rows):
    """Generated tasks of reasoning_gym."""

    first_settings: ClassVar[Mapping[str, str]] = {"data.tasks": "{chain_sum: 1.0}"}
    to_do = "data.tasks names its generators and their weights"
    keys = ("tasks",)
    endless = True

    def make(self, chosen: TaskSetConfig, environments: EnvironmentsConfig) -> MadeRows:
        """Return the rows."""
        from laurel.extensions.reasoning_gym.environment import made_rows

        return made_rows(chosen, environments.settings_of(EnvironmentKind, "reasoning_gym")[1])
