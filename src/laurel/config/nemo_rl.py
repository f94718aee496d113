"""What files written for NeMo RL say in another way than Laurel, or that Laurel does not have.

Three things are done with a tree before it is checked. What is another backend's or another
section's way to say a setting of Laurel is translated (`megatron_cfg`, `async_grpo`). A feature
that Laurel does not have is refused by its name. All other keys that mean nothing here stay where
they are: the sections know them (`foreign_keys`), and `fate` says why, and whether anything is
lost.

Facts: NVIDIA-NeMo/RL, `examples/configs` of 2025-09-20, v0.4.0 to v0.7.0 and 7ea279abf.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laurel.config.environments import EnvironmentsConfig
from laurel.config.interpolation import Interpolations, UnresolvedError
from laurel.config.schema_info import step_into, with_defaults
from laurel.config.yaml_tree import (
    MISSING,
    KeyPath,
    Section,
    YamlNode,
    dotted,
    find_node,
    graft,
    plain_values,
    split_key,
    with_key,
)
from laurel.errors import ConfigError

# ------------------------------------------------------------------------- keys that are left alone

UNNEEDED: dict[str, tuple[str, ...]] = {
    "of other commands": (
        "rm",
        "sft",
        "grpo",
        "loss_fn",
        "env",
        "dpo",
        "distillation",
        "ppo",
        "value",
        "value_loss_fn",
        "teacher",
        "teachers",
    ),
    "of other backends": (
        "megatron_cfg",
        "_v2",
        "automodel_kwargs",
        "env_vars",
        "dp_replicate_size",
        "sglang_cfg",
        "trtllm_cfg",
        "trtllm_kwargs",
        "dynamo_cfg",
        "mcore_generation_config",
        "use_deep_gemm",
        "use_triton",
        "num_last_layers_in_bf16",
        "num_first_layers_in_bf16",
        "async_rl",
        "real_quant_export_cpu_offload",
        "model_save_format",
        "save_consolidated",
        "model_cache_dir",
        "model_repo_id",
        "is_peft",
        "peft_config",
        "data_plane",
        "moe_parallelizer",
        "is_mx",
        "quantization_ignored_layer_kws",
        "use_async_rollouts",
    ),
    "Laurel moves weights into the engine itself": (
        "refit_buffer_size_gb",
        "refit_transport",
        "refit_cfg",
        "http_refit_api_key_env_var",
        "http_refit_server_port",
        "zmq_refit_server_port",
        "reset_encoder_cache_after_weight_update",
    ),
    "settings of a logger that is switched elsewhere": ("swanlab",),
    "only speed or memory": (
        "use_fastokens",
        "clear_cache_every_n_steps",
        "offload_optimizer_for_logprob",
        "logprob_batch_size",
        "logprob_chunk_size",
        "logprob_mb_tokens",
        "generation_batch_size",
        "make_sequence_length_divisible_by",
        "sequence_length_round",
        "microbatch_order",
        "algorithm",
        "calculate_advantages_on_gpu",
        "async_engine",
        "use_tqdm",
        "fuse_loss",
        "skip_reference_policy_logprobs_calculation",
        "enable_prefix_caching",
        "deduplicate_multimodal_data",
        "debug_payload_metrics",
        "num_workers",
    ),
    "one place says it: policy.dtensor_cfg.activation_checkpointing": (
        "activation_checkpointing_enabled",
    ),
    "Laurel reads and renders rows itself; the scoring contract settles special tokens": (
        "add_bos",
        "add_eos",
        "add_generation_prompt",
        "add_system_prompt",
        "processor",
        "env_name",
        "task_name",
        "download_dir",
        "output_dir",
        "skip_tokenizer_init",
    ),
    "the reward model that judges is not trained and draws nothing": (
        "optimizer",
        "scheduler",
        "max_grad_norm",
        "generation",
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop_strings",
        "stop_token_ids",
        "vllm_kwargs",
        "colocated",
    ),
    "vLLM scores with the reward model's own precision and lengths, on tensor_parallel_size GPUs": (
        "precision",
        "max_model_len",
        "load_format",
        "enforce_eager",
        "pipeline_parallel_size",
    ),
    "Laurel's engines and processes find their own ports and figures": (
        "port_range_low",
        "port_range_high",
        "master_port_range_low",
        "master_port_range_high",
        "enable_vllm_metrics_logger",
        "vllm_metrics_logger_interval",
        "monitor_gpus",
        "gpu_monitoring",
        "log_nemo_gym_full_result_tables",
        "logprobs_mode",
        "segment_size",
        "should_log_nemo_gym_responses",
    ),
}
"""Why a key is not needed, and the last parts of such keys."""

LOST: dict[str, str] = {
    "async_grpo": "grpo.max_staleness=max_trajectory_age_steps and "
    "loss_fn.use_importance_sampling_correction=true",
    "max_generation_failures": "grpo.min_valid_per_group and env.max_failed_share limit failures",
    "in_flight_weight_updates": "weights change between batches of rollouts, not within them",
    "recompute_kv_cache_after_weight_updates": "keys and values are always those of the weights",
    "math_verify_impl": "there is one checker: math-verify",
    "reward_penalties": "grpo.reward_shaping, or an environment of your own",
    "invalid_tool_call_advantage": "tools are an environment's here",
    "invalid_tool_call_strategy": "tools are an environment's here",
    "penalize_invalid_tool_call": "tools are an environment's here",
    "malformed_thinking_advantage": "let an environment judge the form",
    "penalize_malformed_thinking": "let an environment judge the form",
    "zero_variance_prompt_filtering": "grpo.use_dynamic_sampling draws others in their place",
    "should_mask_flagged_samples": "an environment says of a sample that it could not be judged",
    "seq_logprob_error_threshold": "loss_fn.truncated_importance_sampling_type=seq-mask-tis leaves "
    "out completions whose probabilities differ",
    "opd": "no distillation from a teacher",
    "on_policy_distillation": "no distillation from a teacher",
    "draft": "no draft model is trained",
    "router_replay": "experts are routed anew in training",
    "quant_cfg": "nothing is quantised",
    "real_quant": "nothing is quantised",
    "real_quant_ignore": "nothing is quantised",
    "quant_calib_data": "nothing is quantised",
    "quant_calib_size": "nothing is quantised",
    "quant_batch_size": "nothing is quantised",
    "quant_sequence_length": "nothing is quantised",
    "disable_modelopt_layer_spec": "nothing is quantised",
    "dequantize_base_checkpoint": "give a model whose weights are saved in bfloat16 or float32",
    "is_vlm": "texts only",
    "should_use_nemo_gym": "write an environment: env.custom",
    "expert_parallel_size": "a replica is spread by tensor_parallel_size",
    "enable_expert_parallel": "a replica is spread by tensor_parallel_size; vLLM's own argument "
    "would go to policy.generation.vllm_kwargs",
    "expose_http_server": "an engine serves this run alone",
    "http_server_serving_chat_kwargs": "an engine serves this run alone",
    "reasoning_parser_plugin": "an engine serves this run alone",
    "tool_parser_plugin": "an engine serves this run alone",
    "enable_thinking": "policy.tokenizer.chat_template_kwargs",
    "enforce_monotonicity": "an engine serves this run alone",
    "cap_max_tokens_to_context": "a completion always ends where its conversation is full",
    "max_num_seqs": "policy.generation.vllm_kwargs",
    "limit_mm_per_prompt": "texts only",
    "video": "texts only",
    "audio": "texts only",
    "kv_cache_dtype": "policy.generation.vllm_kwargs",
    "bad_words": "nothing is kept from being drawn",
    "swanlab_enabled": "Laurel logs to wandb, tensorboard and mlflow",
    "val_start_at": "validation begins with grpo.val_period, or grpo.val_at_start",
    "ft_save_period": "checkpointing.save_period",
    "ft_keep_latest_k": "checkpointing.keep_top_k",
    "dropout_position": "dropout is in front of adapters",
    "lora_A_init": "adapters begin as peft begins them",
    "tool_key": "rows with tools are not rendered",
    "use_preserving_dataset": "columns are read as Laurel reads them",
    "filter_dataset": "data.max_samples and data.max_input_seq_length limit rows",
    "use_multiple_dataloader": "a mixture holds all rows of all its sets",
    "num_prompts_per_dataloader": "a mixture holds all rows of all its sets",
    "custom_dataloader": "rows come in the order of data.shuffle and the seed of the run",
    "video_maintain_aspect_ratio": "texts only",
    "video_target_num_patches": "texts only",
    "allowed_problem_types": "an own class (dataset_name) chooses rows",
    # of megatron_cfg, where it is enabled
    "pipeline_model_parallel_size": "layers are not divided by depth: weights, gradients and "
    "optimizer are sharded over all devices instead (FSDP2)",
    "num_layers_in_first_pipeline_stage": "there are no pipeline stages",
    "num_layers_in_last_pipeline_stage": "there are no pipeline stages",
    "use_distributed_optimizer": "the optimizer is always sharded (FSDP2)",
    "use_precision_aware_optimizer": "the optimizer's state is float32",
    "params_dtype": "master weights are float32",
    "optimizer_cpu_offload": "policy.dtensor_cfg.cpu_offload keeps parameters and optimizer there",
    "optimizer_offload_fraction": "policy.dtensor_cfg.cpu_offload: all or nothing",
    "distributed_data_parallel_config": "FSDP2 reduces gradients in its own way",
    "recompute_granularity": "whole layers are computed again",
    "recompute_modules": "whole layers are computed again",
    "freeze_moe_router": "the router of a mixture of experts is trained, too; dense models have "
    "none",
    "moe_router_bias_update_rate": "the bias of a mixture's router stays as it is; dense models "
    "have none",
    "moe_router_enable_expert_bias": "the bias of a mixture's router stays as it is",
    "moe_router_load_balancing_type": "no loss balances experts; dense models have none",
    "moe_aux_loss_coeff": "no loss balances experts",
    "model_overrides": "policy.hf_config_overrides changes a model's configuration",
    "attention_backend": "attention is Laurel's own or the model's",
    "lora_A_init_method": "adapters begin as peft begins them",
    "lora_B_init_method": "adapters begin at zero, as peft's do",
    "lora_dtype": "adapters are float32",
    "a2a_experimental": "adapters are peft's",
    "calculate_per_token_loss": "loss_fn.token_level_loss says what a loss is divided by",
    "do_not_average_loss": "loss_fn.token_level_loss says what a loss is divided by",
    "scale_loss_by_dp_cp_size": "a loss does not depend on the mesh",
}
"""Keys that may change what a run does, and what to do instead or what is done."""

_MEGATRON_ONLY = "Megatron's kernels, checkpoints and communication"
_SAME_HERE = {
    "lora_A_init_method": (),
    "lora_B_init_method": ("zero",),
    "lora_dtype": ("None",),
    "math_verify_impl": ("hf_math_verify",),
    "kv_cache_dtype": ("auto",),
    "params_dtype": ("float32",),
    "recompute_granularity": ("full",),
    "moe_router_load_balancing_type": ("none",),
    "val_start_at": (-1,),
    "expert_parallel_size": (1,),
    "pipeline_model_parallel_size": (1,),
    "use_distributed_optimizer": (True,),
    "dropout_position": ("pre",),
    "enable_expert_parallel": (False,),
}
"""Values of lost keys that say what Laurel does anyway."""

_OFF: tuple[Any, ...] = (None, False, -1, 0, [], {})


_CARRIED = frozenset(
    {
        f"policy.megatron_cfg.{key}"
        for key in (
            "enabled",
            "tensor_model_parallel_size",
            "context_parallel_size",
            "sequence_parallel",
            "activation_checkpointing",
        )
    }
    | {
        f"policy.megatron_cfg.optimizer.{key}"
        for key in (
            "optimizer",
            "lr",
            "min_lr",
            "weight_decay",
            "adam_beta1",
            "adam_beta2",
            "adam_eps",
            "sgd_momentum",
            "clip_grad",
            "bf16",
        )
    }
    | {
        f"policy.megatron_cfg.scheduler.{key}"
        for key in (
            "start_weight_decay",
            "end_weight_decay",
            "lr_decay_style",
            "lr_decay_iters",
            "lr_warmup_iters",
            "lr_warmup_init",
        )
    }
    | {
        f"policy.megatron_cfg.peft.{key}"
        for key in ("enabled", "target_modules", "exclude_modules", "dim", "alpha", "dropout")
    }
    | {"grpo.async_grpo.enabled", "grpo.async_grpo.max_trajectory_age_steps"}
)


def reason(key: str) -> tuple[str, bool] | None:
    """Why a key means nothing here, and whether something may be lost; None for an unknown one."""
    if key in _CARRIED:
        return "it is translated", False
    last = key.rpartition(".")[2]
    if last in LOST:
        return LOST[last], True
    found = next(((why, False) for why, names in UNNEEDED.items() if last in names), None)
    if found is None and ".megatron_cfg." in f".{key}":
        return _MEGATRON_ONLY, False
    if found is None and last in EnvironmentsConfig.foreign_keys:
        return "no task asks for this environment", False
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of a key that means nothing here."""

    key: str
    value: Any
    why: str
    is_lost: bool
    """Whether the run is not what the file asks for."""


