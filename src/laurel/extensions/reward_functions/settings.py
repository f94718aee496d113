"""Defines `env.reward_model.function.rate_limited` and `env.reward_model.function.verl`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from laurel.config.yaml_tree import MAY_CHANGE, Removed, Section


class RateLimits(Section):
    """The calls that a service allows in a minute, which are spaced evenly."""

    removed: ClassVar[Mapping[str, Removed]] = {
        key: Removed(
            "rate_limited.max_rpm is the tokens of a minute divided by those of a call", was
        )
        for key, was in (("max_tpm", None), ("estimated_tokens_per_request", 2000))
    }

    max_rpm: Annotated[float, MAY_CHANGE] = Field(gt=0)
    """Calls in a minute. Of a service that limits tokens: its tokens of a minute, divided by those
    of a call."""


class VerlManagerConfig(Section):
    """A class that was written for verl as a reward manager."""

    path: str
    """`module:Class`, or `path/to/file.py:Class`, with verl's `async run_single(data)`."""
    tokenizer: str
    """Hub name or directory of the model whose tokenizer the class gets, usually the policy's."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The configuration that the class gets: those keys of verl's that it reads, nested as there,
    such as `reward: {reward_kwargs: {...}}`."""
