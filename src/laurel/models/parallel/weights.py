"""Moves weights between files and a sharded model; no rank ever holds the whole model."""

from __future__ import annotations

import fnmatch
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from laurel.errors import ConfigError, ModelError, setting_of
from laurel.models.forest.decoder import Decoder
from laurel.models.forest.outputs import local
from laurel.models.loading.adapters import merged_weights
from laurel.models.loading.weight_names import INDEX, SINGLE
from laurel.models.parallel.mesh import SHARD, TENSOR, host_copy, parallelise
from laurel.models.parallel.tensor import decoder_layers
from laurel.models.spec import ModelSpec

FILE_BYTES = 2_000_000_000
# The first part of a file's name while the number of files is not known.
_UNNAMED = "model.part-"


def fill_shares(
    model: Decoder,
    directory: Path,
    device: torch.device,
    *,
    others: Mapping[str, Tensor] | None = None,
    on_host: bool = False,
) -> None:
    """Fill a sharded model on the meta device with weights; each rank reads only its own shards.

    Args:
        model: A model that was created on the meta device and sharded by `parallelise`.
        directory: The directory of a model in safetensors.
        others: Whole values of parameters, by name, that are not read from files and are equal on
            every rank, such as adapters or a new head.
        on_host: Whether the weights are kept on the host between uses.

    Raises:
        ModelError: Weights are missing, mismatched or unreadable, or transformers stores them in
            files in another form than in memory.
    """
    network: Any = model.network
    if has_conversions(network):
        raise ModelError(
            f"{type(network).__name__}: its files hold its weights in another form than memory, "
            "so they cannot be read straight into shares: load it whole"
        )
    others = others or {}
    persistent = set(network.state_dict())
    model.to_empty(device=torch.device("cpu") if on_host else device)
    network.tie_weights()
    wanted = dict(network.named_parameters())  # tied weights come once
    wanted |= {n: b for n, b in network.named_buffers() if n in persistent}
    with ExitStack() as files:
        found = open_weights(files, directory)
        sources = {name: name.replace(".base_layer.", ".") for name in wanted}
        missing = sorted(n for n, s in sources.items() if n not in others and s not in found)
        if missing:
            raise ModelError(
                f"{directory}: the weights lack {', '.join(missing[:5])}. The directory is not a "
                "complete model of the architecture it names"
            )
        for name, target in wanted.items():
            source = sources[name]
            if name in others:
                _fill(target, tuple(others[name].shape), others[name], name)
                continue
            part = found[source].get_slice(source)
            _fill(target, tuple(part.get_shape()), part, f"{directory}: {name}")
    _compute_buffers(network, persistent)
    if on_host:
        for module in network.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)


