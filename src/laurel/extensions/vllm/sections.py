"""The settings of vLLM in a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from laurel.config.yaml_tree import MAY_CHANGE, Section
from laurel.plugins import Engine

if TYPE_CHECKING:
    from laurel.config.grpo import GenerationConfig

COLDEST, HOTTEST = 0.01, 2.0
"""The lowest and highest temperature that vLLM accepts besides 0; it would raise lower ones."""


class VllmConfig(Section):
    """The settings of vLLM's engine."""

    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of its weights; `auto` is `policy.precision`."""
    tensor_parallel_size: Annotated[int, MAY_CHANGE] = Field(default=1, ge=1)
    """Devices of one node that share each layer."""
    pipeline_parallel_size: Annotated[int, MAY_CHANGE] = Field(default=1, ge=1)
    """Devices of one node that share the layers."""
    gpu_memory_utilization: Annotated[float, MAY_CHANGE] = Field(default=0.6, gt=0, lt=1)
    """Share of a GPU's memory that it may take. Default: the policy's weights are on the same
    device."""
    max_model_len: Annotated[int | None, MAY_CHANGE] = Field(default=None, ge=2)
    """Longest prompt with its completion; null is `policy.max_total_sequence_length`."""
    enforce_eager: Annotated[bool, MAY_CHANGE] = False
    """Do not capture CUDA graphs. Default: graphs make decoding faster."""
    load_format: Annotated[str, MAY_CHANGE] = "auto"
    """How vLLM reads the first weights."""
    weight_loading: Annotated[Literal["auto", "ipc", "files"], MAY_CHANGE] = "auto"
    """How vLLM's processes get new weights from the process that started them: `ipc`, GPU memory
    that both have open (CUDA IPC), or `files` in memory. The run logs the choice of `auto` and its
    reason. Default: `ipc` where a try shows that it works (one process that sees vLLM's GPUs)."""


class ScoringVllmConfig(Section):
    """vLLM's own settings, for a reward model."""

    tensor_parallel_size: Annotated[int, MAY_CHANGE] = Field(default=1, ge=1)
    """GPUs that the model is spread over."""
    gpu_memory_utilization: Annotated[float, MAY_CHANGE] = Field(default=0.9, gt=0, lt=1)
    """Share of a GPU's memory that it may take."""


def vllm_section(generation: GenerationConfig) -> VllmConfig:
    """Return the section `vllm_cfg` of `policy.generation`."""
    section: VllmConfig = generation.settings_of(Engine, "vllm")[1]
    return section
