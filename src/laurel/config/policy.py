"""Defines the sections that all runs share: policy, checkpointing, logger, cluster.

Names and meanings follow NeMo RL's configuration files, so a file written for it loads unchanged.
This file is the only home of each default; the docstring under a field is its reference text.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from laurel import plugins
from laurel.config.plugged import OpenSection
from laurel.config.yaml_tree import (
    IN_LIST,
    MAY_CHANGE,
    THREADS,
    Removed,
    Section,
    removed,
)

Precision = Literal["float32", "bfloat16", "float16"]
"""The floating-point type of a model's weights or of its computation."""

# The `cluster.placement` section: which slots each role of a run gets, where the rules do not do.
#
# Whether it can be had is not checked here but by `laurel plan` and at the start of a run, which
# report everything that does not fit at once.


class RolePlacement(Section):
    """The slots of one role, its own or those of another.

    Keys that are null restrict nothing: `{}` takes all free slots.
    """

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
    """The role whose slots these are, in turns: all of them, or those that the other keys pick. The
    policy's are always its own."""

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


RoleName = Literal["policy", "generation", "reward_model"]
"""A role of a run: the model that is trained, generation, and the reward model that scores."""


class NamedCall(Section):
    """A class by its import path, and the arguments it is made with."""

    name: str
    """Dotted import path, e.g. `torch.optim.AdamW`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments, passed as they are."""


def _not_negative(call: NamedCall) -> NamedCall:
    # No optimizer takes these; torch itself refuses others, when it is loaded.
    for name in ("lr", "eps", "weight_decay"):
        value = call.kwargs.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value < inf):
            raise ValueError(f"kwargs.{name} is {value!r}, and must be a finite number, 0 or more")
    return call


def _not_negative_or_auto(call: NamedCall) -> NamedCall:
    rest = {key: one for key, one in call.kwargs.items() if (key, one) != ("lr", "auto")}
    _not_negative(call.model_copy(update={"kwargs": rest}))
    return call


OptimizerCall = Annotated[NamedCall, AfterValidator(_not_negative)]


class Milestones(Section):
    """The steps at which a list of schedulers hands over to the next."""

    milestones: list[int]
    """One step fewer than there are schedulers, rising."""


class TokenizerConfig(Section):
    """The tokenizer and its chat template."""

    name: str | None = None
    """Hub name or path; null means `policy.model_name`."""
    chat_template: str | None = "default"
    """`default`: the tokenizer's own; null: contents joined, as plain text; `chatml`, `plain` or
    `hermes` (ChatML that shows tools): a template of Laurel's; a path ending in .jinja; or the
    template itself."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables given to the template at every rendering, e.g. `{enable_thinking: false}`."""
    pad_token: Annotated[str | None, MAY_CHANGE] = "auto"
    """The padding token. `auto`: the tokenizer's own; one that ends no sequence is picked if there
    is none, or if a reward model's is the end-of-sequence token. Null refuses that one."""

    date: datetime.date | None = None
    """The day that a template prints which prints the current one, e.g. `2026-07-26`, for a model
    without a saved template or contract of Laurel's. Null: the day on which the run or the server
    began; a run that is resumed keeps it."""

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _null_is_empty(cls, value: Any) -> Any:
        return {} if value is None else value

    def on(self, day: datetime.date) -> TokenizerConfig:
        """Return the section with a day where none is set."""
        return self if self.date is not None else self.model_copy(update={"date": day})


