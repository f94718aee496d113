"""Whether the hub answers: told in seconds, and only where something is to be fetched."""

import json
import os
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from laurel.observe.hub import why_no_answer

PROGRAM = """
import json, sys
from laurel.errors import ModelError
from laurel.observe.hub import check_fetchable, why_not_fetched
said = {name: why_not_fetched(name) for name in sys.argv[1:]}
said["rows"] = why_not_fetched(sys.argv[1], "dataset")
try:
    check_fetchable("owner/absent", key="policy.model_name", instead=", or something else")
except ModelError as error:
    said["error"] = str(error)
print(json.dumps(said))
"""


@pytest.fixture
def closed():
    """The address of a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def silent():
    """The address of a server that can be connected to, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


class Refuses(BaseHTTPRequestHandler):
    """Knows nothing."""

    def do_HEAD(self):
        self.send_error(404)

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def refusing():
    """The address of a server that answers 404."""
    server = HTTPServer(("127.0.0.1", 0), Refuses)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_only_a_server_without_a_connection_does_not_answer(closed, silent, refusing):
    why = why_no_answer(closed)
    assert why is not None
    assert why.startswith(f"no connection to {closed}: ")
    assert why_no_answer(refusing) is None
    assert why_no_answer(silent, seconds=0.2) is None  # slow, and there


def asked(home, names, **more):
    """What is said of names by a process with a cache and an endpoint of its own."""
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_HUB_ETAG_TIMEOUT")
    kept = {key: value for key, value in os.environ.items() if key not in offline}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names],
        env=kept | {"HF_HOME": str(home)} | more,
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, str | None] = json.loads(ran.stdout)
    return found


def test_what_was_fetched_before_asks_nobody(tmp_path, closed):
    (tmp_path / "hub" / "models--owner--here" / "snapshots").mkdir(parents=True)
    names = ["owner/here", "owner/absent", "no/name/of/the/hub"]
    said = asked(tmp_path, names, HF_ENDPOINT=closed)
    assert said["owner/here"] is None
    assert said["no/name/of/the/hub"] is None  # those who load it say what is wrong with it
    for name in ("owner/absent", "rows"):
        assert (said[name] or "").startswith(f"no connection to {closed}: ")
    error = said["error"] or ""
    assert error.startswith("policy.model_name=owner/absent: it is no directory here, and cannot")
    for cure in ("a directory that holds the model, or something else.", "HF_HUB_OFFLINE=1"):
        assert cure in error
    said = asked(tmp_path, ["owner/absent"], HF_ENDPOINT=closed, HF_HUB_OFFLINE="1")
    assert said["owner/absent"] == (
        "HF_HUB_OFFLINE is set, and it is not among what was fetched before"
    )
