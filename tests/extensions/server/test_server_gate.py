"""The rules of a server that strangers may reach, one test each; see the module's own docstring."""

import contextlib
import gzip
import json
import logging
import os
import pickle
import socket
import sys
import threading

import pytest

from laurel.extensions.server import app, foreign
from laurel.extensions.server import run as server_protocol
from laurel.extensions.server.service import AccessLog
from reward_servers import wait_until
from scripted_backend import ScriptedBackend
from served_scores import KEY, Running, error, raw_head


def exchange(running, sent, *, rest=b""):
    """What the server says to some bytes before it closes or falls silent."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=10) as connection:
        connection.sendall(sent)
        if rest:
            connection.sendall(rest)
        return connection.recv(65536)


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "evil:8000", "[::1"]
)
def test_a_page_that_calls_it_by_another_name_is_refused(plain, host):
    assert exchange(plain, raw_head("/v1/score", host=host)).startswith(b"HTTP/1.1 403")


def test_no_page_of_another_origin_is_let_in(plain):
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    response = plain.client.options("/v1/score", headers=asked)
    assert response.status_code == 405
    for answer in (response, plain.client.get("/health", headers=asked)):
        assert not any(name.startswith("access-control") for name in answer.headers)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        response = plain.client.post("/v1/score", content=b"{}", headers={"Content-Type": kind})
        assert error(response) == (415, "type")


def test_a_large_body_is_refused_before_it_is_read(plain):
    declared = raw_head("/v1/score", f"Content-Length: {9 * 2**20}")
    assert exchange(plain, declared).startswith(b"HTTP/1.1 413")

    def pieces():
        for _ in range(9 * 16):
            yield b" " * 2**16

    headers = {"Content-Type": "application/json"}
    response = plain.client.post("/v1/score", content=pieces(), headers=headers)
    assert error(response) == (413, "size")
    assert plain.score("a").status_code == 200


SAID = {"role": "user", "content": ""}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/score", {"groups": [{"id": "", "prompt": "", "completions": []}] * 5000}, "4096"),
        ("/v1/score", {"groups": [{"id": "", "prompt": "", "completions": [""] * 5000}]}, "4096"),
        ("/classify", {"messages": [SAID] * 70_000}, "65536"),
    ],
    ids=["groups", "completions", "messages"],
)
def test_more_groups_and_messages_than_may_be_are_refused(plain, path, body, said):
    response = plain.post(path, body)
    assert error(response) == (413, "size")
    assert f"at most {said} items" in response.json()["error"]["message"]


def test_more_rows_than_may_be_are_refused_before_they_are_read(plain, monkeypatch):
    """A million empty texts had become as many messages first."""
    monkeypatch.setattr(foreign, "rendered_group", lambda _: pytest.fail("they were read"))
    for path, key in (("/get_reward", "query"), ("/classify", "input"), ("/classify", "text")):
        assert error(plain.post(path, {key: [""] * 4097})) == (413, "size")
    assert error(plain.post("/v1/embeddings", {"input": [[7]] * 4097})) == (413, "size")
    assert error(plain.post("/score", {"queries": "", "documents": [""] * 4097})) == (413, "size")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/get_reward", b'{"query": [' + b'"",' * 2**20 + b'""]}'),
        ("/classify", b'{"input": [' + b"7," * 2**20 + b"7]}"),
        ("/classify", b'{"input": [' + b"[]," * 2**17 + b"[]]}"),
    ],
)
def test_more_values_than_may_be_are_refused_before_they_are_parsed(plain, monkeypatch, path, body):
    """Parsing is one step: 2.7 million texts of nothing had kept /health waiting for seconds, and
    half a million empty lists for as long."""
    monkeypatch.setattr(app, "parse", lambda _: pytest.fail("it was parsed"))
    headers = {"Content-Type": "application/json"}
    response = plain.client.post(path, content=body, headers=headers)
    assert error(response) == (413, "size")
    assert "1,048,576 numbers, texts and lists at most" in response.json()["error"]["message"]


def test_token_ids_of_a_large_body_become_a_group_beside_the_event_loop(plain, monkeypatch):
    makers = []
    real = foreign.rendered_group

    def noting(rows):
        makers.append(threading.current_thread().name)
        return real(rows)

    monkeypatch.setattr(foreign, "rendered_group", noting)
    for rows in (1, 200):
        assert plain.post("/classify", {"input": [[7] * 1000] * rows}).status_code == 200
    assert len(set(makers)) == 2


def test_a_large_body_is_read_beside_the_event_loop(plain, monkeypatch):
    readers = []
    real = app.parse

    def noting(body):
        readers.append((len(body), threading.current_thread().name))
        return real(body)

    monkeypatch.setattr(app, "parse", noting)
    large = {"groups": [{"id": "1", "prompt": "q" * 2**19, "completions": ["a"]}]}
    assert plain.post("/v1/score", large).status_code == 200
    assert plain.score("a").status_code == 200
    (size, beside), (_, in_loop) = readers
    assert size > 2**19
    assert beside != in_loop


def test_a_compressed_body_is_refused(plain):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    bomb = gzip.compress(b" " * 2**20)
    assert error(plain.client.post("/v1/score", content=bomb, headers=headers)) == (415, "encoding")


@pytest.mark.parametrize(
    "path", ["/v1/score", "/classify", "/v1/embeddings", "/get_reward", "/remote_rm", "/admin/load"]
)
def test_what_is_not_strict_json_is_refused(plain, path):
    headers = {"Content-Type": "application/json"}
    for body in (b"", b"null", b'{"groups": NaN}', b"[" * 100_000, pickle.dumps({"groups": []})):
        response = plain.client.post(path, content=body, headers=headers)
        assert error(response) == (400, "request"), body[:20]


def test_a_body_that_does_not_come_is_not_waited_for():
    with Running(gate={"body_seconds": 0.2}) as it:
        answer = exchange(it, raw_head("/v1/score", "Content-Length: 100"), rest=b'{"groups"')
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in answer.lower()
        assert it.score("a").status_code == 200


def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(server_protocol, "_HEAD_SECONDS", 0.2)
    with Running() as it:
        for sent in (b"", b"POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: "):
            assert exchange(it, sent) == b""
        assert it.score("a").status_code == 200


def test_a_head_without_end_is_not_read(plain):
    many = [f"X-{i}: a" for i in range(200)]
    assert b"200 OK" not in exchange(plain, raw_head("/v1/score", *many))
    with socket.create_connection(("127.0.0.1", plain.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/score HTTP/1.1\r\nX-A: ")
        assert connection.send(b"a" * 20_000) == 20_000
        assert connection.recv(1) == b""
    assert plain.score("a").status_code == 200


def test_a_large_head_in_one_read_is_not_taken(plain):
    for extra in ("X-A: " + "a" * 30_000, "Cookie: " + "; ".join(["a=b"] * 6000)):
        assert b"200 OK" not in exchange(plain, raw_head("/v1/score", extra, "Content-Length: 0"))
    assert b"200 OK" not in exchange(
        plain, raw_head("/v1/score?" + "a" * 30_000, "Content-Length: 0")
    )
    assert plain.score("a").status_code == 200


BODY = json.dumps({"groups": [{"id": "1", "prompt": "q", "completions": ["a"]}]}).encode()


@pytest.mark.parametrize(
    "wishes",
    [
        ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"),
        ("connection: upgrade", "UPGRADE: h2c"),
        ("Connection: Upgrade", "Upgrade: websocket"),
    ],
)
def test_who_would_rather_speak_another_protocol_is_answered_in_this_one(plain, wishes):
    """Java's client asks so with every POST that is not encrypted."""
    sent = raw_head("/v1/score", *wishes, f"Content-Length: {len(BODY)}")
    for answer in (exchange(plain, sent + BODY), exchange(plain, sent, rest=BODY)):
        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert b'"scores"' in answer


