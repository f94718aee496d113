"""Loading reward models: any Hugging Face decoder or classifier, checked before it is used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn

from laurel.config.schema import PolicyConfig, TokenizerConfig
from laurel.errors import ConfigError, ModelError
from laurel.models.adapters import add_adapters, load_adapters
from laurel.models.attention import FOREST, register
from laurel.models.reward_model import RewardModel
from laurel.models.scoring import FILE_NAME, ScoringContract, check_rendering
from laurel.models.scratch import scratch_config, train_tokenizer
from laurel.models.tokenizer import first_line, load_tokenizer, settle_template

HEADS = ("score.", "classifier.")
"""What the names of a head's weights begin with: decoders', then encoders'."""
PLAIN_ATTENTION = {"full_attention", "sliding_attention"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True, kw_only=True)
class LoadedRewardModel:
    """A model, the contract it scores by, and what was decided on the way."""

    model: RewardModel
    contract: ScoringContract
    notes: list[str] = field(default_factory=list)
    """What a user should know: a new head, the padded path, a pinned date."""
    has_new_head: bool = False
    base_model: str = ""


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

    Raises:
        ModelError: Not a model that can give one reward, or one that is unsafe to load.
    """
    register()
    notes: list[str] = []
    base = config.model_name or f"nothing ({config.scratch and config.scratch.architecture})"
    name = str(resume_from or config.model_name)
    uses_adapters = config.dtensor_cfg.lora_cfg.enabled
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = _tokenizer(config, name, texts, is_resumed=resume_from is not None)
        if config.scratch is not None and (resume_from is None or uses_adapters):
            classifier, has_new_head = _make(config, tokenizer, max_length), True
        else:
            weights = str(config.model_name) if uses_adapters else name
            classifier, has_new_head = _load(config, weights, weights_dtype)
    head_name = _head_name(classifier)
    if has_new_head and head_name is not None:
        _init_head(getattr(classifier, head_name), seed)
    _agree_on_padding(classifier, tokenizer)
    path = _take_path(classifier, head_name, config, notes)
    contract = _contract(
        config, tokenizer, name, has_new_head, classifier, max_length, truncation_side, notes
    )
    if uses_adapters:
        classifier = add_adapters(classifier, config.dtensor_cfg.lora_cfg)
        if resume_from is not None:
            load_adapters(resume_from, classifier)
    _settle(classifier, device, recomputes=config.dtensor_cfg.activation_checkpointing)
    precision = DTYPES[config.precision] if weights_dtype == torch.float32 else weights_dtype
    model = RewardModel(classifier, head_name=head_name, path=path, precision=precision)
    if has_new_head and resume_from is None:
        notes.append("the reward head is new and random: its scores mean nothing before training")
    return LoadedRewardModel(
        model=model, contract=contract, notes=notes, has_new_head=has_new_head, base_model=base
    )


def _tokenizer(config: PolicyConfig, name: str, texts: Iterable[str], *, is_resumed: bool) -> Any:
    """The tokenizer that is there, or one learned from the texts."""
    if config.scratch is not None and not is_resumed:
        tokenizer = train_tokenizer(texts, vocab_size=config.scratch.vocab_size)
        settle_template(tokenizer, config.tokenizer.chat_template)
        return tokenizer
    wanted = TokenizerConfig() if is_resumed else config.tokenizer
    return load_tokenizer(wanted, model_name=name, trust_remote_code=config.trust_remote_code)


# -------------------------------------------------------------------------------------- weights


def _make(config: PolicyConfig, tokenizer: Any, max_length: int) -> Any:
    """A small random classifier for a tokenizer."""
    from transformers import AutoModelForSequenceClassification

    assert config.scratch is not None
    hf_config = scratch_config(config.scratch, tokenizer, max_length=max_length)
    hf_config.num_labels = _num_outputs(config)
    factory: Any = AutoModelForSequenceClassification
    try:
        return factory.from_config(hf_config, dtype=torch.float32)
    except ValueError as error:
        raise ConfigError(
            f"policy.scratch: no classifier can be made of this description: {first_line(error)}"
        ) from error


def _load(config: PolicyConfig, name: str, dtype: torch.dtype) -> tuple[Any, bool]:
    """The classifier, and whether its head is new.

    Raises:
        ModelError: See `load_reward_model`.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    source = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    try:
        hf_config = AutoConfig.from_pretrained(name, **source)
    except (OSError, ValueError) as error:
        raise ModelError(_not_loadable(name, error)) from error
    architectures = hf_config.architectures or []
    is_classifier = any(a.endswith("ForSequenceClassification") for a in architectures)
    for key, value in config.hf_config_overrides.items():
        if not hasattr(hf_config, key):
            raise ConfigError(f"policy.hf_config_overrides.{key}: {name} has no such setting")
        setattr(hf_config, key, value)
    wanted = _num_outputs(config)
    hf_config.num_labels = wanted
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name,
            config=hf_config,
            dtype=dtype,
            use_safetensors=True if config.safetensors_only else None,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **source,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(_not_loadable(name, error)) from error
    _check_sizes(name, info["mismatched_keys"], wanted)
    missing = sorted(info["missing_keys"])
    new_head = [key for key in missing if key.startswith(HEADS)]
    if set(missing) - set(new_head) or (new_head and is_classifier):
        raise ModelError(
            f"{name}: the weights lack {', '.join(missing[:5])}"
            f"{' ...' if len(missing) > 5 else ''}, which would be left random. "
            "The directory is not a complete model of the architecture it names."
        )
    return model, bool(new_head)


