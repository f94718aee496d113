"""Objects as Ray actors: their methods, their errors, and what is left of them."""

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from laurel import SLEEPING_THREADS
from laurel.environments.interface import EnvironmentInterface, EnvironmentReturn
from laurel.errors import ConfigError, EnvironmentFailedError
from laurel.extensions.math.environment import MathEnvironment
from runs import run
from sandbox_processes import below, is_gone, wait_until

ray_actor = pytest.importorskip("laurel.workers.ray_actor", exc_type=ImportError)
ray = ray_actor.ray

pytestmark = [pytest.mark.usefixtures("small_cluster"), pytest.mark.slow]
LOG = [{"role": "user", "content": "root?"}, {"role": "assistant", "content": "It is $x+1$."}]
GOLD = {"ground_truth": "1+x"}
"""Not settled by the shortcuts: processes have to be asked."""


class Counter:
    """Counts."""

    kind = "counter"

    def __init__(self, start, *, step=1):
        if step == 0:
            raise ConfigError("env.counter.step=0: nothing would be counted")
        self.count, self.step = start, step

    def add(self, times=1):
        self.count += times * self.step
        return self.count

    def fail(self):
        raise EnvironmentFailedError("it broke")

    def pid(self):
        return os.getpid()

    def waiting(self):
        return {name: os.environ.get(name) for name in SLEEPING_THREADS}

    def shutdown(self):
        self.count = 0

    @classmethod
    def made(cls):
        return cls(0)

    def _hidden(self):
        return self.count


def get(reference):
    return ray.get(reference, timeout=180)


def until_gone(pids):
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid))


def test_an_object_has_its_methods_and_its_state():
    actor = ray_actor.ActorMaker(Counter).remote(5, step=2)
    assert get(actor.add.remote()) == 7
    assert get(actor.add.remote(times=3)) == 13
    assert get(actor.pid.remote()) != os.getpid()
    assert get(actor.waiting.remote()) == {name: os.environ[name] for name in SLEEPING_THREADS}
    assert [hasattr(actor, name) for name in ("made", "_hidden", "kind")] == [False] * 3
    assert get(actor.shutdown.remote()) is None
    assert get(actor.add.remote()) == 2


def test_what_goes_wrong_keeps_its_class():
    actor = ray_actor.ActorMaker(Counter).remote(0)
    for _ in range(2):
        with pytest.raises(EnvironmentFailedError, match="it broke"):
            get(actor.fail.remote())
    assert get(actor.add.remote()) == 1, "it goes on"


@pytest.mark.slow
def test_what_cannot_be_made_says_so_at_every_call_and_can_be_shut_down():
    actor = ray_actor.ActorMaker(Counter).remote(0, step=0)
    lengths = []
    for _ in range(3):
        with pytest.raises(ConfigError, match=r"env\.counter\.step=0: nothing would") as caught:
            get(actor.add.remote())
        lengths.append(len(str(caught.value)))
    assert lengths[0] == lengths[2], "the traceback does not grow"
    assert get(actor.shutdown.remote()) is None


def test_arguments_that_do_not_fit_are_told_at_once():
    with pytest.raises(TypeError, match="missing a required argument: 'start'"):
        ray_actor.ActorMaker(Counter).remote()
    with pytest.raises(TypeError, match="workers"):
        MathEnvironment.remote({}, workers=2)


def test_options_are_rays():
    actor = MathEnvironment.options(name="judge", num_cpus=0.5).remote({"num_workers": 1})
    found = ray.get_actor("judge")
    assert get(found.step.remote([LOG[:1]], [{}])).failures[0]
    with pytest.raises(ValueError, match="judge"):
        MathEnvironment.options(name="judge").remote({"num_workers": 1})
    del actor, found


