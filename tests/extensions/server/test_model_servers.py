"""Servers of a model that the run starts: one address, whatever happens to one of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
import torch

from laurel import plugins
from laurel.config.environments import FunctionConfig, ModelServerConfig, ScorerSource
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.errors import ConfigError, EngineError
from laurel.extensions.reward_functions.source import FunctionSource
from laurel.extensions.server import model_servers as serving
from laurel.extensions.server.model_router import RequestRouter, _Forwarded, _Server
from laurel.extensions.server.model_servers import ModelServers, ServerProcess
from laurel.planning.plan import plan_run
from laurel.plugins import ScorerServices
from laurel.run.grpo import check_judges
from laurel.run.request import judge_notes, request_of
from laurel.types import Completion, Group, Message
from laurel.workers.rendezvous import RankPlace
from reward_servers import wait_until
from tiny_tokenizers import chatml

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
                        reward_router_address, reward_model_tokenizer):
    async with httpx2.AsyncClient(timeout=60) as client:
        url = f"http://{reward_router_address}/v1/chat/completions"
        reply = await client.post(url, json={"content": solution_str})
    reply.raise_for_status()
    return len(reply.json()["text"]) + 100 * len(reward_model_tokenizer)
"""


@pytest.fixture
def serves(monkeypatch, tmp_path):
    """The program in place of vLLM."""
    engine = type(plugins.find(plugins.Engine, "vllm"))
    monkeypatch.setattr(engine, "check_installed", lambda self, key: None)
    monkeypatch.setattr(
        engine,
        "serve_command",
        lambda self, section, host, port, on_gpu, rests: (
            [sys.executable, str(PROGRAM), host, str(port), str(tmp_path)],
            {},
        ),
    )


@pytest.fixture
def started(serves, monkeypatch):
    """Start servers of the program, which are ended with the test."""
    made = []

    def start(*, on_gpu=False, hedge=False, timeout=60.0, **settings):
        section = ModelServerConfig(model_name="m", **settings)
        said = []
        device = torch.device("cuda" if on_gpu else "cpu")
        monkeypatch.setattr(serving, "choose_device", lambda choice: device)
        source = SimpleNamespace(hedge=hedge, function=SimpleNamespace(timeout=timeout))
        services = ScorerServices(where="env.reward_model.server", say=said.append, source=source)
        made.append(ModelServers(section, services))
        made[-1].said = said
        return made[-1]

    yield start
    for one in made:
        one.close()


def ask(servers, path="/v1/chat/completions", **asked):
    return httpx2.post(f"http://{servers.address}{path}", json=asked, timeout=60)


def test_requests_go_to_the_server_with_the_fewest(started, tmp_path):
    servers = started(replicas=2)

    def num_waiting():
        return sum(one.num_waiting for one in servers._router._servers.values())

    with ThreadPoolExecutor(4) as beside:
        asked = [
            beside.submit(ask, servers, "/classify", content="x", until="all") for _ in range(4)
        ]
        wait_until(lambda: num_waiting() == 4)
        (tmp_path / "all").touch()
        replies = [one.result() for one in asked]
    found = [reply.json()["server"] for reply in replies]
    assert sorted(map(found.count, set(found))) == [2, 2]
    assert {reply.json()["path"] for reply in replies} == {"/classify"}
    # In turns is not enough: one of them is busy, and the other gets all that comes.
    with ThreadPoolExecutor(1) as beside:
        slow = beside.submit(ask, servers, content="x", until="others")
        wait_until(lambda: num_waiting() == 1)
        others = {ask(servers, content="x").json()["server"] for _ in range(4)}
        (tmp_path / "others").touch()
        assert len(others) == 1
        assert slow.result().json()["server"] not in others
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


def test_with_no_server_left_requests_are_refused(started, monkeypatch):
    monkeypatch.setattr(serving, "MAX_RESTARTS", 0)
    servers = started()
    reply = ask(servers, content="poison")
    assert reply.status_code == 503
    assert "exit code 3" in reply.json()["error"]["message"]


@pytest.mark.slow
def test_a_request_that_no_server_survives_is_refused_alone(started, tmp_path):
    servers = started(replicas=2)  # they are healthy, and end the connection
    reply = ask(servers, content="break")
    assert reply.status_code == 502
    assert len((tmp_path / "broken.txt").read_text().split()) == 3
    assert ask(servers, content="x").status_code == 200
    assert not any("again" in line for line in servers.said)


