"""The `env` section: the environments a run can judge its completions with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from laurel.config.benchmarks import BenchmarkSetConfig
from laurel.config.code_environment import CodeEnvironmentConfig
from laurel.config.schema import DTensorConfig, NamedCall
from laurel.config.scorers import EnsemblePart, ScorerSource
from laurel.config.section import Section


class MathEnvironmentConfig(Section):
    """Answers checked against a known one."""

    foreign_keys: ClassVar[frozenset[str]] = frozenset({"math_verify_impl"})

    num_workers: int = Field(default=8, ge=1)
    """Processes that check answers; at most one per core is started. Default: as many as
    most machines have cores to spare."""
    verifier_type: Literal["math", "english_multichoice", "multilingual_multichoice"] = "math"
    """`math`: math-verify; the others read a letter after the last "Answer:"."""
    stop_strings: list[str] | None = None
    """Where a completion ends besides the end of its turn."""
    timeout_seconds: float = Field(default=3.0, gt=0)
    """Wall-clock limit of one answer, after which its process is killed. A timeout is a verdict
    (the policy wrote what cannot be checked in time), worth 0 and counted. Default: real answers
    are checked in milliseconds."""
    forbid_unevaluated: bool = True
    """Do not take an integral, a sum, a product or arithmetic with plain numbers (`(16-3-4)*2`) for
    its value where the known answer has none: the policy would only restate the problem."""


class ScoreTransformConfig(Section):
    """What is done to the scores of a reward model before they are rewards, in this order."""

    subtract_reference: bool = False
    """Subtract the score of the task's own reference answer (`ground_truth`)."""
    normalize: Literal["none", "stored", "running"] = "none"
    """Subtract a mean and divide by a standard deviation: `stored` are those that the model was
    saved with (scoring.json), `running` those of all scores so far in training. Default: what is
    compared within a group is changed by no mean, and normalised by no scale."""
    scale: float = 1.0
    """Multiplied."""
    shift: float = 0.0
    """Added."""
    clip: tuple[float, float] | None = None
    """Lowest and highest reward. Default: a bound hides what the reward model says of the best
    answers."""

    @model_validator(mode="after")
    def _clip_is_a_range(self) -> ScoreTransformConfig:
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError(
                f"clip {list(self.clip)} must be [lowest, highest], the lower one first"
            )
        return self


class ResourcesConfig(Section):
    """Slots that are set aside."""

    gpus_per_node: int | None = Field(default=None, ge=1)
    """Of each node."""
    num_nodes: int | None = Field(default=None, ge=1)
    """Nodes."""


FOREIGN_VLLM_KEYS = frozenset(
    {
        "async_engine",
        "cap_max_tokens_to_context",
        "enable_expert_parallel",
        "enable_prefix_caching",
        "enable_thinking",
        "enforce_monotonicity",
        "env_vars",
        "expose_http_server",
        "http_server_serving_chat_kwargs",
        "is_mx",
        "limit_mm_per_prompt",
        "max_num_seqs",
        "quantization_ignored_layer_kws",
        "reasoning_parser_plugin",
        "tool_parser_plugin",
        "video",
        "enable_vllm_metrics_logger",
        "expert_parallel_size",
        "http_refit_api_key_env_var",
        "http_refit_server_port",
        "kv_cache_dtype",
        "logprobs_mode",
        "num_first_layers_in_bf16",
        "num_last_layers_in_bf16",
        "reset_encoder_cache_after_weight_update",
        "skip_tokenizer_init",
        "use_deep_gemm",
        "use_tqdm",
        "vllm_metrics_logger_interval",
        "zmq_refit_server_port",
    }
)
"""Of `vllm_cfg` in files of NeMo RL."""


class ScoringVllmConfig(Section):
    """vLLM's own settings, for a reward model."""

    foreign_keys: ClassVar[frozenset[str]] = FOREIGN_VLLM_KEYS | {
        "enforce_eager",
        "load_format",
        "max_model_len",
        "pipeline_parallel_size",
        "precision",
    }

    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that the model is spread over."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, lt=1)
    """Share of a GPU's memory that it may take."""