def fates_of(tree: YamlNode, ignored: Sequence[str]) -> list[Fate]:
    """The fates of keys that the sections of a run know and do not read.

    Args:
        tree: What the file says, in Laurel's terms.
        ignored: The keys, dotted. The parts of some blocks, as Megatron's, have fates of their own.
    """
    found: list[Fate] = []
    for key in ignored:
        node = find_node(tree, split_key(key))
        if node is None:
            continue
        value = plain_values(node)
        if key in _LOOKED_INTO and isinstance(value, dict) and value.get("enabled") is True:
            leaves = list(_leaves_of(value, key))
        else:
            leaves = [(key, value)]
        for name, leaf in leaves:
            above = find_node(tree, split_key(name)[:-1])
            section = plain_values(above) if above is not None else {}
            found.append(_fate(name, leaf, is_off=_is_switched_off(name, section)))
    return found


def _is_switched_off(key: str, section: Any) -> bool:
    """Whether a key's section is off, or another key of it that it only qualifies."""
    if not isinstance(section, dict):
        return False
    beside = _QUALIFIES.get(key.rpartition(".")[2])
    return section.get("enabled") is False or (beside is not None and not section.get(beside))


_QUALIFIES = {"dropout_position": "dropout"}
_LOOKED_INTO = ("policy.megatron_cfg", "grpo.async_grpo")


