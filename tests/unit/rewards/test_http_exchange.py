"""What a client believes of a server, whose fault is what, and what a client never gives away."""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
import ssl
import threading
from contextlib import contextmanager
from http import HTTPStatus

import pytest

from laurel.errors import ConfigError
from laurel.rewards.remote import http as http_exchange
from laurel.rewards.remote.http import HttpExchange, HttpReplica
from laurel.rewards.remote.replica import RefusedError, ReplicaFault
from reward_servers import Answer, RewardServer

KEY = "k" * 20 + "SECRET"


def asked(url, *, api_key=None, timeout=5.0, value=None):
    async def main():
        http = HttpExchange(url, api_key=api_key)
        try:
            return await http.post(value or {"a": 1}, request_id="r1", timeout=timeout)
        finally:
            await http.aclose()

    return asyncio.run(main())


def answering(answer, **options):
    """A server that gives this answer to everything."""
    return RewardServer(lambda number, _: answer, answer=lambda _: {"fine": 1}, **options)


@contextmanager
def raw_server(say):
    """A door behind which nobody speaks HTTP: `say` gets the connection of each client."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        threads = []

        def run():
            while True:
                try:
                    connection, _ = door.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    say(connection)

        threads.append(threading.Thread(target=run))
        threads[0].start()
        yield f"http://127.0.0.1:{door.getsockname()[1]}/"
        door.shutdown(socket.SHUT_RDWR)
    threads[0].join()


def test_an_answer_is_its_json():
    with RewardServer(answer=lambda _: {"b": [1.5, None]}) as server:
        answer = asked(server.url + "/x", value={"a": "\u00e9"})
        assert answer.value == {"b": [1.5, None]}
        (request,) = server.asked
    assert request.path == "/x"
    assert request.value == {"a": "\u00e9"}
    assert request.headers["x-request-id"] == "r1"
    assert request.headers["content-type"] == "application/json"
    assert "authorization" not in request.headers


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer(status=500), "5xx"),
        (Answer(status=502, body=b"<html>"), "5xx"),
        (Answer(status=599), "5xx"),
        (Answer(status=429), "busy"),
        (Answer(status=503), "busy"),
        (Answer(status=408), "timeout"),
        (Answer(status=409), "version"),
        (Answer(status=401), "4xx"),
        (Answer(status=403), "4xx"),
        (Answer(status=404), "4xx"),
        (Answer(status=204, body=b""), "reply"),
        (Answer(body=b"<html><body>hello</body></html>"), "reply"),
        (Answer(body=b""), "reply"),
        (Answer(body=b'{"value": 1'), "reply"),
        (Answer(body=b'{"value": 1, "value": 2}'), "reply"),
        (Answer(body=b'{"value": "\xff"}'), "reply"),
        (Answer(body=b"[" * 200_000), "reply"),
        (Answer(body=b"1" * 100_000), "reply"),
        (Answer(body=b'{"value": NaN}'), "nan"),
        (Answer(body=b'{"value": -Infinity}'), "nan"),
        (Answer(cut=3), "connection"),
        (Answer(cut=0), "connection"),
        (Answer(seconds=60), "timeout"),
    ],
)
def test_what_a_server_is_to_blame_for(answer, kind):
    with answering(answer) as server, pytest.raises(ReplicaFault) as caught:
        asked(server.url, timeout=0.3 if answer.seconds else 5.0)
    assert caught.value.kind == kind
    assert str(caught.value).startswith(f"{kind}: ")
    assert caught.value.in_mid_request == (answer.cut is not None)


@pytest.mark.parametrize(
    ("status", "may_be_one_item"), [(400, True), (413, True), (422, True), (418, False)]
)
def test_what_the_request_is_to_blame_for(status, may_be_one_item):
    answer = Answer(status=status, body=b'{"error": {"code": "x", "message": "too \\u001blong"}}')
    with answering(answer) as server, pytest.raises(RefusedError) as caught:
        asked(server.url)
    assert caught.value.may_be_one_item == may_be_one_item
    assert str(caught.value).startswith("4xx: ")
    assert "too \\x1blong" in str(caught.value), "what it says, without control characters"


def test_every_status_of_an_error_is_somebodys_fault():
    """The request's, unless it is one of these: then no other request would fare better."""
    statuses = [status for status in HTTPStatus if status >= 400]
    address = dict.fromkeys((401, 403, 404, 405, 407), "4xx")
    known = {408: "timeout", 409: "version", 429: "busy", 503: "busy", **address}
    expected = {s: known.get(s, "5xx" if s >= 500 else "the request") for s in statuses}
    found = {}

    async def main(url):
        http = HttpExchange(url)
        for status in statuses:
            with pytest.raises((ReplicaFault, RefusedError)) as caught:
                await http.post({"a": 1}, request_id=str(status), timeout=5.0)
            is_refused = isinstance(caught.value, RefusedError)
            found[status] = "the request" if is_refused else caught.value.kind
        await http.aclose()

    with RewardServer(lambda number, _: Answer(status=statuses[number], body=b"")) as server:
        asyncio.run(main(server.url))
    assert found == expected


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("3", 3.0),
        ("0.5", 0.5),
        ("-1", None),
        ("nan", None),
        ("9" * 400, None),
        ("Wed, 21 Oct 2026 07:28:00 GMT", None),
    ],
)
def test_retry_after_in_seconds_is_understood(header, seconds):
    with answering(Answer(status=429, headers={"Retry-After": header})) as server:  # noqa: SIM117
        with pytest.raises(ReplicaFault) as caught:
            asked(server.url)
    assert caught.value.retry_after == seconds


