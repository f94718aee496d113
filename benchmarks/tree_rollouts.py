"""Drawn tokens of GRPO to an accuracy: completions that branch (`grpo.tree`), beside chains.

    python benchmarks/tree_rollouts.py --seeds 1 2 3
    python benchmarks/tree_rollouts.py --seeds 1 2 3 --ways tools-chain tools-turn

Makes the data by `examples/arithmetic_steps.py --careless` and the policy by
`recipes/arithmetic_sft_cpu.yaml`, and then runs `recipes/arithmetic_grpo_cpu.yaml` for each seed
and each way of drawing in turn, with 1 for the right final answer as the reward:

    chain       8 completions of a prompt, each drawn from the prompt on
    completion  6, and 4 that continue a beginning (up to the end of a step) of one of them; the
                advantage is that of Tree-GRPO
    segment     the same, and the advantages of segments from Monte-Carlo values

Those with `tools` run `recipes/tools_cpu.yaml`, where the policy of `recipes/tools_sft_cpu.yaml`
learns to call a calculator:

    tools-chain 8 conversations of a prompt
    tools-turn  6, and 6 that continue one of them after a call was answered (Tree-GRPO)

All draw about as many tokens in a step. Accuracy is that of the final answer on held-out problems,
measured every 5 steps (tools: 2); a run ends at the first validation with 0.8 (tools: 0.6), or
after 100 steps (tools: 20). Called again, it goes on where it was stopped: what is in the folder of
`--work` is not made anew, and a folder of other settings or of other recipes is refused.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from process_rewards import (
    ACCURACY,
    LAUREL,
    ROOT,
    call,
    prepare_policy,
    read_options,
    run_recipe,
    train_all,
)
from rounds import machine, table, write_json

CREDIT = "grpo.adv_estimator.tree.credit"
SUMS_TREE = (
    "grpo.adv_estimator.name=tree",
    'grpo.tree={branches: 4, rounds: 1, segment: "\\n\\n"}',
    "grpo.num_generations_per_prompt=10",
    "policy.train_global_batch_size=80",
)
TOOLS_TREE = (
    "grpo.adv_estimator.name=tree",
    "grpo.tree={branches: 6, rounds: 1}",
    "grpo.num_generations_per_prompt=12",
    "policy.train_global_batch_size=192",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is learned."""

    recipe: str
    metric: str
    target: float
    num_steps: int
    prepare: Callable[[Path], None]
    settings: tuple[str, ...]


def teach_calls(work: Path) -> None:
    """Make the policy that calls now and then, unless it is there."""
    if not (work / "results/tools_sft/best").exists():
        call(work, *LAUREL, "sft", "--config", str(ROOT / "recipes" / "tools_sft_cpu.yaml"))


