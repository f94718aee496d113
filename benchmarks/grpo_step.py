"""Seconds of a full GRPO step (draw, score, update): Laurel against TRL's GRPOTrainer as shipped.

    python benchmarks/grpo_step.py --trl-python /path/to/venv-with-trl/bin/python

Same policy, reward model, prompts, lengths, dtype and threads; see README.md for how it measures.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from material import (
    DATA_DIR,
    TINY_SHAPE,
    TRAINING_SHAPE,
    Shape,
    save_classifier,
    save_endless_policy,
    save_policy,
    save_pretrained_classifier,
    shape_of,
)
from rounds import Worker, add_clock, machine, seconds_of, spread, table, write_json

PROMPTS, GENERATIONS, NEW_TOKENS = 4, 8, 64
PROMPT_TOKENS = range(200, 251)
ROWS = 512
"""Lines of the file of prompts: its four, again and again."""
KL = 0.01
LEARNING_RATE = 1e-6
TARGET = 3.5
"""Steps per second as a multiple of the peer's, that the project set itself."""
PARTS = ("generation", "reward", "reference", "update", "rest")
LOGPROB_TOLERANCE, SCORE_TOLERANCE = 1e-3, 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One program, with what is changed in it."""

    label: str
    peer: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "trl": Variant(label="TRL GRPOTrainer, as shipped", peer=True),
    "trl-keep": Variant(
        label="TRL, checkpointing off", peer=True, overrides={"gradient_checkpointing": False}
    ),
    "laurel": Variant(label="Laurel"),
    "recompute": Variant(
        label="Laurel, checkpointing on",
        overrides={"dtensor_cfg": {"activation_checkpointing": True}},
    ),
}
MAIN = ("trl", "trl-keep", "laurel")
CASES = {"plain": 0.0, "kl": KL}
"""Weight of the divergence from the reference policy: TRL's default, and one that needs a pass of
the reference."""


def main() -> None:
    options = read_options()
    if options.trl_python is None:
        print("no --trl-python: TRL is left out, there is no ratio to it", file=sys.stderr)
    result: dict[str, Any] = {"machine": machine(), "options": vars(options), "cases": {}}
    with tempfile.TemporaryDirectory(prefix="laurel-benchmark-") as scratch_dir:
        scratch = Path(scratch_dir)
        settings, lengths = prepare(scratch, options, options.model)
        shape = shape_of(scratch / "policy")
        result |= {"prompt_tokens": lengths, "linear_parameters": shape.linear_parameters}
        clock = TimeLeft(options)
        for case in options.cases:
            measured = measure(case, settings, options, scratch, clock)
            peak = matmul_peak(options.threads)
            result["cases"][case] = {**measured, "matmul_peak": peak}
            print(report(case, measured, peak, shape, lengths, options), flush=True)
    write_json(options.json, result)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--trl-python", help="interpreter of an environment that has trl")
    add(
        "--cases",
        nargs="+",
        default=list(CASES),
        choices=list(CASES),
        metavar="NAME",
        help="plain: no divergence from a reference policy; kl: with one",
    )
    add(
        "--variants",
        nargs="+",
        default=list(MAIN),
        choices=list(VARIANTS),
        metavar="NAME",
        help=f"programs: {', '.join(VARIANTS)}; the default is {', '.join(MAIN)}",
    )
    add("--model", help="a directory or a hub name, in place of models of random weights")
    add("--rounds", type=int, default=2, help="measured steps of each")
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--threads", type=int, default=2)
    add("--quick", action="store_true", help="a tiny model, one round: does it run, not how fast")
    add_clock(parser)
    add("--markdown", action="store_true", help="print tables for docs/benchmarks.md")
    add("--json", type=Path, default=Path("benchmark_results/grpo_step.json"))
    options = parser.parse_args()
    if options.trl_python is None:
        options.variants = [name for name in options.variants if not VARIANTS[name].peer]
    if options.quick:
        options.rounds = 1
    return options


def prepare(
    scratch: Path, options: argparse.Namespace, model: str | None = None
) -> tuple[dict[str, Any], list[int]]:
    """Both models and the prompts on disk: the settings of every worker, and lengths of prompts."""
    from transformers import AutoTokenizer

    from laurel.models.loading.pretrained import train_tokenizer

    solved = read_problems()
    if model:
        save_endless_policy(model, scratch / "policy", solved[:8])
        save_pretrained_classifier(model, scratch / "reward")
    else:
        shape = TINY_SHAPE if options.quick else TRAINING_SHAPE
        trained = train_tokenizer(solved, vocab_size=shape.vocabulary)
        save_policy(scratch / "policy", shape, trained)
        save_classifier(scratch / "reward", shape, trained)
    tokenizer: Any = AutoTokenizer.from_pretrained(scratch / "policy")

    def length(prompt: str) -> int:
        return len(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True
            )["input_ids"]
        )

    prompts = choose_prompts(solved, length)
    rows = scratch / "prompts.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for index in range(ROWS):
            row = {"prompt": prompts[index % PROMPTS], "output": "not looked at"}
            file.write(json.dumps(row) + "\n")
    lengths = [length(prompt) for prompt in prompts]
    return {
        "policy": str(scratch / "policy"),
        "reward_model": str(scratch / "reward"),
        "rows": str(rows),
        "prompts": PROMPTS,
        "generations": GENERATIONS,
        "new_tokens": NEW_TOKENS,
        "max_length": 512,
        "learning_rate": LEARNING_RATE,
        "dtype": options.dtype,
        "threads": options.threads,
        "scratch_dir": str(scratch / "output"),
        "probe": {"prompt": prompts[0], "answer": solved[-1]},
    }, lengths


def read_problems() -> list[str]:
    """Problems with their solutions."""
    path = DATA_DIR / "gsm8k" / "train.jsonl.gz"
    if not path.is_file():
        raise SystemExit(f"{path} not found (set LAUREL_DATA): nothing was measured")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows]


def choose_prompts(solved: Sequence[str], length: Any) -> list[str]:
    """Prompts with solved examples in front of the question, of the wanted lengths."""
    chosen: list[str] = []
    for first in range(0, len(solved) - 2, 2):
        question = solved[first + 1].split("\nAnswer:")[0]
        prompt = f"{solved[first]}\n\n{question}\nAnswer:"
        if length(prompt) in PROMPT_TOKENS:
            chosen.append(prompt)
        if len(chosen) == PROMPTS:
            return chosen
    raise SystemExit(f"too few prompts of {PROMPT_TOKENS} tokens")


class TimeLeft:
    """Says how long the rest will take, by the steps so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._left = {
            (case, name): options.rounds + 1 for case in options.cases for name in options.variants
        }
        self._seconds: dict[str, float] = {}

    def took(self, case: str, name: str, seconds: float) -> str:
        self._left[case, name] -= 1
        known = self._seconds.get(name, seconds)
        self._seconds[name] = min(known, seconds)
        slowest = max(self._seconds.values())
        left = sum(
            count * self._seconds.get(other, slowest) for (_, other), count in self._left.items()
        )
        return f"about {left:.0f} s left"


