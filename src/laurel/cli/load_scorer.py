"""A reward model from wherever a user says it is, checked before its first score is believed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from laurel.config.load import load_config
from laurel.config.overrides import parse_override
from laurel.config.schema import ClusterConfig, DataConfig, PolicyConfig, RewardModelConfig
from laurel.errors import CheckpointError, ConfigError, ModelError
from laurel.models.checkpoint import BEST_NAME, CheckpointStore, verify
from laurel.models.manifest import MANIFEST_NAME, Manifest

if TYPE_CHECKING:
    from laurel.models.load import LoadedRewardModel
    from laurel.models.scoring import ScoringRules
    from laurel.rewards.local import LocalScorer

Say = Callable[[str], None]
Precision = Literal["float32", "bfloat16"]

_HAS_OPTION = {"model_name": "--model", "precision": "--precision"}
"""Keys of the policy section that have an option of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlace:
    """Where a reward model lies."""

    name: str
    """A directory, links followed, or a name on the hub."""
    is_checkpoint: bool = False
    """Whether it has a manifest that its files must fit."""
    notes: tuple[str, ...] = ()
    """What was decided on the way to it."""


def find_model(model: str) -> ModelPlace:
    """The model that a directory or a name means; nothing of it is read yet.

    The directory of a run, which holds `step_<N>` directories, means its best checkpoint, or else
    the newest whole one.

    Raises:
        ModelError: Nothing there that could be a model.
        CheckpointError: Checkpoints, and none of them is whole.
    """
    if not model:
        raise ConfigError(
            "no reward model is named; add --model with a directory (of a model, a checkpoint, or "
            "a run with checkpoints) or a name on the Hugging Face hub"
        )
    path = Path(model).expanduser()
    if not path.is_dir():
        if path.exists():
            raise ModelError(f"--model {model} is a file; name the directory that it lies in")
        if model.startswith((".", "/", "~")):
            raise ModelError(f"--model {model}: there is no such directory")
        return ModelPlace(name=model)
    if (path / MANIFEST_NAME).is_file():
        return ModelPlace(name=os.path.realpath(path), is_checkpoint=True)
    if (path / "config.json").is_file():
        return ModelPlace(name=os.path.realpath(path))
    store = CheckpointStore(path)
    if store.steps():
        return _checkpoint_in(store)
    raise ModelError(
        f"--model {model} holds neither a model (config.json) nor checkpoints (step_1, ...). It "
        f"holds: {', '.join(sorted(os.listdir(path))[:8]) or 'nothing'}"
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
    """Check a checkpoint against its manifest, byte for byte; None for what has no manifest.

    Raises:
        CheckpointError: It is torn or altered: which file, and which other checkpoint is whole.
    """
    return verify(place.name) if place.is_checkpoint else None


def load_scorer(
    place: ModelPlace,
    *,
    max_length: int | None,
    batch_tokens: int,
    precision: Precision,
    device: str,
    settings: Sequence[str],
    say: Say,
) -> LocalScorer:
    """Load a model and make it prove that it scores as it did when it was saved.

    Args:
        place: Where it is; see `find_model` and `check_files`.
        max_length: Longest conversation in tokens, for a model that brings no contract; None
            means `policy.max_total_sequence_length`.
        batch_tokens: Token budget of one forward pass.
        precision: Dtype of the weights and the arithmetic; the head's are float32.
        device: auto, cpu or cuda.
        settings: Overrides of the policy section, as `key=value`.
        say: Told what was loaded and found.

    Raises:
        UserError: Not a reward model, or not the one it was, or a setting that is not known.
    """
    from laurel.distributed.process import prepare
    from laurel.models.load import DTYPES, load_reward_model
    from laurel.rewards.local import LocalScorer

    rules = read_rules(place)
    config = policy_config(place, precision=precision, settings=settings, rules=rules, say=say)
    quiet_libraries()
    try:
        loaded = load_reward_model(
            config,
            seed=0,
            max_length=max_length or config.max_total_sequence_length,
            truncation_side=DataConfig().truncation_side,
            device=prepare(ClusterConfig.model_validate({"device": device}), seed=0),
            weights_dtype=DTYPES[precision],
        )
    except (ModelError, ConfigError) as error:
        raise type(error)(_in_terms_of_options(str(error))) from error
    if loaded.has_new_head:
        raise ModelError(
            f"{place.name} is a language model without a reward head, so it has no scores to give. "
            f"Train a reward model from it with: laurel rm policy.model_name={place.name}"
        )
    if rules is not None and max_length not in (None, rules.max_length):
        say(f"note    --max-length is not used: scoring.json says {rules.max_length} tokens")
    _check(loaded, place, precision=precision, has_contract=rules is not None, say=say)
    return LocalScorer(loaded.model, loaded.contract, batch_tokens=batch_tokens)


def read_rules(place: ModelPlace) -> ScoringRules | None:
    """The scoring contract that was saved with a model, if one was."""
    from laurel.models.scoring import FILE_NAME, ScoringRules

    directory = Path(place.name)
    return ScoringRules.read(directory) if (directory / FILE_NAME).is_file() else None


def policy_config(
    place: ModelPlace,
    *,
    precision: Precision,
    settings: Sequence[str],
    rules: ScoringRules | None,
    say: Say,
) -> PolicyConfig:
    """The policy section of a reward model that is there already.

    Args:
        place: Where it is.
        precision: See `load_scorer`.
        settings: Overrides; a leading `policy.` may be written or left out.
        rules: Its contract, which says what its head gives.
        say: Told of settings without effect.
    """
    overrides: list[str] = []
    for setting in settings:
        sign = setting[: len(setting) - len(setting.lstrip("+~"))]
        override = sign + setting[len(sign) :].removeprefix("policy.")
        first = parse_override(override).keys[0]
        if first in _HAS_OPTION:
            raise ConfigError(f"--set {setting}: use the option {_HAS_OPTION[first]} for that")
        if first == "reward_model_cfg" and rules is not None:
            raise ConfigError(f"--set {setting}: scoring.json of the model says that already")
        overrides.append(override)
    loaded = load_config(PolicyConfig, None, overrides)
    for warning in loaded.warnings:
        say(f"warning: {warning}")
    head = loaded.config.reward_model_cfg
    if rules is not None:
        weights = rules.attribute_weights
        head = RewardModelConfig(
            reward_model_type="regression" if rules.attributes else "bradley_terry",
            attributes=list(rules.attributes),
            attribute_weights=None if weights is None else list(weights),
        )
    return loaded.config.model_copy(
        update={
            "model_name": place.name,
            "precision": precision,
            "reward_model_cfg": head.model_copy(update={"enabled": True}),
        }
    )


def quiet_libraries() -> None:
    """Keep progress bars and advice of the libraries out of our own display."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("torch").setLevel(logging.ERROR)


def _check(
    loaded: LoadedRewardModel,
    place: ModelPlace,
    *,
    precision: Precision,
    has_contract: bool,
    say: Say,
) -> None:
    """The checks of a loaded model, and a line on each."""
    from laurel.rewards.local import check_golden, check_paths

    model, rules = loaded.model, loaded.contract.rules
    difference = check_paths(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    path = f"token forest (self-check: {difference:.1e})" if model.path == "forest" else "padded"
    say(
        f"model   {type(model.classifier).__name__} from {place.name}: {parameters / 1e6:.1f}M "
        f"parameters, {precision} on {model.device.type}, {path}"
    )
    for note in loaded.notes:
        say(f"note    {note}")
    if rules.golden:
        worst = check_golden(model, loaded.contract, precision=precision)
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


def _in_terms_of_options(message: str) -> str:
    """An error of the policy section, for somebody who has only the command line."""
    message = message.replace("policy.model_name=", "--model ")
    if "policy." not in message:
        return message
    return (
        f"{message} (Here, keys of policy are given as --set, e.g. --set tokenizer.pad_token=auto)"
    )
