"""Accuracy on rows never seen, of reward models learned from nothing on a CPU: recipes of rewards.

    python benchmarks/reward_learning.py --seeds 1 2 3
    python benchmarks/reward_learning.py --data hh
    python benchmarks/reward_learning.py --data hh --sweep 3 'rm.max_num_steps=[60,100,150]'
    python benchmarks/reward_learning.py --data ukp --warm-start

Runs `laurel rm` with the recipe as it stands, once a seed, each in a process of its own and only
`rm.seed` changed. The accuracy is that after the last step: no checkpoint is picked, so the
validation set has no say in what is reported. Seconds are those of the whole process.

With `--sweep K` the words that follow are tried first by `laurel sweep` over K folds of the
training set, and the seeds run with the best of them. With `--warm-start` each seed also runs from
a language model that `laurel sft` made on the better answers, beside the run from nothing.
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

import yaml
from material import DATA_DIR
from rounds import machine, table, write_json

ROOT = Path(__file__).parent.parent
TARGET_SECONDS = 600.0
PARTS = ("train", "validation")
SET = "validation-default"
LAUREL = (sys.executable, "-m", "laurel.cli.main")


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """A data set, its recipe, and what the project set itself."""

    folder: str
    recipe: Path
    target: float | None
    """The mean accuracy to reach; None: above that of a bag of words on the same rows."""
    shorter_target: float | None = None
    """The accuracy to reach where the shorter answer won."""


MATERIALS = {
    "ukp": Material(
        folder="ukp_convarg1",
        recipe=ROOT / "recipes" / "ukp_reward_cpu.yaml",
        target=0.83,
        shorter_target=0.35,
    ),
    "hh": Material(
        folder="hh_rlhf_harmless",
        recipe=ROOT / "recipes" / "hh_reward_cpu.yaml",
        target=None,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one seed gave."""

    seed: int
    accuracy: float
    loss: float
    bag_of_words: float
    shorter_won: float
    """The accuracy on the pairs whose shorter answer won."""
    longer_wins: float
    score_length_correlation: float
    pairs: int
    train_accuracy: float
    """Mean over the last tenth of the steps."""
    steps: int
    seconds: float