def measure(
    case: str,
    settings: Mapping[str, Any],
    options: argparse.Namespace,
    scratch: Path,
    clock: TimeLeft,
) -> dict[str, Any]:
    """Start a worker for every variant, and let them take steps in turn."""
    workers: list[Worker] = []
    try:
        for name in options.variants:
            variant = VARIANTS[name]
            workers.append(
                Worker.start(
                    name,
                    "trl_grpo.py" if variant.peer else "laurel_grpo.py",
                    options.trl_python if variant.peer else sys.executable,
                    {
                        **settings,
                        "beta": CASES[case],
                        "name": f"{case}-{name}",
                        "overrides": variant.overrides,
                    },
                    scratch,
                )
            )
        for worker in workers:
            worker.facts = worker.listen(scratch)
        check_same_problem(workers)
        for index in range(options.rounds + 1):
            for worker in workers:
                cost = worker.ask(scratch, do="steps", count=1)
                left = clock.took(case, worker.name, cost["seconds"])
                what = "warm-up" if index == 0 else f"round {index}"
                print(
                    f"  {case:6} {what:8} {worker.name:10} {cost['seconds']:7.2f} s   {left}",
                    file=sys.stderr,
                )
                if index:
                    worker.repeats.append(cost)
    finally:
        for worker in workers:
            worker.stop()
    return {"workers": {w.name: {"facts": w.facts, "repeats": w.repeats} for w in workers}}


def check_same_problem(workers: Sequence[Worker]) -> None:
    """The same tokens, policy and reward model on all sides, or nothing is comparable."""
    first = workers[0].facts
    scale = 1 if first["dtype"] == "float32" else 100
    for worker in workers[1:]:
        for key in ("prompt_ids", "dtype", "threads"):
            if worker.facts[key] != first[key]:
                raise SystemExit(
                    f"{worker.name} has {key}={worker.facts[key]}, {workers[0].name} {first[key]}"
                )
        pairs = zip(worker.facts["logprobs"], first["logprobs"], strict=True)
        by_logprob = max(abs(a - b) for a, b in pairs)
        by_score = abs(worker.facts["score"] - first["score"])
        if by_logprob > LOGPROB_TOLERANCE * scale or by_score > SCORE_TOLERANCE * scale:
            raise SystemExit(
                f"{worker.name} and {workers[0].name} differ by {by_logprob:.1e} in log-probability"
                f" and {by_score:.1e} in score"
            )


