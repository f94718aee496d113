"""Defines tensor-parallel plans of decoders: how ranks split each layer, by module name.

The first linear layer of a pair is split by its outputs (`colwise`), the second by its inputs
(`rowwise`). So a rank computes whole attention heads and whole neurons, and one sum over the ranks
follows each pair. The embedding and the head are sharded by vocabulary if its size is divisible.
Everything else is equal on every rank.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from laurel.errors import ConfigError, key_of
from laurel.models.forest.attention import (
    PLAN_ARGUMENT,
    AttentionOptions,
    AttentionPlan,
    ForestPlan,
)
from laurel.observe.user_code import import_object

Split = Literal["colwise", "rowwise", "per_head"]
PLAN_KEY = "policy.dtensor_cfg.custom_parallel_plan"
SIZE_KEY = "policy.dtensor_cfg.tensor_parallel_size"

COLUMNS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1"})
ROWS = frozenset({"o_proj", "out_proj", "dense", "down_proj", "fc2"})
FUSED = frozenset({"qkv_proj", "query_key_value", "c_attn", "Wqkv", "gate_up_proj"})
"""Layers that join several projections in one matrix, whose plain split would not divide each."""

STYLES: dict[Split, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # A norm of single heads has a whole weight on every rank, which gets the gradient of its own
    # heads only, so gradients are summed.
    "per_head": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}


def decoder_layers(network: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of a model's repeated layers.

    Raises:
        ConfigError: The model has no list of layers.
    """
    lists = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise ConfigError(
            f"{type(network).__name__} has no list of layers that could be spread; train it on one "
            "rank (cluster.num_nodes=1 cluster.gpus_per_node=1)"
        )
    return max(lists, key=lambda entry: sum(p.numel() for p in entry[1].parameters()))


def tensor_plan(
    network: nn.Module, size: int, plan: str | Mapping[str, Any] | None = None
) -> dict[str, Split]:
    """Choose how each module of a model is split.

    Args:
        network: A Hugging Face model that is not split yet, with or without adapters.
        plan: A mapping from names of modules (`*` matches anything) to `colwise`, `rowwise` or
            `per_head`, or the import path of such a mapping or of a function that returns it for a
            model. None derives the plan from the names of the modules.

    Returns:
        A mapping from full names of modules to their splits.

    Raises:
        ConfigError: The names of the modules are unknown, heads or neurons are not divisible, or
            the plan names modules that do not exist.
    """
    splits = derived_plan(network) if plan is None else _written_plan(network, plan)
    _refuse_remainders(network, splits, size)
    # If a layer is split by outputs, so is the second factor of its adapter; if by inputs, the
    # first. The other factor is small, and whole on every rank.
    full: dict[str, Split] = {}
    for name, split in splits.items():
        module: Any = network.get_submodule(name)
        if not hasattr(module, "base_layer"):
            full[name] = split
            continue
        full[f"{name}.base_layer"] = split
        factor = "lora_B" if split == "colwise" else "lora_A"
        for adapter in getattr(module, factor):
            full[f"{name}.{factor}.{adapter}"] = split
    return full


def vocabulary_layers(network: Any, size: int) -> list[str]:
    """Return the names of the layers that ranks shard by vocabulary.

    These are the embedding and the language-model head. A layer stays whole on every rank if the
    vocabulary size is not divisible by `size`, or if its class may do more than look up or
    multiply. If the two layers are tied, both are sharded or neither.
    """
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    found: list[Any] = []
    if isinstance(embedding, nn.Embedding) and embedding.max_norm is None:
        # Gemma's subclass multiplies the result by a number, which commutes with the sum of ranks.
        is_plain = type(embedding) is nn.Embedding or hasattr(embedding, "embed_scale")
        found += [embedding] if is_plain else []
    found += [head] if type(head) is nn.Linear else []
    found = [module for module in found if module.weight.shape[0] % size == 0]
    is_tied = getattr(embedding, "weight", None) is getattr(head, "weight", 0)
    if is_tied and len(found) < 2:
        return []
    return [name for name, module in network.named_modules() if any(module is f for f in found)]


