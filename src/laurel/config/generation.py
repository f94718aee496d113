"""The `policy.generation` section: how completions are drawn. Names follow NeMo RL's files."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from laurel.config.environments import FOREIGN_VLLM_KEYS, ResourcesConfig
from laurel.config.section import Section


class VllmConfig(Section):
    """vLLM's own settings."""

    foreign_keys: ClassVar[frozenset[str]] = FOREIGN_VLLM_KEYS

    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of its weights; `auto` is `policy.precision`."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices of one node that share each layer."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Devices of one node that share the layers."""
    gpu_memory_utilization: float = Field(default=0.6, gt=0, lt=1)
    """Share of a GPU's memory that it may take. Default: the policy's weights are on the same
    device."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt with its completion; null is `policy.max_total_sequence_length`."""
    enforce_eager: bool = False
    """Do not capture CUDA graphs. Default: graphs make decoding faster."""
    load_format: str = "auto"
    """How vLLM reads the first weights."""

    @property
    def num_devices(self) -> int:
        """Devices that hold the model once between them."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class ColocatedConfig(Section):
    """Whether generation shares the policy's devices."""

    enabled: bool = True
    """Take turns on the same devices. Default: no device waits for another role."""
    resources: ResourcesConfig = ResourcesConfig()
    """Otherwise: its own."""


class GenerationConfig(Section):
    """How completions are drawn."""

    foreign_keys: ClassVar[frozenset[str]] = frozenset(
        {"refit_transport", "refit_cfg", "mcore_generation_config", "sglang_cfg", "trtllm_cfg",
         "trtllm_kwargs", "dynamo_cfg", "port_range_low", "port_range_high", "bad_words",
         "use_async_rollouts", "real_quant", "real_quant_ignore", "real_quant_export_cpu_offload",
         "quant_cfg"}
    )  # fmt: skip

    backend: Literal["auto", "transformers", "vllm"] = "auto"
    """`transformers`: in this process, with the learner's own weights; `vllm`: an engine of its own
    (extra `vllm`). `auto`: vllm where it is installed and a GPU is there, else transformers.
    Default: the in-process engine needs no second copy of the weights."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest completion of one turn; null: up to `policy.max_total_sequence_length`."""
    temperature: float = Field(default=1.0, ge=0)
    """Of sampling. The learner's log-probabilities are taken at the same temperature. Default: the
    distribution that is trained, as it is."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw only from the likeliest tokens that make up this share. Default: no tail is cut: what is
    never drawn is never learned from."""
    top_k: int | None = Field(default=None, ge=1)
    """Draw only from so many likeliest tokens. Default: likewise."""
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
    """Completions that are drawn side by side, at most (transformers). Default: a bound on the
    memory of keys and values."""
    timeout_seconds: float = Field(default=1800.0, gt=0)
    """Seconds without any finished completion after which the engine is given up. Default: half an
    hour without one completion is a hang."""
    vllm_cfg: VllmConfig = VllmConfig()
    """See there."""
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine."""
    colocated: ColocatedConfig = ColocatedConfig()
    """See there."""
    weight_transfer: Literal["auto", "object_store", "broadcast", "ipc"] = "auto"
    """How weights come to engines in other processes: through Ray's object store, told to all at
    once by the learner's first rank (gloo; NCCL between GPUs), or read from the memory of a rank on
    the same node (`ipc`; of a GPU that both have in turns, by CUDA IPC). The run says which `auto`
    is, and why. In one process nothing travels. Default: the broadcast, which was the quickest
    wherever it was measured (docs/benchmarks.md)."""
    weight_probe_tolerance: float | None = Field(default=None, gt=0)
    """Largest difference between the engine's and the learner's log-probabilities of a probe after
    each transfer of weights, beyond which the run stops. Null: 1e-3 in float32, 0.2 in bfloat16."""

    @field_validator("stop_strings")
    @classmethod
    def _stops_are_texts(cls, stops: list[str] | None) -> list[str] | None:
        if "" in (stops or ()):
            raise ValueError("an empty stop string would end every completion before it begins")
        return stops
