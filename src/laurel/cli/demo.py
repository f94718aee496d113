"""`laurel demo`: the main job on data made here, from nothing to a scored conversation."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from laurel.cli.assemble import train_reward_model
from laurel.config.load import load_config, to_yaml
from laurel.config.reward_training import RewardTrainingRun
from laurel.data.synthetic import errands
from laurel.errors import CheckpointError, TrainingError
from laurel.observe.console import make_console, print_metrics, print_scores
from laurel.types import Group, Message, group_of

if TYPE_CHECKING:
    from rich.console import Console

NUM_TRAIN, NUM_HELD_OUT = 40_000, 400
REQUIRED_ACCURACY = 0.95

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
    "cluster.cpu_threads=1",  # a second thread brings a model this small nothing, and can stall it
    "rm.max_num_steps=700",
    "rm.val_period=100",
    "checkpointing.save_period=350",
    "checkpointing.metric_name=null",  # the last one: choosing by the held-out set would flatter it
    "checkpointing.keep_top_k=1",
    "logger.num_val_samples_to_print=0",
)
"""The demo's configuration, in the form of the command line."""

CONVERSATIONS = (
    (
        "Please bring me the kettle from the cellar.",
        (
            "Here is the kettle from the cellar.",
            "Here is the kettle from the barn.",
            "Here is the fiddle from the cellar.",
            "Get the kettle yourself.",
        ),
    ),
    (
        "I need the ladder; it is in the garden.",
        (
            "I went to the garden and got the ladder.",
            "I went to the library and got the ladder.",
            "I do not feel like going to the garden.",
        ),
    ),
)
"""Prompts that are in no training row, each with a good answer first."""


def run_demo(directory: Path) -> None:
    """Make data and a model, train, evaluate, save, reload and score.

    Raises:
        CheckpointError: The directory holds something that is not a demo.
        TrainingError: The model did not learn.
    """
    console = make_console()
    started = time.monotonic()
    _prepare(directory)
    data = _write_data(directory)
    console.rule("1. Data")
    console.print(
        f"{NUM_TRAIN:,} errands, each with a good and a bad answer, and {NUM_HELD_OUT} whose "
        "prompts are in no training row"
    )
    overrides = [
        *SETTINGS,
        "data.dataset_name=BinaryPreferenceDataset",
        f"data.train_data_path={data['train']}",
        f"data.val_data_paths={{held-out: {json.dumps(str(data['held-out']))}}}",
        f"checkpointing.checkpoint_dir={directory / 'checkpoints'}",
        f"logger.log_dir={directory / 'logs'}",
    ]
    config = load_config(RewardTrainingRun, None, overrides).config
    (directory / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    console.rule("2. Training a Bradley-Terry reward model")
    outcome = train_reward_model(config, console=console)
    if outcome.ended != "finished" or outcome.latest is None:
        console.print("stopped before the end; run `laurel demo` again to start over")
        raise SystemExit(130)
    console.rule("3. Held-out pairs")
    print_metrics(console, "validation-held-out, last step", outcome.metrics)
    console.rule("4. Saved, loaded again, and asked")
    accuracy = _ask(outcome.latest, data["held-out"], console)
    console.rule("Done")
    console.print(f"held-out accuracy of the reloaded model: {accuracy:.1%}")
    console.print(f"everything took {time.monotonic() - started:.0f} s and lies in {directory}:")
    for path, what in (
        ("config.yaml", "the whole configuration; laurel rm --config it runs this again"),
        ("data", "the preference pairs"),
        (outcome.latest.relative_to(directory), "the reward model, a Hugging Face directory"),
        ("logs", "metrics.jsonl and TensorBoard events"),
    ):
        console.print(f"  {directory / path!s:44} {what}", soft_wrap=True)
    console.print(f"score your own: laurel score --model {outcome.latest} FILE", soft_wrap=True)
    if accuracy < REQUIRED_ACCURACY:
        raise TrainingError(
            f"the demo's reward model reached {accuracy:.1%} on held-out pairs and should reach "
            f"{REQUIRED_ACCURACY:.0%}; please report this with your `laurel doctor`"
        )


def _prepare(directory: Path) -> None:
    """An empty directory; what an earlier demo left is deleted."""
    import shutil

    marker = directory / ".laurel-demo"
    if directory.exists() and not marker.exists() and any(directory.iterdir()):
        raise CheckpointError(
            f"{directory} exists and no demo made it; choose another with --directory"
        )
    if marker.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _write_data(directory: Path) -> dict[str, Path]:
    paths = {name: directory / "data" / f"{name}.jsonl" for name in ("train", "held-out")}
    (directory / "data").mkdir()
    for name, count in (("train", NUM_TRAIN), ("held-out", NUM_HELD_OUT)):
        with paths[name].open("w", encoding="utf-8") as file:
            for row in errands(count, seed=0, held_out=name == "held-out"):
                file.write(json.dumps(row) + "\n")
    return paths


def _ask(checkpoint: Path, held_out: Path, console: Console) -> float:
    """Load the model from its directory, score conversations, and return its accuracy."""
    from laurel.cli.load_scorer import open_scorer

    scorer = open_scorer(str(checkpoint), say=lambda text: console.print(text, soft_wrap=True))
    groups = [
        group_of((Message("user", prompt),), answers, group_id=str(index))
        for index, (prompt, answers) in enumerate(CONVERSATIONS)
    ]
    scores = scorer.score_now(groups)
    print_scores(
        console,
        [
            (group.conversation(index), score)
            for group, scores_G in zip(groups, scores, strict=True)
            for index, score in enumerate(scores_G)
        ],
    )
    return _accuracy(scorer.score_now(_pairs(held_out)))


def _pairs(path: Path) -> list[Group]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        group_of(
            (Message("user", row["prompt"]),), (row["chosen"], row["rejected"]), group_id=str(i)
        )
        for i, row in enumerate(rows)
    ]


def _accuracy(scores_BG: Sequence[Sequence[object]]) -> float:
    values = [[getattr(score, "value", None) for score in scores_G] for scores_G in scores_BG]
    right = sum(
        1 for better, worse in values if better is not None and worse is not None and better > worse
    )
    return right / len(values)
