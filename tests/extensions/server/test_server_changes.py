"""Changes of a server's state: none is left halfway."""

import asyncio
import json
import socket
import threading

import pytest

from reward_servers import wait_until
from scripted_backend import ScriptedBackend
from served_scores import Running, raw_request, served


@pytest.mark.slow
def test_a_change_goes_on_where_whoever_asked_for_it_has_left():
    class Scripted(ScriptedBackend):
        def sleep(self) -> None:
            begun.set()
            assert may_end.wait(20)
            super().sleep()

    def ask_and_leave(path, body=b""):
        """When the change has begun."""
        with socket.create_connection(("127.0.0.1", it.port)) as connection:
            connection.sendall(raw_request(path, body))
            assert begun.wait(20)

    begun, may_end, old, new = threading.Event(), threading.Event(), Scripted(), ScriptedBackend()

    async def open_model(name):
        begun.set()
        await asyncio.to_thread(may_end.wait, 20)
        return served(new, version="2")

    with Running(old, open_model=open_model) as it:
        ask_and_leave("/admin/sleep")
        may_end.set()
        wait_until(lambda: old.said == ["sleep"])
        assert it.client.get("/ready").json()["state"] == "asleep", "it is, and it says so"
        wait_until(lambda: it.client.post("/admin/wake").status_code == 200)
        assert it.score("a").status_code == 200
        begun.clear()
        may_end.clear()
        ask_and_leave("/admin/load", json.dumps({"model": "x"}).encode())
        may_end.set()
        wait_until(lambda: old.said[-1] == "close")
        assert it.score("a").json()["model_version"] == "2"
    assert new.said == ["close"]
