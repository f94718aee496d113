"""Drawn tokens of GRPO to 80 % accuracy: completions that branch (`grpo.tree`), beside chains.

    python benchmarks/tree_rollouts.py --seeds 1 2 3

Makes the data by `examples/arithmetic_steps.py --careless` and the policy by
`recipes/arithmetic_sft_cpu.yaml`, and then runs `recipes/arithmetic_grpo_cpu.yaml` for each seed
and each way of drawing in turn, with 1 for the right final answer as the reward:

    chain       8 completions of a prompt, each drawn from the prompt on
    completion  6, and 4 that continue a beginning (up to the end of a step) of one of them; the
                advantage is that of Tree-GRPO
    segment     the same, and the advantages of segments from Monte-Carlo values

All draw about as many tokens in a step. Accuracy is that of the final answer on held-out problems,
measured every 5 steps; a run ends at the first validation with 0.8, or after 100 steps. Called
again, it goes on where it was stopped: what is in the folder of `--work` is not made anew, and a
folder of other settings or of other recipes is refused.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from process_rewards import ACCURACY, prepare_policy, read_options, run_recipe, train_all
from rounds import machine, table, write_json

TARGET = 0.8
NUM_STEPS = 100
TREE = (
    'grpo.tree={initial: 6, branches: 4, rounds: 1, separator: "\\n\\n"}',
    "grpo.num_generations_per_prompt=10",
    "policy.train_global_batch_size=80",
    "grpo.adv_estimator.name=tree",
)
WAYS = {
    "chain": (),
    "completion": (*TREE, "grpo.adv_estimator.tree.credit=completion"),
    "segment": (*TREE, "grpo.adv_estimator.tree.credit=segment"),
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
    shared: float
    """Share of the completions' tokens that were not drawn, but taken over from another."""
    seconds: float

    @property
    def reached(self) -> float | None:
        """The tokens drawn up to the first validation with the accuracy that is asked for."""
        return next(
            (self.drawn[step] for step, one in self.accuracy.items() if one >= TARGET), None
        )


def main() -> None:
    options = read_options(__doc__, "ways", WAYS)
    prepare_policy(options.work)
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
        for key in ("accuracy", "drawn"):
            saved[key] = {int(step): value for step, value in saved[key].items()}
        return Trial(**saved)
    settings = [f"grpo.seed={seed}", f"grpo.max_num_steps={NUM_STEPS}"]
    settings += [f"grpo.stop_at_validation_threshold={TARGET}"]
    settings += ["data.train.env_name=math", "env.reward_model.enabled=false"]
    settings += ["grpo.adv_estimator.per_step=false", *WAYS[way], *overrides]
    seconds, lines = run_recipe(work, name, settings)
    accuracy, drawn, total, lengths = dict[int, float](), dict[int, float](), 0.0, 0.0
    for line in lines:
        if "train/mean_gen_tokens_per_sample" in line:
            # With one turn each, turns are completions.
            written = line["train/mean_gen_tokens_per_sample"] * line["train/total_turns"]
            total += line.get("train/tree/sampled_tokens", written)
            lengths += written
        if ACCURACY in line:
            accuracy[int(line["step"])], drawn[int(line["step"])] = line[ACCURACY], total
    shared = 1.0 - total / lengths
    trial = Trial(
        way=way, seed=seed, accuracy=accuracy, drawn=drawn, shared=shared, seconds=seconds
    )
    done.write_text(json.dumps(asdict(trial)))
    return trial


def report(trials: list[Trial]) -> str:
    rows = []
    base = {trial.seed: trial.reached for trial in trials if trial.way == "chain"}
    for way in WAYS:
        own = [trial for trial in trials if trial.way == way]
        if not own:
            continue
        fewer = [
            base[trial.seed] / trial.reached  # type: ignore[operator]
            for trial in own
            if trial.reached and base.get(trial.seed)
        ]
        rows.append(
            [
                way,
                ", ".join(
                    f"{trial.reached / 1000:.0f}k" if trial.reached else "not" for trial in own
                ),
                f"{statistics.geometric_mean(fewer):.2f}" if len(fewer) == len(own) else "",
                f"{statistics.mean(trial.shared for trial in own):.2f}",
                ", ".join(f"{max(trial.accuracy.values()):.2f}" for trial in own),
                f"{statistics.mean(trial.seconds for trial in own):.0f}",
            ]
        )
    heads = [
        "drawn as",
        f"tokens drawn to {TARGET:.0%}, by seed",
        "times fewer than chains",
        "shared",
        "best accuracy",
        "seconds",
    ]
    return table(heads, rows, as_markdown=False)


if __name__ == "__main__":
    main()
