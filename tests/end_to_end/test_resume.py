"""A run that was interrupted, however it was, ends bit for bit like one that was not."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from laurel.errors import CheckpointError
from runs import (
    Finished,
    last_step,
    manifest_hashes,
    pairs,
    run,
    series,
    settings,
    start,
    train,
    wait_until,
    write_rows,
)

# ---------------------------------------------------------------- interrupted by a limit, in process

MANNERS = {
    "plain": [],
    "attention dropout": ["+policy.scratch.config_overrides.attention_dropout=0.3"],
    "hidden dropout": [
        "policy.scratch.architecture=phi",
        "+policy.scratch.config_overrides.resid_pdrop=0.3",
        "+policy.scratch.config_overrides.embd_pdrop=0.1",
    ],
    "dropout recomputed": [
        "+policy.scratch.config_overrides.attention_dropout=0.3",
        "policy.dtensor_cfg.activation_checkpointing=true",
    ],
    "scheduler list": [
        "policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, "
        "total_iters: 6}}, {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 0.5, "
        "total_iters: 3}}, {milestones: [6]}]",
    ],
    "LoRA": ["policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dropout=0.2"],
    "bfloat16": ["policy.precision=bfloat16"],
    "padded rows": [
        "policy.sequence_packing.enabled=false",
        "policy.train_micro_batch_size=3",
        "+policy.scratch.config_overrides.attention_dropout=0.3",
    ],
    "Adafactor": ["policy.optimizer.name=torch.optim.Adafactor", "policy.optimizer.kwargs={lr: 0.01}"],
}


@pytest.mark.parametrize("manner", MANNERS)
def test_resumed_equals_uninterrupted(tmp_path: Path, manner: str) -> None:
    changes = ["rm.max_num_epochs=3", "checkpointing.keep_top_k=null", *MANNERS[manner]]
    train(settings(tmp_path / "straight", *changes))
    # Step 4 is inside an epoch and step 7 in the next; neither is a period of anything.
    for limit in (4, 7, -1):
        train(settings(tmp_path / "broken", *changes, f"rm.max_num_steps={limit}"))
    assert_equal_runs(tmp_path / "straight", tmp_path / "broken", last=12, common=(5, 10))


def assert_equal_runs(
    straight: Path, broken: Path, *, last: int, common: tuple[int, ...] = ()
) -> None:
    for name in ("train/loss", "train/grad_norm", "train/lr", "train/global_valid_toks"):
        found, expected = series(broken, name), series(straight, name)
        assert sorted(expected) == list(range(1, last + 1))
        assert found == expected, name
    for step in (*common, last):
        expected = manifest_hashes(straight / "saves" / f"step_{step}")
        assert "model.safetensors" in expected
        assert "training/optimizer.safetensors" in expected
        assert manifest_hashes(broken / "saves" / f"step_{step}") == expected, step


def test_the_comparison_sees_a_difference(tmp_path: Path) -> None:
    """Dropout with another stream of random numbers: only the seed of the model stays."""
    changes = ["rm.max_num_epochs=2", "+policy.scratch.config_overrides.attention_dropout=0.3"]
    train(settings(tmp_path / "straight", *changes))
    train(settings(tmp_path / "broken", *changes, "rm.max_num_steps=5"))
    state = tmp_path / "broken" / "saves" / "step_5" / "training" / "training_state.json"
    assert re.search(r'"random": *\{', state.read_text(encoding="utf-8"))
    train(settings(tmp_path / "broken", *changes, "policy.max_grad_norm=0.5"))
    with pytest.raises(AssertionError):
        assert_equal_runs(tmp_path / "straight", tmp_path / "broken", last=8)


def test_a_longer_run_goes_on_from_a_finished_one(tmp_path: Path) -> None:
    first = train(settings(tmp_path / "broken", "rm.max_num_epochs=1"))
    again = train(settings(tmp_path / "broken", "rm.max_num_epochs=1"))
    assert (first.outcome.ended, again.outcome.ended) == ("finished", "finished")
    assert again.outcome.latest == first.outcome.latest
    train(settings(tmp_path / "broken", "rm.max_num_epochs=2"))
    train(settings(tmp_path / "straight", "rm.max_num_epochs=2"))
    assert_equal_runs(tmp_path / "straight", tmp_path / "broken", last=8)


# ------------------------------------------------------------------------------ what is gone on from


def spoil(checkpoint: Path, name: str = "model.safetensors") -> None:
    content = bytearray((checkpoint / name).read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / name).write_bytes(content)


def test_a_torn_newest_is_skipped_by_name_and_the_one_before_used(tmp_path: Path) -> None:
    changes = ["rm.max_num_epochs=3", "checkpointing.keep_top_k=null"]
    train(settings(tmp_path / "straight", *changes))
    train(settings(tmp_path / "broken", *changes, "rm.max_num_steps=10"))
    spoil(tmp_path / "broken" / "saves" / "step_10")
    resumed = train(settings(tmp_path / "broken", *changes))
    (warning,) = [line for line in resumed.text.splitlines() if line.startswith("warning")]
    assert "step_10" in warning
    assert "model.safetensors" in warning
    assert re.search(r"going on from \S*/step_5, after step 5", resumed.text)
    assert_equal_runs(tmp_path / "straight", tmp_path / "broken", last=12, common=(5, 10))


def test_nothing_whole_to_go_on_from_is_refused(tmp_path: Path) -> None:
    train(settings(tmp_path, "rm.max_num_steps=5"))
    spoil(tmp_path / "saves" / "step_5", "training/optimizer.safetensors")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        train(settings(tmp_path))
    assert sorted(p.name for p in (tmp_path / "saves").glob("step_*")) == ["step_5"]


def test_resume_never_refuses_a_used_directory(tmp_path: Path) -> None:
    assert train(settings(tmp_path, "checkpointing.resume=never", "rm.max_num_steps=1"))
    with pytest.raises(CheckpointError, match=r"resume=never and \S+ holds checkpoints"):
        train(settings(tmp_path, "checkpointing.resume=never"))


def test_resume_required_refuses_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no whole checkpoint to go on from"):
        train(settings(tmp_path, "checkpointing.resume=required"))
    assert not (tmp_path / "saves").exists()
    assert not (tmp_path / "logs").exists()
    train(settings(tmp_path, "rm.max_num_steps=1"))
    assert train(settings(tmp_path, "checkpointing.resume=required", "rm.max_num_steps=2"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("rm.seed=7", "rm.seed: 42 then, 7 now"),
        ("policy.train_global_batch_size=4", "policy.train_global_batch_size: 8 then, 4 now"),
        ("policy.optimizer.kwargs.lr=1.0", "policy.optimizer.kwargs.lr: 0.003 then, 1.0 now"),
        ("rm.loss.label_smoothing=0.1", "rm.loss.label_smoothing: 0.0 then, 0.1 now"),
        ("policy.tokenizer.chat_template=plain", "policy.tokenizer.chat_template: 'default' then"),
        ("data.truncation_side=right", "data.truncation_side: 'left' then, 'right' now"),
        ("policy.dtensor_cfg.lora_cfg.enabled=true", "lora_cfg.enabled: False then, True now"),
        ("data.max_samples=20", "training data: "),
    ],
)
def test_another_run_is_refused_and_the_change_is_named(
    tmp_path_factory: pytest.TempPathFactory, change: str, named: str
) -> None:
    directory = tmp_path_factory.getbasetemp() / "one-step-run"
    if not directory.exists():
        train(settings(directory, "rm.max_num_steps=1"))
    with pytest.raises(CheckpointError, match="is of another run") as refusal:
        train(settings(directory, change))
    assert named in str(refusal.value)
    assert str(refusal.value).count(" then, ") == 1
    assert [p.name for p in (directory / "logs").iterdir()] == ["exp_001"]


def test_changed_rows_are_another_run(tmp_path: Path) -> None:
    train(settings(tmp_path, "rm.max_num_steps=1"))
    write_rows(tmp_path / "train.jsonl", pairs(40)[::-1])
    with pytest.raises(CheckpointError, match="training data: "):
        train(settings(tmp_path))


def test_a_checkpoint_without_optimizer_cannot_be_gone_on_from(tmp_path: Path) -> None:
    train(settings(tmp_path, "rm.max_num_steps=1", "checkpointing.save_optimizer=false"))
    with pytest.raises(CheckpointError, match="save_optimizer=false"):
        train(settings(tmp_path))


# --------------------------------------------------------------------------------- real interruptions

LONG = ("rm.max_num_epochs=60", "rm.val_period=40", "checkpointing.save_period=20",
        "+policy.scratch.config_overrides.attention_dropout=0.2")  # fmt: skip
LONG_STEPS = 60 * 4


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of 240 steps."""
    directory = tmp_path_factory.mktemp("straight")
    train(settings(directory, *LONG))
    return directory


