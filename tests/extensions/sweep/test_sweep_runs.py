"""`laurel sweep` as a whole: what it finds, what becomes of trials that fail, and real kills."""

import json
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

from laurel.extensions.sweep.options import SweepOptions
from laurel.extensions.sweep.sweep import Sweep
from laurel.run.reward_model import load_data
from processes import descendants
from runs import (
    TINY,
    environment,
    laurel,
    laurel_here,
    pairs,
    run,
    series,
    settings,
    wait_until,
    write_rows,
)

pytestmark = pytest.mark.usefixtures("warm_processes")

PROGRAM = ("-m", "laurel.cli.main", "sweep")
LR = "policy.optimizer.kwargs.lr"
RATES = f"{LR}=[1e-5,2e-2]"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "train.jsonl", pairs(60))


def words(rows, *more):
    """The words of a command whose runs have few steps; `TINY` without its learning rate."""
    return [
        *(one for one in TINY if not one.startswith(LR)),
        "data.dataset_name=BinaryPreferenceDataset",
        f"data.train_data_path={rows}",
        "data.split_validation_size=0.2",
        "rm.val_period=2",
        *more,
    ]


def swept(directory, *arguments, laurel=laurel_here):
    done = laurel(["sweep", *arguments, "--output", str(directory), "--json"])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_grid_over_folds_names_the_better_rate_and_writes_it_as_a_file(tmp_path, rows):
    found, said = swept(tmp_path / "out", *words(rows, RATES), "--folds", "2")
    assert [one["state"] for one in found["trials"]] == ["complete", "complete"]
    assert found["best"]["params"] == {LR: "0.02"}
    assert len(found["best"]["values"]) == 2
    assert found["best"]["half_width"] > 0
    assert found["metric"] == "validation-default_loss"
    assert re.search(r"trial 2/2 \(100%\).* runs/s .*left", said)
    first = found["trials"][0]["values"][0]
    assert f"trial {found['trials'][0]['number']} run 1 of 2  {first:.4f}" in said
    assert "run 2 of 2" not in said
    best = yaml.safe_load((tmp_path / "out" / "best.yaml").read_text())
    assert best["policy"]["optimizer"]["kwargs"]["lr"] == 0.02
    assert best["rm"]["seed"] == 42
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<svg" in page
    assert f"{found['best']['mean']:.4f} +- {found['best']['half_width']:.4f}" in page
    # The rows of the folds are disjoint, and together the whole set.
    held = [
        json.loads(path.read_text())["validation-default"]["rows_kept"]
        for path in sorted((tmp_path / "out").glob("trial_000/*/logs/*/data_report.json"))
    ]
    assert held == [30, 30]
    options = SweepOptions(overrides=words(rows, RATES), output=tmp_path / "out", num_folds=2)
    parts = [
        {one.group.prompt for one in load_data(each.config, fold=each.fold).validation["default"]}
        for each in Sweep(options).runs_of(SimpleNamespace(number=0), {LR: "0.02"})
    ]
    assert [len(one) for one in parts] == held
    assert not parts[0] & parts[1]
    assert len(parts[0] | parts[1]) == 60
    assert not list((tmp_path / "out").glob("trial_*/*/saves"))
    copied = tmp_path / "copied.html"
    done = laurel_here(["report", str(tmp_path / "out"), "-o", str(copied)])
    assert done.returncode == 0, done.stderr
    assert copied.read_text() == page
    # The same command has nothing left to do, and another sweep is refused here.
    again, said = swept(tmp_path / "out", *words(rows, RATES), "--folds", "2")
    assert "going on after 2 finished trials" in said
    assert again["trials"] == found["trials"]
    of_three = [*words(rows, RATES), "--folds", "3"]
    other = laurel_here(["sweep", *of_three, "--output", str(tmp_path / "out")])
    assert other.returncode == 2
    assert "holds another sweep (folds: 2 then, 3 now" in other.stderr


def test_a_trial_that_fails_is_counted_and_named_and_never_a_number(tmp_path, rows):
    found, said = swept(tmp_path / "out", *words(rows, f"{LR}=[1e38,1e-2]"))
    assert [one["state"] for one in found["trials"]] == ["failed", "complete"]
    assert (found["num_failed"], found["trials"][0]["mean"]) == (1, None)
    assert "finite" in found["trials"][0]["failure"]
    assert f"trial 0 failed ({LR}=1e+38): " in said
    assert "<h2>Failures</h2>" in (tmp_path / "out" / "report.html").read_text()


ENDED = """
import os, sys, threading, time
from laurel.cli.main import main

def end(number, path):
    while not os.path.exists(path):
        time.sleep(0.005)
    os.kill(os.getpid(), int(number))

threading.Thread(target=end, args=sys.argv[1:3], daemon=True).start()
sys.argv[1:3] = ["sweep"]
main()
"""
"""The command, which sends itself a signal as soon as a file is there."""


