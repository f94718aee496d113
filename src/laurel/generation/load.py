"""The settings of a generation engine, and picklable factories that make it in a process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from laurel.config.grpo import GenerationConfig
from laurel.config.policy import TokenizerConfig
from laurel.models.files import local_files
from laurel.models.spec import ModelSpec
from laurel.plugins import Engine, EngineStart
from laurel.protocols import Generator

if TYPE_CHECKING:
    from laurel.generation.transformers.engine import TransformersEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSpec:
    """Settings of a generation engine that hold for every backend.

    The weights are passed separately, and each request has its own sampling parameters.
    """

    settings: GenerationConfig = field(default_factory=GenerationConfig)
    """The section `policy.generation` of the configuration, without its sampling parameters, which
    engines ignore."""
    max_length: int
    """Most tokens of a prompt and its completion together."""
    end_ids: tuple[int, ...]
    """Ids of the tokens that end a completion."""
    seed: int = 0
    """Seed of the engine, and of the weights of a policy from scratch; the learner uses the
    same."""
    weight_version: int = 0
    """Version of the weights that the engine starts with."""


EngineMaker = Callable[[], Generator]
"""A picklable factory of an engine, called in the process that generates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersMaker:
    """A factory that loads the policy and makes a `TransformersEngine` that owns that copy."""

    model: ModelSpec
    """The model of the learner, or the same model read from a directory (`from_directory`)."""
    spec: GeneratorSpec
    device: str = "auto"
    """The value of the setting `cluster.device`."""
    cpu_threads: int | None = None
    """The value of the setting `cluster.cpu_threads`."""
    texts: tuple[str, ...] = ()
    """Texts on which a tokenizer from scratch is trained; the learner trains its own on the same
    texts."""

    def __call__(self) -> TransformersEngine:
        """Load the model and make the engine.

        Raises:
            ConfigError: The settings ask for a GPU, and this machine has none.
            ModelError: The model cannot be loaded or served; see `load_policy` and
                `TransformersEngine`.
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
            conversation_bytes=self.spec.settings.conversation_bytes,
            static_slots=self.spec.settings.transformers_cfg.static_slots,
            shares_weights=False,
            owns_model=True,
            weight_version=self.spec.weight_version,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PluggedMaker:
    """A factory of an engine with weights of its own, a plug-in, which reads them from a directory.

    The engine does not compare its log-probabilities with the learner's (it has no `probe`);
    `GeneratorReplicas` does.
    """

    name: str
    """The plug-in."""
    start: EngineStart
    """What it starts from; the directory has to be readable on every node."""

    def __call__(self) -> Generator:
        """Start the engine.

        Raises:
            LaurelError: The plug-in or its package is missing, or does not start.
        """
        engine, section = self.start.spec.settings.settings_of(Engine, self.name)
        found = replace(self.start, directory=local_files(self.start.directory))
        made: Generator = engine.make(section, found)
        return made


def from_directory(model: ModelSpec, directory: Path | str) -> ModelSpec:
    """Return the model's spec with a directory of weights and tokenizer as its source."""
    return replace(model, name=str(directory), scratch=None, tokenizer=TokenizerConfig())