SUMS = Task(
    recipe="arithmetic_grpo_cpu",
    metric=ACCURACY,
    target=0.8,
    num_steps=100,
    prepare=prepare_policy,
    settings=(
        "data.train.env_name=math",
        "env.reward_model.enabled=false",
        "grpo.adv_estimator.per_step=false",
    ),
)
TOOLS = Task(
    recipe="tools_cpu",
    metric="validation/accuracy",
    target=0.6,
    num_steps=20,
    prepare=teach_calls,
    settings=("grpo.val_period=2", "grpo.stop_at_validation_metric=val:accuracy"),
)
WAYS: dict[str, tuple[Task, tuple[str, ...]]] = {
    "chain": (SUMS, ()),
    "completion": (SUMS, (*SUMS_TREE, f"{CREDIT}=completion")),
    "segment": (SUMS, (*SUMS_TREE, f"{CREDIT}=segment")),
    "tools-chain": (TOOLS, ()),
    "tools-turn": (TOOLS, (*TOOLS_TREE, f"{CREDIT}=completion")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a seed gave with one way of drawing."""

    way: str
    seed: int
    accuracy: dict[int, float]
    """By step."""
    drawn: dict[int, float]
    """Tokens that were drawn up to each of these steps."""
    answered: dict[int, float]
    """Turns that the environment answered up to then, such as calls."""
    shared: float
    """Share of the completions' tokens that were not drawn, but taken over from another."""
    seconds: float

    @property
    def reached(self) -> int | None:
        """The first validated step with the accuracy that is asked for."""
        target = WAYS[self.way][0].target
        return next((step for step, one in self.accuracy.items() if one >= target), None)


def main() -> None:
    options = read_options(__doc__, "ways", WAYS, default=["chain", "completion", "segment"])
    for task in (SUMS, TOOLS):
        if any(WAYS[way][0] is task for way in options.ways):
            task.prepare(options.work)
    trials = train_all(options, options.ways, train)
    print(report(trials))
    found = {"machine": machine(), "trials": [asdict(trial) for trial in trials]}
    write_json(options.json, found)


def train(way: str, seed: int, work: Path, overrides: list[str]) -> Trial:
    """Run the recipe once."""
    name = f"{way}_{seed}"
    done = work / f"{name}.json"
    if done.is_file():
        saved = json.loads(done.read_text())
        for key in ("accuracy", "drawn", "answered"):
            saved[key] = {int(step): value for step, value in saved[key].items()}
        return Trial(**saved)
    task, own = WAYS[way]
    settings = [f"grpo.seed={seed}", f"grpo.max_num_steps={task.num_steps}"]
    settings += [f"grpo.stop_at_validation_threshold={task.target}"]
    seconds, lines = run_recipe(
        work, name, [*settings, *task.settings, *own, *overrides], task.recipe
    )
    accuracy, drawn, answered = dict[int, float](), dict[int, float](), dict[int, float]()
    tokens, calls, lengths = 0.0, 0.0, 0.0
    for line in lines:
        if "train/mean_gen_tokens_per_sample" in line:
            turns = line["train/total_turns"]
            completions = turns / line["train/avg_turns_per_sample"]
            written = line["train/mean_gen_tokens_per_sample"] * completions
            tokens += line.get("train/tree/sampled_tokens", written)
            calls += line.get("train/tree/sampled_turns", turns) - completions
            lengths += written
        if task.metric in line:
            step = int(line["step"])
            accuracy[step], drawn[step], answered[step] = line[task.metric], tokens, calls
    trial = Trial(
        way=way,
        seed=seed,
        accuracy=accuracy,
        drawn=drawn,
        answered=answered,
        shared=1.0 - tokens / lengths,
        seconds=seconds,
    )
    done.write_text(json.dumps(asdict(trial)))
    return trial


def report(trials: list[Trial]) -> str:
    rows = []
    for way, (task, _) in WAYS.items():
        own = [trial for trial in trials if trial.way == way]
        if not own:
            continue
        base = next(name for name, (same, _) in WAYS.items() if same is task)
        chains = {trial.seed: trial for trial in trials if trial.way == base}
        fewer = [
            chains[trial.seed].drawn[chains[trial.seed].reached] / trial.drawn[trial.reached]
            for trial in own
            if trial.reached and trial.seed in chains and chains[trial.seed].reached
        ]
        reached = [
            f"{trial.drawn[trial.reached] / 1000:.1f}k, {trial.answered[trial.reached]:.0f}"
            if trial.reached
            else "not"
            for trial in own
        ]
        rows.append(
            [
                way,
                f"{task.target:.0%}",
                "; ".join(reached),
                f"{statistics.geometric_mean(fewer):.2f}" if len(fewer) == len(own) else "",
                f"{statistics.mean(trial.shared for trial in own):.2f}",
                ", ".join(f"{max(trial.accuracy.values()):.2f}" for trial in own),
                f"{statistics.mean(trial.seconds for trial in own):.0f}",
            ]
        )
    heads = [
        "drawn as",
        "accuracy",
        "tokens drawn to it, turns answered, by seed",
        "times fewer tokens than chains",
        "shared",
        "best accuracy",
        "seconds",
    ]
    return table(heads, rows, as_markdown=False)


if __name__ == "__main__":
    main()
