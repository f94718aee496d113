"""`laurel serve` for clients that leave, ask twice, or have only one of its keys; put to sleep,
given another model, and with a clock that jumps. Figures in brackets are the cases of the project's
fault matrix."""

import asyncio
import json
import signal
from urllib.parse import urlsplit

import psutil
import pytest

from laurel.rewards.open import open_local
from laurel.types import Message, group_of
from reward_streams import GROUPS, Streamed
from sandbox_processes import wait_until
from scripted_backend import null_scores
from serve_processes import (
    KEY,
    Load,
    Serving,
    model_values,
    null_values,
    request_of,
    values_of,
)

pytestmark = pytest.mark.usefixtures("warm_processes")

QUIET = ("--access-log", "none")
ADMIN_KEY = "the-other-key-of-the-tests-of-laurel-serve"


def figures(server):
    """Those of `/metrics`, by their name and labels."""
    status, text = server.ask("/metrics")
    assert status == 200
    lines = [line.rpartition(" ") for line in text.decode().splitlines() if line[0] != "#"]
    return {name: float(value) for name, _, value in lines}


def answered(server, status, path="/v1/score"):
    return figures(server).get(f'laurel_requests_total{{path="{path}",status="{status}"}}', 0.0)


@pytest.mark.slow
def test_a_request_that_is_sent_again_is_computed_once_and_the_same_after_a_kill(tmp_path):  # [19]
    """The front holds the router; a client that lost its connection asks under the same id."""
    said = ("--null", "--replicas", "2", *QUIET)
    asked = request_of("q", ["a", "b"], request_id="1")
    with Serving(tmp_path, *said).ready() as server:
        port = int(server.url.rpartition(":")[2])
        first = server.ask("/v1/score", asked)
        assert first[0] == 200
        assert values_of(first[1]) == null_values("q", "a", "b")
        assert [server.ask("/v1/score", asked) for _ in range(4)] == [first] * 4
        assert figures(server)["laurel_scorer_requests_total"] == 1
        assert answered(server, 200) == 5
        assert server.ask("/v1/score", request_of("q", ["c"], request_id="1"))[0] == 422
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(10)
    with Serving(tmp_path, *said, port=port).ready() as server:
        assert [server.ask("/v1/score", asked) for _ in range(2)] == [first] * 2
        assert figures(server)["laurel_scorer_requests_total"] == 1


