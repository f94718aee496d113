"""What the demo promises besides its numbers: it takes no foreign directory, says what it missed.

That it learns is shown by `make demo` itself, which fails where it does not.
"""

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.sft import SFTRun
from laurel.errors import CheckpointError
from laurel.extensions.demo.demo import (
    DemoResult,
    Files,
    _conclude,
    grpo_run,
    measuring_run,
    rm_run,
    run_demo,
    sft_run,
    write_demo_data,
)
from laurel.training.loop import RunOutcome


def test_a_directory_that_no_demo_made_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work", encoding="utf-8")
    with pytest.raises(CheckpointError, match="no demo made it"):
        run_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_policy_is_rewarded_by_the_reward_model_and_measured_by_the_truth(tmp_path):
    files = Files(tmp_path / "a: b, [c]")
    files.directory.mkdir()
    policy, reward_model = files.directory / "policy", files.directory / "reward"
    run = grpo_run(files, 7, policy, reward_model)
    (train,), (validation,) = run.data.train_sets(), run.data.validation_sets()
    assert (train.env_name, validation.env_name) == ("reward_model", "math")
    assert validation.data_path == str(files.data("held-out-tasks"))
    assert run.env.reward_model.model_name == str(reward_model)
    assert run.policy.model_name == str(policy)
    assert run.grpo.seed == 7
    assert rm_run(files, 7, policy).policy.model_name == str(policy)
    assert sft_run(files, 7).policy.model_name is None
    again = load_config(GRPORun, files.config("grpo"), [])
    assert (again.config, again.warnings) == (run, ())
    measuring = measuring_run(files, 7, policy)
    assert measuring.policy.generation.temperature == 1.0
    assert {s.env_name for s in measuring.data.validation_sets()} == {"math"}


@pytest.mark.parametrize(
    ("before", "after", "accuracy", "missed"),
    [
        (0.5, 0.95, 0.99, []),
        (0.6, 0.9, 0.95, []),
        (0.61, 0.95, 0.99, ["the warm-up reached 61.0%"]),
        (0.5, 0.89, 0.94, ["the reward model is right on 94.0%", "GRPO reached 89.0%"]),
    ],
)
def test_what_was_missed(before, after, accuracy, missed):
    result = DemoResult(rate_before=before, rate_after=after, reward_accuracy=accuracy)
    said = result.missed()
    assert len(said) == len(missed)
    assert all(text.startswith(start) for text, start in zip(said, missed, strict=True))


def test_data_alone_comes_with_configurations_that_follow_one_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_demo_data(Path("demo"))
    files = Files(Path("demo"))
    rm = load_config(RewardTrainingRun, files.config("rm"), []).config
    grpo = load_config(GRPORun, files.config("grpo"), []).config
    sft = load_config(SFTRun, files.config("sft"), []).config
    assert Path(rm.policy.model_name or "") == (
        Path(sft.checkpointing.checkpoint_dir) / f"step_{sft.sft.max_num_steps}"
    )
    assert Path(grpo.env.reward_model.model_name or "") == (
        Path(rm.checkpointing.checkpoint_dir) / f"step_{rm.rm.max_num_steps}"
    )
    for run in (sft, rm, grpo):
        for data_set in run.data.train_sets():
            assert Path(data_set.data_path or "").stat().st_size > 0


def test_data_alone_leaves_what_runs_have_saved(tmp_path):
    write_demo_data(tmp_path / "demo")
    saved = tmp_path / "demo" / "checkpoints" / "rm"
    saved.mkdir(parents=True)
    write_demo_data(tmp_path / "demo")
    assert saved.is_dir()
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(CheckpointError, match="no demo made it"):
        write_demo_data(tmp_path)


def test_the_end_is_ten_lines_with_baselines_and_what_to_look_at(tmp_path):
    (tmp_path / "config.json").write_text('{"grpo": {}}', encoding="utf-8")
    rewards = [
        {"step": step, "train/reward": 1.0, "train/grad_norm": math.nan if step > 5 else 1.0}
        for step in range(1, 9)
    ]
    lines = "".join(json.dumps(one) + "\n" for one in rewards)
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    figures = {
        "accuracy": 0.98,
        "num_valid_samples": 400.0,
        "longer_wins_baseline": 0.5,
        "bag_of_words_baseline": 0.52,
    }
    rewarding = RunOutcome(
        step=1,
        ended="finished",
        metrics={f"validation-held-out/{name}": value for name, value in figures.items()},
    )
    measured: Any = SimpleNamespace(success_rate=0.5, groups=[SimpleNamespace(rollouts_G=[0, 0])])
    stream = io.StringIO()
    _conclude(
        Console(file=stream, width=80),
        Files(Path("demo")),
        policy=Path("p"),
        reward_model=Path("r m"),
        rewarding=rewarding,
        rates=(measured, measured),
        seconds=9.0,
        learning=RunOutcome(step=1, ended="finished", run_dir=tmp_path),
    )
    told = stream.getvalue()
    assert len(told.splitlines()) <= 10
    said = " ".join(told.split())
    assert "accuracy 0.9800 of 400 pairs (longer answer 0.5000, bag of words 0.5200)" in said
    assert "true success before GRPO: 50.0% of 2 answers to 1 held-out prompts" in told
    assert "GRPO, look: " in told or "GRPO, problem: " in told
    assert "next    laurel score --model 'r m' demo/data/held-out-preferences.jsonl\n" in told
