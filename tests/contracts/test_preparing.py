"""What `Preparers` promise over every group whose processes can be lost."""

import os
import signal
from functools import partial
from typing import Any

import pytest

import scoring_groups
from laurel.rewards.preparing import WORKER, Preparers, prepared_by
from laurel.run.allocation import BESIDE_CPUS
from laurel.types import Message, group_of
from laurel.workers.spawned import SpawnedGroup
from processes import fork_of
from sandbox_processes import is_gone, wait_until

pytestmark = [pytest.mark.slow_parameters("ray"), pytest.mark.usefixtures("warm_processes")]

GROUPS = [
    group_of((Message("user", f"Number {i}?"),), ("Bread and wine.", "No."), group_id=str(i))
    for i in range(6)
]
LIMIT = 20.0
"""Seconds for a call and for a start, which takes several on a busy machine."""


class Made:
    """Preparers, and the process of each of their workers."""

    def __init__(self, make_group):
        self.said: list[str] = []
        self.contract = scoring_groups.local(True).contract
        self.preparers = Preparers(self.contract, 2, make_group, say=self.said.append)

    @property
    def groups(self) -> list[Any]:
        return [replica.value for replica in self.preparers.workers.replicas]

    def pids(self):
        return [
            (fork_of(group._process.pid) or group._process).pid
            if isinstance(group, SpawnedGroup)
            else group._pids[0]
            for group in self.groups
        ]

    def prepared(self):
        return plain(self.preparers.prepare(GROUPS))

    def expected(self):
        return plain(prepared_by(self.contract, GROUPS))


def plain(prepared):
    return [
        (tokens.trunk_ids.tolist(), [ids.tolist() for ids in tokens.branches_ids_G], failures)
        for tokens, failures in prepared
        if tokens is not None
    ]


@pytest.fixture(scope="module", params=["spawned", "ray"])
def made(request):
    make: Any = partial(SpawnedGroup, WORKER, limit=LIMIT)
    if request.param == "ray":
        ray_actor = pytest.importorskip("laurel.workers.ray_actor", exc_type=ImportError)
        request.getfixturevalue("small_cluster")
        make = partial(ray_actor.SpreadGroup, WORKER, BESIDE_CPUS, limit=LIMIT)
    made = Made(make)
    yield made
    left = made.pids()
    made.preparers.close()
    for pid in left:
        wait_until(lambda pid=pid: is_gone(pid))


def test_they_prepare_what_one_process_does(made):
    assert len(made.expected()) == len(GROUPS)
    assert made.prepared() == made.expected()
    assert made.said == []


def test_those_that_are_lost_are_replaced_and_their_work_is_done(made):
    """Those that hang as well: `test_replica_set.py`, of every kind of group."""
    before = made.pids()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert made.prepared() == made.expected()
    wait_until(lambda: made.preparers.workers.num_ready == 2)
    assert not set(made.pids()) & set(before)
    lost = [line for line in made.said if "was lost" in line]
    assert len(lost) == 2
    assert all("died in prepare" in line and "it is started again" in line for line in lost)
