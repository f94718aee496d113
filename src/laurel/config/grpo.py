"""Defines the configuration of a GRPO run (`laurel grpo`), with NeMo RL's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from laurel import plugins
from laurel.config.plugged import NameOf, OpenSection
from laurel.config.policy import (
    Milestones,
    NamedCall,
    OptimizerCall,
    PolicyConfig,
    ResourcesConfig,
    TokenizerConfig,
)
from laurel.config.yaml_tree import (
    IN_LIST,
    LENGTH_MAY_CHANGE,
    MAY_CHANGE,
    OffPeriod,
    Removed,
    Section,
    removed,
)
from laurel.plugins import Engine, EngineNeeds

# The `policy.generation` section: how completions are sampled. Names follow NeMo RL's files.


class TransformersConfig(Section):
    """The settings of the engine in this process (transformers)."""

    static_slots: Annotated[Literal["auto"] | bool, MAY_CHANGE] = "auto"
    """Round the numbers of completions and prompts of a decoding step up to powers of two, so that
    few kinds of steps are left, and replay each as a CUDA graph. `auto`: on a GPU that has the
    whole model. Default: without it, launching kernels takes most of a GPU's time; a CPU has
    nothing to launch, and would compute the filling."""


class ColocatedConfig(Section):
    """The devices of generation: the policy's, or its own."""

    enabled: bool = True
    """Take turns on the same devices. Default: no device waits for another role."""
    resources: ResourcesConfig = ResourcesConfig()
    """Otherwise: its own."""


