"""GRPO and fine-tuning go on from a checkpoint and end bit for bit as if they had never stopped."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import threading

import pytest

from laurel.errors import CheckpointError
from laurel.grpo.source import RolloutSource
from laurel.run.train import run_training
from laurel.training.stopping import StopRequest
from policy_fakes import HOOKS
from policy_runs import (
    HOOKED,
    MATCHES,
    assert_same_runs,
    completions_of,
    grpo,
    grpo_settings,
    metrics_of,
    sft,
    sft_settings,
    sums,
)
from runs import manifest_hashes, run, write_rows

NUM_STEPS = 6
LENGTH = (
    f"grpo.max_num_steps={NUM_STEPS}",
    "grpo.stop_patience_seconds=600",  # what is ahead is finished, however busy this machine is
    "checkpointing.save_period=100",
    "grpo.val_period=0",
    *MATCHES,
    *HOOKED,
)


HEARD, NOTICED = threading.Event(), threading.Event()
"""A signal came; and whoever waited for rollouts has looked since."""


@pytest.fixture(autouse=True)
def unhooked(monkeypatch):
    """Nothing is called, and a SIGTERM that comes when no run is listening is not heard."""
    take, drop, settle = StopRequest._take, RolloutSource._drop, RolloutSource.settle

    def take_and_tell(stop, number):
        take(stop, number)
        HEARD.set()

    def drop_and_tell(source, futures):
        NOTICED.set()
        drop(source, futures)

    def settle_and_tell(source, *, is_patient=lambda: True):
        def looked():
            if HEARD.is_set():
                NOTICED.set()
            return is_patient()

        return settle(source, is_patient=looked)

    monkeypatch.setattr(StopRequest, "_take", take_and_tell)
    monkeypatch.setattr(RolloutSource, "_drop", drop_and_tell)
    monkeypatch.setattr(RolloutSource, "settle", settle_and_tell)
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    HOOKS.clear()
    signal.signal(signal.SIGTERM, previous)


def interrupt_at(call, *, where, number=signal.SIGTERM):
    """Send a signal to this process at the n-th call of a hook, and go on when it was noticed.

    Returns how many calls there were.
    """
    numbers = itertools.count(1)
    HEARD.clear()
    NOTICED.clear()

    def hook():
        if next(numbers) == call:
            os.kill(os.getpid(), number)
            assert HEARD.wait(60)
            assert where == "update" or NOTICED.wait(60)

    HOOKS.clear()
    HOOKS[where] = hook
    return lambda: next(numbers) - 1


CORRECTED = "loss_fn.use_importance_sampling_correction=true"
LORA = "policy.dtensor_cfg.lora_cfg.enabled=true"

MANNERS = {
    "synchronous": [],
    "one step ahead": ["grpo.max_staleness=1", CORRECTED],
    "adapters, two steps ahead": [
        LORA,
        "policy.dtensor_cfg.lora_cfg.dropout=0.1",
        "grpo.max_staleness=2",
        CORRECTED,
    ],
    "advantages per step, one step ahead": [
        "grpo.adv_estimator.per_step=true",
        "data.env_name=digits",
        "+env.custom.digits.name=policy_fakes.DigitSteps",
        "grpo.max_staleness=1",
        CORRECTED,
    ],
    "branching, one step ahead": [
        "grpo.tree={branches: 1, rounds: 2, segment: 2}",
        "grpo.adv_estimator.name=tree",
        "grpo.adv_estimator.tree.credit=segment",
        "grpo.max_staleness=1",
        CORRECTED,
    ],
    "several updates, dynamic sampling": [
        "grpo.num_iterations=2",
        "policy.train_global_batch_size=6",
        "grpo.use_dynamic_sampling=true",
        "grpo.dynamic_sampling_max_gen_batches=50",
        "grpo.max_num_epochs=99",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("manner", [name for name in MANNERS if name != "one step ahead"])
def test_preempted_in_a_rollout_and_in_an_update_the_run_ends_the_same(tmp_path, model, manner):
    changes = [*LENGTH, *MANNERS[manner]]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    grpo(grpo_settings(straight, model, *changes))

    updates_a_step = 4 if "several updates" in manner else 1
    interrupt_at(2 * updates_a_step, where="update")
    first = grpo(grpo_settings(broken, model, *changes)).outcome
    assert (first.ended, first.step) == ("signal", 2), "the step is finished and saved"
    assert first.latest == broken / "saves" / "step_2"

    calls = interrupt_at(5, where="judge")  # in the next rollouts but one, where nothing is ahead
    second = grpo(grpo_settings(broken, model, *changes)).outcome
    assert second.ended == "signal"
    assert 2 <= second.step < NUM_STEPS
    if manner == "synchronous":
        assert second.step == 3, "step 4 was given up in the middle of its rollouts"
        assert calls() in (5, 6), "the last group of it may have come before"
    assert second.latest == broken / "saves" / f"step_{second.step}"

    HOOKS.clear()
    last = grpo(grpo_settings(broken, model, *changes))
    assert last.outcome.ended == "finished"
    assert f"resuming from {second.latest}, after step {second.step}" in last.text
    assert_same_runs(straight, broken, NUM_STEPS)
    for step in range(1, NUM_STEPS + 1):
        assert completions_of(broken, step) == completions_of(straight, step)
    staleness = int(changes[-2][-1]) if "ahead" in manner else 0
    behind = [metrics_of(broken)[s]["train/staleness"] for s in range(1, NUM_STEPS + 1)]
    assert behind == [min(s, staleness) for s in range(NUM_STEPS)]


@pytest.mark.slow
def test_rollouts_that_run_ahead_are_in_the_checkpoint_and_not_drawn_again(tmp_path, model):
    changes = [*LENGTH, *MANNERS["adapters, two steps ahead"], "grpo.val_at_end=false"]
    interrupt_at(3, where="update")
    grpo(grpo_settings(tmp_path, model, *changes))
    calls = interrupt_at(1000, where="judge")
    done = grpo(grpo_settings(tmp_path, model, *changes)).outcome
    assert done.ended == "finished"
    assert calls() == 3, "steps 4 and 5 were ahead; only the groups of step 6 were left to judge"


@pytest.mark.slow
def test_what_environments_noted_of_rollouts_that_run_ahead_is_in_the_checkpoint(tmp_path, model):
    """How many answers could not be read is known to the environment alone."""
    parts = "{parts: [{env: math}, {env: math_copy, weight: 0.5}]}"
    changes = [
        *LENGTH,
        *MANNERS["one step ahead"],
        "grpo.max_num_steps=2",
        "grpo.val_at_end=false",
        "policy.generation.temperature=1.6",
        "data.env_name=both",
        "+env.custom.math_copy.name=policy_fakes.MathCopy",
        f"+env.composite.both={parts}",
    ]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    grpo(grpo_settings(straight, model, *changes))
    interrupt_at(1, where="update")
    assert grpo(grpo_settings(broken, model, *changes)).outcome.step == 1
    HOOKS.clear()
    grpo(grpo_settings(broken, model, *changes))
    counts = {name: v for name, v in metrics_of(straight)[2].items() if "unparseable" in name}
    assert len(counts) == 2
    assert all(counts.values())
    assert_same_runs(straight, broken, 2)


@pytest.mark.slow
def test_a_validation_is_cut_short_by_a_signal_and_made_up_for(tmp_path, model):
    changes = [*LENGTH, "grpo.val_period=2", "grpo.val_num_generations_per_prompt=2"]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    grpo(grpo_settings(straight, model, *changes))
    interrupt_at(2 * 3 + 1, where="judge")
    done = grpo(grpo_settings(broken, model, *changes))
    assert (done.outcome.ended, done.outcome.step) == ("signal", 2)
    assert "the validation of step 2 was broken off" in done.text
    assert "validation/reward_mean" not in metrics_of(broken)[2], "it came too late to test"
    HOOKS.clear()
    grpo(grpo_settings(broken, model, *changes))
    assert_same_runs(straight, broken, NUM_STEPS)


TIRES = ("data.env_name=tires", "+env.custom.tires.name=policy_fakes.Tires")


@pytest.mark.slow
def test_what_environments_remember_knows_nothing_of_rollouts_that_were_given_up(tmp_path, model):
    changes = [*LENGTH, *TIRES, "grpo.val_period=2", "grpo.val_num_generations_per_prompt=2"]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    grpo(grpo_settings(straight, model, *changes))
    for call, step in ((5, 1), (3 + 1, 2)):  # in rollouts, then in a validation
        interrupt_at(call, where="judge")
        done = grpo(grpo_settings(broken, model, *changes)).outcome
        assert (done.ended, done.step) == ("signal", step)
    HOOKS.clear()
    grpo(grpo_settings(broken, model, *changes))
    assert_same_runs(straight, broken, NUM_STEPS)


@pytest.mark.slow
def test_a_run_does_not_learn_otherwise_because_it_is_validated(tmp_path, model):
    seen = []
    for period in (0, 1):
        changes = [*LENGTH, *TIRES, f"grpo.val_period={period}", "grpo.val_at_end=false"]
        grpo(grpo_settings(tmp_path / f"{period}", model, *changes))
        logged = metrics_of(tmp_path / f"{period}")
        seen.append([logged[s]["train/reward"] for s in range(1, NUM_STEPS + 1)])
    assert seen[0] == seen[1]
    assert len(set(seen[0])) > 2


@pytest.mark.slow
def test_the_reference_of_a_policy_from_nothing_is_the_same_when_a_run_goes_on(tmp_path):
    """Its tokenizer has read the prompts that are too long to be asked, too."""
    changes = [*LENGTH, "loss_fn.reference_policy_kl_penalty=1", "data.split_validation_size=0"]
    for name, limits in (("straight", [4]), ("broken", [2, 4])):
        long = " ".join(f"laurels {i * i} grow" for i in range(400))
        (tmp_path / name).mkdir()
        rows = [*sums(12), {"input": long, "output": "1"}]
        write_rows(tmp_path / name / "tasks.jsonl", rows)
        for limit in limits:
            limited = [*changes, f"grpo.max_num_steps={limit}", "grpo.val_at_end=false"]
            grpo(grpo_settings(tmp_path / name, None, *limited))
    kl = [
        [metrics_of(tmp_path / name)[step].get("train/kl_penalty") for step in (3, 4)]
        for name in ("straight", "broken")
    ]
    assert kl[0] == kl[1]
    assert any(kl[0])
    assert_same_runs(tmp_path / "straight", tmp_path / "broken", 4)


KILLED = """
import itertools, os, pathlib, signal, sys, threading, torch
from laurel.run.train import run_training
from policy_fakes import HOOKS

