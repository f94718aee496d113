"""Spread a model over the processes of a device mesh: FSDP2 over data, tensor parallelism inside.

Every rank runs the same program. Ranks of one data-parallel place (those that differ in `cp` and
`tp` alone) are given the same micro-batch; others have their own, and as many of them as any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import parallelize_module

from laurel.errors import CheckpointError, ConfigError, ModelError, setting_of
from laurel.models.forest.decoder import Decoder
from laurel.models.forest.outputs import VocabularyShare
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelShape:
    """The number of ranks that a model is spread over, by kind of parallelism."""

    dp_replicate: int = 1
    """Copies of the sharded model; each reads other data."""
    dp_shard: int = 1
    """Ranks that hold a share of every weight; each reads other data."""
    cp: int = 1
    """Ranks that read a share of every row, and hold a share of every weight as well."""
    tp: int = 1
    """Ranks that compute a share of every layer, on the same data."""

    def __post_init__(self) -> None:
        """Refuse sizes that are not positive.

        Raises:\n        ConfigError: A size is below 1.
        """
        for name in (REPLICATE, SHARD, CONTEXT, TENSOR):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: a mesh has at least 1 rank")

    @classmethod
    def of(cls, num_ranks: int, *, tp: int, dp_replicate: int = 1) -> ParallelShape:
        """Make the shape of so many ranks: the weights are sharded over all that remain.

        Raises:
            ConfigError: They cannot be divided so.
        """
        if tp < 1 or dp_replicate < 1 or num_ranks % (tp * dp_replicate):
            raise ConfigError(
                f"{setting_of('policy.dtensor_cfg.tensor_parallel_size', tp)} with {dp_replicate} "
                "copies does not "
                f"divide {num_ranks} ranks: their product must"
            )
        return cls(dp_replicate=dp_replicate, dp_shard=num_ranks // (tp * dp_replicate), tp=tp)

    @property
    def num_ranks(self) -> int:
        """Count all processes."""
        return self.dp * self.each

    @property
    def each(self) -> int:
        """Count the ranks that are given the same data; they are neighbours."""
        return self.cp * self.tp

    @property
    def dp(self) -> int:
        """Count the ranks that read data of their own."""
        return self.dp_replicate * self.dp_shard

    def mesh(self, device_type: str) -> DeviceMesh:
        """Make the mesh with the dimensions `dp_replicate`, `dp_shard` and `tp`; a collective call.

        Weights are shared out over `cp` as they are over data: both are in `dp_shard`.

        Raises:
            ConfigError: Another number of processes was started.
        """
        started = torch.distributed.get_world_size()
        if started != self.num_ranks:
            raise ConfigError(
                f"{self} needs {self.num_ranks} processes and {started} have been started"
            )
        sizes = (self.dp_replicate, self.dp_shard * self.cp, self.tp)
        return init_device_mesh(device_type, sizes, mesh_dim_names=(REPLICATE, SHARD, TENSOR))


def parallelise(
    model: Decoder,
    mesh: DeviceMesh,
    *,
    cp: int = 1,
    plan: str | Mapping[str, Any] | None = None,
    sequence_parallel: bool = False,
    precision: torch.dtype | None = None,
    cpu_offload: bool = False,
    reshard_after_forward: bool = True,
) -> None:
    """Spread a model that is whole, and the same, on every rank (or on the meta device).

    Layers are split over `tp`, embedding and language-model head divided by vocabulary; then each
    layer, and what is around the layers, is sharded over `dp_shard`. Gradients are summed
    over the data-parallel ranks, not averaged: losses are divided by a denominator that is counted
    over all of them (see `AcrossRanks.total`).

    Args:
        model: Changed in place. Called as before, through its `forward`.
        mesh: Mesh that `ParallelShape.mesh` made.
        cp: Neighbours of `dp_shard` that divide the tokens of every forest (`share_context`).
        plan: Tensor-parallel plan, as `tensor_plan` takes it.
        sequence_parallel: Between attention and feed-forward, divide the tokens over `tp`.
        precision: Dtype that the weights of layers are gathered and multiplied in; None: their
            own, which changes no number. Gradients are summed in float32 (float64 where the
            weights are) whatever it is, and the head keeps its float32.
        cpu_offload: Keep weights, gradients and optimizer on the host between uses. Where
            everything is on the host anyway it changes nothing.
        reshard_after_forward: Drop the gathered weights of a layer until the backward pass.

    Raises:
        ConfigError: The model cannot be split so.
        ModelError: It is spread already.
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
        reshard_after_forward=reshard_after_forward,
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


def _shard(
    model: Decoder,
    mesh: DeviceMesh,
    *,
    precision: torch.dtype | None,
    cpu_offload: bool,
    reshard_after_forward: bool,
    divisor: int,
) -> None:
    # FSDP2 around every layer, and around the rest; summed gradients are divided by `divisor`.
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
        fully_shard(layer, mp_policy=inner, reshard_after_forward=reshard_after_forward, **shared)
    fully_shard(model, mp_policy=outer, reshard_after_forward=False, **shared)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Heads are computed by every rank that divides tokens, so all gradients are so many
            # times as large: see `context_shards`.
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
        # Every rank has the whole tensor and takes its share of that: nothing is sent.
        parallelize_module(module, mesh, style, src_data_rank=None)
        for parameter_name, parameter in module.named_parameters():
            # Below adapters weights are frozen, and some styles of torch forget it.
            parameter.requires_grad_(trained[parameter_name])


