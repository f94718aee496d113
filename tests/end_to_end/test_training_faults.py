"""`laurel rm` when figures are not finite and when the disk is full."""

import json
import shutil
import subprocess
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from laurel.errors import CheckpointError, NonFiniteError, UnsavedError
from laurel.models.checkpoint.store import CheckpointStore
from laurel.run.train import trained
from runs import manifest_hashes, pairs, run, series, settings, train, write_rows


def rows_with_margins(path, *poisoned, count=40):
    """Rows of which some ask for a lead that float32 cannot hold: their loss is infinite."""
    rows = pairs(count)
    for index, row in enumerate(rows):
        row["margin"] = 1e308 if index in poisoned else 0.1
    return write_rows(path, rows)


BY_MARGIN = (
    "rm.loss.use_margin=true",
    "data.margin_key=margin",
    "data.shuffle=false",
    "data.split_validation_size=0",
    "checkpointing.save_period=1",
    "checkpointing.keep_top_k=null",
)


@pytest.mark.slow
def test_a_bad_step_is_not_applied_and_its_rows_are_kept(tmp_path):
    rows = rows_with_margins(tmp_path / "rows.jsonl", 17, 20)  # both in step 3
    done = train(settings(tmp_path, *BY_MARGIN, "rm.max_bad_steps=2", rows=rows))
    assert done.outcome.ended == "finished"
    hashes = {
        step: manifest_hashes(tmp_path / "saves" / f"step_{step}")["model.safetensors"]
        for step in range(1, 6)
    }
    assert hashes[3] == hashes[2]
    assert len(set(hashes.values())) == 4
    optimizer = [
        manifest_hashes(tmp_path / "saves" / f"step_{step}")["training/optimizer.safetensors"]
        for step in (2, 3)
    ]
    assert optimizer[0] == optimizer[1]
    assert series(tmp_path, "train/bad_steps_in_a_row") == {1: 0, 2: 0, 3: 1, 4: 0, 5: 0}
    assert sorted(series(tmp_path, "train/loss")) == [1, 2, 4, 5]
    kept = tmp_path / "logs" / "exp_001" / "bad_steps" / "step_3.jsonl"
    sources = [json.loads(ln)["source"] for ln in kept.read_text(encoding="utf-8").splitlines()]
    assert sources == [f"rows.jsonl:{line}" for line in range(17, 25)]
    assert f"step 3 not applied: the loss is inf. Its rows are in {kept}" in done.text


@pytest.mark.slow
def test_too_many_bad_steps_end_the_run_and_name_the_rows(tmp_path):
    rows = rows_with_margins(tmp_path / "rows.jsonl", 8, 16, 24)  # steps 2, 3, 4
    overrides = settings(tmp_path, *BY_MARGIN, "rm.max_bad_steps=3", rows=rows)
    ended = run(overrides)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: 3 steps in a row were not finite")
    assert "the loss is inf at step 4, rows rows.jsonl:25, rows.jsonl:26" in ended.stderr
    assert "Traceback" not in ended.stderr
    bad = tmp_path / "logs" / "exp_001" / "bad_steps"
    assert sorted(p.name for p in bad.iterdir()) == ["step_2.jsonl", "step_3.jsonl", "step_4.jsonl"]
    saves = tmp_path / "saves"
    assert sorted(p.name for p in saves.glob("step_*")) == ["step_1", "step_2", "step_3"]
    weights = {manifest_hashes(p)["model.safetensors"] for p in saves.glob("step_*")}
    assert len(weights) == 1, "the weights stayed those of the last good step"
    # The count of bad steps is part of what is gone on from.
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        train(overrides)


@pytest.mark.slow
def test_what_is_not_finite_is_never_the_best_nor_saved(tmp_path):
    """The rate jumps at step 3 and the weights with it: they score NaN."""
    changes = [
        "~policy.optimizer",
        "+policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 1e30}}",
        "policy.scheduler=[{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1e-33, "
        "total_iters: 9}}, {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}, "
        "{milestones: [2]}]",
        "rm.val_period=1",
        "checkpointing.save_period=1",
        "checkpointing.keep_top_k=null",
        "rm.max_bad_steps=99",
    ]
    with pytest.raises(
        CheckpointError, match="of step 4, could not be saved; the newest is"
    ) as end:
        train(settings(tmp_path, *changes))
    assert str(end.value).endswith("step_2")
    assert sorted(p.name for p in (tmp_path / "saves").glob("step_*")) == ["step_1", "step_2"]
    assert sorted(series(tmp_path, "validation-default/loss")) == [1, 2]
    assert series(tmp_path, "validation-default/num_nonfinite") == {3: 16, 4: 16}
    assert series(tmp_path, "train/bad_steps_in_a_row") == {1: 0, 2: 0, 3: 0, 4: 1}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, of 700 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if not made or made.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_full_is_told_before_the_first_step(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=250_000)
    monkeypatch.setattr("laurel.models.checkpoint.store.shutil.disk_usage", lambda path: usage)
    often = settings(tmp_path, "checkpointing.save_period=2")
    with pytest.raises(CheckpointError, match=r"0\.2 MB free, and 2 checkpoints .* about 0\.3 MB"):
        train(often)
    assert not list((tmp_path / "logs").iterdir()), "no step was taken"
    # There is room for the only checkpoint of another run, and for a second one beside a first.
    train(settings(tmp_path, "checkpointing.save_period=100", "rm.max_num_steps=2"))
    usage.free = 300_000
    resumed = train(settings(tmp_path, "checkpointing.keep_top_k=9", "checkpointing.save_period=1"))
    assert "has room for 1 more checkpoint of about 0.2 MB" in resumed.text
    usage.free = 100_000
    with pytest.raises(CheckpointError, match=r"1 checkpoint of this run takes about 0\.2 MB"):
        train(settings(tmp_path, "rm.max_num_epochs=9"))


@pytest.mark.slow
def test_a_disk_that_fills_up_in_the_middle_of_a_file(tmp_path, small_disk, monkeypatch):
    def find_room(self, *args, **kwargs):
        require_room(self, *args, **kwargs)
        (small_disk / "filler").write_bytes(b"x" * 600_000)

    require_room = CheckpointStore.require_room
    monkeypatch.setattr(CheckpointStore, "require_room", find_room)
    monkeypatch.setattr(CheckpointStore, "_require_space", lambda self: None)
    where = f"checkpointing.checkpoint_dir={small_disk}/saves"
    console = Console(file=(said := StringIO()), width=200)
    with pytest.raises(UnsavedError, match=r"nothing of this run was saved.* No space left"):
        trained("rm", None, settings(tmp_path, where, "checkpointing.save_period=2"), console)
    end = said.getvalue().partition("problem: nothing of this run was saved, and its weights")[2]
    first, _, rest = end.partition("\nfinished after step 4")
    assert "No space left" in first
    assert "\nvalidation-default: accuracy" in rest
    assert "use it" not in rest
    assert not list(small_disk.glob("saves/step_*"))
    assert not list(small_disk.glob("saves/.tmp-*"))
    assert sorted(series(tmp_path, "train/loss")) == [1, 2, 3, 4]
