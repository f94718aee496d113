"""Servers of OpenEnv and of the Open Reward Standard as plug-ins: environments, and rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from laurel.extensions.environment_servers.settings import (
    OpenEnvConfig,
    OpenRewardConfig,
    SessionsConfig,
)
from laurel.plugins import EnvironmentKind, EnvironmentServices, Rows

if TYPE_CHECKING:
    from laurel.config.data import TaskSetConfig
    from laurel.config.environments import EnvironmentsConfig
    from laurel.data.tasks import MadeRows
    from laurel.protocols import Environment
    from laurel.types import ToolSchemas


class _Sessions(EnvironmentKind):
    several = True

    def make(self, section: SessionsConfig, services: EnvironmentServices) -> Environment:
        """Return the environment."""
        from laurel.extensions.environment_servers.servers import open_sessions

        return open_sessions(
            services.name,
            section,
            timeout_seconds=services.timeout_seconds,
            max_observation_chars=services.max_observation_chars,
        )


class OpenEnv(_Sessions):
    """Servers of OpenEnv, by names of your own; `data.dataset_name: openenv` makes tasks with the
    one that `data.env_name` names."""

    section = OpenEnvConfig


class OpenReward(_Sessions):
    """Servers of the Open Reward Standard, by names of your own; `data.dataset_name: openreward`
    reads the tasks of the one that `data.env_name` names."""

    section = OpenRewardConfig

    def tools(self, section: OpenRewardConfig, services: EnvironmentServices) -> ToolSchemas:
        """Return the tools of the server, which alone knows them."""
        environment = self.make(section, services)
        environment.shutdown()
        return environment.spec.tools


class _SessionRows(Rows):
    kind: ClassVar[str]

    def make(self, chosen: TaskSetConfig, environments: EnvironmentsConfig) -> MadeRows:
        """Return the rows."""
        from laurel.extensions.environment_servers.servers import session_rows

        return session_rows(chosen, environments, kind=self.kind)


class OpenEnvRows(_SessionRows):
    """A task for each seed of a server of OpenEnv."""

    kind = "openenv"
    first_settings: ClassVar[Mapping[str, str]] = {
        "env.openenv": "{openenv: {url: 'http://127.0.0.1:8000'}}",
        "data.max_samples": "100",
    }
    to_do = (
        "write the address of the server into env.openenv.openenv.url, and how many seeds make a "
        "task into data.max_samples"
    )


class OpenRewardRows(_SessionRows):
    """The tasks of a server of the Open Reward Standard."""

    kind = "openreward"
    first_settings: ClassVar[Mapping[str, str]] = {
        "env.openreward": "{openreward: {url: 'http://127.0.0.1:8080'}}"
    }
    to_do = "write the address of the server into env.openreward.openreward.url"
