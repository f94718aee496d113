"""NeMo RL's files, which load unchanged: what of them means nothing here, and why.

Facts: NVIDIA-NeMo/RL at 7ea279abf (2026-08-22, main): `examples/configs/rm.yaml`, `sft.yaml`,
`grpo_math_1B.yaml`. It has no defaults in code: its files say everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laurel.config.importing.engine import SCHEMAS, Imported
from laurel.config.importing.rules import Run
from laurel.config.importing.work import Entry
from laurel.config.load import load_config
from laurel.config.source import read_file
from laurel.config.tree import Node, plain

SYSTEM = "NeMo RL"

UNNEEDED: dict[str, tuple[str, ...]] = {
    "of other commands": ("rm", "sft", "grpo", "loss_fn", "env"),
    "of other backends": (
        "megatron_cfg", "_v2", "automodel_kwargs", "env_vars", "dp_replicate_size", "sglang_cfg",
        "trtllm_cfg", "dynamo_cfg", "mcore_generation_config", "use_deep_gemm", "use_triton",
        "num_last_layers_in_bf16", "num_first_layers_in_bf16", "real_quant_export_cpu_offload",
        "model_save_format", "save_consolidated", "model_cache_dir", "model_repo_id", "is_peft",
        "peft_config", "data_plane", "expert_parallel_size",
    ),
    "Laurel moves weights into the engine itself": (
        "refit_buffer_size_gb", "refit_transport", "refit_cfg", "http_refit_api_key_env_var",
        "http_refit_server_port", "zmq_refit_server_port",
        "reset_encoder_cache_after_weight_update",
    ),
    "only speed or memory": (
        "use_fastokens", "clear_cache_every_n_steps", "offload_optimizer_for_logprob",
        "logprob_batch_size", "logprob_chunk_size", "logprob_mb_tokens", "generation_batch_size",
        "make_sequence_length_divisible_by", "sequence_length_round", "microbatch_order",
        "algorithm", "calculate_advantages_on_gpu", "async_engine", "use_tqdm",
        "kv_cache_dtype", "skip_reference_policy_logprobs_calculation",
    ),
    "one place says it: policy.dtensor_cfg.activation_checkpointing": (
        "activation_checkpointing_enabled",
    ),
    "Laurel reads and renders rows itself; the scoring contract settles special tokens": (
        "add_bos", "add_eos", "add_generation_prompt", "add_system_prompt", "num_workers",
        "use_multiple_dataloader", "num_prompts_per_dataloader", "custom_dataloader", "processor",
        "env_name", "task_name", "download_dir", "output_dir", "skip_tokenizer_init",
    ),
    "the reward model that judges is not trained and draws nothing": (
        "optimizer", "scheduler", "max_grad_norm", "generation",
    ),
    "Laurel's engines and processes find their own ports and figures": (
        "port_range_low", "port_range_high", "master_port_range_low", "master_port_range_high",
        "enable_vllm_metrics_logger", "vllm_metrics_logger_interval", "monitor_gpus",
        "gpu_monitoring", "log_nemo_gym_full_result_tables", "logprobs_mode", "segment_size",
    ),
    "there is one checker: math-verify": ("math_verify_impl",),
    "off there": ("should_use_nemo_gym", "opd", "draft"),
}  # fmt: skip
"""Why a key is not needed, and the last parts of such keys."""

REFUSED: dict[str, str] = {
    "async_grpo": "grpo.max_staleness=max_trajectory_age_steps and "
    "loss_fn.use_importance_sampling_correction=true",
    "nemo_gym": "write an environment: env.custom",
    "vlm": "texts only",
    "reward_penalties": "grpo.reward_shaping, or an environment of your own",
    "invalid_tool_call_advantage": "tools are an environment's here",
    "malformed_thinking_advantage": "let an environment judge the form",
    "seq_logprob_error_threshold": "loss_fn.truncated_importance_sampling_type=seq-mask-tis leaves "
    "out completions whose probabilities differ",
    "on_policy_distillation": "no distillation from a teacher",
    "swanlab_enabled": "Laurel logs to wandb, tensorboard and mlflow",
    "swanlab": "Laurel logs to wandb, tensorboard and mlflow",
    "val_start_at": "validation begins with grpo.val_period, or grpo.val_at_start",
    "ft_save_period": "checkpointing.save_period",
    "ft_keep_latest_k": "checkpointing.keep_top_k",
    "dropout_position": "dropout is in front of adapters",
    "lora_A_init": "adapters begin as peft begins them",
    "tool_key": "rows with tools are not rendered",
    "use_preserving_dataset": "columns are read as Laurel reads them",
    "filter_dataset": "data.max_samples and data.max_input_seq_length limit rows",
}
"""Keys that may change what a run does, and what to do instead."""

_OFF: tuple[Any, ...] = (None, False, -1, 0, [], {})


def import_file(path: Path, run: Run) -> Imported:
    """Check a file of NeMo RL, and say what of it is ignored.

    Raises:
        ConfigError: As `load_config`.
    """
    loaded = load_config(SCHEMAS[run], path)
    tree = read_file(path)
    entries: list[Entry] = []
    values: dict[str, Any] = {}
    for key, value in _leaves(tree, loaded.ignored):
        why, refused = _fate(key, value, loaded.ignored)
        if why:
            entries.append(Entry(key=key, value=value, why=why,
                                 fate="not carried" if refused else "not needed"))  # fmt: skip
            continue
        ours = SCHEMAS[run].other_names.get(key, key)
        values[ours] = value
        entries.append(Entry(key=key, fate="carried", value=value, to={ours: value}))
    return Imported(
        system=SYSTEM, run=run, values=values, origins=dict.fromkeys(values, ""),
        entries=tuple(entries), config=loaded.config,
    )  # fmt: skip


_TAKEN_WHOLE = ("kwargs", "chat_template_kwargs", "hf_config_overrides", "labels")


def _leaves(
    tree: Node, ignored: tuple[str, ...], path: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Every key with a value; a block that is ignored, or taken as a whole, is one."""
    for name, child in tree.value.items():
        here = ".".join((*path, name))
        is_block = isinstance(child.value, dict) and child.value
        if is_block and name not in _TAKEN_WHOLE and here not in ignored:
            yield from _leaves(child, ignored, (*path, name))
        else:
            yield here, plain(child)


def reason(key: str) -> tuple[str, bool] | None:
    """Why a key that is ignored is, and whether something is lost; None for one nobody knows."""
    last = key.rpartition(".")[2]
    if last in REFUSED:
        return REFUSED[last], True
    return next(((why, False) for why, names in UNNEEDED.items() if last in names), None)


def _fate(key: str, value: Any, ignored: tuple[str, ...]) -> tuple[str, bool]:
    """Why a key is not carried, and whether something is lost; no reason for one that is."""
    above = next((k for k in ignored if key == k or key.startswith(k + ".")), None)
    if above is None:
        return "", False
    why, refused = reason(above) or ("not known to this version of Laurel", True)
    is_off = any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in _OFF)
    if isinstance(value, dict):
        is_off = is_off or value.get("enabled") is False
    return ("it is off" if refused and is_off else why), refused and not is_off
