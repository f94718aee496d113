"""The configuration of a GRPO run (`laurel grpo`). Names and defaults follow NeMo RL's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from laurel.config.environments import EnvironmentsConfig, ResourcesConfig
from laurel.config.health import HealthConfig
from laurel.config.policy_loss import PolicyLossConfig
from laurel.config.rewards import AdvantageConfig, RewardScalingConfig, RewardShapingConfig
from laurel.config.schema import (
    CheckpointingConfig,
    ClusterConfig,
    LoggerConfig,
    Milestones,
    NamedCall,
    PolicyConfig,
    TokenizerConfig,
)
from laurel.config.section import Section
from laurel.config.tasks import TaskDataConfig

# -------------------------------------------------------------------------------------- generation


class VllmConfig(Section):
    """vLLM's own settings."""

    foreign_keys: ClassVar[frozenset[str]] = frozenset(
        {"async_engine", "use_deep_gemm", "num_last_layers_in_bf16", "num_first_layers_in_bf16",
         "expert_parallel_size", "kv_cache_dtype", "skip_tokenizer_init", "logprobs_mode",
         "use_tqdm", "enable_vllm_metrics_logger", "vllm_metrics_logger_interval",
         "http_refit_api_key_env_var", "http_refit_server_port", "zmq_refit_server_port",
         "reset_encoder_cache_after_weight_update"}
    )  # fmt: skip

    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of its weights; `auto` is `policy.precision`."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices of one node that share each layer."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Devices of one node that share the layers."""
    gpu_memory_utilization: float = Field(default=0.6, gt=0, lt=1)
    """Share of a GPU's memory that it may take."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt with its completion; null is `policy.max_total_sequence_length`."""
    enforce_eager: bool = False
    """Do not capture CUDA graphs."""
    load_format: str = "auto"
    """How vLLM reads the first weights."""

    @property
    def num_devices(self) -> int:
        """Devices that hold the model once between them."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class ColocatedConfig(Section):
    """Whether generation shares the policy's devices."""

    enabled: bool = True
    """Take turns on the same devices."""
    resources: ResourcesConfig = ResourcesConfig()
    """Otherwise: its own."""


