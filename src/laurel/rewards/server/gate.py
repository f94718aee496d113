"""What every request must pass before anybody reads it: host, key, size, time; and its log line."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

from laurel.rewards.remote.wire import VERSION_HEADER, dump, error_json
from laurel.rewards.server.access_log import AccessLog
from laurel.rewards.server.keys import (
    Keys,
    Network,
    OpenAddresses,
    Role,
    WrongKeys,
    is_loopback,
    names_a_key,
)
from laurel.rewards.server.metrics import ServerMetrics
from laurel.rewards.server.serving import Answer, RefusedRequestError

_log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CALL = "laurel.call"
"""Key of the scope that has the `Call`."""
ADMIN_PATHS = "/admin/"
"""They need a key from every address."""
HEALTH_PATH, DOCS_PATH = "/health", "/docs"
"""They need no key, and say nothing of this server; the page for people, whose browsers cannot send
one, only on this machine."""
_WHERE = "what the server printed at its start says where its key is"
_NO_KEY = f"a key is needed: Authorization: Bearer KEY; {_WHERE}"
_WRONG_KEY = f"this key is not one of the server's; {_WHERE}"
"""Who sends a key knows that it sent one; the answer tells nothing of the right ones."""
_SECONDS_BEFORE_WATCHING = 0.05
"""Most answers are there before anybody has to watch whether the client still is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """Who may ask, and how much at once."""

    api_key: str | None
    """None: whoever reaches the address."""
    admin_key: str | None = None
    """For `/admin` too; None: the API key is."""
    allow_from: tuple[Network, ...] = ()
    """Whose requests for scores need no key; see `OpenAddresses`."""
    hosts: tuple[str, ...] | None
    """Names that a request may call this server by; None: any."""
    body_bytes: int = 8 * 2**20
    body_seconds: float = 15.0
    log_texts: bool = False
    """Whether the log has the bodies of requests."""


@dataclass(slots=True)
class Call:
    """One request on its way, and what is written about it in the end."""

    method: str
    path: str
    query: str
    headers: dict[bytes, bytes]
    client: str
    started: float
    request_id: str
    role: Role | None = None
    body: bytes = b""
    status: int = 0
    sent_bytes: int = 0
    completions: int = 0
    failures: int = 0
    version: str = ""
    has_left: bool = False


class Gate:
    """The outermost layer of the server. Nothing behind it sees a request that it refuses."""

    def __init__(
        self,
        app: App,
        options: GateOptions,
        *,
        metrics: ServerMetrics,
        access_log: AccessLog | None,
    ) -> None:
        self._app = app
        self._options = options
        self._metrics = metrics
        self._access_log = access_log
        self._keys = Keys(options.api_key, options.admin_key)
        self._wrong_keys = WrongKeys()
        self._open_addresses = OpenAddresses(options.allow_from)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served here")
        call = _call_of(scope)
        watch = _Watch(call, receive)

        async def counting(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_headers_of(call)]
            else:
                call.sent_bytes += len(message.get("body", b""))
            await send(message)

        try:
            _refuse_repeated(scope["headers"])
            self._check(call)
            call.body = await self._body(call, receive)
            scope[CALL] = call
            watch.begin()
            await self._app(scope, receive, counting)
        except RefusedRequestError as refusal:
            if refusal.status == 401 and (pause := self._wrong_keys.pause(call.client)):
                await asyncio.sleep(pause)
            await respond_error(counting, refusal)
        except asyncio.CancelledError:
            if not call.has_left:
                raise
            watch.forgive()
            call.status = 499
        except Exception as error:
            told = failure_of(call, error)
            if not call.status:
                await respond_error(counting, told)
        finally:
            watch.end()
            self._note(call)

    def _check(self, call: Call) -> None:
        """Whether anybody may ask that here at all."""
        if not self._is_known_host(call.headers.get(b"host", b"")):
            raise RefusedRequestError(403, "host", "this server is not called by that name")
        call.role = self._keys.role_of(call.headers.get(b"authorization", b""))
        may_be_open = call.role is None and not call.path.startswith(ADMIN_PATHS)
        if may_be_open and self._open_addresses.opens(call.client, call.headers):
            # Clients that know no key often send any, such as "EMPTY": it does not matter here.
            call.role = "score"
        is_open = call.path == HEALTH_PATH or (call.path == DOCS_PATH and is_loopback(call.client))
        if call.role is None and not is_open:
            said = call.headers.get(b"authorization", b"")
            raise RefusedRequestError(401, "key", _WRONG_KEY if names_a_key(said) else _NO_KEY)

    def _is_known_host(self, header: bytes) -> bool:
        if self._options.hosts is None:
            return True
        host = header.decode("latin-1").lower()
        name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        return name in self._options.hosts

    async def _body(self, call: Call, receive: Receive) -> bytes:
        """All of the body, if it is no more than allowed and comes in time."""
        most = self._options.body_bytes
        too_large = RefusedRequestError(413, "size", f"a request has {most:,} bytes at most")
        length = call.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > most:
            raise too_large
        if call.headers.get(b"content-encoding", b"identity") != b"identity":
            raise RefusedRequestError(415, "encoding", "a body must not be compressed")
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._options.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        call.has_left = True
                        raise asyncio.CancelledError
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > most:
                        raise too_large
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            late = f"the body did not come within {self._options.body_seconds:g} s"
            raise RefusedRequestError(408, "slow", late) from None
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if body and not call.headers.get(b"content-type", b"").startswith(b"application/json"):
            raise RefusedRequestError(415, "type", "Content-Type must be application/json")
        return body

    def _note(self, call: Call) -> None:
        seconds = time.perf_counter() - call.started
        self._metrics.note(call.path, call.status, seconds, call.completions, call.failures)
        if self._access_log is None:
            return
        record = {
            "time": time.time(),
            "id": call.request_id,
            "client": call.client,
            "method": call.method,
            "path": call.path[:200],
            "status": call.status,
            "seconds": round(seconds, 6),
            "bytes_in": len(call.body),
            "bytes_out": call.sent_bytes,
            "completions": call.completions,
            "failures": call.failures,
            "version": call.version,
        }
        if self._options.log_texts:
            record["body"] = call.body.decode("utf-8", "backslashreplace")
        self._access_log.write(record)


