"""What gives scores and how, and where a reward model lies. Nothing here imports torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from laurel.config.policy import PolicyConfig, Precision
from laurel.errors import CheckpointError, ModelError, Terms, setting_of
from laurel.models.checkpoint.manifest import MANIFEST_NAME, Manifest
from laurel.models.checkpoint.store import BEST_NAME, CheckpointStore, verify
from laurel.models.loading.weight_names import HEAD_FILES, weight_names
from laurel.models.spec import ModelSpec
from laurel.observe.hub import check_fetchable

if TYPE_CHECKING:
    from laurel.config.environments import FunctionConfig, JudgeConfig, ScorerSource
    from laurel.generation.vllm.pooling import PoolingOptions
    from laurel.rewards.ensemble import Combine

Say = Callable[[str], None]
Device = Literal["auto", "cpu", "cuda"]
MAX_LENGTH = PolicyConfig().max_total_sequence_length
"""Most tokens of a conversation, for a model without a contract, by default."""

_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
"""How transformers calls classes that write text."""
_OF_LANGUAGE_MODELS = ("model.", "transformer.", "lm_head.")
"""How their weights are called. A head of any other program is called otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlace:
    """Where a reward model lies."""

    name: str
    """A directory, links followed, or a name on the hub."""
    is_checkpoint: bool = False
    """Whether it has a manifest that its files must fit."""
    notes: tuple[str, ...] = ()
    """What was decided on the way to it."""

    @property
    def shown(self) -> str:
        """Its name for people: without the working directory, where it lies in that."""
        name, here = Path(self.name), Path.cwd()
        return str(name.relative_to(here)) if name.is_relative_to(here) else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSpec:
    """What gives scores, and how it is opened.

    The scores are those of the model `model.name`, unless servers, a judge, a function or members
    are named. Errors name keys of the section `policy`, and those of what stands in for a model
    keys of `env.reward_model`; `terms` says what whoever wrote them calls these.
    """

    model: ModelSpec = field(default_factory=ModelSpec)
    """Which model, and how it and its tokenizer are loaded. Its precision is ignored, and so is its
    head where the model brings a contract."""
    found: ModelPlace | None = None
    """Where the model was found and checked by `find_reward_model`; None: it is looked for."""
    tokenizer_from: str | None = None
    """The model whose tokenizer is used where none lies beside the weights."""
    max_length: int | None = None
    """Longest conversation in tokens, for a model that brings no contract; None is `MAX_LENGTH`."""
    batch_tokens: int = 8192
    """Token budget of one forward pass."""
    batch_size: int | None = None
    """Rows of one forward pass on the padded path, instead of the budget."""
    batch_timeout: float | None = None
    """Seconds of one forward pass in a process of its own; None: the limit of its group."""
    precision: Precision = "float32"
    """Dtype of the weights and of the decoder's arithmetic; the head computes in float32."""
    device: Device = "auto"
    """`auto`: a GPU where there is one."""
    pooling: PoolingOptions | None = None
    """How vLLM holds the model; None: Laurel computes the scores."""
    servers: ScorerSource | None = None
    """Its `urls` are asked as it says; of `model` only the tokenizer and the contract are read."""
    judge: JudgeConfig | None = None
    """A language model that is asked for a score."""
    function: FunctionConfig | None = None
    """A Python function that scores."""
    members: tuple[MemberSpec, ...] = ()
    """Several scorers, whose scores become one."""
    combine: Combine = "weighted_sum"
    """How the scores of members become one."""
    uncertainty_penalty: float = 1.0
    """See `EnsembleScorer`."""
    num_replicas: int = 1
    """Models that score side by side, where the placement does not say how many."""
    in_loop: bool = False
    """Completions come while others are still being drawn: replicas work each by itself, and a GPU
    computes together what comes together."""
    shares_prompts: bool = True
    """The prompt of a group is computed once where the model can do so."""
    num_workers: int = 0
    """Processes that render and tokenise, or that run the function; 0: threads of this one."""
    terms: tuple[Terms, ...] = ()
    """What the keys are called by whoever wrote them; see `errors.speaking`."""

    @property
    def loads_model(self) -> bool:
        """Whether the weights of a model are needed: nothing else is to give the scores."""
        others = (self.servers, self.judge, self.function, self.members or None)
        return all(other is None for other in others)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSpec:
    """One of several scorers, and what its scores count."""

    name: str
    spec: ScorerSpec
    weight: float = 1.0
    """In a weighted sum."""
    mean: float | None = None
    """Subtracted from its scores; None: what its model was saved with."""
    std: float | None = None
    """What they are then divided by; None: what its model was saved with."""


def find_model(model: str) -> ModelPlace:
    """The model that a directory or a name means; nothing of it is read yet.

    The directory of a run, which holds `step_<N>` directories, means its best checkpoint, or else
    the newest whole one.

    Raises:
        ModelError: Nothing there that could be a model.
        CheckpointError: Checkpoints, and none of them is whole.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
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
    raise ModelError(
        f"{setting_of('policy.model_name', model)} holds neither a model (config.json) nor "
        "checkpoints (step_1, "
        f"...). It holds: {_listed(path)}"
    )


def check_not_missing(name: str, *, key: str) -> None:
    """Refuse what is written like a directory, or lies in one, and is none.

    Raises:
        ModelError: What lies in its place.
    """
    path = Path(name).expanduser()
    folder = path.parent
    looks_local = name.startswith((".", "/", "~")) or (folder != Path() and folder.is_dir())
    if path.is_dir() or not looks_local:
        return
    if not folder.is_dir():
        raise ModelError(
            f"{setting_of(key, name)}: there is no such directory, nor {folder}; a relative path "
            "begins at "
            f"the working directory, {Path.cwd()}"
        )
    raise ModelError(
        f"{setting_of(key, name)}: there is no such directory; {folder} holds: {_listed(folder)}"
    )


def _listed(directory: Path) -> str:
    return ", ".join(sorted(os.listdir(directory))[:8]) or "nothing"


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
    """Check a checkpoint against its manifest, byte for byte; None for what has no manifest.

    Raises:
        CheckpointError: It is torn or altered: which file, and which other checkpoint is whole.
    """
    return verify(place.name) if place.is_checkpoint else None


def find_reward_model(model: str) -> ModelPlace:
    """Find a model, and refuse what a moment shows to give no scores, before torch is imported.

    What passes may still be no reward model; loading it reads all of it.

    Raises:
        ModelError: See `find_model`; or a language model, or a name on a hub that does not answer.
        CheckpointError: See `find_model`.
    """
    place = find_model(model)
    directory = Path(place.name)
    if not directory.is_dir():
        check_fetchable(place.name, key="policy.model_name")
    elif _is_language_model(directory):
        raise ModelError(headless(place.name))
    return place


def headless(name: str) -> str:
    """The message that a model has no head."""
    return (
        f"{name} is a language model without a reward head, so it has no scores to give. "
        f"Train a reward model from it with: laurel rm policy.model_name={name}"
    )


def _is_language_model(directory: Path) -> bool:
    """Whether a model says so, and nothing else is among its weights. Where in doubt, it is not."""
    try:
        said = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    names = said.get("architectures") if isinstance(said, dict) else None
    if not names or not all(str(name).endswith(_LANGUAGE_MODELS) for name in names):
        return False
    if any((directory / file).exists() for file in ("scoring.json", *HEAD_FILES)):
        return False
    weights = weight_names(directory)
    return bool(weights) and all(name.startswith(_OF_LANGUAGE_MODELS) for name in weights)
