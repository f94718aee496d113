"""Processes of a served model, as `laurel serve` has them: kills, the end of the queue, figures."""

import asyncio
import contextlib
import os
import signal

import psutil
import pytest
from null_server import open_null

from laurel.errors import BusyError, ConfigError, EngineError, ModelError
from laurel.extensions.server import replicas as served_replicas
from laurel.extensions.server.app import GateOptions, make_app
from laurel.extensions.server.replicas import ModelWorker, open_replicas
from laurel.extensions.server.service import RewardService, ServingSpec
from laurel.models.spec import ModelSpec
from laurel.rewards.batching import BatcherLimits
from laurel.rewards.spec import ScorerSpec
from laurel.types import Message, group_of
from laurel.workers.rendezvous import RankPlace
from processes import forked
from sandbox_processes import is_gone
from scripted_backend import ScriptedBackend, null_scores
from served_scores import asked_without_network

NULL = ServingSpec(opens=open_null)


def test_a_server_without_a_model_computes_what_is_asked_again():
    """Its load repeats requests, and what is measured is all but the cache."""
    assert NULL.batcher_limits.cache_entries == 0
    assert serving("rm").batcher_limits.cache_entries > 0


def serving(model, **limits):
    scorer = ScorerSpec(model=ModelSpec(name=str(model)), device="cpu", batch_tokens=512)
    return ServingSpec(scorer=scorer, limits=BatcherLimits(**limits))


def group(name, *answers):
    return group_of((Message("user", name),), answers or ("a", "b"), group_id=name)


@contextlib.contextmanager
def opened(num_replicas, settings=NULL, *, limit=30.0):
    """A served model, and what was said of it."""
    said = []
    model = open_replicas(settings, num_replicas, limit=limit, say=said.append)
    try:
        yield model, said
    finally:
        model.scorer.close()


def pids(model):
    return [replica.value.pid for replica in model.scorer.replicas.replicas]


async def until(true):
    async with asyncio.timeout(50):
        while not true():
            await asyncio.sleep(0.01)


async def metrics(model):
    """What `/metrics` of a server of them says."""
    service = RewardService()
    service.begin(model)
    app = make_app(service, GateOptions(api_key=None, hosts=None))
    return (await asked_without_network(app, "GET", "/metrics"))[1].decode()


def test_they_score_sleep_wake_and_end():
    with opened(2) as (model, said):
        processes = [psutil.Process(pid) for pid in pids(model)]
        assert len(processes) == 2
        assert (model.name, model.version) == ("null", "null")
        groups = [group(f"q{i}") for i in range(20)]
        assert model.scorer.score_now(groups) == [null_scores(one) for one in groups]
        model.scorer.sleep_now()
        model.scorer.wake_now()
        for one in groups:
            assert model.scorer.score_now([one]) == [null_scores(one)]
        replicas = model.scorer.replicas.replicas
        assert all(replica.num_done for replica in replicas), "one of them was never asked"
    assert said == []
    assert all(is_gone(one.pid) for one in processes)
    model.scorer.close()


@pytest.mark.slow
def test_what_cannot_be_served(tmp_path):
    def refused(settings, num_replicas):
        open_replicas(settings, num_replicas, limit=30, say=lambda _: None)

    with pytest.raises(ConfigError, match="at least one"):
        refused(NULL, 0)
    with pytest.raises(ModelError, match="/nowhere/rm"):
        refused(serving("/nowhere/rm"), 2)
    (tmp_path / "config.json").write_text("{}")
    before = psutil.Process().children()
    with forked(), pytest.raises(ModelError):  # only the process that loads it finds out
        refused(serving(tmp_path), 2)
    assert len(psutil.Process().children()) <= len(before)


class Stillborn:
    def __init__(self, *_):
        os._exit(3)


def test_one_that_dies_while_it_starts_is_told(monkeypatch):
    monkeypatch.setattr(served_replicas, "ModelWorker", Stillborn)
    with pytest.raises(EngineError, match=r"replica 0 died while it started .*exit code 3"):
        open_replicas(NULL, 1, limit=30, say=lambda _: None)


class EndedError(BaseException):
    """What the end of a process is in these tests."""


def test_a_model_that_fails_at_everything_ends_its_process(monkeypatch):
    """One that fails at what it is given alone goes on."""

    def end(status):
        raise EndedError(status)

    monkeypatch.setattr(os, "_exit", end)
    worker = ModelWorker(RankPlace(role="replica"), NULL)
    backend = worker._backend = ScriptedBackend(fails=lambda tokens: len(tokens) > 1)
    one, two = (tokens for tokens, _ in worker.prepare([group("a"), group("b")]))
    with pytest.raises(RuntimeError, match="device"):  # nothing that it could score is known yet
        worker.score_tokens([one, two])
    worker.score_tokens([one])
    with pytest.raises(RuntimeError, match="device"):
        worker.score_tokens([one, two])
    backend.fails = lambda tokens: True
    with pytest.raises(EndedError, match="70"):
        worker.score_tokens([two])


@pytest.mark.slow
def test_the_queue_has_an_end_and_the_figures_say_how_long_it_is():
    async def main(model):
        served = model.scorer
        processes = [psutil.Process(pid) for pid in pids(model)]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        asked = [group(f"q{i}") for i in range(3)]
        asking = [asyncio.ensure_future(served.score([one])) for one in asked]
        await until(lambda: served.stats().waiting == 6)
        with pytest.raises(BusyError) as refused:
            await served.score([group("one more")])
        assert 0 <= refused.value.retry_after <= 60
        told = await metrics(model)
        assert "laurel_completions_waiting 6.0" in told
        assert "laurel_replicas_ready 2.0" in told
        assert "laurel_scorer_refused_total 1.0" in told
        for process in processes:
            process.send_signal(signal.SIGCONT)
        assert await asyncio.gather(*asking) == [[null_scores(one)] for one in asked]
        told = await metrics(model)
        assert "laurel_completions_waiting 0.0" in told
        assert "laurel_scorer_scored_total 6.0" in told
        assert "laurel_scorer_faults_total 0.0" in told
        processes[0].kill()
        await until(lambda: served.stats().ready == 1)

    with opened(2, ServingSpec(opens=open_null, limits=BatcherLimits(max_waiting=6))) as (model, _):
        asyncio.run(main(model))
