"""Low-rank adapters: put around the layers of a decoder, merged for export, saved for resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from laurel.config.schema import LoraConfig
from laurel.errors import CheckpointError, ConfigError, MissingDependencyError

ADAPTERS = Path("adapter", "adapters.safetensors")
"""Where they lie in a checkpoint."""


def add_adapters(classifier: Any, config: LoraConfig) -> Any:
    """Wrap the linear layers below the head in adapters; the head stays whole and is trained.

    Raises:
        ConfigError: Names that no linear layer has.
        MissingDependencyError: peft is not installed.
    """
    try:
        from peft import LoraConfig as PeftLoraConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise MissingDependencyError.of(
            "peft", extra="lora", purpose="policy.dtensor_cfg.lora_cfg"
        ) from error
    linear = [
        name.rsplit(".", 1)[-1]
        for name, module in classifier.base_model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    names = sorted(set(linear))
    for key in ("target_modules", "exclude_modules"):
        unknown = sorted(set(getattr(config, key)) - set(names))
        if unknown:
            raise ConfigError(
                f"policy.dtensor_cfg.lora_cfg.{key}: no linear layer is called "
                f"{', '.join(unknown)}; there are {', '.join(names)}"
            )
    targets = [n for n in config.target_modules or names if n not in config.exclude_modules]
    if not targets:
        raise ConfigError(
            "policy.dtensor_cfg.lora_cfg.exclude_modules leaves no layer to adapt; there are "
            f"{', '.join(names)}"
        )
    peft_config = PeftLoraConfig(
        r=config.dim,
        lora_alpha=cast(int, config.alpha),  # peft takes fractions too
        lora_dropout=config.dropout,
        target_modules=targets,
        bias="none",
    )
    classifier = inject_adapter_in_model(peft_config, classifier)
    body = f"{classifier.base_model_prefix}."
    for name, parameter in classifier.named_parameters():
        parameter.requires_grad_("lora_" in name or not name.startswith(body))
    return classifier


def merged_state(classifier: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of a plain classifier, and the trainable weights where it has adapters.

    The adapted layers themselves stay untouched: merging and unmerging would round the base
    weights, and a resumed run would no longer be the same run.

    Returns:
        State of the merged model by plain names; state of adapters and head, by their own names
        (empty without adapters).
    """
    layers = {
        name: module
        for name, module in classifier.named_modules()
        if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer")
    }
    state: dict[str, Tensor] = classifier.state_dict()
    if not layers:
        return {name: tensor.detach().cpu() for name, tensor in state.items()}, {}
    merged: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".lora_" not in name:
            merged[name.replace(".base_layer.", ".")] = tensor.detach().clone().cpu()
    with torch.no_grad():
        for name, layer in layers.items():
            for adapter in layer.active_adapters:
                delta = layer.get_delta_weight(adapter).detach().cpu()
                merged[f"{name}.weight"] += delta.to(merged[f"{name}.weight"].dtype)
    trained = {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in classifier.named_parameters()
        if parameter.requires_grad
    }
    return merged, trained


def save_adapters(directory: Path, trained: dict[str, Tensor]) -> None:
    """Write the second result of `merged_state`."""
    path = directory / ADAPTERS
    path.parent.mkdir()
    save_file(trained, path)


def load_adapters(directory: Path, classifier: Any) -> None:
    """Put the adapters and the head of a checkpoint into a model that has adapters.

    Raises:
        CheckpointError: The checkpoint has none, or others.
    """
    path = directory / ADAPTERS
    if not path.is_file():
        raise CheckpointError(f"{directory} has no adapters: it was trained without lora_cfg")
    state = load_file(path)
    wanted = {name for name, p in classifier.named_parameters() if p.requires_grad}
    if set(state) != wanted:
        odd = sorted(set(state) ^ wanted)[:3]
        raise CheckpointError(f"{path} holds other parameters than this run trains: {odd}")
    classifier.load_state_dict(state, strict=False)
