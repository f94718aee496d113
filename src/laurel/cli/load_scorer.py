"""A reward model from wherever a user says it is, checked before its first score is believed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
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
_SAID_BY_CONTRACT = (
    "reward_model_cfg",
    "max_total_sequence_length",
    "tokenizer.chat_template_kwargs",
)
"""Keys that would have no effect on a model that brings its scoring contract."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlace:
    """Where a reward model lies."""

    name: str
    """A directory, links followed, or a name on the hub."""
    is_checkpoint: bool = False
    """Whether it has a manifest that its files must fit."""
    notes: tuple[str, ...] = ()
    """What was decided on the way to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerOptions:
    """How a model is to score."""

    max_length: int | None = None
    """Longest conversation in tokens, for a model that brings no contract; None means
    `policy.max_total_sequence_length`."""
    batch_tokens: int = 8192
    """Token budget of one forward pass."""
    precision: Precision = "float32"
    """Dtype of the weights and of the decoder's arithmetic; the head computes in float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU where there is one."""
    cpu_threads: int | None = None
    """Threads of the arithmetic on CPU; None is one per core."""
    settings: tuple[str, ...] = ()
    """Overrides of the policy section, as `key=value`; `policy.` before the key may be left out."""


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
        folder = path.parent
        if model.startswith((".", "/", "~")) or (folder != Path() and folder.is_dir()):
            if not folder.is_dir():
                raise ModelError(f"--model {model}: there is no such directory, nor {folder}")
            raise ModelError(
                f"--model {model}: there is no such directory; {folder} holds: {_listed(folder)}"
            )
        note = f"{model} is no directory here, so it is taken for a name on the Hugging Face hub"
        return ModelPlace(name=model, notes=(note,))
    if (path / MANIFEST_NAME).is_file():
        return ModelPlace(name=os.path.realpath(path), is_checkpoint=True)
    if (path / "config.json").is_file():
        return ModelPlace(name=os.path.realpath(path))
    store = CheckpointStore(path)
    if store.steps():
        return _checkpoint_in(store)
    raise ModelError(
        f"--model {model} holds neither a model (config.json) nor checkpoints (step_1, ...). It "
        f"holds: {_listed(path)}"
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


def load_scorer(place: ModelPlace, options: ScorerOptions, *, say: Say) -> LocalScorer:
    """Load a model and make it prove that it scores as it did when it was saved.

    Args:
        place: Where it is; see `find_model` and `check_files`.
        options: How it is to score.
        say: Told what was loaded and found.

    Raises:
        UserError: Not a reward model, or not the one it was, or a setting that is not known.
    """
    from laurel.distributed.process import prepare
    from laurel.models.load import DTYPES, load_reward_model
    from laurel.rewards.local import LocalScorer

    rules = read_rules(place)
    config = policy_config(place, options, rules=rules, say=say)
    longest = options.max_length or config.max_total_sequence_length
    if rules is not None:
        if options.max_length not in (None, rules.max_length):
            say(f"note    --max-length is not used: scoring.json says {rules.max_length} tokens")
        longest = rules.max_length
    cluster = ClusterConfig(device=options.device, cpu_threads=options.cpu_threads)
    quiet_libraries()
    try:
        loaded = load_reward_model(
            config,
            seed=0,
            max_length=longest,
            truncation_side=rules.truncation_side if rules else DataConfig().truncation_side,
            device=prepare(cluster, seed=0),
            weights_dtype=DTYPES[options.precision],
        )
    except (ModelError, ConfigError, CheckpointError) as error:
        raise type(error)(_in_terms_of_options(str(error))) from error
    if loaded.has_new_head:
        raise ModelError(
            f"{place.name} is a language model without a reward head, so it has no scores to give. "
            f"Train a reward model from it with: laurel rm policy.model_name={place.name}"
        )
    _check(loaded, place, precision=options.precision, has_contract=rules is not None, say=say)
    return LocalScorer(loaded.model, loaded.contract, batch_tokens=options.batch_tokens)


def open_scorer(model: str, *, say: Say) -> LocalScorer:
    """A scorer with every default from wherever a user says it is; see the three steps.

    Raises:
        UserError: See `find_model`, `check_files` and `load_scorer`.
    """
    place = find_model(model)
    for note in place.notes:
        say(note)
    check_files(place)
    return load_scorer(place, ScorerOptions(), say=say)


def read_rules(place: ModelPlace) -> ScoringRules | None:
    """The scoring contract that was saved with a model, if one was."""
    from laurel.models.scoring import FILE_NAME, ScoringRules

    directory = Path(place.name)
    return ScoringRules.read(directory) if (directory / FILE_NAME).is_file() else None


def policy_config(
    place: ModelPlace, options: ScorerOptions, *, rules: ScoringRules | None, say: Say
) -> PolicyConfig:
    """The policy section of a reward model that is there already.

    Args:
        place: Where it is.
        options: See there.
        rules: Its contract, which says what its head gives.
        say: Told of settings without effect.
    """
    overrides: list[str] = []
    for setting in options.settings:
        sign = setting[: len(setting) - len(setting.lstrip("+~"))]
        override = sign + setting[len(sign) :].removeprefix("policy.")
        key = ".".join(parse_override(override).keys)
        if key in _HAS_OPTION:
            raise ConfigError(f"--set {setting}: use the option {_HAS_OPTION[key]} for that")
        if rules is not None and key.startswith(_SAID_BY_CONTRACT):
            raise ConfigError(f"--set {setting}: scoring.json of the model settles that")
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
            "precision": options.precision,
            "reward_model_cfg": head.model_copy(update={"enabled": True}),
        }
    )


def quiet_libraries() -> None:
    """Keep progress bars and advice of the libraries out of our own display."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    for name in ("torch", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _check(
    loaded: LoadedRewardModel,
    place: ModelPlace,
    *,
    precision: Precision,
    has_contract: bool,
    say: Say,
) -> None:
    """The checks of a loaded model, and a line on each."""
    from laurel.rewards.local import check_golden
    from laurel.rewards.self_check import check_paths

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
        worst = check_golden(model, loaded.contract)
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
    message = message.replace("cluster.device=", "--device ")
    if "policy." not in message:
        return message
    return (
        f"{message} (Here, keys of policy are given as --set, e.g. --set tokenizer.pad_token=auto)"
    )