def _leaves_of(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value or value.get("enabled") is False:
        yield key, value
        return
    for name, child in value.items():
        yield from _leaves_of(child, f"{key}.{name}")


def _fate(key: str, value: Any, *, is_off: bool) -> Fate:
    why, may_be_lost = reason(key) or ("not known to this version of Laurel", False)
    same = _SAME_HERE.get(key.rpartition(".")[2], ())
    if may_be_lost and (is_off or _is_off(value, same)):
        why, may_be_lost = "it is off, or says what Laurel does", False
    return Fate(key=key, value=value, why=why, is_lost=may_be_lost)


def _is_off(value: Any, same: Sequence[Any] = ()) -> bool:
    """Whether a value switches its key off: null, false, -1, nothing; a block of only those."""
    if isinstance(value, dict):
        return value.get("enabled") is False or all(_is_off(child) for child in value.values())
    return any(
        value == off and isinstance(value, bool) == isinstance(off, bool) for off in (*_OFF, *same)
    )


# ---------------------------------------------------------------------- features that there are not

_IMAGES = frozenset(
    {
        "clevr-cogent",
        "clevr_cogent",
        "refcoco",
        "geometry3k",
        "mmpr-tiny",
        "vlm",
        "audiomcq",
        "avqa",
        "daily-omni",
        "intent-train",
        "intent-bench",
    }
)


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _on(value: Any) -> bool:
    return value is not MISSING and not _is_off(value)


def _one_of(*words: str) -> Callable[[Any], bool]:
    return lambda value: str(value) in words


def _begins(word: str) -> Callable[[Any], bool]:
    return lambda value: str(value).lower().startswith(word)


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature that Laurel does not have, and how a file asks for it."""

    name: str
    keys: tuple[str, ...]
    """Patterns of dotted keys."""
    asks: Callable[[Any], bool] = _on
    """Whether a value asks for it."""
    hint: str = ""


_MEGATRON = "policy.megatron_cfg."
FEATURES: tuple[Feature, ...] = (
    Feature(
        "direct preference optimisation (DPO)",
        ("dpo",),
        lambda _: True,
        "laurel rm learns a reward model from the same pairs",
    ),
    Feature(
        "distillation",
        ("distillation", "teacher", "teachers", "_teachers", "on_policy_distillation"),
    ),
    Feature("distillation", ("grpo.adv_estimator.name",), _one_of("opd")),
    Feature(
        "PPO with a critic",
        ("ppo", "value", "value_loss_fn"),
        _on,
        "laurel grpo compares completions of one prompt instead",
    ),
    Feature("NeMo Gym", ("env.should_use_nemo_gym",), _on, "write an environment: env.custom"),
    Feature("single controller (async_rl)", ("async_rl",), _on, "grpo.max_staleness"),
    Feature(
        "multimodal data",
        ("data.dataset_name", "data.*.dataset_name"),
        lambda value: str(value) in _IMAGES,
    ),
    Feature(
        "multimodal models",
        (
            "policy.is_vlm",
            "policy.tokenizer.video",
            "policy.tokenizer.audio",
            "policy.generation.vllm_cfg.limit_mm_per_prompt",
        ),
    ),
    Feature(
        "environment sliding_puzzle_game",
        ("env.sliding_puzzle_game",),
        lambda _: True,
        "write an environment: env.custom",
    ),
    Feature(
        "generation with SGLang",
        ("policy.generation.backend",),
        _one_of("sglang"),
        "policy.generation.backend=vllm",
    ),
    Feature(
        "generation with TensorRT-LLM",
        ("policy.generation.backend",),
        _one_of("trtllm"),
        "policy.generation.backend=vllm",
    ),
    Feature(
        "generation with Dynamo",
        ("policy.generation.backend",),
        _one_of("dynamo"),
        "policy.generation.backend=vllm",
    ),
    Feature(
        "generation with Megatron",
        ("policy.generation.backend",),
        _one_of("megatron"),
        "policy.generation.backend=vllm",
    ),
    Feature(
        "FP8 generation",
        ("policy.generation.vllm_cfg.precision", "policy.generation.vllm_cfg.kv_cache_dtype"),
        _begins("fp8"),
        "policy.generation.vllm_cfg.precision=bfloat16",
    ),
    Feature(
        "expert parallelism",
        ("policy.dtensor_cfg.expert_parallel_size",),
        _above_one,
        "models that fit without it are spread by policy.dtensor_cfg.tensor_parallel_size",
    ),
    Feature(
        "quantisation-aware training",
        ("policy.quant_cfg", "policy.generation.quant_cfg", "policy.generation.real_quant"),
    ),
    Feature("training of a draft model", ("policy.draft",)),
    Feature("replay of experts' routes", ("policy.router_replay",)),
    Feature(
        "Transformer Engine optimizer",
        ("policy.optimizer.name",),
        _begins("transformer_engine"),
        "policy.optimizer.name=torch.optim.AdamW",
    ),
)
MEGATRON_FEATURES: tuple[Feature, ...] = (
    Feature(
        "expert parallelism",
        (_MEGATRON + "expert_model_parallel_size", _MEGATRON + "expert_tensor_parallel_size"),
        _above_one,
        "a model whose experts have to be divided does not fit here",
    ),
    Feature("FP8 training", (_MEGATRON + "fp8_cfg",)),
    Feature("float16 training", (_MEGATRON + "optimizer.fp16",), _on, "policy.precision=bfloat16"),
    Feature("multi-token prediction", (_MEGATRON + "mtp_num_layers",)),
    Feature("balancing loss of experts", (_MEGATRON + "moe_aux_loss_coeff",)),
    Feature(
        "freezing of parts of a multimodal model",
        (
            _MEGATRON + "freeze_config",
            _MEGATRON + "freeze_vision_model",
            _MEGATRON + "freeze_vision_projection",
            _MEGATRON + "freeze_sound_encoder",
            _MEGATRON + "freeze_sound_projection",
        ),
    ),
)
"""Those that only a Megatron policy asks for."""


# ----------------------------------------------------------------------------------------- adapting


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A setting that is said elsewhere here."""

    key: str
    value: Any
    to: Mapping[str, Any]
    """Keys of ours, and their values."""


@dataclass(slots=True, kw_only=True)
class Adapted:
    """A tree in Laurel's own terms, and what should be said about it."""

    tree: YamlNode
    moves: list[Move] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any, *, by: str, was: Any) -> None:
        """Put a value at a key of ours; what is there gives way."""
        place = (_at(self.tree, by) or self.tree).place
        self.tree = with_key(self.tree, key.split("."), graft(value, place))
        same = next((move for move in self.moves if move.key == by), None)
        if same is None:
            self.moves.append(Move(key=by, value=was, to={key: value}))
        else:
            self.moves[self.moves.index(same)] = Move(key=by, value=was, to={**same.to, key: value})


