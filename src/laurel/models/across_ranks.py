"""What the ranks of a mesh have to agree on: denominators, sums, gradient norms, failures.

Every method is a collective call: all ranks make it, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from laurel.errors import CheckpointError, ModelError
from laurel.models.parallel import REPLICATE, SHARD, local

_SAID_BYTES = 2000
"""Of what a failed rank says, for the others to repeat."""


class AcrossRanks:
    """The ranks of a mesh as one."""

    def __init__(self, mesh: DeviceMesh, *, cp: int = 1) -> None:
        """Speak to the ranks of a mesh that `ParallelShape.mesh` made.

        Args:
            mesh: Of all ranks.
            cp: So many neighbours of its `dp_shard` read the same data, and say the same of it.
        """
        self.mesh = mesh
        self._cp = cp
        self._device = torch.device(
            mesh.device_type if mesh.device_type == "cpu" else torch.cuda.current_device()
        )

    @property
    def place(self) -> int:
        """Which part of the data this rank reads, from 0: the same for those that read the same."""
        ranks = self.mesh.get_local_rank(REPLICATE), self.mesh.get_local_rank(SHARD)
        return (ranks[0] * self.mesh[SHARD].size() + ranks[1]) // self._cp

    @property
    def num_places(self) -> int:
        """Parts that the data is divided into."""
        return self.mesh[REPLICATE].size() * self.mesh[SHARD].size() // self._cp

    def total(self, value: float) -> float:
        """The sum of a number over all places: what a loss is divided by."""
        return float(self._over_data(torch.tensor(value, dtype=torch.float64)))

    def all_hold(self, holds: bool) -> bool:
        """Whether something holds on every place, so that all skip a step or none does."""
        return self.total(float(not holds)) == 0

    def totals(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums of a loss over all places.

        What is named `..._min` or `..._max` is no sum, as in `learner.add_up`. Every place has the
        same names.
        """
        kinds = {"_min": dist.ReduceOp.MIN, "_max": dist.ReduceOp.MAX}
        return {
            name: self._over_data(value, kinds.get(name[-4:], dist.ReduceOp.SUM))
            for name, value in sorted(sums.items())
        }

    def clip(self, parameters: Iterable[nn.Parameter], limit: float | None) -> float:
        """Scale all gradients down to a norm, and give what it was: that of the whole model.

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
        return float(norm)

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
    """Raise on every rank what has gone wrong on one; also a barrier, where nothing has.

    Args:
        error: Of this rank.
        mesh: The ranks.
        what: What they were doing, in words.

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
    """The dimensions of the mesh that a tensor, mostly a gradient, is divided over.

    Raises:
        ModelError: It is not summed yet.
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
