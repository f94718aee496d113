"""Engines that are made where they are needed: values that travel, and become an engine there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from laurel.config.grpo import GenerationConfig
from laurel.config.policy import ClusterConfig, PolicyConfig
from laurel.protocols import Generator

if TYPE_CHECKING:
    from laurel.generation.transformers.engine import TransformersEngine
    from laurel.generation.vllm.engine import VllmEngine

EngineMaker = Callable[[], Generator]
"""Called in the process that shall draw. It must be picklable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersMaker:
    """Loads the policy and makes a `TransformersEngine` of it, which has the only copy of it."""

    policy: PolicyConfig
    """As the learner's. To begin with a directory, name it: see `from_directory`."""
    cluster: ClusterConfig
    """Device and threads."""
    seed: int
    """As the learner's: of a policy from scratch."""
    end_ids: tuple[int, ...]
    """Tokens that end every completion."""
    max_length: int
    """Longest prompt with its completion."""
    max_concurrent: int = 256
    texts: tuple[str, ...] = ()
    """What a tokenizer from scratch learns from, as the learner's."""
    weight_version: int = 0
    """Of the weights that are loaded."""

    def __call__(self) -> TransformersEngine:
        """Load and make.

        Raises:
            ConfigError: A GPU is asked for and there is none here.
            ModelError: See `load_policy` and `TransformersEngine`.
        """
        from laurel.generation.transformers.engine import TransformersEngine
        from laurel.models.loading.policy import load_policy
        from laurel.workers.process import prepare

        loaded = load_policy(
            _without_training(self.policy),
            seed=self.seed,
            max_length=self.max_length,
            device=prepare(self.cluster, seed=self.seed),
            texts=self.texts,
        )
        return TransformersEngine(
            loaded.model,
            loaded.tokenizer,
            end_ids=self.end_ids,
            max_concurrent=self.max_concurrent,
            shares_weights=False,
            owns_model=True,
            weight_version=self.weight_version,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmMaker:
    """Makes a `VllmEngine` of a directory. What it computes, `GeneratorReplicas` compares."""

    directory: str
    """With weights and tokenizer; every node must see it."""
    generation: GenerationConfig
    max_length: int
    """Longest prompt with its completion."""
    precision: str
    """Of the learner."""
    end_ids: tuple[int, ...]
    """Tokens that end every completion."""
    seed: int = 0
    weight_version: int = 0
    """Of the weights in the directory."""

    def __call__(self) -> VllmEngine:
        """Start vLLM.

        Raises:
            LaurelError: See `VllmEngine`.
        """
        from laurel.generation.vllm.engine import VllmEngine

        return VllmEngine(
            self.directory,
            generation=self.generation,
            max_length=self.max_length,
            precision=self.precision,
            end_ids=self.end_ids,
            probe=None,
            seed=self.seed,
            weight_version=self.weight_version,
        )


def from_directory(policy: PolicyConfig, directory: Path | str) -> PolicyConfig:
    """The same policy, begun with the weights and the tokenizer of a directory."""
    tokenizer = type(policy.tokenizer)()
    return policy.model_copy(
        update={"model_name": str(directory), "scratch": None, "tokenizer": tokenizer}
    )


def _without_training(policy: PolicyConfig) -> PolicyConfig:
    """The same weights without what only training needs: adapters begin as nothing, and come
    merged with the weights of later steps."""
    parallel = policy.dtensor_cfg
    plain = parallel.model_copy(
        update={
            "activation_checkpointing": False,
            "lora_cfg": parallel.lora_cfg.model_copy(update={"enabled": False}),
        }
    )
    return policy.model_copy(update={"dtensor_cfg": plain})
