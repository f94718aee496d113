"""Specs of scorers, and the search for a reward model's directory. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from laurel.config.policy import PolicyConfig, Precision
from laurel.errors import CheckpointError, ModelError, Names, setting_of
from laurel.models.checkpoint.manifest import MANIFEST_NAME, Manifest
from laurel.models.checkpoint.store import BEST_NAME, CheckpointStore, verify
from laurel.models.files import is_model_file, read_model_file
from laurel.models.loading.weight_names import HEAD_FILES, weight_names
from laurel.models.spec import ModelSpec
from laurel.observe.hub import check_fetchable, check_not_missing, listed
from laurel.plugins import EngineThatScores

if TYPE_CHECKING:
    from laurel.config.environments import ScorerSource
    from laurel.models.scoring import Aggregate
    from laurel.rewards.ensemble import Combine

Say = Callable[[str], None]
Device = Literal["auto", "cpu", "cuda"]
MAX_LENGTH = PolicyConfig().max_total_sequence_length
"""Default length limit in tokens of a conversation, for a model without a contract."""

# Endings of transformers' class names of language models.
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
# Prefixes of their weights. The head of any other program has another name.
_OF_LANGUAGE_MODELS = ("model.", "transformer.", "lm_head.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlace:
    """Locates a reward model."""

    name: str
    """Directory, links followed, or name on the hub."""
    is_checkpoint: bool = False
    """Whether it has a manifest that its files must match."""
    notes: tuple[str, ...] = ()
    """Decisions made while it was searched for, as lines for the user."""
    file: str | None = None
    """File that was named, of which the directory was made."""

    @property
    def source(self) -> str:
        """Name of the model for its users: its file, directory or hub name."""
        return self.file or self.name

    @property
    def shown(self) -> str:
        """The same for messages: relative if it is in the working directory."""
        if self.file is not None:
            return self.file
        name, here = Path(self.name), Path.cwd()
        return str(name.relative_to(here)) if name.is_relative_to(here) else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringEngine:
    """An engine that holds a reward model."""

    plugin: EngineThatScores
    section: Any
    """Its settings."""
    may_sleep: bool = False
    """Whether the memory of devices is to be given back and taken again."""


@dataclass(frozen=True, slots=True)
class NamedSource:
    """A source of scores that a plug-in opens (`laurel.scorers`)."""

    name: str
    section: Any
    """Its settings."""
    server: Any = None
    """The `config.environments.ModelServerConfig` of the model that the run serves for it."""
    within: ScorerSource | None = None
    """The section that the settings stand in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSpec:
    """Describes what gives scores, and how it is opened.

    The model `model.name` gives the scores, unless servers, a source or members are named. Errors
    name keys of the section `policy`, and for what replaces a model keys of `env.reward_model`;
    `terms` maps these to the keys that the user wrote.
    """

    model: ModelSpec = field(default_factory=ModelSpec)
    """Model to load, and its tokenizer. Its precision is ignored, and so is its head where the
    model brings a contract.
    """
    found: ModelPlace | None = None
    """Result of `find_reward_model`; None searches for the model on opening."""
    tokenizer_from: str | None = None
    """Model whose tokenizer is used where there is none beside the weights."""
    max_length: int | None = None
    """Length limit in tokens of a conversation, for a model without a contract; None:
    `MAX_LENGTH`.
    """
    batch_tokens: int = 8192
    """Token budget of one forward pass."""
    batch_timeout: float | None = None
    """Time limit in seconds of a forward pass in another process; None: its group's limit."""
    precision: Precision = "float32"
    """Dtype of the weights and of the decoder's arithmetic; the head computes in float32."""
    aggregate: Aggregate | None = None
    """How the values of the steps become the score, in place of what the contract of a process
    reward model says."""
    device: Device = "auto"
    """Device of the model; `auto` chooses a GPU where there is one."""
    engine: ScoringEngine | None = None
    """Engine that holds the model; None: Laurel computes the scores."""
    servers: ScorerSource | None = None
    """Servers to ask, at its `urls`; of `model` only the tokenizer and the contract are read."""
    source: NamedSource | None = None
    """What gives scores in place of a model: a judge, a function, or what a package brings."""
    members: tuple[MemberSpec, ...] = ()
    """Scorers whose scores are combined into one."""
    combine: Combine = "weighted_sum"
    """Rule by which the scores of members are combined."""
    uncertainty_penalty: float = 1.0
    """Number of standard deviations that `mean_minus_std` subtracts."""
    num_replicas: int = 1
    """Number of models that score concurrently, where the placement does not say."""
    in_loop: bool = False
    """Whether completions arrive while others are still being sampled: each replica works by
    itself, and a GPU merges concurrent requests.
    """
    num_workers: int = 0
    """Processes that render and tokenise, or run the function; 0: threads of this process."""
    names: tuple[Names, ...] = ()
    """Names of the keys in the user's file, for `errors.speaking`."""

    @property
    def loads_model(self) -> bool:
        """Whether the weights of a model are needed, as nothing else gives the scores."""
        others = (self.servers, self.source, self.members or None)
        return all(other is None for other in others)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSpec:
    """Describes one scorer of an ensemble, and its weight."""

    name: str
    spec: ScorerSpec
    weight: float = 1.0
    """Weight in a weighted sum."""
    mean: float | None = None
    """Subtracted from its scores; None: the mean saved with its model."""
    std: float | None = None
    """Divisor of its scores after that; None: the deviation saved with its model."""


