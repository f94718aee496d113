"""Are scores, log-probabilities and gradients of the token forest those of one by one? In float32.

    python benchmarks/exactness.py
    python benchmarks/exactness.py --of policies
    python benchmarks/exactness.py --of trees

The reference is the Hugging Face class with its own attention, each whole sequence in a forward
pass of its own. Two more columns say how large rounding is by itself: how far either is from the
same model in float64.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from material import (
    TINY_SHAPE,
    TRAINING_SHAPE,
    Shape,
    classifier,
    language_model,
    qwen3_config,
)
from rounds import machine, table, write_json
from torch import Tensor
from torch.overrides import TorchFunctionMode

from laurel.data.forest import to_forest
from laurel.models.forest.attention import FOREST, register
from laurel.models.forest.decoder import RewardModel
from laurel.models.forest.policy import PolicyModel, fast_matmul
from laurel.types import TokenGroup
from random_trees import groups_of_tree

GROUP_SIZES = (1, 2, 3, 5, 8, 16)
PROMPT_LENGTHS = (1, 2, 5, 16, 63, 128, 255, 512)
LONGEST_COMPLETION = 96
ROUNDING_SEQUENCES = 6
"""Of each forest, for the columns about rounding."""
SCORE_TARGET, LOSS_TARGET, GRADIENT_TARGET = 1e-6, 1e-6, 1e-5
LOGPROB_TARGET, EXACT_TARGET = 1e-5, 1e-10
"""Of trees: a log-probability of a token; and everything in float64."""
POLICY_PROMPT_LENGTHS = (1, 16, 128, 512)
POLICY_GROUP_SIZES = (1, 2, 3, 5, 8)

SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2": ("qwen2", {}),
    "Qwen2, sliding window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 40, "layer_types": SLIDING},
    ),
    "Qwen3": ("qwen3", {"head_dim": 32}),
    "Llama": ("llama", {}),
    "Mistral, sliding window": ("mistral", {"sliding_window": 40}),
    "Gemma 2 (soft-capping, sliding window)": ("gemma2", {"head_dim": 16, "sliding_window": 40}),
    "Gemma 3 (sliding window)": ("gemma3_text", {"head_dim": 16, "sliding_window": 40}),
    "Phi": ("phi", {"num_key_value_heads": 4}),
    "Phi-3": ("phi3", {}),
    "OLMo 2": ("olmo2", {}),
    "gpt-oss (attention sinks, experts)": (
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": 40,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    register()
    shape = TINY_SHAPE if options.quick else TRAINING_SHAPE
    measure = {"reward-models": reward_models, "policies": policies, "trees": trees}
    parts = [part for part in measure if options.of in (part, "all")]
    results = {part: measure[part](shape, as_markdown=options.markdown) for part in parts}
    rows = {part: part_rows for part, (part_rows, _) in results.items()}
    write_json(options.json, {"machine": machine(), "options": vars(options), "rows": rows})
    sys.exit(0 if all(holds for _, holds in results.values()) else 1)


def reward_models(shape: Shape, *, as_markdown: bool) -> tuple[list[dict[str, Any]], bool]:
    """The tables of scores; and whether the targets hold."""
    main_rows = by_prompt_length(shape)
    architecture_rows = [
        {"what": name, **by_architecture(model_type, special)}
        for name, (model_type, special) in ARCHITECTURES.items()
    ]
    print(f"\nscores: {described(shape, GROUP_SIZES)}\n")
    print(show("prompt tokens", main_rows, as_markdown=as_markdown))
    print("\nother architectures, tiny; prompts of 1 to 128 tokens, groups of 1 to 5\n")
    print(show("architecture", architecture_rows, as_markdown=as_markdown))
    everything = [*main_rows, *architecture_rows]
    worst_score = max(row["score"] for row in everything)
    worst_gradient = max(row["gradient"] for row in everything)
    holds = worst_score <= SCORE_TARGET and worst_gradient <= GRADIENT_TARGET
    print(
        f"\nlargest: score {worst_score:.1e} (target {SCORE_TARGET:.0e}), gradient "
        f"{worst_gradient:.1e} (target {GRADIENT_TARGET:.0e}): {'met' if holds else 'MISSED'}"
    )
    return everything, holds


def policies(shape: Shape, *, as_markdown: bool) -> tuple[list[dict[str, Any]], bool]:
    """The table of log-probabilities; and whether the targets hold."""
    rows = []
    for length in POLICY_PROMPT_LENGTHS:
        reference = language_model(qwen3_config(shape), seed=length)
        shapes = [(length, size) for size in POLICY_GROUP_SIZES]
        groups = random_groups(shapes, shape.vocabulary, length)
        rows.append({"what": str(length), **compare_policies(reference, groups)})
        print(f"  policy, prompts of {length} tokens: done", file=sys.stderr)
    print(f"\nlog-probabilities: {described(shape, POLICY_GROUP_SIZES)}\n")
    header = [
        "prompt tokens",
        "completions",
        "completion tokens",
        "lowest log-probability",
        "max difference of a token",
        "difference of the loss",
        "max relative gradient difference",
        "one by one to float64",
        "forest to float64",
    ]
    columns = ("logprob", "loss", "gradient", "rounding", "own_rounding")
    cells = [
        [row["what"], str(row["sequences"]), str(row["tokens"]), f"{row['lowest']:.1f}"]
        + [f"{row[column]:.1e}" for column in columns]
        for row in rows
    ]
    print(table(header, cells, as_markdown=as_markdown))
    loss, gradient = (max(row[column] for row in rows) for column in ("loss", "gradient"))
    holds = loss <= LOSS_TARGET and gradient <= GRADIENT_TARGET
    print(
        f"\nlargest: loss {loss:.1e} (target {LOSS_TARGET:.0e}), gradient {gradient:.1e} (target "
        f"{GRADIENT_TARGET:.0e}): {'met' if holds else 'MISSED'}"
    )
    return rows, holds


def trees(_shape: Shape, *, as_markdown: bool) -> tuple[list[dict[str, Any]], bool]:
    """The table of random trees under every architecture; and whether the targets hold."""
    rows = []
    for seed, (name, (model_type, special)) in enumerate(ARCHITECTURES.items()):
        groups, nodes = groups_of_tree(seed)
        row: dict[str, Any] = {"what": name, "nodes": nodes}
        for dtype in (torch.float32, torch.float64):
            own = "" if dtype == torch.float32 else "_64"
            config = tiny_config(model_type, special)
            with Widened() if dtype == torch.float64 else nullcontext():
                scores = compare(classifier(config), groups, is_tree=True, dtype=dtype)
                found = compare_policies(language_model(config), groups, is_tree=True, dtype=dtype)
            row |= {"sequences": scores["sequences"], "tokens": found["tokens"]}
            row |= {f"score{own}": scores["score"], f"logprob{own}": found["logprob"]}
            row[f"gradient{own}"] = max(scores["gradient"], found["gradient"])
        rows.append(row)
        print(f"  trees, {name}: done", file=sys.stderr)
    targets = {"score": SCORE_TARGET, "logprob": LOGPROB_TARGET, "gradient": GRADIENT_TARGET}
    targets |= {f"{name}_64": EXACT_TARGET for name in targets}
    print(
        "\nrandom trees of 40 runs up to depth 6, and two prompts with completions; tiny models\n"
    )
    header = ["architecture", "sequences", "max score difference", "max difference of a token"]
    header += ["max relative gradient difference", "the same three in float64"]
    cells = []
    for row in rows:
        *singles, score, logprob, gradient = (f"{row[name]:.1e}" for name in targets)
        exact = f"{score}, {logprob}, {gradient}"
        cells.append([row["what"], str(row["sequences"]), *singles, exact])
    print(table(header, cells, as_markdown=as_markdown))
    worst = {name: max(row[name] for row in rows) for name in targets}
    holds = all(worst[name] <= target for name, target in targets.items())
    told = ", ".join(f"{name} {worst[name]:.1e} ({target:.0e})" for name, target in targets.items())
    print(f"\nlargest (targets): {told}: {'met' if holds else 'MISSED'}")
    return rows, holds


def described(shape: Shape, group_sizes: Sequence[int]) -> str:
    return (
        f"Qwen3, {shape.layers} layers of {shape.hidden}, {shape.linear_parameters / 1e6:.1f}M "
        f"parameters without embeddings; groups of {', '.join(map(str, group_sizes))}; completions "
        f"of 1 to {LONGEST_COMPLETION} tokens"
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument(
        "--of", choices=["all", "reward-models", "policies", "trees"], default="all"
    )
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("benchmark_results/exactness.json"))
    return parser.parse_args()


def by_prompt_length(shape: Shape) -> list[dict[str, Any]]:
    """One forest per prompt length, with a group of every size in it."""
    rows = []
    for length in PROMPT_LENGTHS:
        model = classifier(qwen3_config(shape), seed=length)
        groups = random_groups([(length, size) for size in GROUP_SIZES], shape.vocabulary, length)
        rows.append({"what": str(length), **compare(model, groups)})
        print(f"  prompts of {length} tokens: done", file=sys.stderr)
    return rows


def by_architecture(model_type: str, special: Mapping[str, Any]) -> dict[str, Any]:
    """One forest of mixed groups under a tiny model."""
    groups = random_groups([(1, 2), (30, 5), (128, 3), (77, 1), (128, 2)], 512, seed=1)
    return compare(classifier(tiny_config(model_type, special)), groups)


def tiny_config(model_type: str, special: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        model_type,
        **{
            "vocab_size": 512,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 192,
            "max_position_embeddings": 1024,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 1,
            **special,
        },
    )


def random_groups(
    shapes: Sequence[tuple[int, int]], vocabulary: int, seed: int
) -> list[TokenGroup]:
    """Groups of random tokens; a shape is (prompt tokens, completions)."""
    rng = np.random.default_rng(seed)

    def ids(length: int) -> np.ndarray:
        return rng.integers(3, vocabulary, length).astype(np.int32)

    def lengths(count: int) -> np.ndarray:
        drawn = rng.integers(1, LONGEST_COMPLETION + 1, count)
        drawn[0] = 1 if count > 1 else drawn[0]
        return drawn

    return [
        TokenGroup(
            id=str(index),
            trunk_ids=ids(prompt),
            branches_ids_G=tuple(ids(length) for length in lengths(size)),
        )
        for index, (prompt, size) in enumerate(shapes)
    ]


def compare(
    reference: Any,
    groups: Sequence[TokenGroup],
    *,
    is_tree: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Scores and gradients both ways, from the same weights; with `is_tree` in one deep tree.

    Gradients are those of a random weighting of all scores; their difference is taken per
    parameter tensor, as the norm of the difference over the norm of the reference.
    """
    alone = copy.deepcopy(in_dtype(reference, dtype))
    copied = copy.deepcopy(alone)
    copied.set_attn_implementation(FOREST)
    forest = RewardModel(copied, head_name="score", path="forest", precision=dtype)
    laid = to_forest(groups, least_shared=1 if is_tree else None)
    whole = [np.concatenate((g.trunk_ids, ids)) for g in groups for ids in g.branches_ids_G]
    weights_N = torch.randn(len(whole), generator=torch.Generator().manual_seed(0))

    scores_N = backward(lambda: forest(laid)[:, 0], weights_N)
    alone_N = torch.cat(
        [
            backward(lambda ids=ids: score_alone(alone, ids), weights_N[index : index + 1])
            for index, ids in enumerate(whole)
        ]
    )
    few = whole[:ROUNDING_SEQUENCES]
    with torch.inference_mode():
        single_N = torch.cat([score_alone(reference, ids) for ids in few])
        in_dtype(reference, torch.float64)
        exact_N = torch.cat([score_alone(reference, ids) for ids in few])
    gradients = gradient_differences(copied, alone)
    return {
        "sequences": len(whole),
        "size": float(alone_N.abs().max()),
        "score": largest(scores_N, alone_N),
        "gradient": max(gradients.values()),
        "gradient_of": max(gradients, key=lambda name: gradients[name]),
        "rounding": largest(single_N, exact_N),
        "own_rounding": largest(scores_N[: len(few)], exact_N),
    }


