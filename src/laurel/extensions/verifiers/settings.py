"""Defines `env.verifiers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from laurel.config.yaml_tree import Removed, Section


class VerifiersEnvironmentConfig(Section):
    """A taskset of verifiers, played by the package's own runner with the policy as its model."""

    removed: ClassVar[Mapping[str, Removed]] = {
        "form": Removed("calls are read as policy.tokenizer.chat_template writes them", "auto")
    }

    id: str
    """The installed package (or module) of the taskset, as `verifiers` names it."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the taskset, e.g. `{num_tasks: 100}`; those of its tasks are under `task`."""
    env: dict[str, Any] = Field(default_factory=dict)
    """Settings of its environment (`--env.*` there), e.g. `{id: user-sim}`. One agent is the
    policy, and each other one needs a `client` of its own."""