def adapt(schema: type[Section], tree: YamlNode, problems: list[str]) -> Adapted:
    """Say in Laurel's terms what a file says in NeMo RL's.

    Args:
        schema: Of the run.
        tree: The file with its overrides.
        problems: Gets what cannot be translated.

    Raises:
        ConfigError: The file asks for features that Laurel does not have; all of them are named.
    """
    work = Adapted(tree=tree)
    if not isinstance(tree.value, dict):
        return work
    values = _Values(schema, tree)
    is_megatron = values.get(_MEGATRON + "enabled") is True
    missing = [
        *_missing(schema, values, is_megatron=is_megatron),
        *_asked_environments(schema, values),
    ]
    if missing:
        raise ConfigError("\n  ".join(missing) if len(missing) == 1 else _many(missing))
    if is_megatron and "policy" in schema.model_fields:
        _translate_megatron(work, values, problems)
    if values.get("grpo.async_grpo.enabled") is True and "grpo" in schema.model_fields:
        _translate_async(work, values, problems)
    if "policy" in schema.model_fields:
        _pack_where_rows_are_divided(work)
    return work


def _many(problems: Sequence[str]) -> str:
    return f"{len(problems)} problems in the configuration:\n  " + "\n  ".join(problems)


class _Values:
    """The values of a tree, references looked up."""

    def __init__(self, schema: type[Section], tree: YamlNode) -> None:
        self.schema = schema
        self.tree = tree
        self._interpolations: Interpolations | None = None

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key; `default` where there is none."""
        found = _at(self.tree, key)
        return default if found is None else self._of(found, tuple(key.split(".")))

    def leaves(self, pattern: str) -> Iterator[tuple[str, YamlNode, Any]]:
        """The keys that a pattern fits, with their values."""
        parts = pattern.split(".")
        yield from self._below(self.tree, (), parts)

    def _below(
        self, node: YamlNode, path: KeyPath, parts: Sequence[str]
    ) -> Iterator[tuple[str, YamlNode, Any]]:
        if not parts:
            yield dotted(path), node, self._of(node, path)
            return
        if isinstance(node.value, dict):
            for key, child in node.value.items():
                if fnmatch.fnmatchcase(key, parts[0]):
                    yield from self._below(child, (*path, key), parts[1:])
        elif isinstance(node.value, list):  # several sets
            for index, child in enumerate(node.value):
                yield from self._below(child, (*path, index), parts)

    def _of(self, node: YamlNode, path: KeyPath) -> Any:
        if not node.reference:
            return plain_values(node)
        if self._interpolations is None:
            whole = with_defaults(self.schema, self.tree, everything=True)
            self._interpolations = Interpolations(whole)
        try:
            return self._interpolations.value(path, node.value)
        except UnresolvedError:  # told where the key is checked, if it is needed
            return node.value


def _missing(schema: type[Section], values: _Values, *, is_megatron: bool) -> Iterator[str]:
    """A line for each feature that the file asks for and Laurel does not have."""
    told: set[str] = set()
    for feature in (*FEATURES, *(MEGATRON_FEATURES if is_megatron else ())):
        for pattern in feature.keys:
            is_of_run = _is_of_run(schema, pattern)
            for key, node, value in values.leaves(pattern) if is_of_run else ():
                if feature.name in told or not feature.asks(value):
                    continue
                told.add(feature.name)
                hint = f"; {feature.hint}" if feature.hint else ""
                shown = "" if isinstance(value, dict | list) else f"={value}"
                yield f"{node.place}: {key}{shown}: Laurel has no {feature.name}{hint}"


def _is_of_run(schema: type[Section], pattern: str) -> bool:
    """Whether a pattern is of a section that the run reads: `env` means nothing to `laurel sft`."""
    first = pattern.partition(".")[0]
    standing = step_into((schema,), first).standing
    is_section_of_another = standing == "foreign" and "." in pattern
    return not is_section_of_another and not (standing == "foreign" and first == "env")


def _asked_environments(schema: type[Section], values: _Values) -> Iterator[str]:
    """A line for each environment of NeMo RL that a set of tasks asks for and Laurel lacks."""
    if "env" not in schema.model_fields:
        return
    own = {key for kind in ("custom", "composite") for key in values.get(f"env.{kind}") or {}}
    told: set[str] = set()
    for pattern in ("data.env_name", "data.*.env_name", "data.*.*.env_name"):
        for key, node, name in values.leaves(pattern):
            if name in told | own or name not in EnvironmentsConfig.foreign_keys:
                continue
            told.add(name)
            known = {**dict.fromkeys(_IMAGES, "multimodal environments"), "nemo_gym": "NeMo Gym"}
            what = known.get(name, f"environment {name}")
            yield (
                f"{node.place}: {key}={name}: Laurel has no {what}; write one of your own: "
                "env.custom, or env.composite for several rewards of one sample"
            )


# ----------------------------------------------------------------------------------------- Megatron

MEGATRON_SENTENCE = (
    "policy.megatron_cfg is translated: Laurel trains the same model with the same optimizer, "
    "schedule, parallel sizes and adapters on its own backend (FSDP2, tensor and context "
    "parallelism); policy.optimizer, policy.scheduler and policy.dtensor_cfg have no effect "
    "besides, as in NeMo RL"
)
_DTENSOR = "policy.dtensor_cfg."
_SIMPLE: Mapping[str, str] = {
    "tensor_model_parallel_size": _DTENSOR + "tensor_parallel_size",
    "context_parallel_size": _DTENSOR + "context_parallel_size",
    "sequence_parallel": _DTENSOR + "sequence_parallel",
    "activation_checkpointing": _DTENSOR + "activation_checkpointing",
}
_LAYERS: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's linear layers, and those of Hugging Face's decoders that they are."""
_SCHEDULERS = "torch.optim.lr_scheduler."
_FOREVER = 10_000_000_000
_LEAST_FACTOR = 1e-8
"""Where a warm-up begins that begins at 0; torch's LinearLR cannot."""
_TRANSLATED = ("policy.optimizer", "policy.scheduler", *_SIMPLE.values(), _DTENSOR + "lora_cfg")


