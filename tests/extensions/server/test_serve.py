"""`laurel serve` as a user starts it, under what may happen to a server."""

import asyncio
import collections
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import stat
import time
from pathlib import Path

import psutil
import pytest

from laurel.cli.main import main
from laurel.errors import MissingDependencyError, install_command
from laurel.extensions.server import serve as command
from sandbox_processes import wait_until
from serve_processes import Load, Serving, ask_many, model_values, request_of, values_of

pytestmark = pytest.mark.usefixtures("warm_processes")

A_MODEL = ("--model", str(Path(__file__).parents[2] / "golden/older_runs/rm/saves/step_2"))
NEEDS = {
    "no model": ([], "give a reward model: --model"),
    "lost model": (["--model", "/nowhere/rm"], "--model /nowhere/rm: there is no such directory"),
    "replicas": ([*A_MODEL, "--replicas", "0"], "--replicas 0: from 1 to"),
    "port": ([*A_MODEL, "--port", "70000"], "--port 70000: from 0 to 65535"),
    "host": ([*A_MODEL, "--host", "no.such.invalid"], "--host no.such.invalid is no address"),
    "other host": ([*A_MODEL, "--host", "192.0.2.1"], "--host 192.0.2.1 is no address of this"),
    "open": (
        [*A_MODEL, "--no-api-key", "--host", "0.0.0.0"],
        "--no-api-key is for loopback addresses",
    ),
    "variable": ([*A_MODEL, "--api-key-env", "NO_SUCH"], "--api-key-env NO_SUCH: there is no such"),
    "other variable": (
        [*A_MODEL, "--admin-key-env", "NO_SUCH"],
        "--admin-key-env NO_SUCH: there is no such",
    ),
    "public": (
        [*A_MODEL, "--host", "0.0.0.0", "--allow-from", "8.0.0.0/8"],
        "--allow-from 8.0.0.0/8: only loopback and private addresses may do without a key",
    ),
    "everybody": (
        [*A_MODEL, "--host", "0.0.0.0", "--allow-from", "0.0.0.0/0"],
        "--allow-from 0.0.0.0/0: only loopback and private",
    ),
    "no range": ([*A_MODEL, "--allow-from", "10.0.0.1/8"], "a range is written as 10.0.0.0/8"),
    "out of reach": (
        [*A_MODEL, "--allow-from", "10.0.0.0/8"],
        "--allow-from 10.0.0.0/8: no machine there reaches --host 127.0.0.1",
    ),
    "open twice": (
        [*A_MODEL, "--no-api-key", "--allow-from", "127.0.0.1"],
        "with --no-api-key none does",
    ),
    "log": ([*A_MODEL, "--access-log", "/nowhere/log"], "--access-log /nowhere/log: No such file"),
}


