"""A reward model from wherever a user says it is, checked before its first score is believed.

Errors and notes name keys of the section `policy`. A caller whose users write options of a command
line, or keys of another section, gives their names with `errors.speaking`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from laurel.config.data import DataConfig
from laurel.config.policy import PolicyConfig, Precision, RewardModelConfig
from laurel.errors import CheckpointError, ModelError, UserError, setting_of
from laurel.models.checkpoint.manifest import MANIFEST_NAME, Manifest
from laurel.models.checkpoint.store import BEST_NAME, CheckpointStore, verify
from laurel.models.loading.weight_names import HEAD_FILES, weight_names
from laurel.models.spec import ModelSpec
from laurel.observe.console import quiet_libraries
from laurel.observe.hub import check_fetchable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from laurel.models.loading.reward_model import LoadedRewardModel
    from laurel.models.scoring import ScoringContract, ScoringRules
    from laurel.rewards.scorer import LocalScorer

Say = Callable[[str], None]
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
    """How a model is to score."""

    max_length: int | None = None
    """Longest conversation in tokens, for a model that brings no contract; None is `MAX_LENGTH`."""
    batch_tokens: int = 8192
    """Token budget of one forward pass."""
    batch_size: int | None = None
    """Rows of one forward pass on the padded path, instead of the budget."""
    precision: Precision = "float32"
    """Dtype of the weights and of the decoder's arithmetic; the head computes in float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU where there is one."""
    model: ModelSpec = field(default_factory=ModelSpec)
    """How the model and its tokenizer are loaded. Its name and precision are ignored, and so is its
    head where the model brings a contract."""


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


def find_whole(model: str, *, say: Say) -> ModelPlace:
    """Find a model by its directory or name, and check all that can be checked before loading.

    Args:
        model: See `find_model`.
        say: Told what was decided on the way.

    Raises:
        UserError: See `find_model`, `check_at_once` and `check_files`.
    """
    place = find_model(model)
    for note in place.notes:
        say(note)
    check_at_once(place)
    check_files(place)
    return place


def check_at_once(place: ModelPlace) -> None:
    """Refuse what a moment shows to give no scores: before torch is imported, or data are read.

    What passes may still be no reward model; `load_scorer` reads all of it.

    Raises:
        ModelError: A language model, or a name on a hub that does not answer.
    """
    directory = Path(place.name)
    if not directory.is_dir():
        check_fetchable(place.name, key="policy.model_name")
    elif _is_language_model(directory):
        raise ModelError(_headless(place.name, ()))


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


def load_scorer(
    place: ModelPlace, spec: ScorerSpec, *, say: Say, mesh: DeviceMesh | None = None
) -> LocalScorer:
    """Load a model and make it prove that it scores as it did when it was saved.

    Neither the threads of this process nor its random generators are touched.

    Args:
        place: Where it is; see `find_model` and `check_files`.
        spec: How it is to score.
        say: Told what was loaded and found.
        mesh: What it is spread over: a collective call, with the same arguments on every rank.

    Raises:
        UserError: Not a reward model, or not the one it was.
    """
    check_at_once(place)
    from laurel.models.loading.pretrained import DTYPES
    from laurel.models.loading.reward_model import load_reward_model
    from laurel.rewards.scorer import LocalScorer
    from laurel.workers.process import choose_device

    rules = read_rules(place)
    quiet_libraries()
    loaded = load_reward_model(
        _model_of(place, spec, rules),
        seed=0,
        max_length=rules.max_length if rules else spec.max_length or MAX_LENGTH,
        truncation_side=rules.truncation_side if rules else DataConfig().truncation_side,
        device=choose_device(spec.device),
        weights_dtype=DTYPES[spec.precision],
        mesh=mesh,
        keeps_bias=True,
    )
    if loaded.has_new_head:
        raise ModelError(_headless(place.name, loaded.strange_weights))
    _check(loaded, place, precision=spec.precision, has_contract=rules is not None, say=say)
    return LocalScorer(
        loaded.model, loaded.contract, batch_tokens=spec.batch_tokens, batch_size=spec.batch_size
    )


