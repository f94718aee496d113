"""What GRPO makes of rewards: scaled, shaped, compared."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from laurel.config.section import Section


class RewardScalingConfig(Section):
    """A linear map of the reward, after clamping it to the source range."""

    enabled: bool = False
    """Scale. Default: advantages are normalised anyway."""
    source_min: float = 0.0
    """Rewards below count as this."""
    source_max: float = 1.0
    """Rewards above count as this."""
    target_min: float = 0.0
    """What `source_min` becomes."""
    target_max: float = 1.0
    """What `source_max` becomes."""

    @model_validator(mode="after")
    def _is_a_range(self) -> RewardScalingConfig:
        if not self.source_min < self.source_max:
            raise ValueError("source_min must be below source_max")
        return self


class RewardShapingConfig(Section):
    """Penalties for long and unfinished completions. They never raise a reward."""

    enabled: bool = False
    """Shape. Default: a penalty changes what is asked for."""
    overlong_buffer_length: int = Field(default=128, ge=1)
    """Tokens before `max_response_length` over which the penalty grows (DAPO). Default: a quarter
    of the default length."""
    overlong_buffer_penalty: float = Field(default=1.0, ge=0)
    """Penalty at `max_response_length`. Default: as much as a right answer earns."""
    max_response_length: int | None = Field(default=None, ge=1)
    """Longest completion; null is `policy.max_total_sequence_length`."""
    stop_properly_penalty_coef: float | None = Field(default=None, ge=0, le=1)
    """Cut-off completions keep this share of a positive reward; a negative one is divided by it
    (or doubled where it is below 0.5). Replaces the penalty for length."""


class AdvantageConfig(Section):
    """How rewards become advantages."""

    foreign_keys: ClassVar[frozenset[str]] = frozenset({"opd"})

    name: Literal["grpo", "gdpo", "reinforce_plus_plus"] = "grpo"
    """`grpo`: against the group; `gdpo`: each component against its group, then weighted and
    normalised over the batch; `reinforce_plus_plus`: normalised over the batch. Default: the method
    the command is named after."""
    normalize_rewards: bool | None = None
    """Null is `grpo.normalize_rewards`."""
    use_leave_one_out_baseline: bool | None = None
    """Null is `grpo.use_leave_one_out_baseline`."""
    minus_baseline: bool = True
    """REINFORCE++: subtract the group's mean first. Default: without it easy prompts push every
    answer up."""
    scale: Literal["group", "batch", "none"] | None = None
    """What advantages are divided by: the group's standard deviation, the batch's, or nothing.
    Null: `group` where rewards are normalised, else `none`."""
    leave_one_out_std: bool = False
    """With a leave-one-out baseline: each sample's standard deviation is that of the others, as in
    NeMo RL. There the only right answer of a group is not normalised, as the others are all alike,
    and weighs less than each of several right ones; so one deviation for the group is the
    default."""
    std_ddof: Literal[0, 1] = 1
    """1 divides squares by n - 1; 0 by n. Default: the deviation of a sample."""
    std_eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation. Default: far below any difference of rewards that means
    something."""
    noise_floor_factor: float = Field(default=10.0, ge=0)
    """Groups are divided by no less than this many times the scorer's measured noise: differences
    that are only noise stay small. 0 turns it off. Default: advantages that are rounding stay below
    about a tenth (docs/benchmarks.md)."""
    reward_weights: list[float] | None = None
    """GDPO: one for each component, in alphabetical order of their names. Default: all components
    weigh alike."""
