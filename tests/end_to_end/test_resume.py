"""Going on from a checkpoint: the run ends bit for bit like one that never stopped.

Here runs stop at a limit of steps, in this process; in `test_interruptions.py` they are killed.
"""

import re

import pytest

from laurel.errors import CheckpointError, ConfigError
from runs import (
    LOADED,
    TINY,
    assert_equal_runs,
    pairs,
    save_model,
    settings,
    train,
    write_rows,
)

MANNERS = {
    "a model that was loaded": [],
    "adapters, dropout recomputed and a scheduler list": [
        "+policy.scratch.config_overrides.attention_dropout=0.3",
        "policy.dtensor_cfg.activation_checkpointing=true",
        "policy.dtensor_cfg.lora_cfg.enabled=true",
        "policy.dtensor_cfg.lora_cfg.dropout=0.2",
        "policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, "
        "total_iters: 6}}, {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 0.5, "
        "total_iters: 3}}, {milestones: [6]}]",
    ],
    "hidden dropout, padded rows in bfloat16": [
        "policy.scratch.architecture=phi",
        "+policy.scratch.config_overrides.resid_pdrop=0.3",
        "+policy.scratch.config_overrides.embd_pdrop=0.1",
        "+policy.scratch.config_overrides.attention_dropout=0.3",
        "policy.precision=bfloat16",
        "policy.sequence_packing.enabled=false",
        "policy.train_micro_batch_size=3",
    ],
}
"""A plain run goes on in `test_a_torn_newest_is_skipped_by_name_and_the_one_before_used`."""


@pytest.mark.slow_parameters(*list(MANNERS)[1:])
@pytest.mark.parametrize("manner", MANNERS)
def test_resumed_equals_uninterrupted(tmp_path, manner):
    model = save_model(tmp_path / "model")
    changes = ["rm.max_num_epochs=3", "checkpointing.keep_top_k=null", *MANNERS[manner]]

    def overrides(name, *more):
        chosen = settings(tmp_path / name, *changes, *more)
        loaded = [*LOADED, *chosen[len(TINY) :], f"policy.model_name={model}"]
        return loaded if "loaded" in manner else chosen

    train(overrides("straight"))
    # Step 4 is inside an epoch and step 7 in the next; neither is a period of anything.
    for limit in (4, 7, -1):
        train(overrides("broken", f"rm.max_num_steps={limit}"))
    assert_equal_runs(tmp_path / "straight", tmp_path / "broken", last=12, common=(5, 10))


@pytest.mark.slow
def test_the_comparison_sees_a_difference(tmp_path):
    """The same run, with other random numbers for dropout from step 6 on."""
    changes = ["rm.max_num_epochs=2", "+policy.scratch.config_overrides.attention_dropout=0.3"]
    train(settings(tmp_path / "straight", *changes))
    train(settings(tmp_path / "broken", *changes, "rm.max_num_steps=5"))
    train(settings(tmp_path / "broken", *changes, "policy.sequence_packing.enabled=false"))
    with pytest.raises(AssertionError):
        assert_equal_runs(tmp_path / "straight", tmp_path / "broken", last=8)


def spoil(checkpoint, name="model.safetensors"):
    content = bytearray((checkpoint / name).read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / name).write_bytes(content)


@pytest.mark.slow
def test_a_run_that_goes_on_says_what_it_read_in_a_line_and_where_it_logs(tmp_path):
    first = train(settings(tmp_path, "rm.max_num_steps=2"))
    assert "Data 'train'" in first.text
    assert "warning" not in first.text
    elsewhere = f"logger.log_dir={tmp_path}/elsewhere"
    resumed = train(settings(tmp_path, "rm.max_num_steps=3", elsewhere))
    logs = tmp_path / "logs" / "exp_001"
    assert "Data 'train'" not in resumed.text
    assert (
        "data    as when the run began: train (32 rows), validation-default (8 rows); "
        f"{logs}/data_report.json" in resumed.text
    )
    assert f"warning: {elsewhere} has no effect: a run that goes on logs" in resumed.text
    assert resumed.outcome.run_dir == logs
    assert not (tmp_path / "elsewhere").exists()
    # The file has one row more since, which is left out as a duplicate.
    held_out = write_rows(tmp_path / "held_out.jsonl", pairs(6, seed=1))
    by_itself = ("data.split_validation_size=0", f"data.val_data_path={held_out}")
    rows = tmp_path / "train.jsonl"
    other = tmp_path / "other"
    train(settings(other, "rm.max_num_steps=1", *by_itself, rows=rows))
    write_rows(held_out, [*pairs(6, seed=1), pairs(1, seed=1)[0]])
    told = train(settings(other, "rm.max_num_steps=2", *by_itself, rows=rows)).text
    assert "Data 'validation-default'" in told
    assert "as when the run began: train (40 rows); " in told
    write_rows(held_out, pairs(7, seed=1))
    with pytest.raises(CheckpointError, match="validation data: "):
        train(settings(other, "rm.max_num_steps=3", *by_itself, rows=rows))