first, seconds, saved = int(sys.argv[1]), float(sys.argv[2]), pathlib.Path(sys.argv[3])
numbers, timers = itertools.count(1), []

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def judge():
    number = next(numbers)
    if number >= first and saved.exists() and not timers:
        timers.append(threading.Timer(seconds, kill))
        timers[0].start()
    if number == first + 12:  # however late the timer is
        kill()

HOOKS["judge"] = judge
run_training("grpo", None, sys.argv[4:])
"""


def test_kill_9_at_any_moment(tmp_path, model):
    changes = [
        *LENGTH,
        *MANNERS["one step ahead"],
        "grpo.max_num_steps=12",
        "grpo.max_num_epochs=99",
        "checkpointing.save_period=3",
        "checkpointing.keep_top_k=2",
    ]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    grpo(grpo_settings(straight, model, *changes))
    moments = random.Random()
    overrides = grpo_settings(broken, model, *changes)
    # Three groups a step, and one step ahead: after the first checkpoint, which is complete by the
    # next one, and before the last step.
    first = broken / "saves" / "step_3"
    moment = (str(moments.randrange(16, 22)), str(moments.random() / 10), str(first))
    killed = run(overrides, program=("-c", KILLED, *moment))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    last = grpo(overrides)
    assert "resuming from" in last.text
    assert_same_runs(straight, broken, 12)


@pytest.mark.slow
def test_sigterm_ends_the_command_well_and_ctrl_c_with_130(tmp_path, model, capsys):
    overrides = grpo_settings(tmp_path, model, *LENGTH)
    interrupt_at(2, where="update")
    run_training("grpo", None, overrides)  # returns, so the exit status is 0
    said = capsys.readouterr().out
    assert re.search(r"stopped by SIGTERM after step 2, \d+ s in; run it again to resume", said)
    assert (tmp_path / "saves" / "step_2" / "MANIFEST.json").is_file()

    interrupt_at(1, where="judge", number=signal.SIGINT)
    with pytest.raises(SystemExit) as end:
        run_training("grpo", None, overrides)
    assert end.value.code == 130
    assert "stopped by SIGINT after step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("grpo.seed=7", "grpo.seed: 42 then, 7 now"),
        ("data.split_validation_size=0.5", "data.train[0].split_validation_size: "),
    ],
)
def test_another_run_is_refused_and_the_change_is_named(tmp_path_factory, model, change, named):
    directory = tmp_path_factory.getbasetemp() / "one_run"
    if not directory.exists():
        grpo(grpo_settings(directory, model, *LENGTH, "grpo.max_num_steps=1"))
    with pytest.raises(CheckpointError, match=r"of another run \(.*Give this run another") as no:
        grpo(grpo_settings(directory, model, *LENGTH, "grpo.max_num_steps=2", change))
    assert named in str(no.value)
    assert [p.name for p in (directory / "logs").iterdir()] == ["exp_001"]


@pytest.mark.slow
def test_fine_tuning_goes_on(tmp_path):
    """Without adapters: `test_older_runs.py`."""
    adapters = (LORA, "policy.dtensor_cfg.lora_cfg.dropout=0.2")
    changes = ["sft.max_num_epochs=3", "sft.val_period=4", *adapters, *HOOKED]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    grouped = sft(sft_settings(straight, *changes))
    interrupt_at(5, where="update")
    first = sft(sft_settings(broken, *changes)).outcome
    assert (first.ended, first.step) == ("signal", 5)
    HOOKS.clear()
    sft(sft_settings(broken, *changes, "sft.max_num_steps=11"))
    done = sft(sft_settings(broken, *changes))
    assert (done.outcome.ended, done.outcome.step) == ("finished", grouped.outcome.step)
    expected, found = metrics_of(straight), metrics_of(broken)
    for step in range(1, grouped.outcome.step + 1):
        assert found[step].items() >= expected[step].items()
    last = f"saves/step_{grouped.outcome.step}"
    assert manifest_hashes(broken / last) == manifest_hashes(straight / last)
    info = json.loads((broken / last / "training_info.json").read_text(encoding="utf-8"))
    assert info["total_steps"] == grouped.outcome.step
    with pytest.raises(CheckpointError, match=r"sft\.seed: 42 then, 7 now"):
        sft(sft_settings(broken, *changes, "sft.seed=7"))
    shutil.rmtree(broken)
