"""What loading a reward model and loading a policy have in common."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from laurel.config.schema import PolicyConfig, TokenizerConfig
from laurel.errors import ConfigError, ModelError, key_of, setting_of
from laurel.models.attention import FOREST
from laurel.models.decoder import Decoder, Path
from laurel.models.scratch import scratch_config, train_tokenizer
from laurel.models.spread_loading import empty_network, is_empty, spread
from laurel.models.tokenizer import first_line, load_tokenizer, settle_template
from laurel.observe.hub import check_fetchable

REWARD_HEADS = ("score.", "classifier.")
"""What the names of a reward head's weights begin with: decoders', then encoders'."""
PLAIN_ATTENTION = {"full_attention", "sliding_attention"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# ------------------------------------------------------------------------- tokenizer and weights


def start_of(config: PolicyConfig) -> tuple[str, list[str]]:
    """What training starts from, in words, and the notes on it: a name that is not loaded."""
    if config.scratch is None:
        return str(config.model_name), []
    notes = []
    if config.model_name is not None and "model_name" in config.model_fields_set:
        notes.append(
            f"warning: policy.model_name={config.model_name} is not loaded: policy.scratch makes a "
            "new model of random weights. To train the named one, take it out: '~policy.scratch'"
        )
    return f"nothing ({config.scratch.architecture})", notes


def find_tokenizer(
    config: PolicyConfig,
    name: str,
    texts: Iterable[str],
    *,
    is_resumed: bool,
    pad_may_end: bool = False,
) -> Any:
    """The tokenizer that is there, or one learned from the texts.

    Raises:
        ModelError: See `load_tokenizer`.
    """
    if config.scratch is not None and not is_resumed:
        tokenizer = train_tokenizer(texts, vocab_size=config.scratch.vocab_size)
        settle_template(tokenizer, config.tokenizer.chat_template)
        return tokenizer
    return load_tokenizer(
        TokenizerConfig() if is_resumed else config.tokenizer,
        model_name=name,
        trust_remote_code=config.trust_remote_code,
        pad_may_end=pad_may_end,
    )


def make_network(
    factory: Any, config: PolicyConfig, tokenizer: Any, max_length: int, **special: Any
) -> Any:
    """A small random network for a tokenizer.

    Args:
        factory: transformers' `AutoModelFor...`.
        config: The policy section, with `scratch`.
        tokenizer: It gives the size of the vocabulary.
        max_length: Positions.
        special: Further settings of the network's configuration.

    Raises:
        ConfigError: `scratch` describes something that cannot be made.
    """
    assert config.scratch is not None
    hf_config = scratch_config(config.scratch, tokenizer, max_length=max_length)
    for key, value in special.items():
        setattr(hf_config, key, value)
    try:
        return factory.from_config(hf_config, dtype=torch.float32)
    except ValueError as error:
        kind = "classifier" if "num_labels" in special else "language model"
        raise ConfigError(
            f"{key_of('policy.scratch')}: no {kind} can be made of this description: "
            f"{first_line(error)}"
        ) from error


def read_config(config: PolicyConfig, name: str) -> Any:
    """The configuration that lies with a model, changed as the run asks.

    Raises:
        ModelError: There is none that can be read.
        ConfigError: `hf_config_overrides` names a setting that it does not have.
    """
    from transformers import AutoConfig

    if not os.path.exists(name):
        check_fetchable(name, key="policy.model_name")
    try:
        hf_config = AutoConfig.from_pretrained(name, **_source(config))
    except (OSError, ValueError) as error:
        raise ModelError(_not_loadable(name, error)) from error
    for key, value in config.hf_config_overrides.items():
        if not hasattr(hf_config, key):
            raise ConfigError(
                f"{key_of('policy.hf_config_overrides')}.{key}: {name} has no such setting"
            )
        setattr(hf_config, key, value)
    return hf_config


def read_weights(
    factory: Any,
    config: PolicyConfig,
    name: str,
    hf_config: Any,
    dtype: torch.dtype,
    *,
    may_be_empty: bool = False,
) -> tuple[Any, Any]:
    """The network, and what transformers says of its weights: missing, unexpected, mismatched.

    Args:
        factory: transformers' `AutoModelFor...`.
        config: The policy section.
        name: Directory or hub name.
        hf_config: Its configuration.
        dtype: Of the weights.
        may_be_empty: Whether it may come without memory; see `empty_network`.

    Raises:
        ModelError: They cannot be read, or must not be.
    """
    if may_be_empty:
        found = empty_network(factory, config, name, hf_config, dtype)
        if found is not None:
            return found
    try:
        network, info = factory.from_pretrained(
            name,
            config=hf_config,
            dtype=dtype,
            use_safetensors=True if config.safetensors_only else None,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **_source(config),
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(_not_loadable(name, error)) from error
    return network, info


def refuse_other_sizes(name: str, mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    """Refuse weights of another size than the configuration says.

    Raises:
        ModelError: The first of them.
    """
    for key, found, expected in sorted(mismatched, key=lambda entry: entry[0]):
        raise ModelError(
            f"{name}: {key} is {list(found)} in the weights and {list(expected)} by the "
            "configuration: they do not belong together (config.json, "
            f"{key_of('policy.hf_config_overrides')})"
        )


def refuse_missing(name: str, missing: Iterable[str]) -> None:
    """Refuse a network some of whose weights were not there.

    Raises:
        ModelError: With the first of them.
    """
    names = sorted(missing)
    if names:
        raise ModelError(
            f"{name}: the weights lack {', '.join(names[:5])}"
            f"{' ...' if len(names) > 5 else ''}, which would be left random. "
            "The directory is not a complete model of the architecture it names."
        )


def _source(config: PolicyConfig) -> dict[str, Any]:
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


def _not_loadable(name: str, error: Exception) -> str:
    first = first_line(error)
    hint = ""
    if "safetensors" in str(error):
        hint = (
            " Pickled weights can run code when they are loaded: convert them to safetensors, or "
            f"set {key_of('policy.safetensors_only')}=false if you trust them."
        )
    elif "trust_remote_code" in str(error):
        hint = (
            f" It brings Python code: read it, then set {key_of('policy.trust_remote_code')}=true."
        )
    elif not os.path.exists(name):
        hint = " It is no local directory; a hub name needs the network and, where gated, a login."
    return f"{setting_of('policy.model_name', name)} cannot be loaded: {first}{hint}"


# ----------------------------------------------------------------------------- fitting it together


def refuse_large_tokenizer(network: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer that gives ids which the network does not embed.

    Raises:
        ModelError: It does.
    """
    size = network.get_input_embeddings().num_embeddings
    if len(tokenizer) > size:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens and the model embeds {size}: they do not "
            f"belong together ({key_of('policy.tokenizer.name')})"
        )


def agree_on_padding(network: Any, tokenizer: Any, *, teaches_padding: bool) -> None:
    """One padding token for network and tokenizer.

    Hugging Face's own reward heads find the last token by it.

    Args:
        network: Changed.
        tokenizer: Read.
        teaches_padding: Whether its row of the embeddings gets gradients, as any other does.
            transformers leaves it out by what the configuration said when the network was made, so
            a resumed run would train another row than the run it goes on from.
    """
    for hf_config in (network.config, network.config.get_text_config()):
        hf_config.pad_token_id = tokenizer.pad_token_id
    embeddings = network.get_input_embeddings()
    embeddings.padding_idx = None if teaches_padding else tokenizer.pad_token_id


def precision_of(config: PolicyConfig, weights_dtype: torch.dtype) -> torch.dtype:
    """What a model computes in: as the configuration says, unless its weights are lower."""
    return DTYPES[config.precision] if weights_dtype == torch.float32 else weights_dtype


def settle(
    model: Decoder, config: PolicyConfig, device: torch.device, mesh: DeviceMesh | None
) -> None:
    """Bring a model to where it computes, spread over a mesh if there is one, and set how."""
    network = model.network
    if config.dtensor_cfg.activation_checkpointing:
        recompute_activations(network)
    if mesh is not None:
        if not is_empty(network):
            _leave_file(network)
        spread(model, config, mesh, device)
        return
    network.to(device=device)
    if device.type == "cpu":
        _leave_file(network)


def recompute_activations(network: Any) -> None:
    """Keep no activations of a layer for the backward pass; compute them there again.

    Raises:
        ConfigError: The architecture has no layers that could.
    """
    enable = getattr(network, "activation_checkpointing_enable", None)
    if enable is None:  # before transformers 5.23
        enable = network.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(
            f"{key_of('policy.dtensor_cfg.activation_checkpointing')}: {error}"
        ) from error


def _leave_file(network: nn.Module) -> None:
    """Copy every weight out of the mapped file it was loaded from, to memory of its own.

    In the file it lies at some multiple of 8 bytes, and the last bits of a product depend on where
    its factors lie: a resumed run would drift from the run it goes on from. Nor may a checkpoint
    that is deleted or replaced meanwhile change the model.
    """
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.data = tensor.data.clone()


# ------------------------------------------------------------------------------- path and positions


def take_path(
    network: Any, config: PolicyConfig, notes: list[str], *, pools_itself: bool = False
) -> Path:
    """Prepare the network for the way that batches suit it best, and note why if not as forests."""
    reason = _why_padded(network, config, pools_itself=pools_itself)
    if reason is not None:
        notes.append(f"padded path: {reason}")
        return "padded"
    network.set_attn_implementation(FOREST)
    return "forest"


def _why_padded(network: Any, config: PolicyConfig, *, pools_itself: bool) -> str | None:
    """Why the network cannot or shall not read forests; None where it can."""
    if not config.sequence_packing.enabled:
        return "policy.sequence_packing.enabled is false"
    kind = type(network).__name__
    if pools_itself:
        return f"{kind} pools by itself"
    if not getattr(network, "_supports_attention_backend", False):
        return f"{kind} does not take an attention implementation"
    layer_types = set(getattr(network.config.get_text_config(), "layer_types", None) or ())
    if layer_types - PLAIN_ATTENTION:
        return f"{kind} has layers of type {', '.join(sorted(layer_types - PLAIN_ATTENTION))}"
    causal = [module.is_causal for module in network.modules() if hasattr(module, "is_causal")]
    if not causal or not all(causal):
        return f"{kind} looks at later tokens"
    return None


def num_positions(network: Any) -> int | None:
    """Tokens of the longest conversation that the network can number; None where it does not say.

    Rotary embeddings of type `longrope` (Phi-3) turn all texts of a batch differently as soon as
    one is longer than they were first trained for. What a model says of a text must not depend on
    what else is in the batch, so there that length is the limit.
    """
    hf_config = network.config.get_text_config()
    positions: int | None = getattr(hf_config, "max_position_embeddings", None)
    rotary = getattr(hf_config, "rope_parameters", None) or {}
    by_layer_type = [entry for entry in rotary.values() if isinstance(entry, dict)]
    for parameters in by_layer_type or [rotary]:
        if parameters.get("rope_type") == "longrope" and positions is not None:
            positions = min(positions, parameters["original_max_position_embeddings"])
    return positions
