"""Loading reward models: any Hugging Face decoder or classifier, checked before it is used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from laurel.config.schema import PolicyConfig
from laurel.errors import ConfigError, ModelError, key_of
from laurel.models.adapters import add_adapters, load_adapters
from laurel.models.attention import register
from laurel.models.pretrained import (
    REWARD_HEADS,
    agree_on_padding,
    find_tokenizer,
    make_network,
    num_positions,
    precision_of,
    read_config,
    read_weights,
    refuse_large_tokenizer,
    refuse_missing,
    refuse_other_sizes,
    settle,
    start_of,
    take_path,
)
from laurel.models.reward_model import RewardModel
from laurel.models.scoring import FILE_NAME, ScoringContract, check_rendering
from laurel.models.spread_loading import refuse_unspreadable
from laurel.models.value_heads import (
    ValueHead,
    find_value_head,
    foreign_heads,
    refuse_hub_name,
)


@dataclass(slots=True, kw_only=True)
class LoadedRewardModel:
    """A model, the contract it scores by, and what was decided on the way."""

    model: RewardModel
    contract: ScoringContract
    notes: list[str] = field(default_factory=list)
    """What a user should know: a new head, the padded path, a pinned date."""
    has_new_head: bool = False
    base_model: str = ""
    strange_weights: tuple[str, ...] = ()
    """Weights of the files that the network has no place for, besides a language model's head."""


def load_reward_model(
    config: PolicyConfig,
    *,
    seed: int,
    max_length: int,
    truncation_side: Literal["left", "right"],
    device: torch.device,
    texts: Iterable[str] = (),
    weights_dtype: torch.dtype = torch.float32,
    resume_from: Path | None = None,
    mesh: DeviceMesh | None = None,
    keeps_bias: bool = False,
) -> LoadedRewardModel:
    """Load or make the reward model that a configuration describes.

    Args:
        config: The policy section.
        seed: Seeds a new head and a model from scratch.
        max_length: Longest conversation, where the model brings no contract of its own.
        truncation_side: Likewise.
        device: Where it goes.
        texts: What a tokenizer from scratch is trained on.
        weights_dtype: float32 for training (master weights); lower to score in less memory.
        resume_from: Checkpoint of the same run: its tokenizer, contract and weights are used.
        mesh: What it is spread over: a collective call, with the same arguments on every rank.
        keeps_bias: Score with the bias of another program's head, which no checkpoint can hold.

    Raises:
        ModelError: Not a model that can give one reward, or one that is unsafe to load.
        ConfigError: It cannot be spread so.
    """
    register()
    refuse_unspreadable(config, mesh)
    base, notes = start_of(config)
    name = str(resume_from or config.model_name)
    uses_adapters = config.dtensor_cfg.lora_cfg.enabled
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.scratch is not None and (resume_from is None or uses_adapters):
            tokenizer = find_tokenizer(config, name, texts, is_resumed=resume_from is not None)
            read = _Read(_make(config, tokenizer, max_length, seed), has_new_head=True)
        else:
            tokenizer, read = _from_files(config, resume_from, weights_dtype, mesh, seed, notes)
    _take_head(read, notes, keeps_bias=keeps_bias)
    _agree(read.classifier, tokenizer)
    head_name = _head_name(read.classifier)
    path = take_path(read.classifier, config, notes, pools_itself=head_name is None)
    contract = _contract(config, tokenizer, name, read, max_length, truncation_side, notes)
    classifier = _adapted(read.classifier, config, resume_from, None if mesh is None else seed)
    precision = precision_of(config, weights_dtype)
    model = RewardModel(classifier, head_name=head_name, path=path, precision=precision)
    settle(model, config, device, mesh)
    if read.has_new_head and resume_from is None:
        notes.append("the reward head is new and random: its scores mean nothing before training")
    return LoadedRewardModel(
        model=model, contract=contract, notes=notes, has_new_head=read.has_new_head,
        base_model=base, strange_weights=read.strange_weights,
    )  # fmt: skip


def load_contract(
    config: PolicyConfig,
    *,
    max_length: int,
    truncation_side: Literal["left", "right"],
    for_training: bool = False,
) -> tuple[ScoringContract, list[str]]:
    """The contract that a reward model scores by, without its weights, and what to know of it.

    Args:
        config: The policy section.
        max_length: As for `load_reward_model`.
        truncation_side: Likewise.
        for_training: A language model is taken for what training makes of it, with a new head.

    Raises:
        ModelError: See `load_reward_model`.
    """
    from transformers import AutoModelForSequenceClassification

    notes: list[str] = []
    name = str(config.model_name)
    foreign = find_value_head(Path(name), safetensors_only=config.safetensors_only)
    if foreign is not None:
        raise ModelError(
            f"{name} was made by {foreign.program}, and other processes could not score with it. "
            "Write it as any program reads it, and name that: "
            f"laurel export --model {name} --output DIR"
        )
    tokenizer = find_tokenizer(config, name, (), is_resumed=False)
    hf_config = read_config(config, name)
    has_new_head = for_training and not _is_classifier(hf_config)
    hf_config.num_labels = _num_outputs(config)
    factory: Any = AutoModelForSequenceClassification
    with torch.device("meta"):  # its modules tell how it pools
        classifier = factory.from_config(hf_config, trust_remote_code=config.trust_remote_code)
    agree_on_padding(classifier, tokenizer, teaches_padding=False)
    read = _Read(classifier, has_new_head=has_new_head)
    contract = _contract(config, tokenizer, name, read, max_length, truncation_side, notes)
    return contract, notes


