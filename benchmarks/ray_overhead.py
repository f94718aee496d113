"""What does Ray cost? A GRPO step with every role in a process of its own, against one process.

    python benchmarks/ray_overhead.py

One rank for each role (policy, generation, reward model), all on one slot in turns; otherwise the
step of grpo_step.py, whose parts this uses.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from grpo_step import PARTS, check_same_problem, prepare
from rounds import Worker, add_clock, machine, run_rounds, seconds_of, spread, table, write_json

TARGET = 0.15
"""Longer steps on Ray than in process, as a share, that the project set itself as the most."""
WAYS: dict[str, dict[str, Any]] = {
    "process": {"backend": "local"},
    "ray": {"backend": "ray"},
}
LABELS = {"process": "one process", "ray": "Ray, a process for each role"}


def main() -> None:
    options = read_options()
    with tempfile.TemporaryDirectory(prefix="laurel-benchmark-") as directory:
        scratch = Path(directory)
        settings, _ = prepare(scratch, options)
        workers = measure(settings, options, scratch)
    print(report(workers, options), flush=True)
    raw = {w.name: {"facts": w.facts, "repeats": w.repeats} for w in workers}
    write_json(options.json, {"machine": machine(), "options": vars(options), "workers": raw})


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="measured steps of each")
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--threads", type=int, default=2)
    add("--quick", action="store_true", help="a tiny model, one round: does it run, not how fast")
    add_clock(parser)
    add("--markdown", action="store_true", help="print tables for docs/benchmarks.md")
    add("--json", type=Path, default=Path("benchmark_results/ray_overhead.json"))
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    return options


def measure(settings: dict[str, Any], options: argparse.Namespace, scratch: Path) -> list[Worker]:
    """Both take steps in turn."""
    workers: list[Worker] = []
    try:
        for name, cluster in WAYS.items():
            own = {**settings, "beta": 0.0, "name": name, "overrides": {}, "cluster": cluster}
            workers.append(Worker.start(name, "laurel_grpo.py", sys.executable, own, scratch))
        for worker in workers:
            worker.facts = worker.listen(scratch)
        check_same_problem(workers)
        every = {worker.name: options.rounds for worker in workers}
        run_rounds(workers, steps=1, rounds=every, log_dir=scratch)
    finally:
        for worker in workers:
            worker.stop()
    return workers


def report(workers: list[Worker], options: argparse.Namespace) -> str:
    times = {w.name: [seconds_of(r, options.clock) for r in w.repeats] for w in workers}
    pairs = zip(times["ray"], times["process"], strict=True)
    overhead = statistics.median(ray / process for ray, process in pairs) - 1
    rows = [
        [LABELS[w.name], spread(times[w.name])]
        + [f"{statistics.median(r['parts'][part] for r in w.repeats):.2f}" for part in PARTS]
        for w in workers
    ]
    header = ["way", "seconds a step: median (range)", *PARTS]
    return (
        table(header, rows, as_markdown=options.markdown)
        + f"\n\nlonger on Ray, median of rounds: {overhead:+.1%} (target: below {TARGET:.0%})"
    )


if __name__ == "__main__":
    main()