def _translate_megatron(work: Adapted, values: _Values, problems: list[str]) -> None:
    """The optimizer, schedule, sizes and adapters of a Megatron policy as Laurel's own."""
    switch = _at(work.tree, _MEGATRON + "enabled")
    place = switch.place if switch is not None else work.tree.place
    if values.get(_DTENSOR + "enabled") is True:
        problems.append(
            f"{place}: policy.megatron_cfg.enabled and policy.dtensor_cfg.enabled are both true; "
            "which of the two sections holds? Set the other to false"
        )
        return
    for key in _TRANSLATED:
        there = _at(work.tree, key)
        override = _override_in(there) if there is not None else None
        if override is not None:
            problems.append(
                f"{override}: {key}: has no effect beside policy.megatron_cfg.enabled=true; change "
                "the key of policy.megatron_cfg, or set policy.megatron_cfg.enabled=false"
            )
    if not isinstance(values.get(_MEGATRON + "optimizer"), dict):
        problems.append(
            f"{place}: policy.megatron_cfg.optimizer is missing: a Megatron policy is trained by "
            "it; give its optimizer, lr and weight_decay"
        )
        return
    for key, ours in _SIMPLE.items():
        if (value := values.get(_MEGATRON + key)) is not None:
            work.set(ours, value, by=_MEGATRON + key, was=value)
    if values.get(_DTENSOR + "enabled") is False:
        work.set(_DTENSOR + "enabled", True, by=_MEGATRON + "enabled", was=True)
    try:
        _set_optimizer(work, values)
        _set_schedule(work, values)
        _set_adapters(work, values)
    except _UntranslatableError as error:
        found = _at(work.tree, error.key)
        problems.append(f"{found.place if found else place}: {error.key}: {error}")
        return
    work.sentences.append(MEGATRON_SENTENCE)


