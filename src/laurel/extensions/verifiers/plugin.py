"""Tasksets of verifiers as plug-ins: the environment, and the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from laurel.extensions.verifiers.settings import VerifiersEnvironmentConfig
from laurel.plugins import EnvironmentKind, EnvironmentServices, Rows

if TYPE_CHECKING:
    from laurel.config.data import TaskSetConfig
    from laurel.config.environments import EnvironmentsConfig
    from laurel.data.tasks import MadeRows
    from laurel.protocols import Environment
    from laurel.types import ToolSchemas


class Verifiers(EnvironmentKind):
    """Tasksets of verifiers, by names of your own; `data.dataset_name: verifiers` reads the tasks
    of the one that `data.env_name` names."""

    section = VerifiersEnvironmentConfig
    several = True

    def make(
        self, section: VerifiersEnvironmentConfig, services: EnvironmentServices
    ) -> Environment:
        """Return the environment."""
        from laurel.extensions.verifiers.environment import VerifiersEnvironment

        return VerifiersEnvironment(services.name, section, max_turns=services.max_turns)

    def tools(
        self, section: VerifiersEnvironmentConfig, services: EnvironmentServices
    ) -> ToolSchemas:
        """Return the tools of the taskset, which alone knows them."""
        environment = self.make(section, services)
        environment.shutdown()
        return environment.spec.tools


class VerifiersRows(Rows):
    """The tasks of a taskset of verifiers."""

    first_settings: ClassVar[Mapping[str, str]] = {"env.verifiers": "{verifiers: {id: PACKAGE}}"}
    to_do = "write the installed package of the taskset into env.verifiers.verifiers.id"

    def make(self, chosen: TaskSetConfig, environments: EnvironmentsConfig) -> MadeRows:
        """Return the rows."""
        from laurel.extensions.verifiers.environment import taskset_rows

        return taskset_rows(chosen, environments.get("verifiers", {}))