class GenerationConfig(OpenSection):
    """The sampling of completions, and its engine."""

    kind_of_plugin: ClassVar[str] = "engines"
    suffix_of_plugins: ClassVar[str] = "_cfg"

    backend: Annotated[str, NameOf("engines", ("auto", "transformers")), MAY_CHANGE] = "auto"
    """`transformers`: in this process, with the learner's own weights; `vllm`: an engine of its own
    (extra `vllm`). `auto`: vllm if it is installed and there is a GPU, otherwise transformers.
    Default: the in-process engine needs no second copy of the weights."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest completion of one turn; null: up to `policy.max_total_sequence_length`."""
    temperature: float = Field(default=1.0, ge=0)
    """Of sampling, and of the learner's log-probabilities. Default: the distribution that is
    trained, as it is."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample only from the likeliest tokens with this share of the probability. Default: no tail is
    cut: what is never sampled is never learned from."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample only from this many likeliest tokens. Default: likewise."""
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
    max_concurrent: Annotated[int, MAY_CHANGE] = Field(default=256, ge=1)
    """Completions generated side by side, at most (vLLM's `max_num_seqs`). Default: a bound on the
    memory of keys and values."""
    conversation_cache_gib: Annotated[float, MAY_CHANGE] = Field(default=2.0, ge=0)
    """GiB of keys and values that are kept between the turns of conversations (transformers; vLLM
    has its prefix cache). Beyond it, a conversation is computed again from its start; 0 keeps
    nothing. Default: room for 80,000 tokens of Qwen2.5-0.5B in float32."""
    timeout_seconds: Annotated[float, MAY_CHANGE] = Field(default=1800.0, gt=0)
    """Seconds without a finished completion after which the engine counts as dead. Default: half an
    hour without one completion is a hang."""
    transformers_cfg: Annotated[TransformersConfig, MAY_CHANGE] = TransformersConfig()
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine."""
    colocated: Annotated[ColocatedConfig, MAY_CHANGE] = ColocatedConfig()
    weight_transfer: Annotated[Literal["auto", "object_store", "broadcast", "ipc"], MAY_CHANGE] = (
        "auto"
    )
    """How weights reach engines in other processes: Ray's object store, a broadcast of the
    learner's first rank (gloo; NCCL between GPUs), or memory of a GPU that both use (CUDA IPC). The
    run logs the choice of `auto` and its reason. One process transfers nothing. Default: `ipc` on
    GPUs that both take turns on, else the broadcast, which was the quicker one wherever it was
    measured (docs/benchmarks.md)."""
    weight_probe_tolerance: Annotated[float | None, MAY_CHANGE] = Field(default=None, gt=0)
    """Largest difference between log-probabilities of engine and learner in the probe after a
    weight transfer; beyond it the run stops. Null: 1e-3 in float32, 0.2 in bfloat16."""

    def engine_of(self, *, has_gpu: bool, runs_here: bool = False) -> str:
        """Return the name of the engine, which `auto` chooses.

        Args:
            runs_here: Whether its package has to be installed here; a plan is for other machines.
        """
        if self.backend != "auto":
            return self.backend
        for name in plugins.names("engines") if has_gpu else ():
            engine = plugins.find(Engine, name) if plugins.is_own("engines", name) else None
            if engine and engine.is_automatic and (engine.is_installed or not runs_here):
                return name
        return "transformers"

    def needs_of(self, name: str) -> EngineNeeds | None:
        """Return what a replica of an engine takes; None for `transformers`."""
        if name == "transformers":
            return None
        engine, section = self.settings_of(Engine, name)
        return engine.needs(section)

    @property
    def conversation_bytes(self) -> int:
        """`conversation_cache_gib` in bytes."""
        return int(self.conversation_cache_gib * 2**30)

    def without_effect(self) -> dict[str, str]:
        """Return the keys of engines other than the chosen one."""
        found = super().without_effect()
        fields, why = type(self).model_fields, f"backend is {self.backend}"
        of_transformers = ("conversation_cache_gib", "transformers_cfg")
        for engine, keys in (("transformers", of_transformers), ("vllm", ("vllm_kwargs",))):
            changed = [
                key
                for key in keys
                if getattr(self, key) != fields[key].get_default(call_default_factory=True)
            ]
            found |= dict.fromkeys(changed if self.backend not in ("auto", engine) else (), why)
        return found

    @field_validator("stop_strings")
    @classmethod
    def _stops_are_texts(cls, stops: list[str] | None) -> list[str] | None:
        if "" in (stops or ()):
            raise ValueError("an empty stop string would end every completion before it begins")
        return stops


# The `loss_fn` section: what a policy's update minimises. Names follow NeMo RL's files.


class DistillationConfig(Section):
    """A teacher, from whose probabilities of the policy's own completions it learns.

    Each token's advantage gets `weight` times how much likelier the teacher finds it than the
    policy does: the gradient of the KL divergence of the policy from the teacher (on-policy
    distillation, arXiv 2306.13649).
    """

    model_name: str | None = None
    """Hub name, directory (a model's, or a run's with checkpoints) or GGUF file of the teacher, a
    causal language model with the policy's vocabulary; it is computed beside the policy, on the
    same devices. Null: there is none."""
    weight: float = Field(default=1.0, gt=0)
    """Weight of the teacher's part of an advantage. Default: the divergence as it is."""
    clamp_value: float | None = Field(default=20.0, gt=0)
    """Largest difference of log-probabilities that counts. Default: that of
    `kl_input_clamp_value`."""
    rewards: bool = True
    """Learn from rewards as well; false: from the teacher alone. Default: beside rewards."""

    @model_validator(mode="after")
    def _has_a_teacher(self) -> DistillationConfig:
        fields = type(self).model_fields
        changed = [key for key in fields if getattr(self, key) != fields[key].default]
        if self.model_name is None and changed:
            raise ValueError(
                f"distillation.{changed[0]} has no effect without a teacher; set "
                "distillation.model_name, or leave it out"
            )
        return self