class _UntranslatableError(Exception):
    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def _set_optimizer(work: Adapted, values: _Values) -> None:
    at = _MEGATRON + "optimizer."
    name = str(values.get(at + "optimizer", "adam"))
    lr, decay = _number(values, at + "lr"), _number(values, at + "weight_decay", 0.01)
    if name == "adam":
        betas = [_number(values, at + "adam_beta1", 0.9), _number(values, at + "adam_beta2", 0.999)]
        kwargs: dict[str, Any] = {
            "lr": lr,
            "weight_decay": decay,
            "betas": betas,
            "eps": _number(values, at + "adam_eps", 1e-8),
        }
        call = {"name": "torch.optim.AdamW", "kwargs": kwargs}
    elif name == "sgd":
        momentum = _number(values, at + "sgd_momentum", 0.9)
        kwargs = {"lr": lr, "weight_decay": decay, "momentum": momentum}
        call = {"name": "torch.optim.SGD", "kwargs": kwargs}
    else:
        raise _UntranslatableError(at + "optimizer", f"{name} is neither adam nor sgd")
    work.set("policy.optimizer", call, by=at + "optimizer", was=name)
    if (clip := values.get(at + "clip_grad", MISSING)) is not MISSING:
        work.set("policy.max_grad_norm", clip or None, by=at + "clip_grad", was=clip)


