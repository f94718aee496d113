"""A real `vllm serve --runner pooling`, asked as a run asks a server that it has not started."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import httpx2
import numpy as np
import psutil
import pytest

from laurel.extensions.server import other_dialects
from laurel.extensions.vllm.settings import EAGER_ENVIRONMENT, ENVIRONMENT
from laurel.rewards.remote.dialects import dialect_of
from laurel.rewards.remote.http import HttpReplica, HttpScorer
from laurel.rewards.remote.replica import failure_reason
from laurel.rewards.remote.router import CanaryGroup, Router, RouterOptions
from laurel.types import Message, group_of
from processes import descendants
from scripted_replicas import ScorerReplica
from vllm_engines import require_vllm
from vllm_reward_models import local, saved

pytestmark = pytest.mark.usefixtures("warm_processes")

EXACT = 1e-5
"""Scores of size 1 of one model in float32, in two orders of sums: 1.2e-6 was found."""
START_SECONDS = 300
COMMAND = """
import importlib.metadata as packages
from vllm.platforms import current_platform
current_platform.is_cpu()
version = packages.version
packages.version = lambda name: "0" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""
"""The `vllm` command, which asks for a package that its CPU build has under another name."""


def asked(number):
    prompt = f"Question {number}: " + "where does the laurel grow? " * 6
    said = [f"Answer {i}: " + "by the western gate. " * (1 + i % 3) for i in range(8)]
    return group_of((Message("user", prompt),), said, group_id=str(number))


GROUPS = [asked(number) for number in range(4)]


def values(scores):
    return np.array([score.value for scores_G in scores for score in scores_G], np.float64)


def near(expected):
    return pytest.approx(values(expected), rel=EXACT, abs=EXACT)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Where it lies, and the same in this process."""
    require_vllm()
    directory = tmp_path_factory.mktemp("model")
    return directory, local(saved(directory, "qwen3"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """vLLM's own server of that model: its address and its process."""
    directory, _ = model
    log = tmp_path_factory.mktemp("server") / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [
        sys.executable,
        "-c",
        COMMAND,
        "serve",
        str(directory),
        "--runner",
        "pooling",
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
        "--enforce-eager",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        "laurel-test",
        "--kv-cache-memory-bytes",
        str(1 << 26),
        "--block-size",
        "32",
    ]
    environment = {**os.environ, **ENVIRONMENT, **EAGER_ENVIRONMENT}
    with (
        log.open("w") as out,
        subprocess.Popen(arguments, stdout=out, stderr=out, env=environment) as process,
    ):
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}", process
        finally:
            kill_tree(process)


def wait_until_healthy(url, process, log):
    end = time.monotonic() + START_SECONDS
    with httpx2.Client(base_url=url, timeout=5, trust_env=False) as client:
        while True:
            with suppress(httpx2.HTTPError):
                if client.get("/health").status_code == 200:
                    return
            assert process.poll() is None, log.read_text()[-5000:]
            assert time.monotonic() < end, log.read_text()[-5000:]
            time.sleep(0.25)


def kill_tree(process):
    """It and its engine, which would outlive it."""
    for one in descendants(process.pid):
        with suppress(psutil.NoSuchProcess):
            one.kill()
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
    process.wait()


def score(scorer, groups):
    async def once():
        try:
            return await scorer.score(groups)
        finally:
            await scorer.aclose()

    return asyncio.run(once())


def test_tokens_sent_to_vllm_get_the_scores_of_the_model(server, model):
    url, _ = server
    _, here = model
    scorer = HttpScorer([url], dialect_of("vllm", contract=here.contract, model="laurel-test"))
    found, expected = score(scorer, GROUPS), here.score_now(GROUPS)
    assert np.ptp(values(expected)) > 0.2
    assert values(found) == near(expected)
    for one, other in zip(found, expected, strict=True):
        assert [(s.num_tokens, s.truncated) for s in one] == [
            (s.num_tokens, s.truncated) for s in other
        ]


def test_what_is_too_long_is_cut_by_the_contract_before_it_is_sent(server, model):
    url, _ = server
    _, here = model
    long = group_of((Message("user", "Where?"),), ("No.", "by the gate " * 100), group_id="long")
    scorer = HttpScorer([url], dialect_of("vllm", contract=here.contract, model="laurel-test"))
    found, expected = score(scorer, [long]), here.score_now([long])
    assert [one.truncated for one in found[0]] == [False, True]
    assert values(found) == near(expected)


def test_messages_are_rendered_by_the_server_to_the_same_scores(server, model):
    url, _ = server
    _, here = model
    scorer = HttpScorer([url], dialect_of("vllm", model="laurel-test"))
    assert values(score(scorer, GROUPS[:2])) == near(here.score_now(GROUPS[:2]))


def test_a_server_that_squashes_is_found(server, model, monkeypatch):
    """As one that has renamed `use_activation`: it ignores what it does not know."""
    url, _ = server
    _, here = model
    monkeypatch.setattr(other_dialects, "RAW", {})
    squashing = dialect_of("vllm", contract=here.contract, model="laurel-test")
    raw = values(here.score_now(GROUPS[:1]))
    squashed = values(score(HttpScorer([url], squashing), GROUPS[:1]))
    assert squashed == pytest.approx(1 / (1 + np.exp(-raw)), abs=EXACT)
    golden = tuple(values(here.score_now([GROUPS[1]])))
    canary = CanaryGroup(group=GROUPS[1], values_G=golden, tolerance=1e-3)
    options = RouterOptions(canary=canary, timeout=5)
    (found,) = score(HttpScorer([url], squashing, options=options), GROUPS[:1])
    assert [one.value for one in found] == [None] * 8
    assert {failure_reason(one.failure) for one in found} == {"canary"}
    monkeypatch.undo()
    sound = HttpScorer([url], squashing, options=RouterOptions(canary=canary))
    assert values(score(sound, GROUPS[:1])) == near(here.score_now(GROUPS[:1]))


def test_a_killed_server_loses_nothing_where_there_is_another(server, model):
    """The last test of this server."""
    url, process = server
    _, here = model
    many = [asked(100 + number) for number in range(60)]
    dialect = dialect_of("vllm", contract=here.contract, model="laurel-test")
    vllm = HttpReplica(url, dialect)
    answered = []
    attempt = vllm.attempt

    async def counted(*arguments, **named):
        reply = await attempt(*arguments, **named)
        answered.append(reply)
        if len(answered) == 3:
            kill_tree(process)
        return reply

    vllm.attempt = counted
    router = Router([vllm, ScorerReplica(here, "here")], RouterOptions(timeout=120, window=4))
    found = score(router, many)
    assert len(answered) >= 3
    assert process.poll() == -signal.SIGKILL
    assert router.counts["fault_connection"] > 0
    assert [one.failure for scores_G in found for one in scores_G] == [None] * 480
    assert values(found) == near(here.score_now(many))