def run_main(monkeypatch, capfd, *arguments):
    monkeypatch.setattr("sys.argv", ["laurel", "serve", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capfd.readouterr().err


@pytest.mark.parametrize(("arguments", "said"), NEEDS.values(), ids=NEEDS)
def test_what_cannot_be_served_is_told_at_once(monkeypatch, capfd, tmp_path, arguments, said):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(command, "open_served", lambda *_, **__: pytest.fail("it began to load"))
    code, error = run_main(monkeypatch, capfd, "--port", "0", *arguments)
    assert code == 2
    assert said in error
    assert "Traceback" not in error


def test_vllm_is_asked_for_where_it_is_not(monkeypatch, capfd, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(command, "_NEEDED", ())
    code, error = run_main(monkeypatch, capfd, "--port", "0", "--model", "x", "--engine", "vllm")
    assert code == 2
    assert install_command("vllm") in error


def test_a_port_that_is_taken(monkeypatch, capfd):
    monkeypatch.setenv("LAUREL_API_KEY", "x" * 32)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, error = run_main(monkeypatch, capfd, *A_MODEL, "--port", port)
    assert code == 2
    assert f"--port {port} of 127.0.0.1 cannot be used: Address already in use" in error


@pytest.mark.parametrize("name", ["LAUREL_API_KEY", "LAUREL_ADMIN_KEY"])
@pytest.mark.parametrize("key", ["short", "x" * 31, "x" * 40 + " y", "é" * 40])
def test_a_key_that_is_none(monkeypatch, capfd, name, key):
    monkeypatch.setenv(name, key)
    code, error = run_main(monkeypatch, capfd, *A_MODEL, "--port", "0")
    assert code == 2
    assert f"the key in {name} has to have at least 32 printable ASCII characters" in error
    assert "openssl rand -hex 32" in error
    assert key not in error


def test_the_admin_key_is_another_one(monkeypatch, capfd):
    for name in ("LAUREL_API_KEY", "OF_ADMIN"):
        monkeypatch.setenv(name, "k" * 32)
    code, error = run_main(
        monkeypatch, capfd, *A_MODEL, "--port", "0", "--admin-key-env", "OF_ADMIN"
    )
    assert code == 2
    assert "the admin key is the API key: set OF_ADMIN to another one" in error
    assert "kkk" not in error


def test_the_extra_is_named(monkeypatch):
    real = command.importlib.util.find_spec
    monkeypatch.setattr(
        command.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else real(name)
    )
    options = command.ServeOptions(**dict.fromkeys(command.ServeOptions.__slots__, None))
    with pytest.raises(MissingDependencyError, match=re.escape(install_command("serve"))):
        command.run_serve(options)


def test_a_key_is_made_and_kept_for_its_owner_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    key = command._key_of_file(8000)
    path = tmp_path / "laurel" / "serve-8000.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert str(path) in key.source
    assert key.value not in key.source + key.header
    assert len(key.value) >= 32
    assert command._key_of_file(8000).value == key.value
    assert command._key_of_file(8001).value != key.value
    path.chmod(0o644)  # others may have read it
    made = command._key_of_file(8000).value
    assert made != key.value
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("x" * 40)
    assert command._key_of_file(8000).value != "x" * 40
    assert (tmp_path / "elsewhere").read_text() == "x" * 40


SAID = ("", "x " * 5000, "\ud800", "\x00", "y" * 2**20)


def test_a_model_its_scores_and_another_one(models, tmp_path):
    first, second = models
    with Serving(tmp_path, "--model", str(first), "--cpu-threads", "1").ready() as server:
        status, reply = server.score("By the gate.", "No.", prompt="Where?")
        assert status == 200
        wanted = model_values(first, "Where?", "By the gate.", "No.")
        assert values_of(reply) == pytest.approx(wanted, abs=1e-6)
        version = reply["model_version"]
        assert version.startswith("rm-")
        assert f"version {version}" in server.said()
        for body in ({"groups": []}, request_of("", SAID)):
            status, reply = server.ask("/v1/score", body)
            assert status == 200
        failures = [score["failure"] for score in reply["groups"][0]["scores"]]
        assert [bool(failure) for failure in failures] == [False, False, True, False, True]
        assert failures[4].startswith("4xx: 1,048,576 characters; a conversation has 200,000 at m")
        assert reply["groups"][0]["scores"][1]["truncated"]
        ((status, _),) = asyncio.run(ask_many(server.url, "/v1/score", [b'{"groups": "\xff"}']))
        assert status == 400
        assert server.ask("/admin/load", {"model": "/nowhere"})[0] == 422
        status, refusal = server.ask("/admin/load", {"model": str(tmp_path)})
        assert status == 422
        assert refusal["error"]["message"].startswith(f"{tmp_path} holds neither a model")
        status, state = server.ask("/admin/load", {"model": str(second)})
        server.wait_for(f"serving {second} from now on, version {state['model_version']}")
        assert (status, state["state"]) == (200, "ready")
        status, reply = server.score("By the gate.", "No.", prompt="Where?")
        assert reply["model_version"] == state["model_version"] != version
        wanted = model_values(second, "Where?", "By the gate.", "No.")
        assert values_of(reply) == pytest.approx(wanted, abs=1e-6)
        port = int(server.url.rpartition(":")[2])
        assert server.end() == 0
        assert "every accepted request was answered" in server.said()
        assert "By the gate" not in server.said()
    with Serving(tmp_path, "--model", str(second), port=port).ready() as server:
        assert server.score("No.")[1]["model_version"] == state["model_version"]
        asked = request_of("Where?", ["No."], model_version=version)
        assert server.ask("/v1/score", asked)[0] == 409


@pytest.mark.slow
def test_a_burst_of_2_000_requests_into_a_queue_of_200(models, tmp_path):
    bodies = [
        json.dumps(request_of(f"q{i}", [f"answer {j} to {i}" for j in range(8)])).encode()
        for i in range(2_000)
    ]
    arguments = ("--model", str(models[0]), "--max-waiting", "200", "--access-log", "none")
    arguments += ("--batch-tokens", "1024", "--cpu-threads", "1")  # so it is slow on any machine
    with Serving(tmp_path, *arguments).ready() as server:
        found = asyncio.run(ask_many(server.url, "/v1/score", bodies, connections=200))
        statuses = collections.Counter(status for status, _ in found)
        assert set(statuses) == {200, 429}, statuses
        assert statuses.total() == 2_000
        scored = [(i, reply) for i, (status, reply) in enumerate(found) if status == 200]
        for i, reply in scored[:: max(1, len(scored) // 3)]:
            wanted = model_values(models[0], f"q{i}", *(f"answer {j} to {i}" for j in range(8)))
            assert values_of(reply) == pytest.approx(wanted, abs=1e-6)
        assert all(None not in values_of(reply) for _, reply in scored)
        assert server.ask("/ready")[0] == 200
        assert server.end() == 0


@pytest.mark.slow_parameters("2")
@pytest.mark.parametrize("replicas", ["1", "2"])
def test_nothing_that_was_accepted_is_lost_by_sigterm(tmp_path, replicas):
    arguments = ("--null", "--replicas", replicas, "--access-log", str(tmp_path / "log"))
    with Serving(tmp_path, *arguments).ready() as server:
        load = Load(server, 3000)
        load.until_under_way()
        assert server.end() == 0
        statuses = collections.Counter(status for status, _ in load.answers())
        load.check_scores()
        noted = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        accepted = sum(record["status"] == 200 for record in noted)
        assert statuses[200] == accepted > 0
        assert set(statuses) <= {200, 503, 0}
        assert "every accepted request was answered" in server.said()


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(models, tmp_path):
    with Serving(tmp_path, "--model", str(models[0]), "--drain-seconds", "600").ready() as server:
        load = Load(server, 3000, connections=200)
        load.until_under_way()
        server.process.send_signal(signal.SIGSTOP)  # else it might be done before the second
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGINT)
        server.process.send_signal(signal.SIGCONT)
        assert server.process.wait(60) == 1
        load.answers()


def test_full_disks_and_closed_readers_stop_nothing(tmp_path):
    with Serving(tmp_path, "--null", stderr=type(tmp_path)("/dev/full")) as server:

        def listens():
            for one in server.process.worker().net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    server.url = f"http://127.0.0.1:{one.laddr.port}"
                    return True
            return False

        wait_until(listens)
        wait_until(lambda: server.ask("/ready")[0] == 200)
        load = Load(server, 500)
        assert {status for status, _ in load.answers()} == {200}
        load.check_scores()
        assert server.end() == 0


@pytest.mark.slow
def test_a_replica_that_is_killed_loses_nothing_and_comes_back(tmp_path):
    arguments = ("--null", "--replicas", "2", "--access-log", "none")
    with Serving(tmp_path, *arguments).ready() as server:
        replicas = server.family()
        assert len(replicas) == 2
        secret = [argument for one in replicas for argument in one.cmdline()]
        assert not any("key" in argument for argument in secret)
        load = Load(server, 2000, connections=16)
        load.until_under_way()
        replicas[0].kill()
        found = load.answers()
        assert {status for status, _ in found} == {200}
        load.check_scores()
        server.wait_for("died (signal 9); it is started again")
        wait_until(lambda: len(server.family()) == 2)
        replicas[1].kill()  # whoever is left, or comes back, answers
        assert server.score("a")[0] == 200
        assert server.ask("/classify", {"input": ["a", "b"], "use_activation": False})[0] == 200
        assert server.ask("/admin/sleep", {})[0] == 200
        assert server.score("a")[0] == 503
        assert server.ask("/admin/wake", {})[0] == 200
        assert server.score("a")[0] == 200
        assert server.end() == 0
        assert server.family() == []


FEW_RESTARTS = """
import laurel.extensions.server.replicas as replicas
replicas.MOST_RESTARTS = 1
from laurel.cli.main import main
main()
"""


@pytest.mark.slow
def test_a_server_whose_replicas_are_lost_for_good_ends_for_its_supervisor(tmp_path):
    arguments = ("--null", "--replicas", "2", "--access-log", "none")
    with Serving(tmp_path, *arguments, program=("-c", FEW_RESTARTS)).ready() as server:
        end = time.monotonic() + 120
        while server.process.poll() is None:
            assert time.monotonic() < end, server.said()
            for replica in server.family():
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                    replica.kill()
            time.sleep(0.2)
        assert server.process.returncode == 75
        assert server.said().count("times in a row") == 2
        assert "error: every replica of the model crashed too often" in server.said()
        assert "Traceback" not in server.said()


@pytest.mark.slow
def test_a_front_that_is_killed_leaves_no_orphans(tmp_path):
    with Serving(tmp_path, "--null", "--replicas", "2").ready() as server:
        assert len(server.family()) == 2
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(60)
        wait_until(lambda: not server.family())


@pytest.mark.slow
def test_replicas_of_a_model_score_as_one_and_change_together(models, tmp_path):
    first, second = models
    with Serving(tmp_path, "--model", str(first), "--replicas", "2").ready() as server:
        status, reply = server.score("By the gate.", "No.", prompt="Where?")
        assert status == 200
        wanted = model_values(first, "Where?", "By the gate.", "No.")
        assert values_of(reply) == pytest.approx(wanted, abs=1e-6)
        asked = "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
        queries = [asked + answer for answer in ("By the gate.", "No.", "By the gate.")]
        status, rendered = server.ask("/get_reward", {"query": queries})
        assert status == 200
        assert rendered["rewards"] == pytest.approx([*wanted, wanted[0]], abs=1e-6)
        status, state = server.ask("/admin/load", {"model": str(second)})
        assert (status, state["state"]) == (200, "ready")
        status, again = server.score("By the gate.", "No.", prompt="Where?")
        assert again["model_version"] == state["model_version"] != reply["model_version"]
        assert values_of(again) == pytest.approx(
            model_values(second, "Where?", "By the gate.", "No."), abs=1e-6
        )
        assert len(server.family()) == 2
        assert server.end() == 0


@pytest.mark.slow
def test_a_replica_of_a_model_that_was_replaced_in_place_is_refused(models, tmp_path):
    first, second = models
    served = tmp_path / "rm"
    shutil.copytree(first, served)
    arguments = ("--model", str(served), "--replicas", "2", "--access-log", "none")
    with Serving(tmp_path, *arguments, program=("-c", FEW_RESTARTS)).ready() as server:
        shutil.copytree(second, served, dirs_exist_ok=True)
        server.family()[0].kill()
        found = [server.score("By the gate.", prompt="Where?")[1] for _ in range(20)]
        server.wait_for("times in a row", seconds=120)
        found += [server.score("By the gate.", prompt="Where?")[1] for _ in range(20)]
        (wanted,) = model_values(first, "Where?", "By the gate.")
        assert [values_of(reply) for reply in found] == [[pytest.approx(wanted, abs=1e-6)]] * 40
        (version,) = {reply["model_version"] for reply in found}
        assert f"and this set serves {version!r}: the model's files were replaced" in server.said()
        assert server.end() == 0
