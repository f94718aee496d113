"""vLLM as a plug-in: its settings, and what it makes of them. vLLM is imported when it starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from laurel.config.yaml_tree import MAY_CHANGE, Section, foreign
from laurel.plugins import Engine, EngineNeeds, EngineStart

if TYPE_CHECKING:
    from laurel.config.environments import JudgeConfig
    from laurel.config.grpo import GenerationConfig, GRPOPolicyConfig
    from laurel.generation.vllm.engine import VllmEngine
    from laurel.rewards.spec import ScorerSpec
    from laurel.rewards.vllm import VllmScorer

COLDEST, HOTTEST = 0.01, 2.0
"""The lowest and highest temperature that vLLM accepts besides 0; it would raise lower ones."""


class VllmConfig(Section):
    """The settings of vLLM's engine."""

    foreign_keys: ClassVar[frozenset[str]] = foreign("VllmConfig")

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

    foreign_keys: ClassVar[frozenset[str]] = foreign("VllmConfig", "ScoringVllmConfig")

    tensor_parallel_size: Annotated[int, MAY_CHANGE] = Field(default=1, ge=1)
    """GPUs that the model is spread over."""
    gpu_memory_utilization: Annotated[float, MAY_CHANGE] = Field(default=0.9, gt=0, lt=1)
    """Share of a GPU's memory that it may take."""


def vllm_section(generation: GenerationConfig) -> VllmConfig:
    """Return the section `vllm_cfg` of `policy.generation`."""
    found: VllmConfig = generation.settings_of(Engine, "vllm")[1]
    return found


class Vllm(Engine):
    """vLLM, in processes of its own."""

    section = VllmConfig
    scoring_section = ScoringVllmConfig
    package = "vllm"
    extra = "vllm"
    is_automatic = True

    def check(self, settings: GRPOPolicyConfig) -> None:
        """Check that prompts fit into the engine that fit into the policy."""
        section = vllm_section(settings.generation)
        engine, whole = section.max_model_len, settings.max_total_sequence_length
        if engine is not None and engine < whole:
            raise ValueError(
                f"policy.generation.vllm_cfg.max_model_len={engine} is less than "
                f"policy.max_total_sequence_length={whole}: prompts that fit into the one would be "
                "refused by the other; leave it out"
            )

    def make(self, section: VllmConfig, start: EngineStart) -> VllmEngine:
        """Start vLLM."""
        from laurel.generation.vllm.engine import VllmEngine

        return VllmEngine(start.directory, start.spec, precision=start.precision, probe=start.probe)

    def needs(self, section: VllmConfig) -> EngineNeeds:
        """Return what a replica takes of the devices."""
        return EngineNeeds(
            tensor_parallel_size=section.tensor_parallel_size,
            pipeline_parallel_size=section.pipeline_parallel_size,
            precision=None if section.precision == "auto" else section.precision,
            max_length=section.max_model_len,
            memory_share=section.gpu_memory_utilization,
            through_host=section.weight_loading == "files",
        )

    def open_scorer(
        self, section: ScoringVllmConfig, model: ScorerSpec, say: Callable[[str], None]
    ) -> VllmScorer:
        """Start vLLM with a reward model, and check that it scores as it did when it was saved."""
        from laurel.rewards.vllm import load_vllm_scorer

        return load_vllm_scorer(section, model, say=say)

    def for_judge(self, section: ScoringVllmConfig, judge: JudgeConfig) -> VllmConfig:
        """Return the settings of an engine whose weights never change."""
        if 0 < judge.temperature < COLDEST or judge.temperature > HOTTEST:
            raise ValueError(
                f"temperature={judge.temperature:g}: vLLM takes 0 and {COLDEST:g} to {HOTTEST:g}"
            )
        return VllmConfig(
            load_format="safetensors",  # pickled weights could run code
            weight_loading="files",  # none ever come
            tensor_parallel_size=section.tensor_parallel_size,
            gpu_memory_utilization=section.gpu_memory_utilization,
        )

    def check_room(self, section: ScoringVllmConfig) -> None:
        """Check that the share of the GPU is said."""
        if "gpu_memory_utilization" not in section.model_fields_set:
            raise ValueError(
                f"vLLM would take {section.gpu_memory_utilization:g} of the memory of the GPU on "
                "which the policy trains. Set vllm_cfg.gpu_memory_utilization to the share that "
                "the policy leaves"
            )