class PolicyLossConfig(OpenSection):
    """The loss of an update. Formulas: `laurel/training/policy_loss.py`."""

    kind_of_plugin: ClassVar[str] = "losses"
    removed: ClassVar[Mapping[str, Removed]] = removed("PolicyLossConfig")

    reference_policy_kl_penalty: float = Field(default=0.01, ge=0)
    """Weight of the divergence from the reference policy; 0 needs no reference. Default: a light
    pull back; where a rule checks the reward, 0 is common and saves the reference's memory."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Which estimator of it. Default: never negative, and of low variance."""
    kl_input_clamp_value: float | None = Field(default=20.0, gt=0)
    """Largest difference of log-probabilities that the estimator is given. Default: its exponential
    is still a number of float32."""
    kl_output_clamp_value: float | None = Field(default=10.0, gt=0)
    """Largest divergence of one token. Default: no single token outweighs a batch."""
    use_kl_in_reward: bool = False
    """Subtract the divergence from the reward instead of adding it to the loss. Default: in the
    loss every token has its own, and baselines do not see it."""
    use_on_policy_kl_approximation: bool = False
    """Correct the divergence by the ratio of learner to generator."""
    ratio_clip_min: float = Field(default=0.2, ge=0)
    """Ratios below 1 minus this give no gradient that lowers them further. Default: PPO's (arXiv
    1707.06347)."""
    ratio_clip_max: float = Field(default=0.2, ge=0)
    """Ratios above 1 plus this, likewise (DAPO: 0.28). Default: the same on both sides."""
    ratio_clip_c: float | None = Field(default=None, gt=1)
    """Dual clipping: largest ratio under a negative advantage. Default: one update a batch has
    ratios of 1."""
    loss_type: Annotated[str, NameOf("losses")] = "ppo"
    """`ppo`: the clipped ratio; `cispo`: its detached value times the log-probability; `reinforce`:
    the log-probability; `gmpo`: the geometric mean of a completion's ratios; `sapo`: a smooth gate
    in place of clipping; `dppo`: clipped by a divergence. Default: GRPO's own."""
    sequence_level_importance_ratios: bool = False
    """GSPO: one ratio per completion, the geometric mean over its tokens. Needs `token_level_loss:
    false`. Default: GRPO's ratios are those of tokens."""
    token_level_loss: bool = True
    """True: the mean over all tokens (DAPO). False: the mean over completions of their means.
    Default: long answers weigh by what they say, so bad tokens are not cheaper in them."""
    normalizer: Literal["auto", "tokens", "sequences", "max_length"] = "auto"
    """The divisor of the loss. `max_length` is Dr. GRPO: completions times their longest length.
    `auto` follows `token_level_loss`."""
    use_importance_sampling_correction: bool = False
    """Weight tokens by the ratio of the learner's to the generator's probability. Default: the
    engine in process computes what the learner does; turn it on with vLLM, bfloat16 engines or
    staleness."""
    truncated_importance_sampling_type: (
        Literal["tis", "icepop", "seq-mask-tis", "seq-tis"] | None
    ) = None
    """`tis`: clip weights to the range; `icepop`: 0 outside it; `seq-mask-tis`: drop completions by
    the geometric mean of their weights; `seq-tis`: clip the product of a completion's weights."""
    truncated_importance_sampling_ratio: float | None = Field(default=None, gt=0)
    """Upper end of the range."""
    truncated_importance_sampling_ratio_min: float | None = Field(default=None, ge=0)
    """Lower end of the range."""
    force_on_policy_ratio: bool = False
    """Take the ratio to be 1 (its gradient remains)."""
    positive_example_nll_weight: float = Field(default=0.0, ge=0)
    """VAPO: weight of the negative log-likelihood of completions with positive rewards. Default: no
    part of GRPO."""
    distillation: DistillationConfig = DistillationConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> PolicyLossConfig:
        if self.sequence_level_importance_ratios and self.token_level_loss:
            raise ValueError(
                "sequence_level_importance_ratios needs token_level_loss: false (GSPO)"
            )
        if self.model_fields_set:  # else the defaults, which stand in the schema
            loss = self.settings_of(plugins.Loss, self.loss_type)[0]
            loss.check(self)
            if loss.of_completions and (self.token_level_loss or self.normalizer == "tokens"):
                raise ValueError(
                    f"loss_type={self.loss_type} is a loss of completions, which the mean over "
                    "tokens would weigh by their length; set token_level_loss: false"
                )
        if self.distillation.model_name is not None and (
            self.sequence_level_importance_ratios
            or plugins.find(plugins.Loss, self.loss_type).of_completions
        ):
            key = "sequence_level_importance_ratios"
            key = key if getattr(self, key) else f"loss_type={self.loss_type}"
            raise ValueError(
                f"{key} gives all tokens of a completion the same weight, and distillation has an "
                "advantage for each; use one of them"
            )
        for key, why in self._unread().items():
            default = type(self).model_fields[key].default
            if getattr(self, key) != default:
                raise ValueError(
                    f"{key}={getattr(self, key)} has no effect: {why}; leave it out, or set it to "
                    f"{'null' if default is None else default}"
                )
        kind = self.truncated_importance_sampling_type
        low, high = (
            self.truncated_importance_sampling_ratio_min,
            self.truncated_importance_sampling_ratio,
        )
        if kind is None and (low is not None or high is not None):
            raise ValueError(
                "truncated_importance_sampling_ratio and ..._ratio_min do nothing without "
                "truncated_importance_sampling_type; tis cuts weights to that range"
            )
        if low is not None and high is not None and not low < high:
            raise ValueError(
                f"truncated_importance_sampling_ratio_min={low} must be below "
                f"truncated_importance_sampling_ratio={high}"
            )
        if high is not None and not self.use_importance_sampling_correction:
            raise ValueError(
                f"truncated_importance_sampling_ratio={high} needs "
                "use_importance_sampling_correction: true"
            )
        return self

    def _unread(self) -> dict[str, str]:
        # The keys that nothing reads beside the others, and why; they must have their defaults.
        unread = dict[str, str]()
        clips = ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c")
        if self.force_on_policy_ratio:
            unread |= dict.fromkeys(clips, "force_on_policy_ratio takes every ratio to be 1")
        if self.model_fields_set:
            unread |= plugins.find(plugins.Loss, self.loss_type).unread(self)
        if self.reference_policy_kl_penalty == 0.0:
            unread["use_kl_in_reward"] = "reference_policy_kl_penalty is 0"
        elif not self.distillation.rewards:
            unread["use_kl_in_reward"] = "distillation.rewards is false, so no reward is learned"
        elif self.use_kl_in_reward:
            why = "the divergence is in the reward (use_kl_in_reward)"
            unread["use_on_policy_kl_approximation"] = why
        return unread

    def without_effect(self) -> dict[str, str]:
        """Return the keys of a truncation without a limit, or of a divergence with weight 0."""
        found = dict[str, str]()
        of_plugins = super().without_effect()
        if self.truncated_importance_sampling_ratio is None:
            keys = ["truncated_importance_sampling_type", "truncated_importance_sampling_ratio_min"]
            why = "weights are cut where truncated_importance_sampling_ratio says how far"
            found |= dict.fromkeys(keys, why)
        if self.reference_policy_kl_penalty == 0.0:
            keys = ["reference_policy_kl_type", "kl_input_clamp_value", "kl_output_clamp_value"]
            why = "reference_policy_kl_penalty is 0"
            found |= dict.fromkeys([*keys, "use_on_policy_kl_approximation"], why)
        fields = type(self).model_fields
        changed = {k: why for k, why in found.items() if getattr(self, k) != fields[k].default}
        return of_plugins | changed


