"""Steps of GRPO to 90 % accuracy: the outcome as the reward, process rewards, and their advantages.

    python benchmarks/process_rewards.py --seeds 1 2 3

Makes the data by `examples/arithmetic_steps.py --careless`, the policy and the process reward
model by the commands in the head of `recipes/arithmetic_grpo_cpu.yaml`, and then runs that recipe
for each seed and each reward in turn; nothing else differs:

    outcome    the math environment: 1 for the right final answer
    aggregate  the process reward model: the least value of the steps
    per step   the process reward model: an advantage for each token from the steps that follow

Accuracy is that of the final answer, on held-out problems, whatever the reward is: a policy that
games the reward model gains nothing. It is measured every `val_period` steps of the recipe; a run
ends at the first validation with 0.9, or after the recipe's last step. Called again, it goes on
where it was stopped: what is in the folder of `--work` is not made anew, and a folder of other
settings or of other recipes is refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from rounds import machine, table, write_json

from laurel.observe.loggers import read_metrics

ROOT = Path(__file__).parent.parent
LAUREL = (sys.executable, "-m", "laurel.cli.main")
TARGET = 0.9
ACCURACY = "validation/env/math/accuracy"
REWARDS = {
    "outcome": ["data.train.env_name=math", "grpo.adv_estimator.per_step=false"],
    "aggregate": ["grpo.adv_estimator.per_step=false"],
    "per step": [],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a seed gave with one of the rewards."""

    reward: str
    seed: int
    accuracy: dict[int, float]
    """By step."""
    seconds: float

    @property
    def reached(self) -> int | None:
        """The first validated step with the accuracy that is asked for; None if there is none."""
        return next((step for step, one in self.accuracy.items() if one >= TARGET), None)


def main() -> None:
    options = read_options(__doc__, "rewards", REWARDS)
    prepare(options.work)
    runs = train_all(options, options.rewards, train)
    print(report(runs))
    found = {"machine": machine(), "runs": [asdict(run) for run in runs]}
    write_json(options.json, found)


def read_options(
    about: str, kind: str, choices: Iterable[str], default: Iterable[str] | None = None
) -> argparse.Namespace:
    """Read the options of a program that trains for each seed with each of some choices.

    Args:
        about: Its docstring.
        kind: The option that names choices.
        choices: What may be named.
        default: What the program's results are of unless the option is given; None: of all.
    """
    name = Path(sys.argv[0]).stem
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add(f"--{kind}", nargs="+", choices=choices, default=list(default or choices))
    add("--work", type=Path, default=Path("benchmark_results") / name)
    add("--json", type=Path, default=Path("benchmark_results") / f"{name}.json")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of all runs")
    options = parser.parse_args()
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    refuse_other_settings(options.work, options.set)
    return options


def train_all(
    options: argparse.Namespace,
    choices: Sequence[str],
    train: Callable[[str, int, Path, list[str]], Any],
) -> list[Any]:
    """Train for each seed with each choice in turn, and say what came of it."""
    found = []
    for seed, choice in product(options.seeds, choices):
        one = train(choice, seed, options.work, options.set)
        found.append(one)
        print(
            f"  seed {seed}, {choice}: {one.reached or 'not'} "
            f"({max(one.accuracy.values()):.3f} at most, {one.seconds:.0f} s)",
            file=sys.stderr,
        )
    return found


def refuse_other_settings(work: Path, overrides: list[str]) -> None:
    """End the program if the folder has results of other settings, recipes or data."""
    names = ["arithmetic_sft_cpu", "process_reward_cpu", "arithmetic_grpo_cpu"]
    names += ["tools_sft_cpu", "tools_cpu"]
    made_from = [ROOT / "examples/arithmetic_steps.py"]
    made_from += [ROOT / "recipes" / f"{name}.yaml" for name in names]
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in made_from}
    settings = {"set": sorted(overrides), "made_from": digests}
    path = work / "settings.json"
    if path.is_file() and json.loads(path.read_text()) != settings:
        sys.exit(f"{work} has results of other settings or recipes ({path}): give another --work")
    path.write_text(json.dumps(settings, indent=1))


