"""How many bytes and kernels does a GPU need for a policy's head and layers, counted without a GPU?

    python benchmarks/counted.py --markdown
    python benchmarks/counted.py --of layers --markdown
    python benchmarks/counted.py --of compiled --markdown
    python benchmarks/counted.py --of sampling --markdown

Meta and fake tensors, which have shapes and no values, go through the code that runs on a GPU.
Every operation counts the bytes of its inputs and outputs and one kernel. A pass over a matrix that
stays in the cache counts as one over memory, and a gather counts its whole input, so that the
counts are upper bounds. Attention of layers is left out, and so are the bytes of products, which
their operations hide. `--of compiled` asks torch's compiler for what a narrow layer moves once
compiled. `--of sampling` counts the kernels of one token of the engine in process with narrow
models of as many layers; a CUDA graph, which is one launch, has a stand-in here. Seconds are bytes
at an H100's 3.35 TB/s; the products' seconds at its 990 TFLOP/s.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from rounds import table, write_json
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from laurel.generation.transformers.batch import ContinuousBatch, Ticket
from laurel.generation.transformers.static import StaticSteps
from laurel.models.forest.attention import FOREST, as_computed, register
from laurel.models.forest.decoder import round_residual_stream
from laurel.models.forest.outputs import token_logprobs
from laurel.models.forest.policy import PolicyModel
from laurel.models.loading.pretrained import train_tokenizer
from laurel.planning.memory import ModelShape, decoder_shape
from laurel.types import GenerationRequest, SamplingParams

BYTES_PER_SECOND, OPERATIONS_PER_SECOND = 3.35e12, 990e12
"""An H100's memory rate, and its rate of products in bfloat16."""
GROUP = 16 * 256
"""The completion tokens of a group of 16 completions."""
HEADS = {
    "the trial's model": (32_768, 2048),
    "Qwen3-0.6B": (151_936, 1024),
    "Qwen3-8B": (151_936, 4096),
    "Llama-3-8B": (128_256, 4096),
    "Gemma-3-4B": (262_144, 2560),
}
"""The vocabulary and the width of each model."""
SIZES = {
    "0.9G": (2048, 16, 5632, 16, 32_768),
    "Qwen3-0.6B": (1024, 28, 3072, 16, 151_936),
    "Llama-3-8B": (4096, 32, 14_336, 32, 128_256),
}
"""Width, layers, width of the feed-forward, heads and vocabulary of each model."""
LAYERS = {
    name: replace(
        decoder_shape(
            hidden_size=width,
            num_layers=layers,
            intermediate_size=feed_forward,
            num_heads=heads,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=vocabulary,
        ),
        normalises_heads=not name.startswith("Llama"),
    )
    for name, (width, layers, feed_forward, heads, vocabulary) in SIZES.items()
}
"""The shapes of models whose layers are counted; Qwen 3's have norms of queries and keys."""
NARROW = replace(
    LAYERS["Qwen3-0.6B"], hidden_size=256, intermediate_size=704, num_heads=2, num_kv_heads=1
)
"""The shape of the layer that is compiled."""
MIXED = [24, 70, 130, 40, 300, 90, 200, 65]
"""The lengths of prompts that do not fit into blocks of one size."""
PROMPT = 1024
"""The tokens of the prompt that the group shares, under which layers are counted."""
Way = Literal["training", "log-probs", "scoring"]
"""Forward and backward with float32 weights; forward with them; forward with bfloat16 weights."""
PRODUCTS = {"mm", "addmm", "bmm"}
ONLY_WRITTEN = {"zeros", "zeros_like", "new_zeros", "zero_", "fill_", "ones", "full", "arange"}
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "_unsafe_view", "lift_fresh"}