def is_saving(saves: Path) -> bool:
    return any(saves.glob(".tmp-*/model.safetensors"))


def test_kill_9_at_any_moment_and_in_the_middle_of_a_save(tmp_path: Path, straight: Path) -> None:
    overrides, saves = settings(tmp_path, *LONG), tmp_path / "saves"
    moments = random.Random(3)

    process = start(overrides, log=tmp_path / "first.txt")
    wait_until(lambda: last_step(tmp_path) >= moments.randrange(25, 70), process)
    time.sleep(moments.random() / 20)
    process.kill()
    assert process.wait() == -signal.SIGKILL

    process = start(overrides, log=tmp_path / "second.txt")
    wait_until(lambda: last_step(tmp_path) >= 70, process)
    wait_until(lambda: is_saving(saves), process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    torn = list(saves.glob(".tmp-*"))
    assert torn, "the kill came after the save: the test did not test it"

    finished = run(overrides)
    assert finished.returncode == 0, finished.stderr
    assert "going on from" in finished.stdout
    assert not [p for p in saves.iterdir() if p.name.startswith(".") and p.name != ".lock"]
    assert_equal_runs(straight, tmp_path, last=LONG_STEPS)


def test_sigterm_saves_and_ends_well_and_the_run_goes_on(tmp_path: Path, straight: Path) -> None:
    overrides, saves = settings(tmp_path, *LONG), tmp_path / "saves"
    log = tmp_path / "log.txt"
    process = start(overrides, log=log)
    wait_until(lambda: last_step(tmp_path) >= 23, process)
    process.terminate()
    assert process.wait(timeout=30) == 0
    step = last_step(tmp_path)
    said = log.read_text(encoding="utf-8")
    assert "SIGTERM: saving after this step, then ending" in said
    assert f"stopped by SIGTERM after step {step}; run it again to go on" in said
    assert (saves / f"step_{step}" / "MANIFEST.json").is_file()
    assert step < LONG_STEPS

    finished = run(overrides)
    assert finished.returncode == 0, finished.stderr
    assert f"going on from {saves}/step_{step}, after step {step}" in finished.stdout
    assert_equal_runs(straight, tmp_path, last=LONG_STEPS)


def test_ctrl_c_saves_and_exits_130(tmp_path: Path) -> None:
    process = start(settings(tmp_path, *LONG), log=tmp_path / "log.txt")
    wait_until(lambda: last_step(tmp_path) >= 3, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    said = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert "stopped by SIGINT" in said
    assert "Traceback" not in said
    assert (tmp_path / "saves" / f"step_{last_step(tmp_path)}" / "MANIFEST.json").is_file()


def test_a_second_process_on_the_same_directory_is_refused_and_two_sigterms_end_at_once(
    tmp_path: Path,
) -> None:
    # Long conversations and one step after another without a pause: a step takes seconds.
    rows = [
        {"prompt": f"{i} " * 3000, "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(64)
    ]
    slow = settings(
        tmp_path,
        "policy.train_global_batch_size=64", "policy.max_total_sequence_length=4096",
        "policy.scratch.num_layers=4", "policy.scratch.hidden_size=64", "rm.max_num_epochs=9",
        rows=write_rows(tmp_path / "long.jsonl", rows),
    )  # fmt: skip
    process = start(slow, log=tmp_path / "log.txt")
    wait_until(lambda: last_step(tmp_path) >= 1, process)

    second = run(settings(tmp_path, f"logger.log_dir={tmp_path}/other"))
    assert second.returncode == 2
    assert re.match(rf"error: .*is being written by process {process.pid}", second.stderr)
    assert not (tmp_path / "other").exists()

    started = time.monotonic()
    process.terminate()
    time.sleep(0.2)
    process.terminate()
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert time.monotonic() - started < 1.5
    assert not list((tmp_path / "saves").glob("step_*"))


def test_a_time_budget_ends_the_run_saved_and_in_time(tmp_path: Path) -> None:
    budget = 9
    overrides = settings(
        tmp_path, "rm.max_num_epochs=100000", "checkpointing.save_period=100000",
        "rm.val_period=100000", f"checkpointing.checkpoint_must_save_by=00:00:00:{budget:02}",
        "checkpointing.metric_name=null",
    )  # fmt: skip
    started = time.time()
    finished = run(overrides)
    assert finished.returncode == 0, finished.stderr
    step = last_step(tmp_path)
    assert f"stopped by its time budget after step {step}; run it again" in finished.stdout
    (saved,) = (tmp_path / "saves").glob("step_*")
    assert saved.name == f"step_{step}"
    assert (saved / "MANIFEST.json").stat().st_mtime < started + budget + 1  # and 1 s of imports


# -------------------------------------------------------------------- what a signal left out is made up


def test_a_validation_that_sigterm_left_out_is_made_up_for(tmp_path: Path) -> None:
    """The checkpoint of step 5 was saved without its metric, as a signal leaves it."""
    changes = ["rm.max_num_epochs=2", "checkpointing.keep_top_k=null"]
    straight = train(settings(tmp_path / "straight", *changes))
    interrupted = train(
        settings(tmp_path / "broken", *changes, "rm.max_num_steps=5", "rm.val_period=0",
                 "rm.val_at_end=false", "checkpointing.metric_name=null")
    )  # fmt: skip
    assert not interrupted.outcome.metrics
    resumed = train(settings(tmp_path / "broken", *changes))
    for name in ("validation-default/loss", "validation-default/accuracy"):
        found = series(tmp_path / "broken", name)
        assert sorted(found) == [5, 8]
        assert found == series(tmp_path / "straight", name)
    manifests = [metric_of(tmp_path / kind / "saves" / "step_5") for kind in ("broken", "straight")]
    assert manifests[0] == manifests[1]
    assert manifests[0] is not None
    assert best_name(resumed) == best_name(straight)
    assert_equal_runs(tmp_path / "straight", tmp_path / "broken", last=8, common=(5,))


def metric_of(checkpoint: Path) -> float | None:
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text(encoding="utf-8"))
    metric = manifest["metric"]
    return None if metric is None else float(metric)


def best_name(finished: Finished) -> str:
    assert finished.outcome.best is not None
    return finished.outcome.best.name


def test_a_moved_log_directory_starts_a_new_one(tmp_path: Path) -> None:
    train(settings(tmp_path, "rm.max_num_steps=2"))
    shutil.rmtree(tmp_path / "logs")
    train(settings(tmp_path, "rm.max_num_steps=3"))
    assert sorted(series(tmp_path, "train/loss")) == [3]