class Widened(TorchFunctionMode):
    """Lets models compute in float64 what their code converts to float32, such as norms."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()

        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        named = {name: wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(wide, args), **named)


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    if dtype == torch.float64 and hasattr(model.config, "num_local_experts"):
        model.set_experts_implementation("eager")  # the grouped product has no float64
    return model.to(dtype)


def compare_policies(
    reference: Any,
    groups: Sequence[TokenGroup],
    *,
    is_tree: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Log-probabilities and gradients both ways, from the same weights; `compare` says how.

    The loss is that of a first GRPO step without its sign: every completion has a random advantage,
    all its tokens share it, and the sum is divided by the number of tokens.
    """
    alone = copy.deepcopy(in_dtype(reference, dtype))
    copied = copy.deepcopy(alone)
    copied.set_attn_implementation(FOREST)
    forest = PolicyModel(copied, path="forest", precision=dtype)
    laid = to_forest(groups, least_shared=1 if is_tree else None)
    pairs = [(group.trunk_ids, ids) for group in groups for ids in group.branches_ids_G]
    lengths_N = torch.tensor([len(ids) for _, ids in pairs])
    generator = torch.Generator().manual_seed(0)
    advantages_N = torch.randn(len(pairs), generator=generator) / lengths_N.sum()
    weights_M = advantages_N.repeat_interleave(lengths_N)

    with fast_matmul(forest):  # as a policy's updates compute
        logprobs_M = backward(lambda: forest(laid).logprobs_M, weights_M)
    pieces = [
        backward(lambda pair=pair: logprobs_alone(alone, *pair), weights)
        for pair, weights in zip(pairs, weights_M.split(lengths_N.tolist()), strict=True)
    ]
    alone_M = torch.cat(pieces)
    few = pairs[:ROUNDING_SEQUENCES]
    with torch.inference_mode():
        single_M = torch.cat([logprobs_alone(reference, *pair) for pair in few])
        in_dtype(reference, torch.float64)
        exact_M = torch.cat([logprobs_alone(reference, *pair) for pair in few])
    gradients = gradient_differences(copied, alone)
    losses = [float((found_M.double() * weights_M).sum()) for found_M in (logprobs_M, alone_M)]
    return {
        "sequences": len(pairs),
        "tokens": len(alone_M),
        "lowest": float(alone_M.min()),
        "logprob": largest(logprobs_M, alone_M),
        "loss": abs(losses[0] - losses[1]),
        "gradient": max(gradients.values()),
        "gradient_of": max(gradients, key=lambda name: gradients[name]),
        "rounding": largest(single_M, exact_M),
        "own_rounding": largest(logprobs_M[: len(exact_M)], exact_M),
    }


