"""What every `WorkerGroup` promises, asked of each of them; then what only processes can show."""

import os
import pickle
import signal
import threading
import time

import numpy as np
import psutil
import pytest

from group_workers import Broken, CountingPickles, Summing, Worker
from laurel.errors import ConfigError, WorkerError
from laurel.workers.calls import Shared, WorkerCall
from laurel.workers.rendezvous import RankPlace
from laurel.workers.reservations import Resources
from laurel.workers.spawned import SpawnedGroup
from laurel.workers.worker_actor import WorkerActor
from local_group import LocalGroup
from sandbox_processes import wait_until

ray_group = pytest.importorskip("laurel.workers.ray_group", exc_type=ImportError)

from laurel.workers.ray_actor import SpreadGroup  # noqa: E402  where there is Ray

pytestmark = [
    pytest.mark.slow_parameters("ray-spread", "ray-1", "ray-2"),
    pytest.mark.usefixtures("warm_processes"),
]

HALF = Resources(cpus=0.5)
TENTH = Resources(cpus=0.1)
DEADLINE = 60.0
SOON = 30.0
"""Seconds for what takes one, on a machine that is busy; less than what it is not to wait for."""


@pytest.fixture(scope="module")
def slots(small_cluster):
    """Reservations for one and for two, for groups that come one after the other."""
    reserved = {size: small_cluster.reserve("policy", size, HALF) for size in (1, 2)}
    yield reserved
    for slots in reserved.values():
        slots.release()


@pytest.fixture(params=["local", "spawned", "ray-1", "ray-2", "ray-spread"])
def make(request):
    """Makes a group: of the class, with the arguments."""
    open_groups = []

    def maker(worker_class, *args, **kwargs):
        if request.param == "local":
            group = LocalGroup("policy", worker_class, *args, **kwargs)
        elif request.param == "spawned":
            group = SpawnedGroup("policy", worker_class, *args, limit=DEADLINE, **kwargs)
        elif request.param == "ray-spread":
            request.getfixturevalue("small_cluster")
            group = SpreadGroup("policy", TENTH, worker_class, *args, limit=DEADLINE, **kwargs)
        else:
            slots = request.getfixturevalue("slots")[int(request.param[-1])]
            group = ray_group.RayGroup(slots, worker_class, *args, limit=DEADLINE, **kwargs)
        open_groups.append(group)
        return group

    yield maker
    for group in open_groups:
        group.shutdown()


@pytest.fixture
def pair(slots):
    """Makes a group of two Ray actors, with options of the group."""
    open_groups = []

    def maker(worker_class, *args, **options):
        options = {"limit": DEADLINE, **options}
        open_groups.append(ray_group.RayGroup(slots[2], worker_class, *args, **options))
        return open_groups[-1]

    yield maker
    for group in open_groups:
        group.shutdown()


def test_calls_and_their_results_in_the_order_of_the_ranks(make):
    group = make(Worker, 10, scale=2)
    ranks = range(group.size)
    assert group.role == "policy"
    assert group.call("where") == [("policy", rank, group.size) for rank in ranks]
    # (value + offset) * scale + rank
    assert group.call("compute", 1) == [22 + rank for rank in ranks]
    assert group.call("compute", 1, extra=4) == [30 + rank for rank in ranks]
    assert group.call_each("compute", [(rank,) for rank in ranks]) == [
        20 + 3 * rank for rank in ranks
    ]
    last = group.size - 1
    assert group.call_one(last, "compute", 1, timeout=DEADLINE) == 22 + last


def test_work_is_done_in_the_order_in_which_it_was_asked_for_and_shared_values_are_sent_once(make):
    group = make(Worker)
    first, second = group.start("note", "a"), group.start("note", "b")
    assert second.wait(timeout=DEADLINE) == [["a", "b"]] * group.size
    assert first.done()
    assert first.wait() == [["a"]] * group.size
    assert first.wait() == [["a"]] * group.size, "the outcome stays"
    value = CountingPickles(np.array([2.5, 1.0]))
    shared = Shared(value)
    for _ in range(2):
        assert group.call("first_of", shared) == [2.5] * group.size
        assert group.call_each("first_of", [(shared,)] * group.size) == [2.5] * group.size
    assert value.num_pickles == (0 if isinstance(group, LocalGroup) else 1)


