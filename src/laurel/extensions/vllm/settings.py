"""Translates Laurel's configuration to the arguments and environment variables of vLLM."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from laurel.config.grpo import GenerationConfig
from laurel.errors import ConfigError
from laurel.extensions.vllm.sections import vllm_section

WORKER = "laurel.extensions.vllm.worker.LaurelWorker"
"""Import path of the class that extends vLLM's worker."""
CPU_CACHE_BYTES = 1 << 30
"""Bytes for keys and values on a CPU; `vllm_kwargs.kv_cache_memory_bytes` overrides it."""

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}
"""Environment variables that keep vLLM's processes quiet, on this machine, and without usage
reports."""
EAGER_ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "1"}
"""Environment variables that disable compilation. Even in eager mode, vLLM compiles a helper of its
CPU sampler, which delays the first token by ten seconds."""


def cpu_environment(num_workers: int, *, is_eager: bool) -> dict[str, str]:
    """Return the environment variables for vLLM's processes on a CPU."""
    variables = dict(EAGER_ENVIRONMENT) if is_eager else {}
    if num_workers > 1:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = _cores_of_each(num_workers)
    return variables


def _cores_of_each(num_workers: int) -> str:
    """Return an equal part of the cores for each process.

    By default vLLM 0.32 binds each process to a memory node of its own, and does not start where
    there are fewer nodes than processes.
    """
    cores = sorted(os.sched_getaffinity(0))  # where there is none, vLLM has no CPU build either
    each = len(cores) // num_workers
    if not each:
        return "nobind"
    parts = [cores[i * each : (i + 1) * each] for i in range(num_workers)]
    return "|".join(",".join(map(str, part)) for part in parts)


def engine_dtype(generation: GenerationConfig, policy_precision: str) -> str:
    """Return the dtype of the engine's weights: its own setting, or with `auto` the policy's."""
    precision = vllm_section(generation).precision
    return policy_precision if precision == "auto" else precision


def engine_arguments(
    model_dir: str,
    generation: GenerationConfig,
    *,
    max_length: int,
    precision: str,
    seed: int,
    on_cpu: bool,
    known: Collection[str],
) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs`.

    Raises:
        ConfigError: `vllm_kwargs` has an unknown argument, or one that another setting decides.
    """
    settings = vllm_section(generation)
    decided = {
        "model": model_dir,
        "max_model_len": max_length,
        "dtype": precision,
        "seed": seed,
        "max_num_seqs": generation.max_concurrent,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        # The directory has the policy's weights; a dummy start would be refused by the probe.
        "load_format": "auto" if settings.load_format == "dummy" else settings.load_format,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": WORKER,
        "enable_sleep_mode": generation.colocated.enabled and not on_cpu,
    }
    if not on_cpu and settings.weight_loading != "files":
        decided["weight_transfer_config"] = {"backend": "ipc"}
    if settings.tensor_parallel_size * settings.pipeline_parallel_size > 1:
        # In an actor vLLM would start actors of its own, in slots that are taken.
        decided["distributed_executor_backend"] = "mp"
    free: dict[str, Any] = {
        "enforce_eager": settings.enforce_eager or on_cpu,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if on_cpu:
        free |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_length, 4096),
            **cpu_arguments(),
        }
    _check_kwargs(generation.vllm_kwargs, decided, known)
    return decided | free | generation.vllm_kwargs


def cpu_arguments() -> dict[str, Any]:
    """Return the arguments that every engine on a CPU has."""
    # Whole blocks are what prompts share; vLLM's 128 tokens are longer than many a prompt.
    arguments = {"block_size": 32}
    if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        arguments["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    return arguments


def _check_kwargs(
    kwargs: Mapping[str, Any], decided: Mapping[str, Any], known: Collection[str]
) -> None:
    for key in kwargs:
        where = f"policy.generation.vllm_kwargs.{key}"
        if key in decided:
            raise ConfigError(
                f"{where}: Laurel sets this argument from the rest of the configuration; "
                "take it out, and change the policy's own settings instead"
            )
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{where} is no argument of vLLM's AsyncEngineArgs{hint}")


@contextmanager
def environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the context, except those that the user has set."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