class Lengths(EnvironmentInterface):
    """An environment of somebody else's."""

    def step(self, message_log_batch, metadata):
        import torch

        lengths = [float(len(log[-1]["content"])) for log in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""} for _ in lengths],
            metadata=list(metadata),
            next_stop_strings=[None for _ in lengths],
            rewards=torch.tensor(lengths),
            terminateds=torch.ones(len(lengths), dtype=torch.bool),
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {}


@pytest.mark.slow
def test_your_own_environment_is_found_where_ray_does_not_look():
    """Of where this process looks for modules, Ray tells others two folders."""
    environment = Lengths.remote()
    assert get(environment.step.remote([LOG], [{}])).rewards.tolist() == [12.0]


@pytest.mark.parametrize(
    ("rooms", "groups", "size", "nodes"),
    [
        ([2], 1, 1, [0]),
        ([0, 2], 2, 1, [1, 1]),
        ([3, 5], 3, 2, [0, 0, 1, 1, 1, 1]),
        ([3, 3], 3, 2, None),  # six slots, and no third pair on one node
        ([4, 4], 1, 8, [0, 0, 0, 0, 1, 1, 1, 1]),  # more than a node: as close as can be
        ([4, 4], 2, 8, None),
        ([], 1, 1, None),
    ],
)
def test_nodes_of_groups_beside_each_other(rooms, groups, size, nodes):
    assert ray_actor.assign_nodes(rooms, groups, size) == nodes


def actor_process():
    """The process of the one math environment there is, with those that it started."""
    found = []

    def is_there():
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended meanwhile
                if "MathEnvironment" in " ".join(process.cmdline()[:1]):
                    found[:] = [process.pid, *(one.pid for one in below(process.pid))]
                    return True
        return False

    wait_until(is_there)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("end", ["shutdown", "forgotten", "ray.kill", "kill -9"])
def test_no_process_is_left(end):
    environment = MathEnvironment.remote({"num_workers": 2})
    assert get(environment.step.remote([LOG], [GOLD])).rewards.tolist() == [1.0]
    actor, *children = actor_process()
    assert len(children) >= 2, "the zygote and a worker"
    if end == "shutdown":
        get(environment.shutdown.remote())
        until_gone(children)
        get(environment.shutdown.remote())
        assert not is_gone(actor), "Ray's own, until nobody has its handle"
    elif end == "ray.kill":
        ray.kill(environment)
    elif end == "kill -9":
        os.kill(actor, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError):
            get(environment.step.remote([LOG], [GOLD]))
    del environment
    until_gone([actor, *children])


ALONE = f"""
from laurel.extensions.math.environment import MathEnvironment
environment = MathEnvironment.remote({{"num_workers": 1}})
import ray
verdict = ray.get(environment.step.remote([{LOG!r}], [{GOLD!r}]))
from laurel.workers import ray_actor
from laurel.errors import ConfigError
try:
    MathEnvironment.options(resources={{"gold": 1}}).remote({{}})
except ConfigError as error:
    refused = "cannot reserve 1 x (1 CPU, 1 gold) for MathEnvironment" in str(error)
from group_workers import agents_and_others
agents, others = agents_and_others()
print(refused, verdict.rewards.tolist(), ray_actor._own._folder, sep="|")
print(*agents, sep="|")
print(*others, sep="|", flush=True)
"""


@pytest.mark.slow
def test_without_a_cluster_one_is_started_and_ends_with_the_process(monkeypatch):
    """Or with one that is killed: `test_ray_cluster.py`."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    done = run([], program=("-c", ALONE))
    assert done.returncode == 0, done.stderr
    first, *numbers = done.stdout.splitlines()
    refused, rewards, folder = first.split("|")
    assert (refused, rewards) == ("True", "[1.0]")
    assert done.stderr == ""
    agents, others = ([int(n) for n in line.split("|")] for line in numbers)
    assert len(others) >= 4
    until_gone(others)
    assert not Path(folder).exists()
    for pid in agents:  # Ray's own, which may take a minute
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
