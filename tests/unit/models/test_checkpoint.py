import ast
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import laurel
from laurel.errors import CheckpointError
from laurel.models.checkpoint.manifest import INFO_NAME, MANIFEST_NAME
from laurel.models.checkpoint.store import CheckpointStore, verify
from saved_steps import FILES, hidden, save_all, save_step, writer


@pytest.fixture
def root(tmp_path):
    return tmp_path / "results" / "rm"


def test_a_saved_checkpoint_holds_what_was_written_and_says_so(root):
    with CheckpointStore(root, metric_name="validation-default_loss") as store:
        info = {"epoch": 1, "step": 3, "validation-default_loss": 0.25}
        path = save_step(store, 7, writer(7), metric=0.25, info=info)
        assert path == root / "step_7"
    manifest = verify(path)
    assert (manifest.step, manifest.metric) == (7, 0.25)
    assert manifest.metric_name == "validation-default_loss"
    assert manifest.created_by["laurel"] == laurel.__version__
    assert set(manifest.files) == {*FILES, "training_info.json"}
    assert manifest.files["model.safetensors"].size == len(b"weights of 7")
    assert (path / "policy/tokenizer.json").read_bytes() == b"words of 7"
    assert json.loads((path / INFO_NAME).read_text()) == info
    assert hidden(root) == [".lock"]
    assert os.readlink(root / "best") == "step_7"


def test_numbers_that_are_not_finite_are_null_in_the_info_and_never_best(root):
    with CheckpointStore(root) as store:
        save_step(store, 1, writer(1), metric=3.0)
        for step, metric in enumerate([float("nan"), float("-inf"), None], start=2):
            save_step(
                store, step, writer(step), metric=metric, info={"a": [metric], "b": {"c": metric}}
            )
            said = json.loads((store.path_of(step) / INFO_NAME).read_text())
            assert said == {"a": [None], "b": {"c": None}}
        assert store.best() == root / "step_1"
        assert (root / "best").resolve() == root / "step_1"


def test_without_any_metric_there_is_no_best_and_no_link(root):
    save_all(root, {1: 0.5})
    assert (root / "best").is_symlink()
    with CheckpointStore(root, metric_name="another") as store:
        save_step(store, 2, writer(2))
        assert store.best() is None
    assert not (root / "best").is_symlink()


def test_saving_needs_the_lock_and_a_possible_step(root):
    with pytest.raises(RuntimeError, match="enter the store first"):
        save_step(CheckpointStore(root), 1, writer(1))
    with CheckpointStore(root) as store, pytest.raises(ValueError, match="0 or more"):
        save_step(store, -1, writer(1))


def test_a_step_can_be_saved_again(root):
    save_all(root, {4: 1.0})
    with CheckpointStore(root) as store:
        save_step(store, 4, writer("four, again"), metric=2.0)
    assert verify(root / "step_4").metric == 2.0
    assert (root / "step_4/model.safetensors").read_bytes() == b"weights of four, again"
    assert hidden(root) == [".lock"]


def test_a_directory_that_laurel_did_not_write_is_moved_not_deleted(root, caplog):
    foreign = root / "step_4"
    (foreign / "policy").mkdir(parents=True)
    (foreign / "policy/weights.bin").write_bytes(b"a month of work")
    save_all(root, {4: 1.0})
    verify(root / "step_4")
    (moved,) = root.glob("step_4.foreign-*")
    assert (moved / "policy/weights.bin").read_bytes() == b"a month of work"
    assert CheckpointStore(root).steps() == [4]
    assert "is not a checkpoint of Laurel; moved to" in caplog.text


def test_links_are_refused_in_a_checkpoint(root):
    def write(directory):
        (directory / "model.safetensors").symlink_to("/etc/hostname")

    with CheckpointStore(root) as store:
        with pytest.raises(CheckpointError, match=r"model\.safetensors is not a regular file"):
            save_step(store, 1, write)
        assert store.steps() == []


