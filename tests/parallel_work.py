"""What the processes of the parallel tests compute: the same steps, alone or over a mesh."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import random_trees
import tiny
from laurel.config.policy import LoraConfig
from laurel.data.forest import to_forest
from laurel.errors import ModelError
from laurel.models.forest.compiled import compile_layers
from laurel.models.forest.decoder import Decoder
from laurel.models.forest.outputs import VocabularyShare, all_logits, token_logprobs, whole
from laurel.models.loading.adapters import add_adapters
from laurel.models.loading.pretrained import recompute_activations
from laurel.models.parallel.mesh import AcrossRanks, held_bytes, local, parallelise
from laurel.models.parallel.tensor import decoder_layers
from laurel.models.spec import ParallelShape

SHAPES = [(9, [5, 3]), (4, [2, 6]), (13, [1, 8]), (2, [4, 4])]
"""Of groups: trunk and two completions each, other numbers of tokens in every group."""
LIMIT = 0.05
"""Of the gradient's norm; always exceeded."""


EPSILON = 1e-4
"""Of Adam: with less, gradients that are zero but for rounding would move weights a whole step."""


def build(kind: str, name: str, options: dict[str, Any]) -> Decoder:
    make = tiny.tiny_policy if kind == "policy" else tiny.tiny_reward_model
    changes = options.get("changes", {})
    model: Decoder = make(name, std=0.05, seed=1, num_hidden_layers=2, **changes)
    if options.get("lora"):
        torch.manual_seed(2)
        add_adapters(model.network, LoraConfig(enabled=True, dim=4), trains_head=kind != "policy")
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.05)
    if options.get("recomputes"):
        recompute_activations(model.network)
    return model.train()


def loss_of(outputs: Any, denominator: float) -> torch.Tensor:
    if hasattr(outputs, "logprobs_M"):
        return -outputs.logprobs_M.sum() / denominator
    margins = outputs[0::2, 0] - outputs[1::2, 0]
    return -torch.nn.functional.logsigmoid(margins).sum() / denominator


def weight_of(group: Any, kind: str) -> float:
    """What a group adds to the denominator: tokens, or a pair."""
    return float(sum(len(ids) for ids in group.branches_ids_G)) if kind == "policy" else 1.0


