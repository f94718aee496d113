"""Models loaded over a mesh: straight from their files into shares where the files allow it.

Where they do, the network is made without memory (on the meta device), given what is not in any
file (adapters, a new head: small, whole on every rank), spread, and filled share by share. Where
they do not, it is loaded whole on every rank, as in one process, and spread then.
"""

from __future__ import annotations

import fnmatch
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from laurel.config.schema import PolicyConfig
from laurel.errors import ConfigError, ModelError, setting_of
from laurel.models.decoder import Decoder
from laurel.models.parallel import SHARD, TENSOR, parallelise
from laurel.models.sharded_weights import fill_shares, has_conversions, open_weights
from laurel.models.weight_names import INDEX, SINGLE

NEW_HEAD = ("score.weight", "score.bias")
"""What may be missing of a decoder that becomes a reward model."""
WEIGHT_FILES = [SINGLE, INDEX, "model-*.safetensors"]


def refuse_unspreadable(config: PolicyConfig, mesh: DeviceMesh | None) -> None:
    """Refuse ways to spread a model over a mesh that there are not.

    Raises:
        ConfigError: With the key.
    """
    if mesh is None:
        return
    parallel = config.dtensor_cfg
    if (cp := parallel.context_parallel_size) > 1 and mesh[SHARD].size() % cp:
        raise ConfigError(
            f"{setting_of('policy.dtensor_cfg.context_parallel_size', cp)} does not divide the "
            f"{mesh[SHARD].size()} ranks that hold shares of the weights"
        )
    if mesh[TENSOR].size() != parallel.tensor_parallel_size:
        tp = parallel.tensor_parallel_size
        raise ConfigError(
            f"{setting_of('policy.dtensor_cfg.tensor_parallel_size', tp)} and a mesh "
            f"with {mesh[TENSOR].size()} tensor-parallel ranks do not belong together"
        )


def empty_network(
    factory: Any, config: PolicyConfig, name: str, hf_config: Any, dtype: torch.dtype
) -> tuple[Any, dict[str, Any]] | None:
    """The network without memory, if its files can be read straight into shares.

    Args:
        factory: transformers' `AutoModelFor...`.
        config: The policy section.
        name: Directory or hub name.
        hf_config: Its configuration.
        dtype: Of the weights.

    Returns:
        The network, in evaluation mode, with an untouched new head in memory where the files have
        none; and `missing_keys` and the like, as transformers gives them. None where the files do
        not hold exactly its weights, each in the form it has in memory: transformers may still
        make sense of them, or says best what is wrong.
    """
    directory = weight_files(config, name)
    if directory is None or getattr(hf_config, "quantization_config", None) is not None:
        return None
    with torch.device("meta"):
        try:
            network = factory.from_config(
                hf_config, dtype=dtype, trust_remote_code=config.trust_remote_code
            )
        except (OSError, ValueError):
            return None
    if has_conversions(network) or (dtype != torch.float32 and _keeps_float32(network)):
        return None
    try:
        info = _compare(network, directory)
    except ModelError:
        return None
    if info is None:
        return None
    for key in info["missing_keys"]:  # of a new head, as transformers would draw it
        head = network.get_submodule(key.rpartition(".")[0])
        if any(p.is_meta for p in head.parameters()):
            head.to_empty(device="cpu")
            network._init_weights(head)
    if network.can_generate():
        from transformers import GenerationConfig

        with suppress(OSError):
            network.generation_config = GenerationConfig.from_pretrained(
                name, revision=config.revision or "main"
            )
    return network.eval(), info


def weight_files(config: PolicyConfig, name: str) -> Path | None:
    """The directory of a model's safetensors; those of a hub are fetched if they are not here."""
    directory = Path(name)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download

        try:
            directory = Path(
                snapshot_download(name, revision=config.revision, allow_patterns=WEIGHT_FILES)
            )
        except (OSError, ValueError):
            return None
    names = {path.name for path in directory.iterdir()}
    has_weights = any(fnmatch.filter(names, pattern) for pattern in (SINGLE, INDEX))
    return directory if has_weights and "adapter_config.json" not in names else None


def is_empty(network: nn.Module) -> bool:
    """Whether weights of it are still to be read from files."""
    return any(parameter.is_meta for parameter in network.parameters())


def spread(model: Decoder, config: PolicyConfig, mesh: DeviceMesh, device: torch.device) -> None:
    """Spread a loaded model over a mesh, and read what it lacks straight into its shares.

    Args:
        model: Whole, or without memory as `empty_network` gives it.
        config: How it is spread, and where its files are.
        mesh: See `ParallelShape.mesh`.
        device: Where this rank computes.

    Raises:
        ConfigError: It cannot be split so.
        ModelError: Its files are unreadable.
    """
    network = model.network
    lacks = is_empty(network)
    others = {n: p.detach() for n, p in network.named_parameters() if lacks and not p.is_meta}
    if lacks:
        network.to(device="meta")
    is_rounded = model.weights_dtype == torch.float32 != model.precision
    parallelise(
        model,
        mesh,
        cp=config.dtensor_cfg.context_parallel_size,
        plan=config.dtensor_cfg.custom_parallel_plan,
        sequence_parallel=config.dtensor_cfg.sequence_parallel,
        precision=model.precision if is_rounded else None,
        cpu_offload=config.dtensor_cfg.cpu_offload,
    )
    if lacks:
        directory = weight_files(config, network.name_or_path)
        assert directory is not None, "it was there a moment ago"
        on_host = config.dtensor_cfg.cpu_offload and device.type != "cpu"
        fill_shares(model, directory, device, others=others, on_host=on_host)


def _compare(network: Any, directory: Path) -> dict[str, Any] | None:
    """What the files have more and less than the network; None where transformers must judge.

    Raises:
        ModelError: They are unreadable.
    """
    state = network.state_dict()
    own = {n for n, _ in network.named_parameters()} | {n for n, _ in network.named_buffers()}
    wanted = {n: tuple(t.shape) for n, t in state.items() if n in own}  # tied weights come once
    with ExitStack() as files:
        handles = open_weights(files, directory)
        found = {key: tuple(h.get_slice(key).get_shape()) for key, h in handles.items()}
    missing = sorted(wanted.keys() - found.keys())
    # Weights that should be tied and are there twice may differ.
    twice = (state.keys() - wanted.keys()) & found.keys()
    others = any(found.get(n, shape) != shape for n, shape in wanted.items())
    if twice or others or not set(missing) <= set(NEW_HEAD):
        return None
    return {
        "missing_keys": missing,
        "unexpected_keys": sorted(found.keys() - state.keys()),
        "mismatched_keys": [],
    }


def _keeps_float32(network: Any) -> bool:
    """Whether transformers would leave some weights in float32 where others are less."""
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return any(getattr(network, name, None) for name in names)