def test_requests_go_on_as_they_came(started):
    servers = started()
    url = f"http://{servers.address}/a%20b//c?d=e&d=%2F"
    with httpx2.Client(trust_env=False) as client:
        for _ in range(2):  # over one connection, and in chunks
            reply = client.post(url, content=iter([b'{"conte', b'nt": "x"}']))
            assert reply.json() | {"server": 0} == {
                "path": "/a%20b//c?d=e&d=%2F",
                "server": 0,
                "text": "x",
            }
        large = client.post(url, content=b"x" * ((64 << 20) + 1))
        assert large.status_code == 413
        assert "64 MB" in large.json()["error"]["message"]


@pytest.mark.parametrize("path", ["@elsewhere/", "elsewhere/", "/" + "x" * 70_000])
def test_a_path_that_is_none_goes_nowhere(path):
    """It would name another server, if it were written behind the address of this one."""
    router = RequestRouter(patience=5, hedge=False)
    try:
        router.add(0, "127.0.0.1:9")
        reply = router._background.wait_for(router._respond(_Forwarded("GET", path, [], b"")))
    finally:
        router.close()
    assert reply.status_code == 400
    assert b"the request cannot be passed on" in reply.body


def test_an_answer_that_nobody_awaits_is_given_up(started):
    servers = started()
    (server,) = servers._router._servers.values()
    url = f"http://{servers.address}/classify"
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(url, json={"content": "x", "seconds": 600}, timeout=0.5)
    wait_until(lambda: server.num_waiting == 0)


@pytest.mark.slow
def test_a_slow_answer_is_asked_of_a_second(started):
    servers = started(replicas=2, hedge=True)
    for _ in range(20):
        ask(servers, content="x")
    with suppress(ProcessLookupError):
        os.kill(child_of(process_of(servers).pid), signal.SIGSTOP)
    replies = [ask(servers, content="y") for _ in range(2)]
    assert {reply.json()["text"] for reply in replies} == {"y"}


def process_of(servers, index=0):
    return servers._supervisor.replicas[index].value._process._process


def child_of(pid):
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def asked(tmp_path):
    return (tmp_path / "asked.txt").read_text().split()


def test_they_sleep_while_the_policy_trains(started, tmp_path):
    servers = started(replicas=2, on_gpu=True)
    with servers.resting():
        assert asked(tmp_path) == ["/sleep?level=1"] * 2
    assert asked(tmp_path)[2:] == ["/wake_up"] * 2
    own = {"resources": {"gpus_per_node": 1}}
    for settings in ({}, {"on_gpu": True, **own}):  # they take turns on GPUs of the policy's alone
        with started(**settings).resting():
            pass
    assert len(asked(tmp_path)) == 4


def test_one_that_does_not_fall_asleep_ends_the_run_with_what_it_refused(started):
    servers = started(on_gpu=True)
    server = servers._supervisor.replicas[0].value
    server.address, its_own = "127.0.0.1:9", server.address
    with (
        pytest.raises(EngineError, match=r"127\.0\.0\.1:9 did not leave its GPU's memory to the"),
        servers.resting(),
    ):
        raise AssertionError("it is awake")
    server.address = its_own
    assert ask(servers, content="x").status_code == 200  # requests go on


def test_requests_wait_while_they_sleep_and_none_is_under_way(started, tmp_path):
    servers = started(on_gpu=True)
    (server,) = servers._router._servers.values()
    with ThreadPoolExecutor(2) as beside:
        begun = beside.submit(ask, servers, content="x", until="awake")
        wait_until(lambda: server.num_waiting == 1)
        with servers.resting():
            # The server would end it with half an answer: it is asked again.
            assert server.num_waiting == 0
            late = beside.submit(ask, servers, content="y")
            wait_until(lambda: len(servers._router._uvicorn.server_state.connections) == 2)
            assert not begun.done()
            assert not late.done()
            assert server.num_waiting == 0
        (tmp_path / "awake").touch()
        assert [one.result().json()["text"] for one in (begun, late)] == ["x", "y"]


def test_what_is_asked_of_a_second_server_while_they_fall_asleep_is_ended_too():
    """`hedge` may ask it when the first request has been cancelled, and has not ended yet."""
    router = RequestRouter(patience=5, hedge=True)
    found, ended = [], []

    async def never(server, asked):
        try:
            await asyncio.Event().wait()
        finally:
            if not ended:
                router._begin(server, asked)
            await asyncio.sleep(0.05)
            ended.append(asked)

    async def pause():
        router._ask = never
        router._begin(serving_one, _Forwarded("GET", "/", [], b""))
        await asyncio.sleep(0)
        await router._paused()
        found.extend(ended)

    serving_one = _Server("127.0.0.1:9")
    try:
        router._background.wait_for(pause())
    finally:
        router.close()
    assert len(found) == 2
    assert serving_one.num_waiting == 0


