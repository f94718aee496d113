"""The configuration of a GRPO run (`laurel grpo`). Names and defaults follow NeMo RL's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from laurel.config.environments import EnvironmentsConfig
from laurel.config.generation import GenerationConfig
from laurel.config.health import HealthConfig
from laurel.config.policy_loss import PolicyLossConfig
from laurel.config.rewards import AdvantageConfig, RewardScalingConfig, RewardShapingConfig
from laurel.config.schema import (
    CheckpointingConfig,
    ClusterConfig,
    LoggerConfig,
    Milestones,
    NamedCall,
    OptimizerCall,
    PolicyConfig,
    TokenizerConfig,
)
from laurel.config.section import OffPeriod, Section
from laurel.config.tasks import TaskDataConfig

# ------------------------------------------------------------------------------------------ policy


class GRPOPolicyConfig(PolicyConfig):
    """The policy: the model that is trained and draws the completions."""

    foreign_keys: ClassVar[frozenset[str]] = PolicyConfig.foreign_keys - {
        "generation", "logprob_batch_size", "logprob_chunk_size"
    }  # fmt: skip

    model_name: str | None = "Qwen/Qwen2.5-1.5B"
    """Hub name or directory of a causal language model. Null with `policy.scratch`. Default: a
    small base model that already does some mathematics."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """See there."""
    train_global_batch_size: int = Field(default=512, ge=1)
    """Completions of one optimizer step. Default: the 32 x 16 completions of a step, so one update
    of each batch."""
    train_micro_batch_size: int = Field(default=4, ge=1)
    """Completions of one forward pass where packing is off; with packing on it scales the budget.
    Default: 2,048 tokens a pass at the default length."""
    logprob_batch_size: int = Field(default=4, ge=1)
    """Sequences of full length that make up the token budget of a pass without gradients (old and
    reference log-probabilities)."""
    logprob_chunk_size: int | None = Field(default=None, ge=1)
    """Tokens whose logits are in memory at a time; null chooses about 16M logits. Default: logits
    of a large vocabulary would else outweigh the model."""
    max_total_sequence_length: int = Field(default=512, ge=2)
    """Longest prompt with its completion, in tokens. Default: short answers, on one GPU; reasoning
    needs thousands."""
    optimizer: OptimizerCall = NamedCall(
        name="torch.optim.AdamW",
        kwargs={"lr": 5e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8},
    )
    """Any class of `torch.optim`, with its arguments. Kwargs that you give replace all of these.
    Default: AdamW at a rate that policies of 1B to 2B bear; larger ones take less."""
    scheduler: NamedCall | list[NamedCall | Milestones] | None = None
    """A class of `torch.optim.lr_scheduler`; or a list of them with a `milestones` entry; null
    keeps the learning rate constant. Default: constant, so a run can be prolonged as if it had
    always been longer."""
    generation: GenerationConfig = GenerationConfig()
    """See there."""


# -------------------------------------------------------------------------------------------- grpo


class GRPOConfig(Section):
    """What is drawn and learned from in a step, how rewards are compared, when it is validated."""

    foreign_keys: ClassVar[frozenset[str]] = frozenset(
        {"invalid_tool_call_advantage", "malformed_thinking_advantage", "reward_penalties",
         "on_policy_distillation", "seq_logprob_error_threshold", "calculate_advantages_on_gpu",
         "skip_reference_policy_logprobs_calculation", "async_grpo", "val_start_at",
         "invalid_tool_call_strategy", "penalize_invalid_tool_call",
         "penalize_malformed_thinking", "zero_variance_prompt_filtering",
         "deduplicate_multimodal_data", "debug_payload_metrics"}
    )  # fmt: skip

    num_prompts_per_step: int = Field(default=32, ge=1)
    """Tasks of one step. Default: with 16 completions each, one update of 512."""
    num_generations_per_prompt: int = Field(default=16, ge=1)
    """Completions of each: G. Default: the mean and deviation of fewer say little, and the prompt
    is computed once for all."""
    min_valid_per_group: int = Field(default=2, ge=1)
    """Completions of a group that must have a reward: with fewer the group is left out, and another
    task drawn in its place. Never more than there are completions. Default: one alone has nothing
    to be compared with."""
    max_rollout_turns: int = Field(default=1, ge=1)
    """Turns of the policy in one conversation, at most. Default: a question and its answer."""
    max_num_epochs: int = Field(default=1, ge=1)
    """Passes over the tasks. They settle the number of steps; dynamic sampling, which leaves groups
    out, takes fewer, and ends when the tasks of all passes are used up. Default: the data says when
    it is over."""
    max_num_steps: int = Field(default=1_000_000, ge=0)
    """Steps at most. Default: in effect no limit."""
    num_iterations: int = Field(default=1, ge=1)
    """Times that each batch of rollouts is learned from. Default: on-policy: the ratio is 1, and no
    old log-probabilities are computed."""
    max_staleness: int = Field(default=0, ge=0)
    """Steps that generation may run ahead of training: 0 is synchronous. Default: what is learned
    from was drawn by these very weights."""
    stop_patience_seconds: float = Field(default=5.0, ge=0)
    """A run that is told to end by a signal lets the rollouts that are ahead finish for so long
    after it. Those that do not are given up, so as to save in time, and drawn again when the run
    goes on: with newer weights than a run that was never stopped would have used. Default: a
    scheduler's grace period has to hold the save, too."""
    normalize_rewards: bool = True
    """Divide advantages by a standard deviation. Default: GRPO as published (arXiv 2402.03300)."""
    use_leave_one_out_baseline: bool = True
    """Compare each sample with the others of its group only. Default: a sample in its own baseline
    would shrink its advantage."""
    adv_estimator: AdvantageConfig = AdvantageConfig()
    """See there."""
    advantage_clip_low: float | None = None
    """Lowest advantage. Default: nothing is cut."""
    advantage_clip_high: float | None = None
    """Highest advantage."""
    overlong_filtering: bool = False
    """Leave cut-off completions out of the loss and of every statistic of their group. Default: an
    answer without an end has its reward like any other."""
    use_dynamic_sampling: bool = False
    """DAPO: keep only groups whose rewards differ, and generate until the step is full. Default: it
    costs generation, and pays where most groups are all right or all wrong."""
    dynamic_sampling_max_gen_batches: int = Field(default=10, ge=1)
    """Batches of generation for one step at most: before the run stops, with dynamic sampling, and
    without it before the step goes on with groups that have too few rewards. Default: where ten do
    not do, the tasks are the wrong ones."""
    batch_multiplier: float = Field(default=1.0, ge=1)
    """Tasks drawn per batch of generation, in steps' worth, with dynamic sampling."""
    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    """See there."""
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    """See there."""
    max_bad_steps: int = Field(default=3, ge=1)
    """Steps in a row whose loss or gradient is not finite before the run stops. Default: one bad
    batch is an accident, three in a row are a fault."""
    val_period: OffPeriod = Field(default=10, ge=0)
    """Steps between validations; 0: at the start, the end and for ranking checkpoints alone.
    Default: as often as it is saved, so every checkpoint has its figure."""
    val_at_start: bool = False
    """Validate before the first step (logged at step 0). Default: it costs a validation; worth it
    to know where a run began."""
    val_at_end: bool = True
    """Validate after the last step. Default: so the last checkpoint can be the best one."""
    max_val_samples: int = Field(default=256, ge=1)
    """Validation tasks, at most; all where there are fewer. Default: the standard error of an
    accuracy is then 0.03 at most."""
    val_batch_size: int = Field(default=256, ge=1)
    """Validation tasks that are answered side by side. Default: all of them at once."""
    val_num_generations_per_prompt: int = Field(default=1, ge=1)
    """Completions of each validation task; above 1, pass@k is measured. Default: the cheapest
    unbiased figure."""
    stop_at_validation_metric: str | None = None
    """End the run, saved, as soon as this figure of a validation is at least the threshold:
    `reward_mean` (or `accuracy`), `pass_k` or `env/<name>/accuracy`."""
    stop_at_validation_threshold: float | None = None
    """What `stop_at_validation_metric` has to reach."""
    health: HealthConfig = HealthConfig()
    """See there."""
    seed: int = Field(default=42, ge=0)
    """Seeds the order of the tasks and every completion."""

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> GRPOConfig:
        if self.num_generations_per_prompt < 2 and self.compares_within_groups:
            # Its own mean is its baseline: every advantage would be 0, and nothing learned.
            raise ValueError(
                "num_generations_per_prompt must be at least 2: a lone completion has nothing to "
                "be compared with, so its advantage is 0 and the policy learns nothing. Draw more "
                "for fewer prompts (num_prompts_per_step), or compare over the whole batch with "
                "adv_estimator.name=reinforce_plus_plus adv_estimator.minus_baseline=false"
            )
        low, high = self.advantage_clip_low, self.advantage_clip_high
        if low is not None and high is not None and not low < high:
            raise ValueError("advantage_clip_low must be below advantage_clip_high")
        return self

    @model_validator(mode="after")
    def _estimator_reads_what_it_is_given(self) -> GRPOConfig:
        given = self.adv_estimator
        if given.reward_weights is not None and given.name != "gdpo":
            raise ValueError(
                f"adv_estimator.reward_weights is read by adv_estimator.name=gdpo, not by "
                f"{given.name}, which compares the total of the reward; leave it out, or use gdpo"
            )
        if not given.minus_baseline and given.name != "reinforce_plus_plus":
            raise ValueError(
                "adv_estimator.minus_baseline=false is read by "
                f"adv_estimator.name=reinforce_plus_plus, not by {given.name}; leave it out"
            )
        if given.leave_one_out_std and not self.leaves_one_out:
            raise ValueError(
                "adv_estimator.leave_one_out_std=true is read where each sample is compared with "
                "the others of its group; set adv_estimator.use_leave_one_out_baseline=true, or "
                "leave it out"
            )
        return self

    @property
    def compares_within_groups(self) -> bool:
        """Whether a completion's baseline is the mean reward of its group, or of the others."""
        return self.adv_estimator.name != "reinforce_plus_plus" or self.adv_estimator.minus_baseline

    @property
    def leaves_one_out(self) -> bool:
        """Whether each sample is compared with the others of its group only.

        REINFORCE++ compares with the mean of the whole group unless the estimator itself asks.
        """
        chosen = self.adv_estimator
        if chosen.use_leave_one_out_baseline is not None:
            return chosen.use_leave_one_out_baseline
        return self.use_leave_one_out_baseline and chosen.name != "reinforce_plus_plus"

    @model_validator(mode="after")
    def _end_is_whole(self) -> GRPOConfig:
        if (self.stop_at_validation_metric is None) != (self.stop_at_validation_threshold is None):
            raise ValueError(
                "stop_at_validation_metric and stop_at_validation_threshold belong together; "
                "set both or none"
            )
        return self