class _Watch:
    """Cancels a request whose client has gone."""

    def __init__(self, call: Call, receive: Receive) -> None:
        self._call = call
        self._receive = receive
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[None] | None = None

    def begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_SECONDS_BEFORE_WATCHING, self._start)

    def _start(self) -> None:
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._call.status and self._task is not None:
            self._call.has_left = True
            self._task.cancel()

    def forgive(self) -> None:
        """The cancellation has been dealt with."""
        if self._task is not None:
            self._task.uncancel()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()


def _call_of(scope: Scope) -> Call:
    headers = dict(scope["headers"])
    client = scope.get("client")
    wanted = headers.get(b"x-request-id", b"").decode("latin-1")
    return Call(
        method=scope["method"],
        path=scope["path"],
        query=scope["query_string"].decode("latin-1"),
        headers=headers,
        client=client[0] if client else "",
        started=time.perf_counter(),
        request_id=wanted if 0 < len(wanted) <= 128 and wanted.isprintable() else _new_id(),
    )


def _refuse_repeated(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Of two keys nobody can say which one is meant: a proxy may have checked the other."""
    seen = [name for name, _ in headers if name in _ONCE]
    for name in _ONCE:
        if seen.count(name) > 1:
            message = f"the request has several {name.decode().title()} headers; send one"
            raise RefusedRequestError(400, "headers", message)


_ONCE = (b"authorization", b"host", b"content-length", b"x-request-id")


def _new_id() -> str:
    """Of one request among all of all servers. Not by the system's randomness: asking for that lets
    other threads in, and takes longer than all the rest of the gate."""
    return f"{_ORIGIN}-{next(_NUMBERS)}"


_ORIGIN = secrets.token_hex(8)
_NUMBERS = itertools.count(1)


def _headers_of(call: Call) -> list[tuple[bytes, bytes]]:
    found = [
        (b"x-request-id", call.request_id.encode("latin-1")),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"no-store"),
    ]
    if call.version:
        found.append((VERSION_HEADER.lower().encode(), call.version.encode("ascii", "replace")))
    if call.status in (408, 413):  # what is left of the body is not waited for
        found.append((b"connection", b"close"))
    return found


def failure_of(call: Call, error: Exception) -> RefusedRequestError:
    """What a client is told of an error that is ours; the log is told all of it."""
    _log.error("request %s failed", call.request_id, exc_info=error)
    message = f"the server failed; its log says why under {call.request_id}"
    return RefusedRequestError(500, "failed", message)


async def respond(send: Send, answer: Answer, *headers: tuple[bytes, bytes]) -> None:
    """Send an answer."""
    length = str(len(answer.body)).encode()
    found = [(b"content-type", answer.content_type), (b"content-length", length), *headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": found})
    await send({"type": "http.response.body", "body": answer.body})


async def respond_error(send: Send, refusal: RefusedRequestError) -> None:
    """Answer with an error."""
    headers = []
    if refusal.retry_after is not None:
        seconds = max(1, math.ceil(refusal.retry_after))  # clients know whole seconds only
        headers.append((b"retry-after", str(seconds).encode()))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.code == "draining":  # another connection may lead to another server
        headers.append((b"connection", b"close"))
    body = dump(error_json(refusal.code, str(refusal)))
    await respond(send, Answer(body, status=refusal.status), *headers)