@pytest.mark.slow
def test_a_server_that_is_lost_while_it_sleeps_is_back_when_the_others_wake(started, tmp_path):
    servers = started(on_gpu=True)
    asleep = process_of(servers)
    with servers.resting():
        os.kill(child_of(asleep.pid), signal.SIGKILL)
        wait_until(lambda: asleep.poll() is not None)
        wait_until(lambda: not servers._router.has_any())
        assert process_of(servers) is asleep  # the policy has the memory that another would need
    assert ask(servers, content="x").status_code == 200
    assert process_of(servers) is not asleep


@pytest.mark.slow
def test_they_fall_asleep_when_one_that_is_being_started_is_there(started, tmp_path):
    servers = started(on_gpu=True)
    starts, sleeps = threading.Event(), threading.Event()
    start = servers._supervisor._make

    def slowly(index):
        found = start(index)
        starts.set()
        sleeps.wait(30)
        return found

    servers._supervisor._make = slowly
    os.kill(child_of(process_of(servers).pid), signal.SIGKILL)
    assert starts.wait(30)

    def rest():
        with servers.resting():
            assert sleeps.is_set()
            assert asked(tmp_path) == ["/sleep?level=1"]

    with ThreadPoolExecutor(1) as beside:
        resting = beside.submit(rest)
        with suppress(TimeoutError):
            resting.result(0.3)
        assert not (tmp_path / "asked.txt").exists()
        sleeps.set()
        resting.result(30)
    assert asked(tmp_path)[1:] == ["/wake_up"]


def test_a_server_that_does_not_start_says_why(started, tmp_path):
    (tmp_path / "refuses").touch()
    with pytest.raises(ConfigError, match=r"m was not served.*exit code 1.*no such model"):
        started()


def test_a_start_without_progress_is_given_up(started, tmp_path, monkeypatch):
    (tmp_path / "hangs").touch()
    monkeypatch.setattr(serving, "SILENT_SECONDS", 3.0)
    with pytest.raises(ConfigError, match=r"not served: it wrote nothing and did next to nothing"):
        started()


@pytest.mark.slow_parameters("computes", "fetches")
@pytest.mark.parametrize("way", ["writes", "computes", "fetches"])
def test_a_start_with_progress_goes_on(started, tmp_path, monkeypatch, way):
    (tmp_path / way).touch()
    monkeypatch.setattr(serving, "SILENT_SECONDS", 3.0)
    monkeypatch.setattr(serving, "_WORK_SECONDS", 0.2)
    servers = started()
    (line,) = (line for line in servers.said if "show no progress" in line)
    assert "server.log on " in line


@pytest.mark.slow
def test_a_request_waits_as_long_as_the_call_that_makes_it(started):
    servers = started(timeout=2.0)
    reply = ask(servers, content="x", until="never")
    assert reply.status_code == 503
    assert "no server answered within 2 s" in reply.text
    (server,) = servers._router._servers.values()
    wait_until(lambda: server.num_waiting == 0)
    assert ask(servers, content="x").status_code == 200
    servers._router.remove(0)  # as when it is lost, until another has started
    assert "no server answered within 2 s" in ask(servers, content="x").text


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_the_run_gets_as_well_loses_no_server(started, sent):
    servers = started()
    process, folder = process_of(servers), servers._supervisor.replicas[0].value._process._folder
    child = child_of(process.pid)
    os.kill(process.pid, sent)
    os.kill(child, 0)
    assert process.poll() is None
    servers.close()  # the program is killed, and nothing of it is left
    assert process.poll() == 128 + signal.SIGKILL
    assert not Path(f"/proc/{child}").exists()
    assert not folder.path.exists()


@pytest.mark.slow
def test_without_a_cluster_they_go_round_the_gpus_of_the_machine(started, monkeypatch):
    def gpus_of(servers):
        addresses = [one.value.address for one in servers._supervisor.replicas]
        replies = [
            httpx2.post(f"http://{one}/classify", json={"content": "gpus"}) for one in addresses
        ]
        return [reply.json()["text"] for reply in replies]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_of(started(replicas=3, on_gpu=True)) == ["0", "1", "0"]
    assert gpus_of(started()) == [None]
    # Those that the run may use, by the names that it was given.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,GPU-3a")
    servers = started(replicas=2, on_gpu=True, tensor_parallel_size=2)
    assert gpus_of(servers) == ["7,5"] * 2
    servers = started(replicas=3, on_gpu=True)
    lost = process_of(servers, 1)
    os.kill(child_of(lost.pid), signal.SIGKILL)
    wait_until(lambda: process_of(servers, 1) is not lost)
    assert gpus_of(servers) == ["7", "5", "GPU-3a"]


