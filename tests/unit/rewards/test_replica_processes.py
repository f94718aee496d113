"""Processes that score: these serve trivial scores, so that they start at once."""

import contextlib
import subprocess
import threading
import time
from urllib.error import URLError

import psutil
import pytest

from laurel.errors import ConfigError, EngineError, ModelError
from laurel.rewards.blocking import BlockingScorer
from laurel.rewards.remote.router import RouterOptions
from laurel.rewards.server import replicas as replica_processes
from laurel.rewards.server.replicas import ReplicaProcesses
from laurel.rewards.server.service import ModelSettings
from laurel.types import Message, group_of
from reward_servers import wait_until
from scripted_backend import null_scores

NULL = ModelSettings()
FAST = RouterOptions(timeout=30, attempt_timeout=10)


def group(name, *answers):
    return group_of((Message("user", name),), answers or ("a", "b"), group_id=name)


@contextlib.contextmanager
def asked(replicas):
    scorer = BlockingScorer(replicas.scorer)
    try:
        yield scorer
    finally:
        scorer.close()


def test_they_score_sleep_wake_and_end():
    with ReplicaProcesses(NULL, 2, options=FAST) as replicas, asked(replicas) as scorer:
        processes = [psutil.Process(pid) for pid in replicas.pids]
        assert len(processes) == 2
        assert (replicas.model, replicas.version) == ("null", "null")
        groups = [group(f"q{i}") for i in range(20)]
        assert scorer.score_now(groups) == [null_scores(one) for one in groups]
        replicas.sleep()
        replicas.wake()
        assert scorer.score_now(groups[:1]) == [null_scores(groups[0])]
        for health in replicas.scorer.replica_health.values():
            assert health.seconds, "one of them was never asked"
    assert replicas.pids == []
    assert not any(one.is_running() and one.status() != "zombie" for one in processes)
    replicas.close()


@pytest.mark.slow
def test_one_that_dies_is_replaced_and_sleeps_if_the_others_do(monkeypatch):
    monkeypatch.setattr(replica_processes, "_FIRST_PAUSE", 0.01)
    said = []
    with (
        ReplicaProcesses(NULL, 1, options=FAST, say=said.append) as replicas,
        asked(replicas) as scorer,
    ):
        for _ in range(2):
            (old,) = replicas.pids
            psutil.Process(old).kill()
            assert scorer.score_now([group("q")]) == [null_scores(group("q"))]
            assert replicas.pids != [old]
        assert [line for line in said if "died (signal 9); it is started again" in line] == said
        replicas.sleep()
        (process,) = replicas._replicas
        psutil.Process(process.pid).kill()
        wait_until(lambda: len(said) == 3, seconds=30)
        wait_until(lambda: process._http is not None, seconds=30)
        replicas.wake()
        assert scorer.score_now([group("q")]) == [null_scores(group("q"))]


@pytest.mark.slow
def test_one_that_cannot_be_told_to_sleep_is_started_once_more(monkeypatch):
    monkeypatch.setattr(replica_processes, "_FIRST_PAUSE", 0.01)
    said = []
    with (
        ReplicaProcesses(NULL, 1, options=FAST, say=said.append) as replicas,
        asked(replicas) as scorer,
    ):
        replicas.sleep()
        (process,) = replicas._replicas
        tell = process._admin

        def fail(command):
            process._admin = tell
            raise URLError("no answer")

        process._admin = fail
        psutil.Process(process.pid).kill()
        wait_until(lambda: len(said) == 2, seconds=30)
        wait_until(lambda: process._http is not None, seconds=30)
        replicas.wake()
        assert scorer.score_now([group("q")]) == [null_scores(group("q"))]


def keep(monkeypatch, *lives):
    """What is said, how long is waited and whether it is lost after so many lives, each given as
    its status and whether it became ready."""
    left, said, pauses = list(lives), [], []

    def live(process):
        process._settled.set()
        if not left:
            process._closing.set()
            return -15, True
        return left.pop(0)

    monkeypatch.setattr(replica_processes._Process, "_live", live)
    started = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    process = replica_processes._Process(0, NULL, "key", FAST, said.append)
    monkeypatch.setattr(threading.Thread, "start", started)
    process._closing.wait = pauses.append
    process._keep()
    return said, pauses, process.is_lost


def test_a_ready_one_that_is_killed_is_started_again_at_once_however_often(monkeypatch):
    said, pauses, is_lost = keep(monkeypatch, *[(-9, True)] * 30)
    assert said == ["warning: replica 0 died (signal 9); it is started again"] * 30
    assert pauses == []
    assert not is_lost


@pytest.mark.parametrize("life", [(-9, False), (1, False), (70, True)])
def test_one_that_never_becomes_ready_or_ends_by_itself_stays_away(monkeypatch, life):
    most = replica_processes.MOST_RESTARTS
    said, pauses, is_lost = keep(monkeypatch, *[life] * 5, (-9, True), *[life] * 20)
    assert is_lost
    assert said[-1] == f"warning: replica 0 died {most + 1} times and stays away"
    assert len(said) == 6 + most + 1, "one that had worked began the count anew"
    assert pauses == [0.5, 1, 2, 4, 0.5, 1, 2, 4, 8, 16, 30]


@pytest.mark.slow
def test_one_that_cannot_be_started_again_stays_away(monkeypatch):
    monkeypatch.setattr(replica_processes, "MOST_RESTARTS", 1)
    monkeypatch.setattr(replica_processes, "_FIRST_PAUSE", 0.01)
    said = []
    options = RouterOptions(timeout=3, attempt_timeout=1)
    started = subprocess.Popen
    with (
        ReplicaProcesses(NULL, 1, options=options, say=said.append) as replicas,
        asked(replicas) as scorer,
    ):
        monkeypatch.setattr(
            replica_processes.subprocess,
            "Popen",
            lambda command, **more: started([command[0], "-c", "import sys; sys.exit(3)"], **more),
        )
        psutil.Process(replicas.pids[0]).kill()
        wait_until(lambda: len(said) == 3, seconds=30)
        assert said[-1].endswith("died 2 times and stays away")
        wait_until(lambda: replicas.are_lost)
        ((score, _),) = scorer.score_now([group("q")])
        assert score.value is None
        assert score.failure is not None


@pytest.mark.slow
def test_what_cannot_be_served(tmp_path):
    with pytest.raises(ConfigError, match="at least one"):
        ReplicaProcesses(NULL, 0)
    with pytest.raises(ModelError, match="/nowhere/rm"):
        ReplicaProcesses(ModelSettings(model="/nowhere/rm"), 2)
    (tmp_path / "config.json").write_text("{}")
    before = psutil.Process().children()
    with pytest.raises(ModelError):  # only the process that loads it finds out
        ReplicaProcesses(ModelSettings(model=str(tmp_path), device="cpu"), 2)
    assert len(psutil.Process().children()) <= len(before)


def test_one_that_dies_while_it_starts_is_told(monkeypatch):
    started = subprocess.Popen

    def stillborn(command, **options):
        return started([command[0], "-c", "import sys; sys.exit(3)"], **options)

    monkeypatch.setattr(replica_processes.subprocess, "Popen", stillborn)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"replica 0 died while it started \(exit code 3\)"):
        ReplicaProcesses(NULL, 1)
    assert time.monotonic() - began < 60
