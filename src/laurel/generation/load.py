"""Engines that are made where they are needed: values that travel, and become an engine there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from laurel.config.policy import TokenizerConfig
from laurel.generation.requests import GeneratorSpec
from laurel.models.spec import ModelSpec
from laurel.protocols import Generator

if TYPE_CHECKING:
    from laurel.generation.transformers.engine import TransformersEngine
    from laurel.generation.vllm.engine import VllmEngine

EngineMaker = Callable[[], Generator]
"""Called in the process that shall generate. It must be picklable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersMaker:
    """Loads the policy and makes a `TransformersEngine` of it, which has the only copy of it."""

    model: ModelSpec
    """The learner's, or the same one read from a directory (`from_directory`)."""
    spec: GeneratorSpec
    device: str = "auto"
    """The setting `cluster.device`."""
    cpu_threads: int | None = None
    """The setting `cluster.cpu_threads`."""
    texts: tuple[str, ...] = ()
    """Texts that a tokenizer from scratch is trained on; the learner's is trained on the same."""

    def __call__(self) -> TransformersEngine:
        """Load and make.

        Raises:
            ConfigError: A GPU is asked for and there is none here.
            ModelError: See `load_policy` and `TransformersEngine`.
        """
        from laurel.generation.transformers.engine import TransformersEngine
        from laurel.models.loading.policy import load_policy
        from laurel.workers.process import prepare

        seed = self.spec.seed
        loaded = load_policy(
            # New adapters change nothing, and weights of later steps come with them merged in.
            replace(self.model, lora=None, activation_checkpointing=False),
            seed=seed,
            max_length=self.spec.max_length,
            device=prepare(self.device, cpu_threads=self.cpu_threads, seed=seed),
            texts=self.texts,
        )
        return TransformersEngine(
            loaded.model,
            loaded.tokenizer,
            end_ids=self.spec.end_ids,
            max_concurrent=self.spec.settings.max_concurrent,
            shares_weights=False,
            owns_model=True,
            weight_version=self.spec.weight_version,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmMaker:
    """A factory of a `VllmEngine` that reads its model from a directory.

    The engine has no probe: `GeneratorReplicas` compares its log-probabilities with the learner's.
    """

    directory: str
    """A directory with weights and tokenizer that every node can read."""
    spec: GeneratorSpec
    precision: str
    """The learner's `policy.precision`."""

    def __call__(self) -> VllmEngine:
        """Start vLLM.

        Raises:
            LaurelError: See `VllmEngine`.
        """
        from laurel.generation.vllm.engine import VllmEngine

        return VllmEngine(self.directory, self.spec, precision=self.precision, probe=None)


def from_directory(model: ModelSpec, directory: Path | str) -> ModelSpec:
    """Replace the source of a model by a directory with its weights and its tokenizer."""
    return replace(model, name=str(directory), scratch=None, tokenizer=TokenizerConfig())
