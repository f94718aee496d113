"""Alarms of `laurel grpo`: what is told and written, how they end a run; that they only look."""

import json
import shutil

import pytest

from laurel.observe import rules
from policy_runs import MATCHES, completions_of, grpo, grpo_settings, metrics_of
from runs import manifest_hashes

NO_VALIDATION = ("grpo.val_period=0", "grpo.val_at_end=false")
RARELY_SAVED = "checkpointing.save_period=100"
WORTHLESS = (
    "data.env_name=matches",
    "+env.custom.matches={name: policy_fakes.Matches, kwargs: {reward: 0.0}}",
)
"""All rewards are equal, so that `zero_spread_groups` rises with the first whole window."""
NERVOUS = (
    "grpo.health.baseline_steps=3",
    "grpo.health.window=1",
    "grpo.health.num_spreads=0",
)
"""With low thresholds, what any run does raises and ends alarms."""


@pytest.fixture
def low_thresholds(monkeypatch):
    for name, value in {
        "LENGTH_FACTOR": 1.01,
        "SHARE_RISE": 0.001,
        "LEAST_CORRELATION": 0.01,
        "KL_LEAST": 0.0,
    }.items():
        monkeypatch.setattr(rules, name, value)


def entries(directory):
    path = directory / "logs" / "exp_001" / "health.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_an_alarm_is_told_written_and_ends_the_run(tmp_path, model):
    changes = [*WORTHLESS, RARELY_SAVED, "grpo.val_period=0", "grpo.health.window=2"]
    changes.append("grpo.health.ignore=[no_updates]")
    stopping = [*changes, "grpo.health.stop_on=[zero_spread_groups]"]
    done = grpo(grpo_settings(tmp_path, model, *stopping))
    assert (done.outcome.ended, done.outcome.step) == ("alarm", 2)
    assert done.outcome.latest == tmp_path / "saves" / "step_2"
    assert "step 2  alarm raised: zero_spread_groups" in done.text
    assert "what people do: if all are right, use harder tasks" in done.text
    assert "step 2 is the last: ended by an alarm: zero_spread_groups" in done.text
    (entry,) = entries(tmp_path)
    assert set(entry) == {
        "step",
        "alarm",
        "state",
        "metric",
        "value",
        "threshold",
        "baseline",
        "text",
        "advice",
        "samples",
    }
    assert (entry["step"], entry["alarm"], entry["state"]) == (2, "zero_spread_groups", "raised")
    assert entry["metric"] == "train/frac_reward_zero_std"
    assert (entry["value"], entry["threshold"], entry["baseline"]) == (1.0, 0.9, None)
    written = {(row["prompt"], row["completion"]) for row in completions_of(tmp_path, 2)}
    assert len({sample["prompt"] for sample in entry["samples"]}) == 3, "three prompts"
    assert {(one["prompt"], one["completion"]) for one in entry["samples"]} <= written
    assert all(sample["reward"] == 0.0 for sample in entry["samples"])
    figures = metrics_of(tmp_path)
    assert "health/zero_spread_groups" not in figures[1], "not yet a whole window"
    assert figures[2]["health/zero_spread_groups"] == 1.0
    assert "validation/reward_mean" in figures[2], "val_at_end"

    again = grpo(grpo_settings(tmp_path, model, *stopping))
    assert (again.outcome.ended, again.outcome.step) == ("alarm", 2)
    on = grpo(grpo_settings(tmp_path, model, *changes))
    assert (on.outcome.ended, on.outcome.step) == ("finished", 4)
    assert entries(tmp_path) == [entry], "it stays raised"