@pytest.mark.slow
def test_a_torn_newest_is_skipped_by_name_and_the_one_before_used(tmp_path):
    changes = ["rm.max_num_epochs=3", "checkpointing.keep_top_k=null"]
    train(settings(tmp_path / "straight", *changes))
    train(settings(tmp_path / "broken", *changes, "rm.max_num_steps=10"))
    spoil(tmp_path / "broken" / "saves" / "step_10")
    resumed = train(settings(tmp_path / "broken", *changes))
    (warning,) = [line for line in resumed.text.splitlines() if line.startswith("warning")]
    assert "step_10" in warning
    assert "model.safetensors" in warning
    assert re.search(r"resuming from \S*/step_5, after step 5", resumed.text)
    assert_equal_runs(tmp_path / "straight", tmp_path / "broken", last=12, common=(5, 10))


def test_nothing_whole_to_go_on_from_is_refused(tmp_path):
    train(settings(tmp_path, "rm.max_num_steps=3"))
    spoil(tmp_path / "saves" / "step_3", "training/optimizer.safetensors")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        train(settings(tmp_path))
    assert sorted(p.name for p in (tmp_path / "saves").glob("step_*")) == ["step_3"]


def test_resume_never_refuses_a_used_directory(tmp_path):
    assert train(settings(tmp_path, "checkpointing.resume=never", "rm.max_num_steps=1"))
    with pytest.raises(CheckpointError, match=r"resume=never and \S+ holds checkpoints"):
        train(settings(tmp_path, "checkpointing.resume=never"))


@pytest.mark.slow
def test_resume_required_refuses_an_empty_directory(tmp_path):
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
        ("data.max_samples=20", "data.max_samples: None then, 20 now"),
    ],
)
def test_another_run_is_refused_and_the_change_is_named(tmp_path_factory, change, named):
    directory = tmp_path_factory.getbasetemp() / "one-step-run"
    if not directory.exists():
        train(settings(directory, "rm.max_num_steps=1"))
    with pytest.raises(CheckpointError, match="is of another run") as refusal:
        train(settings(directory, change))
    assert named in str(refusal.value)
    assert str(refusal.value).count(" then, ") == 1
    assert [p.name for p in (directory / "logs").iterdir()] == ["exp_001"]


def test_changed_rows_are_another_run(tmp_path):
    train(settings(tmp_path, "rm.max_num_steps=1"))
    write_rows(tmp_path / "train.jsonl", pairs(40)[::-1])
    with pytest.raises(CheckpointError, match="training data: "):
        train(settings(tmp_path))


EARLY = (
    "rm.max_num_epochs=20",
    "rm.val_period=2",
    "checkpointing.keep_top_k=null",
    # No validation is so much better than the first: it ends after the third one that is not.
    "rm.early_stopping={metric_name: validation-default_accuracy, min_delta: 0.9, patience: 3}",
)


@pytest.mark.slow
def test_a_run_that_no_longer_improves_ends_and_goes_on_where_it_is_to_wait_longer(tmp_path):
    """In pieces it ends where it ends in one: `unit/training/test_loop.py`."""
    outcome = train(settings(tmp_path, *EARLY)).outcome
    assert (outcome.step, outcome.is_early, outcome.ended) == (8, True, "finished")
    # It has ended: the same command takes no further step, unless it is to wait longer.
    assert train(settings(tmp_path, *EARLY)).outcome.step == 8
    assert train(settings(tmp_path, *EARLY, "rm.early_stopping.patience=4")).outcome.step == 10
    with pytest.raises(
        CheckpointError, match=r"rm\.early_stopping\.min_delta: 0\.9 then, 0\.5 now"
    ):
        train(settings(tmp_path, *EARLY, "rm.early_stopping.min_delta=0.5"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["rm.early_stopping.metric_name=nothing"], "rm.early_stopping.metric_name=nothing: this"),
        (["rm.early_stopping.metric_name=train_loss"], "watches a metric of a validation set"),
        (
            ["rm.early_stopping.metric_name=auto", "data.split_validation_size=0"],
            "There is no validation set",
        ),
        (
            [
                "rm.early_stopping.metric_name=auto",
                "rm.val_period=0",
                "checkpointing.metric_name=null",
            ],
            "which is 0; set it",
        ),
        (["rm.early_stopping.patience=2"], "patience has no effect without metric_name"),
    ],
)
def test_early_stopping_that_could_not_work_is_refused(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        train(settings(tmp_path, *changes))