class Counted(TorchDispatchMode):
    """Counts the bytes and the kernels of the operations that run while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.kernels = 0
        self.operations = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        written = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        if function.is_view or name in FREE or not written:
            return made
        given = {key: one for key, one in (kwargs or {}).items() if key != "out"}
        read = [one for one in tree_leaves((args, given)) if isinstance(one, Tensor)]
        if name in ONLY_WRITTEN:
            read = []
        if name in ("mm", "addmm"):
            self.operations += 2 * read[-2].numel() * read[-1].shape[-1]
        self.bytes[name] += sum(map(stored, read)) + sum(one.nbytes for one in written)
        self.kernels += 1
        return made


def stored(tensor: Tensor) -> int:
    """Return the bytes of a tensor, in which an expanded dimension is read once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1
    for size, stride in sizes:
        count *= size if stride else 1
    return count * tensor.element_size()


def head(
    vocabulary: int,
    width: int,
    *,
    chunk_size: int | None,
    device: str | torch.device = "meta",
    trains: bool = True,
) -> Callable[[], None]:
    """Return one pass of a policy's head in bfloat16; in training also backward, with entropy."""
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    hidden_MD, weight_VD = (
        torch.randn(rows, width, **like).mul_(0.05).requires_grad_(trains)
        for rows in (GROUP, vocabulary)
    )
    targets_M = torch.randint(vocabulary, (GROUP,), device=device)
    pull_M = torch.ones(GROUP, device=device)

    def run() -> None:
        hidden_MD.grad = weight_VD.grad = None
        out = token_logprobs(
            hidden_MD, targets_M, weight_VD, chunk_size=chunk_size, with_entropy=trains
        )
        if trains:
            out.logprobs_M.backward(pull_M)

    return run


def layer(shape: ModelShape, way: Way, *, rounds: bool = True) -> tuple[int, int, int]:
    """Return a layer's bytes without those of products, its kernels and its products' operations.

    The tokens are a prompt and its group. The layer is the difference of two and of one.

    Args:
        shape: The shape of the model.
        way: What is computed.
        rounds: Whether the residual stream is bfloat16 under autocast; it was float32 before.
    """
    two, one = (_decoder(shape, count, way, rounds=rounds) for count in (2, 1))

    def moved(counted: Counted) -> int:
        return sum(size for name, size in counted.bytes.items() if name not in PRODUCTS)

    return moved(two) - moved(one), two.kernels - one.kernels, two.operations - one.operations


def head_of(shape: ModelShape, *, trains: bool) -> tuple[int, int]:
    """Return the bytes of a policy's head without its products', and their operations."""
    run = head(shape.vocab_size, shape.hidden_size, chunk_size=None, trains=trains)
    with Counted() as counted:
        run()
    moved = sum(size for name, size in counted.bytes.items() if name not in PRODUCTS)
    return moved, counted.operations


