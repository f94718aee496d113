"""Accuracy on rows never seen, of reward models learned from nothing on a CPU: recipes of rewards.

    python benchmarks/reward_learning.py --seeds 1 2 3
    python benchmarks/reward_learning.py --data hh
    python benchmarks/reward_learning.py --data hh --sweep 3 'rm.max_num_steps=[60,100,150]'
    python benchmarks/reward_learning.py --warm-start
    python benchmarks/reward_learning.py --folds 3 --seeds 1

Runs `laurel rm` with the recipe as it stands, once a seed, each in a process of its own and only
`rm.seed` changed. The accuracy is that after the last step: no checkpoint is picked, so the
validation set has no say in what is reported. Seconds are those of the whole process.

With `--warm-start` the seeds start from a language model that `laurel sft` made of the better
answers of the training rows. With `--folds K` the validation set is not read: each of K parts of
the training set is held out in turn, from the language model too, which `laurel sweep` cannot do.
With `--sweep K` the words that follow are tried first by `laurel sweep` over K folds of the
training set, and the seeds run with the best of them.
"""

from __future__ import annotations

import argparse
import gzip
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
TARGET_SECONDS = 600.0
PARTS = ("train", "validation")
SET = "validation-default"
LAUREL = (sys.executable, "-m", "laurel.cli.main")


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """A data set, its recipe, and what the project set itself."""

    folder: str
    recipe: Path
    language_model: Path
    """The recipe of a language model to start from."""
    target: float | None
    """The mean accuracy to reach; None: above that of a bag of words on the same rows."""
    shorter_target: float | None = None
    """The accuracy to reach where the shorter answer won."""