def derived_plan(network: nn.Module) -> dict[str, Split]:
    """Return how tensor parallelism splits each linear layer, by the name of the layer.

    The model's layers must be named as in Qwen, Llama, Mistral, Gemma or Phi.

    Raises:
        ConfigError: The model has a linear layer with an unknown name.
    """
    prefix, layers = decoder_layers(network)
    splits: dict[str, Split] = {}
    for name, module in layers.named_modules(prefix=prefix):
        parent = network.get_submodule(name.rpartition(".")[0])
        parts = name.split(".")
        parents = (".".join(parts[:depth]) for depth in range(1, len(parts)))
        if any(hasattr(network.get_submodule(one), "base_layer") for one in parents):
            continue
        if isinstance(_plain(module), nn.Linear):
            splits[name] = _split_of(name)
        elif _is_attention(module):
            own = [n for n, _ in module.named_parameters(recurse=False)]
            if own:
                raise _unknown(f"{name}.{own[0]}", "a weight of the attention itself")
        elif any(True for _ in module.parameters(recurse=False)) and not is_norm(module):
            raise _unknown(name, f"a {type(module).__name__}")
        elif _is_attention(parent) and is_norm(module):
            if {p.numel() for p in module.parameters(recurse=False)} != {
                int(cast(Any, parent).head_dim)
            }:
                raise _unknown(name, "a norm over several heads, which no rank has all of")
            splits[name] = "per_head"
    return splits


def _split_of(name: str) -> Split:
    last = name.rpartition(".")[2]
    if last in FUSED:
        raise _unknown(name, "several projections in one matrix, which must be split one by one")
    if last in COLUMNS:
        return "colwise"
    if last in ROWS:
        return "rowwise"
    raise _unknown(name, "a linear layer of a name that is not known")


def _unknown(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"{key_of(SIZE_KEY)}: {name} is {what}: no plan can be derived. Set it to 1 and spread the "
        "model "
        f"over data-parallel ranks, or say how to split it in {key_of(PLAN_KEY)}"
    )


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, "q_proj") and hasattr(module, "head_dim")


def is_norm(module: nn.Module) -> bool:
    """Report whether a module has only vectors as weights, as norms do."""
    shapes = [p.ndim for p in module.parameters(recurse=False)]
    return bool(shapes) and max(shapes) == 1


def _written_plan(network: nn.Module, plan: str | Mapping[str, Any]) -> dict[str, Split]:
    mapping = _imported(plan, network) if isinstance(plan, str) else plan
    names = [name for name, _ in network.named_modules() if name]
    splits: dict[str, Split] = {}
    for pattern, split in mapping.items():
        if split not in STYLES:
            raise ConfigError(
                f"{key_of(PLAN_KEY)}.{pattern}: {split!r} is none of {', '.join(STYLES)}"
            )
        matches = fnmatch.filter(names, pattern)
        if not matches:
            # Names as a user would write them: each once, with a star for the number of a layer.
            starred = (".".join("*" if p.isdigit() else p for p in n.split(".")) for n in names)
            written = list(dict.fromkeys((*starred, *names)))
            near = difflib.get_close_matches(pattern, written, n=1, cutoff=0.3)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{key_of(PLAN_KEY)}: the model has no module {pattern}.{hint}")
        for name in matches:
            _refuse_outside(network, name, split)
            splits[name] = split
    return splits


def _refuse_outside(network: nn.Module, name: str, split: str) -> None:
    prefix, _ = decoder_layers(network)
    if not name.startswith(f"{prefix}."):
        raise ConfigError(
            f"{key_of(PLAN_KEY)}: {name} is outside {prefix}: embedding and head are divided by "
            "vocabulary "
            "without being named, and all else there is whole on every rank; leave it out"
        )
    module = _plain(network.get_submodule(name))
    if (split == "per_head") == isinstance(module, nn.Linear):
        wanted = "a norm" if split == "per_head" else "a linear layer"
        raise ConfigError(
            f"{key_of(PLAN_KEY)}.{name}: {split} is for {wanted}, not {type(module).__name__}"
        )


def _imported(path: str, network: nn.Module) -> Mapping[str, Any]:
    found = import_object(path, where=f"{key_of(PLAN_KEY)}={path}")
    if callable(found):
        found = found(network)
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{key_of(PLAN_KEY)}={path} gives a {type(found).__name__} and not a mapping"
        )
    return found


def _refuse_remainders(network: nn.Module, splits: Mapping[str, Split], size: int) -> None:
    # A head or a neuron must not be split.
    counts: dict[str, int] = {}
    for name, split in splits.items():
        linear = _plain(network.get_submodule(name))
        if not isinstance(linear, nn.Linear):
            continue
        parent = network.get_submodule(name.rpartition(".")[0])
        width = linear.out_features if split == "colwise" else linear.in_features
        last = name.rpartition(".")[2]
        if _is_attention(parent):
            width //= int(cast(Any, parent).head_dim)
            counts.setdefault(f"{width} heads in {last}", width)
        else:
            counts.setdefault(f"{width} neurons in {last}", width)
    common = math.gcd(*counts.values())
    if common % size:
        odd = [text for text, count in counts.items() if count % size]
        *smaller, largest = [str(n) for n in range(1, common + 1) if common % n == 0]
        choice = f"be {', '.join(smaller)} or {largest}" if smaller else "only be 1"
        raise ConfigError(
            f"{key_of(SIZE_KEY)}={size} does not divide the {', '.join(odd)} of this model; it can "
            f"{choice}"
        )