@pytest.mark.slow
def test_a_resumed_run_gives_the_alarms_of_an_unbroken_one(tmp_path, model, low_thresholds):
    """What was written after the checkpoint that the run goes on from is written again, once."""
    changes = [*MATCHES, *NO_VALIDATION, *NERVOUS, "loss_fn.reference_policy_kl_penalty=0.01"]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    six = [*changes, "grpo.max_num_steps=6"]
    grpo(grpo_settings(straight, model, *six))
    grpo(grpo_settings(broken, model, *changes, "grpo.max_num_steps=5"))
    shutil.rmtree(broken / "saves" / "step_5")
    text = grpo(grpo_settings(broken, model, *six)).text
    assert "after step 4" in text
    found = entries(straight)
    assert entries(broken) == found
    assert metrics_of(broken) == metrics_of(straight)
    assert {entry["step"] for entry in found} & {5, 6}, "something happens after the checkpoint"
    assert {entry["step"] for entry in found} & {4}, "and before it"
    saved = [manifest_hashes(d / "saves" / "step_6") for d in (straight, broken)]
    assert saved[0] == saved[1]


@pytest.mark.slow
def test_alarms_change_nothing_that_is_learned(tmp_path, model, low_thresholds):
    changes = [*MATCHES, "grpo.max_num_steps=4", RARELY_SAVED]
    watched, alone = tmp_path / "watched", tmp_path / "alone"
    grpo(grpo_settings(watched, model, *changes, *NERVOUS))
    grpo(grpo_settings(alone, model, *changes, "grpo.health.enabled=false"))
    assert entries(watched)
    assert entries(alone) == []
    extra = {
        "train/completions/repetition",
        "train/completions/reward_length_correlation",
        "train/completions/failure_share",
    }
    expected = metrics_of(alone)
    for step, figures in metrics_of(watched).items():
        more = {name for name in figures if name not in expected[step]}
        assert all(name in extra or name.startswith("health/") for name in more)
        assert {k: v for k, v in figures.items() if k not in more} == expected[step]
    weights = [
        manifest_hashes(directory / "saves" / "step_4")["model.safetensors"]
        for directory in (watched, alone)
    ]
    assert weights[0] == weights[1]


GOLD = (
    "data.env_name=both",
    "env.math.num_workers=1",
    "+env.custom.proxy={name: policy_fakes.Matches, kwargs: {reward: 0.25}}",
    "+env.composite.both={parts: [{env: proxy, weight: 1.0}, {env: math, weight: 0.0}]}",
)
"""Rewarded by one part; the other is only measured."""


@pytest.mark.slow
def test_a_rule_without_weight_is_measured_and_read(tmp_path, model):
    done = grpo(
        grpo_settings(
            tmp_path,
            model,
            *GOLD,
            *NO_VALIDATION,
            RARELY_SAVED,
            "grpo.health.baseline_steps=3",
            "grpo.health.window=1",
        )
    )
    figures = metrics_of(tmp_path)
    assert "grpo.health.gold_metric" not in done.text
    assert "health/overoptimisation" not in figures[1], "nothing to compare with yet"
    assert figures[2]["health/overoptimisation"] in (0.0, 1.0)
    for step in figures:
        rows = completions_of(tmp_path, step)
        assert all(row["reward"] in (0.0, 0.25) for row in rows)
        boxed = [f"\\boxed{{{row['expected']}}}" == row["completion"].strip() for row in rows]
        accuracy = figures[step]["env/both/math/accuracy"]
        assert accuracy >= sum(boxed) / len(boxed) - 1e-9
        assert accuracy > 0.0


@pytest.mark.slow
def test_a_metric_that_is_never_measured_is_told_once(tmp_path, model):
    done = grpo(
        grpo_settings(
            tmp_path,
            model,
            *GOLD,
            RARELY_SAVED,
            "grpo.health.gold_metric=env/both/math/right",
            "grpo.health.format_metric=validation/form",
        )
    )
    assert done.text.count("grpo.health.gold_metric=env/both/math/right is not among") == 1
    assert done.text.count("grpo.health.format_metric=validation/form is not among") == 1
    assert "env/both/math/accuracy" in done.text
    assert "health/overoptimisation" not in metrics_of(tmp_path)[4]