# ------------------------------------------------------------------------------- the vocabulary


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
    # Each rank gives the embeddings of its part of the vocabulary, and zeros for other tokens.
    share = VocabularyShare.of(cast(DTensor, module.weight))
    is_mine, there = share.mine(ids)
    with _as_plain(module):
        rows = type(module).forward(module, there)
    rows = rows.masked_fill(~is_mine[..., None], 0.0)
    summed = DTensor.from_local(rows, mesh, [Partial()], run_check=False)
    return summed.redistribute(placements=[Replicate()]).to_local()


def _multiply(module: nn.Linear, mesh: DeviceMesh, hidden: Tensor) -> Tensor:
    # All logits on every rank, as transformers' class returns them: for checks and sampling.
    # Training reads log-probabilities of the divided logits (`token_logprobs`).
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


# ---------------------------------------------------------------------------------------- tensors


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: all of it where it is not spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Gather all of a tensor where it is spread: a collective call of the ranks that share it."""
    if not isinstance(tensor, DTensor):
        return tensor
    # It may rest on the host.
    gathered = cast(DTensor, tensor.to(tensor.device_mesh.device_type))
    placements: list[Placement] = list(gathered.placements)
    # One dimension after the other: torch warns where it has to find that out itself.
    for dimension in range(len(placements)):
        placements[dimension] = Replicate()
        gathered = gathered.redistribute(placements=placements)
    return gathered.to_local()


def host_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host: dense, in memory of its own."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def held_bytes(model: nn.Module) -> int:
    """Count the bytes of memory that this rank's shares of the weights keep alive."""
    storages = {p.untyped_storage().data_ptr(): p for p in map(local, model.parameters())}
    return sum(share.untyped_storage().nbytes() for share in storages.values())


# --------------------------------------------------------------------------------------------------
# What the ranks of a mesh have to agree on: denominators, sums, gradient norms, failures.
#
# Every method is a collective call: all ranks make it, in the same order.

# Bytes of a failed rank's message that the others repeat.
_SAID_BYTES = 2000


class AcrossRanks:
    """The ranks of a mesh as one unit: sums, clipping, shared failures."""

    def __init__(self, mesh: DeviceMesh, *, cp: int = 1) -> None:
        """Make the groups of a mesh that `ParallelShape.mesh` made.

        Args:
            mesh: Mesh of all ranks.
            cp: So many neighbours of its `dp_shard` read the same data, and say the same of it.
        """
        self.mesh = mesh
        self._cp = cp
        self._device = torch.device(
            mesh.device_type if mesh.device_type == "cpu" else torch.cuda.current_device()
        )

    @property
    def place(self) -> int:
        """Index of the part of the data that this rank reads, from 0.

        Ranks that differ in `cp` and `tp` alone read the same part.
        """
        ranks = self.mesh.get_local_rank(REPLICATE), self.mesh.get_local_rank(SHARD)
        return (ranks[0] * self.mesh[SHARD].size() + ranks[1]) // self._cp

    @property
    def dp_size(self) -> int:
        """Number of parts that the data is divided into."""
        return self.mesh[REPLICATE].size() * self.mesh[SHARD].size() // self._cp

    def total(self, value: float) -> float:
        """Sum a number over all data-parallel ranks: the denominator of a loss."""
        return float(self._over_data(torch.tensor(value, dtype=torch.float64)))

    def totals(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum the totals of a loss over all data-parallel ranks.

        Totals named `..._min` or `..._max` are reduced by that, as in `learner.add_up`. Every place
        has the same names.
        """
        kinds = {"_min": dist.ReduceOp.MIN, "_max": dist.ReduceOp.MAX}
        return {
            name: self._over_data(value, kinds.get(name[-4:], dist.ReduceOp.SUM))
            for name, value in sorted(sums.items())
        }

    def clip(self, parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
        """Scale all gradients down to a norm and return the norm before, of the whole model.

        Weights that are whole on several ranks count once.

        Args:
            parameters: Of the model; those without a gradient are left out.
            limit: Larger norms are scaled down to it; None only measures.
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

    def _over_data(
        self, value: Tensor, kind: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        home = value.device
        value = value.detach().to(self._device, copy=True)
        for dimension in (SHARD, REPLICATE):
            if self.mesh[dimension].size() > 1:
                dist.all_reduce(value, op=kind, group=self.mesh.get_group(dimension))
        if kind == dist.ReduceOp.SUM and self._cp > 1:
            value /= self._cp
        return value.to(home)


def fail_together(error: Exception | None, mesh: DeviceMesh, what: str) -> None:
    """Raise on every rank what failed on one; without failures, a barrier.

    Args:
        error: Error of this rank, if any.
        mesh: The ranks.
        what: Description of the work, for the message.

    Raises:
        Exception: The rank's own, if it has one.
        CheckpointError: Another rank failed; with what the first of them said.
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
    """List the dimensions of the mesh that a tensor, mostly a gradient, is divided over.

    Raises:
        ModelError: The tensor is still a partial sum.
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