def prepare_policy(work: Path) -> None:
    """Make the data and the policy, unless they are there."""
    program = ROOT / "examples" / "arithmetic_steps.py"
    if not (work / "arithmetic").is_dir():
        call(work, sys.executable, str(program), "arithmetic", "--careless")
    if not (work / "results/arithmetic_sft/step_250").is_dir():
        recipe = str(ROOT / "recipes" / "arithmetic_sft_cpu.yaml")
        call(work, *LAUREL, "sft", "--config", recipe)


def prepare(work: Path) -> None:
    """Make the data, the policy and the process reward model, unless they are there."""
    prepare_policy(work)
    if not (work / "results/arithmetic_prm/step_1200").is_dir():
        call(
            work,
            *LAUREL,
            "rm",
            "--config",
            str(ROOT / "recipes" / "process_reward_cpu.yaml"),
            "policy.model_name=results/arithmetic_sft/step_250",
            "policy.scratch=null",
            "data.train_data_path=arithmetic/graded.jsonl",
            "data.validation.Solutions.data_path=arithmetic/graded_test.jsonl",
            "rm.max_num_steps=1200",
            "checkpointing.checkpoint_dir=results/arithmetic_prm",
        )


def train(reward: str, seed: int, work: Path, overrides: list[str]) -> Run:
    """Run the recipe once."""
    name = f"{reward.replace(' ', '_')}_{seed}"
    done = work / f"{name}.json"
    if done.is_file():
        saved = json.loads(done.read_text())
        accuracy = {int(step): one for step, one in saved["accuracy"].items()}
        return Run(**{**saved, "accuracy": accuracy})
    seconds, lines = run_recipe(work, name, [f"grpo.seed={seed}", *REWARDS[reward], *overrides])
    accuracy = {int(line["step"]): line[ACCURACY] for line in lines if ACCURACY in line}
    run = Run(reward=reward, seed=seed, accuracy=accuracy, seconds=seconds)
    done.write_text(json.dumps(asdict(run)))
    return run


def run_recipe(
    work: Path, name: str, overrides: Sequence[str], recipe: str = "arithmetic_grpo_cpu"
) -> tuple[float, list[dict[str, Any]]]:
    """Run a recipe with some settings; return the seconds and the lines of metrics."""
    started = time.monotonic()
    call(
        work,
        *LAUREL,
        "grpo",
        "--config",
        str(ROOT / "recipes" / f"{recipe}.yaml"),
        *(f"checkpointing.checkpoint_dir=results/{name}", f"logger.log_dir=logs/{name}"),
        "checkpointing.enabled=false",
        *overrides,
    )
    seconds = time.monotonic() - started
    newest = max((work / "logs" / name).glob("exp_*"))
    return seconds, read_metrics(newest / "metrics.jsonl")


def call(work: Path, *command: str) -> None:
    path = work / "output.log"
    print(f"  {shlex.join(command[1:])} > {path}", file=sys.stderr)
    with path.open("ab") as log:
        done = subprocess.run(command, cwd=work, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        last = path.read_text().strip().rpartition("\n")[2]
        sys.exit(f"exit code {done.returncode}, and {path} ends: {last}")


def report(runs: list[Run]) -> str:
    rows = []
    for reward in REWARDS:
        own = [run for run in runs if run.reward == reward]
        if not own:
            continue
        reached = [run.reached for run in own if run.reached is not None]
        whole = len(reached) == len(own)
        last = [list(run.accuracy.values())[-1] for run in own]
        rows.append(
            [
                reward,
                ", ".join(str(run.reached or f"> {max(run.accuracy)}") for run in own),
                f"{statistics.mean(reached):.1f}" if whole else "",
                f"{statistics.mean(run.accuracy[0] for run in own):.3f}",
                f"{statistics.mean(last):.3f}",
                f"{statistics.mean(run.seconds for run in own):.0f}",
            ]
        )
    heads = [
        "reward",
        f"steps to {TARGET:.0%}, by seed",
        "mean",
        "accuracy at the start",
        "at the end",
        "seconds",
    ]
    return table(heads, rows, as_markdown=False)


if __name__ == "__main__":
    main()
