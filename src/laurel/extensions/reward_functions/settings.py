"""Defines `env.reward_model.function.rate_limited` and `env.reward_model.function.verl`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from laurel.config.yaml_tree import MAY_CHANGE, Section


class RateLimits(Section):
    """The calls that a service allows in a minute, which are spaced evenly."""

    max_rpm: Annotated[float | None, MAY_CHANGE] = Field(default=None, gt=0)
    """Calls in a minute; null: no limit."""
    max_tpm: Annotated[float | None, MAY_CHANGE] = Field(default=None, gt=0)
    """Tokens in a minute, of which a call takes `estimated_tokens_per_request`; null: no limit."""
    estimated_tokens_per_request: Annotated[int, MAY_CHANGE] = Field(default=2000, ge=1)
    """Tokens of one call, as `max_tpm` counts them."""

    @property
    def interval(self) -> float:
        """Return the seconds from the beginning of one call to that of the next."""
        calls = self.max_rpm or float("inf")
        tokens = self.max_tpm or float("inf")
        return 60.0 * max(1.0 / calls, self.estimated_tokens_per_request / tokens)


class VerlManagerConfig(Section):
    """A class that was written for verl as a reward manager."""

    path: str
    """`module:Class`, or `path/to/file.py:Class`, with verl's `async run_single(data)`."""
    tokenizer: str
    """Hub name or directory of the model whose tokenizer the class gets, usually the policy's."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The configuration that the class gets: those keys of verl's that it reads, nested as there,
    such as `reward: {reward_kwargs: {...}}`."""