def _set_schedule(work: Adapted, values: _Values) -> None:
    """Megatron's schedule: from `lr_warmup_init` up, then constant or down to `min_lr`."""
    at = _MEGATRON + "scheduler."
    lr = _number(values, _MEGATRON + "optimizer.lr")
    least = _number(values, _MEGATRON + "optimizer.min_lr", 0.0)
    style = str(values.get(at + "lr_decay_style", "constant"))
    warmup = int(_number(values, at + "lr_warmup_iters", 0))
    begin = _number(values, at + "lr_warmup_init", 0.0)
    start, end = (values.get(at + f"{word}_weight_decay") for word in ("start", "end"))
    if start != end:
        raise _UntranslatableError(
            at + "end_weight_decay",
            f"the weight decay changes from {start} to {end}; here it stays the same",
        )
    if start is not None:  # Megatron's schedule sets it, whatever its optimizer was made with
        kwargs = dict(plain_values(_at(work.tree, "policy.optimizer.kwargs")))  # type: ignore[arg-type]
        kwargs["weight_decay"] = _number(values, at + "start_weight_decay")
        work.set("policy.optimizer.kwargs", kwargs, by=at + "start_weight_decay", was=start)
    stages: list[dict[str, Any]] = []
    milestones: list[int] = []
    if warmup and begin <= lr:
        factor = max(begin / lr, _LEAST_FACTOR)
        stages.append(_linear(factor, 1.0, warmup))
        milestones.append(warmup)
    elif warmup:
        raise _UntranslatableError(
            at + "lr_warmup_init", f"{begin} is above the learning rate {lr}: no warm-up begins so"
        )
    if style == "constant":
        stages.append(
            {"name": _SCHEDULERS + "ConstantLR", "kwargs": {"factor": 1.0, "total_iters": _FOREVER}}
        )
    else:
        stages += _decay(values, at, style, warmup=warmup, lr=lr, least=least, ends=milestones)
    call: Any = stages[0] if len(stages) == 1 else [*stages, {"milestones": milestones}]
    work.set("policy.scheduler", call, by=at + "lr_decay_style", was=style)


