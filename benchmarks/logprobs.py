"""Time and memory of log-probabilities over a large vocabulary, forward and backward.

    python benchmarks/logprobs.py
    python benchmarks/logprobs.py --trl-python .../bin/python --liger-python .../bin/python

Against the whole matrix of logits, TRL's chunks and Liger's. See README.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from rounds import (
    Worker,
    add_clock,
    machine,
    run_rounds,
    seconds_of,
    spread,
    table,
    write_json,
)

TOLERANCE = 1e-3
"""Largest difference of a gradient from the plain way's, relative to the largest gradient."""
LABELS = {
    "plain": "log_softmax of all logits",
    "laurel": "Laurel",
    "trl": "TRL's chunks",
    "liger": "Liger's chunked GRPO loss",
}


def main() -> None:
    options = read_options()
    interpreters = {
        "plain": sys.executable,
        "laurel": sys.executable,
        "trl": options.trl_python,
        "liger": options.liger_python,
    }
    names = [name for name, python in interpreters.items() if python is not None]
    settings = {
        "tokens": options.tokens,
        "vocabulary": options.vocabulary,
        "hidden": options.hidden,
        "threads": options.threads,
        "entropy": options.entropy,
    }
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="laurel-benchmark-") as scratch_dir:
        scratch = Path(scratch_dir)
        try:
            for name in names:
                python = str(interpreters[name])
                workers.append(
                    Worker.start(
                        name, "logprob_ways.py", python, {**settings, "way": name}, scratch
                    )
                )
            for worker in workers:
                worker.facts = worker.listen(scratch)
            rounds = dict.fromkeys(names, options.rounds)
            run_rounds(workers, steps=1, rounds=rounds, log_dir=scratch)
        finally:
            for worker in workers:
                worker.stop()
    differences = {worker.name: difference(worker, workers[0]) for worker in workers}
    print(report(workers, differences, options))
    kept = ("seconds", "user_seconds", "system_seconds", "extra_mib", "peak_mib")
    measured = {
        w.name: {
            "facts": w.facts,
            "difference": differences[w.name],
            "repeats": [{key: r[key] for key in kept} for r in w.repeats],
        }
        for w in workers
    }
    write_json(options.json, {"machine": machine(), "options": vars(options), "ways": measured})
    if max(differences.values()) > TOLERANCE:
        raise SystemExit("the gradients differ: nothing is comparable")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--trl-python", help="interpreter of an environment that has trl")
    add("--liger-python", help="interpreter of an environment that has liger-kernel")
    add("--tokens", type=int, default=4096, help="a multiple of 128")
    add("--vocabulary", type=int, default=32768)
    add("--hidden", type=int, default=512)
    add("--entropy", action="store_true", help="measure the entropy too, where a way can")
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=2)
    add("--quick", action="store_true", help="a tiny problem, one round")
    add_clock(parser)
    add("--markdown", action="store_true", help="print tables for docs/benchmarks.md")
    add("--json", type=Path, default=Path("benchmark_results/logprobs.json"))
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.vocabulary, options.hidden, options.rounds = 256, 2048, 64, 1
    return options


def difference(worker: Worker, reference: Worker) -> float:
    """How far gradients are from the reference's, relative to the largest."""
    worst = 0.0
    for key in ("by_hidden", "by_weight"):
        found: list[Any] = worker.repeats[-1][key]  # type: ignore[assignment]
        wanted: list[Any] = reference.repeats[-1][key]  # type: ignore[assignment]
        scale = max(map(abs, wanted))
        worst = max(worst, *(abs(a - b) / scale for a, b in zip(found, wanted, strict=True)))
    return worst


def report(
    workers: list[Worker], differences: dict[str, float], options: argparse.Namespace
) -> str:
    seconds = {w.name: [seconds_of(r, options.clock) for r in w.repeats] for w in workers}
    plain = statistics.median(seconds["plain"])
    rows = [
        [
            LABELS[w.name],
            w.facts["program"],
            spread(seconds[w.name]),
            f"{plain / statistics.median(seconds[w.name]):.2f}",
            f"{max(w.values('extra_mib')):.0f}",
            f"{differences[w.name]:.1e}",
        ]
        for w in workers
    ]
    header = [
        "way",
        "program",
        "seconds: median (range)",
        "x plain",
        "MiB beyond inputs and gradients",
        "relative gradient difference",
    ]
    logits = options.tokens * options.vocabulary * 4 / 2**20
    title = (
        f"{options.tokens} tokens, {options.vocabulary} entries ({logits:.0f} MiB of logits), "
        f"hidden size {options.hidden}, forward and backward, float32, {options.threads} threads, "
        f"{options.clock} time"
    )
    return f"\n{title}\n\n{table(header, rows, as_markdown=options.markdown)}\n"


if __name__ == "__main__":
    main()
