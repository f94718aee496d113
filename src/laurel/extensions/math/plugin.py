"""Known answers as a plug-in."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from laurel.extensions.math.settings import MathEnvironmentConfig
from laurel.plugins import EnvironmentKind, EnvironmentServices

if TYPE_CHECKING:
    from laurel.protocols import Environment


class Math(EnvironmentKind):
    """Answers that are checked against a known one."""

    section = MathEnvironmentConfig

    def make(self, section: MathEnvironmentConfig, services: EnvironmentServices) -> Environment:
        """Return the environment."""
        from laurel.extensions.math.environment import MathEnvironment

        return MathEnvironment(section)

    def needs(self, section: MathEnvironmentConfig) -> Collection[Literal["answers", "tests"]]:
        """Return that tasks have answers."""
        return ["answers"]