@pytest.mark.parametrize(
    "again", [f"Authorization: Bearer {KEY}", "Authorization: Bearer other", "Host: 127.0.0.1"]
)
def test_of_two_keys_or_hosts_none_is_chosen(plain, again):
    answer = exchange(plain, raw_head("/v1/score", again, f"Content-Length: {len(BODY)}") + BODY)
    assert answer.startswith(b"HTTP/1.1 400"), answer
    assert b"send one" in answer


def test_more_connections_than_it_has_room_for_are_closed(monkeypatch):
    monkeypatch.setattr(server_protocol, "MAX_CONNECTIONS", 4)
    with Running() as it:
        assert it.score("a").status_code == 200
        idle = [socket.create_connection(("127.0.0.1", it.port)) for _ in range(6)]
        idle[-1].settimeout(10)
        assert idle[-1].recv(1) == b""
        assert it.score("a").status_code == 200
        for connection in idle:
            connection.close()


def test_an_error_of_its_own_has_no_traceback(monkeypatch, caplog):
    with Running() as it:

        async def fail(*_, **__):
            raise ZeroDivisionError("a secret of the server")

        monkeypatch.setattr(it.service, "score", fail)
        with caplog.at_level(logging.ERROR):
            response = it.score("a")
        assert error(response) == (500, "failed")
        assert "secret" not in response.text
        assert response.headers["x-request-id"] in response.text
        assert "a secret of the server" in caplog.text