def test_an_error_of_the_writer_is_its_own_and_leaves_nothing(root):
    def write(directory):
        (directory / "half").write_bytes(b"x")
        raise KeyError("optimizer")

    with CheckpointStore(root) as store:
        with pytest.raises(KeyError, match="optimizer"):
            save_step(store, 1, write)
        with pytest.raises(KeyboardInterrupt):
            save_step(store, 2, lambda directory: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert hidden(root) == [".lock"]
    assert CheckpointStore(root).steps() == []


PHASES = [
    "begin",
    "written",
    "file:model.safetensors",
    "file:training_info.json",
    "fsynced",
    "manifest",
    "renamed",
]


class Trouble:
    """Raises at one phase, once it is armed."""

    def __init__(self, phase, number=errno.ENOSPC):
        self.phase = phase
        self.armed = False
        self.number = number

    def __call__(self, phase):
        if self.armed and phase == self.phase:
            raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("phase", PHASES)
def test_a_full_disk_at_any_phase_leaves_whole_checkpoints_only(root, phase):
    trouble = Trouble(phase)
    with CheckpointStore(root, on_phase=trouble) as store:
        save_step(store, 1, writer(1))
        trouble.armed = True
        with pytest.raises(CheckpointError, match=r"step 2 could not be saved.*No space") as e:
            save_step(store, 2, writer(2))
        assert e.value.__cause__.errno == errno.ENOSPC
        assert hidden(root) == [".lock"]
        verify(root / "step_1")
        newest = store.newest_whole()
        assert newest.skipped == ()
        assert newest.path == root / f"step_{2 if phase == 'renamed' else 1}"
        trouble.armed = False
        verify(save_step(store, 3, writer(3)))


@pytest.mark.parametrize("phase", [*PHASES[:-1], "renamed-old", "renamed"])
def test_a_full_disk_while_replacing_leaves_the_old_or_the_new(root, phase):
    trouble = Trouble(phase)
    with CheckpointStore(root, on_phase=trouble) as store:
        save_step(store, 1, writer("old"))
        trouble.armed = True
        with pytest.raises(CheckpointError):
            save_step(store, 1, writer("new"))
        verify(root / "step_1")
        expected = b"weights of new" if phase == "renamed" else b"weights of old"
        assert (root / "step_1/model.safetensors").read_bytes() == expected
    with CheckpointStore(root):
        assert hidden(root) == [".lock"]


@pytest.mark.parametrize("phase", ["best", "prune:step_1", "deleting:step_1"])
def test_what_fails_after_the_save_is_only_a_warning(root, phase, caplog):
    trouble = Trouble(phase, errno.EPERM)
    with CheckpointStore(root, keep_top_k=1, on_phase=trouble) as store:
        trouble.armed = True
        for step in (1, 2, 3):
            save_step(store, step, writer(step))
        verify(root / "step_3")
        assert "Operation not permitted" in caplog.text
        assert store.steps() == ([1, 2, 3] if phase == "prune:step_1" else [2, 3])
        trouble.armed = False
        save_step(store, 4, writer(4))
        assert store.steps() == [3, 4]


def test_errors_of_rust_libraries_count_as_errors_of_the_disk(root):
    def write(directory):
        raise Exception("Error while serializing: I/O error: No space left on device (os error 28)")

    with CheckpointStore(root) as store, pytest.raises(CheckpointError, match="No space left"):
        save_step(store, 1, write)


def test_space_is_checked_before_anything_is_written(root):
    def write(directory):
        raise AssertionError("must not be called")

    with CheckpointStore(root) as store:
        store.require_room(1, estimated_bytes=100)
        save_step(store, 1, writer(1))
    with CheckpointStore(root.parent / "other") as store:
        with pytest.raises(CheckpointError, match="disk with"):
            store.require_room(1, estimated_bytes=10**18)
        with pytest.raises(
            CheckpointError, match=r"MB free and 1,200,000,000,000\.0 MB are needed"
        ):
            save_step(store, 1, write)


def test_the_best_and_the_latest_stay(root):
    losses = {1: 0.9, 2: 0.3, 3: 0.5, 4: 0.4, 5: 0.8, 6: 0.7}
    save_all(root, losses, keep_top_k=2)
    assert CheckpointStore(root).steps() == [2, 4, 6]
    assert CheckpointStore(root).best() == root / "step_2"
    assert os.readlink(root / "best") == "step_2"
    assert hidden(root) == [".lock"]


@pytest.mark.parametrize(
    ("metrics", "options", "kept"),
    [
        # Higher can be better, and of equals the newer wins.
        ({1: 0.5, 2: 0.9, 3: 0.9, 4: 0.2}, {"keep_top_k": 1, "higher_is_better": True}, [3, 4]),
        ({1: 0.5, 2: 0.4, 3: 0.3}, {"keep_top_k": 1}, [2, 3]),  # never fewer than two
        (dict.fromkeys(range(1, 7)), {"keep_top_k": 3}, [4, 5, 6]),
        (dict.fromkeys(range(1, 7)), {"keep_top_k": None}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_which_stay(root, metrics, options, kept):
    save_all(root, metrics, **options)
    assert CheckpointStore(root).steps() == kept


def test_a_pinned_checkpoint_stays_until_the_store_is_left(root):
    save_all(root, {1: None, 2: None}, keep_top_k=1)
    with CheckpointStore(root, keep_top_k=1) as store:
        store.pin(root / "step_2")
        store.pin(root.parent / "elsewhere")
        for step in (3, 4, 5):
            save_step(store, step, writer(step))
        assert store.steps()[0] == 2
        assert 3 not in store.steps()
    with CheckpointStore(root, keep_top_k=1) as store:
        save_step(store, 6, writer(6))
        assert 2 not in store.steps()


def test_metrics_of_another_name_are_not_compared(root):
    save_all(root, {1: 0.1, 2: 0.2}, metric_name="loss")
    with CheckpointStore(root, metric_name="accuracy", higher_is_better=True, keep_top_k=2) as new:
        save_step(new, 3, writer(3), metric=0.05)
        assert new.best() == root / "step_3"
        assert new.steps() == [2, 3]


def test_damaged_and_foreign_directories_neither_count_nor_go(root):
    save_all(root, {1: 0.1, 2: 0.2, 3: 0.3})
    (root / "step_2/model.safetensors").write_bytes(b"")
    (root / "step_3" / MANIFEST_NAME).unlink()
    save_all(root, {4: 0.4, 5: 0.5}, keep_top_k=1)
    assert CheckpointStore(root).steps() == [1, 2, 3, 5]


def test_a_run_that_went_back_keeps_what_it_just_saved(root):
    save_all(root, {10: 0.1, 20: 0.2})
    save_all(root, {12: 0.9}, keep_top_k=1)
    assert CheckpointStore(root).steps() == [10, 12, 20]


def test_leftovers_of_a_killed_writer_go_and_nothing_else_does(root):
    save_all(root, {1: None})
    ours = [f".{kind}-step_5-{'0' * 32}" for kind in ("tmp", "del")]
    ours += [f".old-step_1-{'0' * 32}", f".start-{'0' * 32}"]
    theirs = [".tmp-step_5", ".tmp-step_5-old", f".tmp-step_x-{'0' * 32}", "tmp_step_5", ".git"]
    for name in ours + theirs:
        (root / name / "deep").mkdir(parents=True)
        (root / name / "deep/file").touch()
    (root / f".best-{'0' * 32}").symlink_to("step_1")
    CheckpointStore(root).newest_whole()
    assert (root / ours[0]).exists()  # a reader clears nothing up
    with CheckpointStore(root) as store:
        assert hidden(root) == sorted([".lock", *(n for n in theirs if n.startswith("."))])
        assert (root / "tmp_step_5").exists()
        verify(store.path_of(1))


def test_a_replacement_that_was_cut_off_is_finished_or_undone(root, caplog):
    for fresh_is_whole in (True, False):
        save_all(root, {1: 0.5})
        save_all(root / "aside", {1: 0.7})
        identity = "a" * 32
        (root / "step_1").rename(root / f".old-step_1-{identity}")
        fresh = root / f".tmp-step_1-{identity}"
        (root / "aside/step_1").rename(fresh)
        if not fresh_is_whole:
            (fresh / "model.safetensors").unlink()
        with CheckpointStore(root) as store:
            assert verify(store.path_of(1)).metric == (0.7 if fresh_is_whole else 0.5)
        assert hidden(root) == [".lock"]
        assert "restored after an interrupted save" in caplog.text


def test_a_second_writer_is_refused_and_told_who_is_the_first(root):
    with CheckpointStore(root) as first:
        with pytest.raises(CheckpointError, match=f"written by process {os.getpid()} on"):
            CheckpointStore(root).__enter__()
        verify(save_step(first, 1, writer(1)))  # the refusal has not cost the first its lock
    with CheckpointStore(root):
        pass


def test_the_store_does_not_need_torch():
    program = "import sys, laurel.models.checkpoint.store; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    for name in (b"'torch'", b"'numpy'", b"'pydantic'", b"'transformers'"):
        assert name not in done.stdout


UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def unpickling(tree):
    """What in a parsed file could run code from data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] in UNPICKLERS)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in UNPICKLERS:
                yield node.module
            elif node.module in ("torch", "torch.serialization"):
                yield from (f"torch.{n.name}" for n in node.names if n.name in ("load", "save"))
            elif node.module.startswith("torch.distributed.checkpoint"):
                # The metadata of its file-system storage is a pickle; that of safetensors is none.
                yield from (n.name for n in node.names if n.name.startswith("FileSystem"))
        elif isinstance(node, ast.Attribute) and node.attr in ("load", "save"):
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                yield f"torch.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            yield node.arg


BETWEEN_OWN_PROCESSES = {
    "workers/worker_actor.py",
    "workers/spawned.py",
    "workers/calls.py",
    "workers/ray_group.py",
}
"""Calls and results of the workers of one run. Ray carries everything as pickles, behind the token
of its cluster, and processes that a run has started itself have a pipe of their own; nothing is
ever read from a file or from anybody else."""


@pytest.mark.slow
def test_no_source_file_can_unpickle():
    package = Path(laurel.__file__).parent
    files = sorted(package.rglob("*.py"))
    assert package / "models/checkpoint/state.py" in files
    found = {
        str(file.relative_to(package)): list(unpickling(ast.parse(file.read_text())))
        for file in files
    }
    guilty_ones = {file: names for file, names in found.items() if names}
    assert guilty_ones == {file: ["pickle"] for file in BETWEEN_OWN_PROCESSES}
    for guilty in ("import pickle", "from torch import load", "torch.load(f)", "f(allow_pickle=1)"):
        assert list(unpickling(ast.parse(guilty)))
