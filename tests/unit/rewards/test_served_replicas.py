"""Replicas as the front of `laurel serve` has them: the end of the queue, figures, who leaves."""

import asyncio
import contextlib
import os
import signal
import urllib.request

import psutil
import pytest

from laurel.errors import BusyError
from laurel.rewards.remote.router import RouterOptions
from laurel.rewards.server.app import GateOptions, make_app
from laurel.rewards.server.replicas import ReplicaProcesses, ServedReplicas
from laurel.rewards.server.service import ModelSettings, RewardService, ServedModel
from laurel.types import Message, group_of
from reward_models import small_model, write_model
from scripted_backend import null_scores

FAST = RouterOptions(timeout=60, attempt_timeout=50)


def group(name, *answers):
    return group_of((Message("user", name),), answers or ("a", "b"), group_id=name)


async def until(true):
    async with asyncio.timeout(50):
        while not true():
            await asyncio.sleep(0.01)


async def closing(main, replicas, *, max_waiting=6):
    async with contextlib.aclosing(ServedReplicas(replicas, max_waiting=max_waiting)) as served:
        await main(served, replicas)


def metrics(served):
    """What `/metrics` of a server of them says."""

    async def ask():
        sent = []

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        service = RewardService()
        service.begin(ServedModel(name="m", version="1", scorer=served))
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/metrics",
            "raw_path": b"/metrics",
            "query_string": b"",
            "client": ("127.0.0.1", 1),
            "root_path": "",
            "headers": [],
        }
        await make_app(service, GateOptions(api_key=None, hosts=None))(scope, receive, send)
        return sent[1]["body"].decode()

    return ask()


@pytest.mark.slow
def test_the_queue_has_an_end_and_the_figures_say_how_long_it_is():
    async def main(served, replicas):
        processes = [psutil.Process(pid) for pid in replicas.pids]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        asked = [group(f"q{i}") for i in range(3)]
        asking = [asyncio.ensure_future(served.score([one])) for one in asked]
        await until(lambda: served.stats().waiting == 6)
        with pytest.raises(BusyError) as refused:
            await served.score([group("one more")])
        assert 0 <= refused.value.retry_after <= 60
        told = await metrics(served)
        assert "laurel_completions_waiting 6.0" in told
        assert "laurel_replicas_ready 2.0" in told
        assert "laurel_scorer_refused_total 1.0" in told
        for process in processes:
            process.send_signal(signal.SIGCONT)
        assert await asyncio.gather(*asking) == [[null_scores(one)] for one in asked]
        told = await metrics(served)
        assert "laurel_completions_waiting 0.0" in told
        assert "laurel_scorer_scored_total 6.0" in told
        assert "laurel_scorer_attempts_total 3.0" in told
        processes[0].kill()
        await until(lambda: served.stats().ready == 1)

    with ReplicaProcesses(ModelSettings(), 2, options=FAST) as replicas:
        asyncio.run(closing(main, replicas))


@pytest.mark.slow
def test_what_nobody_waits_for_any_more_leaves_the_queue_of_the_replica_too(tmp_path):
    """A client that leaves cancels its request at the front, and that its part at the replica."""
    directory = tmp_path / "rm"
    write_model(small_model(max_length=512), directory)
    settings = ModelSettings(model=str(directory), device="cpu", batch_tokens=512)

    def of_the_replica(replicas, name):
        (process,) = replicas._replicas
        request = urllib.request.Request(
            f"{process._url}/metrics", headers={"Authorization": f"Bearer {process._api_key}"}
        )
        with urllib.request.urlopen(request, timeout=20) as response:
            lines = response.read().decode().splitlines()
        (found,) = [line for line in lines if line.startswith(f"{name} ")]
        return float(found.split()[1])

    async def main(served, replicas):
        long = " ".join(f"word {i}" for i in range(120))
        asked = [group(f"{i} {long}", *(f"{j} {long}" for j in range(8))) for i in range(200)]
        asking = asyncio.ensure_future(served.score(asked))
        waiting, cancelled = "laurel_completions_waiting", "laurel_scorer_cancelled_total"
        while await asyncio.to_thread(of_the_replica, replicas, waiting) < 64:
            assert not asking.done(), "too quick for anybody to leave"
        # Else it might have computed what waits before it hears that nobody does.
        (pid,) = replicas.pids
        os.kill(pid, signal.SIGSTOP)
        try:
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        finally:
            os.kill(pid, signal.SIGCONT)
        assert served.stats().cancelled == 1
        assert served.stats().waiting == 0
        async with asyncio.timeout(50):
            while await asyncio.to_thread(of_the_replica, replicas, waiting):
                await asyncio.sleep(0.02)
        assert await asyncio.to_thread(of_the_replica, replicas, cancelled) >= 4
        scored = await asyncio.to_thread(of_the_replica, replicas, "laurel_scorer_scored_total")
        assert scored < 1600
        ((score, _),) = await served.score([group("afterwards")])
        assert score.failure is None

    with ReplicaProcesses(settings, 1, options=FAST) as replicas:
        asyncio.run(closing(main, replicas, max_waiting=10_000))
