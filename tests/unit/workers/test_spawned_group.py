"""A worker in a process of its own: no call waits for an answer that cannot come."""

from __future__ import annotations

import threading

import pytest

from laurel.errors import WorkerError
from laurel.workers.rendezvous import RankPlace
from laurel.workers.spawned import SpawnedGroup

pytestmark = pytest.mark.usefixtures("warm_processes")


class OneWay:
    """Can be packed, and not unpacked."""

    def __reduce__(self):
        return int, ("no number",)


class Worker:
    def __init__(self, place: RankPlace) -> None:
        self.place = place

    def one_way(self):
        return OneWay()

    def add(self, one, other):
        return one + other


@pytest.mark.slow
def test_an_answer_that_cannot_be_read_is_the_failure_of_its_call_alone():
    group = SpawnedGroup("tester", Worker, limit=30.0)
    try:
        with pytest.raises(WorkerError, match="no number"):
            group.call_one(0, "one_way")
        assert group.call_one(0, "add", 2, 3) == 5
    finally:
        group.shutdown()


@pytest.mark.slow
def test_a_call_after_the_end_of_the_pipe_was_seen_does_not_wait(monkeypatch):
    group = SpawnedGroup("tester", Worker, limit=10.0)
    try:
        listening = [t for t in threading.enumerate() if t.name == "laurel-tester"]
        group._process.kill()
        for thread in listening:
            thread.join(20)
        monkeypatch.setattr(group._process, "poll", lambda: None)  # nobody has seen it die yet
        with pytest.raises(WorkerError, match="its process is gone"):
            group.call_one(0, "add", 2, 3)
    finally:
        monkeypatch.undo()
        group.shutdown()
