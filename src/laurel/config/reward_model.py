"""Defines the configuration of a reward-model training run (`laurel rm`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from laurel import plugins
from laurel.config.data import DataConfig
from laurel.config.plugged import NameOf, OpenSection
from laurel.config.policy import (
    CheckpointingConfig,
    ClusterConfig,
    LoggerConfig,
    RewardPolicyConfig,
)
from laurel.config.yaml_tree import (
    LENGTH_MAY_CHANGE,
    MAY_CHANGE,
    OffPeriod,
    Removed,
    Section,
    removed,
)
from laurel.plugins import PreferenceLoss


class LossConfig(OpenSection):
    """The loss of an update. The formulas: `losses.py` of `training` and `reward_losses`."""

    kind_of_plugin: ClassVar[str] = "reward_losses"

    type: Annotated[str, NameOf("reward_losses")] = "bradley_terry"
    """`bradley_terry`: pairs of different ranks; `plackett_luce`: whole ranked lists; `davidson`,
    `rao_kupper`: pairs with ties; `regression`: attribute ratings; of a process reward model,
    `step_bce`: whether each step is right, and `step_ranking`: right steps above wrong ones."""
    use_margin: bool = False
    """Ask that the better score leads by the row's margin (Llama 2)."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Share of labels believed to be wrong."""
    center_rewards_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of (sum of a pair's scores)^2, which keeps scores near 0 (arXiv 2312.09244)."""
    tie_parameter: float = Field(default=1.0, gt=0.0)
    """How ready the model is to call a tie. Davidson: nu > 0. Rao-Kupper: theta = 1 + this."""
    step_margin: float = Field(default=4.0, ge=0.0)
    """By how much `step_ranking` asks that right steps lead wrong ones (zeta in arXiv
    2410.11287)."""

    @model_validator(mode="after")
    def _settings_mean_something(self) -> LossConfig:
        if not self.model_fields_set:  # the defaults, which stand in the schema
            return self
        own = self._loss
        for key in sorted(_OF_SOME):
            if getattr(self, key) != type(self).model_fields[key].default and key not in own.keys:
                users = plugins.readers(PreferenceLoss, key)
                raise ValueError(
                    f"{key} has no meaning for type={self.type}; remove it, or "
                    + (f"set type={users[0]}" if len(users) == 1 else "")
                    + (f"choose a type that uses it: {', '.join(users)}" if users[1:] else "")
                )
        own.check(self)
        return self

    @property
    def _loss(self) -> PreferenceLoss:
        return self.settings_of(PreferenceLoss, self.type)[0]

    @property
    def uses_ties(self) -> bool:
        """Report whether this loss learns from rows in which all completions have the same rank."""
        return self._loss.uses_ties

    @property
    def reads_steps(self) -> bool:
        """Report whether this loss learns from labels of steps."""
        return self._loss.reads == "steps"

    @property
    def reads_ratings(self) -> bool:
        """Report whether this loss learns from ratings of attributes."""
        return self._loss.reads == "ratings"


_OF_SOME = LossConfig.model_fields.keys() - {"type"}
"""The keys that not all losses read."""


class EarlyStoppingConfig(Section):
    """What ends a run whose validations no longer improve."""

    removed: ClassVar[Mapping[str, Removed]] = removed("EarlyStoppingConfig")

    metric_name: str | None = None
    """The validation metric that is watched, named as in `checkpointing.metric_name`; `auto` is the
    loss of the first validation set. Null: no run ends early."""
    patience: Annotated[int, LENGTH_MAY_CHANGE] = Field(default=3, ge=1)
    """Validations of `rm.val_period` in a row without a new best value before the run ends."""
    min_delta: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """How much better than the best value so far a value must be to be a new best."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> EarlyStoppingConfig:
        changed = [
            name
            for name, one in type(self).model_fields.items()
            if getattr(self, name) != one.default
        ]
        if self.metric_name is None and changed:
            raise ValueError(
                f"{changed[0]} has no effect without metric_name; name the validation metric to "
                "watch, such as metric_name=auto"
            )
        return self


class RewardTrainingConfig(Section):
    """The `rm` section: the length of the run, its validation, and the loss."""

    max_num_epochs: Annotated[int, LENGTH_MAY_CHANGE] = Field(default=1, ge=1)
    """Passes over the training set."""
    max_num_steps: Annotated[int, LENGTH_MAY_CHANGE] = Field(default=-1, ge=-1)
    """Optimizer steps at most; -1 is no limit."""
    val_period: Annotated[OffPeriod, LENGTH_MAY_CHANGE] = Field(default=16, ge=0)
    """Steps between validations; 0: only at the start, at the end and for ranking checkpoints."""
    val_batches: int = -1
    """Batches of each validation set that are used; 0 or less is all."""
    val_global_batch_size: int = Field(default=32, ge=1)
    """Groups of one validation batch."""
    val_at_start: Annotated[bool, LENGTH_MAY_CHANGE] = False
    """Validate before the first step (logged at step 0)."""
    val_at_end: Annotated[bool, LENGTH_MAY_CHANGE] = True
    """Validate after the last step, which is always saved."""
    seed: int = Field(default=42, ge=0)
    """Seeds the head, the order of the data and dropout."""
    max_bad_steps: Annotated[int, LENGTH_MAY_CHANGE] = Field(default=3, ge=1)
    """Successive steps with a loss or gradient that is not finite before the run stops."""
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    loss: LossConfig = LossConfig()


class RewardTrainingRun(Section):
    """A complete configuration of `laurel rm`."""

    command: ClassVar[Literal["rm"]] = "rm"

    rm: RewardTrainingConfig = RewardTrainingConfig()
    policy: RewardPolicyConfig = RewardPolicyConfig()
    data: DataConfig = DataConfig()
    checkpointing: Annotated[CheckpointingConfig, LENGTH_MAY_CHANGE] = CheckpointingConfig()
    logger: Annotated[LoggerConfig, MAY_CHANGE] = LoggerConfig()
    cluster: Annotated[ClusterConfig, MAY_CHANGE] = ClusterConfig()

    @model_validator(mode="after")
    def _fits(self) -> RewardTrainingRun:
        reward_model, loss = self.policy.reward_model_cfg, self.rm.loss
        if (reward_model.reward_model_type == "regression") != loss.reads_ratings:
            raise ValueError(
                f"policy.reward_model_cfg.reward_model_type={reward_model.reward_model_type} does "
                f"not fit rm.loss.type={loss.type}: regression needs both, or neither"
            )
        if (reward_model.reward_model_type == "process") != loss.reads_steps:
            raise ValueError(
                f"policy.reward_model_cfg.reward_model_type={reward_model.reward_model_type} does "
                f"not fit rm.loss.type={loss.type}: a process reward model needs "
                "rm.loss.type=step_bce or step_ranking, and no other model can have them"
            )
        if self.data.group_by_prefix and not self.policy.sequence_packing.enabled:
            raise ValueError(
                "data.group_by_prefix shares what rows have in common, for which "
                "policy.sequence_packing.enabled must be on"
            )
        return self


# What a learning rate of `auto` becomes.

SMALL_MODEL = 500_000_000
"""Parameters from which a pretrained model is no small one."""
RATE, RATE_OF_SMALL = 2e-6, 1e-4
"""The learning rate of a reward model, and of a small one: half of the best of four rates for one
of 135M parameters, because longer runs bear less (docs/benchmarks.md)."""


def is_small(num_parameters: int) -> bool:
    """Report whether a pretrained model is small; 0: its size is not known."""
    return 0 < num_parameters < SMALL_MODEL
