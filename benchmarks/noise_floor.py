"""How large is the noise of a reward model's scores, and what becomes of it in an advantage?

    python benchmarks/noise_floor.py

A small reward model learns errands (the demo's data). Its noise is measured in each precision, by
what `RewardModelEnvironment.noise_floor` reports. Then three groups of eight get advantages,
without the noise floor and with it:

- one answer, judged eight times in different company, as answers come while others are under way;
- eight answers out of thousands that float64 finds most nearly equal: in bfloat16 they differ by
  rounding, which is nothing to learn from;
- good and bad answers.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from rich.console import Console
from rounds import machine, table, write_json

from laurel.config.grpo import GRPOConfig
from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.demo.data import errands
from laurel.environments.reward_model_environment import RewardModelEnvironment, measure_noise
from laurel.grpo.advantages import compute_advantages, resolve
from laurel.rewards.scorer import LocalScorer
from laurel.run.reward_model import train_reward_model
from laurel.types import Message, group_of

GROUP = 8
PROMPT, THING, PLACE = "Please bring me the kettle from the cellar.", "kettle", "cellar"
OPENINGS = ("", "Sure. ", "Of course. ", "With pleasure. ", "Done. ", "Yes. ", "Gladly. ", "Well. ")
ANSWERS = (
    f"Here is the {THING} from the {PLACE}.",
    f"I went to the {PLACE} and got the {THING}.",
    f"The {THING} was in the {PLACE}; here it is.",
    f"From the {PLACE}: the {THING}.",
)
ENDINGS = (
    "",
    " Thanks!",
    " Here you are.",
    " Enjoy it.",
    " Anything else?",
    " It was heavy.",
    " I hope it helps.",
    " See you.",
)
GOOD_AND_BAD = (
    f"Here is the {THING} from the {PLACE}.",
    "Here is the fiddle from the barn.",
    f"I went to the {PLACE} and got the {THING}.",
    f"Get the {THING} yourself.",
    f"Here is the {THING} from the garden.",
    f"The {THING} was in the {PLACE}; here it is.",
    f"I do not feel like going to the {PLACE}.",
    "Here is the drum from the attic.",
)

SETTINGS = (
    "policy.model_name=null",
    "policy.scratch.hidden_size=64",
    "policy.scratch.num_layers=2",
    "policy.scratch.vocab_size=600",
    "policy.precision=float32",
    "policy.max_total_sequence_length=256",
    "policy.train_micro_batch_size=16",
    "policy.train_global_batch_size=64",
    "policy.optimizer.kwargs.lr=3e-3",
    "policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, "
    "total_iters: 50}}, {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 1.0, "
    "end_factor: 0.02, total_iters: 650}}, {milestones: [50]}]",
    "rm.max_num_epochs=10",
    "cluster.cpu_threads=1",
    "rm.val_period=0",
    "checkpointing.save_period=350",
    "checkpointing.metric_name=null",
    "checkpointing.keep_top_k=1",
    "logger.num_val_samples_to_print=0",
)
"""A small reward model of errands, from scratch."""


def main() -> None:
    options = read_options()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        model = train(Path(directory), options.steps)
        results = [measure(model, precision) for precision in ("float32", "bfloat16")]
    print("\nThe noise of the scores, as standard deviations\n")
    columns = ("precision", "in other company", "rounding", "noise floor")
    rows = [
        [r["precision"], *(f"{r[k]:.1e}" for k in ("company", "rounding", "floor"))]
        for r in results
    ]
    print(table(columns, rows, as_markdown=options.markdown))
    print(f"\nGroups of {GROUP}\n")
    columns = (
        "precision",
        "group",
        "spread of exact scores",
        "spread of scores",
        "largest advantage",
        "with the floor",
    )
    rows = [
        [
            r["precision"],
            group["name"],
            f"{group['exact']:.1e}",
            f"{group['spread']:.1e}",
            f"{group['plain']:.3f}",
            f"{group['guarded']:.3f}",
        ]
        for r in results
        for group in r["groups"]
    ]
    print(table(columns, rows, as_markdown=options.markdown))
    write_json(options.json, {"machine": machine(), "options": vars(options), "rows": results})


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The noise of reward-model scores")
    parser.add_argument("--steps", type=int, default=300, help="training steps of the model")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("benchmark_results/noise_floor.json"))
    return parser.parse_args()


def train(directory: Path, steps: int) -> str:
    """A reward model of the demo's kind; where it lies."""
    rows = directory / "train.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for row in errands(20_000, seed=0):
            file.write(json.dumps(row) + "\n")
    overrides = [
        *SETTINGS,
        f"rm.max_num_steps={steps}",
        "data.dataset_name=BinaryPreferenceDataset",
        f"data.train_data_path={rows}",
        f"checkpointing.checkpoint_dir={directory / 'saves'}",
        f"logger.log_dir={directory / 'logs'}",
        "logger.tensorboard_enabled=false",
    ]
    config = load_config(RewardTrainingRun, None, overrides).config
    print(f"training a reward model for {steps} steps", file=sys.stderr)
    train_reward_model(config, console=Console(file=StringIO()))
    return str(directory / "saves")