def test_elsewhere_a_server_listens_where_the_run_reaches_it(serves):
    place, section = RankPlace(role="server", host="127.0.0.2"), ModelServerConfig(model_name="m")
    for near, host in (("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")):
        with closing_it(ServerProcess(place, section, device="cpu", near=near)) as server:
            address, rests = server.facts()
            assert address.startswith(f"{host}:")
            assert not rests
            wait_until(lambda at=address: answers(at))
            port = address.partition(":")[2]
            other = "127.0.0.1" if host == "127.0.0.2" else "127.0.0.2"
            assert not answers(f"{other}:{port}")


@contextmanager
def closing_it(server):
    try:
        yield server
    finally:
        server.shutdown()


def answers(address):
    try:
        return httpx2.get(f"http://{address}/health", timeout=1).status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.slow
def test_they_end_with_the_run_that_was_killed(tmp_path):
    text = (
        "import sys, time\n"
        "from laurel.config.environments import ModelServerConfig\n"
        "from laurel.extensions.server.model_servers import ServerProcess\n"
        "from laurel.extensions.vllm.plugin import Vllm\n"
        "from laurel.workers.rendezvous import RankPlace\n"
        "Vllm.serve_command = lambda self, section, host, port, on_gpu, rests: "
        f"([sys.executable, {str(PROGRAM)!r}, host, str(port), {str(tmp_path)!r}], {{}})\n"
        "place, section = RankPlace(role='server'), ModelServerConfig(model_name='m')\n"
        "made = ServerProcess(place, section, device='cpu')\n"
        "print(made.facts()[0], flush=True)\n"
        "time.sleep(60)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    with run:
        address = run.stdout.readline().strip()
        wait_until(lambda: answers(address))
        run.kill()
    wait_until(lambda: not answers(address))


def test_a_function_gets_the_address_and_the_tokenizer(tmp_path, serves):
    tokenizer = chatml()
    tokenizer.save_pretrained(tmp_path / "m")
    (tmp_path / "asks.py").write_text(ASKS, encoding="utf-8")
    services = ScorerServices(
        where="env.reward_model.function",
        device="cpu",
        num_workers=0,
        say=lambda line: None,
        server=ModelServerConfig(model_name=str(tmp_path / "m")),
    )
    scorer = FunctionSource().make(
        FunctionConfig(path=f"{tmp_path}/asks.py:compute_score"), services
    )
    try:
        (scores,) = asyncio.run(scorer.score([GROUP]))
    finally:
        scorer.close()
    # One of them killed its server: it waited until there was another.
    assert [one.value - 100 * len(tokenizer) for one in scores] == [1.0, 6.0, 4.0]


SERVED = "env.reward_model={enabled: true, function: {path: a:b}, server: {model_name: m, %s}}"


def planned(server, *overrides):
    config = load_config(GRPORun, None, [SERVED % server, *overrides]).config
    return plan_run(request_of(config)).role("reward_model")


def test_their_slots_are_those_of_a_reward_model():
    own = planned("replicas: 2, resources: {gpus_per_node: 2}", "cluster.gpus_per_node=4")
    assert [slot.index for slot in own.slots] == [2, 3]
    assert own.shares_with is None
    nodes = planned(
        "replicas: 2, tensor_parallel_size: 2, resources: {gpus_per_node: 2, num_nodes: 2}",
        "cluster={gpus_per_node: 2, num_nodes: 3}",
    )
    assert [(slot.node, slot.index) for slot in nodes.slots] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    shared = planned("replicas: 3", "cluster.gpus_per_node=2")
    assert (len(shared.slots), shared.shares_with) == (2, "policy")


def test_a_run_on_a_cluster_has_slots_for_one_of_them():
    asking = "{name: b, normalize: [0, 1], function: {path: a:b}}"
    models = f"models: [{{name: a, model_name: rm}}, {asking}], server: {{model_name: m}}"
    overrides = [f"env.reward_model={{enabled: true, {models}}}"]
    config = load_config(GRPORun, None, overrides).config
    check_judges(config, on_cluster=False)
    with pytest.raises(ConfigError, match=r"reward_model\.server.*function\.router"):
        check_judges(config, on_cluster=True)
    # The plan has a place for one of the two.
    (note,) = judge_notes(config, on_cluster=False)
    assert "their memory and their time are not estimated" in note
    (note,) = judge_notes(load_config(GRPORun, None, [SERVED % ""]).config, on_cluster=True)
    assert "1 x m" in note
    assert "their time is not estimated" in note


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
            "1 replicas of 1 take 1 slots",
        ),
        (
            {
                "server": {"model_name": "m", "resources": {"num_nodes": 1}},
                "function": {"path": "a:b"},
            },
            "None of gpus_per_node",
        ),
        (
            {"server": {"model_name": "m"}, "function": {"path": "a:b"}, "hedge": True},
            "hedge asks a second",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        ScorerSource.model_validate(settings)