def _headless(name: str, strange_weights: Sequence[str]) -> str:
    """What to say of a model that has no head, or none that is understood."""
    if strange_weights:
        from laurel.models.loading.reward_model import UNDERSTOOD

        return (
            f"{name} has no reward head that is understood. Its weights hold, besides a language "
            f"model's: {', '.join(strange_weights[:8])}. {UNDERSTOOD}"
        )
    return (
        f"{name} is a language model without a reward head, so it has no scores to give. "
        f"Train a reward model from it with: laurel rm policy.model_name={name}"
    )


def open_model_scorer(model: str, *, say: Say) -> LocalScorer:
    """A scorer with every default from wherever a user says it is.

    Raises:
        UserError: See `find_whole` and `load_scorer`.
    """
    return load_scorer(find_whole(model, say=say), ScorerSpec(), say=say)


def read_rules(place: ModelPlace) -> ScoringRules | None:
    """The scoring contract that was saved with a model, if one was."""
    from laurel.models.scoring import FILE_NAME, ScoringRules

    directory = Path(place.name)
    return ScoringRules.read(directory) if (directory / FILE_NAME).is_file() else None


def read_contract(place: ModelPlace, spec: ScorerSpec, *, say: Say) -> ScoringContract:
    """The contract that a model scores by; its weights are not read, and need not be there.

    Args:
        place: Where it is; see `find_model`.
        spec: What it would be loaded with.
        say: Told what was found.

    Raises:
        UserError: There is no tokenizer or no template that can be used.
    """
    from laurel.models.loading.reward_model import load_contract

    rules = read_rules(place)
    quiet_libraries()
    contract, notes = load_contract(
        _model_of(place, spec, rules),
        max_length=rules.max_length if rules else spec.max_length or MAX_LENGTH,
        truncation_side=rules.truncation_side if rules else DataConfig().truncation_side,
    )
    for note in notes:
        say(f"note    {note}")
    return contract


def _model_of(place: ModelPlace, spec: ScorerSpec, rules: ScoringRules | None) -> ModelSpec:
    """The spec that loads the reward model in `place`, with the head that its contract tells."""
    head = spec.model.head
    if rules is not None:
        weights = rules.attribute_weights
        head = RewardModelConfig(
            reward_model_type="regression" if rules.attributes else "bradley_terry",
            attributes=list(rules.attributes),
            attribute_weights=None if weights is None else list(weights),
        )
    return replace(spec.model, name=place.name, precision=spec.precision, head=head)


def _check(
    loaded: LoadedRewardModel,
    place: ModelPlace,
    *,
    precision: Precision,
    has_contract: bool,
    say: Say,
) -> None:
    """The checks of a loaded model, and a line on each."""
    from laurel.rewards.scorer import check_golden, check_paths

    model, rules = loaded.model, loaded.contract.rules
    difference = check_paths(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    path = f"token forest (self-check: {difference:.1e})" if model.path == "forest" else "padded"
    say(
        f"model   {type(model.classifier).__name__} from {place.shown}: {parameters / 1e6:.1f}M "
        f"parameters, {precision} on {model.device.type}, {path}"
    )
    for note in loaded.notes:
        say(f"note    {note}")
    if rules.golden:
        try:
            worst = check_golden(model, loaded.contract)
        except UserError as error:
            raise type(error)(
                f"{place.name} does not score as it did when it was saved: {error}. "
                "Use the files and the library versions it was saved with, or, where the change is "
                "meant, remove `golden` from its scoring.json"
            ) from error
        say(f"checked golden scores agree (max difference {worst:.1e})")
    else:
        missing = "its scoring.json has no" if has_contract else "it has no scoring.json, so no"
        say(f"note    {missing} golden scores could be checked")
    say(
        f"lengths conversations of more than {rules.max_length:,} tokens are cut on the "
        f"{rules.truncation_side}"
    )
    if rules.attributes:
        say(f"values  {', '.join(rules.attributes)}")
