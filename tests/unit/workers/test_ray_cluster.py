"""Ray clusters: what they refuse, what they protect, and what they leave behind."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from group_workers import Worker
from laurel.errors import ConfigError, WorkerError
from laurel.workers.reservations import Resources
from runs import run
from sandbox_processes import END, is_gone, wait_until

ray_cluster = pytest.importorskip("laurel.workers.ray_cluster", exc_type=ImportError)
ray_group = pytest.importorskip("laurel.workers.ray_group", exc_type=ImportError)

STORE = 80 * 2**20
pytestmark = pytest.mark.usefixtures("no_ray")


def shared_memory():
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def left_in_shared_memory(before):
    """What is new there and nobody's: what other tests have there just now is mapped by them."""
    deadline = time.monotonic() + END
    while left := shared_memory() - before - mapped():
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return left


def mapped():
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            found.update(one.path for one in process.memory_maps())
            found.update(one.path for one in process.open_files())
    return {Path(path).name for path in found if path.startswith("/dev/shm/")}


def test_a_worker_that_is_started_when_its_cluster_has_ended_starts_no_other():
    actor = pytest.importorskip("laurel.workers.ray_actor", exc_type=ImportError)
    for make in (
        lambda: actor.SpreadGroup("late", Resources(cpus=1), Worker),
        lambda: actor.GroupBeside("late", Resources(cpus=1), 1, 1, Worker),
        ray_group.nodes_to_work_on,
    ):
        with pytest.raises(WorkerError, match="the Ray cluster of this process has ended"):
            make()
        assert not ray_cluster.is_connected()


@pytest.mark.slow
def test_reservations_of_a_cluster_and_what_it_leaves():
    memory, children = shared_memory(), set(psutil.Process().children(recursive=True))
    handler, made = signal.getsignal(signal.SIGTERM), []
    thread = threading.Thread(
        target=lambda: made.append(ray_cluster.RayCluster(cpus=3, gpus=0, object_store_bytes=STORE))
    )
    thread.start()
    thread.join(120)
    (cluster,) = made
    with cluster:
        time.sleep(0.5)
        started = set(psutil.Process().children(recursive=True)) - children
        assert started
        for one in started:
            with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended meanwhile
                assert one.status() != psutil.STATUS_ZOMBIE, "it outlives who started it"
        assert len(cluster.nodes()) == 1
        assert signal.getsignal(signal.SIGTERM) is handler
        folder = Path(cluster._folder.path)
        assert folder.exists()
        _refusals(cluster)
        _turns(cluster)
        _strangers(cluster)
        ports = _listening(started)
        assert ports
    cluster.shutdown()
    for one in started:
        wait_until(lambda one=one: is_gone(one.pid))
    assert not _listening(set(psutil.Process().children(recursive=True)) - children)
    assert not left_in_shared_memory(memory)
    assert not folder.exists()
    with pytest.raises(ray_cluster.RayError, match="not been started"):
        cluster.nodes()
    assert not ray_cluster.is_connected(), "whoever asks after the end starts no other"
    for thread in threading.enumerate():
        if thread.name == "laurel-ray":
            thread.join(END)
            assert not thread.is_alive()


def _refusals(cluster):
    from ray.util.placement_group import placement_group_table

    first = cluster.reserve("policy", 2, Resources())
    assert first.size == 2
    asked_of_ray = len(placement_group_table())
    with pytest.raises(ConfigError, match="there is room for 3 even on the empty cluster"):
        cluster.reserve("judge", 4, Resources())
    with pytest.raises(ConfigError, match="node 1 does not exist"):
        cluster.reserve("judge", 1, Resources(), nodes=[1])
    with pytest.raises(ConfigError, match=r"cannot reserve 1 x \(1 CPU, 1 GPU\) for judge"):
        cluster.reserve("judge", 1, Resources(gpus=1))
    assert len(placement_group_table()) == asked_of_ray, "what can never be is not waited for"
    with pytest.raises(
        ConfigError,
        match=r"(?s)room for 1 now.*: 1 of 3 CPU free; held by policy \(2 CPU\)\n.*Ask for less",
    ):
        cluster.reserve("judge", 2, Resources(), patience=0.3)
    first.release()
    first.release()
    assert cluster.reserve("judge", 3, Resources()).size == 3, "given back, and had at once"
    cluster._reservations[-1].release()