class RewardModelConfig(Section):
    """The head of a reward model, one that is put on a decoder or the one that it has."""

    reward_model_type: Literal["bradley_terry", "regression", "process"] = "bradley_terry"
    """One scalar learned from comparisons, one number per attribute learned from ratings, or one
    value per step of the answer learned from labels of steps."""
    attributes: list[str] = Field(default_factory=list)
    """Names of the ratings a regression head predicts, e.g. `[helpfulness, correctness]`."""
    attribute_weights: list[float] | None = None
    """Weights that turn the attributes into the scalar reward; null means their mean."""
    step_separator: str = Field(default="\n\n", min_length=1)
    """The text between two steps of an answer (type `process`)."""
    step_aggregate: Literal["min", "product", "last", "mean"] = "min"
    """How the values of the steps become the score of the answer (type `process`)."""

    @model_validator(mode="after")
    def _attributes_fit(self) -> RewardModelConfig:
        if self.reward_model_type == "regression" and not self.attributes:
            raise ValueError(
                "reward_model_type 'regression' needs reward_model_cfg.attributes: "
                "the list of ratings to predict, e.g. [helpfulness, correctness]"
            )
        if self.attribute_weights is not None and len(self.attribute_weights) != len(
            self.attributes
        ):
            raise ValueError("attribute_weights must have one number per attribute")
        if self.reward_model_type != "process":
            for key in ("step_separator", "step_aggregate"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(
                        f"{key} has no meaning for reward_model_type={self.reward_model_type}; "
                        "remove it, or set reward_model_type=process"
                    )
        elif self.attributes:
            raise ValueError(
                "reward_model_type 'process' has one value per step, and no attributes; remove "
                "attributes, or set reward_model_type=regression"
            )
        return self


class LoraConfig(Section):
    """Low-rank adapters (peft). The reward head is always trained and saved whole."""

    enabled: bool = False
    """Train adapters and the head instead of every weight. Default: full training where it fits."""
    target_modules: list[str] = Field(default_factory=list)
    """Names of the linear layers to adapt; none: every one of the decoder."""
    exclude_modules: list[str] = Field(default_factory=list)
    """Names left out."""
    dim: int = Field(default=8, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: the update is multiplied by alpha / dim."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout in front of the adapters."""


class DTensorConfig(Section):
    """The parallelism of the model, and what the backward pass recomputes."""

    cpu_offload: Annotated[bool, MAY_CHANGE] = False
    """Keep parameters on the host between uses."""
    sequence_parallel: Annotated[bool, MAY_CHANGE] = False
    """Shard activations over the tensor-parallel ranks."""
    activation_checkpointing: Annotated[bool, MAY_CHANGE] = False
    """Recompute activations in the backward pass: less memory, about a third more arithmetic.
    Default: memory is bought with time only where it is short."""
    tensor_parallel_size: Annotated[int, MAY_CHANGE] = Field(default=1, ge=1)
    """Ranks that share each layer."""
    context_parallel_size: Annotated[int, MAY_CHANGE] = Field(default=1, ge=1)
    """Ranks that divide the tokens of each micro-batch, for long conversations; a divisor of the
    attention heads. Default: none do, as data parallelism is quicker where a sequence fits."""
    custom_parallel_plan: Annotated[str | dict[str, Any] | None, MAY_CHANGE] = None
    """Import path or mapping of a tensor-parallel plan."""
    lora_cfg: LoraConfig = LoraConfig()
    """Adapters."""


class PackingConfig(Section):
    """Token forests: no padding, and each prompt computed once for all its completions."""

    removed: ClassVar[Mapping[str, Removed]] = removed("PackingConfig")

    enabled: bool = True
    """On: exact and several times faster. Off: padded rows, one per completion."""
    train_mb_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Tokens of one micro-batch, also of a padded one, which then has rows of similar lengths; null
    means max_total_sequence_length * train_micro_batch_size, and where packing is off that many
    rows. A larger group is computed in parts of this size. `auto`: on a GPU the
    largest that fit its memory by the plan, as null on CPUs and clusters; a run that is resumed
    keeps what it began with."""

    @property
    def tokens(self) -> int | None:
        """`train_mb_tokens` where it is a number."""
        return None if self.train_mb_tokens == "auto" else self.train_mb_tokens


LEAST_SHARED = 16
"""The fewest tokens that sequences of a micro-batch have in common, beyond the prompt of a group,
before they share them: each shared run costs every layer some calls of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The largest sizes of a model's micro-batches, in tokens."""

    forest_tokens: int
    """The largest number of tokens in one token forest."""
    padded_tokens: int | None = None
    """The largest number of tokens in a padded batch; None: it has a fixed number of groups."""
    padded_groups: int = 1
    """That number."""
    share_prompts: bool = True
    """True if a forest computes each prompt once for all its completions."""
    least_shared: int | None = None
    """The fewest tokens that sequences share beyond prompts, where that saves enough
    (`data.forest.least_worth_sharing`); None: they share prompts alone."""


class ScratchConfig(Section):
    """A small, newly initialized model: for demos, tests and learning from scratch."""

    removed: ClassVar[Mapping[str, Removed]] = removed("ScratchConfig")

    architecture: str = "qwen3"
    """`model_type` of a Hugging Face decoder: qwen2, qwen3, llama, mistral, gemma2, ..."""
    hidden_size: int = Field(default=64, ge=8)
    """Width of the residual stream."""
    num_layers: int = Field(default=2, ge=1)
    """Decoder layers."""
    num_heads: int = Field(default=4, ge=1)
    """Attention heads."""
    vocab_size: int = Field(default=4096, ge=300)
    """Entries of the byte-level BPE tokenizer that is trained on the training texts."""
    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the Hugging Face configuration, e.g. `{attention_dropout: 0.1}`. Without
    them there are as many `num_key_value_heads` as `num_heads`, and the feed-forward layers'
    `intermediate_size` is 4 * hidden_size."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ScratchConfig:
        key = "num_key_value_heads"
        for name, whole, of, part in (
            ("hidden_size", self.hidden_size, "num_heads", self.num_heads),
            ("num_heads", self.num_heads, key, self.config_overrides.get(key)),
        ):
            if isinstance(part, int) and (part < 1 or whole % part):
                raise ValueError(f"{name} is {whole}, which {of}={part} does not divide")
        return self


class PolicyConfig(Section):
    """The model that is trained, how, and with what memory."""

    model_name: str | None = "meta-llama/Llama-3.2-1B-Instruct"
    """Hub name or directory of a reward model, or of a causal language model that becomes one; or a
    GGUF file of a language model. Null with `policy.scratch`."""
    revision: str | None = None
    """Commit or tag of a hub model."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off: a model is data."""
    safetensors_only: bool = True
    """Refuse pickled weights (.bin, .pt), which can run code when loaded."""
    hf_config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Keys changed in the model's own configuration before it is built."""
    scratch: ScratchConfig | None = None
    """Make a small model with random weights instead of loading one."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    train_global_batch_size: int = Field(default=128, ge=1)
    """Groups (pairs) of one optimizer step."""
    train_micro_batch_size: Annotated[int, MAY_CHANGE] = Field(default=1, ge=1)
    """Groups of one forward pass where packing is off; with packing on it scales the budget."""
    max_total_sequence_length: int = Field(default=8192, ge=2)
    """Longest conversation in tokens."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Arithmetic of the decoder. Master weights, reward head and loss are float32 either way.
    Default: half the memory of activations, and tensor cores."""
    compile: Annotated[Literal["auto"] | bool, MAY_CHANGE] = "auto"
    """Compile the decoder's layers with torch's compiler. `auto`: on a GPU with Triton and a C
    compiler, unless the model is sharded. Default: it fuses the operations that take most of a
    GPU's time."""
    dtensor_cfg: DTensorConfig = DTensorConfig()
    sequence_packing: Annotated[PackingConfig, MAY_CHANGE] = PackingConfig()
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm; null leaves them. Default: one odd batch cannot throw
    the model off."""
    optimizer: OptimizerCall = NamedCall(
        name="torch.optim.AdamW",
        kwargs={"lr": 2e-6, "weight_decay": 0.1, "betas": [0.9, 0.98], "eps": 1e-5},
    )
    """Any class of `torch.optim`, with its arguments. Kwargs beside a `name` replace all of these;
    without a `name` they change single ones."""
    scheduler: Annotated[list[NamedCall | Milestones] | None, IN_LIST] = None
    """A class of `torch.optim.lr_scheduler`; or a list of them with a `milestones` entry; null
    keeps the learning rate constant."""

    @model_validator(mode="after")
    def _keys_fit(self) -> PolicyConfig:
        if self.scratch is None and self.model_name is None:
            raise ValueError("policy.model_name is null: name a model, or describe policy.scratch")
        if self.revision is not None and str(self.model_name).lower().endswith(".gguf"):
            raise ValueError("policy.revision has no effect on a GGUF file; leave it out")
        cp = self.dtensor_cfg.context_parallel_size
        if cp > 1 and not self.sequence_packing.enabled:
            raise ValueError(
                f"policy.dtensor_cfg.context_parallel_size={cp}: only token forests are divided; "
                "set it to 1, or policy.sequence_packing.enabled to true"
            )
        return self

    @property
    def token_budget(self) -> int:
        """Return the tokens of a micro-batch, with what null stands for."""
        whole = self.max_total_sequence_length * self.train_micro_batch_size
        return self.sequence_packing.tokens or whole

    @property
    def batch_limits(self) -> BatchLimits:
        """Return the token limits of micro-batches that these settings imply."""
        packing = self.sequence_packing
        return BatchLimits(
            forest_tokens=self.token_budget,
            padded_tokens=self.token_budget if packing.enabled else packing.tokens,
            padded_groups=self.train_micro_batch_size,
            least_shared=LEAST_SHARED,
        )


class RewardPolicyConfig(PolicyConfig):
    """The reward model that is trained, how, and with what memory."""

    optimizer: Annotated[NamedCall, AfterValidator(_not_negative_or_auto)] = NamedCall(
        name="torch.optim.AdamW",
        kwargs={"lr": "auto", "weight_decay": 0.1, "betas": [0.9, 0.98], "eps": 1e-5},
    )
    """Any class of `torch.optim`, with its arguments. Kwargs beside a `name` replace all of these;
    without a `name` they change single ones. `lr: auto` is 1e-4 for a pretrained model of fewer
    than 500 million parameters, else 2e-6; a run that resumes keeps the one that it began with."""
    reward_model_cfg: RewardModelConfig = RewardModelConfig()


class CheckpointingConfig(Section):
    """When the run is saved, which saves stay, and how it resumes."""

    enabled: bool = True
    """Save at all."""
    checkpoint_dir: Annotated[str, MAY_CHANGE] = "results/rm"
    """Directory that holds `step_<N>` directories."""
    metric_name: str | None = "auto"
    """The metric of the best checkpoint: `validation-<set>_<metric>` or `train_<metric>`, also
    `val:...` or `train:...`. `auto`: the loss of the first validation set. Null keeps the most
    recent. A name this run cannot produce is an error at the start."""
    higher_is_better: bool | None = None
    """Null: the metric's name decides (lower for losses and calibration errors)."""
    keep_top_k: int | None = Field(default=3, ge=1)
    """How many best checkpoints stay, besides the latest; null keeps all. Default: disks fill
    up."""
    save_period: int = Field(default=16, ge=1)
    """Steps between saves; the last step is always saved."""
    checkpoint_must_save_by: str | None = None
    """Time budget `DD:HH:MM:SS` from the start of the run, which ends with its last save finished
    by then."""
    save_optimizer: bool = True
    """Without it a checkpoint cannot be resumed exactly. Default: runs are killed."""
    in_background: bool | None = None
    """Train on while a checkpoint is written: the loop waits only for a copy of weights and
    optimizer to host memory, which is needed on each node until the save ends. Null: on GPUs, not
    on CPUs, whose memory and cores training needs. The last save of a run never is."""
    resume: Literal["auto", "never", "required"] = "auto"
    """`auto`: resume from the newest whole checkpoint, if any; `never`: refuse a directory with
    one; `required`: refuse to start without one."""

    def saves_in_background(self, device: str) -> bool:
        """Report whether checkpoints are saved in the background on a device (such as `cuda`)."""
        return device == "cuda" if self.in_background is None else self.in_background


ALWAYS_LOGS = "jsonl"
"""The logger that no setting switches off: `laurel report` reads what it writes."""


class LoggerConfig(OpenSection):
    """The loggers of metrics, besides `metrics.jsonl`, which every run writes."""

    kind_of_plugin: ClassVar[str] = "loggers"

    removed: ClassVar[Mapping[str, Removed]] = removed("LoggerConfig")

    log_dir: str = "logs"
    """Each run writes to the next free `exp_001`, `exp_002`, ... inside."""
    tensorboard_enabled: bool = True
    """Write TensorBoard events, in `tensorboard` of the run's directory."""
    num_val_samples_to_print: int = Field(default=3, ge=0)
    """Pairs or completions shown at each validation: one line each, whole if this key is set or
    with `laurel --verbose`."""

    @classmethod
    def keys_of_plugins(cls) -> list[str]:
        """Return the keys that loggers may bring: `<name>_enabled`, and their settings."""
        found = [key for name in super().keys_of_plugins() for key in (f"{name}_enabled", name)]
        return [key for key in found if key != f"{ALWAYS_LOGS}_enabled"]

    @classmethod
    def plugged_in(cls, key: str) -> FieldInfo | None:
        """Return the field of a key that a logger brings."""
        name = key.removesuffix("_enabled")
        if name == key or key in cls.model_fields or key not in cls.keys_of_plugins():
            return super().plugged_in(key)
        (package, *_) = (one.distribution for one in plugins.entries("loggers") if one.name == name)
        about = f"Log with `{name}` of the package {package}."
        if plugins.is_own("loggers", name):
            logger = plugins.find(plugins.Logger, name)
            about = f"Log to {(logger.__doc__ or name).rstrip('.')} (extra `{logger.extra}`)."
        return FieldInfo(annotation=bool, default=False, description=about)

    @property
    def enabled(self) -> list[str]:
        """Return the names of the loggers that are on."""
        names = plugins.names("loggers")
        return [one for one in names if one == ALWAYS_LOGS or self.get(f"{one}_enabled", False)]


class RolloutLoggerConfig(LoggerConfig):
    """The loggers of metrics, and of completions."""

    removed: ClassVar[Mapping[str, Removed]] = removed("RolloutLoggerConfig")

    write_completions: bool = True
    """Write the completions of each step with their rewards, `completions/step_N.parquet`."""


MOST_SLOTS = 131_072
"""The largest number of slots that a cluster may have; no cluster has more GPUs."""


class ResourcesConfig(Section):
    """The slots of the cluster that are reserved for one role: generation or the reward model."""

    gpus_per_node: int | None = Field(default=None, ge=1, le=1024)
    """Slots reserved on each node."""
    num_nodes: int | None = Field(default=None, ge=1, le=16384)
    """Nodes with reserved slots."""

    @property
    def are_own(self) -> bool:
        """Whether any are reserved; else the role shares those of the policy."""
        return self.gpus_per_node is not None or self.num_nodes is not None


class ClusterConfig(Section):
    """The devices and processes of the run."""

    roles: ClassVar[tuple[str, ...]] = ("policy",)

    gpus_per_node: int = Field(default=1, ge=1, le=1024)
    """Slots of each node: GPUs, or CPU processes where there are none."""
    num_nodes: int = Field(default=1, ge=1, le=16384)
    """Nodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU where there is one."""
    cpu_threads: Annotated[int | None, THREADS] = Field(default=None, ge=1)
    """Threads on a CPU; null: as many as OMP_NUM_THREADS says, or else one per core of this
    process."""
    backend: Literal["auto", "local", "ray"] = "auto"
    """`local`: everything in this process; `ray`: a process for each rank of each role. `auto`:
    local if every role has one rank and all share one slot. Default: no Ray where one process
    does."""
    address: str | None = None
    """A running Ray cluster: `host:port`, or `auto` for that of this machine. Null: the run starts
    and ends one here, with one node."""
    patience_seconds: float | None = Field(default=None, gt=0)
    """The wait for nodes that join and for slots that other runs hold; null: none, and the run
    reports at once what is missing."""
    placement: dict[RoleName, RolePlacement | None] | None = None
    """Slots of each role, instead of the rules for `num_nodes` and `gpus_per_node`: of `policy`,
    and in `laurel grpo` of `generation` (instead of `policy.generation.colocated`) and
    `reward_model` (instead of `env.reward_model.resources`). A role without an entry shares the
    policy's, which has the rest."""
    labels: dict[str, list[int]] = Field(default_factory=dict)
    """Labels of nodes (counted from 0) for placements, e.g. `{"pool=train": [0, 1]}`. On Ray those
    of `ray start --labels`."""

    @model_validator(mode="after")
    def _is_a_cluster(self) -> ClusterConfig:
        slots = self.num_nodes * self.gpus_per_node
        if slots > MOST_SLOTS:
            raise ValueError(
                f"num_nodes={self.num_nodes} x gpus_per_node={self.gpus_per_node} are {slots} "
                f"slots; at most {MOST_SLOTS} are planned"
            )
        return self

    @field_validator("placement", mode="before")
    @classmethod
    def _roles_are_of_the_run(cls, value: Any) -> Any:
        for name in value if isinstance(value, Mapping) else ():
            if name not in cls.roles:
                of_grpo = name in get_args(RoleName)
                why = "only laurel grpo has such a role" if of_grpo else "no such role"
                raise ValueError(f"{name}: {why}; known here: {', '.join(cls.roles)}")
        return value

    @field_validator("placement")
    @classmethod
    def _somebody_owns_the_slots(
        cls, value: dict[RoleName, RolePlacement | None] | None
    ) -> dict[RoleName, RolePlacement | None] | None:
        shares = {name: role.shares for name, role in (value or {}).items() if role is not None}
        if shares.get("policy") is not None:
            raise ValueError(
                "policy.shares: the policy's slots are its own; it belongs at "
                "cluster.placement.generation.shares or cluster.placement.reward_model.shares"
            )
        if shares.get("generation") == "generation":
            raise ValueError("generation.shares: it cannot share its own slots; it may policy's")
        return value

    @field_validator("labels")
    @classmethod
    def _labels_are_written_as_rays(cls, value: dict[str, list[int]]) -> dict[str, list[int]]:
        for label in value:
            key, _, what = label.partition("=")
            if not (key and what):
                raise ValueError(f"'{label}' is no label: write it key=value, like pool=train")
        return value


class RolesConfig(ClusterConfig):
    """The devices and processes of a run of several roles."""

    roles: ClassVar[tuple[str, ...]] = get_args(RoleName)
