"""A model spread over the processes of a device mesh: FSDP2 over data, tensor parallelism inside.

Every rank runs the same program. Ranks of one data-parallel place (those that differ in `cp` and
`tp` alone) are given the same micro-batch; others have their own, and as many of them as any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
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

from laurel.errors import ConfigError, ModelError, setting_of
from laurel.models.context_shards import check_context, share_context
from laurel.models.decoder import Decoder
from laurel.models.outputs import VocabularyShare
from laurel.models.tensor_plans import STYLES, decoder_layers, tensor_plan, vocabulary_layers
from laurel.models.token_shards import share_tokens, token_styles

REPLICATE, SHARD, CONTEXT, TENSOR = "dp_replicate", "dp_shard", "cp", "tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelShape:
    """How many ranks a model is spread over, in each direction."""

    dp_replicate: int = 1
    """Copies of the sharded model; each reads other data."""
    dp_shard: int = 1
    """Ranks that hold a share of every weight; each reads other data."""
    cp: int = 1
    """Ranks that read a share of every row, and hold a share of every weight as well."""
    tp: int = 1
    """Ranks that compute a share of every layer, on the same data."""

    def __post_init__(self) -> None:
        """Refuse what is no number of ranks.

        Raises:
            ConfigError: One of them is below 1.
        """
        for name in (REPLICATE, SHARD, CONTEXT, TENSOR):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: a mesh has at least 1 rank")

    @classmethod
    def of(cls, num_ranks: int, *, tp: int, dp_replicate: int = 1) -> ParallelShape:
        """The mesh of so many ranks, all that are left over sharding the weights.

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
        """Processes in all."""
        return self.dp * self.each

    @property
    def each(self) -> int:
        """Ranks that are given the same data; they are neighbours."""
        return self.cp * self.tp

    @property
    def dp(self) -> int:
        """Places that read data of their own."""
        return self.dp_replicate * self.dp_shard

    def mesh(self, device_type: str) -> DeviceMesh:
        """The mesh, with the dimensions `dp_replicate`, `dp_shard` and `tp`; a collective call.

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
        mesh: See `ParallelShape.mesh`.
        cp: Neighbours of `dp_shard` that divide the tokens of every forest (`share_context`).
        plan: See `tensor_plan`.
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
        model, mesh, precision=precision, cpu_offload=cpu_offload,
        reshard_after_forward=reshard_after_forward, divisor=cp,
    )  # fmt: skip
    if shares_tokens:  # outside of the hooks of FSDP, which wants no views from a layer
        share_tokens(model.network, mesh[TENSOR])
    if cp > 1:
        share_context(model.network, _context_mesh(mesh, cp))
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
    """FSDP2 around every layer, and around what is left; sums of gradients are divided."""
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


def _context_mesh(mesh: DeviceMesh, cp: int) -> DeviceMesh:
    """The ranks that this one divides tokens with."""
    sizes = (mesh[REPLICATE].size(), mesh[SHARD].size() // cp, cp, mesh[TENSOR].size())
    names = (REPLICATE, SHARD, CONTEXT, TENSOR)
    return init_device_mesh(mesh.device_type, sizes, mesh_dim_names=names)[CONTEXT]


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
    """Divide embedding and head over the ranks by vocabulary, where they can be."""
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
    """The embeddings of tokens: each rank gives those of its part of the vocabulary, and zeros."""
    share = VocabularyShare.of(cast(DTensor, module.weight))
    is_mine, there = share.mine(ids)
    with _as_plain(module):
        rows = type(module).forward(module, there)
    rows = rows.masked_fill(~is_mine[..., None], 0.0)
    summed = DTensor.from_local(rows, mesh, [Partial()], run_check=False)
    return summed.redistribute(placements=[Replicate()]).to_local()


def _multiply(module: nn.Linear, mesh: DeviceMesh, hidden: Tensor) -> Tensor:
    """All logits on every rank, as the class of transformers wants them: for checks and drawing.

    Training reads log-probabilities of the divided logits (`token_logprobs`).
    """
    spread = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    with _as_plain(module):
        part = type(module).forward(module, spread.to_local(grad_placements=[Partial()]))
    logits = DTensor.from_local(part, mesh, [Shard(part.ndim - 1)], run_check=False)
    return logits.redistribute(placements=[Replicate()]).to_local()


@contextmanager
def _as_plain(module: nn.Module) -> Iterator[None]:
    """Let a module compute with its part of the vocabulary, as if that were all."""
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
    """The part of a tensor that this rank holds: all of it where it is not spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered where it is spread: a collective call of those that share it."""
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
    """A copy on the host: dense, and in memory of its own, whatever becomes of the tensor."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def held_bytes(model: nn.Module) -> int:
    """Bytes of the memory that this rank's shares of the weights keep alive."""
    storages = {p.untyped_storage().data_ptr(): p for p in map(local, model.parameters())}
    return sum(share.untyped_storage().nbytes() for share in storages.values())
