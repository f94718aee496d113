"""`laurel serve` beside clients that are slow, half-open, or guess keys."""

import asyncio
import contextlib
import json
import socket
import time
from collections import Counter
from urllib.parse import urlsplit

import psutil
import pytest

from serve_processes import KEY, Load, Serving, ask_many, request_of

pytestmark = pytest.mark.usefixtures("warm_processes")

QUIET = ("--null", "--access-log", "none")


def address_of(server):
    address = urlsplit(server.url)
    return str(address.hostname), int(address.port or 0)


def opened(server, head):
    connection = socket.create_connection(address_of(server))
    connection.sendall(head)
    return connection


def until_closed(connection):
    """What the server answers before it ends the connection."""
    connection.settimeout(120)
    answer = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            answer += piece
    return answer.lower()


@pytest.mark.slow
def test_clients_that_never_finish_cost_only_themselves(tmp_path):
    body = json.dumps(request_of("q", ["a"])).encode()
    head = (
        f"POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    with Serving(tmp_path, *QUIET).ready() as server, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(opened(server, b"")) for _ in range(100)]
        half_heads = [stack.enter_context(opened(server, head[:40])) for _ in range(100)]
        half_bodies = [stack.enter_context(opened(server, head + body[:10])) for _ in range(100)]
        load = Load(server, 500)
        answers = load.answers()
        assert Counter(status for status, _ in answers) == {200: 500}
        load.check_scores()
        assert [until_closed(connection) for connection in half_heads[:5]] == [b""] * 5
        for connection in half_bodies[:5]:
            answer = until_closed(connection)
            assert answer.startswith(b"http/1.1 408")
            assert b"connection: close" in answer  # not after the 75 s of one that is idle
        process = server.process.worker()
        for connection in (*silent, *half_heads, *half_bodies):
            connection.close()
        end = time.monotonic() + 30
        while any(c.status == "ESTABLISHED" for c in process.net_connections("tcp")):
            assert time.monotonic() < end, "connections of clients that left are still held"
            time.sleep(0.2)
        assert server.score("No.")[0] == 200
        assert server.end() == 0


@pytest.mark.slow
def test_keys_that_are_guessed_by_many_never_fit_and_delay_nobody_else(tmp_path):
    async def guess(server, first, count):
        seen: Counter[int] = Counter()
        for number in range(first, first + count):
            ((status, _),) = await ask_many(server.url, "/v1/score", [b"{}"], key=f"{number:036d}")
            seen[status] += 1
        return seen

    async def guess_by_many(server):
        found = await asyncio.gather(*(guess(server, 1000 * i, 10) for i in range(30)))
        return sum(found, Counter())

    with Serving(tmp_path, *QUIET).ready() as server:
        load = Load(server, 300)
        seen = asyncio.run(guess_by_many(server))
        assert seen.total() == 300
        assert set(seen) <= {401, 403, 429}, seen
        assert Counter(status for status, _ in load.answers()) == {200: 300}
        load.check_scores()
        assert server.score("No.")[0] == 200
        assert KEY not in server.said()
        assert server.end() == 0


@pytest.mark.slow
def test_memory_stays_flat_over_many_requests(tmp_path, monkeypatch):
    """benchmarks/server_memory.py does this with 100,000 requests."""
    monkeypatch.delenv("LAUREL_WARM")  # the memory of forks is not that of what they are asked by

    def held():
        family = [psutil.Process(server.process.pid), *server.family()]
        return sum(process.memory_info().rss for process in family)

    with Serving(tmp_path, *QUIET, "--replicas", "2").ready() as server:
        Load(server, 2000).answers()
        before = held()
        for _ in range(3):
            assert Counter(s for s, _ in Load(server, 2000).answers()) == {200: 2000}
        # 6,000 requests of 100 bytes each, kept for good with their objects, would be more.
        assert held() - before < 6 * 2**20
        assert server.end() == 0
