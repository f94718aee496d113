"""Programs of the policy as a plug-in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

from laurel.extensions.code.settings import FORMS_OF_TESTS, CodeEnvironmentConfig
from laurel.plugins import EnvironmentKind, EnvironmentServices

if TYPE_CHECKING:
    from laurel.protocols import Environment


class Code(EnvironmentKind):
    """Programs of the policy, run in a sandbox."""

    section = CodeEnvironmentConfig
    tests = FORMS_OF_TESTS
    solution = "reference_solution"

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
        from laurel.extensions.code.environment import CodeEnvironment

        return CodeEnvironment(
            section, nodes=services.nodes, timeout_seconds=services.timeout_seconds
        )

    def needs(self, section: CodeEnvironmentConfig) -> Collection[Literal["answers", "tests"]]:
        """Return that tasks have tests."""
        return ["tests"]

    def problem_of(self, section: CodeEnvironmentConfig, metadata: Mapping[str, Any]) -> str | None:
        """Return why the tests of a task cannot be run; None if they can, or if it has none."""
        from laurel.extensions.code.tests import problem_of

        return problem_of(metadata, section)