def _check_sizes(name: str, mismatched: Iterable[tuple[str, Any, Any]], wanted: int) -> None:
    """Refuse weights of another size than the configuration says, the head's first of all."""
    for key, found, expected in sorted(
        mismatched, key=lambda m: (not m[0].startswith(HEADS), m[0])
    ):
        if key.startswith(HEADS) and found[0] != expected[0]:
            raise ModelError(
                f"{name}: {key} has {found[0]} outputs and this run needs {wanted}. "
                "A reward model has one label; for a model with several ratings set "
                "policy.reward_model_cfg.reward_model_type=regression and list "
                "policy.reward_model_cfg.attributes."
            )
        raise ModelError(
            f"{name}: {key} is {list(found)} in the weights and {list(expected)} by the "
            "configuration: they do not belong together (config.json, policy.hf_config_overrides)"
        )


def _leave_file(classifier: nn.Module) -> None:
    """Copy every weight out of the mapped file it was loaded from, to memory of its own.

    In the file it lies at some multiple of 8 bytes, and the last bits of a product depend on where
    its factors lie: a resumed run would drift from the run it goes on from. Nor may a checkpoint
    that is deleted or replaced meanwhile change the model.
    """
    for tensor in (*classifier.parameters(), *classifier.buffers()):
        tensor.data = tensor.data.clone()


def _not_loadable(name: str, error: Exception) -> str:
    first = first_line(error)
    hint = ""
    if "safetensors" in str(error):
        hint = (
            " Pickled weights can run code when they are loaded: convert them to safetensors, or "
            "set policy.safetensors_only=false if you trust them."
        )
    elif "trust_remote_code" in str(error):
        hint = " It brings Python code: read it, then set policy.trust_remote_code=true."
    elif not Path(name).exists():
        hint = " It is no local directory; a hub name needs the network and, where gated, a login."
    return f"policy.model_name={name} cannot be loaded: {first}{hint}"


def _num_outputs(config: PolicyConfig) -> int:
    reward_model = config.reward_model_cfg
    return len(reward_model.attributes) if reward_model.reward_model_type == "regression" else 1


def _head_name(classifier: Any) -> str | None:
    """The attribute that maps the last hidden state to scores; None where the model pools."""
    head = getattr(classifier, "score", None)
    return "score" if isinstance(head, nn.Linear) else None


def _init_head(head: nn.Linear, seed: int) -> None:
    """Small random scores: a standard deviation of about `hidden ** -0.5` over conversations."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        weight = torch.randn(head.weight.shape, generator=generator) / (head.in_features + 1)
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.zero_()


def _agree_on_padding(classifier: Any, tokenizer: Any) -> None:
    """One padding token for both: Hugging Face's own head finds the last token by it."""
    text_config = classifier.config.get_text_config()
    classifier.config.pad_token_id = tokenizer.pad_token_id
    text_config.pad_token_id = tokenizer.pad_token_id
    embeddings = classifier.get_input_embeddings()
    # This row gets no gradient. A saved model would come back with the new one, and a resumed run
    # train another row than the run it goes on from.
    embeddings.padding_idx = tokenizer.pad_token_id
    size = embeddings.num_embeddings
    if len(tokenizer) > size:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens and the model embeds {size}: they do not "
            "belong together (policy.tokenizer.name)"
        )


