"""Tools as a plug-in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from laurel.extensions.function_tools.settings import ToolsConfig
from laurel.plugins import EnvironmentKind, EnvironmentServices

if TYPE_CHECKING:
    from laurel.protocols import Environment
    from laurel.types import ToolSchemas


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
        from laurel.extensions.function_tools.environment import ToolEnvironment

        return ToolEnvironment(section, max_observation_chars=services.max_observation_chars)

    def graded_by(self, section: ToolsConfig) -> str | None:
        """Return the environment that grades the final answer."""
        return section.graded_by

    def tools(self, section: ToolsConfig, services: EnvironmentServices) -> ToolSchemas:
        """Return the functions."""
        from laurel.extensions.function_tools.environment import schemas_of

        return schemas_of(section)