def _plain(module: nn.Module) -> Any:
    return getattr(module, "base_layer", module)


# Sequence parallelism: between blocks, every tensor-parallel rank has its share of the tokens.
#
# Each rank takes its share before the first layer. Norms and the residual stream compute on it. A
# block, which is attention or feed-forward, gathers all tokens before, and scatters its sums after.
# After the last layer every rank has all tokens again. All shares have the same size: rows are
# padded first, and the padding is removed last.

SEQUENCE_KEY = "policy.dtensor_cfg.sequence_parallel"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and keyword arguments that hooks take and return."""
_SHARED, _WHOLE = (Shard(1),), (Replicate(),)


def token_styles(network: nn.Module, splits: Mapping[str, Split]) -> dict[str, ParallelStyle]:
    """Choose how each module of the layers is parallelised under sequence parallelism.

    Args:
        splits: The plan that `tensor_plan` returned.

    Returns:
        A mapping from full names of modules to torch's parallel styles.

    Raises:
        ConfigError: A layer has weights that are neither split nor those of a norm outside
            attention and feed-forward, or it has split linear layers outside of both.
    """
    styles = {name: STYLES[split]() for name, split in splits.items()}
    for name in [name for name, split in splits.items() if split == "rowwise"]:
        styles[name] = RowwiseParallel(output_layouts=Shard(1))
        if ".lora_A." in name:  # the second factor is whole, and gets only the tokens of its rank
            styles[name.replace(".lora_A.", ".lora_B.")] = _on_tokens()
    # Returns the modules that contain split linear layers, or their adapters.
    blocks = {
        name.partition(".base_layer")[0].partition(".lora_")[0].rpartition(".")[0]
        for name, split in splits.items()
        if split == "colwise"
    }
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
    """Register the hooks of sequence parallelism, which divide the tokens of rows over ranks.

    Tokens are divided before the first layer of the network, and gathered after the last.
    """
    _, layers = decoder_layers(network)
    filling = _Filling(mesh.size())
    network.base_model.register_forward_pre_hook(filling.add, with_kwargs=True)
    network.base_model.register_forward_hook(filling.cut)
    layers[0].register_forward_pre_hook(partial(_take_share, mesh), with_kwargs=True)
    layers[-1].register_forward_hook(partial(_gather_output, mesh))


def _on_tokens() -> ParallelStyle:
    # The module is whole on every rank and gets other tokens on each, so gradients are summed.
    return SequenceParallel(use_local_output=True)


def _impossible(what: str) -> ConfigError:
    return ConfigError(
        f"{key_of(SEQUENCE_KEY)}=true: {what}. Only norms can work on a share of the tokens: set "
        "it to false"
    )


class _AllTokens(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # With a distributed tensor all linear layers of the block sum their gradients at once, but
        # it cannot be combined with the plain tensors of adapters.
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
    if args:
        return args[0], lambda other: ((other, *args[1:]), kwargs)
    return kwargs["hidden_states"], lambda other: ((), {**kwargs, "hidden_states": other})


class _Filling:
    # Padding at the end of every row makes the number of tokens divisible by the number of ranks.
    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        # The number of tokens of a row without padding, between `add` and `cut`.
        self._length = 0

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
    """Return a model's keyword arguments with `missing` padding tokens appended to every row."""
    filled = dict(kwargs)
    for name in ("input_ids", "position_ids", "attention_mask"):
        if filled.get(name) is not None:
            filled[name] = F.pad(filled[name], (0, missing))
    return filled


class FilledPlan:
    """An attention plan for rows with padding at the end.

    Padding tokens neither attend nor are attended to.
    """

    def __init__(self, plan: AttentionPlan, length: int) -> None:
        """Wrap the attention plan of the tokens before the padding; `length` is their number."""
        self._plan, self._length = plan, length

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention as `AttentionPlan.attend` describes; the output for padding is 0."""
        if isinstance(self._plan, ForestPlan):  # which needs no copy for it
            return self._plan.attend(module, query, key, value, options)
        missing = query.shape[2] - self._length
        query, key, value = (t[:, :, : self._length] for t in (query, key, value))
        return F.pad(self._plan.attend(module, query, key, value, options), (0, 0, 0, missing))