MATERIALS = {
    "ukp": Material(
        folder="ukp_convarg1",
        recipe=ROOT / "recipes" / "ukp_reward_cpu.yaml",
        language_model=ROOT / "recipes" / "ukp_sft_cpu.yaml",
        target=0.83,
        shorter_target=0.35,
    ),
    "hh": Material(
        folder="hh_rlhf_harmless",
        recipe=ROOT / "recipes" / "hh_reward_cpu.yaml",
        language_model=ROOT / "recipes" / "hh_sft_cpu.yaml",
        target=None,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one seed gave."""

    fold: int
    """The part of the training set that was held out; 0: the validation set was."""
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

    @property
    def label(self) -> str:
        return f"fold {self.fold}, seed {self.seed}" if self.fold else f"seed {self.seed}"


def main() -> None:
    options = read_options()
    material = MATERIALS[options.data]
    rows = {part: DATA_DIR.resolve() / material.folder / f"{part}.jsonl.gz" for part in PARTS}
    missing = [path for path in rows.values() if not path.is_file()]
    if missing:
        print(f"skipped: {missing[0]} not found (set LAUREL_DATA)", file=sys.stderr)
        raise SystemExit("no data: nothing was measured")
    config, sweep = material.recipe, None
    of_sft = [word for word in options.overrides if word.startswith("sft.")]
    if of_sft and not options.warm_start:
        raise SystemExit(f"{of_sft[0]} has an effect only with --warm-start")
    overrides = [word for word in options.overrides if word not in of_sft]
    with tempfile.TemporaryDirectory(prefix="laurel-benchmark-") as scratch:
        if options.sweep:
            # The directory is kept: a sweep of many minutes goes on where it was stopped.
            output = options.json.parent / f"sweep_{options.data}"
            command = [*LAUREL, "sweep", "--config", str(config), *places(rows), *overrides]
            asked = ["--folds", str(options.sweep), "--metric", f"{SET}_accuracy", "--json"]
            done = subprocess.run(
                [*command, *asked, "--output", str(output)], stdout=subprocess.PIPE, check=True
            )
            sweep, config, overrides = json.loads(done.stdout), output / "best.yaml", []
            print(f"  best of the sweep: {sweep['best']['params']}", file=sys.stderr)
        held_out = (
            [rows] if not options.folds else folds(rows["train"], options.folds, Path(scratch))
        )
        runs: list[Run] = []
        for number, split in enumerate(held_out, start=bool(options.folds)):
            changes = overrides
            if options.warm_start:
                start = Path(scratch) / f"language_model_{number}"
                changes = [*warm_start(material.language_model, split, start, of_sft), *overrides]
            for seed in options.seeds:
                run = train(seed, number, config, split, changes)
                runs.append(run)
                print(
                    f"  {run.label}: accuracy {run.accuracy:.4f}, {run.seconds:.0f} s",
                    file=sys.stderr,
                )
    name = "warm start" if options.warm_start else ""
    print(report(runs, material, name, as_markdown=options.markdown))
    write_json(
        options.json,
        {
            "machine": machine(),
            "recipe": material.recipe.name,
            "language_model": material.language_model.name if options.warm_start else None,
            "overrides": options.overrides,
            "sweep": sweep,
            "runs": [asdict(run) for run in runs],
            "mean_accuracy": statistics.mean(run.accuracy for run in runs),
        },
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", choices=MATERIALS, default="ukp")
    add("--sweep", type=int, default=0, metavar="K", help="choose the overrides over K folds")
    add("--folds", type=int, default=0, metavar="K", help="hold out parts of the training set")
    add("--warm-start", action="store_true", help="from a model that read the answers")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--markdown", action="store_true", help="print a table for docs/benchmarks.md")
    add("--json", type=Path, default=Path("benchmark_results/reward_learning.json"))
    add(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="changes to the recipe (sft.*: to the language model's), or what the sweep tries",
    )
    options = parser.parse_args()
    if options.sweep and options.folds:
        parser.error("--sweep has seen the rows that --folds would hold out; give one of them")
    if options.sweep and options.warm_start:
        parser.error("--warm-start makes a model of the recipe's shape, which --sweep may change")
    return options


def places(rows: dict[str, Path]) -> list[str]:
    return [
        f"data.train_data_path={rows['train']}",
        f"data.val_data_path={rows['validation']}",
    ]


def folds(train_rows: Path, number: int, scratch: Path) -> list[dict[str, Path]]:
    """Split training rows so that no debate, or no opening of a conversation, is on both sides."""
    topics: dict[str, list[str]] = {}
    with gzip.open(train_rows, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            # `topic` has the side of a debate after its name.
            topic = row["topic"].partition("_")[0] if "topic" in row else row["context"][0]
            topics.setdefault(json.dumps(topic), []).append(line)
    if len(topics) < number:
        raise SystemExit(f"--folds {number}: {train_rows} holds only {len(topics)} debates")
    parts: list[list[str]] = [[] for _ in range(number)]
    for lines in sorted(topics.values(), key=len, reverse=True):
        min(parts, key=len).extend(lines)
    splits = []
    for held_out, part in enumerate(parts):
        split = {name: scratch / f"{name}_{held_out}.jsonl" for name in PARTS}
        rest = [line for other in parts if other is not part for line in other]
        split["train"].write_text("".join(rest), encoding="utf-8")
        split["validation"].write_text("".join(part), encoding="utf-8")
        splits.append(split)
    return splits


def warm_start(
    recipe: Path, rows: dict[str, Path], output: Path, overrides: list[str]
) -> list[str]:
    """Train a language model on the better answers; return how to start from it."""
    run_laurel(
        "sft",
        "--config",
        str(recipe),
        f"data.train_data_path={rows['train']}",
        f"checkpointing.checkpoint_dir={output}",
        f"logger.log_dir={output}/logs",
        *overrides,
    )
    newest = max(output.glob("step_*"), key=lambda path: int(path.name[len("step_") :]))
    return [f"policy.model_name={newest}", "~policy.scratch"]


def run_laurel(*words: str) -> None:
    """Run a command, and show the end of what it printed where it fails."""
    done = subprocess.run(
        [*LAUREL, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        end = done.stdout.decode(errors="replace").strip()[-3000:]
        raise SystemExit(f"laurel {words[0]} ended with {done.returncode}; its end:\n{end}")


def train(seed: int, fold: int, config: Path, rows: dict[str, Path], changes: list[str]) -> Run:
    """One run of the recipe, nothing of which stays on disk."""
    with tempfile.TemporaryDirectory(prefix="laurel-benchmark-") as scratch:
        outputs = [
            f"logger.log_dir={scratch}/logs",
            f"checkpointing.checkpoint_dir={scratch}/checkpoints",
        ]
        started = time.monotonic()
        run_laurel(
            "rm", "--config", str(config), *places(rows), *changes, f"rm.seed={seed}", *outputs
        )
        seconds = time.monotonic() - started
        (metrics,) = Path(scratch).glob("logs/*/metrics.jsonl")
        shorter = shorter_won(Path(scratch) / "checkpoints", rows["validation"])
        return read_run(metrics, fold=fold, seed=seed, seconds=seconds, shorter=shorter)


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


def read_run(metrics: Path, *, fold: int, seed: int, seconds: float, shorter: float) -> Run:
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
        fold=fold,
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

    rows = [cells(run.label, {key: getattr(run, key) for key in columns}) for run in runs]
    rows.append(cells("mean", means))
    bag = statistics.mean(run.bag_of_words for run in runs)
    target = f"above a bag of words, {bag:.4f}"
    if material.target is not None:
        target = f"at least {material.target}; a bag of words {bag:.4f}"
    if material.shorter_target is not None:
        target += f"; where the shorter won at least {material.shorter_target}"
    if runs[0].fold:
        target = f"none for folds; a bag of words {bag:.4f}"
    pairs, steps = (
        ", ".join(str(n) for n in sorted({getattr(run, what) for run in runs}))
        for what in ("pairs", "steps")
    )
    title = f"{material.folder} {name}: {pairs} pairs held out, {steps} steps"
    verdict = (
        f"mean accuracy {means['accuracy']:.4f} (target: {target}), "
        f"the longer answer wins {statistics.mean(run.longer_wins for run in runs):.4f}; "
        f"slowest run of laurel rm {max(run.seconds for run in runs):.0f} s "
        f"(target: at most {TARGET_SECONDS:.0f})"
    )
    body = table(["run", *columns.values()], rows, as_markdown=as_markdown)
    return f"\n{title}\n\n{body}\n\n{verdict}\n"


if __name__ == "__main__":
    main()
