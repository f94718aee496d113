"""What a `ReplicaSet` promises over every group whose processes can be lost, with real kills."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from group_workers import Worker
from laurel.errors import EngineError, ModelError, WorkerError
from laurel.protocols import WorkerGroup
from laurel.workers.replica_set import ReplicaSet, TakesDownError
from laurel.workers.reservations import Resources
from laurel.workers.spawned import SpawnedGroup
from laurel.workers.supervisor import EndlessRestarts, Restarts
from process_group import ProcessGroup
from sandbox_processes import END, is_gone, wait_until

pytestmark = [
    pytest.mark.slow_parameters("ray", "spawned"),
    pytest.mark.usefixtures("warm_processes"),
]

LIMITS = {"forked": 5.0, "spawned": 20.0, "ray": 20.0}
"""Seconds for a call, and for a start: on a busy machine Python alone takes several."""
HUNG = 3.0
"""Seconds for a call to one that hangs: they are all waited for."""
ROLE = "tester"
OF_EVERY_KIND = (
    "test_what_a_lost_one_had_is_done_by_another_and_it_comes_back",
    "test_one_that_dies_while_it_has_nothing_to_do_is_found",
)
"""What depends on how a group finds out; all else is the replica set's own."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "make" in metafunc.fixturenames:
        is_of_all = metafunc.function.__name__ in OF_EVERY_KIND
        kinds = ["forked", "spawned", "ray"] if is_of_all else ["forked"]
        metafunc.parametrize("make", kinds, indirect=True)


class Made:
    """Replicas of a `Worker`, and what became of them."""

    def __init__(self, make_group: Callable[[], WorkerGroup], number: int, **options: Any) -> None:
        self.said: list[str] = []
        self.groups: list[WorkerGroup] = []
        self.before_making: Callable[[], None] = lambda: None

        def make(index: int) -> WorkerGroup:
            if len(self.groups) >= number:
                self.before_making()
            self.groups.append(make_group())
            return self.groups[-1]

        options = {"restarts": Restarts(3, self.said.append), **options}
        self.replicas = ReplicaSet[WorkerGroup](
            make, number, name=ROLE, end=lambda group: group.shutdown(), **options
        )

    def ask(self, method: str, *arguments: Any) -> Any:
        return self.replicas.call(lambda group: group.call_one(0, method, *arguments))

    def pids(self) -> list[int]:
        return [replica.value.call_one(0, "pid") for replica in self.replicas.replicas]

    def until_ready(self, number: int) -> None:
        wait_until(lambda: self.replicas.num_ready == number)


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Made]]:
    """Makes a replica set, of so many groups of one kind."""

    limit = LIMITS[request.param]
    if request.param == "ray":  # here: groups are made in several threads, which may not ask for it
        ray_actor = pytest.importorskip("laurel.workers.ray_actor", exc_type=ImportError)
        request.getfixturevalue("small_cluster")

    def group() -> WorkerGroup:
        if request.param == "forked":
            return ProcessGroup(ROLE, 1, Worker, limit=limit)
        if request.param == "spawned":
            return SpawnedGroup(ROLE, Worker, limit=limit)
        found: WorkerGroup = ray_actor.SpreadGroup(ROLE, Resources(cpus=0.1), Worker, limit=limit)
        return found

    made: list[Made] = []

    def maker(number: int, **options: Any) -> Made:
        made.append(Made(group, number, **options))
        return made[-1]

    yield maker
    for one in made:
        one.replicas.close()


def killing(number: signal.Signals, others: list[int]) -> Callable[[WorkerGroup], int]:
    """Work that ends the process that it is given to, unless that is one of others."""

    def work(group: WorkerGroup) -> int:
        pid: int = group.call_one(0, "pid")
        patience = None
        if pid not in others:
            others.append(pid)
            os.kill(pid, number)
            patience = HUNG
        found: int = group.call_one(0, "compute", 1, timeout=patience)
        return found

    return work


def test_all_of_them_work_and_one_has_one_call_at_a_time(make: Callable[..., Made]) -> None:
    made = make(2)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda i: made.ask("compute", i), range(20)))
    assert found == list(range(20))
    assert all(replica.num_done > 0 for replica in made.replicas.replicas)
    assert made.said == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_what_a_lost_one_had_is_done_by_another_and_it_comes_back(
    make: Callable[..., Made], number: signal.Signals
) -> None:
    made = make(2)
    first, second = made.pids()
    assert made.replicas.call(killing(number, [second])) == 1
    made.until_ready(2)
    assert set(made.pids()).isdisjoint({first})
    wait_until(lambda: is_gone(first))
    why = "died in compute" if number == signal.SIGKILL else f"within {HUNG:g} s"
    lost, back = made.said
    assert lost.startswith(f"{ROLE} 0 was lost (")
    assert why in lost
    assert lost.endswith("it is started again, restart 1 of 3 at most")
    assert back == f"{ROLE} 0 is back"


def test_an_error_of_the_work_is_no_loss(make: Callable[..., Made]) -> None:
    made = make(1)
    with pytest.raises(WorkerError, match="ValueError: no"):
        made.ask("fail", 0, "no")
    assert made.ask("compute", 2) == 2
    assert made.said == []