# Rewards in GRPO: scaled, shaped, compared.


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
    (below 0.5: doubled). Replaces the penalty for length."""


class TreeConfig(Section):
    """Completions that branch: some continue the beginnings of others of the same prompt.

    All but `branches x rounds` of the `num_generations_per_prompt` completions of a prompt are
    sampled as ever. Then, `rounds` times, `branches` beginnings of all that there are by then are
    chosen, and continued.
    """

    removed: ClassVar[Mapping[str, Removed]] = removed("TreeConfig")

    branches: int = Field(default=4, ge=1)
    """Beginnings that a round continues, of all completions of the prompt together. Default: as
    many as first completions where there are 16 in all, so each is continued once on average."""
    rounds: int = Field(default=3, ge=1)
    """Rounds, each of which may continue what the rounds before it sampled. Default: a place that
    lies deep in the tree can be reached, and a round waits for the one before it."""
    segment: Annotated[int, Field(ge=1)] | str = 32
    """What a beginning ends with where conversations have one turn: a segment of so many tokens, or
    one that this text ends, such as a blank line. Where they have several (`max_rollout_turns`) a
    beginning ends with a turn, the environment's answer included. Default: about a sentence."""
    choice: Literal["uniform", "entropy"] = "uniform"
    """How beginnings are chosen: all alike; or first those that nothing branched from yet, and of
    these where the token that was sampled next was least likely. That is an estimate of the entropy
    from one sample, which every engine gives. Default: what Tree-GRPO does (arXiv 2509.21240)."""

    @field_validator("segment")
    @classmethod
    def _ends_somewhere(cls, segment: int | str) -> int | str:
        if segment == "":
            raise ValueError("an empty text ends no segment; give a number of tokens")
        return segment

    def num_initial(self, num_generations: int) -> int:
        """Return how many of the completions of a prompt are sampled from the prompt on."""
        return num_generations - self.branches * self.rounds


