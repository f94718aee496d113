"""Seconds of training, scoring and generation beside equal processes: threads that sleep or spin.

    python benchmarks/busy_machine.py

One, two and three processes do the same work at the same time, each with all threads: with what
Laurel chooses for threads that wait (they sleep), and with what OpenMP does by itself (they spin).
Before each row of the table everything is started anew; the first round of a process warms up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from rounds import machine, spread, table, write_json

WORKS = ("training", "scoring", "generation")
# Whoever has set one of the variables has chosen for all. GNU's OpenMP, which torch for Linux
# brings, does not read this one; Intel's has this value by itself.
WAYS: Mapping[str, dict[str, str]] = {"sleep": {}, "spin": {"KMP_BLOCKTIME": "200"}}
NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
ALONE_TARGET = 0.02


def main() -> None:
    options = read_options()
    if options.work:
        work_when_told(options)
        return
    measured: dict[str, dict[str, list[float]]] = {}
    for work in options.works:
        for processes in options.processes:
            found: dict[str, list[float]] = {way: [] for way in WAYS}
            for turn in range(options.turns):  # whatever slows the machine for a while slows both
                for way in list(WAYS)[:: 1 if turn % 2 else -1]:
                    found[way] += measure(work, processes, way, options)
            measured[f"{work}, {processes}"] = found
            print(f"{work} {processes}: {found}", file=sys.stderr, flush=True)
    print(report(measured, options), flush=True)
    result = {"machine": machine(), "options": vars(options), "seconds": measured}
    write_json(options.json, result)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--works", nargs="+", default=list(WORKS), choices=WORKS)
    add("--processes", type=int, nargs="+", default=[1, 2, 3], help="at the same time")
    add(
        "--rounds", type=int, default=3, help="pieces of work of each process, after one to warm up"
    )
    add("--turns", type=int, default=2, help="times that each way is started anew")
    add("--threads", type=int, default=0, help="of each process; 0: as many as Laurel takes")
    add("--quick", action="store_true", help="a tiny model, one round: does it run, not how fast")
    add("--markdown", action="store_true")
    add("--json", type=Path, default=Path("benchmark_results/busy_machine.json"))
    add("--work", choices=WORKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds = options.turns = 1
    return options


def measure(work: str, processes: int, way: str, options: argparse.Namespace) -> list[float]:
    """Seconds of every counted round of every process; all of them work until the last is done."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, __file__, "--work", work, "--threads", str(options.threads)]
    started = [
        subprocess.Popen(
            [*command, *(["--quick"] if options.quick else [])],
            env=environment | WAYS[way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(processes)
    ]
    try:
        for process in started:
            said(process)  # it is ready
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        rounds = [[said(process) for _ in range(options.rounds)] for process in started]
        return [seconds for each in rounds for seconds in each]
    finally:
        for process in started:
            process.kill()
            process.wait()


def said(process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a process ended early; see above")
    return float(json.loads(line))


def report(measured: Mapping[str, Mapping[str, Sequence[float]]], options: Any) -> str:
    rows = []
    for name, found in measured.items():
        sleeping, spinning = (statistics.median(found[way]) for way in ("sleep", "spin"))
        rows.append(
            (name, spread(found["sleep"]), spread(found["spin"]), f"{sleeping / spinning:.2f}")
        )
    header = ("work, processes", "threads sleep: seconds (range)", "spin", "sleep / spin")
    lines = [table(header, rows, as_markdown=options.markdown), ""]
    for work in options.works:
        if found := measured.get(f"{work}, 1"):
            more = statistics.median(found["sleep"]) / statistics.median(found["spin"]) - 1
            verdict = "within" if more <= ALONE_TARGET else "NOT within"
            lines.append(f"{work} alone: {more:+.1%}, {verdict} {ALONE_TARGET:.0%} of spinning")
    return "\n".join(lines)


def work_when_told(options: argparse.Namespace) -> None:
    """Warm up, say so, wait; then work and say the seconds of each round until killed."""
    from laurel.workers.process import prepare  # the first that loads torch, as in every program

    prepare("cpu", cpu_threads=options.threads or None, seed=0)
    run = {"training": training, "scoring": scoring, "generation": generation}[options.work](
        is_quick=options.quick
    )
    run()
    print(0.0, flush=True)
    sys.stdin.readline()
    while True:
        started = time.perf_counter()
        run()
        print(time.perf_counter() - started, flush=True)


def training(*, is_quick: bool) -> Callable[[], Any]:
    """A step of a reward model: 4 pairs, prompts of 256 tokens and completions of 64."""
    import torch
    from material import TINY_SHAPE, TRAINING_SHAPE, classifier, qwen3_config
    from rm_scoring import random_groups

    from laurel.data.forest import to_forest
    from laurel.models.forest.attention import FOREST, register
    from laurel.models.forest.decoder import RewardModel

    register()
    shape = TINY_SHAPE if is_quick else TRAINING_SHAPE
    network = classifier(qwen3_config(shape))
    network.set_attn_implementation(FOREST)
    model = RewardModel(network, head_name="score", path="forest", precision=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    batch = to_forest(random_groups(1, shape.vocabulary))

    def step() -> None:
        scores = model(batch)
        (-torch.nn.functional.logsigmoid(scores[0::2] - scores[1::2]).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def scoring(*, is_quick: bool) -> Callable[[], Any]:
    """Scores of 64 sequences: 8 prompts of 256 tokens with 8 completions of 64 each."""
    import torch
    from material import SCORING_SHAPE, TINY_SHAPE, classifier, qwen3_config
    from rm_scoring import random_groups

    from laurel.models.forest.attention import FOREST, register
    from laurel.models.forest.decoder import RewardModel
    from laurel.rewards.scorer import score_tokens

    register()
    shape = TINY_SHAPE if is_quick else SCORING_SHAPE
    network = classifier(qwen3_config(shape)).eval()
    network.set_attn_implementation(FOREST)
    model = RewardModel(network, head_name="score", path="forest", precision=torch.float32)
    groups = random_groups(8, shape.vocabulary)
    return lambda: score_tokens(model, groups, batch_tokens=4096, pad_id=0)


def generation(*, is_quick: bool) -> Callable[[], Any]:
    """8 completions of 32 tokens to each of 8 prompts of 256."""
    import numpy as np
    from generation import COMPLETIONS, PROMPT_TOKENS, PROMPTS, draw, language_model, laurel_engine
    from material import TINY_SHAPE, TRAINING_SHAPE

    from laurel.models.forest.attention import register
    from laurel.models.loading.pretrained import train_tokenizer

    register()
    assert COMPLETIONS == PROMPTS == 8
    shape = TINY_SHAPE if is_quick else TRAINING_SHAPE
    tokenizer = train_tokenizer(["the laurel grows by the western gate"], vocab_size=400)
    engine = laurel_engine(language_model(shape), tokenizer, fast_matmul=True)
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, shape.vocabulary, (PROMPTS, PROMPT_TOKENS)).astype(np.int32)
    return lambda: draw(engine, prompts, 4 if is_quick else 32)


if __name__ == "__main__":
    main()
