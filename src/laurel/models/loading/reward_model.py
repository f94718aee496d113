"""Loads reward models from any Hugging Face decoder or classifier, and checks them before use."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from laurel import plugins
from laurel.errors import ConfigError, ModelError, key_of
from laurel.models.forest.attention import register
from laurel.models.forest.decoder import RewardModel
from laurel.models.loading.adapters import with_adapters
from laurel.models.loading.pretrained import (
    REWARD_HEADS,
    Probe,
    agree_on_padding,
    check_batches,
    compute_dtype,
    finalize_model,
    find_tokenizer,
    logits_alone,
    make_network,
    make_probe,
    num_positions,
    outputs_alone,
    own_attention,
    read_config,
    read_weights,
    refuse_large_tokenizer,
    refuse_missing,
    refuse_other_sizes,
    start_of,
    take_path,
)
from laurel.models.parallel.weights import refuse_unspreadable
from laurel.models.scoring import (
    FILE_NAME,
    FORMAT,
    OLD_CONTENTS,
    ScoringContract,
    ScoringRules,
    StepRules,
    check_rendering,
)
from laurel.models.spec import ModelSpec
from laurel.plugins import ForeignHead, HeadFormat, SavedModel


def understood() -> str:
    """Return the sentence that names the reward heads which can be read."""
    forms = ["Hugging Face's classifiers (score.weight)"]
    forms += [one.understood for one in _formats() if one.understood]
    return f"Understood are: {'; '.join(forms)}"


def find_value_head(directory: Path, *, safetensors_only: bool = True) -> ForeignHead | None:
    """Find the reward head that another program saved in a directory, in a form of its own.

    Only the names of weights are read, and no pickled file is opened.

    Args:
        safetensors_only: Whether pickled weights are refused.

    Returns:
        The head; None for any other model, including Laurel's, and for other directories.

    Raises:
        ModelError: Such a program saved the model, but it is incomplete or gives no reward.
    """
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # loading reports it best
    if not isinstance(config, dict) or (directory / FILE_NAME).is_file():
        return None
    saved = SavedModel(directory=directory, config=config, safetensors_only=safetensors_only)
    heads = (one.make(None, saved) for one in _formats())
    return next((head for head in heads if head is not None), None)


def _formats() -> Iterator[HeadFormat]:
    for name in plugins.names("heads"):
        try:
            yield plugins.find(HeadFormat, name)
        except ConfigError as problem:  # a package that others' models must not wait for
            warnings.warn(str(problem), RuntimeWarning, stacklevel=2)


@dataclass(slots=True, kw_only=True)
class LoadedRewardModel:
    """A reward model and its scoring contract, with remarks on loading for the user."""

    model: RewardModel
    contract: ScoringContract
    notes: list[str] = field(default_factory=list)
    """Remarks for the user: a new head, the padded path, a pinned date."""
    has_new_head: bool = False
    base_model: str = ""
    strange_weights: tuple[str, ...] = ()
    """The weights in the files that the network lacks, except a language-model head."""


def load_reward_model(
    spec: ModelSpec,
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
    for_training: bool = False,
) -> LoadedRewardModel:
    """Load a reward model, or create one with random weights.

    Args:
        seed: The seed of a new head and of random weights.
        max_length: The maximum number of tokens of a conversation, if the model has no contract.
        truncation_side: The side on which conversations are cut, if the model has no contract.
        texts: The texts on which a new tokenizer is trained if `spec.scratch` is set.
        weights_dtype: The dtype of the weights: float32 for training (master weights), lower to
            score in less memory.
        resume_from: A checkpoint of the same run, whose tokenizer, contract and weights are used.
        mesh: The mesh over which the model is sharded. All ranks then call this with the same
            arguments.
        keeps_bias: Whether to keep the bias of a head that another program saved (`ForeignHead`).
            The bias adds the same number to every score. Laurel's checkpoints cannot store it.
        for_training: Whether a run trains the model. Where it begins, the contract of a reward
            model that an earlier version saved becomes one of this version.

    Raises:
        ModelError: The model cannot give a reward, or is unsafe to load.
        ConfigError: The model cannot be sharded over the mesh.
    """
    register()
    if mesh is not None:
        refuse_unspreadable(spec, mesh)
    base, notes = start_of(spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if spec.weights_from(resume_from) is None:
            tokenizer = find_tokenizer(spec, texts, resume_from=resume_from)
            read = _Read(_make(spec, tokenizer, max_length, seed), has_new_head=True)
        else:
            tokenizer, read = _from_files(spec, resume_from, weights_dtype, mesh, seed, notes)
    _take_head(read, notes, keeps_bias=keeps_bias)
    refuse_large_tokenizer(read.classifier, tokenizer)
    agree_on_padding(read.classifier, tokenizer, teaches_padding=False)
    head_name = _head_name(read.classifier)
    path = take_path(read.classifier, spec, notes, pools_itself=head_name is None)
    name = str(resume_from or spec.weights_from(None) or spec.name)
    contract = _contract(
        spec,
        tokenizer,
        name,
        read,
        max_length,
        truncation_side,
        notes,
        begins_training=for_training and resume_from is None,
    )
    with torch.random.fork_rng(devices=[], enabled=mesh is not None):
        if mesh is not None:
            torch.manual_seed(seed)  # new adapters are alike on every rank
        classifier = read.classifier
        if spec.lora is not None:
            classifier = with_adapters(classifier, spec.lora, resume_from, trains_head=True)
    precision = compute_dtype(spec, weights_dtype)
    model = RewardModel(classifier, head_name=head_name, path=path, precision=precision)
    finalize_model(model, spec, device, mesh, notes)
    if read.has_new_head and resume_from is None:
        notes.append("the reward head is new and random: its scores mean nothing before training")
    return LoadedRewardModel(
        model=model,
        contract=contract,
        notes=notes,
        has_new_head=read.has_new_head,
        base_model=base,
        strange_weights=read.strange_weights,
    )


def load_contract(
    spec: ModelSpec,
    *,
    max_length: int,
    truncation_side: Literal["left", "right"],
    for_training: bool = False,
) -> tuple[ScoringContract, list[str]]:
    """Return the scoring contract of a reward model, and remarks for the user.

    The weights of the model are not read.

    Args:
        max_length: The maximum number of tokens of a conversation, if the model has no contract.
        truncation_side: The side on which conversations are cut, if the model has no contract.
        for_training: Whether a language model is accepted, since training gives it a reward head.

    Raises:
        ModelError: The model cannot give a reward, or is unsafe to load.
    """
    notes: list[str] = []
    name = spec.files
    foreign = find_value_head(Path(name), safetensors_only=spec.safetensors_only)
    if foreign is not None:
        raise ModelError(
            f"{name} was made by {foreign.program}, and other processes could not score with it. "
            "Write it as any program reads it, and name that: "
            f"laurel export --model {name} --output DIR"
        )
    tokenizer = find_tokenizer(spec)
    hf_config = read_config(spec, name)
    has_new_head = for_training and not _is_classifier(hf_config)
    pad_id = hf_config.get_text_config().pad_token_id
    hf_config.num_labels = _num_outputs(spec)
    factory = _factory(spec)
    with torch.device("meta"):  # its modules show how it pools
        classifier = factory.from_config(hf_config, trust_remote_code=spec.trust_remote_code)
    agree_on_padding(classifier, tokenizer, teaches_padding=False)
    read = _Read(classifier, has_new_head=has_new_head, pad_id=pad_id)
    contract = _contract(
        spec,
        tokenizer,
        name,
        read,
        max_length,
        truncation_side,
        notes,
        begins_training=for_training,
    )
    return contract, notes


@dataclass(frozen=True, slots=True)
class _Read:
    """A classifier that was created or loaded, and where its reward head comes from.

    `strange_weights` names the weights in the files that the classifier lacks, except those of a
    language-model head. `pad_id` is the padding token of the model's own configuration.
    """

    classifier: Any
    has_new_head: bool
    strange_weights: tuple[str, ...] = ()
    foreign: ForeignHead | None = None
    pad_id: int | None = None


def _from_files(
    spec: ModelSpec,
    resume_from: Path | None,
    dtype: torch.dtype,
    mesh: DeviceMesh | None,
    seed: int,
    notes: list[str],
) -> tuple[Any, _Read]:
    source = str(spec.weights_from(resume_from))
    foreign = find_value_head(Path(source), safetensors_only=spec.safetensors_only)
    if foreign is not None and mesh is not None:
        raise ConfigError(
            f"{source} was made by {foreign.program}, and such a model is not spread over ranks. "
            "Write it as any program reads it, and name that: "
            f"laurel export --model {source} --output DIR"
        )
    is_theirs = foreign is not None and resume_from is None
    tokenizer = find_tokenizer(spec, resume_from=resume_from, pad_may_end=is_theirs, notes=notes)
    if foreign is not None and resume_from is None:
        foreign.settle_tokenizer(tokenizer, notes)
    return tokenizer, _load(spec, source, dtype, mesh, seed, foreign)


def _take_head(read: _Read, notes: list[str], *, keeps_bias: bool) -> None:
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


def _make(spec: ModelSpec, tokenizer: Any, max_length: int, seed: int) -> Any:
    num_labels = _num_outputs(spec)
    classifier = make_network(_factory(spec), spec, tokenizer, max_length, num_labels=num_labels)
    _init_head(classifier, seed)
    return classifier


def _load(
    spec: ModelSpec,
    name: str,
    dtype: torch.dtype,
    mesh: DeviceMesh | None,
    seed: int,
    foreign: ForeignHead | None,
) -> _Read:
    hf_config = read_config(spec, name)
    if not Path(name).is_dir():
        for form in _formats():
            form.check_hub_name(name, hf_config)
    is_classifier = _is_classifier(hf_config)
    pad_id = hf_config.get_text_config().pad_token_id
    hf_config.num_labels = _num_outputs(spec)
    model, info = read_weights(
        _factory(spec), spec, name, hf_config, dtype, may_be_empty=mesh is not None
    )
    for key, found, expected in info["mismatched_keys"]:
        if key.startswith(REWARD_HEADS) and found[0] != expected[0]:
            raise ModelError(
                f"{name}: {key} has {found[0]} outputs and this run needs {_num_outputs(spec)}. "
                "A reward model has one label; for a model with several ratings set "
                f"{key_of('policy.reward_model_cfg.reward_model_type')}=regression and list "
                f"{key_of('policy.reward_model_cfg.attributes')}."
            )
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
    # They may be the reward head of another program; an error names them if there is none.
    strange = tuple(sorted(k for k in info["unexpected_keys"] if not k.startswith("lm_head.")))
    return _Read(model, has_new_head, strange, foreign, pad_id)


def _factory(spec: ModelSpec) -> Any:
    # The head of a process reward model is read at many tokens, as that of a token classifier.
    import transformers

    if spec.head.reward_model_type == "process":
        return transformers.AutoModelForTokenClassification
    return transformers.AutoModelForSequenceClassification


def _is_classifier(hf_config: Any) -> bool:
    endings = ("ForSequenceClassification", "ForTokenClassification")
    return any(n.endswith(endings) for n in hf_config.architectures or [])


def _num_outputs(spec: ModelSpec) -> int:
    return len(spec.head.attributes) if spec.head.reward_model_type == "regression" else 1


def _head_name(classifier: Any) -> str | None:
    head = getattr(classifier, "score", None)
    return "score" if isinstance(head, nn.Linear) else None


def _init_head(classifier: Any, seed: int) -> None:
    # A standard deviation of about `hidden ** -0.5` over conversations: small random scores.
    if _head_name(classifier) is None:
        return  # one that pools has a head of its own making
    head: nn.Linear = classifier.score
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        weight = torch.randn(head.weight.shape, generator=generator) / (head.in_features + 1)
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.zero_()


def _step_rules(spec: ModelSpec) -> StepRules | None:
    head = spec.head
    if head.reward_model_type != "process":
        return None
    return StepRules(separator=head.step_separator, aggregate=head.step_aggregate)


def _check_asked(spec: ModelSpec, base: str, rules: ScoringRules) -> None:
    """Check that what is asked for is what a model was trained to give."""
    if rules.steps != _step_rules(spec):
        said = "no steps" if rules.steps is None else repr(rules.steps)
        raise ModelError(
            f"{base} was trained to read {said}, and {key_of('policy.reward_model_cfg')} asks "
            f"for {_step_rules(spec) or 'no steps'!r}; give the same"
        )
    if list(rules.attributes) != spec.head.attributes:
        raise ModelError(
            f"{base} gives the attributes {list(rules.attributes)} and "
            f"{key_of('policy.reward_model_cfg.attributes')} asks for "
            f"{spec.head.attributes}; give the same, in the same order"
        )


def _contract(
    spec: ModelSpec,
    tokenizer: Any,
    base: str,
    read: _Read,
    max_length: int,
    truncation_side: Literal["left", "right"],
    notes: list[str],
    *,
    begins_training: bool,
) -> ScoringContract:
    classifier, foreign = read.classifier, read.foreign
    if (Path(base) / FILE_NAME).is_file():
        contract = ScoringContract.load(Path(base), tokenizer)
        _check_asked(spec, base, contract.rules)
        rules = contract.rules
        if (rules.max_length, rules.truncation_side) != (max_length, truncation_side):
            notes.append(
                "the model brings its own contract: conversations of more than "
                f"{rules.max_length:,} tokens {rules.overlong}, as it was trained"
            )
        if begins_training:
            return contract.with_rules(format=FORMAT)
        if not rules.has_plain_contents:
            notes.append(OLD_CONTENTS)
        return contract
    positions = num_positions(classifier.config)
    if positions is not None and _head_name(classifier) is None:
        # Encoders like RoBERTa number from an offset, which their tokenizer takes into account.
        positions = min(positions, tokenizer.model_max_length)
    if positions is not None and max_length > positions:
        process = spec.head.reward_model_type == "process"
        outcome = "get no score" if process else "are cut to that"
        notes.append(f"the model has {positions:,} positions: longer conversations {outcome}")
        max_length = positions
    if foreign is not None:
        truncation_side = foreign.truncation_side or truncation_side
    if spec.head.reward_model_type == "process":
        if _head_name(classifier) is None:
            raise ModelError(
                f"{base}: {type(classifier).__name__} has no linear head named `score` that could "
                "be read at each step. A process reward model is made of a decoder"
            )
        if not tokenizer.is_fast:
            raise ModelError(
                f"{base}: {type(tokenizer).__name__} does not say which characters a token holds, "
                "so the ends of steps cannot be found. Name a fast tokenizer: "
                f"{key_of('policy.tokenizer.name')}"
            )
    contract = ScoringContract.create(
        tokenizer,
        max_length=max_length,
        truncation_side=truncation_side,
        append_eos=read.has_new_head,
        closes_ends=foreign is None,
        template_kwargs=spec.tokenizer.chat_template_kwargs,
        pooled="last" if _head_name(classifier) is not None else "model",
        attributes=spec.head.attributes,
        attribute_weights=spec.head.attribute_weights,
        steps=_step_rules(spec),
    )
    if contract.rules.pinned_date is not None:
        notes.append(
            f"the chat template prints the date; it is pinned to {contract.rules.pinned_date}: the "
            f"day in {key_of('policy.tokenizer.date')}, without one that on which the run or the "
            "server began, and in a template that Laurel saved the day of its training"
        )
    reads_by_padding = foreign is None and not read.has_new_head
    is_named = spec.tokenizer.pad_token not in (None, "auto")
    check_rendering(contract, own_pad=read.pad_id if reads_by_padding and not is_named else None)
    if foreign is None or foreign.mean is None or foreign.std is None:
        return contract
    return contract.with_rules(mean=foreign.mean, std=foreign.std)


# The self-check at load: a batch must score as its sequences do one by one.

SHAPES = ((11, (5, 1, 8)), (0, (7,)))
"""Trunk and branch lengths of the probe that `make_probe` makes."""


def check_paths(model: RewardModel) -> float:
    """Compare a small batch on the model's path with the model's own forward pass, one by one.

    Returns:
        The largest relative difference found.

    Raises:
        ModelError: They disagree, so batches would give wrong scores.
    """
    # Hidden states are compared because a new head makes every score small; scores are then
    # compared with those that Hugging Face's class returns by itself.
    probe = make_probe(model, SHAPES, seed=0)
    return check_batches(
        model, lambda: _largest_difference(model, probe), what="score", role="reward model"
    )


def _largest_difference(model: RewardModel, probe: Probe) -> float | None:
    """Compare the batch with one-by-one passes; None where the latter are not finite."""
    batch = probe.batch(model.path)
    scores_NK = model(batch).double()
    if model.head_name is None:
        own_NK = torch.cat([_read(logits_alone(model, ids)) for ids in probe.sequences_N]).double()
        if not own_NK.isfinite().all():
            return None
        return float((scores_NK - own_NK).abs().max() / own_NK.abs().max().clamp_min(1e-12))
    hidden_ND = model.last_hidden(batch).double()
    with own_attention(model):
        alone = [outputs_alone(model, ids) for ids in probe.sequences_N]
    own_NK = torch.cat([_read(logits) for logits, _ in alone]).double()
    own_ND = torch.stack([hidden_LD[-1] for _, hidden_LD in alone]).double()
    if not (own_NK.isfinite().all() and own_ND.isfinite().all()):
        return None
    size_N = own_ND.norm(dim=1).clamp_min(1e-12)
    head_K = getattr(model.classifier, model.head_name).weight.double().norm(dim=1)
    hidden = ((hidden_ND - own_ND).norm(dim=1) / size_N).max()
    scores = ((scores_NK - own_NK).abs() / (size_N[:, None] * head_K).clamp_min(1e-12)).max()
    return float(torch.maximum(hidden, scores))


def _read(logits: Tensor) -> Tensor:
    # A token classifier gives the outputs of every token.
    return logits if logits.dim() == 2 else logits[:, -1]