def logprobs_alone(model: Any, prompt: np.ndarray, completion: np.ndarray) -> Tensor:
    ids_L = torch.from_numpy(np.concatenate((prompt, completion))).long()
    logits_LV: Tensor = model(input_ids=ids_L[None]).logits[0, len(prompt) - 1 : -1]
    return logits_LV.log_softmax(-1).gather(1, ids_L[len(prompt) :, None])[:, 0]


def gradient_differences(found: Any, wanted: Any) -> dict[str, float]:
    """By parameter."""
    pairs = zip(found.named_parameters(), wanted.named_parameters(), strict=True)
    return {
        name: relative(ours.grad, theirs.grad)
        for (name, ours), (_, theirs) in pairs
        if theirs.grad is not None
    }


def score_alone(model: Any, ids: np.ndarray) -> Tensor:
    scores: Tensor = model(input_ids=torch.from_numpy(ids).long()[None]).logits[:, 0]
    return scores


def largest(found_N: Tensor, wanted_N: Tensor) -> float:
    return float((found_N.double() - wanted_N.double()).abs().max())


def backward(scores: Callable[[], Tensor], weights_N: Tensor) -> Tensor:
    """The scores; their weighted sum is differentiated on the way."""
    scores_N = scores()
    (scores_N * weights_N).sum().backward()
    return scores_N.detach()


def relative(found: Tensor | None, wanted: Tensor) -> float:
    assert found is not None
    size = wanted.double().norm()
    return float((found.double() - wanted.double()).norm() / size) if size else 0.0


def show(first: str, rows: Sequence[Mapping[str, Any]], *, as_markdown: bool) -> str:
    header = [
        first,
        "sequences",
        "largest score",
        "max score difference",
        "max relative gradient difference",
        "one by one to float64",
        "forest to float64",
    ]
    columns = ("score", "gradient", "rounding", "own_rounding")
    cells = [
        [str(row["what"]), str(row["sequences"]), f"{row['size']:.2f}"]
        + [f"{row[column]:.1e}" for column in columns]
        for row in rows
    ]
    return table(header, cells, as_markdown=as_markdown)


if __name__ == "__main__":
    main()