def test_errors_name_role_and_rank_and_the_group_goes_on(make):
    group = make(Worker)
    last = group.size - 1
    with pytest.raises(WorkerError) as caught:
        group.call("fail", last, "no luck")
    error = caught.value
    assert (error.role, error.ranks, error.exit_code) == ("policy", (last,), 1)
    first_line = f"policy rank {last} of {group.size} failed in fail: ValueError: no luck"
    assert str(error).splitlines()[0] == first_line
    assert "raise ValueError(text)" in str(error)
    assert error.worker_traceback.startswith("Traceback")
    assert "group_workers.py" in error.worker_traceback
    assert "worker_calls.py" not in error.worker_traceback
    assert isinstance(error.__cause__, ValueError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert pickle.loads(pickle.dumps(error)).ranks == (last,)
    # What the user did wrong stays the user's, and who exits has failed.
    with pytest.raises(WorkerError) as caught:
        group.call("fail_as_a_user_would")
    assert isinstance(caught.value.__cause__, ConfigError)
    assert caught.value.exit_code == ConfigError.exit_code == 2
    assert "policy.model_name: no such model" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    with pytest.raises(WorkerError, match="failed in leave_the_process: SystemExit: 3"):
        group.call("leave_the_process")
    with pytest.raises(ValueError, match=f"policy has {group.size} ranks; .* for 3"):
        group.call_each("compute", [(1,)] * 3)
    with pytest.raises(ValueError, match=f"policy has ranks 0 to {last}, not 7"):
        group.call_one(7, "compute", 1)
    assert group.call("compute", 1) == [1 + rank for rank in range(group.size)], "it goes on"


def test_workers_that_cannot_be_made(make):
    with pytest.raises(WorkerError, match=r"while it was made: .*ConfigError: rank . has no model"):
        make(Broken)


def test_shutdown_closes_every_worker_once(make, tmp_path):
    with make(Worker, marker=str(tmp_path / "worker")) as group:
        assert group.alive() == [True] * group.size
        size = group.size
    assert group.alive() == [False] * size, "the block has ended it"
    group.shutdown()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        f"worker-{rank}": "closed\n" for rank in range(size)
    }
    with pytest.raises(WorkerError, match="policy: the group has been shut down"):
        group.call("compute", 1)


def test_a_world_of_any_size_sums(make):
    group = make(Summing)
    # 0.5 * (1 + 2 + ... + size)
    total = 0.5 * group.size * (group.size + 1) / 2
    assert group.call("total", 0.5) == [(total, rank, group.size) for rank in range(group.size)]


def gone(pids, seconds=DEADLINE):
    deadline = time.monotonic() + seconds
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(psutil.pid_exists, pids))


def test_a_late_worker_is_named_and_the_group_ended(pair):
    group = pair(Worker)
    pids = group.call("pid")
    pending = group.start("sleep", 1, 60)
    assert not pending.done()
    start = time.monotonic()
    with pytest.raises(
        WorkerError, match=r"policy: no answer from rank 1 of 2 in sleep within 0.3 s; the group"
    ) as caught:
        pending.wait(timeout=0.3)
    assert time.monotonic() - start < SOON
    assert (caught.value.ranks, caught.value.exit_code) == ((1,), 75)
    assert "goes on from its newest checkpoint" in str(caught.value)
    assert gone(pids)
    with pytest.raises(WorkerError, match="no answer from rank 1"):
        group.call("pid")
    with pytest.raises(WorkerError, match="no answer from rank 1"):
        pending.wait()


