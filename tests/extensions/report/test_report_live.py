"""A page that follows a run: new versions, the end of the run, and who may ask."""

import http.client
import json
import os
import queue
import socket
import subprocess
import threading
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from laurel.errors import ConfigError, DataError
from laurel.extensions.report.live import (
    QUIET,
    QUIET_AFTER_LAST_STEP,
    FollowedRuns,
    follow,
    state_of,
)
from report_runs import record, reward_model_run


def ask(url, path, **headers):
    there = urlsplit(url)
    assert there.hostname is not None
    connection = http.client.HTTPConnection(there.hostname, there.port, timeout=30)
    try:
        connection.putrequest("GET", path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


@pytest.fixture
def served(tmp_path):
    """The address of a followed run, and the run."""
    run = reward_model_run(tmp_path / "exp_001", num_steps=30)
    said: queue.Queue[str] = queue.Queue()
    stop = threading.Event()
    thread = threading.Thread(
        target=follow,
        args=([run],),
        kwargs={"title": "T", "port": 0, "say": said.put, "stop": stop},
    )
    thread.start()
    try:
        url = said.get(timeout=60)
        while not url.startswith("http"):
            url = said.get(timeout=60)
        yield url, run
    finally:
        stop.set()
        thread.join(timeout=60)
    assert not thread.is_alive()


def test_the_page_and_how_things_stand(served):
    url, _ = served
    assert url.startswith("http://127.0.0.1:")
    status, headers, page = ask(url, "/")
    assert status == 200
    assert b'id="live"' in page
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    state = json.loads(ask(url, "/state")[2])
    assert state["version"] == 1
    assert not state["ended"]
    assert state["text"] == "exp_001 goes on: step 30"
    assert ask(url, "/../../etc/passwd")[0] == 404
    assert ask(url, "/metrics.jsonl")[0] == 404


def test_foreign_names_are_refused(served):
    """A page elsewhere whose name was made to point here must not read what is served here."""
    url, _ = served
    port = urlsplit(url).port
    for host in (
        "evil.example",
        f"evil.example:{port}",
        f"127.0.0.1.evil.example:{port}",
        "127.0.0.1",
        "",
        f"localhost:{port}@evil.example",
    ):
        for path in ("/", "/state"):
            status, _, body = ask(url, path, Host=host)
            assert status == 403, host
            assert b"<html" not in body
    assert ask(url, "/state", Host=f"localhost:{port}")[0] == 200


def test_a_new_step_makes_a_new_page_and_nothing_new_makes_none(tmp_path):
    run = reward_model_run(tmp_path / "exp_001", num_steps=30)
    followed = FollowedRuns([run], title="T", say=print)
    followed.refresh()
    first = followed.served
    followed.refresh()
    assert followed.served.page is first.page
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, "time": 1.0, "train/loss": 0.1}) + "\n")
    followed.refresh()
    assert followed.served.version == 2
    assert "step 31" in followed.served.text
    assert b"31 steps" in followed.served.page


def test_a_file_that_is_broken_for_a_moment_leaves_the_page_as_it_was(tmp_path):
    run = reward_model_run(tmp_path / "exp_001", num_steps=30)
    said: list[str] = []
    followed = FollowedRuns([run], title="T", say=said.append)
    followed.refresh()
    before = followed.served.page
    (run / "data_report.json").write_text("{", encoding="utf-8")
    for _ in range(3):
        followed.refresh()
    assert followed.served.page is before
    assert len(said) == 1
    assert "the page stays as it was" in said[0]
    (run / "data_report.json").write_text("{}", encoding="utf-8")
    followed.refresh()
    assert followed.served.version == 2


def test_the_end_of_a_run_is_said_once(tmp_path):
    run = reward_model_run(tmp_path / "exp_001", num_steps=30)
    said: list[str] = []
    newest = max(file.stat().st_mtime for file in run.iterdir())
    now = [newest]
    followed = FollowedRuns([run], title="T", say=said.append, clock=lambda: now[0])
    followed.refresh()
    assert not followed.served.ended
    now[0] += QUIET_AFTER_LAST_STEP + 1
    followed.refresh()
    followed.refresh()
    assert followed.served.ended
    assert len(said) == 1
    assert said[0].startswith("exp_001 has ended at step 30 (it has reached its last step, 30).")


def of_checkpoints(directory, **settings):
    return replace(
        record({"train/loss": [1.0] * 5}, kind="rm"),
        settings={"rm": settings, "checkpointing": {"checkpoint_dir": str(directory)}},
    )


def test_the_process_tells_whether_the_run_goes_on(tmp_path):
    lock = tmp_path / ".lock"
    lock.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    run = of_checkpoints(tmp_path, max_num_steps=5)
    assert not state_of(run, seconds_quiet=1e6).ended
    child = subprocess.Popen(["true"])
    child.wait()
    lock.write_text(f"process {child.pid} on {socket.gethostname()}\n")
    assert state_of(run, seconds_quiet=0.0) == (True, "its process has ended")


@pytest.mark.parametrize("told", ["", "process 1 on another-machine\n", "who knows"])
def test_where_the_process_is_unknown_steps_and_silence_tell(tmp_path, told):
    (tmp_path / ".lock").write_text(told)
    done = of_checkpoints(tmp_path, max_num_steps=5)
    assert not state_of(done, seconds_quiet=QUIET_AFTER_LAST_STEP - 1).ended
    assert state_of(done, seconds_quiet=QUIET_AFTER_LAST_STEP + 1).ended
    for steps in (-1, 9):
        going_on = of_checkpoints(tmp_path, max_num_steps=steps)
        assert not state_of(going_on, seconds_quiet=QUIET - 1).ended
        state = state_of(going_on, seconds_quiet=QUIET)
        assert state == (True, "it has written nothing for 15 minutes: ended, or stuck")


def test_what_cannot_be_followed_is_refused(tmp_path):
    with pytest.raises(DataError, match="no such directory"):
        follow([tmp_path / "nowhere"], title="T", port=0, say=print)
    run = reward_model_run(tmp_path / "exp_001", num_steps=3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port}: cannot listen on 127\.0\.0\.1"):
            follow([run], title="T", port=port, say=print)
