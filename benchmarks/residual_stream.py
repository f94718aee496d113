"""How exact is bfloat16 with a residual stream of float32, of bfloat16, and in a model all of it?

    python benchmarks/residual_stream.py --model HuggingFaceTB/SmolLM2-135M-Instruct --markdown
    python benchmarks/residual_stream.py --markdown        # a model with random weights

Every way computes the same forest of tokens, and is put beside the same weights in float64: scores
and log-probabilities by their largest error and the root of the mean square, gradients as one
vector, by the norm of the error over the norm.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from exactness import random_groups
from material import (
    DATA_SETS,
    TINY_SHAPE,
    TRAINING_SHAPE,
    classifier,
    language_model,
    load_rows,
    qwen3_config,
)
from rounds import machine, table, write_json
from torch import Tensor

from laurel.data.forest import to_forest
from laurel.models.forest.attention import FOREST, register
from laurel.models.forest.decoder import RewardModel
from laurel.models.forest.policy import PolicyModel
from laurel.types import TokenGroup

RANDOM = [(16, 3), (128, 5)]
"""Prompt tokens and completions of the groups under a model with random weights."""
WAYS = (
    "float32",
    "float32 weights, stream in float32",
    "float32 weights, stream in bfloat16",
    "weights in bfloat16",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a language model, which reads real rows")
    parser.add_argument("--rows", type=int, default=3, help="real rows (two completions each)")
    parser.add_argument("--tokens", type=int, default=80, help="of a prompt and of a completion")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("benchmark_results/residual_stream.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    register()
    if options.model:
        groups = real_groups(options.model, options.rows, options.tokens)
    else:
        shape = TINY_SHAPE if options.quick else TRAINING_SHAPE
        groups = random_groups(RANDOM, shape.vocabulary, seed=1)
    rows: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    for kind in ("log-probability", "score"):
        if options.model:
            network = load(options.model, kind)
        else:
            network = (language_model if kind == "log-probability" else classifier)(
                qwen3_config(shape)
            )
        exact = computed(kind, network, groups, "float64")
        for way in WAYS:
            rows[way] |= errors(kind, computed(kind, network, groups, way), exact)
            print(f"{kind}, {way}: {rows[way]}", file=sys.stderr, flush=True)
    header = ["", *rows[WAYS[0]]]
    cells = [[way, *(f"{value:.1e}" for value in row.values())] for way, row in rows.items()]
    print(table(header, cells, as_markdown=options.markdown))
    write_json(options.json, {"machine": machine(), "options": vars(options), "rows": rows})


def load(model: str, kind: str) -> Any:
    """A model whose reward head, if it gets one, has random weights."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    if kind == "log-probability":
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    make: Any = AutoModelForSequenceClassification
    return make.from_pretrained(model, num_labels=1, dtype=torch.float32)


def real_groups(model: str, count: int, length: int) -> list[TokenGroup]:
    """Prompts in the model's own template, each with the beginnings of two answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = load_rows(DATA_SETS["hh_rlhf_harmless"])
    groups = []
    for row in rows[:: len(rows) // count][:count]:
        group = row.group
        said = [{"role": one.role, "content": one.content} for one in group.prompt]
        prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        answers = [one.messages[0].content for one in group.completions_G]
        branches = (tokenizer(answer)["input_ids"][:length] for answer in answers)
        groups.append(
            TokenGroup(
                id=group.id,
                trunk_ids=np.array(prompt[-length:], np.int32),
                branches_ids_G=tuple(np.array(ids, np.int32) for ids in branches),
            )
        )
    return groups


def computed(
    kind: str, network: Any, groups: Sequence[TokenGroup], way: str
) -> tuple[Tensor, list[Tensor]]:
    """Return the numbers, and the gradients of a sum with random weights for each completion."""
    network = copy.deepcopy(network)
    if way == "float64":
        network.double()
    elif way == "weights in bfloat16":
        # As a model is loaded: rotary frequencies, which are buffers, stay float32.
        for parameter in network.parameters():
            parameter.data = parameter.data.bfloat16()
    network.set_attn_implementation(FOREST)
    if way == "float32 weights, stream in float32":
        network.rounds_residual_stream = False  # so that the model leaves it as it is
    dtype = next(network.parameters()).dtype
    precision = torch.bfloat16 if way.startswith("float32 weights") else dtype
    lengths_N = torch.tensor([len(ids) for group in groups for ids in group.branches_ids_G])
    weights_N = torch.randn(len(lengths_N), generator=torch.Generator().manual_seed(0))
    if kind == "score":
        model = RewardModel(network, head_name="score", path="forest", precision=precision)
        found = model(to_forest(groups))[:, 0]
    else:
        policy = PolicyModel(network, path="forest", precision=precision)
        found = policy(to_forest(groups)).logprobs_M
        weights_N = (weights_N / lengths_N.sum()).repeat_interleave(lengths_N)
    (found * weights_N).sum().backward()
    gradients = [p.grad.float() for p in network.parameters() if p.grad is not None]
    return found.detach().double(), gradients


def errors(
    kind: str, found: tuple[Tensor, list[Tensor]], exact: tuple[Tensor, list[Tensor]]
) -> dict[str, float]:
    difference = found[0] - exact[0]
    pairs = zip(found[1], exact[1], strict=True)
    wrong = sum(float((ours - theirs).double().square().sum()) for ours, theirs in pairs)
    whole = sum(float(one.double().square().sum()) for one in exact[1])
    return {
        f"{kind}: largest": float(difference.abs().max()),
        f"{kind}: mean square": float(difference.square().mean().sqrt()),
        f"gradient of {kind}": (wrong / whole) ** 0.5,
    }


if __name__ == "__main__":
    main()
