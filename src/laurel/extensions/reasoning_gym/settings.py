"""Defines `env.reasoning_gym`."""

from __future__ import annotations

from pydantic import Field

from laurel.config.yaml_tree import Section


class ReasoningGymEnvironmentConfig(Section):
    """Answers to the generated tasks of reasoning_gym, scored by its own scorers."""

    answer_tag: str | None = Field(default="answer", pattern=r"^\w+$")
    """The answer is what stands in the last `<answer>...</answer>`; without one the scorer
    gets no answer. Null: the whole completion is the answer."""
    system_prompt: str | None = "default"
    """A system prompt of reasoning_gym, by its name: default, simple, direct, chain_of_draft or
    DeepSeekZero, which all ask for the tag. Null: none, or that of `data.system_prompt_file`."""