def test_when_none_is_left_it_is_an_error_from_then_on(make: Callable[..., Made]) -> None:
    made = make(2, restarts=Restarts(0, lambda _: None))
    for pid in made.pids():
        os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"no restart: 0 .* no other replica is left") as end:
            made.ask("compute", 1)
        assert end.value.is_lost
    assert made.replicas.num_ready == 0


def test_one_that_dies_while_it_has_nothing_to_do_is_found(make: Callable[..., Made]) -> None:
    made = make(
        2, ping=lambda group: None if all(group.alive()) else "it is gone", ping_seconds=0.01
    )
    first, second = made.pids()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: any("is back" in line for line in made.said))
    made.until_ready(2)
    assert f"{ROLE} 0 was lost (it is gone)" in made.said[0]
    assert second in made.pids()


def test_work_that_takes_replicas_down_is_refused(make: Callable[..., Made]) -> None:
    made = make(2, most_losses=2)
    with pytest.raises(TakesDownError, match="2 replicas were lost with it") as refused:
        made.replicas.call(killing(signal.SIGKILL, []))
    assert not refused.value.is_lost
    assert made.ask("compute", 3) == 3
    made.until_ready(2)


def test_a_state_is_that_of_all_and_of_those_that_come_later(make: Callable[..., Made]) -> None:
    made = make(2)

    def note(group: WorkerGroup) -> None:
        group.call_one(0, "note", "asleep")

    os.kill(made.pids()[1], signal.SIGKILL)
    made.replicas.each(note, new=note)
    for replica in made.replicas.replicas:
        assert replica.value.call_one(0, "note", "?") == ["asleep", "?"]
    made.replicas.each(lambda group: group.call_one(0, "note", "awake"), new=None)
    second = made.pids()[1]
    assert made.replicas.call(killing(signal.SIGKILL, [second])) == 1
    made.until_ready(2)
    logs = [replica.value.call_one(0, "note", "?") for replica in made.replicas.replicas]
    assert logs == [["?"], ["asleep", "?", "awake", "?"]]


def test_one_that_is_being_started_as_all_end_ends_too(make: Callable[..., Made]) -> None:
    made = make(1)
    starting, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        starting.set()
        may_go_on.wait(END)

    made.before_making = wait
    os.kill(made.pids()[0], signal.SIGKILL)
    with ThreadPoolExecutor(2) as threads:
        asking = threads.submit(made.ask, "compute", 1)
        assert starting.wait(END)
        closing = threads.submit(made.replicas.close)
        with pytest.raises(EngineError, match="has been shut down"):
            asking.result(END)
        may_go_on.set()
        closing.result(END)
    assert len(made.groups) == 2
    assert not any(made.groups[1].alive())


def test_where_one_cannot_be_made_the_others_are_ended() -> None:
    ended: list[int] = []

    def make(index: int) -> int:
        time.sleep(0.05 * index)
        if index == 1:
            raise WorkerError("no room")
        return index

    with pytest.raises(WorkerError, match="no room"):
        ReplicaSet(make, 3, name=ROLE, end=ended.append, restarts=Restarts(0))
    assert sorted(ended) == [0, 2]


@dataclass
class Loaded:
    """A replica of a model whose files may be replaced."""

    version: str
    is_ended: bool = False

    def score(self) -> str:
        if self.is_ended:
            raise WorkerError("it died (signal 9)", role=ROLE, exit_code=75)
        return self.version


@pytest.mark.parametrize("restarts", [Restarts, EndlessRestarts])
def test_a_replica_that_loads_another_version_is_refused_with_both_names(restarts):
    said: list[str] = []
    on_disk = ["rm-a"]
    made: list[Loaded] = []

    def make(_: int) -> Loaded:
        made.append(Loaded(on_disk[0]))
        return made[-1]

    replicas = ReplicaSet(
        make,
        2,
        name=ROLE,
        end=lambda one: setattr(one, "is_ended", True),
        restarts=restarts(1, said.append),
        version=lambda one: one.version,
    )
    on_disk[0] = "rm-b"
    made[0].is_ended = True
    found = {replicas.call(Loaded.score) for _ in range(50)}
    wait_until(lambda: any(one.state == "gone" for one in replicas.replicas))
    assert found | {replicas.call(Loaded.score) for _ in range(50)} == {"rm-a"}
    assert "it has loaded version 'rm-b', and this set serves 'rm-a'" in said[-1]
    made[1].is_ended = True
    with pytest.raises(WorkerError, match="no other replica is left"):
        replicas.call(Loaded.score)
    assert all(one.is_ended for one in made)


def test_replicas_that_start_with_different_versions_are_refused():
    ended: list[str] = []
    with pytest.raises(ModelError, match=r"'rm-1', and this set serves 'rm-0'"):
        ReplicaSet(
            lambda index: f"rm-{index}",
            2,
            name=ROLE,
            end=ended.append,
            restarts=Restarts(1),
            version=str,
        )
    assert sorted(ended) == ["rm-0", "rm-1"]
