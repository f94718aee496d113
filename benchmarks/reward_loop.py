"""How much of the scoring does the reward loop hide? GRPO steps with it, without it, and the ideal.

    python benchmarks/reward_loop.py

Same policy, prompts, completions and reward model; see README.md for how it measures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from grpo_step import check_same_problem, prepare
from material import TINY_SHAPE, TRAINING_SHAPE, save_classifier
from rounds import Worker, add_clock, machine, run_rounds, seconds_of, spread, table, write_json
from transformers import AutoTokenizer

ENDS = 48
"""One token in so many ends a completion: lengths differ, as those of a trained policy do."""
NEW_TOKENS = 192
HEAVIER = 3
"""Layers of the reward model, as a multiple of the policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to score."""

    label: str
    threads: int
    reward: dict[str, Any] = field(default_factory=dict)


WAYS = {
    "end": Way(label="the whole batch afterwards", threads=1, reward={"use_reward_loop": False}),
    "end-2": Way(label="the same on 2 threads", threads=2, reward={"use_reward_loop": False}),
    "loop": Way(label="the loop, in this process", threads=1),
    "loop-2": Way(label="the same on 2 threads", threads=2),
    "replicas": Way(
        label="the loop, 2 replicas in processes", threads=1, reward={"num_replicas": 2}
    ),
}


def main() -> None:
    options = read_options()
    shape = TINY_SHAPE if options.quick else TRAINING_SHAPE
    with tempfile.TemporaryDirectory(prefix="laurel-benchmark-") as directory:
        scratch = Path(directory)
        settings, _ = prepare(scratch, options)
        tokenizer = AutoTokenizer.from_pretrained(scratch / "policy")
        heavier = replace(shape, layers=HEAVIER * shape.layers)
        save_classifier(scratch / "judge", heavier, tokenizer)
        settings |= {
            "reward_model": str(scratch / "judge"),
            "beta": 0.0,
            "lengths_vary": True,
            "prompts": options.prompts,
            "generations": options.generations,
            "overrides": {
                "generation": {
                    "backend": "transformers",
                    "max_new_tokens": NEW_TOKENS,
                    "stop_token_ids": list(range(0, shape.vocabulary, ENDS)),
                }
            },
        }
        workers = measure(settings, options, scratch)
    print(report(workers, options), flush=True)
    raw = {w.name: {"facts": w.facts, "repeats": w.repeats} for w in workers}
    write_json(options.json, {"machine": machine(), "options": vars(options), "workers": raw})


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="measured steps of each")
    add("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    add("--prompts", type=int, default=8, help="of a step; there are 4, again and again")
    add("--generations", type=int, default=8, help="completions of each")
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--quick", action="store_true", help="a tiny model, one round: does it run, not how fast")
    add_clock(parser)
    add("--markdown", action="store_true", help="print tables for docs/benchmarks.md")
    add("--json", type=Path, default=Path("benchmark_results/reward_loop.json"))
    options = parser.parse_args()
    options.threads = 1
    if options.quick:
        options.rounds = 1
    return options


def measure(settings: dict[str, Any], options: argparse.Namespace, scratch: Path) -> list[Worker]:
    """All take steps in turn."""
    workers: list[Worker] = []
    try:
        for name in options.ways:
            way = WAYS[name]
            own = {**settings, "name": name, "threads": way.threads, "reward": way.reward}
            workers.append(Worker.start(name, "laurel_grpo.py", sys.executable, own, scratch))
        for worker in workers:
            worker.facts = worker.listen(scratch)
        for threads in {way.threads for way in WAYS.values()}:
            if alike := [w for w in workers if w.facts["threads"] == threads]:
                check_same_problem(alike)
        every = {worker.name: options.rounds for worker in workers}
        run_rounds(workers, steps=1, rounds=every, log_dir=scratch)
        check_same_work(workers)
    finally:
        for worker in workers:
            worker.stop()
    return workers


def check_same_work(workers: list[Worker]) -> None:
    """Every way drew as many tokens and found the same rewards, round by round.

    The first round only: rounding grows from step to step.
    """
    first = workers[0].repeats[0]["logged"]
    for worker in workers[1:]:
        logged = worker.repeats[0]["logged"]
        for name, bound in (("train/total_num_tokens", 0.02), ("train/reward", 0.05)):
            if abs(logged[name] - first[name]) > bound * max(1.0, abs(first[name])):
                raise SystemExit(
                    f"{worker.name} has {name}={logged[name]}, {workers[0].name} {first[name]}: "
                    "they do not do the same, nothing is compared"
                )


def report(workers: list[Worker], options: argparse.Namespace) -> str:
    rows = []
    names = ("generation", "reward")
    for worker in workers:
        parts = [repeat["parts"] for repeat in worker.repeats]
        shares = [r["logged"]["performance/reward_hidden_share"] for r in worker.repeats]
        times = [seconds_of(repeat, options.clock) for repeat in worker.repeats]
        rows.append(
            [
                WAYS[worker.name].label,
                str(WAYS[worker.name].threads),
                spread(times),
                *(f"{statistics.median(p[n] for p in parts):.2f}" for n in names),
                f"{statistics.median(shares):.0%}",
            ]
        )
    header = [
        "way",
        "threads",
        "seconds a step: median (range)",
        "generation",
        "waiting for rewards",
        "share hidden",
    ]
    return table(header, rows, as_markdown=options.markdown) + ideal(workers, options)


def ideal(workers: list[Worker], options: argparse.Namespace) -> str:
    """What a step would take if drawing and scoring did not know of each other."""
    by_name = {worker.name: worker for worker in workers}
    if "end" not in by_name:
        return ""
    found = []
    for repeat in by_name["end"].repeats:
        drawn, scored = repeat["parts"]["generation"], repeat["parts"]["reward"]
        found.append(seconds_of(repeat, options.clock) - min(drawn, scored))
    best = statistics.median(found)
    lines = [f"\n\nideal, of one thread each for drawing and scoring: {best:.2f} s a step"]
    for name in ("loop", "replicas"):
        if name in by_name:
            taken = statistics.median(seconds_of(r, options.clock) for r in by_name[name].repeats)
            lines.append(f"{WAYS[name].label}: {taken / best - 1:+.1%} of that")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
