"""Laurel's configuration in vLLM's words."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from laurel.config.grpo import GenerationConfig
from laurel.errors import ConfigError, MissingDependencyError

CPU_CACHE_BYTES = 1 << 30
"""Memory for K/V on a CPU; `vllm_kwargs.kv_cache_memory_bytes` changes it."""

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
"""Keeps vLLM's processes quiet, on this machine, and without reports to its authors."""
EAGER_ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "1"}
"""On a CPU, vLLM compiles a helper of its sampler even so: ten seconds for the first token."""


def cpu_environment(num_workers: int, *, is_eager: bool) -> dict[str, str]:
    """Variables for vLLM's processes on a CPU.

    Args:
        num_workers: Processes that hold the model once between them.
        is_eager: Nothing is to be compiled.
    """
    found = dict(EAGER_ENVIRONMENT) if is_eager else {}
    if num_workers > 1:
        found["VLLM_CPU_OMP_THREADS_BIND"] = _cores_of_each(num_workers)
    return found


def _cores_of_each(num_workers: int) -> str:
    """An equal part of the cores for each process.

    By itself vLLM 0.32 gives each a memory node of its own, and does not start where there are
    fewer of those.
    """
    cores = sorted(os.sched_getaffinity(0))  # where there is none, vLLM has no CPU build either
    each = len(cores) // num_workers
    if not each:
        return "nobind"
    parts = [cores[i * each : (i + 1) * each] for i in range(num_workers)]
    return "|".join(",".join(map(str, part)) for part in parts)


def check_has_vllm(key: str) -> None:
    """Refuse a setting that needs vLLM where it is not installed.

    Raises:
        MissingDependencyError: It is not.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError.of("vllm", extra="vllm", purpose=key)


@contextmanager
def importing_vllm(purpose: str) -> Iterator[None]:
    """Import from vLLM in here: without the warnings of what it imports itself.

    Args:
        purpose: What needs it, for the error.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MissingDependencyError.of("vllm", extra="vllm", purpose=purpose) from error


def engine_dtype(generation: GenerationConfig, policy_precision: str) -> str:
    """Dtype of the engine's weights."""
    chosen = generation.vllm_cfg.precision
    return policy_precision if chosen == "auto" else chosen


def engine_arguments(
    model_dir: str,
    generation: GenerationConfig,
    *,
    max_length: int,
    precision: str,
    seed: int,
    worker: str,
    on_cpu: bool,
    known: Collection[str],
) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs`.

    Args:
        worker: Import path of the worker's extension.
        known: Names of all arguments there are.

    Raises:
        ConfigError: `vllm_kwargs` has one that there is not, or that another key decides.
    """
    settings = generation.vllm_cfg
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
        "worker_extension_cls": worker,
        "enable_sleep_mode": generation.colocated.enabled and not on_cpu,
    }
    if settings.num_devices > 1:
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
            # Whole blocks are what prompts share; vLLM's 128 tokens are longer than many a prompt.
            "block_size": 32,
        }
        if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            free["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    _check_kwargs(generation.vllm_kwargs, decided, known)
    return decided | free | generation.vllm_kwargs


def _check_kwargs(
    given: Mapping[str, Any], decided: Mapping[str, Any], known: Collection[str]
) -> None:
    for key in given:
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
    """Variables for the processes to be started, where the user has not set them."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
