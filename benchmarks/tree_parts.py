"""Seconds and memory of a GRPO update on a group that is larger than a micro-batch.

    python benchmarks/tree_parts.py
    python benchmarks/tree_parts.py --shapes 1024x1024x4 4096x256x4 --budget 2048

The whole forest in one pass, the group cut into several with the prompt computed again in each,
parts of one tree, and completions one by one. Every way is a process of its own with one thread:
seconds are processor time, memory is the peak of the process beyond its state before the update,
which holds weights and gradients. `difference` is that of the gradients from those of one pass.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from material import TINY_SHAPE, TRAINING_SHAPE, language_model, qwen3_config
from rounds import machine, spread, table, write_json

WAYS = {
    "one pass": "the whole forest",
    "parts": "parts of one tree",
    "cut": "cut groups, each with its prompt",
    "alone": "completions one by one",
}


def main() -> None:
    options = read_options()
    if options.way is not None:
        print(json.dumps(measure(options)))
        return
    rows = []
    for shape in options.shapes:
        for way in options.ways:
            rows.append({"shape": shape, "way": way, **measured(shape, way, options)})
            print(f"  {rows[-1]}", file=sys.stderr)
    header = [
        "prompt x answer x group",
        "way",
        "tokens",
        "passes",
        "seconds",
        "of one pass",
        "MB beyond weights",
        "of one pass",
        "difference",
    ]
    cells = []
    for row in rows:
        whole = next(
            (r for r in rows if r["shape"] == row["shape"] and r["way"] == "one pass"), None
        )

        def of_whole(value: float, name: str, whole: Any = whole) -> str:
            if whole is None:
                return ""
            base = whole[name]
            return f"{value / (statistics.median(base) if isinstance(base, list) else base):.2f}"

        cells.append(
            [
                row["shape"],
                WAYS[row["way"]],
                f"{row['tokens']:,}",
                str(row["passes"]),
                spread(row["seconds"]),
                of_whole(statistics.median(row["seconds"]), "seconds"),
                f"{row['bytes'] / 1e6:,.0f}",
                of_whole(row["bytes"], "bytes"),
                "" if whole is None else f"{abs(row['norm'] / whole['norm'] - 1):.1e}",
            ]
        )
    print(table(header, cells, as_markdown=options.markdown))
    write_json(options.json, {"machine": machine(), "options": vars(options), "rows": rows})


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shapes", nargs="+", default=["4096x512x16"], help="tokens of prompt, of answer; answers")
    add("--budget", type=int, default=2048, help="tokens of a micro-batch")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add("--rounds", type=int, default=1, help="measured updates of each, after one to warm up")
    add("--quick", action="store_true", help="a tiny model: does it run, not how fast")
    add("--recompute", action="store_true", help="with activation checkpointing")
    add("--markdown", action="store_true")
    add("--json", type=Path, default=Path("benchmark_results/tree_parts.json"))
    add("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def measured(shape: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one way in a process of its own."""
    command = [sys.executable, __file__, "--shapes", shape, "--way", way]
    command += ["--budget", str(options.budget), "--rounds", str(options.rounds)]
    command += ["--quick"] * options.quick + ["--recompute"] * options.recompute
    with tempfile.TemporaryFile("w+") as errors:
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        errors.seek(0)
        assert run.returncode == 0, errors.read()
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Take updates on one group, in this process."""
    import numpy as np
    import torch

    from laurel.config.grpo import PolicyLossConfig
    from laurel.config.policy import BatchLimits, NamedCall
    from laurel.data.forest import Batcher, select_completions, shares
    from laurel.models.forest.attention import FOREST, register
    from laurel.models.forest.policy import PolicyModel
    from laurel.models.loading.pretrained import recompute_activations
    from laurel.training.learner import LocalLearner
    from laurel.training.policy_loss import PolicyLabels, PolicyLoss
    from laurel.types import TokenGroup

    torch.set_num_threads(1)
    register()
    prompt, answer, count = map(int, options.shapes[0].split("x"))
    shape = TINY_SHAPE if options.quick else TRAINING_SHAPE
    causal_lm = language_model(qwen3_config(shape))
    causal_lm.set_attn_implementation(FOREST)
    if options.recompute:
        recompute_activations(causal_lm)
    model = PolicyModel(causal_lm, path="forest", precision=torch.float32)
    learner = LocalLearner(model, optimizer=NamedCall(name="torch.optim.SGD", kwargs={"lr": 0.0}))
    loss = PolicyLoss(PolicyLossConfig(reference_policy_kl_penalty=0.0), max_length=answer)
    passes: list[int] = []
    compute = model.hidden_of_row

    def counting(ids_T: Any, positions_T: Any, plan: Any) -> Any:
        passes.append(len(ids_T))
        return compute(ids_T, positions_T, plan)

    model.hidden_of_row = counting  # type: ignore[method-assign]
    limits = BatchLimits(
        forest_tokens=options.budget, padded_tokens=None, padded_groups=1, share_prompts=True
    )
    if options.way == "one pass":
        limits = replace(limits, forest_tokens=prompt + answer * count)
    if options.way in ("cut", "alone"):
        limits = replace(
            limits,
            forest_tokens=max(options.budget, prompt + answer),
            share_prompts=options.way == "cut",
        )
    batcher = Batcher("forest", limits, pad_id=0)

    def batch(prompt: int, answer: int, count: int) -> tuple[list[Any], list[Any]]:
        rng = np.random.default_rng(0)
        ids = [
            rng.integers(1, shape.vocabulary, n).astype(np.int32)
            for n in (prompt, *[answer] * count)
        ]
        group = TokenGroup(id="", trunk_ids=ids[0], branches_ids_G=tuple(ids[1:]))
        label = PolicyLabels(
            masks_GL=(np.ones(answer, bool),) * count,
            advantages_G=tuple(rng.normal(size=count).tolist()),
            used_G=(True,) * count,
            behaviour_GL=(np.full(answer, -9.0, np.float32),) * count,
            rewards_G=(1.0,) * count,
        )
        return [group], [label]

    def step(*sizes: int) -> None:
        groups, labels = batch(*sizes)
        if options.way == "cut":
            some = shares(groups[0], budget=options.budget)
            labels = [labels[0].subset(indices) for indices in some]
            groups = [select_completions(groups[0], indices) for indices in some]
        micro_batches = batcher.cut(*batcher.divide(groups, labels, PolicyLabels.subset))
        update = learner.update(micro_batches, loss)
        assert update.failure is None
        norms.append(update.metrics["grad_norm"])

    norms: list[float] = []
    step(64, 16, 2)  # what is made once, and the gradients
    before, seconds = _resident(), []
    for _ in range(options.rounds):
        passes.clear()
        started = time.process_time()
        step(prompt, answer, count)
        seconds.append(time.process_time() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": seconds,
        "bytes": peak - before,
        "tokens": sum(passes),
        "passes": len(passes),
        "norm": norms[-1],
    }


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
