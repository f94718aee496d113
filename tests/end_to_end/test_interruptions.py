"""Runs that are killed, preempted and interrupted end bit for bit like one that was not."""

import itertools
import json
import random
import re
import signal
import time
from pathlib import Path

import pytest

from laurel.observe.loggers import read_metrics
from runs import (
    assert_equal_runs,
    last_step,
    run,
    settings,
    start,
    train,
    wait_until,
)

LONG = (
    "rm.max_num_epochs=35",
    "rm.val_period=40",
    "checkpointing.save_period=20",
    "+policy.scratch.config_overrides.attention_dropout=0.2",
)
LONG_STEPS = 35 * 4


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted run of 140 steps."""
    directory = tmp_path_factory.mktemp("straight")
    train(settings(directory, *LONG))
    return directory


def signalled(number, **when):
    """The program that runs `laurel rm` and sends itself a signal then."""
    return str(Path(__file__).parents[1] / "signalled.py"), json.dumps({"signal": number, **when})


@pytest.mark.slow
def test_kill_9_at_any_moment_and_in_the_middle_of_a_save(tmp_path, straight):
    overrides, saves = settings(tmp_path, *LONG), tmp_path / "saves"
    moments = random.Random()
    at_any = {"update": moments.randrange(22, 50), "seconds": moments.random() / 20}
    killed = run(overrides, program=signalled(signal.SIGKILL, **at_any))
    assert killed.returncode == -signal.SIGKILL

    killed = run(overrides, program=signalled(signal.SIGKILL, save=62))
    assert killed.returncode == -signal.SIGKILL
    assert last_step(tmp_path) == 80
    assert any(saves.glob(".tmp-step_80-*/model.safetensors"))

    finished = train(overrides)
    assert finished.outcome.ended == "finished"
    assert "resuming from" in finished.text
    assert not [p for p in saves.iterdir() if p.name.startswith(".") and p.name != ".lock"]
    assert_equal_runs(straight, tmp_path, last=LONG_STEPS, same_validations=True)


STEP_WITHOUT_END = """
import sys, torch
from laurel.cli.main import main
from laurel.training.learner import LocalLearner

def update(*given):
    print("updating", flush=True)
    large = torch.ones(2000, 2000)
    while True:
        large @ large

LocalLearner.update = update
sys.argv[1:1] = ["rm"]
main()
"""


@pytest.mark.slow
def test_a_second_process_on_the_same_directory_is_refused_and_two_sigterms_end_at_once(tmp_path):
    log = tmp_path / "log.txt"
    with start(settings(tmp_path), log=log, program=("-c", STEP_WITHOUT_END)) as process:
        try:
            wait_until(lambda: b"updating" in log.read_bytes(), process)

            second = run(settings(tmp_path, f"logger.log_dir={tmp_path}/other"))
            assert second.returncode == 2
            assert re.match(rf"error: .*is being written by process {process.pid}", second.stderr)
            assert not (tmp_path / "other").exists()

            process.terminate()
            wait_until(lambda: b"(again: at once, unsaved)" in log.read_bytes(), process)
            process.terminate()
            assert process.wait(timeout=60) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert log.read_text(encoding="utf-8").endswith("ended unsaved\n")
    assert last_step(tmp_path) == 0
    assert not list((tmp_path / "saves").glob("step_*"))


@pytest.mark.slow
def test_a_clock_that_is_set_back_and_forth_changes_nothing(tmp_path, straight, monkeypatch):
    overrides = settings(tmp_path, *LONG, "checkpointing.checkpoint_must_save_by='00:01:00:00'")
    real, calls = time.time, itertools.count()
    # An hour ahead or back at every other look, as when a clock is corrected again and again.
    monkeypatch.setattr(time, "time", lambda: real() + 3600.0 * (-1) ** next(calls))
    train([*overrides, "rm.max_num_steps=50"])
    finished = train(overrides)
    assert "resuming from" in finished.text
    assert (finished.outcome.ended, finished.outcome.step) == ("finished", LONG_STEPS)
    assert_equal_runs(straight, tmp_path, last=LONG_STEPS)
    lines = read_metrics(tmp_path / "logs" / "exp_001" / "metrics.jsonl")
    lasted = [
        value
        for line in lines
        for key, value in line.items()
        if key.startswith("timing/") or key.endswith("_per_second")
    ]
    assert lasted
    assert min(lasted) >= 0
