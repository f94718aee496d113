"""The section `grpo.health`: which signs of reward hacking a run looks for, and from where on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from laurel.config.section import Section

Alarm = Literal[
    "overoptimisation",
    "kl_jump",
    "length",
    "length_bias",
    "repetition",
    "truncation",
    "format",
    "zero_spread_groups",
    "ensemble",
    "failures",
]
"""What can be watched; `observe/health_rules.py` says of each what it means."""


_NEVER_ROSE = "it rose in no run that gamed its reward"


class HealthConfig(Section):
    """Alarms. They look at what a run logs anyway and change nothing of what it learns.

    Most compare the latest steps with the first ones of the same run, and a single step with the
    window before it. A figure that a run does not measure raises none.
    """

    removed: ClassVar[Mapping[str, str]] = {
        "kl_without_reward": _NEVER_ROSE,
        "kl_growth": f"its alarm kl_without_reward was removed: {_NEVER_ROSE}",
        "entropy": f"{_NEVER_ROSE}; laurel report tells a fall of entropy",
        "entropy_share": f"its alarm entropy was removed: {_NEVER_ROSE}",
        "noise_floor_groups": _NEVER_ROSE,
        "noise_floor_share": f"its alarm noise_floor_groups was removed: {_NEVER_ROSE}",
    }

    enabled: bool = True
    """Watch the run: warnings on the console, `health.jsonl`, metrics `health/<alarm>`."""
    stop_on: list[Alarm] = Field(default_factory=list)
    """Alarms that end the run, saved, as soon as they rise: `overoptimisation`, `kl_jump`,
    `length`, `length_bias`, `repetition`, `truncation`, `format`, `zero_spread_groups`,
    `ensemble`, `failures`."""
    ignore: list[Alarm] = Field(default_factory=list)
    """Alarms that are not wanted: completions of a reasoning model, say, are meant to get longer
    (`length`)."""
    gold_metric: str | None = None
    """What is really wanted, as a metric by its full name that grows with quality and that the
    policy is not rewarded by: that of a part of a composite environment with weight 0, as in
    `env/both/math/accuracy`, or of a validation, as in `validation/reward_mean`. Null:
    the figure of a part of a composite environment with weight 0, if there is one."""
    format_metric: str | None = None
    """A metric by its full name, higher is better, that says which share of the completions has
    the form that was asked for. Null: `format` is not watched."""
    baseline_steps: int = Field(default=10, ge=3)
    """First steps of the run that later ones are compared with, by their median and spread."""
    window: int = Field(default=5, ge=1)
    """Latest steps whose median is judged, so that a single odd batch raises nothing. An alarm is
    over after so many good steps in a row."""
    num_spreads: float = Field(default=4.0, ge=0)
    """How many (robust) standard deviations of the first steps a figure must be away from their
    median, besides what its own threshold asks: what is usual at the beginning is no drift."""
    jump_spreads: float = Field(default=6.0, ge=0)
    """The same for a single step against the window before it, which is judged besides, at once and
    from the second step on: `overoptimisation`, `kl_jump`, `length`, `repetition`, `truncation`."""
    gold_jump: float = Field(default=0.5, gt=0, lt=1)
    """`overoptimisation`: share of `gold_metric` that is lost in a single step, whatever the reward
    does."""
    gold_drop: float = Field(default=0.1, gt=0, lt=1)
    """`overoptimisation`: share of its peak that `gold_metric` has lost while the reward has lost
    nothing."""
    kl_jump: float = Field(default=3.0, gt=1)
    """`kl_jump`: factor by which the divergence from the reference grows in a single step."""
    kl_least: float = Field(default=0.1, ge=0)
    """`kl_jump`: divergence below which its growth says nothing; nats a token (a
    completion with `loss_fn.use_kl_in_reward`)."""
    length_factor: float = Field(default=1.5, gt=1)
    """`length`: completions are so many times as long as in the first steps, or as short."""
    length_correlation: float = Field(default=0.5, gt=0, lt=1)
    """`length_bias`: correlation of reward and length within groups, where lengths grow as well."""
    repetition_rise: float = Field(default=0.1, gt=0, lt=1)
    """`repetition`: by how much the share of repeated 4-grams has risen."""
    truncation_rise: float = Field(default=0.2, gt=0, lt=1)
    """`truncation`: by how much the share of completions without an end has risen."""
    format_drop: float = Field(default=0.1, gt=0)
    """`format`: by how much `format_metric` has fallen."""
    zero_spread_share: float = Field(default=0.9, gt=0, le=1)
    """`zero_spread_groups`: share of groups whose rewards are all equal."""
    disagreement: float = Field(default=1.0, gt=0)
    """`ensemble`: how far apart several reward models are about the gain since the first steps, in
    standard deviations of their scores then."""
    failure_share: float = Field(default=0.1, gt=0, le=1)
    """`failures`: share of completions without a reward."""

    @model_validator(mode="after")
    def _can_stop(self) -> HealthConfig:
        if self.stop_on and not self.enabled:
            raise ValueError("stop_on needs enabled=true: nothing is watched otherwise")
        for name in self.stop_on:
            if name in self.ignore:
                raise ValueError(f"stop_on and ignore both name {name}; leave it out of one")
        if "format" in self.stop_on and self.format_metric is None:
            raise ValueError("stop_on=format needs format_metric, the metric that it reads")
        return self