def saved_weights(network: Any, *, changing_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of the weights that `save_pretrained` writes, one at a time.

    Adapters are merged. With tied embeddings there is no `lm_head.weight`. Experts that
    transformers joins in memory are yielded one by one.

    Args:
        changing_only: Whether to yield only the modules that training changes, such as the
            attention of a layer, each with all its weights.
    """
    if not has_conversions(network):
        yield from merged_weights(network, changing_only=changing_only)
        return
    from transformers.core_model_loading import revert_weight_conversion

    prefix, _ = decoder_layers(network)

    def layer_of(item: tuple[str, Tensor]) -> str:
        inside = item[0].startswith(f"{prefix}.")
        return item[0].removeprefix(f"{prefix}.").partition(".")[0] if inside else ""

    # Joined weights belong to one layer, so only one layer has to be in memory at a time.
    weights = merged_weights(network, changing_only=changing_only)
    for _, together in itertools.groupby(weights, key=layer_of):
        yield from revert_weight_conversion(network, dict(together)).items()


def in_files(
    weights: Iterable[tuple[str, Tensor]], *, max_file_bytes: int = FILE_BYTES
) -> Iterator[dict[str, Tensor]]:
    """Yield copies of weights on the host, grouped by file.

    Args:
        weights: The names and values from `saved_weights`.
        max_file_bytes: The size limit of a file; a larger weight has its own file.
    """
    file: dict[str, Tensor] = {}
    for name, weight in weights:
        if file and sum(t.nbytes for t in file.values()) + weight.nbytes > max_file_bytes:
            yield file
            file = {}
        file[name] = host_copy(weight)
    if file:
        yield file


def write_weights(directory: Path, files: Iterable[Mapping[str, Tensor]]) -> None:
    """Write files of weights as `save_pretrained` does, with an index if there are several.

    Args:
        files: The contents from `in_files`; each is released as soon as it is written.

    Raises:
        OSError, SafetensorError: The disk reports an error.
    """
    held: list[list[str]] = []
    total = num_values = 0
    for number, file in enumerate(files):
        save_file(dict(file), directory / f"{_UNNAMED}{number}", metadata={"format": "pt"})
        held.append(list(file))
        total += sum(tensor.nbytes for tensor in file.values())
        num_values += sum(tensor.numel() for tensor in file.values())
    (directory / SINGLE).unlink(missing_ok=True)
    names = [f"model-{i + 1:05}-of-{len(held):05}.safetensors" for i in range(len(held))]
    if len(held) == 1:
        names = [SINGLE]
    for number, name in enumerate(names):
        (directory / f"{_UNNAMED}{number}").rename(directory / name)
    if len(held) > 1:
        index = {
            "metadata": {"total_parameters": num_values, "total_size": total},
            "weight_map": {w: n for n, file in zip(names, held, strict=True) for w in file},
        }
        text = json.dumps(index, indent=2, sort_keys=True)
        (directory / INDEX).write_text(text + "\n", encoding="utf-8")


def open_weights(files: ExitStack, directory: Path) -> dict[str, Any]:
    """Open the weight files of a directory; return the open file of each weight by its name.

    `files` closes them.

    Raises:
        ModelError: There is no file, or one is damaged.
    """
    try:
        names = [SINGLE]
        index = directory / INDEX
        if index.is_file() and not (directory / SINGLE).is_file():  # as transformers chooses
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        handles = [files.enter_context(safe_open(directory / n, framework="pt")) for n in names]
        return {key: handle for handle in handles for key in handle.keys()}  # noqa: SIM118
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(
            f"{directory} has no readable safetensors: {error}. Copy it again, or make safetensors "
            "of its weights"
        ) from error


def _fill(target: Tensor, shape: tuple[int, ...], source: Any, where: str) -> None:
    # Reads only this rank's shard of a weight.
    if shape != tuple(target.shape):
        raise ModelError(
            f"{where} is {list(shape)} in the weights and {list(target.shape)} by the "
            "configuration: they do not belong together"
        )
    share = local(target.detach())
    if share.numel() == 0:
        return
    if not shape:
        share.copy_(source[...])
        return
    sizes, offsets = shape, (0,) * len(shape)
    if isinstance(target, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(
            target.shape, target.device_mesh, target.placements
        )
    part = source[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
    share.copy_(part)


def _compute_buffers(network: Any, saved: set[str]) -> None:
    # No file holds these buffers; the architecture computes them.
    for parameter in network.parameters():
        parameter._is_hf_initialized = True  # transformers then leaves it as it was read
    for name, module in network.named_modules():
        own = [f"{name}.{n}".lstrip(".") for n, _ in module.named_buffers(recurse=False)]
        if set(own) - saved:
            with torch.no_grad():
                network._init_weights(module)


def has_conversions(network: Any) -> bool:
    """Report whether transformers saves some weights in another form than they have in memory.

    An example is experts, which it joins when it loads them.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    known = getattr(network, "_weight_conversions", None)
    return bool(get_model_conversion_mapping(network, add_legacy=False) if known is None else known)


# Loading models over a mesh, directly from their files into shards if the files allow it.
#
# If they do, the network is created on the meta device, without memory. It gets the weights that
# are in no file (adapters or a new head, which are small and whole on every rank), is sharded, and
# each rank reads its shards. Otherwise every rank loads the whole network, and shards it then.

NEW_HEAD = ("score.weight", "score.bias")
"""The weights that a decoder may lack when it becomes a reward model."""
WEIGHT_FILES = [SINGLE, INDEX, "model-*.safetensors"]


def refuse_unspreadable(spec: ModelSpec, mesh: DeviceMesh) -> None:
    """Check that the parallel sizes of a specification match the mesh.

    Raises:
        ConfigError: A parallel size does not match; the message names its key.
    """
    if (cp := spec.context_parallel_size) > 1 and mesh[SHARD].size() % cp:
        raise ConfigError(
            f"{setting_of('policy.dtensor_cfg.context_parallel_size', cp)} does not divide the "
            f"{mesh[SHARD].size()} ranks that hold shares of the weights"
        )
    if mesh[TENSOR].size() != (tp := spec.tensor_parallel_size):
        raise ConfigError(
            f"{setting_of('policy.dtensor_cfg.tensor_parallel_size', tp)} and a mesh "
            f"with {mesh[TENSOR].size()} tensor-parallel ranks do not belong together"
        )


def empty_network(
    factory: Any, spec: ModelSpec, name: str, hf_config: Any, dtype: torch.dtype
) -> tuple[Any, dict[str, Any]] | None:
    """Create a network on the meta device, if its files can be read directly into shards.

    Returns:
        The network in evaluation mode, with a new head in memory if the files have none, and
        transformers' report on its weights. None if the files do not contain exactly the network's
        weights in their form in memory; transformers may still load them, or explain why not.
    """
    directory = weight_files(spec, name)
    if directory is None or getattr(hf_config, "quantization_config", None) is not None:
        return None
    with torch.device("meta"):
        try:
            network = factory.from_config(
                hf_config, dtype=dtype, trust_remote_code=spec.trust_remote_code
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
    for key in info["missing_keys"]:  # of a new head, initialised as transformers would
        head = network.get_submodule(key.rpartition(".")[0])
        if any(p.is_meta for p in head.parameters()):
            head.to_empty(device="cpu")
            network._init_weights(head)
    if network.can_generate():
        from transformers import GenerationConfig

        with suppress(OSError):
            network.generation_config = GenerationConfig.from_pretrained(
                name, revision=spec.revision or "main"
            )
    return network.eval(), info


def weight_files(spec: ModelSpec, name: str) -> Path | None:
    """Return the directory with the safetensors of model `name`, downloaded if necessary.

    None if it has none.
    """
    directory = Path(name)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download

        try:
            directory = Path(
                snapshot_download(name, revision=spec.revision, allow_patterns=WEIGHT_FILES)
            )
        except (OSError, ValueError):
            return None
    names = {path.name for path in directory.iterdir()}
    has_weights = any(fnmatch.filter(names, pattern) for pattern in (SINGLE, INDEX))
    return directory if has_weights and "adapter_config.json" not in names else None


def is_empty(network: nn.Module) -> bool:
    """Report whether some weights of the network are still on the meta device, without values."""
    return any(parameter.is_meta for parameter in network.parameters())


def shard_model(model: Decoder, spec: ModelSpec, mesh: DeviceMesh, device: torch.device) -> None:
    """Shard a loaded model over a mesh, and read missing weights directly into its shards.

    Args:
        model: A whole model, or one whose network is from `empty_network`, without weights.

    Raises:
        ConfigError: The model cannot be split over this mesh.
        ModelError: The files of the model are unreadable.
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
        cp=spec.context_parallel_size,
        plan=spec.parallel_plan,
        sequence_parallel=spec.sequence_parallel,
        precision=model.precision if is_rounded else None,
        cpu_offload=spec.cpu_offload,
    )
    if lacks:
        directory = weight_files(spec, network.name_or_path)
        assert directory is not None, "it was there a moment ago"
        on_host = spec.cpu_offload and device.type != "cpu"
        fill_shares(model, directory, device, others=others, on_host=on_host)


def _compare(network: Any, directory: Path) -> dict[str, Any] | None:
    # Returns the weights that the files lack and exceed; None if only transformers can decide.
    state = network.state_dict()
    own = {n for n, _ in network.named_parameters()} | {n for n, _ in network.named_buffers()}
    wanted = {n: tuple(t.shape) for n, t in state.items() if n in own}  # tied weights come once
    with ExitStack() as files:
        handles = open_weights(files, directory)
        found = {key: tuple(h.get_slice(key).get_shape()) for key, h in handles.items()}
    missing = sorted(wanted.keys() - found.keys())
    # Weights that should be tied but are saved twice may differ.
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
    # Some architectures keep weights in float32 whatever dtype is asked for.
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return any(getattr(network, name, None) for name in names)