@pytest.mark.parametrize("said", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\nContent-Le"])
def test_what_does_not_speak_http_is_a_lost_connection(said):
    with raw_server(lambda connection: connection.sendall(said)) as url:  # noqa: SIM117
        with pytest.raises(ReplicaFault) as caught:
            asked(url)
    assert caught.value.kind == "connection"


def test_a_probe_takes_any_answer_of_who_is_well():
    async def look(server):
        http = HttpExchange(server.url + "/v1/score?x=1", api_key=KEY)
        await http.probe(timeout=5.0)
        await http.aclose()

    with RewardServer() as server:
        asyncio.run(look(server))
        assert server.probes == 1
    with pytest.raises(ReplicaFault, match="connection: "):
        asyncio.run(look(server))


def test_redirects_are_not_followed():
    with RewardServer(answer=lambda _: {"stolen": 1}) as elsewhere:
        answer = Answer(status=307, headers={"Location": elsewhere.url})
        with answering(answer) as server, pytest.raises(ReplicaFault, match="redirect"):
            asked(server.url, api_key=KEY)
        assert elsewhere.asked == []


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    with RewardServer(answer=lambda _: {"fine": 1}) as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        assert asked(server.url).value == {"fine": 1}


def test_credentials_of_the_users_netrc_are_not_sent(monkeypatch, tmp_path):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1\nlogin me\npassword mine\n")
    monkeypatch.setenv("NETRC", str(netrc))
    with RewardServer(answer=lambda _: {}) as server:
        asked(server.url)
        assert "authorization" not in server.asked[0].headers


def test_compressed_answers_are_refused():
    """A kilobyte of them can be a gigabyte."""
    bomb = gzip.compress(b" " * 10_000_000)
    with answering(Answer(body=bomb, headers={"Content-Encoding": "gzip"})) as server:
        with pytest.raises(ReplicaFault, match="compressed") as caught:
            asked(server.url)
        assert server.asked[0].headers["accept-encoding"] == "identity"
    assert caught.value.kind == "reply"


def test_answers_without_end_are_cut_off(monkeypatch):
    monkeypatch.setattr(http_exchange, "MAX_BYTES", 100_000)

    def pour(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            while True:
                connection.sendall(b"1000\r\n" + b"1" * 4096 + b"\r\n")
        except OSError:
            pass

    with raw_server(pour) as url, pytest.raises(ReplicaFault, match="more than 100,000") as caught:
        asked(url)
    assert caught.value.kind == "reply"


def test_headers_without_end_are_cut_off():
    def pour(connection):
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            while True:
                connection.sendall(b"X-More: " + b"1" * 4096 + b"\r\n")
        except OSError:
            pass

    with raw_server(pour) as url, pytest.raises(ReplicaFault) as caught:
        asked(url)
    assert caught.value.kind == "connection"


def test_certificates_are_verified():
    http = HttpExchange("https://127.0.0.1:1", api_key=KEY)

    async def context():
        transport = http._open()._transport
        found = transport._pool._ssl_context
        await http.aclose()
        return found

    found = asyncio.run(context())
    assert found.verify_mode == ssl.CERT_REQUIRED
    assert found.check_hostname


@pytest.mark.parametrize(
    "url", ["ftp://a/b", "file:///etc/passwd", "127.0.0.1:8000", "", "http://", "http://[::1/"]
)
def test_only_addresses_of_http_are_taken(url):
    with pytest.raises(ConfigError, match="is no address"):
        HttpExchange(url)


@pytest.mark.parametrize(
    "url",
    [f"http://me:{KEY}@h/", f"ftp://me:{KEY}@h/", f"me:{KEY}@h:80", f"gopher://h/?key={KEY}"],
)
def test_a_password_in_an_address_is_refused_and_not_repeated(url):
    with pytest.raises(ConfigError) as caught:
        HttpExchange(url)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "k\u00e9y", ""])
