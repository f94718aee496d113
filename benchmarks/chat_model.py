"""What does a real chat model learn on a CPU? The recipes with SmolLM2-135M-Instruct, row by row.

    python benchmarks/chat_model.py --list
    python benchmarks/chat_model.py --row grpo --seeds 1 2 3
    python benchmarks/chat_model.py --row reward-ukp reward-hh --model DIRECTORY
    python benchmarks/chat_model.py --markdown             # what is there, as tables

Each row runs a recipe of recipes/ in processes of its own, and writes its figures below `--work`. A
row that is there is not run again, and one that was stopped goes on from its last checkpoint. The
figures are those after the last step: no checkpoint is picked. Held-out rows of preferences are a
sample of the validation set (`--validation`), the same for all rows, because a CPU scores as slowly
as it trains. Seconds mean nothing on a busy machine: its load is beside them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from material import DATA_DIR
from rounds import machine, table, write_json

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
LAUREL = (sys.executable, "-m", "laurel.cli.main")
SET = "validation-default"


@dataclass(frozen=True, slots=True)
class Pairs:
    """Preferences to learn from, and how much of them is learned from."""

    files: str
    """What the names of the files have before `train` and `validation`."""
    tokens: int
    """The longest conversation; longer ones lose their beginning."""
    steps: int = 40


PAIRS = {
    "ukp": Pairs("ukp_convarg1/", tokens=256),
    "hh": Pairs("hh_rlhf_harmless/", tokens=160),
    "ultrafeedback": Pairs("ultrafeedback_1k/", tokens=384),
    "gsm8k": Pairs("gsm8k_model_solutions/pairs_", tokens=384, steps=100),
}
RATES = (2e-6, 1e-5, 5e-5)
"""Learning rates of the row `rates`: that of Laurel's defaults first."""


def main() -> None:
    options = read_options()
    options.work = options.work.resolve()
    if options.list:
        print("\n".join(rows()))
        return
    for name in options.row:
        rows()[name](options)
    print(report(options))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--row", nargs="+", default=[], choices=list(rows()), metavar="NAME")
    add("--list", action="store_true", help="print the names of the rows")
    add("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a directory or a hub name")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of GRPO")
    add("--validation", type=int, default=400, help="held-out pairs")
    add("--threads", type=int, default=1)
    add("--work", type=Path, default=Path("benchmark_results/chat_model"))
    add("--markdown", action="store_true", help="print tables for docs/benchmarks.md")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="changes of the recipes")
    return parser.parse_args()


def rows() -> dict[str, Callable[[argparse.Namespace], None]]:
    """The rows by name, in the order of their worth."""
    preferences = {f"reward-{name}": lambda o, name=name: reward_row(o, name) for name in PAIRS}
    return {"grpo": grpo_row, **preferences, "rates": rates_row}


def grpo_row(options: argparse.Namespace) -> None:
    """The form of an answer from 32 examples, then GRPO on known answers, once a seed."""
    problems = options.work / "largest_number"
    if not problems.is_dir():
        writer = ROOT / "examples" / "largest_number.py"
        subprocess.run([sys.executable, str(writer), str(problems)], check=True)
    warm = options.work / "warm_up"
    if not list(warm.glob("step_*")):
        train(
            options,
            "sft",
            "smollm2_sft_cpu.yaml",
            warm,
            f"policy.model_name={options.model}",
            f"data.train.data_path={problems}/demonstrations.jsonl",
        )
    for seed in options.seeds:
        run = options.work / f"grpo_{seed}"
        if figures_of(run):
            continue
        seconds = train(
            options,
            "grpo",
            "smollm2_grpo_cpu.yaml",
            run,
            f"policy.model_name={newest(warm)}",
            f"data.system_prompt_file={problems}/system.txt",
            f"data.train.data_path={problems}/tasks.jsonl",
            f"data.validation.data_path={problems}/tasks_test.jsonl",
            f"grpo.seed={seed}",
        )
        steps = metrics(run)
        validated = [line for line in steps if "validation/accuracy" in line]
        curve = {line["step"]: line["validation/accuracy"] for line in validated}
        write_figures(
            run,
            seed=seed,
            steps=steps[-1]["step"],
            prompts=int(validated[0]["validation/num_valid_samples"]),
            curve=curve,
            rewards={
                line["step"]: line["train/reward"] for line in steps if "train/reward" in line
            },
            seconds=seconds,
        )


