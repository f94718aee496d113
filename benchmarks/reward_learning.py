"""Accuracy on debates never seen, of a reward model learned from nothing: recipe ukp_reward_cpu.

    python benchmarks/ukp_learning.py --seeds 1 2 3

Runs `laurel rm` with the recipe as it stands, once a seed, each in a process of its own and only
`rm.seed` changed. The accuracy is that after the last step: no checkpoint is picked, so the
validation set has no say in what is reported. Seconds are those of the whole process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from material import DATA_DIR
from rounds import machine, table, write_json

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "ukp_reward_cpu.yaml"
TARGET_ACCURACY = 0.82
TARGET_SECONDS = 600.0
PARTS = ("train", "validation")
SET = "validation-default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one seed gave."""

    seed: int
    accuracy: float
    loss: float
    longer_wins: float
    score_length_correlation: float
    pairs: int
    train_accuracy: float
    """Mean over the last tenth of the steps."""
    steps: int
    seconds: float


def main() -> None:
    options = read_options()
    data_dir = DATA_DIR.resolve()
    missing = [
        path
        for path in (data_dir / "ukp_convarg1" / f"{part}.jsonl.gz" for part in PARTS)
        if not path.is_file()
    ]
    if missing:
        print(f"skipped: {missing[0]} not found (set LAUREL_DATA)", file=sys.stderr)
        raise SystemExit("no data: nothing was measured")
    runs: list[Run] = []
    for seed in options.seeds:
        run = train(seed, data_dir, options.overrides)
        runs.append(run)
        print(f"  seed {seed}: accuracy {run.accuracy:.4f}, {run.seconds:.0f} s", file=sys.stderr)
    print(report(runs, as_markdown=options.markdown))
    write_json(
        options.json,
        {
            "machine": machine(),
            "recipe": RECIPE.name,
            "overrides": options.overrides,
            "runs": [asdict(run) for run in runs],
            "mean_accuracy": statistics.mean(run.accuracy for run in runs),
        },
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--markdown", action="store_true", help="print a table for docs/benchmarks.md")
    add("--json", type=Path, default=Path("benchmark_results/ukp_learning.json"))
    add(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="changes to the recipe, to try things: the figure is the recipe's own",
    )
    return parser.parse_args()


def train(seed: int, data_dir: Path, overrides: list[str]) -> Run:
    """One run of the recipe, nothing of which stays on disk."""
    with tempfile.TemporaryDirectory(prefix="laurel-benchmark-") as scratch:
        command = [
            sys.executable,
            "-m",
            "laurel.cli.main",
            "rm",
            "--config",
            str(RECIPE),
            f"rm.seed={seed}",
            f"logger.log_dir={scratch}/logs",
            f"checkpointing.checkpoint_dir={scratch}/checkpoints",
            f"data.train_data_path={data_dir}/ukp_convarg1/train.jsonl.gz",
            f"data.val_data_path={data_dir}/ukp_convarg1/validation.jsonl.gz",
            *overrides,
        ]
        log = Path(scratch) / "output.log"
        started = time.monotonic()
        with log.open("w") as output:
            code = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, check=False
            ).returncode
        seconds = time.monotonic() - started
        if code:
            end = log.read_text(encoding="utf-8", errors="replace").strip()[-3000:]
            raise SystemExit(f"seed {seed} ended with exit code {code}; the end of its log:\n{end}")
        (metrics,) = Path(scratch).glob("logs/*/metrics.jsonl")
        return read_run(metrics, seed=seed, seconds=seconds)


def read_run(metrics: Path, *, seed: int, seconds: float) -> Run:
    """The figures of a run from its own log.

    Raises SystemExit where the run was not validated after its last step.
    """
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()
    ]
    steps = [line for line in lines if "train/accuracy" in line]
    last = steps[-1]["step"]
    final = [line for line in lines if line["step"] == last and f"{SET}/accuracy" in line]
    if not final:
        raise SystemExit(f"seed {seed} was not validated after its last step, {last}")
    tail = steps[-max(1, len(steps) // 10) :]
    return Run(
        seed=seed,
        accuracy=final[-1][f"{SET}/accuracy"],
        loss=final[-1][f"{SET}/loss"],
        longer_wins=final[-1][f"{SET}/longer_wins_baseline"],
        score_length_correlation=final[-1][f"{SET}/score_length_correlation"],
        pairs=int(final[-1][f"{SET}/num_valid_samples"]),
        train_accuracy=statistics.mean(line["train/accuracy"] for line in tail),
        steps=last,
        seconds=seconds,
    )


def report(runs: list[Run], *, as_markdown: bool) -> str:
    header = ["seed", "accuracy", "loss", "correlation with length", "training accuracy", "seconds"]
    rows = [
        [
            str(run.seed),
            f"{run.accuracy:.4f}",
            f"{run.loss:.4f}",
            f"{run.score_length_correlation:.2f}",
            f"{run.train_accuracy:.3f}",
            f"{run.seconds:.0f}",
        ]
        for run in runs
    ]
    columns = ("accuracy", "loss", "score_length_correlation", "train_accuracy", "seconds")
    means = {name: statistics.mean(getattr(run, name) for run in runs) for name in columns}
    rows.append(
        [
            "mean",
            f"{means['accuracy']:.4f}",
            f"{means['loss']:.4f}",
            f"{means['score_length_correlation']:.2f}",
            f"{means['train_accuracy']:.3f}",
            f"{means['seconds']:.0f}",
        ]
    )
    slowest = max(run.seconds for run in runs)
    title = (
        f"ukp_convarg1: {runs[0].pairs} validation pairs of unseen debates, {runs[0].steps} steps"
    )
    verdict = (
        f"mean accuracy {means['accuracy']:.4f} (target: at least {TARGET_ACCURACY}), "
        f"the longer answer wins {runs[0].longer_wins:.4f}; "
        f"slowest seed {slowest:.0f} s (target: at most {TARGET_SECONDS:.0f})"
    )
    return f"\n{title}\n\n{table(header, rows, as_markdown=as_markdown)}\n\n{verdict}\n"


if __name__ == "__main__":
    main()
