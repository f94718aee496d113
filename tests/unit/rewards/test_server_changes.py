"""Changes of a server's state: none is left halfway."""

import asyncio
import json
import threading

import httpx2
import pytest

from reward_servers import wait_until
from scripted_backend import ScriptedBackend
from served_scores import Running, served


@pytest.mark.slow
def test_a_change_goes_on_where_whoever_asked_for_it_has_left():
    class Scripted(ScriptedBackend):
        def sleep(self) -> None:
            begun.set()
            assert may_end.wait(20)
            super().sleep()

    def leave(ask):
        with pytest.raises(httpx2.TimeoutException):
            ask()

    begun, may_end, old, new = threading.Event(), threading.Event(), Scripted(), ScriptedBackend()

    async def open_model(name):
        begun.set()
        await asyncio.to_thread(may_end.wait, 20)
        return served(new, version="2")

    with Running(old, open_model=open_model) as it:
        leave(lambda: it.client.post("/admin/sleep", timeout=0.5))
        assert begun.is_set()
        may_end.set()
        wait_until(lambda: old.said == ["sleep"])
        assert it.client.get("/ready").json()["state"] == "asleep", "it is, and it says so"
        wait_until(lambda: it.client.post("/admin/wake").status_code == 200)
        assert it.score("a").status_code == 200
        begun.clear()
        may_end.clear()
        body = {"content": json.dumps({"model": "x"}), "timeout": 0.5}
        kind = {"Content-Type": "application/json"}
        leave(lambda: it.client.post("/admin/load", headers=kind, **body))
        assert begun.is_set()
        may_end.set()
        wait_until(lambda: old.said[-1] == "close")
        assert it.score("a").json()["model_version"] == "2"
    assert new.said == ["close"]
