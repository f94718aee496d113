"""The `cluster.placement` section: which slots each role of a run gets, where the rules do not do.

Whether it can be had is not checked here but by `laurel plan` and at the start of a run, which tell
everything that does not fit at once.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from laurel.config.section import Section


class RolePlacement(Section):
    """The slots of one role. What is not said is left open, and `{}` takes all that is left."""

    nodes: int | list[int] | None = None
    """Which nodes, counted from 0; or how many, of which those are taken that are least free and
    have room. Null: every node."""
    labels: list[str] = Field(default_factory=list)
    """Only nodes with all of these labels; see `cluster.labels`."""
    slots: int | list[int] | None = None
    """Which slots of each of the nodes, counted from 0; or how many of each. Null: all that other
    roles leave."""
    fraction: float = Field(default=1.0, gt=0, le=1)
    """Part of each slot, and of its memory. The rest is for a role that computes at the same
    time."""
    shares: Literal["policy", "generation"] | None = None
    """The role whose slots these are, in turns: all of them, or those that the other keys pick."""

    @field_validator("nodes", "slots")
    @classmethod
    def _is_a_choice(cls, value: int | list[int] | None) -> int | list[int] | None:
        if isinstance(value, list):
            if not value:
                raise ValueError("an empty list is no place; null leaves it open")
            if min(value) < 0:
                raise ValueError(f"they are counted from 0: there is no {min(value)}")
            if len(set(value)) < len(value):
                raise ValueError(f"{value} names one of them twice; name each once")
            return sorted(value)
        if value is not None and value < 1:
            raise ValueError(f"it must be a number from 1 up, or a list like [{max(0, value)}]")
        return value

    @model_validator(mode="after")
    def _takes_turns_or_a_part(self) -> RolePlacement:
        if self.shares is not None and self.fraction < 1:
            raise ValueError(
                f"fraction={self.fraction:g} beside shares={self.shares}: roles that share slots "
                "take turns, each with the whole; leave one of the two out"
            )
        return self


class PlacementConfig(Section):
    """The slots of each role. Who is not named here shares the policy's; it has what is left."""

    policy: RolePlacement | None = None
    """The model that is trained."""
    generation: RolePlacement | None = None
    """Where completions are drawn; instead of `policy.generation.colocated`."""
    reward_model: RolePlacement | None = None
    """The reward model that judges; instead of `env.reward_model.resources`."""

    @model_validator(mode="after")
    def _somebody_owns_the_slots(self) -> PlacementConfig:
        if self.policy is not None and self.policy.shares is not None:
            raise ValueError("policy.shares: the others share its slots; say it of them")
        if self.generation is not None and self.generation.shares == "generation":
            raise ValueError("generation.shares: it cannot share its own slots; it may policy's")
        return self
