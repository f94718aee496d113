"""How `laurel grpo` ends before its last step, and what it says of steps that go wrong."""

import itertools
import os
import shutil
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from laurel.errors import NonFiniteError
from policy_fakes import HOOKS
from policy_runs import (
    HOOKED,
    MATCHES,
    completions_of,
    grpo,
    grpo_settings,
    metrics_of,
)

NO_VALIDATION = ("grpo.val_period=0", "grpo.val_at_end=false")
RARELY_SAVED = "checkpointing.save_period=100"


@pytest.fixture(autouse=True)
def unhooked():
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    HOOKS.clear()
    signal.signal(signal.SIGTERM, previous)


def saves(directory):
    return sorted(path.name for path in (directory / "saves").glob("step_*"))


@pytest.mark.slow
def test_a_signal_does_not_wait_for_rollouts_that_run_ahead(tmp_path, model):
    """They hang; the run saves what it learned, and draws them again when it goes on."""
    changes = [
        *MATCHES,
        *HOOKED,
        *NO_VALIDATION,
        RARELY_SAVED,
        "grpo.max_num_steps=3",
        "grpo.max_staleness=1",
        "loss_fn.use_importance_sampling_correction=true",
    ]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    grpo(grpo_settings(straight, model, *changes))

    is_stuck, release = threading.Event(), threading.Event()
    calls, sent = itertools.count(1), [0.0]

    def judge():
        if next(calls) == 5:  # in the batch of the second step
            is_stuck.set()
            release.wait(120)

    def update():
        assert is_stuck.wait(60)
        sent[0] = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)

    HOOKS.update(judge=judge, update=update)
    try:
        first = grpo(grpo_settings(broken, model, *changes, "grpo.stop_patience_seconds=0.2"))
    finally:
        release.set()
    assert time.monotonic() - sent[0] < 90, "it waited for the judge"
    assert (first.outcome.ended, first.outcome.step) == ("signal", 1)
    assert saves(broken) == ["step_1"]

    HOOKS.clear()
    last = grpo(grpo_settings(broken, model, *changes))
    assert (last.outcome.ended, last.outcome.step) == ("finished", 3)
    assert completions_of(broken, 1) == completions_of(straight, 1)
    for step in (1, 2, 3):
        asked = [[row["task"] for row in completions_of(d, step)] for d in (straight, broken)]
        assert asked[0] == asked[1]
    behind = [metrics_of(broken)[step]["train/staleness"] for step in (1, 2, 3)]
    assert behind == [0, 0, 1], "the second batch was drawn with the weights that were saved"


def test_a_validation_that_is_good_enough_ends_the_run(tmp_path, model):
    changes = [*MATCHES, RARELY_SAVED, "grpo.val_period=2", "grpo.max_num_steps=5"]
    goal = ["grpo.stop_at_validation_metric=accuracy", "grpo.stop_at_validation_threshold=0.0"]
    done = grpo(grpo_settings(tmp_path, model, *changes, *goal))
    assert (done.outcome.ended, done.outcome.step) == ("finished", 2)
    assert "step 2 is the last: validation_reward_mean=" in done.text
    assert saves(tmp_path) == ["step_2"]


def test_a_step_of_which_a_part_was_applied_is_no_bad_step(tmp_path, model):
    done = grpo(
        grpo_settings(
            tmp_path,
            model,
            "data.env_name=uneven",
            "+env.custom.uneven.name=policy_fakes.Uneven",
            *NO_VALIDATION,
            "grpo.normalize_rewards=false",
            "policy.train_global_batch_size=4",
            "grpo.max_bad_steps=1",
            "grpo.max_num_steps=1",
            "policy.generation.temperature=1.6",
        )
    )
    figures = metrics_of(tmp_path)[1]
    applied, failed = figures["train/optimizer_steps"], figures["train/optimizer_steps_not_applied"]
    assert applied >= 1
    assert failed >= 1
    assert figures["train/bad_steps_in_a_row"] == 0
    said = f"step 1: {failed:.0f} of its {applied + failed:.0f} updates not applied: the "
    assert said in done.text
    assert (tmp_path / "logs" / "exp_001" / "bad_steps" / "step_1.jsonl").is_file()


def test_a_reference_that_gives_no_numbers_is_told_and_ends_the_run(tmp_path, model):
    """The run goes on with a reference that is loaded again, and is broken by now."""
    base = tmp_path / "base"
    shutil.copytree(model, base, ignore=shutil.ignore_patterns("MANIFEST.json", "training"))
    changes = [
        *MATCHES,
        *NO_VALIDATION,
        "checkpointing.save_period=1",
        "grpo.max_bad_steps=2",
        "loss_fn.use_kl_in_reward=true",
        "loss_fn.reference_policy_kl_penalty=0.1",
    ]
    grpo(grpo_settings(tmp_path, base, *changes, "grpo.max_num_steps=1"))
    assert "train/kl_in_reward" in metrics_of(tmp_path)[1]
    weights = load_file(base / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("model.norm.weight")]
    weights[name] = torch.full_like(weights[name], float("nan"))
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match="divergence from the reference policy is not finite"):
        grpo(grpo_settings(tmp_path, base, *changes))
    figures = metrics_of(tmp_path)[2]
    assert figures["train/num_failures"] == 12
    assert figures["train/bad_steps_in_a_row"] == 1
    rows = completions_of(tmp_path, 2)
    assert all(row["reward"] is None and "not finite" in row["failure"] for row in rows)
