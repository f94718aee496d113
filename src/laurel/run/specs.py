"""What the parts of a run are given: their own settings, out of the run's configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from laurel.config.grpo import GRPOPolicyConfig, GRPORun
from laurel.config.policy import PolicyConfig
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.sft import SFTPolicyConfig, SFTRun
from laurel.models.spec import ModelSpec

if TYPE_CHECKING:
    from laurel.generation.requests import GeneratorSpec
    from laurel.rewards.open import ScorerSpec
    from laurel.training.batches import StepOrder


def model_spec(policy: PolicyConfig) -> ModelSpec:
    """The model that the section `policy` describes."""
    is_named = policy.scratch is None or "model_name" in policy.model_fields_set
    parallel = policy.dtensor_cfg
    return ModelSpec(
        name=policy.model_name if is_named else None,
        revision=policy.revision,
        trust_remote_code=policy.trust_remote_code,
        safetensors_only=policy.safetensors_only,
        config_overrides=policy.hf_config_overrides,
        scratch=policy.scratch,
        tokenizer=policy.tokenizer,
        head=policy.reward_model_cfg,
        precision=policy.precision,
        reads_forests=policy.sequence_packing.enabled,
        logprob_chunk_size=(
            policy.logprob_chunk_size
            if isinstance(policy, GRPOPolicyConfig | SFTPolicyConfig)
            else None
        ),
        lora=parallel.lora_cfg if parallel.lora_cfg.enabled else None,
        activation_checkpointing=parallel.activation_checkpointing,
        tensor_parallel_size=parallel.tensor_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        cpu_offload=parallel.cpu_offload,
        parallel_plan=parallel.custom_parallel_plan,
    )


def scorer_spec(asked: ScorerSpec, policy: PolicyConfig) -> ScorerSpec:
    """A scorer as it was asked for, of a model that the section `policy` tells how to load."""
    length = asked.max_length or policy.max_total_sequence_length
    return replace(asked, max_length=length, model=model_spec(policy))


def generator_spec(config: GRPORun, end_ids: Iterable[int]) -> GeneratorSpec:
    """An engine of a run of GRPO, in whose chats these tokens end a turn."""
    from laurel.generation.requests import GeneratorSpec

    return GeneratorSpec(
        settings=config.policy.generation,
        max_length=config.policy.max_total_sequence_length,
        end_ids=tuple(end_ids),
        seed=config.grpo.seed,
    )


def step_order(config: RewardTrainingRun | SFTRun, num_rows: int) -> StepOrder:
    """The rows of each step: in the order of the file, or shuffled by the seed of the run."""
    from laurel.training.batches import StepOrder

    section = config.rm if isinstance(config, RewardTrainingRun) else config.sft
    size = config.policy.train_global_batch_size
    return StepOrder(num_rows, size, shuffle=config.data.shuffle, seed=section.seed)
