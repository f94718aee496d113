"""Defines `env.verifiers`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from laurel.config.yaml_tree import Section


class VerifiersEnvironmentConfig(Section):
    """A taskset of verifiers, played by the package's own runner with the policy as its model."""

    id: str
    """The installed package (or module) of the taskset, as `verifiers` names it."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the taskset, e.g. `{num_tasks: 100}`; those of its tasks are under `task`."""
    env: dict[str, Any] = Field(default_factory=dict)
    """Settings of its environment (`--env.*` there), e.g. `{id: user-sim}`. One agent is the
    policy, and each other one needs a `client` of its own."""
    form: Literal["auto", "hermes", "llama"] = "auto"
    """How the policy writes calls of tools, as `env.tools.form`."""