class GenerationConfig(Section):
    """How completions are drawn."""

    foreign_keys: ClassVar[frozenset[str]] = frozenset(
        {"refit_transport", "refit_cfg", "mcore_generation_config", "sglang_cfg", "trtllm_cfg",
         "dynamo_cfg", "port_range_low", "port_range_high", "real_quant_export_cpu_offload"}
    )  # fmt: skip

    backend: Literal["auto", "transformers", "vllm"] = "auto"
    """`transformers`: in this process, with the learner's own weights; `vllm`: an engine of its own
    (extra `vllm`). `auto`: vllm where it is installed and a GPU is there, else transformers."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest completion of one turn; null: up to `policy.max_total_sequence_length`."""
    temperature: float = Field(default=1.0, ge=0)
    """Of sampling. The learner's log-probabilities are taken at the same temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw only from the likeliest tokens that make up this share."""
    top_k: int | None = Field(default=None, ge=1)
    """Draw only from so many likeliest tokens."""
    stop_token_ids: list[int] | None = None
    """End a completion, besides the model's own end-of-turn tokens."""
    stop_strings: list[str] | None = None
    """End a completion."""
    val_temperature: float | None = Field(default=None, ge=0)
    """In validation; null is `temperature`."""
    val_top_p: float | None = Field(default=None, gt=0, le=1)
    """In validation."""
    val_top_k: int | None = Field(default=None, ge=1)
    """In validation."""
    max_concurrent: int = Field(default=256, ge=1)
    """Completions that are drawn side by side, at most (transformers)."""
    timeout_seconds: float = Field(default=1800.0, gt=0)
    """Seconds without any finished completion after which the engine is given up."""
    vllm_cfg: VllmConfig = VllmConfig()
    """See there."""
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine."""
    colocated: ColocatedConfig = ColocatedConfig()
    """See there."""
    weight_transfer: Literal["auto", "object_store", "broadcast", "ipc"] = "auto"
    """How weights come to engines in other processes: through Ray's object store, or told to all at
    once by the learner's first rank (gloo; NCCL between GPUs); `ipc` (CUDA) is not built. The run
    says which `auto` is, and why. In one process nothing travels."""
    weight_probe_tolerance: float | None = Field(default=None, gt=0)
    """Largest difference between the engine's and the learner's log-probabilities of a probe after
    each transfer of weights, beyond which the run stops. Null: 1e-3 in float32, 0.2 in bfloat16."""

    @field_validator("stop_strings")
    @classmethod
    def _stops_are_texts(cls, stops: list[str] | None) -> list[str] | None:
        if "" in (stops or ()):
            raise ValueError("an empty stop string would end every completion before it begins")
        return stops


class GRPOPolicyConfig(PolicyConfig):
    """The policy: the model that is trained and draws the completions."""

    foreign_keys: ClassVar[frozenset[str]] = PolicyConfig.foreign_keys - {
        "generation", "logprob_batch_size", "logprob_chunk_size"
    }  # fmt: skip

    model_name: str | None = "Qwen/Qwen2.5-1.5B"
    """Hub name or directory of a causal language model. Null with `policy.scratch`."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """See there."""
    train_global_batch_size: int = Field(default=512, ge=1)
    """Completions of one optimizer step."""
    train_micro_batch_size: int = Field(default=4, ge=1)
    """Completions of one forward pass where packing is off; with packing on it scales the
    budget."""
    logprob_batch_size: int = Field(default=4, ge=1)
    """Sequences of full length that make up the token budget of a pass without gradients (old and
    reference log-probabilities)."""
    logprob_chunk_size: int | None = Field(default=None, ge=1)
    """Tokens whose logits are in memory at a time; null chooses about 16M logits."""
    max_total_sequence_length: int = Field(default=512, ge=2)
    """Longest prompt with its completion, in tokens."""
    optimizer: NamedCall = NamedCall(
        name="torch.optim.AdamW",
        kwargs={"lr": 5e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8},
    )
    """Any class of `torch.optim`, with its arguments. Kwargs that you give replace all of these."""
    scheduler: NamedCall | list[NamedCall | Milestones] | None = None
    """See `PolicyConfig.scheduler`."""
    generation: GenerationConfig = GenerationConfig()
    """See there."""


# -------------------------------------------------------------------------------------------- grpo


class GRPOConfig(Section):
    """The `grpo` section."""

    foreign_keys: ClassVar[frozenset[str]] = frozenset(
        {"invalid_tool_call_advantage", "malformed_thinking_advantage", "reward_penalties",
         "on_policy_distillation", "seq_logprob_error_threshold", "calculate_advantages_on_gpu",
         "skip_reference_policy_logprobs_calculation", "async_grpo", "val_start_at"}
    )  # fmt: skip

    num_prompts_per_step: int = Field(default=32, ge=1)
    """Tasks of one step."""
    num_generations_per_prompt: int = Field(default=16, ge=1)
    """Completions of each: G."""
    min_valid_per_group: int = Field(default=2, ge=1)
    """Completions of a group that must have a reward: with fewer the group is left out, and another
    task drawn in its place. Never more than there are completions."""
    max_rollout_turns: int = Field(default=1, ge=1)
    """Turns of the policy in one conversation, at most."""
    max_num_epochs: int = Field(default=1, ge=1)
    """Passes over the tasks. They settle the number of steps; dynamic sampling, which leaves groups
    out, takes fewer, and ends when the tasks of all passes are used up."""
    max_num_steps: int = Field(default=1_000_000, ge=0)
    """Steps at most."""
    num_iterations: int = Field(default=1, ge=1)
    """Times that each batch of rollouts is learned from."""
    max_staleness: int = Field(default=0, ge=0)
    """Steps that generation may run ahead of training: 0 is synchronous."""
    stop_patience_seconds: float = Field(default=5.0, ge=0)
    """A run that is told to end by a signal lets the rollouts that are ahead finish for so long
    after it. Those that do not are given up, so as to save in time, and drawn again when the run
    goes on: with newer weights than a run that was never stopped would have used."""
    normalize_rewards: bool = True
    """Divide advantages by a standard deviation."""
    use_leave_one_out_baseline: bool = True
    """Compare each sample with the others of its group only."""
    adv_estimator: AdvantageConfig = AdvantageConfig()
    """See there."""
    advantage_clip_low: float | None = None
    """Lowest advantage."""
    advantage_clip_high: float | None = None
    """Highest advantage."""
    overlong_filtering: bool = False
    """Leave cut-off completions out of the loss and of every statistic of their group."""
    use_dynamic_sampling: bool = False
    """DAPO: keep only groups whose rewards differ, and generate until the step is full."""
    dynamic_sampling_max_gen_batches: int = Field(default=10, ge=1)
    """Batches of generation for one step at most: before the run stops, with dynamic sampling, and
    without it before the step goes on with groups that have too few rewards."""
    batch_multiplier: float = Field(default=1.0, ge=1)
    """Tasks drawn per batch of generation, in steps' worth, with dynamic sampling."""
    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    """See there."""
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    """See there."""
    max_bad_steps: int = Field(default=3, ge=1)
    """Steps in a row whose loss or gradient is not finite before the run stops."""
    val_period: int = Field(default=10, ge=0)
    """Steps between validations; 0 turns them off."""
    val_at_start: bool = False
    """Validate before the first step (logged at step 0)."""
    val_at_end: bool = True
    """Validate after the last step."""
    max_val_samples: int = Field(default=256, ge=1)
    """Validation tasks, at most; all where there are fewer."""
    val_batch_size: int = Field(default=256, ge=1)
    """Validation tasks that are answered side by side."""
    val_num_generations_per_prompt: int = Field(default=1, ge=1)
    """Completions of each validation task; above 1, pass@k is measured."""
    stop_at_validation_metric: str | None = None
    """End the run, saved, as soon as this figure of a validation is at least the threshold:
    `reward_mean` (or `accuracy`), `pass_k` or `env/<name>/accuracy`."""
    stop_at_validation_threshold: float | None = None
    """See there."""
    health: HealthConfig = HealthConfig()
    """See there."""
    seed: int = Field(default=42, ge=0)
    """Seeds the order of the tasks and every completion."""

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> GRPOConfig:
        if self.use_leave_one_out_baseline and self.num_generations_per_prompt < 2:
            raise ValueError(
                "num_generations_per_prompt must be at least 2: with one completion there is "
                "nothing to compare it with"
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
        {"rm", "sft", "data_plane", "on_policy_distillation", "reward_penalties"}
    )
    other_names: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("use_reward_loop", "reward_model.use_reward_loop"), "env.reward_model.use_reward_loop"
    )

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
            "kl_without_reward": (
                self.loss_fn.reference_policy_kl_penalty > 0,
                "loss_fn.reference_policy_kl_penalty above 0",
            ),
            "entropy": (self.loss_fn.entropy, "loss_fn.entropy=true"),
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
