"""Seconds of a training pass over completions that begin alike: with shared prompts, and as trees.

    python benchmarks/prefix_trees.py --tokenizer HuggingFaceTB/SmolLM2-135M-Instruct
    python benchmarks/prefix_trees.py --lengths --shares 0.2 0.5 0.8 0.95 --rounds 2

In the first table each two completions of a prompt begin alike, with other lengths, to find from
which on a run of its own pays. The second computes real groups: programs that a model sampled. Both
are the forward and backward pass of a policy of 25M parameters, in seconds of one thread's
processor time, of which the smallest of all rounds counts.

The third is of a smaller policy, by the share of the prompt in a sequence and by the size of a
group: how many times as fast as one sequence after the other are padded rows that repeat the
prompt, shared prompts, and trees, where the first half of the answer is that of two completions?
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from distinct_tokens import code_samples, encoded
from material import TINY_SHAPE, TRAINING_SHAPE, Shape, language_model, qwen3_config
from rounds import machine, table, write_json

from laurel.config.policy import LEAST_SHARED
from laurel.data.forest import to_forest, to_padded
from laurel.models.forest.attention import FOREST, register
from laurel.models.forest.policy import PolicyModel
from laurel.types import PaddedRows, TokenForest, TokenGroup

COMPLETIONS, PROMPT, REST = 8, 128, 64
"""Of the first table: what follows a beginning in common has `REST` tokens."""
LEASTS = (4, LEAST_SHARED, 64)
SMALL_SHAPE = Shape(hidden=256, layers=4, heads=4, kv_heads=2, head_size=64, feed_forward=768)
LENGTH, ROWS = 256, 8
"""Of the third table: the tokens of a sequence, and the rows of a padded pass (TRL's default)."""

Way = tuple[PolicyModel, Sequence[TokenForest | PaddedRows]]
"""A model, and the passes that compute a group."""


def main() -> None:
    options = read_options()
    torch.set_num_threads(1)
    register()
    shape = TINY_SHAPE if options.quick else TRAINING_SHAPE
    model = policy(shape)

    def forests(group: TokenGroup, leasts: Sequence[int]) -> list[Way]:
        ways = [to_forest([group]), *(to_forest([group], least_shared=n) for n in leasts)]
        return [(model, [forest]) for forest in ways]

    rows = []
    for length in options.lengths:
        group = made(length, shape.vocabulary)
        found = measured(forests(group, [1]), options.rounds)
        rows.append({"what": f"{length} tokens alike", **found})
    if rows:
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
            real.append({"what": group.id, **measured(forests(group, LEASTS), options.rounds)})
        summed = [sum(column) for column in zip(*(row["seconds"] for row in real), strict=True)]
        tokens = [sum(column) for column in zip(*(row["tokens"] for row in real), strict=True)]
        runs = [sum(column) for column in zip(*(row["runs"] for row in real), strict=True)]
        real.append({"what": "all", "seconds": summed, "tokens": tokens, "runs": runs})
        print(report(real, ["prompts shared", *(f"from {n} tokens" for n in LEASTS)]))
    shares = by_share(TINY_SHAPE if options.quick else SMALL_SHAPE, options)
    if shares:
        print(report_shares(shares))
    facts = {"machine": machine(), "options": vars(options)}
    write_json(options.json, {**facts, "made": rows, "real": real, "shares": shares})


def policy(shape: Shape, path: Literal["forest", "padded"] = "forest") -> PolicyModel:
    """A policy of random weights, the same for each path."""
    network = language_model(qwen3_config(shape))
    if path == "forest":
        network.set_attn_implementation(FOREST)
    return PolicyModel(network, path=path, precision=torch.float32)


def by_share(shape: Shape, options: argparse.Namespace) -> list[dict[str, Any]]:
    forest, padded = policy(shape), policy(shape, "padded")
    rows = []
    for share, count in product(options.shares, options.counts):
        prompt = round(share * LENGTH)
        alike = (LENGTH - prompt) // 2
        group = made(alike, shape.vocabulary, count, prompt, LENGTH - prompt - alike)
        singles = [group.select([index]) for index in range(count)]
        some = [group.select(range(at, min(at + ROWS, count))) for at in range(0, count, ROWS)]
        ways: list[Way] = [
            (padded, [to_padded([single], pad_id=0) for single in singles]),
            (padded, [to_padded([part], pad_id=0) for part in some]),
            (forest, [to_forest([group])]),
            (forest, [to_forest([group], least_shared=LEAST_SHARED)]),
        ]
        rows.append({"share": share, "count": count, **measured(ways, options.rounds)})
        print(f"  {rows[-1]}", file=sys.stderr)
    return rows


def report_shares(rows: Sequence[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        (alone, *tokens), (longest, *seconds) = row["tokens"], row["seconds"]
        pairs = zip(tokens, seconds, strict=True)
        told = [f"{longest / took:.2f} ({alone / some:.2f})" for some, took in pairs]
        cells.append([f"{row['share']:.2f}", str(row["count"]), f"{longest:.2f}", *told])
    ways = ["padded rows", "prompts shared", "tree"]
    heads = ["share of the prompt", "group", "one by one, s", *ways]
    return "times as fast (times fewer tokens)\n\n" + table(heads, cells, as_markdown=True)


def made(
    length: int, vocabulary: int, count: int = COMPLETIONS, prompt: int = PROMPT, rest: int = REST
) -> TokenGroup:
    """A group in which each two completions begin with the same tokens."""
    rng = np.random.default_rng(length)

    def ids(count: int) -> np.ndarray:
        return rng.integers(3, vocabulary, count).astype(np.int32)

    begins = [ids(length) for _ in range(count // 2)]
    completions = tuple(np.concatenate((begin, ids(rest))) for begin in begins for _ in range(2))
    return TokenGroup(id=str(length), trunk_ids=ids(prompt), branches_ids_G=completions)


def small(group: TokenGroup, vocabulary: int) -> TokenGroup:
    """The same group in a small vocabulary, in which equal tokens stay equal."""
    return TokenGroup(
        id=group.id,
        trunk_ids=group.trunk_ids % vocabulary,
        branches_ids_G=tuple(ids % vocabulary for ids in group.branches_ids_G),
    )


def measured(ways: Sequence[Way], rounds: int) -> dict[str, Any]:
    """Compute a group in each of some ways, in turn."""
    found = [[one_pass(*way) for way in ways] for _ in range(rounds)]
    _, sums = zip(*found[0], strict=True)
    assert np.allclose(sums, sums[0], rtol=1e-4), f"not the same log-probabilities: {sums}"
    seconds = [[took for took, _ in each] for each in found]
    return {
        "tokens": [sum(map(num_tokens, batches)) for _, batches in ways],
        "runs": [
            sum(len(t.nodes) for b in batches if isinstance(b, TokenForest) for t in b.trees)
            for _, batches in ways
        ],
        "seconds": [min(column) for column in zip(*seconds, strict=True)],
    }


def num_tokens(batch: TokenForest | PaddedRows) -> int:
    return len(batch.ids_T) if isinstance(batch, TokenForest) else batch.ids_NL.numel()


def one_pass(
    model: PolicyModel, batches: Sequence[TokenForest | PaddedRows]
) -> tuple[float, float]:
    """Return the processor time of this thread, and the sum of all log-probabilities.

    Others on the machine change processor time little.
    """
    model.zero_grad(set_to_none=True)
    started, total = time.process_time(), 0.0
    for batch in batches:
        loss = model(batch).logprobs_M.sum()
        loss.backward()
        total += float(loss.detach())
    return time.process_time() - started, total


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
    parser.add_argument("--shares", type=float, nargs="*", default=[], help="of the third table")
    parser.add_argument(
        "--counts", type=int, nargs="*", default=[4, 16, 64], help="of its groups; even"
    )
    parser.add_argument("--completions", type=int, default=16, help="of a real group")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--json", type=Path, default=Path("benchmark_results/prefix_trees.json"))
    options = parser.parse_args()
    if odd := [count for count in options.counts if count < 2 or count % 2]:
        parser.error(f"--counts {odd[0]}: each two completions begin alike, so it has to be even")
    return options


if __name__ == "__main__":
    main()
