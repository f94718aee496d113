"""`laurel serve` in processes of its own, and a client that asks it much at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from null_server import ENVIRONMENT

from laurel.rewards.open import open_local
from laurel.types import Message, group_of
from processes import fork_of
from sandbox_processes import is_gone
from scripted_backend import null_scores

NULL_SERVER = ENVIRONMENT["PYTHONPATH"]
KEY = "the-key-of-the-tests-of-laurel-serve"


class Program(subprocess.Popen[bytes]):
    """A program. Where a fork does its work, that gets its signals."""

    def worker(self) -> psutil.Process:
        """What does its work."""
        fork = fork_of(self.pid) if "LAUREL_WARM" in os.environ else None
        return fork or psutil.Process(self.pid)

    def send_signal(self, sig: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            self.worker().send_signal(sig)


class Serving:
    """A server process. Leaving it kills it and whatever it has started.

    With `--null` it is the one of `benchmarks/null_server`, which has no model.
    """

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        port: int = 0,
        stderr: Path | None = None,
        program: Sequence[str] = ("-m", "laurel"),
        **environment: str,
    ) -> None:
        self.log = directory / f"serve-{time.monotonic_ns()}.log"
        command = "serve-null" if "--null" in arguments else "serve"
        arguments = tuple(one for one in arguments if one != "--null")
        whole = {
            **os.environ,
            # That of now: it may say that processes are forked (`processes.py`).
            "PYTHONPATH": os.pathsep.join(
                filter(None, [os.environ.get("PYTHONPATH"), NULL_SERVER])
            ),
            "LAUREL_API_KEY": KEY,
            "LAUREL_WARM_COMMANDS": "serve serve-null",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "XDG_STATE_HOME": str(directory),
            **environment,
        }
        with (stderr or self.log).open("wb") as file:
            self.process = Program(
                [sys.executable, *program, command, "--port", str(port), *arguments],
                stdout=file,
                stderr=file,
                env=whole,
                stdin=subprocess.DEVNULL,
            )
        self._family: list[psutil.Process] = []
        self.url = f"http://127.0.0.1:{port}"

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.family()
        for process in [self.process, *self._family]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        self.process.wait()

    def ready(self, *, seconds: float = 120) -> Serving:
        """Wait for the line that says so, and take the address from it."""
        end = time.monotonic() + seconds
        while True:
            for line in self.said().splitlines(keepends=True):
                if line.startswith("ready ") and line.endswith("\n"):
                    self.url = line.split()[1]
                    return self
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, *, times: int = 1, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while self.said().count(text) < times:
            assert time.monotonic() < end, self.said()
            time.sleep(0.05)

    def family(self) -> list[psutil.Process]:
        """Its living children."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = self.process.worker().children(recursive=True)
            self._family += [one for one in found if one not in self._family]
        return [one for one in self._family if one.is_running() and not is_gone(one.pid)]

    def end(self, *, seconds: float = 60) -> int:
        """SIGTERM, and its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def ask(self, path: str, value: Any = None, **options: Any) -> tuple[int, Any]:
        """One request; GET where there is no value."""
        body = None if value is None else json.dumps(value).encode()
        ((status, found),) = asyncio.run(ask_many(self.url, path, [body], **options))
        return status, found

    def score(self, *answers: str, prompt: str = "q") -> tuple[int, Any]:
        return self.ask("/v1/score", request_of(prompt, answers))


class SamePort:
    """`laurel serve`, which can be ended and started again at one address."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._directory, self._arguments = directory, arguments
        self._port = 0
        self.start()

    def start(self) -> None:
        arguments = (*self._arguments, "--access-log", "none")
        self.serving = Serving(self._directory, *arguments, port=self._port).ready()
        self.url = self.serving.url
        self._port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self.serving.__exit__()

    def __enter__(self) -> SamePort:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def request_of(prompt: str, answers: Sequence[str], **more: Any) -> dict[str, Any]:
    group = {"id": "g", "prompt": prompt, "completions": list(answers)}
    return {"groups": [group], **more}


def values_of(reply: Any) -> list[float | None]:
    return [score["value"] for group in reply["groups"] for score in group["scores"]]


LOST = 0
"""In the place of a status: the connection ended without an answer."""


async def ask_many(
    url: str,
    path: str,
    bodies: Sequence[bytes | None],
    *,
    connections: int = 1,
    on_answer: Callable[[int], None] = lambda _: None,
    key: str = KEY,
) -> list[tuple[int, Any]]:
    """The answers to many requests, in order; each is sent once, over so many connections."""
    address = urlsplit(url)
    left = list(enumerate(bodies))[::-1]
    found: list[tuple[int, Any]] = [(LOST, None)] * len(bodies)

    async def work() -> None:
        streams = None
        while left:
            index, body = left.pop()
            try:
                if streams is None:
                    streams = await asyncio.open_connection(address.hostname, address.port)
                found[index] = await exchange(*streams, path, address.netloc, body, key)
            except (OSError, EOFError):
                if streams is not None:
                    streams[1].close()
                streams = None
            on_answer(found[index][0])
        if streams is not None:
            streams[1].close()

    await asyncio.gather(*(work() for _ in range(min(connections, len(bodies)))))
    return found


async def exchange(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    path: str,
    host: str,
    body: bytes | None,
    key: str,
) -> tuple[int, Any]:
    head = (
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {host}\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body or b'')}\r\n\r\n"
    )
    writer.write(head.encode() + (body or b""))
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    size = int(answer.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
    text = await reader.readexactly(size)
    try:
        return int(answer[9:12]), json.loads(text)
    except ValueError:
        return int(answer[9:12]), text


def model_values(model: Path, prompt: str, *answers: str) -> list[float | None]:
    """What a reward model says by itself."""
    scorer = open_local(str(model), say=lambda _: None)
    group = group_of((Message("user", prompt),), answers, group_id="g")
    return [score.value for score in scorer.score_now([group])[0]]


def null_values(prompt: str, *answers: str) -> list[float | None]:
    """What such a server says."""
    group = group_of((Message("user", prompt),), answers, group_id="g")
    return [score.value for score in null_scores(group)]


class Load:
    """Many requests in a thread, while something happens to the server."""

    def __init__(self, server: Serving, count: int, *, connections: int = 32) -> None:
        self.answered = 0
        self.found: list[tuple[int, Any]] = []
        """A status and an answer for each, once they are over."""
        self._enough = threading.Event()
        self._count = count
        bodies = [
            json.dumps(request_of(prompt, answers)).encode()
            for prompt, *answers in map(self.said, range(count))
        ]

        def note(_: int) -> None:
            self.answered += 1
            if self.answered >= count // 10:
                self._enough.set()

        def run() -> None:
            work = ask_many(
                server.url, "/v1/score", bodies, connections=connections, on_answer=note
            )
            self.found = asyncio.run(work)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    @staticmethod
    def said(number: int) -> tuple[str, str, str]:
        """The prompt of a request, and the answers."""
        return f"q{number}", f"answer {number}", "no"

    def until_under_way(self) -> None:
        """Wait for a tenth of the answers."""
        assert self._enough.wait(60)
        assert self.answered < self._count, "it was over before anything could happen to it"

    def answers(self) -> list[tuple[int, Any]]:
        """Wait for all of them."""
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self.found

    def check_scores(self) -> None:
        """Each of those that were answered is what a server without a model says."""
        for number, (status, reply) in enumerate(self.found):
            if status == 200:
                assert values_of(reply) == null_values(*self.said(number))