def _settle(classifier: Any, device: torch.device, *, recomputes: bool) -> None:
    """Bring a whole classifier to where it computes, and set how."""
    if recomputes:
        recompute_activations(classifier)
    classifier.to(device=device)
    if device.type == "cpu":
        _leave_file(classifier)


def recompute_activations(classifier: Any) -> None:
    """Keep no activations of a layer for the backward pass; compute them there again.

    Raises:
        ConfigError: The architecture has no layers that could.
    """
    enable = getattr(classifier, "activation_checkpointing_enable", None)
    if enable is None:  # before transformers 5.23
        enable = classifier.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"policy.dtensor_cfg.activation_checkpointing: {error}") from error


# ----------------------------------------------------------------------------- path and contract


def _take_path(
    classifier: Any, head_name: str | None, config: PolicyConfig, notes: list[str]
) -> Literal["forest", "padded"]:
    """Prepare the classifier for the path that suits it."""
    path, reason = _choose_path(classifier, head_name, config)
    if reason is not None:
        notes.append(f"padded path: {reason}")
    if path == "forest":
        classifier.set_attn_implementation(FOREST)
    return path


def _choose_path(
    classifier: Any, head_name: str | None, config: PolicyConfig
) -> tuple[Literal["forest", "padded"], str | None]:
    """How batches reach the model, and why if not as forests."""
    if not config.sequence_packing.enabled:
        return "padded", "policy.sequence_packing.enabled is false"
    kind = type(classifier).__name__
    if head_name is None:
        return "padded", f"{kind} pools by itself"
    if not getattr(classifier, "_supports_attention_backend", False):
        return "padded", f"{kind} does not take an attention implementation"
    layer_types = set(getattr(classifier.config.get_text_config(), "layer_types", None) or ())
    if layer_types - PLAIN_ATTENTION:
        return (
            "padded",
            f"{kind} has layers of type {', '.join(sorted(layer_types - PLAIN_ATTENTION))}",
        )
    attentions = [m for m in classifier.modules() if hasattr(m, "is_causal")]
    if not attentions or not all(m.is_causal for m in attentions):
        return "padded", f"{kind} looks at later tokens"
    return "forest", None


def _contract(
    config: PolicyConfig,
    tokenizer: Any,
    base: str,
    has_new_head: bool,
    classifier: Any,
    max_length: int,
    truncation_side: Literal["left", "right"],
    notes: list[str],
) -> ScoringContract:
    """The contract saved with the model, or a new one."""
    directory = Path(base)
    reward_model = config.reward_model_cfg
    if (directory / FILE_NAME).is_file():
        contract = ScoringContract.load(directory, tokenizer)
        rules = contract.rules
        if list(rules.attributes) != reward_model.attributes:
            raise ModelError(
                f"{base} gives the attributes {list(rules.attributes)} and policy.reward_model_cfg."
                f"attributes asks for {reward_model.attributes}; give the same, in the same order"
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
    contract = ScoringContract.draw_up(
        tokenizer,
        max_length=max_length,
        truncation_side=truncation_side,
        append_eos=has_new_head,
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
    return contract


def _num_positions(classifier: Any, tokenizer: Any) -> int | None:
    """Tokens of the longest conversation that the model can number; None where it does not say.

    Rotary embeddings of type `longrope` (Phi-3) turn all texts of a batch differently as soon as
    one is longer than they were first trained for. Scores must not depend on what else is in the
    batch, so there that length is the limit.
    """
    hf_config = classifier.config.get_text_config()
    positions = getattr(hf_config, "max_position_embeddings", None)
    rotary = getattr(hf_config, "rope_parameters", None) or {}
    by_layer_type = [entry for entry in rotary.values() if isinstance(entry, dict)]
    for parameters in by_layer_type or [rotary]:
        if parameters.get("rope_type") == "longrope":
            positions = min(positions, parameters["original_max_position_embeddings"])
    if positions is not None and _head_name(classifier) is None:
        # Encoders like RoBERTa number from an offset, which their tokenizer takes into account.
        positions = min(positions, tokenizer.model_max_length)
    return positions
