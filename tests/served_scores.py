"""A reward server in a thread of this process, over a scripted backend."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx2

from laurel.extensions.server.app import GateOptions, RequestLimits, make_api, make_app
from laurel.extensions.server.run import ServerRun, listen
from laurel.extensions.server.service import RewardService, ServedModel
from laurel.rewards.batching import BatcherLimits, BatchingScorer
from scripted_backend import ScriptedBackend

KEY = "a key of more than sixteen letters".replace(" ", "-")


def served(backend: ScriptedBackend, version: str = "1", **limits: Any) -> ServedModel:
    """A model that answers with the scores of a backend. In an event loop."""
    scorer = BatchingScorer(
        backend, model_version=version, limits=BatcherLimits(max_delay=0, **limits)
    )
    return ServedModel(name=f"model {version}", version=version, scorer=scorer)


def error(response: httpx2.Response) -> tuple[int, str]:
    """The status of an answer that is an error, and the error's code."""
    return response.status_code, response.json()["error"]["code"]


def raw_head(path: str, *more: str, host: str = "127.0.0.1", key: str = KEY) -> bytes:
    """The head of a request as it travels, for tests that write to a socket."""
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Authorization: Bearer {key}",
        *more,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def raw_request(path: str, body: bytes) -> bytes:
    """A whole request as it travels."""
    return raw_head(path, f"Content-Length: {len(body)}") + body


async def asked_without_network(
    app: Any, method: str, path: str, *, client: str = "127.0.0.1", key: str = KEY
) -> tuple[int, bytes]:
    """Status and body of the answer to a request that comes from an address."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "client": (client, 1),
        "root_path": "",
        "headers": [(b"host", b"127.0.0.1"), (b"authorization", b"Bearer " + key.encode())],
    }
    await app(scope, receive, send)
    return sent[0]["status"], sent[1]["body"]


def described(*, needs_key: bool = True) -> dict[str, Any]:
    """What a server says of itself as OpenAPI."""
    return make_api(RewardService(), needs_key=needs_key).openapi()


class Running:
    """The server. Leaving it ends it as SIGTERM would."""

    def __init__(
        self,
        backend: Any = None,
        *,
        gate: dict[str, Any] | None = None,
        limits: RequestLimits | None = None,
        batcher: dict[str, Any] | None = None,
        access_log: Any = None,
        open_model: Any = None,
        loads: threading.Event | None = None,
        drain_seconds: float = 20,
        **service: Any,
    ) -> None:
        self.backend: Any = backend or ScriptedBackend()
        self.service = RewardService(open_model=open_model, **service)
        options = GateOptions(**{"api_key": KEY, "hosts": ("127.0.0.1",), **(gate or {})})
        self.app = make_app(self.service, options, limits=limits, access_log=access_log)
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.run = ServerRun(self.app, self.service, listener, drain_seconds=drain_seconds)
        self._batcher = batcher or {}
        self._loads = loads
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.client = httpx2.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {KEY}"},
            trust_env=False,
            timeout=30,
        )

    def _run(self) -> None:
        async def open_model() -> ServedModel:
            if self._loads is not None:
                await asyncio.to_thread(self._loads.wait, 20)
            return served(self.backend, **self._batcher)

        self.run.run(open_model, on_ready=lambda _: self._ready.set())

    def __enter__(self) -> Running:
        self._thread.start()
        if self._loads is None:
            assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if isinstance(self.backend, ScriptedBackend):
            self.backend.may_go.set()
        if self._loads is not None:
            self._loads.set()
        self.run.stop()
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server did not end"

    def score(self, *answers: str, prompt: str = "q", **more: Any) -> httpx2.Response:
        """Ask for the scores of one group."""
        group = {"id": "g", "prompt": prompt, "completions": list(answers)}
        return self.post("/v1/score", {"groups": [group], **more})

    def post(self, path: str, value: Any, headers: Any = None) -> httpx2.Response:
        """In ASCII, so that half a character can travel."""
        headers = {"Content-Type": "application/json", **(headers or {})}
        return self.client.post(path, content=json.dumps(value), headers=headers)

    def in_thread(self, ask: Any) -> tuple[threading.Thread, list[Any]]:
        """Ask in a thread; the answer is put into the list."""
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(ask()))
        thread.start()
        return thread, found
