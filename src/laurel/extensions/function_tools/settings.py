"""Defines `env.tools`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from laurel.config.yaml_tree import MAY_CHANGE, PROCESSES, Removed, Section


class ToolsConfig(Section):
    """Python functions that the policy may call before its answer, which another one grades."""

    removed: ClassVar[Mapping[str, Removed]] = {
        "form": Removed("calls are read as policy.tokenizer.chat_template writes them", "auto"),
        "max_result_chars": Removed("env.max_observation_chars holds for all environments", 4096),
    }

    functions: list[str] = Field(default_factory=list)
    """Import paths `module.function`. Type hints and a docstring with `Args:` make the schema that
    the chat template shows. They run in processes with this account's rights: for code of a policy
    there is `env.code`."""
    graded_by: str | None = None
    """The environment that grades the final answer: a message without a call. Null: another part of
    an `env.composite` that this one conducts."""
    max_calls: int = Field(default=16, ge=1)
    """Calls of one rollout. Further ones are answered by a text that says so, and counted."""
    timeout_seconds: float = Field(default=10.0, gt=0)
    """Limit of one call, after which its process is killed; the policy reads that, and it is
    counted."""
    num_workers: Annotated[int, MAY_CHANGE, PROCESSES] = Field(default=8, ge=1)
    """Calls at a time, each in a process of its own."""

    @model_validator(mode="after")
    def _functions_are_paths(self) -> ToolsConfig:
        for path in self.functions:
            if "." not in path or not all(part.isidentifier() for part in path.split(".")):
                raise ValueError(f"functions: {path!r} must be module.function")
        names = [path.rpartition(".")[2] for path in self.functions]
        if len(set(names)) < len(names):
            raise ValueError(f"functions: two have the same name ({', '.join(names)}); rename one")
        return self
