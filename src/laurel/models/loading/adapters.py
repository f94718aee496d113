"""Adds low-rank adapters to a decoder, merges them for export, and saves them for resuming."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from laurel.config.policy import LoraConfig
from laurel.errors import CheckpointError, ConfigError, MissingDependencyError, key_of
from laurel.models.forest.decoder import adapted_layers
from laurel.models.forest.outputs import whole
from laurel.models.parallel.mesh import host_copy

ADAPTERS = Path("adapter", "adapters.safetensors")
"""The path of the adapters within a checkpoint."""


def with_adapters(
    network: Any, config: LoraConfig, resume_from: Path | None, *, trains_head: bool
) -> Any:
    """Add new adapters to a network, or those of the checkpoint `resume_from`; return the network.

    `trains_head` says whether the whole head is trained besides the adapters.

    Raises:
        UserError: The adapters cannot be added or loaded (`add_adapters`, `load_adapters`).
    """
    network = add_adapters(network, config, trains_head=trains_head)
    if resume_from is not None:
        load_adapters(resume_from, network)
    return network


def add_adapters(network: Any, config: LoraConfig, *, trains_head: bool) -> Any:
    """Add low-rank adapters to the linear layers below the head, and return the network.

    Args:
        network: A Hugging Face model. Its weights may be on the meta device; the adapters are not.
        trains_head: Whether the whole head is trained besides the adapters. Otherwise only the
            adapters are trained, and without them the model is unchanged.

    Raises:
        ConfigError: The configuration names layers that do not exist, or no layer is left.
        MissingDependencyError: peft is not installed.
    """
    try:
        from peft import LoraConfig as PeftLoraConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise MissingDependencyError.of(
            "peft", extra="lora", purpose=key_of("policy.dtensor_cfg.lora_cfg")
        ) from error
    linear = [
        name.rsplit(".", 1)[-1]
        for name, module in network.base_model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    names = sorted(set(linear))
    for key in ("target_modules", "exclude_modules"):
        unknown = sorted(set(getattr(config, key)) - set(names))
        if unknown:
            raise ConfigError(
                f"{key_of('policy.dtensor_cfg.lora_cfg')}.{key}: no linear layer is called "
                f"{', '.join(unknown)}; there are {', '.join(names)}"
            )
    targets = [n for n in config.target_modules or names if n not in config.exclude_modules]
    if not targets:
        raise ConfigError(
            f"{key_of('policy.dtensor_cfg.lora_cfg.exclude_modules')} leaves no layer to adapt; "
            "there are "
            f"{', '.join(names)}"
        )
    peft_config = PeftLoraConfig(
        r=config.dim,
        lora_alpha=cast(int, config.alpha),  # peft takes fractions too
        lora_dropout=config.dropout,
        target_modules=targets,
        bias="none",
    )
    with _standing_in(network):
        network = inject_adapter_in_model(peft_config, network)
        body = f"{network.base_model_prefix}."
        for name, parameter in network.named_parameters():
            is_head = not name.startswith(body)
            parameter.requires_grad_("lora_" in name or (trains_head and is_head))
    return network


@contextmanager
def _standing_in(network: nn.Module) -> Iterator[None]:
    # Adapters are created on the device of their weights. A weight on the meta device is therefore
    # replaced meanwhile by a stand-in on the CPU: one number, expanded to the weight's shape.
    places = [
        (module, name, parameter)
        for module in network.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    for module, name, parameter in places:
        number = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        module._parameters[name] = nn.Parameter(number, requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for module, name, parameter in places:
            stand_in = module._parameters[name]
            parameter.requires_grad_(stand_in is not None and stand_in.requires_grad)
            module._parameters[name] = parameter


@contextmanager
def without_adapters(network: nn.Module) -> Iterator[None]:
    """Disable the adapters while the context is open."""
    layers = adapted_layers(network).values()
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(network: Any, *, changing_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with adapters merged, by the names that the model has without adapters.

    One weight is merged at a time, so no second copy of the model is made. Tied weights are yielded
    once, under the name that a saved model has. Weights without adapters are the model's own
    tensors, so copy them before training continues.

    If the model is sharded, each weight is gathered whole, so every rank must iterate to the end.

    The adapted layers themselves do not change: merging and unmerging would round the base weights,
    and a resumed run would no longer be the same run.

    Args:
        network: A model with or without adapters.
        changing_only: Whether to yield only the modules that training changes, such as the
            attention of a layer. A module is yielded with all its weights, because inference
            engines fuse some of them, such as those of queries, keys and values.
    """
    layers = adapted_layers(network)
    changing = {_block_of(n) for n, p in network.named_parameters() if p.requires_grad}
    state: dict[str, Tensor] = network.state_dict()
    own = dict(network.named_parameters(remove_duplicate=False))
    tied: dict[str, str] = getattr(network, "all_tied_weights_keys", None) or {}
    for name, tensor in state.items():
        is_tied = name in tied and own.get(name) is own.get(tied[name])
        if ".lora_" in name or is_tied or (changing_only and _block_of(name) not in changing):
            continue
        weight = whole(tensor.detach())
        layer_name, is_adapted, kind = name.partition(".base_layer.")
        if is_adapted and kind == "weight":
            layer = layers[layer_name]
            with torch.no_grad():
                for adapter in layer.active_adapters:
                    weight = weight + _delta(layer, adapter).to(weight.dtype)
        yield name.replace(".base_layer.", "."), weight


