"""Servers of a model that the run starts: one address, whatever happens to one of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import httpx2
import pytest

from laurel import plugins
from laurel.config.environments import FunctionConfig, ModelServerConfig, ScorerSource
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.errors import ConfigError
from laurel.plugins import ScorerServices
from laurel.rewards.function_source import FunctionSource
from laurel.rewards.serving import servers as serving
from laurel.rewards.serving.servers import ModelServers
from laurel.run.request import judge_notes
from laurel.types import Completion, Group, Message
from reward_servers import wait_until

PROGRAM = Path(__file__).parents[2] / "model_server.py"
GROUP = Group(
    id="g",
    prompt=(Message("user", "2 + 2?"),),
    completions_G=tuple(
        Completion(messages=(Message("assistant", text),)) for text in ("4", "poison", "five")
    ),
)
ASKS = """
import httpx2

async def compute_score(data_source, solution_str, ground_truth, extra_info,
                        reward_router_address):
    async with httpx2.AsyncClient(timeout=60) as client:
        url = f"http://{reward_router_address}/v1/chat/completions"
        reply = await client.post(url, json={"content": solution_str})
    reply.raise_for_status()
    return len(reply.json()["text"])
"""


@pytest.fixture
def started(tmp_path):
    """Start servers of the program, which are ended with the test."""
    made = []

    def start(**settings):
        rests = settings.pop("rests", False)
        section = ModelServerConfig(model_name="m", start_timeout=30, **settings)

        def command(index, port):
            return [sys.executable, str(PROGRAM), str(port), str(tmp_path)], {}

        said = []
        made.append(ModelServers(section, command, say=said.append, rests=rests))
        made[-1].said = said
        return made[-1]

    yield start
    for one in made:
        one.close()


def ask(servers, path="/v1/chat/completions", **asked):
    return httpx2.post(f"http://{servers.address}{path}", json=asked, timeout=60)


def test_requests_go_to_the_server_with_the_fewest(started):
    servers = started(replicas=2)

    async def all_of_them():
        async with httpx2.AsyncClient(timeout=60) as client:
            url = f"http://{servers.address}/classify"
            calls = [client.post(url, json={"seconds": 0.3, "content": "x"}) for _ in range(4)]
            return await asyncio.gather(*calls)

    replies = asyncio.run(all_of_them())
    found = [reply.json()["server"] for reply in replies]
    assert sorted(map(found.count, set(found))) == [2, 2]
    assert {reply.json()["path"] for reply in replies} == {"/classify"}
    # What a server says of a request is passed on.
    assert ask(servers, content="x", status=422).status_code == 422
    assert ask(servers, content="x", status=500).status_code == 500
    assert ask(servers, content="x", status=503).status_code == 503


@pytest.mark.parametrize("content", ["poison", "engine"])  # the server dies, or its engine first
def test_a_lost_server_is_an_outage_and_comes_back(started, content):
    servers = started()  # there is no other that could answer in its place
    reply = ask(servers, content=content)
    assert (reply.status_code, reply.json()["text"]) == (200, content)
    assert any("started again" in line for line in servers.said)


def test_with_no_server_left_requests_are_refused(started):
    servers = started(max_restarts=0)
    reply = ask(servers, content="poison")
    assert reply.status_code == 503
    assert "exit code 3" in reply.json()["error"]["message"]


@pytest.fixture(scope="module")
def server_of_odd_requests(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    section = ModelServerConfig(model_name="m", start_timeout=30)
    command = [sys.executable, str(PROGRAM)]
    made = ModelServers(
        section, lambda _, port: ([*command, str(port), str(folder)], {}), say=lambda line: None
    )
    with closing(made):
        yield made


def sent(servers, request: bytes) -> list[tuple[int, bytes]]:
    """Return the replies to what is sent over one connection, until the router ends it."""
    host, port = servers.address.split(":")
    found = []
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request)
        replies = connection.makefile("rb")
        while status := replies.readline():
            size = 0
            while line := replies.readline().strip():
                if line.startswith(b"content-length:"):
                    size = int(line.split(b":")[1])
            found.append((int(status.split()[1]), replies.read(size)))
            if b"last" in found[-1][1]:
                break
    return found


ASKED = b'{"content": "%s"}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: m\r\n"


def test_requests_in_chunks_and_one_after_the_other(server_of_odd_requests):
    body = ASKED % b"x"
    chunks = b"4;odd\r\n%s\r\n%x\r\n%s\r\n0\r\nafter: it\r\n\r\n" % (
        body[:4],
        len(body) - 4,
        body[4:],
    )
    last = ASKED % b"last"
    found = sent(
        server_of_odd_requests,
        HEAD
        + b"transfer-encoding: chunked\r\n\r\n"
        + chunks
        + HEAD
        + b"content-length: %d\r\n\r\n" % len(last)
        + last,
    )
    assert [(status, json.loads(reply)["text"]) for status, reply in found] == [
        (200, "x"),
        (200, "last"),
    ]


@pytest.mark.parametrize(
    ("request_sent", "told"),
    [
        (b"hello\r\n", "it begins with 'hello'"),
        (b"GET @elsewhere/ HTTP/1.1\r\n\r\n", "@elsewhere"),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", "elsewhere"),
        (HEAD + b"content-length: many\r\n\r\n", "many"),
        (HEAD + b"content-length: 99999999999\r\n\r\n", "larger than 64 MB"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n7ffffffff\r\n", "larger than 64 MB"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nodd\r\n", "odd"),
        (HEAD + b"an odd name: x\r\n\r\n", "an odd name"),
        (HEAD + b"x: " + b"y" * 100_000 + b"\r\n\r\n", "limit"),
    ],
)
def test_what_is_no_request_is_refused_at_once(server_of_odd_requests, request_sent, told):
    ((status, reply),) = sent(server_of_odd_requests, request_sent)
    assert status == 400
    assert told in json.loads(reply)["error"]["message"]


def test_an_answer_that_nobody_awaits_is_given_up(server_of_odd_requests):
    (server,) = server_of_odd_requests._router._servers.values()
    url = f"http://{server_of_odd_requests.address}/classify"
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(url, json={"content": "x", "seconds": 600}, timeout=0.5)
    wait_until(lambda: server.num_waiting == 0)


@pytest.mark.slow
def test_a_slow_answer_is_asked_of_a_second(started):
    servers = started(replicas=2, hedge=True)
    for _ in range(20):
        ask(servers, content="x")
    stopped = servers._supervisor.replicas[0].value
    with suppress(ProcessLookupError):
        os.kill(child_of(stopped._process.pid), signal.SIGSTOP)
    replies = [ask(servers, content="y") for _ in range(2)]
    assert {reply.json()["text"] for reply in replies} == {"y"}


def child_of(pid):
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def test_they_sleep_while_the_policy_trains(started, tmp_path):
    servers = started(replicas=2, rests=True)
    with servers.resting():
        assert (tmp_path / "asked.txt").read_text().split() == ["/sleep?level=1"] * 2
    assert (tmp_path / "asked.txt").read_text().split()[2:] == ["/wake_up"] * 2
    with started().resting():
        pass  # with GPUs of their own they are left alone
    assert len((tmp_path / "asked.txt").read_text().split()) == 4


def test_a_server_that_is_lost_while_it_sleeps_stops_no_run(started):
    servers = started(rests=True)
    asleep = servers._supervisor.replicas[0].value
    with servers.resting():
        os.kill(child_of(asleep._process.pid), signal.SIGKILL)
        wait_until(lambda: asleep.loss() is not None)
    assert ask(servers, content="x").status_code == 200


def test_a_server_that_does_not_start_says_why(started, tmp_path):
    (tmp_path / "refuses").touch()
    with pytest.raises(ConfigError, match=r"m was not served.*exit code 1.*no such model"):
        started()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_the_run_gets_as_well_loses_no_server(tmp_path, sent):
    server = serving.ServerProcess(
        "server 0",
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"],
        {},
        1,
        tmp_path / "log",
    )
    try:
        wait_until(lambda: "up" in (tmp_path / "log").read_text())
        child = child_of(server._process.pid)
        os.kill(server._process.pid, sent)
        os.kill(child, 0)
    finally:
        server.end()
    assert server.loss() is not None
    assert "exit code 137" in server.loss()
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.slow
def test_they_end_with_the_run_that_was_killed(tmp_path):
    text = (
        "import sys, time\n"
        "from laurel.config.environments import ModelServerConfig\n"
        "from laurel.rewards.serving.servers import ModelServers\n"
        f"made = ModelServers(ModelServerConfig(model_name='m'), lambda index, port: "
        f"([sys.executable, {str(PROGRAM)!r}, str(port), {str(tmp_path)!r}], {{}}), say=print)\n"
        "print(made._supervisor.replicas[0].value.address, flush=True)\n"
        "time.sleep(60)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    with run:
        run.stdout.readline()
        address = run.stdout.readline().strip()
        assert httpx2.get(f"http://{address}/health").status_code == 200
        run.kill()

    def is_gone():
        try:
            httpx2.get(f"http://{address}/health", timeout=1)
        except httpx2.TransportError:
            return True
        return False

    wait_until(is_gone)


@pytest.mark.slow_parameters("1")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_function_gets_the_address(tmp_path, monkeypatch, num_workers):
    engine = type(plugins.find(plugins.Engine, "vllm"))
    monkeypatch.setattr(engine, "check_installed", lambda self, key: None)
    command = [sys.executable, str(PROGRAM)]
    monkeypatch.setattr(
        engine,
        "serve_command",
        lambda self, section, port, devices, rests: ([*command, str(port), str(tmp_path)], {}),
    )
    (tmp_path / "asks.py").write_text(ASKS, encoding="utf-8")
    services = ScorerServices(
        where="env.reward_model.function",
        device="cpu",
        num_workers=num_workers,
        say=lambda line: None,
        server=ModelServerConfig(model_name="m", start_timeout=30),
    )
    scorer = FunctionSource().make(
        FunctionConfig(path=f"{tmp_path}/asks.py:compute_score"), services
    )
    try:
        (scores,) = asyncio.run(scorer.score([GROUP]))
    finally:
        scorer.close()
    # One of them killed its server: it waited until there was another.
    assert [one.value for one in scores] == [1.0, 6.0, 4.0]


def test_a_run_on_a_cluster_says_what_to_do():
    services = ScorerServices(
        where="env.reward_model.function",
        is_elsewhere=True,
        say=print,
        server=ModelServerConfig(model_name="m"),
    )
    with pytest.raises(ConfigError, match=r"vllm serve m.*function\.router"):
        FunctionSource().make(FunctionConfig(path="a:b"), services)
    overrides = [
        "env.reward_model={enabled: true, function: {path: a:b}, server: {model_name: m}}",
    ]
    config = load_config(GRPORun, None, overrides).config
    for on_cluster, told in ((True, "vllm serve m"), (False, "1 x m is not counted")):
        (note,) = judge_notes(config, on_cluster=on_cluster)
        assert told in note


def test_gpus_of_their_own_are_the_last(monkeypatch):
    import torch

    seen = []
    engine = type(plugins.find(plugins.Engine, "vllm"))
    monkeypatch.setattr(engine, "check_installed", lambda self, key: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        serving, "ModelServers", lambda section, command, **said: seen.append((command, said))
    )

    def opened(**settings):
        section = ModelServerConfig(model_name="m", **settings)
        serving.open_servers(section, device="auto", say=print, where="env.reward_model.server")
        command, said = seen[-1]
        commands = [command(index, 5) for index in range(section.replicas)]
        return [added["CUDA_VISIBLE_DEVICES"] for _, added in commands], said["rests"], commands

    own = {"replicas": 2, "resources": {"gpus_per_node": 2}}
    assert opened(**own)[:2] == (["2", "3"], False)
    devices, rests, commands = opened(tensor_parallel_size=2, arguments=["--seed=3"])
    assert (devices, rests) == (["0,1"], True)
    assert commands[0][0][-1] == "--seed=3"
    assert "--enable-sleep-mode" in commands[0][0]
    with pytest.raises(ConfigError, match="the policy needs one"):
        opened(replicas=4, resources={"gpus_per_node": 4})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"server": {"model_name": "m"}}, "server is for a function"),
        (
            {"server": {"model_name": "m"}, "function": {"path": "a:b", "router": "a:1"}},
            "server is for a function",
        ),
        (
            {
                "server": {"model_name": "m", "resources": {"gpus_per_node": 3}},
                "function": {"path": "a:b"},
            },
            "1 replicas of 1 take 1",
        ),
        (
            {"server": {"model_name": "m", "hedge": True}, "function": {"path": "a:b"}},
            "hedge asks a second",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        ScorerSource.model_validate(settings)