def test_nothing_is_ever_unpickled(plain):
    seen = []
    watching = True

    def hook(event, arguments):
        if watching and event == "pickle.find_class":
            seen.append(arguments)

    sys.addaudithook(hook)
    pickle.loads(pickle.dumps(ScriptedBackend))
    assert seen, "the hook sees nothing"
    seen.clear()
    body = pickle.dumps({"groups": [ScriptedBackend]})
    for kind in ("application/json", "application/octet-stream"):
        plain.client.post("/v1/score", content=body, headers={"Content-Type": kind})
    plain.score("a")
    watching = False
    assert seen == []


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


def test_the_log_has_figures_and_no_texts(tmp_path):
    path = tmp_path / "access.jsonl"
    log = AccessLog(str(path), say=print)
    with Running(access_log=log) as it:
        it.score("a secret", "another")
        it.client.get("/nowhere%1b[31m%0d%0aforged", headers={"X-Request-Id": "one"})
        it.client.get("/ready", headers={"Authorization": "Bearer wrong"})
    log.close()
    assert path.stat().st_mode & 0o777 == 0o600
    scored, lost, refused = lines(path)
    assert (scored["status"], scored["completions"], scored["version"]) == (200, 2, "1")
    assert scored["bytes_in"] > 0
    assert lost["id"] == "one"
    assert refused["status"] == 401
    text = path.read_text()
    assert "secret" not in text
    assert KEY not in text
    assert "\x1b" not in text


def test_the_log_has_texts_if_asked(tmp_path):
    path = tmp_path / "access.jsonl"
    log = AccessLog(str(path), say=print)
    with Running(access_log=log, gate={"log_texts": True}) as it:
        it.score("said\nin two lines")
    log.close()
    (record,) = lines(path)
    assert json.loads(record["body"])["groups"][0]["completions"] == ["said\nin two lines"]


def test_a_log_that_cannot_be_written_never_stops_serving():
    said = []
    log = AccessLog("/dev/full", say=said.append)
    with Running(access_log=log) as it:
        for _ in range(3):
            assert it.score("a").status_code == 200
        wait_until(lambda: log.dropped == 3)
        assert "laurel_access_log_lines_lost_total 3.0" in it.client.get("/metrics").text
    log.close()
    assert len(said) == 1
    assert "No space left" in said[0]


@pytest.mark.slow
def test_a_log_that_nobody_reads_never_stops_serving(monkeypatch):
    monkeypatch.setattr("laurel.extensions.server.service._MOST_WAITING", 5)
    reading, writing = os.pipe()
    filler = b"x" * 4096
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, filler):
            pass
    os.set_blocking(writing, True)
    log = AccessLog(f"/dev/fd/{writing}", say=lambda _: None)
    with Running(access_log=log) as it:
        for _ in range(300):
            assert it.score("a").status_code == 200
        assert log.dropped > 0
    os.close(reading)
    log.close()
    os.close(writing)


@pytest.mark.parametrize(
    ("body", "values", "nested"),
    [
        (b"[1, 2, 3]", 3, 1),
        (b'["a, b, [c", "{{{{[[[[", 3]', 3, 1),
        (b'["a\\\\", "\\",\\",", ",,,,,,,,"]', 3, 1),
        (b'[[], {}, [[]], "[,{"]', 8, 5),
        (b'{"a": [1, 2], "b,,,,,,": {}}', 5, 3),
    ],
)
def test_values_of_a_json_text_are_counted_and_what_texts_say_is_not(body, values, nested):
    json.loads(body)
    assert not app.has_more_values(body, values, nested)
    assert app.has_more_values(body, values - 1, nested)
    assert app.has_more_values(body, values, nested - 1)