@pytest.mark.slow
def test_a_sweep_that_is_killed_and_interrupted_goes_on_where_it_was(tmp_path, rows):
    searched = words(rows, f"{LR}=log(1e-4,1e-2)", "rm.max_num_epochs=3")
    options = ("--trials", "2", "--seeds", "2", "--no-prune")
    whole, _ = swept(tmp_path / "whole", *searched, *options)
    out = tmp_path / "out"
    killed, interrupted = (
        run(
            [*searched, *options, "--output", str(out), "--json"],
            program=("-c", ENDED, f"{number:d}", str(out / target)),
        )
        for number, target in (
            (signal.SIGKILL, "trial_000/seed_43/curve.jsonl"),
            (signal.SIGINT, "trial_001/seed_42/curve.jsonl"),
        )
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert interrupted.returncode == 130, interrupted.stderr
    assert "stopped by SIGINT after 1 finished trial; run it again" in interrupted.stderr
    assert not (out / "trial_001" / "seed_42" / "result.json").exists()
    # A run that was over before is not told again.
    said_by = killed.stderr, interrupted.stderr
    assert ["trial 0 run 1 of 2" in said for said in said_by] == [True, False]
    first = (out / "trial_000" / "seed_42" / "result.json").stat().st_mtime_ns
    found, said = swept(out, *searched, *options)
    assert (out / "trial_000" / "seed_42" / "result.json").stat().st_mtime_ns == first
    assert "going on after 1 finished trial" in said
    for name in ("params", "values", "state", "number"):
        assert [one[name] for one in found["trials"]] == [one[name] for one in whole["trials"]]
    assert found["best"]["number"] == whole["best"]["number"]


@pytest.mark.slow
def test_trials_that_are_worse_than_the_median_are_pruned_and_the_best_is_in_a_file(tmp_path, rows):
    # A rate too small to learn anything comes last.
    rates = ",".join([f"{2e-2 + i / 1000:g}" for i in range(5)] + ["1e-9"])
    found, _ = swept(tmp_path / "out", *words(rows, f"{LR}=[{rates}]", "rm.max_num_epochs=2"))
    assert found["trials"][-1]["state"] == "pruned"
    assert found["trials"][-1]["mean"] is None
    assert found["num_pruned"] == 1
    curve = (tmp_path / "out" / "trial_005" / "seed_42" / "curve.jsonl").read_text().splitlines()
    assert len(curve) < 6
    places = [f"checkpointing.checkpoint_dir={tmp_path}/saves", f"logger.log_dir={tmp_path}/logs"]
    best = ["--config", str(tmp_path / "out" / "best.yaml"), *places, "rm.val_at_end=true"]
    done = laurel_here(["rm", *best])
    assert done.returncode == 0, done.stderr
    measured = series(tmp_path, "validation-default/loss")
    assert measured[max(measured)] == pytest.approx(found["best"]["mean"], rel=1e-6)


@pytest.mark.slow
def test_a_signal_stops_workers_on_ray_and_they_go_on_with_the_same_command(tmp_path, rows):
    searched = words(rows, f"{LR}=[1e-3,1e-2]", "rm.max_num_epochs=8")
    out, workers = tmp_path / "out", ("--workers", "2")
    stopped = subprocess.Popen(
        [sys.executable, *PROGRAM, *searched, "--output", str(out), *workers],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    wait_until((out / "trial_000" / "seed_42" / "curve.jsonl").exists, stopped)
    stopped.terminate()
    said = stopped.communicate(timeout=120)[1]
    assert stopped.returncode == 0, said
    # They train on while the command is starting the next of them: a run may be over by then.
    assert re.search(r"stopped by SIGTERM after \d finished trials?; run it again to go on", said)
    found, _ = swept(out, *searched, *workers, laurel=laurel)
    assert [one["state"] for one in found["trials"]] == ["complete"] * 2


@pytest.fixture(scope="module")
def with_a_failure(rows):
    """The last of the rates fails; runs are long enough to be killed."""
    return (*words(rows, f"{LR}=[1e-3,1e-2,1e38]", "rm.max_num_epochs=8"), "--no-prune")


@pytest.fixture(scope="module")
def one_by_one(with_a_failure, tmp_path_factory):
    return swept(tmp_path_factory.mktemp("one_by_one") / "out", *with_a_failure)[0]


@pytest.mark.slow
def test_a_trial_goes_on_when_its_worker_on_ray_is_killed(tmp_path, with_a_failure, one_by_one):
    out = tmp_path / "out"
    options = ["--output", str(out), "--workers", "2", "--json"]
    process = subprocess.Popen(
        [sys.executable, *PROGRAM, *with_a_failure, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | {"LAUREL_WARM_COMMANDS": "sweep"},
    )
    try:
        curves = [out / f"trial_00{number}" / "seed_42" / "curve.jsonl" for number in range(2)]
        wait_until(lambda: all(one.exists() for one in curves), process)
        workers = [
            one
            for one in descendants(process.pid)
            if "ray::WorkerActor" in " ".join(one.cmdline()[:1])
        ]
        assert len(workers) == 2
        # Both: whichever of the trials is under way loses its process.
        for one in workers:
            one.send_signal(signal.SIGKILL)
        answer, said = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, said
    found = json.loads(answer)
    assert found["num_failed"] == 1
    assert len([*out.glob("trial_*/seed_42/logs/exp_*")]) > 3  # a run was begun again
    for name in ("number", "params", "state"):
        assert [one[name] for one in found["trials"]] == [one[name] for one in one_by_one["trials"]]
    for one, other in zip(found["trials"], one_by_one["trials"], strict=True):
        assert one["values"] == pytest.approx(other["values"], rel=1e-6)


def test_a_run_ends_where_a_callback_says(tmp_path):
    from io import StringIO

    from rich.console import Console

    from laurel.config.load import load_config
    from laurel.config.reward_model import RewardTrainingRun
    from laurel.run.reward_model import train_reward_model

    seen = []

    def at_four(step, metrics):
        seen.append((step, sorted(metrics)[-1]))
        return "enough" if step == 4 else None

    config = load_config(
        RewardTrainingRun, None, settings(tmp_path, "rm.val_period=2", "rm.max_num_epochs=3")
    ).config
    stream = StringIO()
    outcome = train_reward_model(config, console=Console(file=stream), on_validation=at_four)
    assert (outcome.step, outcome.is_early) == (4, True)
    assert [step for step, _ in seen] == [2, 4]
    assert "step 4 is the last: enough" in stream.getvalue()