@pytest.mark.slow
def test_clients_that_leave_take_their_requests_along(models, tmp_path):
    long = " ".join(f"word {i}" for i in range(100))
    named = [{"request_id": str(i)} if i % 2 else {} for i in range(150)]
    bodies = [
        json.dumps(request_of(f"{i} {long}", [f"{j} {long}" for j in range(8)], **more)).encode()
        for i, more in enumerate(named)
    ]

    async def ask_and_leave(server):
        address = urlsplit(server.url)
        writers = []
        server.process.send_signal(signal.SIGSTOP)  # else it might be as quick as they come
        for body in bodies:
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(
                f"POST /v1/score HTTP/1.1\r\nHost: {address.netloc}\r\n"
                f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            writers.append(writer)
        server.process.send_signal(signal.SIGCONT)
        found = {}
        while found.get("laurel_scorer_requests_total") != len(bodies):
            found = await asyncio.to_thread(figures, server)
        assert found["laurel_completions_waiting"] >= 8 * 60, "too quick for anybody to leave"
        for writer in writers:
            writer.close()

    arguments = ("--model", str(models[0]), "--cpu-threads", "1", "--batch-tokens", "512")
    with Serving(tmp_path, *arguments, "--max-waiting", "9999", *QUIET).ready() as server:
        asyncio.run(ask_and_leave(server))
        wait_until(lambda: figures(server)["laurel_completions_waiting"] == 0)
        found = figures(server)
        cancelled = found["laurel_scorer_cancelled_total"]
        # Who leaves in the moment in which the answer is ready is gone too, with nothing to cancel.
        assert 50 <= cancelled <= answered(server, 499)
        assert answered(server, 200) + answered(server, 499) == len(bodies)
        assert found["laurel_scorer_scored_total"] >= 8 * (len(bodies) - cancelled)
        assert found["laurel_scorer_computed_total"] < 8 * len(bodies)
        status, reply = server.score("By the gate.", prompt="Where?")
        assert status == 200
        wanted = model_values(models[0], "Where?", "By the gate.")
        assert values_of(reply) == pytest.approx(wanted, abs=1e-6)
        assert server.end() == 0


@pytest.mark.slow
def test_sleep_in_the_middle_of_requests_loses_none(tmp_path):
    with Serving(tmp_path, "--null", "--replicas", "2", *QUIET).ready() as server:

        def nap():
            status, state = server.ask("/admin/sleep", {})
            assert (status, state["state"]) == (200, "asleep")
            wait_until(lambda: answered(server, 503) > 0)
            status, state = server.ask("/admin/wake", {})
            assert (status, state["state"]) == (200, "ready")

        groups = GROUPS * 3
        streamed = Streamed([server], version="", api_key=KEY)
        streamed.after(100, nap)
        streamed.after(300, nap)
        expected = [null_scores(group) for group in groups]
        assert streamed.run(groups, until="fault_busy") == expected


@pytest.mark.slow
def test_every_answer_under_a_change_of_the_model_is_of_the_version_it_names(
    models, tmp_path
):  # [30]
    count = 400
    said = [Load.said(number) for number in range(count)]
    groups = [group_of((Message("user", p),), answers, group_id="g") for p, *answers in said]
    wanted = {}
    arguments = ("--model", str(models[0]), "--cpu-threads", "1", "--batch-tokens", "256")
    with Serving(tmp_path, *arguments, *QUIET).ready() as server:
        wanted[server.score("a")[1]["model_version"]] = models[0]
        load = Load(server, count, connections=8)
        load.until_under_way()
        status, state = server.ask("/admin/load", {"model": str(models[1])})
        assert (status, state["state"]) == (200, "ready")
        wanted[state["model_version"]] = models[1]
        replies = [reply for status, reply in load.answers() if status == 200]
        assert len(replies) == count, "nobody had to wait for the change"
        assert server.score("a")[1]["model_version"] == state["model_version"]
        assert server.end() == 0
    assert len(wanted) == 2
    right = {
        version: open_local(str(model), say=lambda _: None).score_now(groups)
        for version, model in wanted.items()
    }
    for number, reply in enumerate(replies):
        scores = right[reply["model_version"]][number]
        assert values_of(reply) == pytest.approx([one.value for one in scores], abs=1e-6)


JUMPING = """
import itertools, time
real, jumps = time.time, itertools.count()
time.time = lambda: real() + 3600.0 * (-1) ** next(jumps)
from laurel.cli.main import main
main()
"""


@pytest.mark.slow
def test_the_clock_of_the_server_jumps(tmp_path):  # [28]
    log = tmp_path / "log"
    arguments = ("--null", "--access-log", str(log))
    with Serving(tmp_path, *arguments, program=("-c", JUMPING)).ready() as server:
        streamed = Streamed([server], version="", api_key=KEY)
        assert streamed.run(GROUPS) == [null_scores(group) for group in GROUPS]
        assert set(streamed.counts) == {"requests", "attempts"}
        assert server.end() == 0
    times = [json.loads(line)["time"] for line in log.read_text().splitlines()]
    assert max(times) - min(times) > 7000, "it jumped"


@pytest.mark.slow
def test_the_admin_key_and_what_other_processes_know_of_keys(tmp_path):
    arguments = ("--null", "--replicas", "2", *QUIET)
    with Serving(tmp_path, *arguments, LAUREL_ADMIN_KEY=ADMIN_KEY).ready() as server:
        server.wait_for("admin   the one in the variable LAUREL_ADMIN_KEY")
        for path in ("/admin/sleep", "/admin/wake", "/admin/load"):
            status, reply = server.ask(path, {})
            assert (status, reply["error"]["code"]) == (403, "admin")
        assert server.ask("/admin/sleep", {}, key="x" * 40)[0] == 401
        assert server.ask("/admin/sleep", {}, key=ADMIN_KEY) == (
            200,
            {"state": "asleep", "model": "null", "model_version": "null"},
        )
        assert server.ask("/admin/wake", {}, key=ADMIN_KEY)[0] == 200
        assert server.score("a")[0] == 200
        replicas = server.family()
        assert len(replicas) == 2
        for process in [psutil.Process(server.process.pid), *replicas]:
            assert not any(key in " ".join(process.cmdline()) for key in (KEY, ADMIN_KEY))
        for process in replicas:
            assert not {KEY, ADMIN_KEY} & set(process.environ().values())
        assert not any(key in server.said() for key in (KEY, ADMIN_KEY))
        assert server.end() == 0