def _turns(cluster):
    """Two groups share the slots of one reservation."""
    slots = cluster.reserve("policy", 1, Resources(), nodes=[0])
    with (
        ray_group.RayGroup(slots.part("learner", [0], share=0.5), Worker, 1) as learner,
        ray_group.RayGroup(slots.part("generator", [0], share=0.5), Worker, 2) as generator,
    ):
        assert learner.call("compute", 0) == [1]
        assert generator.call("compute", 0) == [2]
    slots.release()


def _strangers(cluster):
    """A process of this machine that has no token is turned away."""
    import ray

    address = ray.get_runtime_context().gcs_address
    program = (
        "import sys, ray\n"
        "from ray._raylet import GcsClient\n"
        "try:\n"
        "    GcsClient(address=sys.argv[1]).internal_kv_keys(b'', None)\n"
        "except Exception as error:\n"
        "    print('refused', 'token' in str(error).lower())\n"
        "else:\n"
        "    print('let in')\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    for token, answer in ((None, "refused True"), (os.environ["RAY_AUTH_TOKEN"], "let in")):
        mode = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {}
        done = subprocess.run(
            [sys.executable, "-c", program, address],
            env=environment
            | mode
            | {"HOME": "/nonexistent", "RAY_gcs_rpc_server_connect_timeout_s": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.strip() == answer, done.stderr


def _listening(processes):
    ports = set()
    for process in processes:
        try:
            connections = process.net_connections()
        except psutil.Error:
            continue
        ports |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return ports


PARENT = """
import os, signal
from group_workers import Worker, agents_and_others
from laurel.extensions.math.environment import MathEnvironment
from laurel.workers.ray_cluster import RayCluster
from laurel.workers.ray_group import RayGroup
from laurel.workers.reservations import Resources

cluster = RayCluster(cpus=3, gpus=0, object_store_bytes=STORE)
group = RayGroup(cluster.reserve("policy", 2, Resources()), Worker)
pids = group.call("pid")
group.start("sleep", 0, 100)
environment = MathEnvironment.remote({"num_workers": 1})
import ray
log = [{"role": "user", "content": "root?"}, {"role": "assistant", "content": "It is $x+1$."}]
assert ray.get(environment.step.remote([log], [{"ground_truth": "1+x"}])).rewards == 1
agents, others = agents_and_others()
assert set(pids) <= set(others)
print(cluster._folder.path, *agents, *others, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_workers_and_servers_end_with_a_parent_that_is_killed():
    # Ray's two agents, which hold neither slots nor memory, go on looking for their dead server for
    # up to a minute; they are not waited for here, and ended by the test.
    memory = shared_memory()
    killed = run([], program=("-c", PARENT.replace("STORE", str(STORE))))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder, *numbers = killed.stdout.split()
    agents, pids = [int(n) for n in numbers[:2]], [int(n) for n in numbers[2:]]
    try:
        assert len(pids) >= 6, "two ranks, an actor with its programs, and servers"
        for pid in pids:
            wait_until(lambda pid=pid: is_gone(pid))
        assert not left_in_shared_memory(memory)
    finally:
        for pid in agents:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["rm", "-rf", folder], check=True)


def test_an_address_where_nobody_answers():
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at '127\.0\.0\.1:1'"):
        ray_cluster.RayCluster("127.0.0.1:1")


@pytest.mark.parametrize(
    ("message", "attempts"), [("The current node timed out during startup.", 2), ("no room", 1)]
)
def test_a_machine_too_busy_for_ray_is_asked_once_more(monkeypatch, message, attempts):
    folders, left = [], []

    def refuse(*, _temp_dir, **_):
        folders.append(Path(_temp_dir))
        left.append(subprocess.Popen(["tail", "-f", "/dev/null", f"{_temp_dir}/missing"]))
        raise RuntimeError(message)

    monkeypatch.setattr(ray_cluster.ray, "init", refuse)
    with pytest.raises(RuntimeError, match=message):
        ray_cluster.RayCluster(cpus=1, gpus=0)
    assert len(set(folders)) == attempts
    assert not any(folder.exists() for folder in folders)
    assert len(left) == attempts
    for one in left:
        one.wait(END)  # or TimeoutExpired: by itself it never ends