def _decoder(shape: ModelShape, num_layers: int, way: Way, *, rounds: bool) -> Counted:
    with FakeTensorMode(allow_non_fake_inputs=True):
        network = _network(shape, num_layers, way, rounds=rounds, attend=_attend)
        ids = torch.zeros(1, PROMPT + GROUP, dtype=torch.int64)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=way != "scoring")
        with Counted() as counted, torch.set_grad_enabled(way == "training"):
            with autocast:
                body = network.base_model
                hidden = body(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state
            if way == "training":
                hidden.backward(torch.empty_like(hidden))
    return counted


def _network(shape: ModelShape, num_layers: int, way: str, *, rounds: bool, attend: Any) -> Any:
    """Return a model with a small vocabulary, whose attention is `attend`."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register("not_counted", attend)
    config = AutoConfig.for_model(
        "qwen3" if shape.normalises_heads else "llama",
        vocab_size=64,
        hidden_size=shape.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        attn_implementation="not_counted",
    )
    make: Any = AutoModelForCausalLM
    network = make.from_config(config, dtype=torch.bfloat16 if way == "scoring" else torch.float32)
    if rounds:
        round_residual_stream(network)
    return network


def _attend(_module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    rows = (one[0].transpose(0, 1) for one in as_computed(query, key, value))
    return _Attention.apply(*rows)[None], None  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    """Has the shapes of attention, and moves nothing."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        context.save_for_backward(query, key, value)
        return query.new_empty(query.shape)

    @staticmethod
    def backward(context: Any, *_: Tensor) -> Any:
        return tuple(one.new_empty(one.shape) for one in context.saved_tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", choices=["head", "layers", "compiled", "sampling"], default="head")
    parser.add_argument("--chunk-size", type=int, help="tokens of a chunk; default: as in a run")
    parser.add_argument("--kinds", action="store_true", help="the bytes of each operation too")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("benchmark_results/counted.json"))
    options = parser.parse_args()
    made = {
        "layers": layer_rows,
        "compiled": compiled_rows,
        "sampling": sampling_rows,
        "head": lambda: head_rows(options),
    }
    rows = made[options.of]()
    what = f"{GROUP:,} completion tokens and a prompt of {PROMPT:,}"
    if options.of == "head":
        what = f"{GROUP:,} completion tokens, forward and backward"
    if options.of == "sampling":
        what = "launches of a token of 64 completions: the median, and the most"
    print(f"{what}, torch {torch.__version__}")
    cells = [[str(value) for value in row.values()] for row in rows]
    print(table(list(rows[0]), cells, as_markdown=options.markdown))
    write_json(options.json, {"torch": torch.__version__, "rows": rows})


def layer_rows() -> list[dict[str, Any]]:
    """Each layer with the residual stream in float32, as before, and in bfloat16."""
    rows = []
    for name, shape in LAYERS.items():
        for way in get_args(Way):
            before, kernels_before, _ = layer(shape, way, rounds=False)
            now, kernels, operations = layer(shape, way)
            rows.append(
                {
                    "a layer": f"{name}, {way}",
                    "GB before": round(before / 1e9, 2),
                    "GB now": round(now / 1e9, 2),
                    "ms of bytes": round(now / BYTES_PER_SECOND * 1e3, 2),
                    "ms of products": round(operations / OPERATIONS_PER_SECOND * 1e3, 2),
                    "kernels before": kernels_before,
                    "kernels now": kernels,
                }
            )
    return rows


def compiled_rows() -> list[dict[str, Any]]:
    """What a narrow layer of Qwen 3 moves for a token, uncompiled and compiled."""
    rows = []
    for way in ("training", "scoring"):
        for rounds in (False, True) if way == "training" else (True,):
            few, many = (narrow_layer(length, way, rounds=rounds) for length in (256, 512))
            plain, compiled = ((many[i] - few[i]) / 256 for i in (0, 1))
            rows.append(
                {
                    "a layer": f"{way}, stream in {'bfloat16' if rounds else 'float32'}",
                    "bytes of a token": round(plain),
                    "compiled": round(compiled),
                    "kernels": many[2],
                    "kernels compiled": many[3],
                    "graphs": many[4],
                }
            )
    return rows


def narrow_layer(length: int, way: str, *, rounds: bool) -> tuple[int, int, int, int, int]:
    """Return a model's bytes without products plain and compiled, its kernels so, and its graphs.

    The model has one layer, whose attention is left out; its embedding and last norm, which count
    in the plain one, are not compiled.
    """
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    disable: Any = torch._dynamo.disable
    network = _network(NARROW, 1, way, rounds=rounds, attend=disable(_attend))
    ids, trains = torch.zeros(1, length, dtype=torch.int64), way == "training"

    def run() -> None:
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=trains)
        with torch.set_grad_enabled(trains):
            with autocast:
                made = network.base_model(input_ids=ids, position_ids=ids, use_cache=False)
            if trains:
                made.last_hidden_state.float().sum().backward()

    run()
    network.zero_grad()
    with Counted() as counted:
        run()
    products = sum(size for name, size in counted.bytes.items() if name in PRODUCTS)
    torch._dynamo.reset()
    metrics.reset()
    counters.clear()
    # The compiler counts bytes as it generates code, which a cache would spare.
    torch._inductor.config.force_disable_caches = True
    torch._logging.set_logs(inductor_metrics=True)
    for one in network.base_model.layers:
        one.compile(dynamic=False)
    run()
    return (
        sum(counted.bytes.values()) - products,
        metrics.num_bytes_accessed - products,
        counted.kernels,
        metrics.generated_kernel_count,
        counters["stats"]["unique_graphs"],
    )