class GRPORun(Section):
    """A complete configuration of `laurel grpo`."""

    foreign_keys: ClassVar[frozenset[str]] = frozenset(
        {"rm", "sft", "data_plane", "on_policy_distillation", "reward_penalties", "async_rl"}
    )
    other_names: ClassVar[Mapping[str, str]] = {
        "use_reward_loop": "env.reward_model.use_reward_loop",
        "reward_model.use_reward_loop": "env.reward_model.use_reward_loop",
        "grpo.num_val_generations_per_prompt": "grpo.val_num_generations_per_prompt",
    }

    grpo: GRPOConfig = GRPOConfig()
    loss_fn: PolicyLossConfig = PolicyLossConfig()
    policy: GRPOPolicyConfig = GRPOPolicyConfig()
    data: TaskDataConfig = TaskDataConfig()
    env: EnvironmentsConfig = EnvironmentsConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig(
        checkpoint_dir="results/grpo", save_period=10
    )
    logger: LoggerConfig = LoggerConfig()
    cluster: ClusterConfig = ClusterConfig()

    @field_validator("policy")
    @classmethod
    def _is_no_reward_model(cls, policy: GRPOPolicyConfig) -> GRPOPolicyConfig:
        if policy.reward_model_cfg.enabled:
            raise ValueError("reward_model_cfg belongs to env.reward_model, not to the policy")
        return policy

    @model_validator(mode="after")
    def _fits(self) -> GRPORun:
        grpo, policy = self.grpo, self.policy
        samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
        size = policy.train_global_batch_size
        if samples % size:
            raise ValueError(
                f"a step has {grpo.num_prompts_per_step} prompts x "
                f"{grpo.num_generations_per_prompt} completions = {samples}, which is no multiple "
                f"of policy.train_global_batch_size={size}"
            )
        if grpo.max_staleness and not self.loss_fn.use_importance_sampling_correction:
            raise ValueError(
                f"grpo.max_staleness={grpo.max_staleness} learns from completions of older "
                "weights; set loss_fn.use_importance_sampling_correction=true"
            )
        if grpo.adv_estimator.name == "gdpo" and self.loss_fn.use_kl_in_reward:
            raise ValueError(
                "loss_fn.use_kl_in_reward changes the total of the reward, and "
                "grpo.adv_estimator.name=gdpo compares its components; use one of them"
            )
        longest = policy.generation.max_new_tokens
        if longest is not None and longest > policy.max_total_sequence_length:
            raise ValueError(
                f"policy.generation.max_new_tokens={longest} is more than "
                f"policy.max_total_sequence_length={policy.max_total_sequence_length} has room for"
            )
        engine, whole = policy.generation.vllm_cfg.max_model_len, policy.max_total_sequence_length
        if engine is not None and engine < whole and policy.generation.backend != "transformers":
            raise ValueError(
                f"policy.generation.vllm_cfg.max_model_len={engine} is less than "
                f"policy.max_total_sequence_length={whole}: prompts that fit into the one would be "
                "refused by the other; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _attempts_have_turns(self) -> GRPORun:
        attempts, turns = self.env.code.max_attempts, self.grpo.max_rollout_turns
        if attempts > turns:
            raise ValueError(
                f"env.code.max_attempts={attempts} takes as many turns, and there are "
                f"grpo.max_rollout_turns={turns}; set that to {attempts}, or ask for fewer attempts"
            )
        return self

    @model_validator(mode="after")
    def _stopping_alarms_can_rise(self) -> GRPORun:
        needed = {
            "overoptimisation": (
                self.grpo.health.gold_metric is not None
                or any(
                    part.weight == 0.0 and part.gate is None
                    for composite in self.env.composite.values()
                    for part in composite.parts
                ),
                "grpo.health.gold_metric, or a part of env.composite with weight 0",
            ),
            "kl_jump": (
                self.loss_fn.reference_policy_kl_penalty > 0,
                "loss_fn.reference_policy_kl_penalty above 0",
            ),
            "ensemble": (
                self.env.reward_model.models is not None,
                "several reward models, env.reward_model.models",
            ),
        }
        for name in self.grpo.health.stop_on:
            is_there, what = needed.get(name, (True, ""))
            if not is_there:
                raise ValueError(f"grpo.health.stop_on={name} needs {what}: it never rises else")
        return self

    @property
    def default_environment(self) -> str:
        """The environment of tasks that name none."""
        if self.data.env_name is not None:
            return self.data.env_name
        return "reward_model" if self.env.reward_model.enabled else "math"

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps that learn from one batch of rollouts."""
        grpo = self.grpo
        samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
        return grpo.num_iterations * (samples // self.policy.train_global_batch_size)