class ScoringGenerationConfig(Section):
    """What computes the scores of a reward model. Nothing is generated; the name is NeMo RL's."""

    foreign_keys: ClassVar[frozenset[str]] = frozenset(
        {
            "colocated",
            "max_new_tokens",
            "mcore_generation_config",
            "stop_strings",
            "stop_token_ids",
            "temperature",
            "top_k",
            "top_p",
            "vllm_kwargs",
        }
    )

    backend: Literal["transformers", "vllm"] = "transformers"
    """`transformers`: the model itself, in token forests; `vllm`: an engine of its own (extra
    `vllm`), whose scores are checked against the model's golden ones. Default: it needs no second
    engine, and its noise can be measured exactly."""
    vllm_cfg: ScoringVllmConfig = ScoringVllmConfig()
    """See there."""


class RewardModelEnvironmentConfig(ScorerSource):
    """Conversations judged by a reward model, by several, or by what stands in for one."""

    foreign_keys: ClassVar[frozenset[str]] = frozenset(
        {"processor", "offload_optimizer_for_logprob", "logprob_batch_size", "max_grad_norm",
         "optimizer", "scheduler", "make_sequence_length_divisible_by"}
    )  # fmt: skip

    enabled: bool = False
    """Judge with this environment where `data.env_name` names none."""
    resources: ResourcesConfig = ResourcesConfig()
    """See there."""
    dtensor_cfg: DTensorConfig = DTensorConfig()
    """See there."""
    generation: ScoringGenerationConfig | None = None
    """What computes the scores of a model that this run loads: `backend` is `transformers` (also
    null), or `vllm`, an engine of its own on one machine, with `vllm_cfg.tensor_parallel_size` and
    `vllm_cfg.gpu_memory_utilization`. Default: no second engine, and its noise can be measured
    exactly."""
    transform: ScoreTransformConfig = ScoreTransformConfig()
    """See there."""
    use_reward_loop: bool = True
    """Judge completions while others are still being drawn; false: the whole batch of a step at
    once, when its last completion has been drawn. The scores are the same but for rounding.
    Default: a step is shorter with it (docs/benchmarks.md)."""
    num_replicas: int = Field(default=1, ge=1)
    """Replicas of the model with the loop, in processes of their own where there are several. On
    Ray it is the slots of `resources`, or of the placement, that say how many."""
    num_workers: int = Field(default=0, ge=0)
    """Processes that render and tokenise conversations, for models that are loaded and for servers
    that are sent tokens or text, or that run `function`; of several models each has so many. 0:
    threads of this one do. On Ray those that render are actors, spread over the nodes. Default:
    threads do where prompts are short."""
    benchmarks: dict[str, BenchmarkSetConfig] = Field(default_factory=dict)
    """What `laurel grpo` measures the reward model on once, before the first step, by names of your
    own: how good is the judge? Logged as `reward_model/<Name>_...`."""
    models: list[EnsemblePart] | None = Field(default=None, min_length=2)
    """Several reward models, or whatever gives scores, instead of one. On Ray each that is loaded
    has replicas on all slots of `resources`, beside those of the others."""
    combine: Literal["weighted_sum", "min", "mean_minus_std"] = "weighted_sum"
    """How the scores of several models become one. `mean_minus_std` is wary of what they disagree
    about. A failure of any of them is a failure of the completion."""
    uncertainty_penalty: float = Field(default=1.0, ge=0)
    """Standard deviations that `mean_minus_std` subtracts from the mean."""

    @model_validator(mode="after")
    def _usable(self) -> RewardModelEnvironmentConfig:
        if self.models is not None:
            self._check_models(self.models)
        elif self.combine != "weighted_sum":
            raise ValueError(f"combine={self.combine} is for several models, and there are none")
        elif self.enabled and not self._sources():
            raise ValueError("model_name is missing: which reward model?")
        if self.combine != "mean_minus_std" and self.uncertainty_penalty != 1.0:
            raise ValueError("uncertainty_penalty is for combine=mean_minus_std; leave it out")
        if self.num_replicas > 1 and not self.loads_model:
            raise ValueError(
                f"num_replicas={self.num_replicas} is for one model that this run loads; leave it "
                "out where there are urls, a judge, a function or several models"
            )
        if self.uses_vllm and (self.models is not None or not self.loads_model):
            raise ValueError(
                "generation.backend=vllm is for one model that this run loads; leave it out where "
                "there are urls, a judge, a function or several models"
            )
        if self.uses_vllm and self.num_replicas > 1:
            raise ValueError(
                f"num_replicas={self.num_replicas} with generation.backend=vllm: vLLM is one "
                "engine here; spread it with generation.vllm_cfg.tensor_parallel_size"
            )
        if self.num_workers and not self.uses_workers:
            hint = (
                "; or name the model whose tokens they are to be sent (model_name)"
                if self.urls is not None and self.url_protocol == "vllm"
                else ""
            )
            raise ValueError(
                f"num_workers={self.num_workers} is for processes that render conversations or run "
                f"a function, and here servers render what they are asked: leave it out{hint}"
            )
        return self

    def _check_models(self, models: Sequence[EnsemblePart]) -> None:
        if self._sources():
            raise ValueError(f"models and {self._sources()[0]} cannot both give the score")
        names = [part.name for part in models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"models: '{twice[0]}' is the name of two models")
        weighted = [part.name for part in models if part.weight != 1.0]
        if self.combine != "weighted_sum" and weighted:
            raise ValueError(
                f"the weight of '{weighted[0]}' counts only with combine=weighted_sum, not with "
                f"{self.combine}; leave it out"
            )
        if not any(part.weight for part in models):
            raise ValueError("models: every weight is 0, so the reward would be, too")
        if self.transform.normalize == "stored":
            raise ValueError(
                "transform.normalize=stored: several models have no statistics in common, and each "
                "is normalised by its own; choose running or none"
            )

    @property
    def uses_vllm(self) -> bool:
        """Whether vLLM computes the scores."""
        return self.generation is not None and self.generation.backend == "vllm"

    @property
    def loads_model(self) -> bool:
        """See `ScorerSource`; not what each of several models does for itself."""
        return self.models is None and super().loads_model

    @property
    def loaded(self) -> list[ScorerSource]:
        """The models that are loaded for it: itself, or some of several."""
        sources: Sequence[ScorerSource] = [self] if self.models is None else self.models
        return [source for source in sources if source.loads_model]

    @property
    def computes(self) -> bool:
        """Whether any model is loaded for it."""
        return bool(self.loaded)

    @property
    def uses_workers(self) -> bool:
        """See `ScorerSource`; so it does where any of several models lets it."""
        if self.models is not None:
            return any(part.uses_workers for part in self.models)
        return super().uses_workers

    @property
    def judges_groups(self) -> bool:
        """See `ScorerSource`; so it is where any of several models must."""
        return super().judges_groups or any(part.judges_groups for part in self.models or ())