def test_a_key_that_cannot_be_a_header_is_refused_and_not_repeated(key):
    with pytest.raises(ConfigError, match="API key") as caught:
        HttpExchange("http://h/", api_key=key)
    assert not key or key not in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(status=401, body=f'{{"error": {{"message": "bad key {KEY}"}}}}'.encode()),
        Answer(status=400, body=f'{{"detail": "{"x" * 190}{KEY}"}}'.encode()),
        Answer(status=500, body=f'{{"error": {{"message": "{KEY}"}}}}'.encode()),
        Answer(body=f"Your key is {KEY}".encode()),
        Answer(body=b"x" * 30 + KEY.encode()),
    ],
)
def test_no_error_holds_the_key_not_even_one_that_quotes_a_server(answer):
    with answering(answer) as server, pytest.raises((ReplicaFault, RefusedError)) as caught:
        asked(server.url + f"/?token={KEY}", api_key=KEY)
    said = str(caught.value)
    assert KEY not in said
    assert "kkkk" not in said, "no part of it either"


def test_no_log_and_no_repr_holds_the_key(caplog):
    caplog.set_level(logging.DEBUG)
    with RewardServer(answer=lambda _: {}) as server:
        asked(server.url, api_key=KEY)
        http = HttpExchange(server.url, api_key=KEY)

        class NoDialect:
            path = ""

        replica = HttpReplica(server.url, NoDialect(), api_key=KEY)
        shown = [repr(http), str(http), http.name, repr(replica), replica.name]
    assert KEY not in caplog.text
    assert not any(KEY in one for one in shown)


def test_what_a_server_says_is_shortened():
    answer = Answer(status=400, body=b'{"detail": "' + b"x" * 100_000 + b'"}')
    with answering(answer) as server, pytest.raises(RefusedError) as caught:
        asked(server.url)
    assert len(str(caught.value)) < 400


def test_connections_are_kept_and_a_new_loop_gets_its_own():
    ports = []

    class Spy(RewardServer):
        def take(self, asked):
            ports.append(threading.current_thread().name)
            return super().take(asked)

    with Spy(answer=lambda _: {}) as server:
        http = HttpExchange(server.url)

        async def several():
            for _ in range(5):
                await http.post({}, timeout=5.0)
            await http.aclose()

        asyncio.run(several())
        assert len(set(ports)) == 1, "one connection, and so one thread of the server"
        asyncio.run(several())
        assert len(set(ports)) == 2
