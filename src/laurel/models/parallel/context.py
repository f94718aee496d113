"""Implements context parallelism: ranks divide the tokens of a row up to the last norm.

Only attention needs tokens of other ranks. For attention, the ranks exchange heads for tokens
(DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509), so that each rank has all tokens of some of
the heads, and the `AttentionPlan` of the row decides which keys a query attends to. Afterwards each
rank has its own tokens again. After the last norm every rank gathers all tokens, and computes the
same head and loss.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from laurel.errors import ConfigError, key_of
from laurel.models.forest.attention import PLAN_ARGUMENT, AttentionOptions, AttentionPlan
from laurel.models.forest.decoder import Decoder
from laurel.models.parallel.tensor import FilledPlan, filled_row

KEY = "policy.dtensor_cfg.context_parallel_size"
_HEADS, _TOKENS = (Shard(1),), (Shard(2),)


def share_context(network: Any, mesh: DeviceMesh) -> None:
    """Make a network divide the tokens of token forests over ranks; padded rows stay whole.

    Args:
        network: A Hugging Face model, which tensor-parallel ranks may have split already.
        mesh: A mesh of one dimension, whose ranks get the same forests.
    """
    # On a CPU torch warns in every process that it gathers where a GPU would exchange.
    logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)
    sharing = _Sharing(mesh)
    # These hooks enclose those of sequence parallelism, which divides a rank's tokens again.
    body: nn.Module = network.base_model
    body.register_forward_pre_hook(sharing.take, with_kwargs=True, prepend=True)
    body.register_forward_hook(sharing.gather)


def check_context(model: Decoder, *, cp: int, tp: int) -> None:
    """Check that the tokens of a model's rows can be divided over `cp` ranks.

    `tp` is the number of tensor-parallel ranks, which divide the attention heads.

    Raises:
        ConfigError: The model reads padded rows, or `cp` does not divide the number of attention
            heads of a rank.
    """
    if model.path != "forest":
        raise ConfigError(
            f"{key_of(KEY)}={cp}: only token forests are divided, and this model reads padded rows "
            "(the run's notes say why). Set it to 1"
        )
    heads = int(model.network.config.get_text_config().num_attention_heads) // tp
    if heads % cp:
        raise ConfigError(
            f"{key_of(KEY)}={cp} does not divide the {heads} attention heads of a rank: set it to "
            "a divisor"
        )


class _Sharing:
    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        # The number of tokens of the row in progress; None if it is not divided.
        self._length: int | None = None

    def take(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the model's arguments by those for this rank's part of the tokens.

        The model calls this hook before each forward pass.
        """
        self._length = None
        if kwargs.get(PLAN_ARGUMENT) is None:
            return args, kwargs
        self._length = int(kwargs["input_ids"].shape[1])
        filled: Mapping[str, Any] = filled_row(kwargs, -self._length % self._mesh.size())
        mine, ranks = self._mesh.get_local_rank(), self._mesh.size()
        shared = {
            name: filled[name].chunk(ranks, dim=1)[mine] for name in ("input_ids", "position_ids")
        }
        plan = _AcrossRanks(FilledPlan(kwargs[PLAN_ARGUMENT], self._length), self._mesh)
        return args, {**filled, **shared, PLAN_ARGUMENT: plan}

    def gather(self, _: nn.Module, _args: Any, output: Any) -> Any:
        """Gather the hidden states of all tokens on every rank.

        Every rank then computes the same head and loss, so gradients, which are summed over the
        ranks, count once per rank. `parallelise` divides them by the number of ranks.
        """
        if self._length is not None:
            share = DTensor.from_local(
                output.last_hidden_state, self._mesh, _HEADS, run_check=False
            )
            row = share.redistribute(placements=(Replicate(),))
            row_1TD = row.to_local(grad_placements=(Partial(),))
            output.last_hidden_state = row_1TD[:, : self._length]
        return output


class _AcrossRanks:
    def __init__(self, plan: AttentionPlan, mesh: DeviceMesh) -> None:
        self._plan, self._mesh = plan, mesh

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute the attention of this rank's tokens to the keys of all ranks.

        All ranks make this call together. The arguments are those of `AttentionPlan.attend`.
        """
        ranks, mine = self._mesh.size(), self._mesh.get_local_rank()
        # If there are fewer key and value heads than ranks, several ranks need the same head.
        copies = math.lcm(key.shape[1], ranks) // key.shape[1]
        if copies > 1:
            key, value = (t.repeat_interleave(copies, dim=1) for t in (key, value))
        if options.s_aux is not None:
            options = replace(options, s_aux=options.s_aux.chunk(ranks)[mine])
        query, key, value = (self._moved(t, _TOKENS, _HEADS) for t in (query, key, value))
        return self._moved(self._plan.attend(module, query, key, value, options), _HEADS, _TOKENS)

    def _moved(self, tensor: Tensor, old: Any, new: Any) -> Tensor:
        spread = DTensor.from_local(tensor, self._mesh, old, run_check=False)
        moved = spread.redistribute(placements=new).to_local()
        # CPUs gather where GPUs exchange, and a view would keep the tokens of all ranks in memory.
        return moved.clone() if moved.untyped_storage().nbytes() > moved.nbytes else moved