class AdvantageConfig(OpenSection):
    """The estimator that turns rewards into advantages."""

    kind_of_plugin: ClassVar[str] = "advantages"

    name: Annotated[str, NameOf("advantages")] = "grpo"
    """`grpo`: against the group; `gdpo`: each component against its group, then weighted and
    normalised over the batch; `reinforce_plus_plus`: over the batch; `gpg`: against the group, and
    scaled up where groups have no signal; `opo`: longer completions weigh more in the group's mean;
    `pass_at_k`: what a completion adds to the best of k; `remax`: against a greedy completion;
    `tree`: against the group, and against those that branched from the same one (`grpo.tree`).
    Default: the method the command is named after."""
    use_leave_one_out_baseline: bool | None = None
    """Compare each sample with the others of its group only. Null: true, but for
    `reinforce_plus_plus`, whose baseline is the group's mean. Default: a sample in its own baseline
    would shrink its advantage."""
    minus_baseline: bool = True
    """REINFORCE++: subtract the group's mean first. Default: without it easy prompts push every
    answer up."""
    scale: Literal["group", "batch", "none"] | None = None
    """The divisor of advantages: the standard deviation of the group, of the batch, or none. Null:
    `group`, where the estimator has no other. Default: GRPO as published (arXiv 2402.03300)."""
    leave_one_out_std: bool = False
    """With a leave-one-out baseline: each sample's standard deviation is that of the others, as in
    NeMo RL. There the only right answer of a group is not normalised, and weighs less than each of
    several right ones; so one deviation for the group is the default."""
    std_ddof: Literal[0, 1] = 1
    """1 divides squares by n - 1; 0 by n. Default: the deviation of a sample."""
    std_eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation. Default: far below any difference of rewards that means
    something."""
    noise_floor_factor: float = Field(default=10.0, ge=0)
    """The divisor of a group is at least this many times the scorer's measured noise, so that noise
    stays small. 0 turns it off. Default: advantages that are rounding stay below about a tenth
    (docs/benchmarks.md)."""
    reward_weights: list[float] | dict[str, float] | None = None
    """GDPO: the weights of components by name (components that are not named are not compared), or
    one for each, in alphabetical order of their names. Default: all components weigh alike."""
    per_step: bool = False
    """Compare the steps of completions, which a process reward model rewards, instead of their
    aggregates: each token gets the sum over the steps that end with it or later
    (docs/process_rewards.md). Default: most environments give one reward for a completion."""


# The section `grpo.health`: which signs of reward hacking a run looks for, and from where on.

Alarm = Literal[
    "overoptimisation",
    "collapse",
    "kl_jump",
    "length",
    "length_bias",
    "repetition",
    "truncation",
    "control_tokens",
    "format",
    "zero_spread_groups",
    "no_updates",
    "ensemble",
    "failures",
]
"""The names of the health alarms; `observe/rules.py` explains each."""


class HealthConfig(Section):
    """Alarms. They look at what a run logs anyway and change nothing of what it learns.

    Most compare the latest steps with the first ones of the same run, and a single step with the
    window before it. A figure that a run does not measure raises none.
    """

    removed: ClassVar[Mapping[str, Removed]] = removed("HealthConfig")

    enabled: bool = True
    """Watch the run: warnings on the console, `health.jsonl`, metrics `health/<alarm>`."""
    stop_on: list[Alarm] = Field(default_factory=list)
    """Alarms that end the run, saved: `overoptimisation`, `collapse`, `kl_jump`, `length`,
    `length_bias`, `repetition`, `truncation`, `control_tokens`, `format`, `zero_spread_groups`,
    `no_updates`, `ensemble`, `failures`."""
    ignore: list[Alarm] = Field(default_factory=list)
    """Alarms to leave out, such as `length` for a reasoning model."""
    gold_metric: str | None = None
    """The full name of a metric of true quality (higher is better) that is not part of the reward:
    of a composite's part with weight 0 (`env/both/math/accuracy`) or of a validation
    (`validation/reward_mean`). Null: a composite's part with weight 0, if there is one."""
    format_metric: str | None = None
    """The full name of a metric (higher is better) for the share of completions in the requested
    form. Null: no alarm `format`."""
    baseline_steps: int = Field(default=10, ge=3)
    """First steps of the run, whose median and spread are the baseline."""
    window: int = Field(default=5, ge=1)
    """Latest steps whose median is compared. An alarm ends after this many good steps in a row."""
    num_spreads: float = Field(default=4.0, ge=0)
    """Robust standard deviations of the first steps by which a metric must differ from their
    median, besides its own threshold. Of `gold_metric`: standard errors between its best
    `baseline_steps` and the last 1, 2, ... up to `window` steps. Half as many again for a single
    step against the window before it, from step 2: `length`, `repetition`, `truncation`,
    `control_tokens`."""

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


