"""vLLM as a plug-in (`laurel.engines`); vLLM itself is imported when it starts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, get_args

from laurel.config.policy import Precision
from laurel.extensions.vllm.sections import (
    COLDEST,
    HOTTEST,
    ScoringVllmConfig,
    VllmConfig,
    vllm_section,
)
from laurel.plugins import EngineNeeds, EngineStart, EngineThatScores, EngineThatServes

if TYPE_CHECKING:
    from laurel.config.environments import JudgeConfig, ModelServerConfig
    from laurel.config.grpo import GRPOPolicyConfig
    from laurel.extensions.vllm.engine import VllmEngine
    from laurel.extensions.vllm.scorer import VllmScorer
    from laurel.rewards.spec import ScorerSpec


class Vllm(EngineThatScores, EngineThatServes):
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
        from laurel.extensions.vllm.engine import VllmEngine

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
        from laurel.extensions.vllm.scorer import load_vllm_scorer

        assert model.found is not None
        return load_vllm_scorer(model.found, model, say=say)

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

    def serve_command(
        self,
        section: ModelServerConfig,
        host: str,
        port: int,
        *,
        on_gpu: bool,
        rests: bool,
    ) -> tuple[Sequence[str], Mapping[str, str]]:
        """Return the command of vLLM's server."""
        from laurel.extensions.vllm.settings import ENVIRONMENT, cpu_arguments, cpu_environment

        added = dict(ENVIRONMENT)
        options: dict[str, object] = {"model": section.model_name, "host": host, "port": port}
        options |= {"tensor-parallel-size": section.tensor_parallel_size}
        command = [sys.executable, "-c", _SERVE]
        if not on_gpu:
            added |= cpu_environment(section.tensor_parallel_size, is_eager=True)
            options |= {key.replace("_", "-"): value for key, value in cpu_arguments().items()}
            command.append("--enforce-eager")
        if rests:
            added |= {"VLLM_SERVER_DEV_MODE": "1"}  # otherwise it has no /sleep
            command.append("--enable-sleep-mode")
        # What the user gives comes last, and counts.
        return [
            *command,
            *(f"--{key}={value}" for key, value in options.items()),
            *section.arguments,
        ], added

    def served_needs(self, section: ModelServerConfig) -> EngineNeeds:
        """Return what a server takes of its devices, as its arguments say."""
        words = " ".join(section.arguments).replace("=", " ").split()
        arguments = dict(pairwise(words))  # the last of a name counts, as for vLLM
        dtype = arguments.get("--dtype", "")
        dtype = {"half": "float16", "float": "float32"}.get(dtype, dtype)
        needs = EngineNeeds(
            tensor_parallel_size=section.tensor_parallel_size,
            precision=dtype if dtype in get_args(Precision) else None,
        )
        with suppress(KeyError, ValueError):
            return replace(needs, memory_share=float(arguments["--gpu-memory-utilization"]))
        return needs


_SERVE = (
    "import runpy, warnings; warnings.simplefilter('ignore'); "
    "runpy.run_module('vllm.entrypoints.openai.api_server', run_name='__main__')"
)
"""vLLM's server, whose command `vllm` asks for a package that a CPU's build has under another
name."""
