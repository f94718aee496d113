"""Runs that are killed, preempted and interrupted end bit for bit like one that was not."""

import itertools
import json
import os
import random
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from laurel.observe.loggers import read_metrics
from laurel.training.state import FEW_REFERENCE_GROUPS
from runs import (
    assert_equal_runs,
    best_name,
    last_step,
    laurel_here,
    metric_of,
    pairs,
    run,
    series,
    settings,
    start,
    train,
    wait_until,
    write_rows,
)

LONG = (
    "rm.max_num_epochs=15",
    "rm.val_period=20",
    "checkpointing.save_period=10",
    "+policy.scratch.config_overrides.attention_dropout=0.2",
)
LONG_STEPS = 15 * 4


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted run of 60 steps."""
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
    at_any = {"update": moments.randrange(12, 20), "seconds": moments.random() / 20}
    killed = run(overrides, program=signalled(signal.SIGKILL, **at_any))
    assert killed.returncode == -signal.SIGKILL

    killed = run(overrides, program=signalled(signal.SIGKILL, save=42))
    assert killed.returncode == -signal.SIGKILL
    assert last_step(tmp_path) == 50
    assert any(saves.glob(".tmp-step_50-*/model.safetensors"))

    finished = train(overrides)
    assert finished.outcome.ended == "finished"
    assert "resuming from" in finished.text
    assert not [p for p in saves.iterdir() if p.name.startswith(".") and p.name != ".lock"]
    assert_equal_runs(straight, tmp_path, last=LONG_STEPS, same_validations=True)


@pytest.mark.slow
def test_sigterm_saves_and_ends_well_and_the_run_goes_on(tmp_path, straight):
    overrides, saves = settings(tmp_path, *LONG), tmp_path / "saves"
    ended = run(overrides, program=signalled(signal.SIGTERM, update=24))
    assert ended.returncode == 0, ended.stderr
    step, said = last_step(tmp_path), ended.stdout + ended.stderr
    assert "SIGTERM: saving after this step, then ending" in said
    assert re.search(
        rf"stopped by SIGTERM after step {step}, \d+ s in; run it again to resume", said
    )
    assert (saves / f"step_{step}" / "MANIFEST.json").is_file()
    assert step < LONG_STEPS

    finished = train(overrides)
    assert finished.outcome.ended == "finished"
    assert f"resuming from {saves}/step_{step}, after step {step}" in finished.text
    assert_equal_runs(straight, tmp_path, last=LONG_STEPS, same_validations=True)


@pytest.fixture
def deaf():
    """A SIGTERM that comes when no run is listening must not end the tests."""
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGTERM, previous)


def is_validating() -> bool:
    """Report whether the main thread is in the middle of a validation."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_name != "_validate":
        frame = frame.f_back
    return frame is not None


@contextmanager
def preempt_when(condition, *, pause=0.0):
    """Send this process a SIGTERM once a run is listening and something is so.

    Not after the block: where no run is left to hear it, a signal would end the tests.
    """
    unheard, over = signal.getsignal(signal.SIGTERM), threading.Event()

    def wait():
        while signal.getsignal(signal.SIGTERM) == unheard or not condition():
            if over.wait(0.001):
                return
        if not over.wait(pause):
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


STEP_WITHOUT_END = """
import sys, time
from laurel.cli.main import main
from laurel.training.learner import LocalLearner

def update(*given):
    print("updating", flush=True)
    while True:
        time.sleep(0.01)

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

            second = laurel_here(["rm", *settings(tmp_path, f"logger.log_dir={tmp_path}/other")])
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
@pytest.mark.usefixtures("deaf")
def test_a_validation_is_cut_short_by_a_signal_and_made_up_for(tmp_path):
    """With seconds left, a run must save and not go on validating for minutes."""
    held_out = write_rows(tmp_path / "held_out.jsonl", pairs(250, seed=5))
    changes = [
        "data.split_validation_size=0",
        f"data.val_data_path={held_out}",
        "rm.val_period=2",
        "rm.max_num_steps=3",
        "policy.max_total_sequence_length=64",
    ]
    overrides = settings(tmp_path / "broken", *changes)
    with preempt_when(is_validating):
        done = train(overrides)
    assert (done.outcome.ended, done.outcome.step) == ("signal", 2)
    assert "the validation of step 2 was broken off" in done.text
    assert not series(tmp_path / "broken", "validation-default/loss"), "it came too late to test"
    rules = json.loads((tmp_path / "broken" / "saves" / "step_2" / "scoring.json").read_text())
    assert rules["num_reference"] == 2 * FEW_REFERENCE_GROUPS
    assert metric_of(tmp_path / "broken" / "saves" / "step_2") is None

    resumed = train(overrides)
    straight = train(settings(tmp_path / "straight", *changes))
    assert metric_of(tmp_path / "broken" / "saves" / "step_2") == pytest.approx(
        series(tmp_path / "straight", "validation-default/loss")[2], rel=1e-12
    )
    assert best_name(resumed) == best_name(straight)
    assert_equal_runs(tmp_path / "straight", tmp_path / "broken", last=3, same_validations=True)


@pytest.mark.slow
def test_a_clock_that_is_set_back_and_forth_changes_nothing(tmp_path, straight, monkeypatch):
    overrides = settings(tmp_path, *LONG, "checkpointing.checkpoint_must_save_by='00:01:00:00'")
    real, calls = time.time, itertools.count()
    # An hour ahead or back at every other look, as when a clock is corrected again and again.
    monkeypatch.setattr(time, "time", lambda: real() + 3600.0 * (-1) ** next(calls))
    train([*overrides, "rm.max_num_steps=25"])
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