def find_model(model: str) -> ModelPlace:
    """Find the model that a directory or a name means, without reading it.

    The directory of a run, which holds `step_<N>` directories, means its best checkpoint, or else
    the newest complete one. A GGUF file means the directory that is made of it.

    Raises:
        ModelError: There is no model.
        CheckpointError: There are checkpoints, and none is complete.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        if is_model_file(model):
            made = read_model_file(model)
            return ModelPlace(name=str(made.directory), notes=made.notes, file=model)
        if path.exists():
            raise ModelError(
                f"{setting_of('policy.model_name', model)} is a file; name the directory that it "
                "lies in"
            )
        check_not_missing(model, key="policy.model_name")
        note = f"{model} is no directory here, so it is taken for a name on the Hugging Face hub"
        return ModelPlace(name=model, notes=(note,))
    if (path / MANIFEST_NAME).is_file():
        return ModelPlace(name=os.path.realpath(path), is_checkpoint=True)
    if (path / "config.json").is_file():
        return ModelPlace(name=os.path.realpath(path))
    store = CheckpointStore(path)
    if store.steps():
        return _checkpoint_in(store)
    if (path / "adapter_config.json").is_file():
        raise ModelError(
            f"{setting_of('policy.model_name', model)} holds adapters without the model they "
            "belong on. Merge "
            "them with the program that made them (llamafactory-cli export, OpenRLHF's "
            "lora_combiner, peft's merge_and_unload), and name what comes out"
        )
    files = [name for name in sorted(os.listdir(path)) if is_model_file(name)]
    hint = f". A file that is a model is named itself: {path / files[0]}" if files else ""
    raise ModelError(
        f"{setting_of('policy.model_name', model)} holds neither a model (config.json) nor "
        "checkpoints (step_1, "
        f"...). It holds: {listed(path)}{hint}"
    )


def _checkpoint_in(store: CheckpointStore) -> ModelPlace:
    best = store.root / BEST_NAME
    if (best / MANIFEST_NAME).is_file():
        name = os.path.realpath(best)
        note = f"{store.root} holds checkpoints; the best is {os.path.basename(name)}"
        return ModelPlace(name=name, is_checkpoint=True, notes=(note,))
    newest = store.newest_whole()
    if newest.path is None:
        raise CheckpointError(f"no checkpoint in {store.root} is whole: {newest.skipped[0]}")
    skipped = [f"warning: skipped a checkpoint: {reason}" for reason in newest.skipped]
    note = f"{store.root} holds checkpoints, none marked best; the newest is {newest.path.name}"
    return ModelPlace(
        name=os.path.realpath(newest.path), is_checkpoint=True, notes=(*skipped, note)
    )


def check_files(place: ModelPlace) -> Manifest | None:
    """Check a checkpoint against its manifest, byte for byte; None where there is no manifest.

    Raises:
        CheckpointError: It is torn or altered; names the file, and a complete checkpoint.
    """
    return verify(place.name) if place.is_checkpoint else None


def find_reward_model(model: str) -> ModelPlace:
    """Find a model, and refuse what is quickly seen to give no scores, before torch is imported.

    A model that passes may still be no reward model; loading it reads all of it.

    Raises:
        ModelError: There is no model, or a language model, or a hub does not answer.
        CheckpointError: There are checkpoints, and none is complete.
    """
    place = find_model(model)
    directory = Path(place.name)
    if not directory.is_dir():
        check_fetchable(place.name, key="policy.model_name")
    elif _is_language_model(directory):
        raise ModelError(headless(place.source))
    return place


def headless(name: str) -> str:
    """Return the message that a model has no reward head."""
    return (
        f"{name} is a language model without a reward head, so it has no scores to give. "
        f"Train a reward model from it with: laurel rm policy.model_name={name}"
    )


def _is_language_model(directory: Path) -> bool:
    # Both its configuration and its weights have to say so; in doubt it is not refused here.
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    names = config.get("architectures") if isinstance(config, dict) else None
    if not names or not all(str(name).endswith(_LANGUAGE_MODELS) for name in names):
        return False
    if any((directory / file).exists() for file in ("scoring.json", *HEAD_FILES)):
        return False
    weights = weight_names(directory)
    return bool(weights) and all(name.startswith(_OF_LANGUAGE_MODELS) for name in weights)
