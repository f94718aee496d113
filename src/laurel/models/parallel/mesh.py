"""Shards a model over the ranks of a device mesh: FSDP2 over data, and tensor parallelism.

Every rank runs the same program. Ranks that differ only in their context-parallel (`cp`) or
tensor-parallel (`tp`) index get the same micro-batches; other ranks get different ones. All ranks
get the same number of micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import parallelize_module

from laurel.errors import CheckpointError, ModelError
from laurel.models.forest.decoder import Decoder
from laurel.models.forest.outputs import VocabularyShare, local
from laurel.models.parallel.context import check_context, share_context
from laurel.models.parallel.tensor import (
    STYLES,
    decoder_layers,
    share_tokens,
    tensor_plan,
    token_styles,
    vocabulary_layers,
)

REPLICATE, SHARD, CONTEXT, TENSOR = "dp_replicate", "dp_shard", "cp", "tp"


def parallelise(
    model: Decoder,
    mesh: DeviceMesh,
    *,
    cp: int = 1,
    plan: str | Mapping[str, Any] | None = None,
    sequence_parallel: bool = False,
    precision: torch.dtype | None = None,
    cpu_offload: bool = False,
) -> None:
    """Shard a model over a mesh.

    Before the call, every rank has the same whole model, or a model on the meta device.

    Layers are split over `tp`, and the embedding and the language-model head by vocabulary. Then
    each layer, and all other modules, are sharded over `dp_shard`. Gradients are summed over the
    data-parallel ranks, not averaged, because losses are divided by a denominator that is counted
    over all of them.

    Args:
        model: The model, which is changed in place, and is called through `forward` as before.
        cp: The number of consecutive ranks of `dp_shard` that divide the tokens of every forest
            (`share_context`).
        plan: The tensor-parallel plan, as `tensor_plan` accepts it.
        sequence_parallel: Whether tokens are divided over `tp` between attention and feed-forward.
        precision: The dtype in which the weights of layers are gathered and multiplied; None: the
            dtype of the weights, which changes no result. Gradients are always summed in float32
            (float64 if the weights are), and the head keeps float32.
        cpu_offload: Whether weights, gradients and optimizer state are kept on the host between
            uses; on a CPU this has no effect.

    Raises:
        ConfigError: The model cannot be split over this mesh.
        ModelError: The model is sharded already.
    """
    if model.mesh is not None:
        raise ModelError("the model is spread over ranks already")
    if cp > 1:
        check_context(model, cp=cp, tp=mesh[TENSOR].size())
    shares_tokens = sequence_parallel and mesh[TENSOR].size() > 1
    if mesh[TENSOR].size() > 1:
        _split_layers(model.network, mesh[TENSOR], plan, shares_tokens=shares_tokens)
        _split_vocabulary(model.network, mesh[TENSOR])
    _shard(
        model,
        mesh,
        precision=precision,
        cpu_offload=cpu_offload,
        divisor=cp,
    )
    if shares_tokens:  # outside of the hooks of FSDP, which wants no views from a layer
        share_tokens(model.network, mesh[TENSOR])
    if cp > 1:
        sizes = (mesh[REPLICATE].size(), mesh[SHARD].size() // cp, cp, mesh[TENSOR].size())
        names = (REPLICATE, SHARD, CONTEXT, TENSOR)
        split = init_device_mesh(mesh.device_type, sizes, mesh_dim_names=names)
        share_context(model.network, split[CONTEXT])
    model.mesh, model.gathered_dtype = mesh, precision
    model.skips_unread = cp == 1 and mesh[TENSOR].size() == 1


def _shard(
    model: Decoder,
    mesh: DeviceMesh,
    *,
    precision: torch.dtype | None,
    cpu_offload: bool,
    divisor: int,
) -> None:
    # FSDP2 wraps every layer, and then the rest; summed gradients are divided by `divisor`.
    data = mesh[REPLICATE, SHARD] if mesh[REPLICATE].size() > 1 else mesh[SHARD]
    on_host = cpu_offload and mesh.device_type != "cpu"
    offload = CPUOffloadPolicy() if on_host else OffloadPolicy()
    sums = torch.promote_types(model.weights_dtype, torch.float32)
    shared: dict[str, Any] = {"mesh": data, "offload_policy": offload}
    inner = MixedPrecisionPolicy(
        param_dtype=precision, reduce_dtype=sums, cast_forward_inputs=False
    )
    outer = MixedPrecisionPolicy(reduce_dtype=sums, cast_forward_inputs=False)
    _, layers = decoder_layers(model.network)
    for layer in layers:
        fully_shard(layer, mp_policy=inner, reshard_after_forward=True, **shared)
    fully_shard(model, mp_policy=outer, reshard_after_forward=False, **shared)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Every rank that divides tokens computes the head, so all gradients are larger by the
            # number of these ranks.
            module.set_gradient_divide_factor(float(divisor))
            # Without this a factor is applied within the sum, which gloo cannot do.
            module.set_force_sum_reduction_for_comms(enable=True)


def _split_layers(
    network: nn.Module,
    mesh: DeviceMesh,
    plan: str | Mapping[str, Any] | None,
    *,
    shares_tokens: bool,
) -> None:
    splits = tensor_plan(network, mesh.size(), plan)
    if shares_tokens:
        styles = token_styles(network, splits)
    else:
        styles = {name: STYLES[split]() for name, split in splits.items()}
    for name, style in styles.items():
        module = network.get_submodule(name)
        trained = {n: p.requires_grad for n, p in module.named_parameters()}
        # Every rank has the whole tensor and keeps its shard of it, so nothing is sent.
        parallelize_module(module, mesh, style, src_data_rank=None)
        for parameter_name, parameter in module.named_parameters():
            # Weights under adapters are frozen, which some styles of torch forget.
            parameter.requires_grad_(trained[parameter_name])


def _split_vocabulary(network: nn.Module, mesh: DeviceMesh) -> None:
    parted: list[tuple[nn.Parameter, nn.Parameter]] = []  # whole and divided: tied ones stay one
    for name in vocabulary_layers(network, mesh.size()):
        module = network.get_submodule(name)
        for key, parameter in list(module.named_parameters(recurse=False)):
            share = next((part for whole, part in parted if whole is parameter), None)
            if share is None:
                part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
                share = nn.Parameter(part, requires_grad=parameter.requires_grad)
                parted.append((parameter, share))
            module.register_parameter(key, share)
        work: Any = _look_up if isinstance(module, nn.Embedding) else _multiply
        module.forward = partial(work, module, mesh)


def _look_up(module: nn.Embedding, mesh: DeviceMesh, ids: Tensor) -> Tensor:
    # Each rank gives the embeddings of its shard of the vocabulary, and zeros for other tokens.
    share = VocabularyShare.of(cast(DTensor, module.weight))
    is_mine, there = share.mine(ids)
    with _as_plain(module):
        rows = type(module).forward(module, there)
    rows = rows.masked_fill(~is_mine[..., None], 0.0)
    summed = DTensor.from_local(rows, mesh, [Partial()], run_check=False)
    return summed.redistribute(placements=[Replicate()]).to_local()


def _multiply(module: nn.Linear, mesh: DeviceMesh, hidden: Tensor) -> Tensor:
    # Checks and sampling need all logits on every rank, as transformers' class returns them.
    # Training computes log-probabilities from sharded logits (`token_logprobs`).
    spread = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    with _as_plain(module):
        part = type(module).forward(module, spread.to_local(grad_placements=[Partial()]))
    logits = DTensor.from_local(part, mesh, [Shard(part.ndim - 1)], run_check=False)
    return logits.redistribute(placements=[Replicate()]).to_local()


@contextmanager
def _as_plain(module: nn.Module) -> Iterator[None]:
    spread: dict[str, Any] = dict(module._parameters)
    padding = getattr(module, "padding_idx", None)
    for name, parameter in spread.items():
        if parameter is not None:
            module._parameters[name] = cast(Any, local(parameter))
    if padding is not None:
        share = VocabularyShare.of(spread["weight"])
        is_mine = share.start <= padding < share.start + share.size
        cast(Any, module).padding_idx = padding - share.start if is_mine else None
    try:
        yield
    finally:
        module._parameters.update(spread)
        if padding is not None:
            cast(Any, module).padding_idx = padding


def host_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of a tensor in the memory of the CPU."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def held_bytes(model: nn.Module) -> int:
    """Return the number of bytes that this rank's shards of the weights occupy."""
    storages = {p.untyped_storage().data_ptr(): p for p in map(local, model.parameters())}
    return sum(share.untyped_storage().nbytes() for share in storages.values())


