"""The last words of a run, and the warnings that must not drown in its first ones."""

import io
import json
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.run import train
from laurel.run.train import conclude, end_children
from laurel.training.loop import RunOutcome


def last_words(outcome, limit=None):
    stream = io.StringIO()
    conclude(outcome, Console(file=stream, width=200), use="{}", limit=limit)
    return stream.getvalue().splitlines()[0]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            {"ended": "signal", "signal": "SIGINT"},
            "stopped by SIGINT after step 29, 6 s in; run it again to resume",
        ),
        (
            {"ended": "deadline"},
            "stopped by its time budget after step 29, 6 s in; run it again to resume",
        ),
        ({"ended": "finished"}, "finished after step 29, in 6 s"),
        (
            {"ended": "signal", "signal": "SIGTERM", "latest": None},
            "stopped by SIGTERM after step 29, 6 s in; nothing was saved, so it will start over",
        ),
        (
            {"ended": "finished", "latest": None},
            "finished after step 29, in 6 s; nothing was saved (checkpointing.enabled=false)",
        ),
    ],
)
def test_how_long_it_took_is_not_when_to_go_on(how, words):
    saved = {"latest": Path("s/29")}
    assert last_words(RunOutcome(step=29, seconds=6.2, **saved | how)) == words


INTERRUPTED = """
import atexit, time
from laurel.run import train
from laurel.training.stopping import StopRequest

def interrupted(*arguments, **options):
    {first}
    raise KeyboardInterrupt

def close():
    print("closing", flush=True)
    time.sleep(60)

train.trained = interrupted
atexit.register(close)
train.run_training("rm", None, [])
"""


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("pass", "interrupted before the first step: nothing was saved yet\n"),
        ("StopRequest().__enter__().__exit__(None, None, None)", "interrupted\n"),
    ],
)
def test_ctrl_c_outside_of_the_steps_says_what_it_ends(first, said):
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(first=first)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "closing\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == said + "ended unsaved\n"


@pytest.mark.parametrize(
    ("settings", "is_early", "expected"),
    [
        (
            ["grpo.max_num_steps=60", "grpo.max_num_epochs=1"],
            False,
            "grpo.max_num_epochs=1 ended it before grpo.max_num_steps=60",
        ),
        (["grpo.max_num_steps=22"], False, None),
        (["grpo.max_num_steps=60", "grpo.max_num_epochs=1"], True, None),
        ([], False, None),
    ],
)
def test_epochs_that_end_a_run_before_its_steps_are_named(settings, is_early, expected):
    config = load_config(GRPORun, None, settings).config
    outcome = RunOutcome(step=22, ended="finished", is_early=is_early, latest=Path("s/22"))
    limit = train._limit("grpo", config, outcome)
    assert limit == expected
    assert (expected is None) == last_words(outcome, limit).endswith("in 0 s")


def ended(tmp_path, records, *, width, **others):
    """The last words of a reward model's run that has logged these figures."""
    (tmp_path / "config.json").write_text('{"rm": {}}', encoding="utf-8")
    lines = "".join(json.dumps(one) + "\n" for one in records)
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    stream = io.StringIO()
    outcome = RunOutcome(step=20, ended="finished", run_dir=tmp_path, latest=Path("s/20"), **others)
    conclude(outcome, Console(file=stream, width=width), use="laurel serve --model {}")
    return stream.getvalue()


LENGTH_ALONE = {
    "validation-default/accuracy": 1.0,
    "validation-default/longer_wins_baseline": 1.0,
    "validation-default/num_valid_samples": 64.0,
}


@pytest.mark.parametrize("width", [60, 100])
def test_the_end_says_what_the_report_says_first_in_ten_lines(tmp_path, width):
    many = {f"validation-default/zero_{i}": 0.0 for i in range(20)}
    record = {"step": 20, "time": 1.0, **LENGTH_ALONE, **many}
    best = {"best": Path("s/9"), "best_by": "validation-default_loss"}
    told = ended(tmp_path, [record], width=width, **best)
    said = " ".join(told.split())
    assert "best s/9 (by validation-default_loss)" in said
    assert "accuracy 1.0000 of 64 pairs (longer answer 1.0000)" in said
    assert "problem: validation-default: accuracy is 100.0% on 64 pairs, and always" in said
    assert "no better than length alone" in said
    assert "zero_" not in told
    assert "use it  laurel serve --model s/9" in told
    assert told.endswith(f"report  laurel report {tmp_path}\n")
    assert len(told.splitlines()) <= 10


