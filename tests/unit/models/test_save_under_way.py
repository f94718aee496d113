"""Checkpoints that are written while something else goes on, and the thread that writes them."""

import gc
import threading
import weakref
from functools import partial

import pytest

from laurel.errors import CheckpointError
from laurel.models.checkpoint.store import Background, CheckpointStore, verify
from saved_steps import save_step


class Copy:
    """Something that takes memory."""


def test_after_a_failure_nothing_is_begun_until_it_was_told():
    background, done = Background("test"), []
    background.start(lambda: 1 / 0)
    background.start(lambda: done.append(1))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            background.outcome(is_awaited=True)
    assert done == []
    background.start(lambda: done.append(2))
    assert background.outcome(is_awaited=True) >= 0
    assert done == [2]


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_piece_holds_is_let_go_when_it_is_done(fails):
    def work(held):
        assert held is not None
        if fails:
            raise OSError("full")

    copy = Copy()
    seen = weakref.ref(copy)
    background = Background("of-this-test")
    background.start(partial(work, copy))
    del copy
    failure = None
    try:
        background.outcome(is_awaited=True)
    except OSError as error:
        failure = error
    for thread in threading.enumerate():
        if thread.name.startswith("of-this-test"):
            thread.join()
    gc.collect()
    assert seen() is None
    assert (failure is not None) == fails


class Writer:
    """Fills a checkpoint directory in the background, when it is allowed to."""

    def __init__(self, content=b"weights", error=None):
        self.content, self.error = content, error
        self.gate = threading.Event()
        self.background = Background("test")
        self.directory = None

    def __call__(self, directory):
        self.directory = directory

        def write():
            self.gate.wait()
            if self.error is not None:
                raise self.error
            (directory / "model.safetensors").write_bytes(self.content)

        self.background.start(write)
        return lambda is_awaited: self.background.outcome(is_awaited=is_awaited)


def names(root):
    return sorted(path.name for path in root.iterdir() if path.name != ".lock")


def test_a_save_under_way_has_no_name_until_it_is_whole(tmp_path):
    with CheckpointStore(tmp_path) as store:
        writer = Writer()
        save = store.begin(4, writer, metric=0.5, info={"total_steps": 4})
        assert (save.ready(), save.is_over) == (False, False)
        assert names(tmp_path) == [writer.directory.name]
        assert store.steps() == []
        with pytest.raises(RuntimeError, match="one save at a time"):
            store.begin(5, Writer())
        writer.gate.set()
        while not save.ready():
            pass
        assert save.finish() == save.finish() == tmp_path / "step_4"
        assert save.seconds > 0
        assert verify(tmp_path / "step_4").metric == 0.5
        assert names(tmp_path) == ["best", "step_4"]
        last = Writer()
        store.begin(5, last)
        last.gate.set()
    verify(tmp_path / "step_5")  # whoever leaves waits for what is under way


@pytest.mark.parametrize("is_asked", [False, True])
def test_what_goes_wrong_in_the_background_leaves_nothing(tmp_path, is_asked):
    with CheckpointStore(tmp_path) as store:
        save_step(store, 1, lambda directory: None)
        for error, kind in (
            (OSError(28, "No space left"), CheckpointError),
            (KeyError(), KeyError),
        ):
            writer = Writer(error=error)
            save = store.begin(2, writer)
            writer.gate.set()
            while is_asked and not save.ready():
                pass
            for _ in range(2):
                with pytest.raises(kind):
                    save.finish()
            assert names(tmp_path) == ["step_1"]


def test_an_exception_does_not_wait_for_what_is_being_written(tmp_path):
    writer = Writer()

    def run():
        with CheckpointStore(tmp_path) as store:
            store.begin(1, writer)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert names(tmp_path) == [writer.directory.name]
    writer.gate.set()
    writer.background.outcome(is_awaited=True)
    with CheckpointStore(tmp_path):
        assert names(tmp_path) == []


def test_an_exception_waits_for_a_seal_that_is_being_put(tmp_path):
    sealing, gate = threading.Event(), threading.Event()

    def hold(phase):
        if phase == "written":
            sealing.set()
            gate.wait()

    def run():
        with CheckpointStore(tmp_path, on_phase=hold) as store:
            writer = Writer()
            save = store.begin(1, writer)
            writer.gate.set()
            while not save.is_sealing:
                save.ready()
            sealing.wait()
            gate.set()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    verify(tmp_path / "step_1")
