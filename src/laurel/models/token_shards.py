"""Sequence parallelism: between blocks, every tensor-parallel rank has its share of the tokens.

Each rank takes its share before the first layer. Norms and the residual stream stay on it; a block,
which is attention or feed-forward, gathers all tokens before and scatters its sums after. After the
last layer every rank has all tokens again. Shares are of one size: rows are filled up first, and
what came of the filling is cut off last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, SequenceParallel

from laurel.errors import ConfigError, key_of
from laurel.models.attention import PLAN_ARGUMENT, AttentionOptions, AttentionPlan
from laurel.models.tensor_plans import STYLES, Split, decoder_layers, is_norm

KEY = "policy.dtensor_cfg.sequence_parallel"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and by name, as hooks take and give them."""
_SHARED, _WHOLE = (Shard(1),), (Replicate(),)


def token_styles(network: nn.Module, splits: Mapping[str, Split]) -> dict[str, ParallelStyle]:
    """How each module of the layers works where tokens are divided between its blocks.

    Args:
        network: A Hugging Face model, with or without adapters.
        splits: See `tensor_plan`.

    Raises:
        ConfigError: A weight of a layer is neither split nor that of a norm between blocks.
    """
    styles = {name: STYLES[split]() for name, split in splits.items()}
    for name in [name for name, split in splits.items() if split == "rowwise"]:
        styles[name] = RowwiseParallel(output_layouts=Shard(1))
        if ".lora_A." in name:  # what follows is whole, and has seen the tokens of its rank alone
            styles[name.replace(".lora_A.", ".lora_B.")] = _on_tokens()
    blocks = {_block_of(name) for name, split in splits.items() if split == "colwise"}
    prefix, layers = decoder_layers(network)
    for name, module in layers.named_modules(prefix=prefix):
        if name in blocks and name.removeprefix(f"{prefix}.").isdigit():
            raise _impossible(f"{name} splits linear layers that are in no block of it")
        has_weights = any(True for _ in module.parameters(recurse=False))
        if not has_weights or name in styles or ".lora_" in name:
            continue
        is_inside = any(f"{name}.".startswith(f"{block}.") for block in blocks)
        if is_inside or not is_norm(module):
            raise _impossible(f"{name}, a {type(module).__name__}, is not split")
        styles[name] = _on_tokens()
    return styles | {block: _AllTokens() for block in blocks}


def share_tokens(network: Any, mesh: DeviceMesh) -> None:
    """Share the tokens out before the first layer and gather them after the last."""
    _, layers = decoder_layers(network)
    filling = _Filling(mesh.size())
    network.base_model.register_forward_pre_hook(filling.add, with_kwargs=True)
    network.base_model.register_forward_hook(filling.cut)
    layers[0].register_forward_pre_hook(partial(_take_share, mesh), with_kwargs=True)
    layers[-1].register_forward_hook(partial(_gather_output, mesh))


def _on_tokens() -> ParallelStyle:
    """A module that is whole on every rank and sees other tokens there: gradients are summed."""
    return SequenceParallel(use_local_output=True)


def _block_of(name: str) -> str:
    """The module that a linear layer, or what its adapters have made of it, is a part of."""
    layer = name.partition(".base_layer")[0].partition(".lora_")[0]
    return layer.rpartition(".")[0]


def _impossible(what: str) -> ConfigError:
    return ConfigError(
        f"{key_of(KEY)}=true: {what}. Only norms can work on a share of the tokens: set it to false"
    )


# ------------------------------------------------------------------------------------ of one block


class _AllTokens(ParallelStyle):
    """A block that is given the tokens of its rank and computes with all of them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # A distributed tensor lets all linear layers of the block sum their gradients at once, but
        # does not go together with the plain ones of adapters.
        is_adapted = any(hasattr(inner, "base_layer") for inner in module.modules())
        hook = partial(_gather_input, device_mesh, is_adapted)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module


def _gather_input(
    mesh: DeviceMesh, as_plain: bool, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    tokens, put = _hidden(args, kwargs)
    gathered = _spread(tokens, mesh, _SHARED).redistribute(placements=_WHOLE)
    return put(gathered.to_local() if as_plain else gathered)


def _take_share(
    mesh: DeviceMesh, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    tokens, put = _hidden(args, kwargs)
    return put(_spread(tokens, mesh, _WHOLE).redistribute(placements=_SHARED).to_local())


def _gather_output(mesh: DeviceMesh, _: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return _spread(output, mesh, _SHARED).redistribute(placements=_WHOLE).to_local()


def _spread(tensor: Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    return DTensor.from_local(tensor, mesh, placements, run_check=False)


def _hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Callable[[Tensor], Arguments]]:
    """The hidden states a module is given, and how to give it others."""
    if args:
        return args[0], lambda other: ((other, *args[1:]), kwargs)
    return kwargs["hidden_states"], lambda other: ((), {**kwargs, "hidden_states": other})


# -------------------------------------------------------------------------------- of the whole row


class _Filling:
    """Tokens at the end of every row, so that all ranks have as many."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._length = 0
        """Of the rows before they were filled, from `add` to `cut`."""

    def add(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        ids = args[0] if args else kwargs["input_ids"]
        self._length = ids.shape[1]
        missing = -self._length % self._ranks
        if not missing:
            return args, kwargs
        filled = filled_row(kwargs, missing)
        if filled.get(PLAN_ARGUMENT) is not None:
            filled[PLAN_ARGUMENT] = FilledPlan(filled[PLAN_ARGUMENT], self._length)
        return tuple(F.pad(ids, (0, missing)) if a is ids else a for a in args), filled

    def cut(self, _: nn.Module, _args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, : self._length]
        return output


def filled_row(kwargs: Mapping[str, Any], missing: int) -> dict[str, Any]:
    """The arguments of a model, with so many tokens more at the end of every row."""
    filled = dict(kwargs)
    for name in ("input_ids", "position_ids", "attention_mask"):
        if filled.get(name) is not None:
            filled[name] = F.pad(filled[name], (0, missing))
    return filled


class FilledPlan:
    """A plan of the tokens before the filling, which sees nobody and is not seen."""

    def __init__(self, plan: AttentionPlan, length: int) -> None:
        """Of a row that had so many tokens."""
        self._plan, self._length = plan, length

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """See `AttentionPlan`."""
        missing = query.shape[2] - self._length
        query, key, value = (t[:, :, : self._length] for t in (query, key, value))
        return F.pad(self._plan.attend(module, query, key, value, options), (0, 0, 0, missing))
