"""The shape of a Hugging Face model, read from its configuration; no weight is loaded."""

from __future__ import annotations

from typing import Any

import torch

from laurel.config.schema import DTensorConfig, PolicyConfig
from laurel.distributed.model_shape import ModelShape
from laurel.errors import ConfigError, ModelError
from laurel.models.pretrained import read_config
from laurel.models.tensor_plans import decoder_layers, tensor_plan, vocabulary_layers
from laurel.models.token_shards import token_styles


def read_shape(policy: PolicyConfig, name: str, *, has_language_head: bool) -> ModelShape:
    """The measures of the model that lies in a directory or on the hub.

    Args:
        policy: Whether its own code may run, what is changed in its configuration, and how its
            layers shall be split over tensor-parallel ranks.
        name: A directory or a name on the hub.
        has_language_head: False for a reward model, whose head is one row.

    Raises:
        ModelError: There is none, or it is no decoder whose measures are known.
    """
    hf_config = read_config(policy, name)
    text_config = hf_config.get_text_config()
    network = _on_meta(hf_config, policy, has_language_head=has_language_head)
    try:
        _, layers = decoder_layers(network)
    except ConfigError as error:
        raise ModelError(f"{name}: {error}") from error
    heads = int(text_config.num_attention_heads)
    hidden = int(text_config.hidden_size)
    names = {key.rsplit(".", 1)[-1] for key, _ in network.named_modules()}
    return ModelShape(
        hidden_size=hidden,
        num_layers=len(layers),
        intermediate_size=int(getattr(text_config, "intermediate_size", None) or 4 * hidden),
        num_heads=heads,
        num_kv_heads=int(getattr(text_config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text_config, "head_dim", None) or hidden // heads),
        vocab_size=int(text_config.vocab_size),
        num_parameters=_count(network),
        layer_parameters=max(_count(layer) for layer in layers),
        normalises_heads="q_norm" in names,
        divides_vocabulary=len(vocabulary_layers(network, 1)) == (2 if has_language_head else 1),
        refuses_tensor_parallel=_refusal(network, policy.dtensor_cfg),
    )


def _refusal(network: Any, config: DTensorConfig) -> str | None:
    """What loading would say of splitting its layers, whatever the number of ranks."""
    try:
        splits = tensor_plan(network, 1, config.custom_parallel_plan)
        if config.sequence_parallel:
            token_styles(network, splits)
    except ConfigError as error:
        return str(error)
    return None


def count_parameters(policy: PolicyConfig, name: str) -> int:
    """Of a causal language model; 0 for what is none, of which loading tells the reason.

    Raises:
        ModelError: There is no configuration that can be read.
    """
    hf_config = read_config(policy, name)
    try:
        return _count(_on_meta(hf_config, policy, has_language_head=True))
    except ModelError:
        return 0


def _on_meta(hf_config: Any, policy: PolicyConfig, *, has_language_head: bool) -> Any:
    """The network without memory.

    Raises:
        ModelError: No such network can be made of the configuration.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    factory: Any = AutoModelForCausalLM
    if not has_language_head:
        factory = AutoModelForSequenceClassification
        hf_config.num_labels = 1
    with torch.device("meta"):
        try:
            return factory.from_config(hf_config, trust_remote_code=policy.trust_remote_code)
        except ValueError as error:
            kind = "language model" if has_language_head else "reward model"
            raise ModelError(
                f"no {kind} can be made of {type(hf_config).__name__}: transformers has no such "
                "class for it. Name a model that is one, or was made from one"
            ) from error


def _count(module: Any) -> int:
    return int(sum(parameter.numel() for parameter in module.parameters()))
