"""A small reward server for tests, which misbehaves as it is told. It scores as `WordScorer`.

As a program it is one server in a process of its own, which can be killed: `RewardServerProcess`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fakes import WordScorer
from laurel.rewards.remote.wire import ScoreReply, ScoreRequest, dump, parse


@dataclass(frozen=True)
class Asked:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    value: Any


@dataclass(frozen=True)
class Answer:
    """What the server does with a request instead of answering it well."""

    status: int = 200
    body: bytes | None = None
    """None: the right answer."""
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    """Before it answers."""
    cut: int | None = None
    """Bytes of the body after which the connection ends."""
    change: Callable[[Any], Any] | None = None
    """Of the right answer's value; NaN is written as it is."""


Behaviour = Callable[[int, Asked], Answer | None]
"""From the number of a request for scores, from 0, to what is done; None: what is right."""


class RewardServer:
    """A real server on a free port of loopback, in threads of this process."""

    def __init__(
        self,
        behave: Behaviour | None = None,
        *,
        version: str = "1",
        port: int = 0,
        answer: Callable[[Asked], Any] | None = None,
        **scorer: Any,
    ) -> None:
        self.behave = behave or (lambda number, asked: None)
        self.version = version
        self.asked: list[Asked] = []
        self.probes = 0
        self.scorer = WordScorer(**scorer)
        self.answer = answer or self.scored
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.owner = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> RewardServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the door, and every connection with it."""
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, asked: Asked) -> Answer | None:
        with self._lock:
            number = len(self.asked)
            self.asked.append(asked)
        return self.behave(number, asked)

    def scored(self, asked: Asked) -> Any:
        request = ScoreRequest.read(asked.value)
        scores = asyncio.run(self.scorer.score(request.as_groups))
        about = {"model": "words", "model_version": self.version, "request_id": request.request_id}
        return ScoreReply.of(request.as_groups, scores, **about).model_dump()

    def sleep(self, seconds: float) -> None:
        self._stopping.wait(seconds)

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()


class _Server(ThreadingHTTPServer):
    owner: RewardServer
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Clients that go away are nobody's concern."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server
    timeout = 5

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.owner.probes += 1
        self._send(200, b"{}", {})

    def do_POST(self) -> None:
        owner = self.server.owner
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked = Asked(self.path, {k.lower(): v for k, v in self.headers.items()}, parse(body))
        answer = owner.take(asked) or Answer()
        if answer.seconds:
            owner.sleep(answer.seconds)
        if owner.is_stopping:
            self.close_connection = True
            return
        body = answer.body if answer.body is not None else self._right(asked, answer)
        self._send(answer.status, body, answer.headers, cut=answer.cut)

    def _right(self, asked: Asked, answer: Answer) -> bytes:
        value = self.server.owner.answer(asked)
        if answer.change is not None:
            return json.dumps(answer.change(value)).encode()
        return dump(value)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


FAULTS: dict[str, Answer] = {
    "500": Answer(status=500, body=b"Internal Server Error"),
    "429": Answer(status=429, body=b"{}", headers={"Retry-After": "0.2"}),
    "html": Answer(body=b"<html><body>It works!</body></html>"),
    "half a body": Answer(cut=40),
    "nothing": Answer(cut=0),
    "slow": Answer(seconds=1.0),
    "hang": Answer(seconds=3600.0),
    "NaN": Answer(change=lambda value: _changed(value, "value", float("nan"))),
    "infinite": Answer(change=lambda value: _changed(value, "value", float("inf"))),
    "null": Answer(change=lambda value: _changed(value, "value", None)),
    "text": Answer(change=lambda value: _changed(value, "value", "1.5")),
    "bool": Answer(change=lambda value: _changed(value, "value", True)),
    "too few": Answer(change=lambda value: _groups(value, lambda scores: scores[:-1])),
    "too many": Answer(change=lambda value: _groups(value, lambda scores: [*scores, scores[0]])),
    "another group": Answer(
        change=lambda v: {**v, "groups": [{**g, "id": "another"} for g in v["groups"]]}
    ),
    "another request": Answer(change=lambda value: {**value, "request_id": "another"}),
    "another version": Answer(change=lambda value: {**value, "model_version": "another"}),
}
"""What a server may do instead of what is right."""


def _groups(value: Any, change: Callable[[list[Any]], list[Any]]) -> Any:
    return {**value, "groups": [{**g, "scores": change(g["scores"])} for g in value["groups"]]}


def _changed(value: Any, key: str, wrong: Any) -> Any:
    return _groups(value, lambda scores: [{**scores[0], key: wrong}, *scores[1:]])


def misbehaving(fault: str, *, share: float, seconds: float, seed: int = 0) -> Behaviour:
    """A share of the requests gets a fault, the others what is right after so many seconds."""
    drawn, lock = random.Random(seed), threading.Lock()

    def behave(number: int, asked: Asked) -> Answer | None:
        with lock:
            is_bad = drawn.random() < share
        return FAULTS[fault] if is_bad else Answer(seconds=seconds)

    return behave


class RewardServerProcess:
    """A server in a process of its own. Whoever starts one closes it."""

    def __init__(self, *, is_up: bool = True, **settings: Any) -> None:
        """Settings: `fault`, `share`, `seconds`, `seed`, `version`, `weight`, `poison`."""
        self.settings = settings
        self.port = 0
        self._process: subprocess.Popen[str] | None = None
        self.start()
        if not is_up:
            self.kill()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, **settings: Any) -> None:
        """On the port of before, perhaps with other settings. Returns when it listens."""
        self.settings |= settings
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), json.dumps({**self.settings, "port": self.port})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.strip().isdigit(), "the server did not start"
        self.port = int(line)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()

    @property
    def has_died(self) -> bool:
        """By itself."""
        return self._process is not None and self._process.poll() is not None

    def pause(self) -> None:
        """It hangs: connections stay, and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> RewardServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def wait_until(true: Callable[[], bool], *, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def serve(
    *,
    port: int,
    version: str = "1",
    fault: str = "500",
    share: float = 0.0,
    seconds: float = 0.0,
    seed: int = 0,
    poison: str = "",
    **scorer: Any,
) -> None:
    """One server until it is killed or asked the poison, or whoever started it has ended."""
    behave = misbehaving(fault, share=share, seconds=seconds, seed=seed)

    def live(number: int, asked: Asked) -> Answer | None:
        if poison and poison in json.dumps(asked.value):
            os._exit(1)
        return behave(number, asked)

    with RewardServer(live, version=version, port=port, **scorer) as server:
        print(server.port, flush=True)
        sys.stdin.read()  # ends with the process at the other end


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