def sampling_rows() -> list[dict[str, Any]]:
    """What the engine in process launches for a token, with many lengths at once and with one."""
    rows = []
    for name, shape in LAYERS.items():
        row: dict[str, Any] = {"tokens of": f"{name}, {shape.num_layers} layers"}
        for lengths, what in (([24] * 8, "even"), (MIXED, "mixed")):
            for is_static in (False, True):
                each = launches(shape, lengths, static_slots=is_static)
                way = "static" if is_static else "as they are"
                row[f"{what}, {way}"] = f"{median(each):,.0f} (most {max(each):,})"
        rows.append(row)
    return rows


def launches(shape: ModelShape, lengths: Sequence[int], *, static_slots: bool) -> list[int]:
    """Return the kernels of each token of 8 completions to each of some prompts.

    The prompts have these lengths. In the second half the completions are of mixed lengths, too, if
    the prompts are. Copies between host and device are not counted, and a graph counts as one.
    """
    made = replace(shape, hidden_size=64, intermediate_size=64, num_heads=2, num_kv_heads=1)
    made = replace(made, head_dim=16)
    register()
    network = _network(made, shape.num_layers, "training", rounds=False, attend=_attend)
    network.set_attn_implementation(FOREST)
    policy = PolicyModel(network.eval(), path="forest", precision=torch.bfloat16)
    counted = Counted()
    steps = StaticSteps(policy, capture=partial(_stand_in, counted)) if static_slots else None
    batch = ContinuousBatch(
        policy,
        train_tokenizer(["a"], vocab_size=300),
        end_ids=[],
        max_concurrent=64,
        static=steps,
    )
    is_mixed = len(set(lengths)) > 1
    waiting = deque(
        Ticket(
            GenerationRequest(
                id=str(index),
                prompt_ids=np.full(length, 3, np.int32),
                seeds_G=tuple(range(8)),
                sampling=SamplingParams(max_new_tokens=100 - (6 * index if is_mixed else 0)),
            ),
            deliver=lambda _: None,
        )
        for index, length in enumerate(lengths)
    )
    found = []
    with batch.drawing():
        if is_mixed:  # half of them begin later
            late = [waiting.pop() for _ in range(len(waiting) // 2)]
            batch.admit(waiting)
            for _ in range(20):
                batch.step()
            waiting.extend(late)
        batch.admit(waiting)
        while not batch.is_idle:
            counted.kernels = 0
            with counted:
                batch.step()
            found.append(counted.kernels)
    return found


def _stand_in(counted: Counted, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Stands in for a CUDA graph: one launch computes everything."""

    def run() -> Tensor:
        with _disable_current_modes():
            return compute()

    result = run()

    def replay() -> None:
        counted.kernels += 1
        with _disable_current_modes():
            result.copy_(run())

    return replay, result


def head_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The head of each model."""
    rows = []
    for name, (vocabulary, width) in HEADS.items():
        counted, run = Counted(), head(vocabulary, width, chunk_size=options.chunk_size)
        with counted:
            run()
        total = sum(counted.bytes.values())
        rows.append(
            {
                "head": f"{name}: V {vocabulary:,}, D {width:,}",
                "GB": round(total / 1e9, 1),
                "ms of bytes": round(total / BYTES_PER_SECOND * 1e3, 1),
                "ms of products": round(counted.operations / OPERATIONS_PER_SECOND * 1e3, 1),
                "kernels": counted.kernels,
            }
        )
        if options.kinds:
            kinds = ", ".join(f"{kind} {n / 1e9:.1f}" for kind, n in counted.bytes.most_common())
            print(f"{name}, GB: {kinds}")
    return rows


if __name__ == "__main__":
    main()