def steps(
    kind: str,
    model: Decoder,
    shape: ParallelShape,
    mesh: DeviceMesh | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Two optimizer steps of two micro-batches each, as the learner takes them."""
    has_dialogues, least = options.get("dialogues"), options.get("least_shared")
    groups = random_trees.dialogues() if has_dialogues else tiny.random_groups(3, SHAPES)
    denominator = sum(weight_of(group, kind) for group in groups)
    ranks = None if mesh is None else AcrossRanks(mesh, cp=shape.cp)
    place = 0 if mesh is None else dist.get_rank() // shape.each
    mine = groups[place :: shape.dp]
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(named, lr=2e-3, eps=EPSILON, fused=True)
    result: dict[str, Any] = {"losses": [], "norms": [], "place": place}
    for step in range(2):
        loss_sum, said = torch.zeros(()), []
        for batch in (mine[: len(mine) // 2], mine[len(mine) // 2 :]):
            outputs = model(to_forest(batch, least_shared=least))
            loss = loss_of(outputs, denominator)
            loss.backward()
            said.append((outputs.logprobs_M if kind == "policy" else outputs).detach())
            loss_sum += loss.detach()
        result["losses"].append(float(ranks.total(loss_sum) if ranks else loss_sum))
        if step == 0:
            result["outputs"] = torch.cat(said)
            result["gradients"] = {n: whole(p.grad).clone() for n, p in named}
        if ranks:
            result["norms"].append(float(ranks.clip([p for _, p in named], LIMIT)))
        else:
            parameters = [p for _, p in named]
            result["norms"].append(float(torch.nn.utils.clip_grad_norm_(parameters, LIMIT)))
        optimizer.step()
        optimizer.zero_grad()
    result["weights"] = {n: whole(p.detach()).clone() for n, p in named}
    return result


def spread(sizes: dict[str, int], cases: list[tuple[str, str, dict[str, Any]]]) -> list[Any]:
    """`steps` of each case on a mesh."""
    shape = ParallelShape(**sizes)
    mesh = shape.mesh("cpu")
    results = []
    for kind, name, options in cases:
        model = build(kind, name, options)
        parallelise(
            model,
            mesh,
            sequence_parallel=options.get("shares_tokens", False),
            cp=shape.cp,
        )
        result = steps(kind, model, shape, mesh, options)
        result["bytes"] = held_bytes(model)
        results.append(result)
    return results


def alone(kind: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """`steps` in one process, without any mesh."""
    model = build(kind, name, options)
    return {**steps(kind, model, ParallelShape(), None, options), "bytes": held_bytes(model)}


def kept_bytes(sizes: dict[str, int], cases: list[tuple[int, dict[str, Any]]]) -> list[int]:
    """What models of so many layers keep of 257 tokens for the backward pass, weights included."""
    mesh = ParallelShape(**sizes).mesh("cpu")
    results = []
    for layers, options in cases:
        model = tiny.tiny_policy("llama", num_hidden_layers=layers, hidden_size=64)
        if options.get("recomputes"):
            recompute_activations(model.network)
        parallelise(
            model,
            mesh,
            sequence_parallel=options.get("shares_tokens", False),
            cp=sizes.get("cp", 1),
        )
        kept: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor, kept: dict[int, torch.Tensor] = kept) -> torch.Tensor:
            kept[local(tensor).untyped_storage().data_ptr()] = local(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.train()(to_forest(tiny.random_groups(3, [(250, [3, 4])])))
        results.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    return results


def of_divided_logits(how: dict[str, Any] | None, ranks: int) -> dict[str, Any]:
    """Log-probabilities, entropies and gradients of a head that so many ranks divide; alone: None.

    Of 11 tokens over 24 entries, in chunks of 4, and some get no gradient.
    """
    generator = torch.Generator().manual_seed(1)
    draw = {"generator": generator, "dtype": torch.float64}
    hidden_MD = torch.randn(11, 8, **draw).requires_grad_()
    weight_VD, bias_V = torch.randn(24, 8, **draw), torch.randn(24, **draw)
    targets_M = torch.randint(24, (11,), generator=generator)
    by_M = torch.randn(11, **draw)
    by_M[[2, 7]] = 0.0
    share, mine = None, slice(None)
    if ranks > 1:
        mesh = ParallelShape(tp=ranks).mesh("cpu")["tp"]
        share = VocabularyShare.of(distribute_tensor(weight_VD, mesh, [Shard(0)]))
        mine = slice(share.start, share.start + share.size)
    weight_VD = weight_VD[mine].clone().requires_grad_()
    bias_V = bias_V[mine].clone().requires_grad_()
    found = token_logprobs(
        hidden_MD,
        targets_M,
        weight_VD,
        bias_V=bias_V,
        chunk_size=4,
        with_entropy=True,
        share=share,
        **(how or {}),
    )
    found.logprobs_M.backward(by_M)
    told = {k: v for k, v in (how or {}).items() if k != "temperature"}
    return {
        "logprobs": found.logprobs_M.detach(),
        "entropy": found.entropy_M,
        "mine": mine,
        "hidden": hidden_MD.grad,
        "weight": weight_VD.grad,
        "bias": bias_V.grad,
        "logits": all_logits(hidden_MD, weight_VD, bias_V=bias_V, share=share, **told),
    }


def of_rows(sizes: dict[str, int] | None, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """What a policy says of padded rows of an odd length, and the gradients."""
    model = tiny.tiny_policy(name, std=0.05, seed=1, path="padded")
    if sizes is not None:
        mesh = ParallelShape(**sizes).mesh("cpu")
        parallelise(model, mesh, sequence_parallel=options["shares_tokens"])
    logprobs_M = model.train()(tiny.padded(tiny.random_groups(3, SHAPES))).logprobs_M
    logprobs_M.mean().backward()
    gradients = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {"outputs": logprobs_M.detach(), "gradients": gradients}


def with_compiled_layers(sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Log-probabilities and gradients of a sharded policy, plain and with compiled layers."""
    mesh, found = ParallelShape(**sizes).mesh("cpu"), []
    for is_compiled in (False, True):
        model = tiny.tiny_policy("qwen3", std=0.05, num_hidden_layers=2)
        parallelise(model, mesh)
        if is_compiled:
            assert compile_layers(model, backend="aot_eager") is None
        logprobs_M = model.train()(to_forest(tiny.random_groups(3, SHAPES))).logprobs_M
        logprobs_M.mean().backward()
        gradients = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        graphs = counters["stats"].get("unique_graphs", 0)
        found.append({"outputs": logprobs_M.detach(), "gradients": gradients, "graphs": graphs})
    return found


class Allocations(TorchDispatchMode):
    """Bytes of the largest tensor that is made outside the meta device.

    Views need no memory of their own: safetensors gives views of the mapped file (`set_`), of which
    only what is copied is read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.by = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = func.is_view or func.overloadpacket is torch.ops.aten.set_
        if isinstance(result, torch.Tensor) and not is_view and result.device.type != "meta":
            self.largest, self.by = max(
                (self.largest, self.by), (local(result).untyped_storage().nbytes(), str(func))
            )
        return result


def agree(sizes: dict[str, int], values: list[float]) -> float:
    """The sum of one number that each place brings."""
    shape = ParallelShape(**sizes)
    ranks = AcrossRanks(shape.mesh("cpu"), cp=shape.cp)
    return float(ranks.total(torch.tensor(values[dist.get_rank() // shape.each])))


def _note_dtype(found: set[torch.dtype], _: Any, inputs: Any) -> None:
    found.add(inputs[0].dtype)


def half_way(sizes: dict[str, int]) -> dict[str, Any]:
    """bfloat16: gathered so, or by autocast over float32 as in one process."""
    mesh = ParallelShape(**sizes).mesh("cpu")
    batch = to_forest(tiny.random_groups(5, SHAPES))
    results: dict[str, Any] = {}
    for name, precision in (("autocast", None), ("gathered", torch.bfloat16)):
        model = tiny.tiny_reward_model("qwen3", std=0.05, seed=1, precision=torch.bfloat16)
        parallelise(model, mesh, precision=precision)
        streams = set()
        for layer in decoder_layers(model.network)[1]:
            layer.register_forward_pre_hook(partial(_note_dtype, streams))
        scores = model(batch)
        scores.sum().backward()
        kinds = {(p.dtype, p.grad.dtype) for p in model.parameters()}
        results[name] = {"scores": scores.detach(), "kinds": kinds, "streams": streams}
    return results


def mlp_plan(network: torch.nn.Module) -> dict[str, str]:
    """A plan made of the model, found by its import path."""
    splits = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    names = [name for name, _ in network.named_modules()]
    return {n: splits[n.rpartition(".")[2]] for n in names if n.rpartition(".")[2] in splits}


def spread_twice() -> str:
    mesh = ParallelShape().mesh("cpu")
    model = build("reward", "llama", {})
    parallelise(model, mesh)
    try:
        parallelise(model, mesh)
    except ModelError as error:
        return str(error)
    return "nothing"