def _decay(
    values: _Values, at: str, style: str, *, warmup: int, lr: float, least: float, ends: list[int]
) -> list[dict[str, Any]]:
    """What comes after the warm-up: down to the least rate, and on with it."""
    if style not in ("linear", "cosine"):
        raise _UntranslatableError(
            at + "lr_decay_style", f"{style} is none of constant, linear and cosine"
        )
    until = values.get(at + "lr_decay_iters") or values.get(_MEGATRON + "train_iters")
    if not isinstance(until, int) or until <= warmup:
        raise _UntranslatableError(
            at + "lr_decay_iters", f"must be a whole number above the {warmup} steps of warm-up"
        )
    ends.append(until)
    rest = until - warmup
    if style == "linear":
        down = _linear(1.0, least / lr, rest)
    else:
        down = {
            "name": _SCHEDULERS + "CosineAnnealingLR",
            "kwargs": {"T_max": rest, "eta_min": least},
        }
    after = {
        "name": _SCHEDULERS + "ConstantLR",
        "kwargs": {"factor": least / lr, "total_iters": _FOREVER},
    }
    return [down, after]


def _linear(start: float, end: float, steps: int) -> dict[str, Any]:
    kwargs = {"start_factor": start, "end_factor": end, "total_iters": steps}
    return {"name": _SCHEDULERS + "LinearLR", "kwargs": kwargs}


def _set_adapters(work: Adapted, values: _Values) -> None:
    at, ours = _MEGATRON + "peft.", _DTENSOR + "lora_cfg."
    if values.get(at + "enabled") is not True:
        work.set(ours + "enabled", False, by=at + "enabled", was=False)
        return
    found: dict[str, Any] = {"enabled": True}
    for key in ("dim", "alpha", "dropout"):
        found[key] = values.get(at + key)
        if found[key] is None and key != "dropout":
            raise _UntranslatableError(at + key, "is missing, and adapters are enabled")
    found["dropout"] = found["dropout"] or 0.0
    for key in ("target_modules", "exclude_modules"):
        names: list[str] = []
        for name in values.get(at + key) or []:
            if name not in _LAYERS:
                raise _UntranslatableError(
                    at + key,
                    f"'{name}' is none of Megatron's layers that Laurel knows: "
                    f"{', '.join(_LAYERS)}",
                )
            names += _LAYERS[name]
        found[key] = names
    found["match_all_linear"] = not found["target_modules"]
    for key, value in found.items():
        work.set(ours + key, value, by=at + key, was=values.get(at + key))


# ---------------------------------------------------------------------------- asynchronous training


def _translate_async(work: Adapted, values: _Values, problems: list[str]) -> None:
    at = "grpo.async_grpo.max_trajectory_age_steps"
    age = values.get(at, 1)
    written = _at(work.tree, "grpo.max_staleness")
    if written is not None and written.value != age:
        problems.append(
            f"{written.place}: grpo.max_staleness={written.value} and {at}={age} say the same "
            "thing; keep one"
        )
        return
    by = at if _at(work.tree, at) is not None else "grpo.async_grpo.enabled"
    work.set("grpo.max_staleness", age, by=by, was=age)
    work.sentences.append(
        f"grpo.async_grpo is translated: grpo.max_staleness={age}, the steps that generation may "
        "run ahead of training"
    )


def _pack_where_rows_are_divided(work: Adapted) -> None:
    """Packing where a file divides padded rows over context-parallel ranks, as NeMo RL does.

    Laurel divides token forests. They give the same sums as rows, so the run is the same.
    """
    size = _at(work.tree, _DTENSOR + "context_parallel_size")
    key = "policy.sequence_packing.enabled"
    packing = _at(work.tree, key)
    if size is None or packing is None or packing.value is not False or _override_in(packing):
        return
    if not isinstance(size.value, int) or size.value < 2:
        return
    work.set(key, True, by=key, was=False)
    work.set("policy.dynamic_batching.enabled", False, by=key, was=False)
    work.sentences.append(
        f"policy.sequence_packing.enabled is true: {_DTENSOR}context_parallel_size={size.value} "
        "divides token forests here, which give the same sums as padded rows"
    )


# ------------------------------------------------------------------------------------------- trees


def _number(values: _Values, key: str, default: float | None = None) -> float:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _UntranslatableError(key, f"must be a number, not {value!r}")
    return float(value)


def _at(tree: YamlNode, key: str) -> YamlNode | None:
    return find_node(tree, key.split("."))


def _override_in(node: YamlNode) -> str | None:
    """The override that wrote a part of a node, if one did."""
    if isinstance(node.value, dict):
        return next((o for child in node.value.values() if (o := _override_in(child))), None)
    if isinstance(node.value, list):
        return next((o for child in node.value if (o := _override_in(child))), None)
    return node.place if node.place.startswith("override '") else None