# Values that the ranks of a mesh agree on: denominators, sums, gradient norms, failures.
#
# All ranks must call the same methods in the same order.

# The number of bytes of a failed rank's message that the others repeat.
_SAID_BYTES = 2000


class AcrossRanks:
    """Sums losses and clips gradients over all ranks of a mesh."""

    def __init__(self, mesh: DeviceMesh, *, cp: int = 1) -> None:
        """Create the process groups of a mesh.

        Args:
            cp: The number of consecutive ranks of `dp_shard` that read the same data, and so
                contribute the same values.
        """
        self.mesh = mesh
        self._cp = cp
        self._device = torch.device(
            mesh.device_type if mesh.device_type == "cpu" else torch.cuda.current_device()
        )

    def total(self, value: Tensor) -> Tensor:
        """Sum a number over all data-parallel ranks."""
        home = value.device
        value = value.detach().to(self._device, copy=True)
        for dimension in (SHARD, REPLICATE):
            if self.mesh[dimension].size() > 1:
                dist.all_reduce(value, group=self.mesh.get_group(dimension))
        return (value / self._cp).to(home)

    def gathered(self, value: Any) -> list[Any]:
        """Return what each rank brings, a small value that can be pickled, in order of ranks."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def clip(self, parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
        """Clip the gradients of the whole model by their norm, and return the norm before clipping.

        Weights of which several ranks have a full copy count once.

        Args:
            parameters: The parameters of the model; those without a gradient are ignored.
            limit: The maximum norm; None: the norm is only measured.
        """
        shares: dict[tuple[str, ...], list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                shares.setdefault(divided_over(parameter.grad), []).append(local(parameter.grad))
        norm = self._norm(shares)
        if limit is not None and math.isfinite(limit):
            factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
            for gradients in shares.values():
                torch._foreach_mul_(gradients, factor)
        return norm

    def _norm(self, shares: Mapping[tuple[str, ...], list[Tensor]]) -> Tensor:
        if set(shares) <= {()}:  # nothing is divided: the very bits of one process
            return nn.utils.get_total_norm(shares.get((), []))
        squares = torch.zeros((), dtype=torch.float64)
        # All ranks have the same weights in the same order, so the same groups.
        for dimensions, gradients in shares.items():
            part = nn.utils.get_total_norm(gradients).double().square().to(self._device)
            for dimension in dimensions:
                dist.all_reduce(part, group=self.mesh.get_group(dimension))
            squares += part.cpu()
        some = next(iter(shares.values()))[0]
        return squares.sqrt().to(device=some.device, dtype=some.dtype)


def fail_together(error: Exception | None, mesh: DeviceMesh, what: str) -> None:
    """Raise an error on every rank if a rank failed; all ranks call this and wait for each other.

    Args:
        error: The error of this rank; None if it did not fail.
        what: A description of the work, for the message.

    Raises:
        Exception: This rank failed; its own error is raised.
        CheckpointError: Another rank failed; the message repeats that of the first.
    """
    device = mesh.device_type if mesh.device_type == "cpu" else torch.cuda.current_device()
    none = dist.get_world_size()
    first = torch.tensor(dist.get_rank() if error is not None else none, device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    rank = int(first)
    if rank == none:
        return
    said = f"{type(error).__name__}: {error}".encode()[:_SAID_BYTES].ljust(_SAID_BYTES)
    text = torch.tensor(list(said), dtype=torch.uint8, device=device)
    dist.broadcast(text, src=rank)
    if error is not None:
        raise error
    message = bytes(text.tolist()).decode(errors="replace").rstrip()
    raise CheckpointError(f"{what}: rank {rank} failed: {message}")


def divided_over(gradient: Tensor) -> tuple[str, ...]:
    """Return the names of the mesh dimensions over which a tensor, such as a gradient, is sharded.

    Raises:
        ModelError: The tensor is a partial sum that has not been reduced.
    """
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    names = mesh.mesh_dim_names or ()
    if any(placement.is_partial() for placement in gradient.placements):
        raise ModelError("a gradient has not been summed over the ranks")
    return tuple(
        name
        for name, placement, size in zip(names, gradient.placements, mesh.shape, strict=True)
        if not placement.is_replicate() and size > 1
    )