# -------------------------------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True)
class _Read:
    """A classifier as it was made or read."""

    classifier: Any
    has_new_head: bool
    strange_weights: tuple[str, ...] = ()
    foreign: ValueHead | None = None


def _foreign_head(config: PolicyConfig, source: str, mesh: DeviceMesh | None) -> ValueHead | None:
    """The head of another program, where the model is one's."""
    foreign = find_value_head(Path(source), safetensors_only=config.safetensors_only)
    if foreign is not None and mesh is not None:
        raise ConfigError(
            f"{source} was made by {foreign.program}, and such a model is not spread over ranks. "
            "Write it as any program reads it, and name that: "
            f"laurel export --model {source} --output DIR"
        )
    return foreign


def _from_files(
    config: PolicyConfig,
    resume_from: Path | None,
    dtype: torch.dtype,
    mesh: DeviceMesh | None,
    seed: int,
    notes: list[str],
) -> tuple[Any, _Read]:
    """The tokenizer and the classifier; of another program's model, both as that program reads."""
    name = str(resume_from or config.model_name)
    # A checkpoint of a run with adapters has them merged; they belong on what was before.
    source = str(config.model_name) if config.dtensor_cfg.lora_cfg.enabled else name
    foreign = _foreign_head(config, source, mesh)
    is_theirs = foreign is not None and resume_from is None
    tokenizer = find_tokenizer(
        config, name, (), is_resumed=resume_from is not None, pad_may_end=is_theirs
    )
    if foreign is not None and resume_from is None:
        foreign.settle_tokenizer(tokenizer, notes)
    return tokenizer, _load(config, source, dtype, mesh, seed, foreign)


def _take_head(read: _Read, notes: list[str], *, keeps_bias: bool) -> None:
    """Give the classifier the head of another program, if it is one's."""
    foreign = read.foreign
    if foreign is None:
        return
    bias = foreign.put_into(read.classifier, keeps_bias=keeps_bias)
    notes.append(foreign.describe())
    if bias and not keeps_bias:
        notes.append(
            f"the bias of its head, {bias:.6g}, is left out: it moves all scores alike, and "
            "Hugging Face's classes have no place for it"
        )
    if foreign.mean is not None:
        notes.append(
            f"{foreign.program} measured a mean of {foreign.mean:.4g} and a deviation of "
            f"{foreign.std:.4g}; scores are given as they are"
        )


def _make(config: PolicyConfig, tokenizer: Any, max_length: int, seed: int) -> Any:
    """A small random classifier for a tokenizer."""
    from transformers import AutoModelForSequenceClassification

    factory: Any = AutoModelForSequenceClassification
    num_labels = _num_outputs(config)
    classifier = make_network(factory, config, tokenizer, max_length, num_labels=num_labels)
    _init_head(classifier, seed)
    return classifier


def _load(
    config: PolicyConfig,
    name: str,
    dtype: torch.dtype,
    mesh: DeviceMesh | None,
    seed: int,
    foreign: ValueHead | None,
) -> _Read:
    """The classifier; a new head is drawn from a seed, another program's not yet read.

    Raises:
        ModelError: See `load_reward_model`.
    """
    from transformers import AutoModelForSequenceClassification

    hf_config = read_config(config, name)
    refuse_hub_name(name, hf_config)
    is_classifier = _is_classifier(hf_config)
    hf_config.num_labels = _num_outputs(config)
    factory = AutoModelForSequenceClassification
    model, info = read_weights(
        factory, config, name, hf_config, dtype, may_be_empty=mesh is not None
    )
    _check_outputs(name, info["mismatched_keys"], _num_outputs(config))
    refuse_other_sizes(name, info["mismatched_keys"])
    lacks_head = any(key.startswith(REWARD_HEADS) for key in info["missing_keys"])
    may_lack_head = not is_classifier if foreign is None else foreign.is_apart
    refuse_missing(
        name,
        (k for k in info["missing_keys"] if not (may_lack_head and k.startswith(REWARD_HEADS))),
    )
    has_new_head = lacks_head and foreign is None
    if has_new_head:
        _init_head(model, seed)
    strange = tuple(foreign_heads(info["unexpected_keys"]))
    return _Read(model, has_new_head, strange, foreign)