class GRPOPolicyConfig(PolicyConfig):
    """The policy: the trained model, which also generates completions."""

    model_name: str | None = "Qwen/Qwen2.5-1.5B"
    """Hub name, directory or GGUF file of a causal language model. Null with `policy.scratch`.
    Default: a small base model that already does some mathematics."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    train_global_batch_size: int = Field(default=512, ge=1)
    """Completions of one optimizer step. Default: the 32 x 16 completions of a step, so one update
    of each batch."""
    train_micro_batch_size: Annotated[int, MAY_CHANGE] = Field(default=4, ge=1)
    """Completions of one forward pass without packing; with packing it scales the budget. Default:
    2,048 tokens a pass at the default length."""
    max_total_sequence_length: int = Field(default=512, ge=2)
    """Longest prompt with its completion, in tokens. Default: short answers, on one GPU; reasoning
    needs thousands."""
    optimizer: OptimizerCall = NamedCall(
        name="torch.optim.AdamW",
        kwargs={"lr": 5e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8},
    )
    """A class of `torch.optim` with its arguments. Your kwargs replace all of these. Default: AdamW
    at a rate that policies of 1B to 2B bear; larger ones take less."""
    scheduler: Annotated[list[NamedCall | Milestones] | None, IN_LIST] = None
    """A class of `torch.optim.lr_scheduler`, or a list of them with a `milestones` entry; null: a
    constant learning rate. Default: constant, so a run can be prolonged as if it had always been
    longer."""
    generation: GenerationConfig = GenerationConfig()


UNLIMITED_STEPS = 1_000_000
"""The value of `max_num_steps` that stands for no limit."""


class GRPOConfig(Section):
    """The size of a step, how rewards are compared, when the run validates."""

    removed: ClassVar[Mapping[str, Removed]] = removed("GRPOConfig")

    num_prompts_per_step: int = Field(default=32, ge=1, le=1_000_000)
    """Tasks of one step. Default: with 16 completions each, one update of 512."""
    num_generations_per_prompt: int = Field(default=16, ge=1, le=1_000_000)
    """Completions of each: G. Default: the mean and deviation of fewer say little, and the prompt
    is computed once for all."""
    max_rollout_turns: int = Field(default=1, ge=1)
    """Turns of the policy in one conversation, at most. Default: a question and its answer."""
    max_num_epochs: Annotated[int | None, LENGTH_MAY_CHANGE] = Field(default=None, ge=1)
    """Passes over the tasks; null: one, or what `max_num_steps` takes. They settle the number
    of steps; dynamic sampling, which leaves groups out, takes fewer, and ends when the tasks of all
    passes are used up. Default: a limit of steps is meant; without one the data says when it is
    over."""
    max_num_steps: Annotated[int, LENGTH_MAY_CHANGE] = Field(default=UNLIMITED_STEPS, ge=0)
    """Steps at most. Default: in effect no limit."""
    num_iterations: int = Field(default=1, ge=1)
    """Times that each batch of rollouts is learned from. Default: on-policy: the ratio is 1, and no
    old log-probabilities are computed."""
    max_staleness: int = Field(default=0, ge=0)
    """Steps that generation may run ahead of training: 0 is synchronous. Default: the policy learns
    from what its current weights sampled."""
    stop_patience_seconds: Annotated[float, MAY_CHANGE] = Field(default=5.0, ge=0)
    """After a stop signal, rollouts that run ahead have this time to finish. Unfinished ones are
    dropped and sampled again when the run resumes, with newer weights than an uninterrupted run
    would have used. Default: a scheduler's grace period has to hold the save, too."""
    adv_estimator: AdvantageConfig = AdvantageConfig()
    advantage_clip_low: float | None = None
    """Lowest advantage. Default: nothing is cut."""
    advantage_clip_high: float | None = None
    """Highest advantage."""
    malformed_thinking_advantage: float | None = None
    """The advantage of every token of a turn whose `<think>` and `</think>` are not one pair in
    order (the first may stand in the prompt), instead of its own. Below 0 it is unlearned, such as
    -5. Default: rewards alone teach."""
    invalid_tool_call_advantage: float | None = None
    """The same of a turn with an invalid call of a tool, as environments say (`env.tools`: unread,
    of no tool, with wrong arguments); it goes before the other."""
    seq_logprob_error_threshold: float | None = Field(default=None, gt=1)
    """Leave a completion out of the loss if the mean over its tokens of `e^|difference of
    log-probabilities|` between generator and learner is larger, such as 2. Default: it costs
    another pass where a batch has one update; `loss_fn.truncated_importance_sampling_type` needs
    none."""
    overlong_filtering: bool = False
    """Leave cut-off completions out of the loss and of their group's statistics. Default: an answer
    without an end has its reward like any other."""
    use_dynamic_sampling: bool = False
    """DAPO: keep only groups whose rewards differ, and generate until the step is full. Default: it
    costs generation, and pays where most groups are all right or all wrong."""
    dynamic_sampling_max_gen_batches: int = Field(default=10, ge=1)
    """Batches of generation for one step, at most. Then the run stops (dynamic sampling), or the
    step continues with groups that have too few rewards. Default: where ten do not do, the tasks
    are the wrong ones."""
    batch_multiplier: float = Field(default=1.0, ge=1)
    """Tasks per batch of generation, in steps' worth, with dynamic sampling."""
    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    max_bad_steps: Annotated[int, LENGTH_MAY_CHANGE] = Field(default=3, ge=1)
    """Successive steps with a loss or gradient that is not finite before the run stops. Default:
    one bad batch is an accident, three in a row are a fault."""
    val_period: Annotated[OffPeriod, LENGTH_MAY_CHANGE] = Field(default=10, ge=0)
    """Steps between validations; 0: only at the start, at the end and for ranking checkpoints.
    Default: as often as it is saved, so every checkpoint has its figure."""
    val_at_start: Annotated[bool, LENGTH_MAY_CHANGE] = False
    """Validate before the first step (logged at step 0). Default: it costs a validation; worth it
    to know where a run began."""
    val_at_end: Annotated[bool, LENGTH_MAY_CHANGE] = True
    """Validate after the last step. Default: so the last checkpoint can be the best one."""
    max_val_samples: int = Field(default=256, ge=1)
    """Validation tasks, at most; all where there are fewer. Default: the standard error of an
    accuracy is then 0.03 at most."""
    val_batch_size: Annotated[int, MAY_CHANGE] = Field(default=256, ge=1)
    """Validation tasks that are answered side by side. Default: all of them at once."""
    val_num_generations_per_prompt: int = Field(default=1, ge=1)
    """Completions of each validation task; above 1, pass@k is measured. Default: the cheapest
    unbiased figure."""
    stop_at_validation_metric: Annotated[str | None, LENGTH_MAY_CHANGE] = None
    """End the run, saved, when this validation metric reaches the threshold: `reward_mean` (or
    `accuracy`), `pass_k` or `env/<name>/accuracy`."""
    stop_at_validation_threshold: Annotated[float | None, LENGTH_MAY_CHANGE] = None
    """What `stop_at_validation_metric` has to reach."""
    health: Annotated[HealthConfig, MAY_CHANGE] = HealthConfig()
    seed: int = Field(default=42, ge=0)
    """Seeds the order of the tasks and every completion."""
    tree: TreeConfig | None = None
    """Sample completions that branch (docs/grpo.md). Null: each is sampled from the prompt on.
    Default: where it was measured it saved no tokens."""

    @model_validator(mode="after")
    def _clips_in_order(self) -> GRPOConfig:
        low, high = self.advantage_clip_low, self.advantage_clip_high
        if low is not None and high is not None and not low < high:
            raise ValueError("advantage_clip_low must be below advantage_clip_high")
        return self

    @model_validator(mode="after")
    def _tree_fits(self) -> GRPOConfig:
        tree, own = self.tree, self._estimator
        if tree is None:
            if own.compares_branches:
                raise ValueError(
                    f"adv_estimator.name={self.adv_estimator.name} compares completions that "
                    "branch, and none does; set grpo.tree, or use adv_estimator.name=grpo"
                )
            return self
        if tree.num_initial(self.num_generations_per_prompt) < 1:
            raise ValueError(
                f"tree.branches={tree.branches} in each of tree.rounds={tree.rounds} leave none of "
                f"num_generations_per_prompt={self.num_generations_per_prompt} that begins at the "
                "prompt; sample more, or branch less"
            )
        if self.max_rollout_turns > 1 and tree.segment != TreeConfig().segment:
            raise ValueError(
                f"tree.segment={tree.segment!r} has no effect: with "
                f"max_rollout_turns={self.max_rollout_turns} beginnings end with turns; leave it "
                "out"
            )
        if own.baseline == "greedy":
            raise ValueError(
                f"adv_estimator.name={self.adv_estimator.name} compares each completion with a "
                "greedy one, which is no part of a tree; use adv_estimator.name=tree, or leave "
                "grpo.tree out"
            )
        return self

    @model_validator(mode="after")
    def _estimator_reads_what_it_is_given(self) -> GRPOConfig:
        if not self.model_fields_set:  # the defaults, which stand in the schema
            return self
        given, own = self.adv_estimator, self._estimator
        for key in ("reward_weights", "minus_baseline"):
            default = AdvantageConfig.model_fields[key].default
            if getattr(given, key) != default and key not in own.keys:
                value = "=false" if key == "minus_baseline" else ""
                users = " or ".join(plugins.readers(plugins.Advantage, key))
                raise ValueError(
                    f"adv_estimator.{key}{value} is read by adv_estimator.name={users}, not by "
                    f"{given.name}; leave it out"
                )
        if given.per_step:
            self._steps_can_be_compared()
        if given.leave_one_out_std and not (self.leaves_one_out and self.scale == "group"):
            raise ValueError(
                "adv_estimator.leave_one_out_std=true is read where each sample is compared with "
                "the others of its group, and divided by their deviation; set "
                "adv_estimator.use_leave_one_out_baseline=true and adv_estimator.scale=group, or "
                "leave it out"
            )
        if own.whitens:
            self._divides_by_nothing_else()
        if not own.divides and given.scale not in (None, "none"):
            raise ValueError(
                f"adv_estimator.scale={given.scale} has no effect: {given.name} divides by no "
                "deviation; leave it out, or use adv_estimator.name=grpo"
            )
        if own.baseline != "mean" and given.use_leave_one_out_baseline:
            raise ValueError(
                f"adv_estimator.use_leave_one_out_baseline=true has no effect: {given.name} has a "
                "baseline of its own; leave it out, or use adv_estimator.name=grpo"
            )
        own.check(self)
        return self

    def _divides_by_nothing_else(self) -> None:
        given = self.adv_estimator
        said = f"{given.name} divides by the deviation of the whole batch"
        if given.scale is not None:
            raise ValueError(
                f"adv_estimator.scale={given.scale} has no effect: {said}; leave it out, or use "
                "adv_estimator.name=grpo"
            )
        if given.use_leave_one_out_baseline and not given.minus_baseline:
            raise ValueError(
                "adv_estimator.use_leave_one_out_baseline=true has no effect: with "
                "adv_estimator.minus_baseline=false there is no baseline; leave it out"
            )

    def _steps_can_be_compared(self) -> None:
        given = self.adv_estimator
        if not self._estimator.compares_steps:
            raise ValueError(
                "adv_estimator.per_step=true compares the steps of a group with each other, and "
                f"adv_estimator.name={given.name} compares completions; use name=grpo"
            )
        if given.leave_one_out_std:
            raise ValueError(
                "adv_estimator.per_step=true divides by one standard deviation for the steps of a "
                "group; leave leave_one_out_std out"
            )
        for name in ("reward_scaling", "reward_shaping"):
            if getattr(self, name).enabled:
                raise ValueError(
                    f"adv_estimator.per_step=true reads the rewards of steps, and {name} changes "
                    "those of completions; turn it off (env.reward_model.transform changes both)"
                )

    @property
    def _estimator(self) -> plugins.Advantage:
        return self.adv_estimator.settings_of(plugins.Advantage, self.adv_estimator.name)[0]

    @property
    def num_epochs(self) -> int:
        """`max_num_epochs`, with what its null stands for."""
        if self.max_num_epochs is not None:
            return self.max_num_epochs
        return 1 if self.max_num_steps >= UNLIMITED_STEPS else UNLIMITED_STEPS

    def without_effect(self) -> dict[str, str]:
        """Return the keys that the estimator, or dynamic sampling that is off, does not read."""
        found = dict(self._estimator.without_effect(self))
        if self.batch_multiplier != 1.0 and not self.use_dynamic_sampling:
            found["batch_multiplier"] = "use_dynamic_sampling is off"
        return found

    @property
    def scale(self) -> Literal["group", "batch", "none"]:
        """Return what advantages are divided by, with what the nulls of the keys stand for."""
        if self._estimator.whitens:
            return "batch"
        return self.adv_estimator.scale or ("group" if self._estimator.divides else "none")

    @property
    def compares_within_groups(self) -> bool:
        """Report whether a completion's baseline comes from the rewards of its own group."""
        own = self._estimator
        if own.baseline == "greedy":
            return False
        return not own.whitens or self.adv_estimator.minus_baseline

    @property
    def leaves_one_out(self) -> bool:
        """Report whether a sample's baseline leaves out the sample itself."""
        asked, own = self.adv_estimator.use_leave_one_out_baseline, self._estimator
        return own.baseline == "mean" and (not own.whitens if asked is None else asked)

    @model_validator(mode="after")
    def _end_is_whole(self) -> GRPOConfig:
        if (self.stop_at_validation_metric is None) != (self.stop_at_validation_threshold is None):
            raise ValueError(
                "stop_at_validation_metric and stop_at_validation_threshold belong together; "
                "set both or none"
            )
        return self