def main() -> None:
    options = read_options()
    material = MATERIALS[options.data]
    rows = {part: DATA_DIR.resolve() / material.folder / f"{part}.jsonl.gz" for part in PARTS}
    missing = [path for path in rows.values() if not path.is_file()]
    if missing:
        print(f"skipped: {missing[0]} not found (set LAUREL_DATA)", file=sys.stderr)
        raise SystemExit("no data: nothing was measured")
    places = [
        f"data.train_data_path={rows['train']}",
        f"data.val_data_path={rows['validation']}",
    ]
    config, overrides, sweep = material.recipe, options.overrides, None
    with tempfile.TemporaryDirectory(prefix="laurel-benchmark-") as scratch:
        if options.sweep:
            # The directory is kept: a sweep of many minutes goes on where it was stopped.
            output = options.json.parent / f"sweep_{options.data}"
            command = [*LAUREL, "sweep", "--config", str(config), *places, *overrides]
            asked = ["--folds", str(options.sweep), "--metric", f"{SET}_accuracy", "--json"]
            done = subprocess.run(
                [*command, *asked, "--output", str(output)], stdout=subprocess.PIPE, check=True
            )
            sweep, config, overrides = json.loads(done.stdout), output / "best.yaml", []
            print(f"  best of the sweep: {sweep['best']['params']}", file=sys.stderr)
        models: dict[str, list[str]] = {"": []}
        if options.warm_start:
            models["warm start"] = warm_start(config, rows, Path(scratch), overrides)
        runs: dict[str, list[Run]] = {}
        for name, changes in models.items():
            for seed in options.seeds:
                run = train(seed, config, rows, [*places, *overrides, *changes])
                runs.setdefault(name, []).append(run)
                print(
                    f"  {name} seed {seed}: accuracy {run.accuracy:.4f}, {run.seconds:.0f} s",
                    file=sys.stderr,
                )
    for name, found in runs.items():
        print(report(found, material, name, as_markdown=options.markdown))
    write_json(
        options.json,
        {
            "machine": machine(),
            "recipe": material.recipe.name,
            "overrides": options.overrides,
            "sweep": sweep,
            "runs": {name: [asdict(run) for run in found] for name, found in runs.items()},
            "mean_accuracy": {
                name: statistics.mean(run.accuracy for run in found) for name, found in runs.items()
            },
        },
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", choices=MATERIALS, default="ukp")
    add("--sweep", type=int, default=0, metavar="K", help="choose the overrides over K folds")
    add("--warm-start", action="store_true", help="also from a model that read the answers")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--markdown", action="store_true", help="print a table for docs/benchmarks.md")
    add("--json", type=Path, default=Path("benchmark_results/reward_learning.json"))
    add(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="changes to the recipe, or what the sweep tries: the figure is the recipe's own",
    )
    return parser.parse_args()


def warm_start(
    config: Path, rows: dict[str, Path], scratch: Path, overrides: list[str]
) -> list[str]:
    """Train a language model of the recipe's shape on the better answers; return how to use it."""
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    policy = {key: value for key, value in settings["policy"].items() if key != "scheduler"}
    file = scratch / "sft.yaml"
    data = {"dataset_name": settings["data"]["dataset_name"]}
    file.write_text(yaml.safe_dump({"policy": policy, "data": data}), encoding="utf-8")
    words = [one for one in overrides if one.startswith("policy.")]
    run_laurel(
        "sft",
        "--config",
        str(file),
        f"data.train_data_path={rows['train']}",
        f"checkpointing.checkpoint_dir={scratch}/language_model",
        f"logger.log_dir={scratch}/sft_logs",
        "sft.max_num_epochs=3",
        "cluster.cpu_threads=1",
        *words,
    )
    best = scratch / "language_model" / "best"
    newest = max(
        (scratch / "language_model").glob("step_*"), key=lambda path: int(path.name[len("step_") :])
    )
    return [f"policy.model_name={best if best.exists() else newest}", "~policy.scratch"]


def run_laurel(*words: str) -> None:
    """Run a command, and show the end of what it printed where it fails."""
    done = subprocess.run(
        [*LAUREL, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        end = done.stdout.decode(errors="replace").strip()[-3000:]
        raise SystemExit(f"laurel {words[0]} ended with {done.returncode}; its end:\n{end}")


def train(seed: int, config: Path, rows: dict[str, Path], changes: list[str]) -> Run:
    """One run of the recipe, nothing of which stays on disk."""
    with tempfile.TemporaryDirectory(prefix="laurel-benchmark-") as scratch:
        places = [
            f"logger.log_dir={scratch}/logs",
            f"checkpointing.checkpoint_dir={scratch}/checkpoints",
        ]
        started = time.monotonic()
        run_laurel("rm", "--config", str(config), *changes, f"rm.seed={seed}", *places)
        seconds = time.monotonic() - started
        (metrics,) = Path(scratch).glob("logs/*/metrics.jsonl")
        shorter = shorter_won(Path(scratch) / "checkpoints", rows["validation"])
        return read_run(metrics, seed=seed, seconds=seconds, shorter=shorter)


def shorter_won(model: Path, rows: Path) -> float:
    """The accuracy of a model on the validation pairs whose shorter answer won, in characters."""
    from laurel.config.data import DatasetConfig
    from laurel.data.preferences import load_preferences
    from laurel.observe.metrics import answer_length
    from laurel.rewards.open import open_local

    preferences, _ = load_preferences(
        DatasetConfig(data_path=str(rows)),
        name="validation",
        ties="drop",
        duplicates="drop",
        on_bad_row="error",
    )
    pairs = []
    for one in preferences:
        lengths = [answer_length(c.messages) for c in one.group.completions_G]
        better, worse = (0, 1) if one.ranks_G[0] < one.ranks_G[1] else (1, 0)
        if lengths[better] < lengths[worse]:
            pairs.append((one.group, better, worse))
    scorer = open_local(str(model), say=lambda text: None)
    credits = [
        float(scores[better].value > scores[worse].value)
        for scores, (_, better, worse) in zip(
            scorer.score_now([group for group, _, _ in pairs]), pairs, strict=True
        )
    ]
    return statistics.mean(credits)


def read_run(metrics: Path, *, seed: int, seconds: float, shorter: float) -> Run:
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
        bag_of_words=final[-1][f"{SET}/bag_of_words_baseline"],
        shorter_won=shorter,
        longer_wins=final[-1][f"{SET}/longer_wins_baseline"],
        score_length_correlation=final[-1][f"{SET}/score_length_correlation"],
        pairs=int(final[-1][f"{SET}/num_valid_samples"]),
        train_accuracy=statistics.mean(line["train/accuracy"] for line in tail),
        steps=last,
        seconds=seconds,
    )


def report(runs: list[Run], material: Material, name: str, *, as_markdown: bool) -> str:
    columns = {
        "accuracy": "accuracy",
        "shorter_won": "where the shorter won",
        "loss": "loss",
        "score_length_correlation": "correlation with length",
        "train_accuracy": "training accuracy",
        "seconds": "seconds",
    }
    means = {key: statistics.mean(getattr(run, key) for run in runs) for key in columns}

    def cells(first: str, values: dict[str, float]) -> list[str]:
        return [first, *(f"{v:.0f}" if k == "seconds" else f"{v:.4f}" for k, v in values.items())]

    rows = [cells(str(run.seed), {key: getattr(run, key) for key in columns}) for run in runs]
    rows.append(cells("mean", means))
    bag = runs[0].bag_of_words
    target = f"above a bag of words, {bag:.4f}"
    if material.target is not None:
        target = f"at least {material.target}; a bag of words {bag:.4f}"
    if material.shorter_target is not None:
        target += f"; where the shorter won at least {material.shorter_target}"
    title = f"{material.folder} {name}: {runs[0].pairs} validation pairs, {runs[0].steps} steps"
    verdict = (
        f"mean accuracy {means['accuracy']:.4f} (target: {target}), "
        f"the longer answer wins {runs[0].longer_wins:.4f}; "
        f"slowest seed {max(run.seconds for run in runs):.0f} s "
        f"(target: at most {TARGET_SECONDS:.0f})"
    )
    body = table(["seed", *columns.values()], rows, as_markdown=as_markdown)
    return f"\n{title}\n\n{body}\n\n{verdict}\n"


if __name__ == "__main__":
    main()
