"""Seconds of a training pass over completions that begin alike: with shared prompts, and as trees.

    python benchmarks/prefix_trees.py --tokenizer HuggingFaceTB/SmolLM2-135M-Instruct

In the first table each two completions of a prompt begin alike, with other lengths, to find from
which on a run of its own pays. The second computes real groups: programs that a model sampled. Both
are the forward and backward pass of a policy of 25M parameters, in seconds of one thread's
processor time, of which the smallest of all rounds counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from distinct_tokens import code_samples, encoded
from material import TINY_SHAPE, TRAINING_SHAPE, language_model, qwen3_config
from rounds import machine, table, write_json

from laurel.config.policy import LEAST_SHARED
from laurel.data.forest import to_forest
from laurel.models.forest.attention import FOREST, register
from laurel.models.forest.policy import PolicyModel
from laurel.types import TokenForest, TokenGroup

COMPLETIONS, PROMPT, REST = 8, 128, 64
"""Of the first table: what follows a beginning in common has `REST` tokens."""
LEASTS = (4, LEAST_SHARED, 64)


def main() -> None:
    options = read_options()
    torch.set_num_threads(1)
    register()
    shape = TINY_SHAPE if options.quick else TRAINING_SHAPE
    network = language_model(qwen3_config(shape))
    network.set_attn_implementation(FOREST)
    model = PolicyModel(network, path="forest", precision=torch.float32)
    rows = []
    for length in options.lengths:
        group = made(length, shape.vocabulary)
        ways = [to_forest([group]), to_forest([group], least_shared=1)]
        rows.append({"what": f"{length} tokens alike", **measured(model, ways, options.rounds)})
    print(report(rows, ["prompts shared", "tree"]), flush=True)
    real = []
    if options.tokenizer is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
        samples = [one.group for one in code_samples()]
        every = max(1, len(samples) // options.groups)
        groups = [
            small(encoded(tokenizer, group).select(range(options.completions)), shape.vocabulary)
            for group in samples[::every][: options.groups]
        ]
        for group in groups:
            ways = [to_forest([group]), *(to_forest([group], least_shared=n) for n in LEASTS)]
            real.append({"what": group.id, **measured(model, ways, options.rounds)})
        summed = [sum(column) for column in zip(*(row["seconds"] for row in real), strict=True)]
        tokens = [sum(column) for column in zip(*(row["tokens"] for row in real), strict=True)]
        runs = [sum(column) for column in zip(*(row["runs"] for row in real), strict=True)]
        real.append({"what": "all", "seconds": summed, "tokens": tokens, "runs": runs})
        print(report(real, ["prompts shared", *(f"from {n} tokens" for n in LEASTS)]))
    facts = {"machine": machine(), "options": vars(options)}
    write_json(options.json, {**facts, "made": rows, "real": real})


def made(length: int, vocabulary: int) -> TokenGroup:
    """A group in which each two completions begin with the same tokens."""
    rng = np.random.default_rng(length)

    def ids(count: int) -> np.ndarray:
        return rng.integers(3, vocabulary, count).astype(np.int32)

    begins = [ids(length) for _ in range(COMPLETIONS // 2)]
    completions = tuple(np.concatenate((begin, ids(REST))) for begin in begins for _ in range(2))
    return TokenGroup(id=str(length), trunk_ids=ids(PROMPT), branches_ids_G=completions)


def small(group: TokenGroup, vocabulary: int) -> TokenGroup:
    """The same group in a small vocabulary, in which equal tokens stay equal."""
    return TokenGroup(
        id=group.id,
        trunk_ids=group.trunk_ids % vocabulary,
        branches_ids_G=tuple(ids % vocabulary for ids in group.branches_ids_G),
    )


def measured(model: PolicyModel, ways: Sequence[TokenForest], rounds: int) -> dict[str, Any]:
    seconds = [[one_pass(model, forest) for forest in ways] for _ in range(rounds)]
    return {
        "tokens": [len(forest.ids_T) for forest in ways],
        "runs": [sum(len(tree.nodes) for tree in forest.trees) for forest in ways],
        "seconds": [min(column) for column in zip(*seconds, strict=True)],
    }


def one_pass(model: PolicyModel, forest: TokenForest) -> float:
    """Processor time of this thread, which others on the machine change little."""
    model.zero_grad(set_to_none=True)
    started = time.process_time()
    model(forest).logprobs_M.mean().backward()
    return time.process_time() - started


def report(rows: Sequence[dict[str, Any]], ways: Sequence[str]) -> str:
    cells = []
    for row in rows:
        told = []
        for tokens, runs, seconds in zip(row["tokens"], row["runs"], row["seconds"], strict=True):
            shares = f"{tokens / row['tokens'][0]:.2f}, {seconds / row['seconds'][0]:.2f}"
            told.append(f"{tokens:,} in {runs}: {seconds:.2f} s ({shares})")
        cells.append([row["what"], *told])
    return table(["tokens in runs: seconds (parts of the first)", *ways], cells, as_markdown=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", help="a model whose template renders; none: no real groups")
    parser.add_argument("--lengths", type=int, nargs="*", default=[4, 8, 16, 32, 64])
    parser.add_argument("--groups", type=int, default=8, help="of real completions")
    parser.add_argument("--completions", type=int, default=16, help="of a real group")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--json", type=Path, default=Path("benchmark_results/prefix_trees.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