def matmul_peak(threads: int, size: int = 2048) -> float:
    """Operations per second of the best large square product by either of torch's libraries."""
    import torch

    torch.set_num_threads(threads)
    left, right = torch.randn(2, size, size)
    ways: list[Callable[[], Any]] = [lambda: left @ right]
    linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if linear is not None and torch.backends.mkldnn.is_available():
        ways.append(lambda: linear(left, right, None, "none", [], ""))
    times = []
    for way in ways:
        for _ in range(6):
            started = time.perf_counter()
            way()
            times.append(time.perf_counter() - started)
    return 2 * size**3 / min(times)


def useful_operations(shape: Shape, prompt_tokens: Sequence[int], *, with_reference: bool) -> float:
    """Floating-point operations that a step cannot do without.

    Two for each weight of the layers' matrices and each distinct token (`Shape.products`: those of
    completions, or one of each, leave the last layer), and four for each query
    head's number, and each pair of a token and a token it sees; a backward pass is two forward
    passes. The policy reads every token once to draw and once to learn; the head over the
    vocabulary is needed for completions only. The reward model's tokens are taken to be as many.
    """
    written = GENERATIONS * NEW_TOKENS
    tokens = sum(length + written for length in prompt_tokens)
    pairs = sum(
        length * (length + 1) / 2
        + GENERATIONS * (NEW_TOKENS * length + NEW_TOKENS * (NEW_TOKENS + 1) / 2)
        for length in prompt_tokens
    )
    attention = shape.layers * 4 * shape.heads * shape.head_size * pairs
    body = shape.products(tokens, read=PROMPTS * written) + attention
    scoring = shape.products(tokens, read=PROMPTS * GENERATIONS) + attention
    head = 2 * shape.hidden * shape.vocabulary * PROMPTS * written
    policy = 4 + (1 if with_reference else 0)
    return policy * (body + head) + scoring


def report(
    case: str,
    measured: Mapping[str, Any],
    peak: float,
    shape: Shape,
    prompt_tokens: Sequence[int],
    options: argparse.Namespace,
) -> str:
    workers = measured["workers"]
    seconds = {
        name: [seconds_of(repeat, options.clock) for repeat in worker["repeats"]]
        for name, worker in workers.items()
    }
    median = {name: statistics.median(times) for name, times in seconds.items()}
    operations = useful_operations(shape, prompt_tokens, with_reference=CASES[case] > 0)

    def ratio(name: str, to: str) -> str:
        return f"{median[to] / median[name]:.2f}" if to in median else "-"

    rows, parts = [], []
    for name, worker in workers.items():
        repeats = worker["repeats"]
        rows.append(
            [
                VARIANTS[name].label,
                spread(seconds[name]),
                ratio(name, "trl"),
                ratio(name, "trl-keep"),
                f"{100 * operations / median[name] / peak:.0f} %",
                f"{max(r['peak_mib'] for r in repeats):.0f}",
            ]
        )
        part = {p: statistics.median(r["parts"][p] for r in repeats) for p in PARTS}
        parts.append([VARIANTS[name].label, *(f"{part[p]:.2f}" for p in PARTS)])
    header = [
        "program",
        "seconds a step: median (range)",
        "x TRL",
        "x TRL, checkpointing off",
        f"useful, of {peak / 1e9:.0f} GFLOP/s",
        "peak MiB",
    ]
    versions = "; ".join(
        dict.fromkeys(
            f"{w['facts']['program']} with torch {w['facts']['versions']['torch']}, transformers "
            f"{w['facts']['versions']['transformers']}"
            for w in workers.values()
        )
    )
    title = (
        f"{case}: {PROMPTS} prompts of {min(prompt_tokens)} to {max(prompt_tokens)} tokens x "
        f"{GENERATIONS} completions of {NEW_TOKENS}; policy and reward model of "
        f"{shape.linear_parameters / 1e6:.1f}M parameters without embeddings; "
        f"{'no reference' if not CASES[case] else f'KL {CASES[case]}'}; {options.dtype}, "
        f"{options.threads} threads, {options.clock} time; target: {TARGET} x TRL\n{versions}"
    )
    shown = table(header, rows, as_markdown=options.markdown)
    where = table(["seconds by the clock in", *PARTS], parts, as_markdown=options.markdown)
    return f"\n{title}\n\n{shown}\n\n{where}\n"


if __name__ == "__main__":
    main()