def reward_row(options: argparse.Namespace, name: str, *changes: str, run_name: str = "") -> None:
    """A reward model, its baselines on the same rows, and what it has learned beyond them."""
    pairs = PAIRS[name]
    run = options.work / (run_name or f"reward_{name}")
    if figures_of(run):
        return
    seconds = train(
        options,
        "rm",
        "smollm2_reward_cpu.yaml",
        run,
        f"policy.model_name={options.model}",
        f"policy.max_total_sequence_length={pairs.tokens}",
        f"rm.max_num_steps={pairs.steps}",
        f"data.train_data_path={data(pairs.files + 'train')}",
        f"data.val_data_path={sample(options, pairs.files + 'validation')}",
        *changes,
    )
    lines = metrics(run)
    steps = [line for line in lines if "train/accuracy" in line]
    final = next(line for line in reversed(lines) if f"{SET}/accuracy" in line)
    tail = steps[-max(1, len(steps) // 10) :]
    write_figures(
        run,
        steps=steps[-1]["step"],
        pairs=int(final[f"{SET}/num_valid_samples"]),
        train_accuracy=sum(line["train/accuracy"] for line in tail) / len(tail),
        losses=[line["train/loss"] for line in steps],
        seconds=seconds,
        **{
            key: final[f"{SET}/{key}"]
            for key in (
                "accuracy",
                "loss",
                "bag_of_words_baseline",
                "longer_wins_baseline",
                "score_length_correlation",
            )
            if f"{SET}/{key}" in final
        },
    )


def rates_row(options: argparse.Namespace) -> None:
    """Rates beside the default, everything else as a newcomer leaves it, on a small set."""
    for rate in RATES:
        reward_row(
            options,
            "ukp",
            "~policy.scheduler",
            "rm.max_num_steps=20",
            f"policy.optimizer.kwargs.lr={rate}",
            run_name=f"rate_{rate:g}",
        )


def data(name: str) -> Path:
    path = DATA_DIR.resolve() / f"{name}.jsonl.gz"
    if not path.is_file():
        raise SystemExit(f"no data: {path} not found (set LAUREL_DATA)")
    return path


def sample(options: argparse.Namespace, name: str) -> Path:
    """Write the held-out rows: so many of the set, chosen by a fixed seed."""
    written: Path = options.work / f"{name.replace('/', '_')}_{options.validation}.jsonl"
    if not written.is_file():
        with gzip.open(data(name), "rt", encoding="utf-8") as file:
            lines = list(file)
        random.Random(0).shuffle(lines)
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text("".join(lines[: options.validation]), encoding="utf-8")
    return written


def train(
    options: argparse.Namespace, command: str, recipe: str, run: Path, *settings: str
) -> float:
    """Run a recipe, or go on with it; return the seconds of this process."""
    words = [
        *LAUREL,
        command,
        "--config",
        str(RECIPES / recipe),
        *settings,
        f"checkpointing.checkpoint_dir={run}",
        f"logger.log_dir={run}/logs",
        f"cluster.cpu_threads={options.threads}",
        *options.overrides,
    ]
    run.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with (run / "output.txt").open("a", encoding="utf-8") as log:
        done = subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        end = (run / "output.txt").read_text(encoding="utf-8", errors="replace")[-2000:]
        raise SystemExit(f"laurel {command} ended with {done.returncode}; its end:\n{end}")
    return time.monotonic() - started


def newest(run: Path) -> Path:
    """The last checkpoint of a run."""
    return max(run.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))


def metrics(run: Path) -> list[dict[str, Any]]:
    """All steps of a run, over the processes that it took; the last value of a step counts."""
    steps: dict[tuple[int, bool], dict[str, Any]] = {}
    for file in sorted(run.glob("logs/*/metrics.jsonl")):
        for text in file.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            validated = any(key.startswith("validation") for key in line)
            steps[line["step"], validated] = line
    return [steps[key] for key in sorted(steps)]


def write_figures(run: Path, **figures: Any) -> None:
    record = {**figures, "load": os.getloadavg()[0], "machine": machine()}
    write_json(run / "figures.json", record)


def figures_of(run: Path) -> dict[str, Any] | None:
    path = run / "figures.json"
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def report(options: argparse.Namespace) -> str:
    """What the rows that are there have given."""
    parts = []
    runs = [figures_of(path) for path in sorted(options.work.glob("grpo_*"))]
    policies = [run for run in runs if run]
    if policies:
        header = ["seed", "steps", "before", "after", "gain", "curve"]
        lines = [
            [
                str(run["seed"]),
                str(run["steps"]),
                share(values[0], run["prompts"]),
                share(values[-1], run["prompts"]),
                f"{100 * (values[-1] - values[0]):+.1f}",
                ", ".join(f"{step}: {value:.3f}" for step, value in run["curve"].items()),
            ]
            for run in policies
            for values in [list(run["curve"].values())]
        ]
        parts.append(table(header, lines, as_markdown=options.markdown))
    found = {
        path.name: run
        for path in sorted([*options.work.glob("reward_*"), *options.work.glob("rate_*")])
        if (run := figures_of(path))
    }
    if found:
        header = ["run", "steps", "held out", "longer wins", "bag of words", "loss", "training"]
        lines = [
            [
                name,
                str(run["steps"]),
                share(run["accuracy"], run["pairs"]),
                *(
                    f"{run[key]:.3f}" if key in run else ""
                    for key in ("longer_wins_baseline", "bag_of_words_baseline", "loss")
                ),
                f"{run['train_accuracy']:.3f}",
            ]
            for name, run in found.items()
        ]
        parts.append(table(header, lines, as_markdown=options.markdown))
    return "\n\n".join(parts)


def share(value: float, count: int) -> str:
    """A share with its 95 % interval."""
    from laurel.evaluation.statistics import interval_of_share

    low, high = interval_of_share(round(value * count), count)
    return f"{value:.3f} ({low:.3f} to {high:.3f}) of {count}"


if __name__ == "__main__":
    main()