def _block_of(name: str) -> str:
    # Returns the block of a layer that holds a weight, such as `model.layers.3.mlp`; outside the
    # layers, the module.
    path = name.split(".")
    for index, part in enumerate(path):
        if part.isdigit():
            return ".".join(path[: index + 2])
        if part == "base_layer" or part.startswith("lora_"):
            return ".".join(path[:index])
    return ".".join(path[:-1])


def _delta(layer: Any, adapter: str) -> Tensor:
    # The factors of a sharded layer are gathered first.
    factors = (layer.lora_A[adapter], layer.lora_B[adapter])
    shares = [factor.weight for factor in factors]
    try:
        for factor, share in zip(factors, shares, strict=True):
            factor._parameters["weight"] = nn.Parameter(whole(share.detach()), requires_grad=False)
        delta: Tensor = layer.get_delta_weight(adapter)
    finally:
        for factor, share in zip(factors, shares, strict=True):
            factor._parameters["weight"] = share
    return delta


def trained_weights(network: Any) -> dict[str, Tensor]:
    """Return the trainable weights of a model with adapters by name, whole and on the CPU.

    The result is empty without adapters. If the model is sharded, all ranks call this together.
    """
    if not adapted_layers(network):
        return {}
    return {
        name: host_copy(whole(parameter.detach()))
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
    }


def save_adapters(directory: Path, trained: dict[str, Tensor]) -> None:
    """Write `trained`, the result of `trained_weights`, into a checkpoint."""
    path = directory / ADAPTERS
    path.parent.mkdir()
    save_file(trained, path)


def load_adapters(directory: Path, network: Any) -> None:
    """Load the adapters of a checkpoint, and the head if it is trained, into a model.

    Raises:
        CheckpointError: The checkpoint has no adapters, or its parameters differ from those
            that the model trains.
    """
    path = directory / ADAPTERS
    if not path.is_file():
        raise CheckpointError(
            f"{directory} has no adapters: it was trained without lora_cfg. Set "
            "policy.dtensor_cfg.lora_cfg.enabled=false, or give this run another "
            "checkpointing.checkpoint_dir"
        )
    state = load_file(path)
    wanted = {name for name, p in network.named_parameters() if p.requires_grad}
    if set(state) != wanted:
        odd = sorted(set(state) ^ wanted)[:3]
        raise CheckpointError(
            f"{path} holds other parameters than this run trains: {', '.join(odd)}. Set "
            "policy.dtensor_cfg.lora_cfg back to what it was, or start a new run in another "
            "checkpointing.checkpoint_dir"
        )
    for name in wanted:  # a head that was to be read from other files
        if network.get_parameter(name).is_meta:
            network.get_submodule(name.rpartition(".")[0]).to_empty(device="cpu")
    network.load_state_dict(state, strict=False)