class CompositePart(Section):
    """One of several environments that judge the same sample."""

    env: str
    """Name of the environment."""
    weight: float = 1.0
    """Factor of its reward in the sum."""
    gate: float | None = None
    """Instead of adding: where this part's reward is below the gate, the whole reward is that of
    `CompositeEnvironmentConfig.gated_reward`."""


class CompositeEnvironmentConfig(Section):
    """Several environments on one sample."""

    parts: list[CompositePart] = Field(min_length=1)
    """Each judges every sample."""
    gated_reward: float = 0.0
    """The reward of a sample that a gate shut out."""
    as_components: bool = False
    """Keep the parts apart, for GDPO; their sum is the reward that is logged."""
    conducted_by: str | None = None
    """The part that answers the policy and says when the conversation is over; the others judge
    once, what it ends with. Null: all judge every turn, and any of them ends it."""


class EnvironmentsConfig(Section):
    """The environments by the name that `data.env_name` calls them."""

    foreign_keys: ClassVar[frozenset[str]] = frozenset(
        {"should_use_nemo_gym", "should_log_nemo_gym_responses", "should_mask_flagged_samples",
         "nemo_gym", "vlm", "dapo", "math_default", "math_multi_reward", "sliding_puzzle_game",
         "code_jaccard", "code_gym", "retriever", "clevr-cogent", "refcoco", "geometry3k",
         "mmpr-tiny"}
    )  # fmt: skip
    """Environments of NeMo RL; its files describe several, and use those that `env_name` names."""

    math: MathEnvironmentConfig = MathEnvironmentConfig()
    """See there."""
    code: CodeEnvironmentConfig = CodeEnvironmentConfig()
    """See there."""
    reward_model: RewardModelEnvironmentConfig = RewardModelEnvironmentConfig()
    """See there."""
    composite: dict[str, CompositeEnvironmentConfig] = Field(default_factory=dict)
    """Combinations of the others, by names of your own."""
    custom: dict[str, NamedCall] = Field(default_factory=dict)
    """Your own environments, by names of your own: an import path, and keyword arguments."""
    max_failed_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """The run stops where an environment fails to judge more than this share of a batch. Default:
    the rest would be no fair sample."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Limit of one step of an environment; what it was to judge is then a failure. Default: longer
    than any verdict that still helps a step."""

    def names(self) -> list[str]:
        """Every name that a task may ask for."""
        return ["math", "code", "reward_model", *self.composite, *self.custom]