def measure(model: str, precision: str) -> dict[str, Any]:
    """All figures of one precision."""
    settings = {"model_name": model, "precision": precision}
    with RewardModelEnvironment(settings, device="cpu") as environment:
        scorer = environment._open()
        assert isinstance(scorer, LocalScorer)
        exact = reference(scorer)
        parts = itertools.product(OPENINGS, ANSWERS, ENDINGS, ENDINGS)
        texts = ["".join(chosen) for chosen in parts]
        values, true = scores(scorer, texts), scores(exact, texts)
        equals = closest(true, GROUP)
        company = [scores(scorer, [texts[0], *texts[9 : 9 + 3 * k]])[0] for k in range(GROUP)]
        floor = environment.noise_floor()
        groups = [
            ("one answer, eight times", [true[0]] * GROUP, company),
            ("nearly equal answers", [true[i] for i in equals], [values[i] for i in equals]),
            ("good and bad", scores(exact, GOOD_AND_BAD), scores(scorer, GOOD_AND_BAD)),
        ]
        return {
            "precision": precision,
            "company": measure_noise(scorer.score_now, environment.noise_groups()),
            "rounding": statistics.stdev(a - b for a, b in zip(values, true, strict=True)),
            "floor": floor,
            "groups": [
                {
                    "name": name,
                    "exact": statistics.stdev(exact_values),
                    "spread": statistics.stdev(found),
                    "plain": largest_advantage(found, 0.0),
                    "guarded": largest_advantage(found, floor),
                }
                for name, exact_values, found in groups
            ],
        }


def reference(scorer: LocalScorer) -> LocalScorer:
    """The same weights in float64, computed by a model of its own."""
    model = copy.deepcopy(scorer.model).double()
    model.precision = torch.float64
    return LocalScorer(model, scorer.contract)


def closest(values: Sequence[float], count: int) -> list[int]:
    """So many that lie closest together."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    windows = [order[start : start + count] for start in range(len(order) - count + 1)]
    return min(windows, key=lambda window: values[window[-1]] - values[window[0]])


def scores(scorer: LocalScorer, answers: Sequence[str]) -> list[float]:
    group = group_of((Message("user", PROMPT),), answers, group_id="one")
    (scores_G,) = scorer.score_now([group])
    return [float("nan") if score.value is None else score.value for score in scores_G]


def largest_advantage(rewards: Sequence[float], noise: float) -> float:
    config = GRPOConfig.model_validate({"adv_estimator": {"use_leave_one_out_baseline": False}})
    (values_G,) = compute_advantages([rewards], resolve(config), noise=noise).values_BG
    return float(abs(values_G).max())


if __name__ == "__main__":
    main()