@pytest.mark.slow
def test_the_living_answer_while_they_work(pair, tmp_path):
    group = pair(Worker)
    pending = group.start("wait_for", 0, str(tmp_path / "end"))
    assert group.alive() == [True, True]
    assert not pending.done(), "it waited for the work"
    (tmp_path / "end").touch()
    assert pending.wait() == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_is_told_at_once_and_ends_the_collective(pair, victim):
    group = pair(Summing)
    pids = group.call("pid")
    # The victim sleeps, the other waits for it in an all_reduce.
    pending = group.start("sleep_or_sum", victim)
    killer = threading.Timer(0.5, os.kill, (pids[victim], signal.SIGKILL))
    killer.start()
    start = time.monotonic()
    with pytest.raises(
        WorkerError,
        match=rf"policy rank {victim} of 2 died in sleep_or_sum: process {pids[victim]} on",
    ) as caught:
        pending.wait()
    assert time.monotonic() - start < SOON
    assert (caught.value.ranks, caught.value.exit_code) == ((victim,), 75)
    assert "goes on from its newest checkpoint" in str(caught.value)
    assert gone(pids)
    assert group.alive() == [False, False]


@pytest.mark.slow
def test_a_kill_between_calls_is_seen(pair):
    group = pair(Worker)
    pids = group.call("pid")
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: group.alive() == [True, False])
    with pytest.raises(WorkerError, match="policy rank 1 of 2 died in pid"):
        group.call("pid")
    assert gone(pids)


def test_who_raises_does_not_leave_the_others_in_the_collective(pair):
    group = pair(Summing, blaming=0.5)
    pids = group.call("pid")
    start = time.monotonic()
    with pytest.raises(
        WorkerError, match="policy rank 0 of 2 failed in raise_or_sum: ValueError"
    ) as caught:
        group.call("raise_or_sum", 0)
    assert time.monotonic() - start < SOON
    assert caught.value.ranks == (0,)
    assert "(no answer from rank 1, ended with the group)" in str(caught.value)
    assert gone(pids)


def test_a_result_that_cannot_travel(pair):
    with pytest.raises(WorkerError, match=r"failed in unpicklable: .*Error"):
        pair(Worker).call("unpicklable")


def test_torch_distributed_finds_its_variables_and_openmp_those_of_this_process(pair, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = pair(Worker).call("environment")
    assert [e["RANK"] for e in found] == ["0", "1"]
    assert [e["LOCAL_RANK"] for e in found] == ["0", "1"]
    assert {(e["WORLD_SIZE"], e["MASTER_ADDR"]) for e in found} == {("2", "127.0.0.1")}
    assert found[0]["MASTER_PORT"] == found[1]["MASTER_PORT"] != "0"
    assert {e["CUDA_VISIBLE_DEVICES"] for e in found} == {""}, "it asked for no GPU"
    assert {e["OMP_NUM_THREADS"] for e in found} == {"3"}


def test_what_is_unset_where_the_group_was_made_is_unset_for_the_worker(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray sets it
    monkeypatch.setenv("RANK", "7")
    made = pickle.dumps((dict, WorkerCall("", (), {})))
    WorkerActor(0, []).build(made, RankPlace(role="policy"), {"OMP_NUM_THREADS": None, "RANK": "0"})
    assert "OMP_NUM_THREADS" not in os.environ
    assert os.environ["RANK"] == "0"


@pytest.mark.slow
def test_sockets_of_a_group_are_on_loopback_and_go_with_it(pair):
    group = pair(Summing)
    group.call("total", 1.0)
    group_pids = group.call("pid")
    port = _master_port(group_pids[0])
    group.shutdown()
    assert gone(group_pids)
    listening = {c.laddr.port for c in psutil.net_connections() if c.status == psutil.CONN_LISTEN}
    assert port not in listening


def _master_port(pid):
    """The port on which rank 0 serves; only Ray's own listens on more than loopback."""
    listening = [
        c.laddr for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN
    ]
    beyond = [address for address in listening if address.ip != "127.0.0.1"]
    assert len(beyond) == 1, "Ray's own"
    ports = [address.port for address in listening if address.ip == "127.0.0.1"]
    assert ports
    return ports[0]