def test_the_accuracy_of_a_benchmark_stands_beside_its_baselines_too(tmp_path):
    figures = {"accuracy": 0.75, "longer_wins_baseline": 0.5, "bag_of_words_baseline": 0.25}
    figures["final_score"] = 0.8
    named = {f"validation-Bench/{name}": value for name, value in figures.items()}
    before = {"validation-Bench/final_score": 0.7, "validation-Bench/accuracy": 0.4}
    last = {"step": 20, "time": 2.0, "validation-Bench/num_rows": 8.0, **named}
    told = ended(tmp_path, [{"step": 10, "time": 1.0, **before}, last], width=100)
    assert (
        "validation-Bench: final_score 0.8000 (0.7000 at step 10), accuracy 0.7500 of 8 rows "
        "(longer answer 0.5000, bag of words 0.2500), 0.4000 at step 10"
    ) in " ".join(told.split())


def test_a_mean_reward_stands_where_some_validations_have_no_accuracy(tmp_path):
    records = [
        {"step": 0, "time": 1.0, "validation/reward_mean": 0.25},
        {"step": 20, "time": 2.0, "validation/reward_mean": 0.0, "validation/accuracy": 0.0},
    ]
    told = ended(tmp_path, records, width=100)
    assert "validation: reward_mean 0 (0.2500 at step 0)" in " ".join(told.split())


def test_the_end_of_a_run_whose_log_is_broken_says_so_and_goes_on(tmp_path):
    told = ended(tmp_path, [], width=100)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    stream = io.StringIO()
    outcome = RunOutcome(step=1, ended="finished", run_dir=tmp_path, latest=Path("s/1"))
    conclude(outcome, Console(file=stream, width=100), use="{}")
    assert "cannot be read" not in told
    assert "warning: the log of the run cannot be read" in stream.getvalue()
    assert "latest  s/1" in stream.getvalue()


def test_a_policy_that_never_changed_is_the_first_that_is_said(tmp_path):
    def grpo_ended(*updates):
        steps = [
            {"step": n, "time": 1.0, "train/reward": n / 9, "train/optimizer_steps": one}
            for n, one in enumerate(updates, 1)
        ]
        log = tmp_path / f"{sum(updates):g}"
        log.mkdir()
        (log / "config.json").write_text('{"grpo": {}}', encoding="utf-8")
        lines = "".join(json.dumps(one) + "\n" for one in steps)
        (log / "metrics.jsonl").write_text(lines, encoding="utf-8")
        stream = io.StringIO()
        conclude(
            RunOutcome(step=40, ended="finished", run_dir=log, latest=Path("s/40")),
            Console(file=stream, width=200),
            use="{}",
        )
        return stream.getvalue().splitlines()

    first, *others = grpo_ended(*[0.0] * 40)
    assert first == "problem: The policy did not change: none of 40 steps had a group with a signal"
    assert others[0].startswith("finished after step 40")
    assert not any("did not change" in line or "The reward rose" in line for line in others)
    assert grpo_ended(*[0.0] * 39, 1.0)[0].startswith("finished after step 40")


def test_processes_that_an_environment_left_do_not_keep_a_run_from_ending(capsys):
    context = multiprocessing.get_context("spawn")
    ours, left = (context.Process(target=time.sleep, args=(60,)) for _ in range(2))
    ours.start()
    left.start()
    end_children(but=[ours])
    assert left.exitcode == -signal.SIGKILL
    assert ours.is_alive()
    assert f"left 1 of them running ({left.name})" in capsys.readouterr().err
    end_children()
    assert not ours.is_alive()


FAILED = """
import multiprocessing, os, time
from laurel.errors import DataError
from laurel.run import train

def failing(*arguments, **options):
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    raise DataError("in the middle")

train.trained = failing
if __name__ == "__main__":
    train.run_training("rm", None, [])
"""


def test_processes_that_a_failed_run_left_are_ended_by_itself_and_not_by_a_fork(tmp_path):
    script = tmp_path / "failed.py"
    script.write_text(FAILED, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert done.stderr.count("DataError: in the middle") == 2
    assert done.stderr.count("left 1 of them running") == 1


def test_use_it_names_a_file_that_is_there(tmp_path):
    rows = tmp_path / "some rows.jsonl"
    settings = [f"data.train_data_path={rows}", "data.dataset_name=BinaryPreferenceDataset"]
    config = load_config(RewardTrainingRun, None, settings).config
    assert train._use_of("rm", config) == "laurel serve --model {}"
    rows.write_text("", encoding="utf-8")
    assert train._use_of("rm", config) == f"laurel score --model {{}} '{rows}'"
    other = load_config(RewardTrainingRun, None, [*settings, "data.chosen_key=good"]).config
    assert train._use_of("rm", other) == (
        f"laurel score --model {{}} '{rows}' data.chosen_key=good"
    )
    skips = load_config(RewardTrainingRun, None, [*settings, "data.on_bad_row=skip"]).config
    assert train._use_of("rm", skips) == (
        f"laurel score --model {{}} '{rows}' data.on_bad_row=skip"
    )
