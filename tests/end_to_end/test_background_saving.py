"""Runs that train on while their checkpoints are written: the same checkpoints, whole or absent."""

import os
import re
import signal
import threading
from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import Tensor

import learner_work as work
from laurel.errors import WorkerError
from laurel.models.checkpoint import export
from laurel.models.checkpoint.store import CheckpointStore, verify
from laurel.training.learner import LocalLearner
from process_group import ProcessGroup
from runs import (
    assert_equal_runs,
    series,
    settings,
    train,
)

BEHIND = "checkpointing.in_background=true"
STEPS = 12
OFTEN = (
    "rm.max_num_epochs=3",
    "checkpointing.save_period=3",
    "checkpointing.keep_top_k=null",
    "+policy.scratch.config_overrides.attention_dropout=0.2",
)


@pytest.fixture(scope="module")
def in_front(tmp_path_factory):
    """A run of 12 steps that waits for each of its checkpoints."""
    directory = tmp_path_factory.mktemp("in_front")
    train(settings(directory, *OFTEN, "checkpointing.in_background=false"))
    return directory


class OneStepLate:
    """Lets weights be written in the background only when the step after theirs has been taken."""

    def __init__(self, monkeypatch):
        self._taken = threading.Condition()
        self.num_taken = 0
        self.written: list[int] = []
        self._update, self._write = LocalLearner.update, export.write_weights
        monkeypatch.setattr(LocalLearner, "update", lambda *given: self._counted(*given))
        monkeypatch.setattr(export, "write_weights", self._late)

    def _counted(self, *given):
        update = self._update(*given)
        with self._taken:
            self.num_taken += 1
            self._taken.notify_all()
        return update

    def _late(self, directory, files):
        if threading.current_thread() is not threading.main_thread():
            name = re.match(r"\.tmp-step_(\d+)-", directory.name)
            assert name is not None
            with self._taken:
                self._taken.wait_for(lambda: self.num_taken > int(name[1]))
            self.written.append(int(name[1]))
        self._write(directory, files)


def test_what_is_saved_behind_later_steps_is_what_is_saved_in_front_of_them(
    tmp_path, in_front, monkeypatch
):
    late = OneStepLate(monkeypatch)
    done = train(settings(tmp_path, *OFTEN, BEHIND))
    assert late.written == [3, 6, 9], "the last save has nothing to be behind of"
    assert_equal_runs(in_front, tmp_path, last=STEPS, common=(3, 6, 9), same_validations=True)
    assert done.outcome.latest == tmp_path / "saves" / "step_12"
    said = [f"saved {tmp_path}/saves/step_{step}" for step in (3, 6, 9, 12)]
    assert [line for line in done.text.splitlines() if line.startswith("saved ")] == said
    assert sorted(series(tmp_path, "timing/train/checkpointing")) == [3, 6, 9, 12]
    behind = series(tmp_path, "timing/train/checkpointing_in_background")
    assert len(behind) == 3
    assert all(seconds > 0 for seconds in behind.values())
    assert min(behind) > 3, "a later step is where it was seen to be whole"
    assert series(in_front, "timing/train/checkpointing_in_background") == {}


@pytest.mark.slow
def test_sigterm_in_a_background_save_ends_with_all_checkpoints_whole(tmp_path, monkeypatch):
    """It comes in step 4, while what is saved of step 3 waits for the end of that step."""
    late = OneStepLate(monkeypatch)
    update = LocalLearner.update

    def signalled(*given):
        if late.num_taken == 3:
            (partly,) = (tmp_path / "saves").glob(".tmp-step_3-*")
            assert not (partly / "MANIFEST.json").exists()
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*given)

    monkeypatch.setattr(LocalLearner, "update", signalled)
    done = train(settings(tmp_path, *OFTEN, BEHIND))
    assert (done.outcome.ended, done.outcome.step, late.written) == ("signal", 4, [3])
    assert sorted(path.name for path in (tmp_path / "saves").glob("*step_*")) == [
        "step_3",
        "step_4",
    ]
    for step in (3, 4):
        assert f"saved {tmp_path}/saves/step_{step}" in done.text
        verify(tmp_path / "saves" / f"step_{step}")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return work.write("policy", tmp_path_factory.mktemp("model"))


@pytest.fixture
def two_ranks():
    """Makes learners over two processes that share the weights."""
    made = []

    def make(directory):
        group = partial(ProcessGroup, "policy", 2)
        made.append(work.grouped("policy", directory, group, {"dp_shard": 2}))
        return made[-1]

    yield make
    for learner in made:
        learner.shutdown()


def begin(store, learner, step, **options):
    """Begin to save a learner, as runs do."""

    def write(directory):
        (directory / "training").mkdir()
        learner.export(directory, "", **options)
        learner.save_state(directory / "training", {"step": step}, **options)
        return lambda is_awaited: learner.written(is_awaited=is_awaited)

    return store.begin(step, write)


def take_step(learner):
    update = learner.update(work.micro_batches("policy", [[0], [1, 2], [3]]), work.loss("policy"))
    assert update.failure is None


@pytest.mark.slow
def test_ranks_resume_from_behind_as_from_in_front(tmp_path, model, two_ranks):
    learner = two_ranks(model)
    take_step(learner)
    with CheckpointStore(tmp_path / "saves") as store:
        in_front = begin(store, learner, 1).finish()
        gates = work.hold(learner, tmp_path)
        save = begin(store, learner, 2, in_background=True)
        take_step(learner)
        assert not save.ready()
        take_step(learner)
        work.let_go(gates)
        behind = save.finish()
        learner.shutdown()
    ended: list[Mapping[str, Tensor]] = []
    for checkpoint in (in_front, behind):
        verify(checkpoint)
        resumed = two_ranks(checkpoint)
        resumed.load_state(checkpoint / "training")
        take_step(resumed)
        take_step(resumed)
        ended.append(work.weights_of(resumed))
        resumed.shutdown()
    assert ended[0].keys() == ended[1].keys()
    assert all(torch.equal(ended[1][name], weight) for name, weight in ended[0].items())


@pytest.mark.slow
def test_a_rank_that_dies_while_it_writes_costs_the_run_and_no_checkpoint(
    tmp_path, model, two_ranks
):
    learner = two_ranks(model)
    with CheckpointStore(tmp_path / "saves") as store:
        before = begin(store, learner, 1).finish()
        work.hold(learner, tmp_path)
        save = begin(store, learner, 2, in_background=True)
        assert not save.ready()
        learner.group._processes[1].kill()
        learner.group._processes[1].join()
        assert save.ready()
        with pytest.raises(WorkerError, match="policy rank 1 of 2 died in written") as caught:
            save.finish()
        assert caught.value.exit_code == WorkerError.LOST_EXIT_CODE
        verify(before)
        assert store.steps() == [1]
        assert not list((tmp_path / "saves").glob(".tmp-*"))