def _is_classifier(hf_config: Any) -> bool:
    return any(n.endswith("ForSequenceClassification") for n in hf_config.architectures or [])


def _agree(classifier: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer with more tokens than are embedded; pad alike."""
    refuse_large_tokenizer(classifier, tokenizer)
    agree_on_padding(classifier, tokenizer, teaches_padding=False)


def _adapted(
    classifier: Any, config: PolicyConfig, resume_from: Path | None, seed: int | None
) -> Any:
    """The classifier with adapters, where wanted: new ones, alike on every rank by a seed, or a
    run's."""
    if not config.dtensor_cfg.lora_cfg.enabled:
        return classifier
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        classifier = add_adapters(classifier, config.dtensor_cfg.lora_cfg, trains_head=True)
    if resume_from is not None:
        load_adapters(resume_from, classifier)
    return classifier


def _check_outputs(name: str, mismatched: Iterable[tuple[str, Any, Any]], wanted: int) -> None:
    """Refuse a head with another number of outputs."""
    for key, found, expected in mismatched:
        if key.startswith(REWARD_HEADS) and found[0] != expected[0]:
            raise ModelError(
                f"{name}: {key} has {found[0]} outputs and this run needs {wanted}. "
                "A reward model has one label; for a model with several ratings set "
                f"{key_of('policy.reward_model_cfg.reward_model_type')}=regression and list "
                f"{key_of('policy.reward_model_cfg.attributes')}."
            )


def _num_outputs(config: PolicyConfig) -> int:
    reward_model = config.reward_model_cfg
    return len(reward_model.attributes) if reward_model.reward_model_type == "regression" else 1


def _head_name(classifier: Any) -> str | None:
    """The attribute that maps the last hidden state to scores; None where the model pools."""
    head = getattr(classifier, "score", None)
    return "score" if isinstance(head, nn.Linear) else None


def _init_head(classifier: Any, seed: int) -> None:
    """Small random scores: a standard deviation of about `hidden ** -0.5` over conversations."""
    if _head_name(classifier) is None:
        return  # one that pools has a head of its own making
    head: nn.Linear = classifier.score
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        weight = torch.randn(head.weight.shape, generator=generator) / (head.in_features + 1)
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.zero_()


# ------------------------------------------------------------------------------------- contract


def _contract(
    config: PolicyConfig,
    tokenizer: Any,
    base: str,
    read: _Read,
    max_length: int,
    truncation_side: Literal["left", "right"],
    notes: list[str],
) -> ScoringContract:
    """The contract saved with the model, or a new one."""
    directory = Path(base)
    reward_model = config.reward_model_cfg
    classifier, foreign = read.classifier, read.foreign
    if (directory / FILE_NAME).is_file():
        contract = ScoringContract.load(directory, tokenizer)
        rules = contract.rules
        if list(rules.attributes) != reward_model.attributes:
            raise ModelError(
                f"{base} gives the attributes {list(rules.attributes)} and "
                f"{key_of('policy.reward_model_cfg.attributes')} asks for "
                f"{reward_model.attributes}; give the same, in the same order"
            )
        if (rules.max_length, rules.truncation_side) != (max_length, truncation_side):
            notes.append(
                f"the model brings its own contract: conversations are cut on the "
                f"{rules.truncation_side} to {rules.max_length:,} tokens, as it was trained"
            )
        return contract
    positions = _num_positions(classifier, tokenizer)
    if positions is not None and max_length > positions:
        notes.append(f"the model has {positions:,} positions: longer conversations are cut to that")
        max_length = positions
    if foreign is not None:
        truncation_side = foreign.truncation_side or truncation_side
    contract = ScoringContract.draw_up(
        tokenizer,
        max_length=max_length,
        truncation_side=truncation_side,
        append_eos=read.has_new_head,
        closes_ends=foreign is None,
        template_kwargs=config.tokenizer.chat_template_kwargs,
        pooled="last" if _head_name(classifier) is not None else "model",
        attributes=reward_model.attributes,
        attribute_weights=reward_model.attribute_weights,
    )
    if contract.rules.pinned_date is not None:
        notes.append(
            f"the chat template prints the date; it is pinned to {contract.rules.pinned_date}, or "
            "scores would change from day to day"
        )
    check_rendering(contract)
    return contract if foreign is None else contract.with_rules(**foreign.statistics())


def _num_positions(classifier: Any, tokenizer: Any) -> int | None:
    """Tokens of the longest conversation that the model can number; None where it does not say."""
    positions = num_positions(classifier)
    if positions is not None and _head_name(classifier) is None:
        # Encoders like RoBERTa number from an offset, which their tokenizer takes into account.
        positions = min(positions, tokenizer.model_max_length)
    return positions
