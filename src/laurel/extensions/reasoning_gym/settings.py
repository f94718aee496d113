"""Defines `env.reasoning_gym`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from laurel.config.yaml_tree import Removed, Section


class ReasoningGymEnvironmentConfig(Section):
    """Answers to the generated tasks of reasoning_gym, scored by its own scorers."""

    removed: ClassVar[Mapping[str, Removed]] = {
        "system_prompt": Removed(
            "reasoning_gym's default prompt asks for the tag `answer`, where "
            "data.system_prompt_file holds no other",
            "default",
        )
    }

    answer_tag: str | None = Field(default="answer", pattern=r"^\w+$")
    """The answer is what stands in the last `<answer>...</answer>`; without one the scorer
    gets no answer. reasoning_gym's default system prompt asks for the tag `answer`; for another,
    or in place of it, `data.system_prompt_file` may. Null: the whole completion is the answer."""
