"""One address for several servers: each request goes to the one with the fewest."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from dataclasses import dataclass

import httpx2
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from laurel.rewards.remote.replica import slow_after
from laurel.workers.rendezvous import LOOPBACK
from laurel.workers.threads import BackgroundLoop, cancel_others, end_all

_MOST_BYTES = 64 << 20
_END_SECONDS, _PROBE = 5.0, 10.0
_KEPT = 200
"""Durations of the latest answers by which `hedge` calls one slow."""
_MOST_LOSSES = 3
"""Servers that a request may be lost with, after which it is the request that is at fault."""
_DROPPED = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "accept-encoding"}
)


@dataclass(eq=False)
class _Server:
    address: str
    num_waiting: int = 0


@dataclass(frozen=True)
class _Forwarded:
    """A request as it is passed on."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes


class _LostError(Exception):
    """The server is lost, or ended the connection."""

    def __init__(self, reason: str, *, had_it: bool) -> None:
        super().__init__(reason)
        self.had_it = had_it
        """Whether the server may have begun with the request."""


class RequestRouter:
    """Passes requests on, in an event loop in a thread of its own.

    While the servers sleep requests wait, and what they had not answered is asked again.
    A request whose server is lost goes to another one, or waits until there is one: a lost server
    is an outage, and never an answer. With the third server it is refused, alone. Requests are
    repeated, so they must change nothing.
    """

    def __init__(self, *, patience: float, hedge: bool) -> None:
        """Listen at a free port of this machine.

        Args:
            patience: Seconds that a request has, without those in which the servers sleep.
        """
        self._patience = patience
        self._hedges = hedge
        self._servers: dict[int, _Server] = {}
        self._asking: set[asyncio.Task[Response]] = set()
        self._seconds: deque[float] = deque(maxlen=_KEPT)
        self._failed: str | None = None
        self._background = BackgroundLoop("laurel-model-router")
        self.address = self._background.wait_for(self._open())

    async def _open(self) -> str:
        self._changed, self._awake = asyncio.Condition(), asyncio.Event()
        self._awake.set()
        # Servers such as vLLM's close a connection that was idle for five seconds; a request that
        # meets that end would be taken for lost.
        limits = httpx2.Limits(
            max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0
        )
        self._client = httpx2.AsyncClient(timeout=None, limits=limits, trust_env=False)
        listener = socket.create_server((LOOPBACK, 0), backlog=2048)
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=3600,  # a client of the user's may take it for open
        )
        self._uvicorn = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._uvicorn.serve(sockets=[listener]))
        return f"{LOOPBACK}:{listener.getsockname()[1]}"

    def add(self, index: int, address: str) -> None:
        """Ask a server, too."""
        self._background.wait_for(self._set(index, _Server(address)))

    def remove(self, index: int) -> None:
        """Ask a server no more."""
        self._background.wait_for(self._set(index, None))

    def pause(self) -> None:
        """Ask nothing from now on; return when no server has a request."""
        self._background.wait_for(self._paused())

    async def _paused(self) -> None:
        self._awake.clear()
        while self._asking:  # a second server may just have been asked
            await end_all(self._asking)

    def resume(self) -> None:
        """Ask again what waits."""
        self._background.wait_for(self._resumed())

    async def _resumed(self) -> None:
        self._awake.set()

    def has_any(self) -> bool:
        """Report whether there is a server."""
        return bool(self._servers)

    def fail(self, reason: str) -> None:
        """Refuse all requests from now on."""
        self._failed = reason
        self._background.wait_for(self._set(-1, None))

    async def _set(self, index: int, server: _Server | None) -> None:
        async with self._changed:
            self._servers.pop(index, None)
            if server is not None:
                self._servers[index] = server
            self._changed.notify_all()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (ASGI), and give it up when its client has gone away."""
        request = Request(scope, receive)
        try:
            forwarded = await _read(request)
        except ClientDisconnect:
            return
        except ValueError as error:
            await _refused(str(error), 413)(scope, receive, send)
            return
        answer = asyncio.create_task(self._respond(forwarded))
        gone = asyncio.create_task(_wait_until_gone(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                await answer.result()(scope, receive, send)
        finally:
            answer.cancel()
            gone.cancel()

    async def _respond(self, request: _Forwarded) -> Response:
        if not request.path.startswith("/"):  # behind the address it would name another server
            return _refused("the request cannot be passed on: its path does not begin with /", 400)
        tried: list[_Server] = []
        losses = 0
        asking = asyncio.current_task()
        assert asking is not None
        try:
            async with asyncio.timeout(None) as clock:
                while True:
                    clock.reschedule(None)
                    await self._awake.wait()
                    clock.reschedule(asyncio.get_running_loop().time() + self._patience)
                    server = await self._free(tried)
                    if not self._awake.is_set():
                        continue
                    try:
                        return await self._ask_hedged(server, request)
                    except asyncio.CancelledError:
                        if self._awake.is_set() or asking.cancelling():
                            raise
                    except _LostError as error:
                        losses += error.had_it
                        if losses == _MOST_LOSSES:
                            return _refused(
                                f"{losses} servers were lost while they had this request: {error}",
                                502,
                            )
                        tried.append(server)
        except TimeoutError:
            return _refused(f"no server answered within {self._patience:g} s")
        except _NoneLeftError as error:
            return _refused(str(error))
        # It breaks the rules, and no server gets it.
        except (httpx2.InvalidURL, httpx2.LocalProtocolError) as error:
            return _refused(f"the request cannot be passed on: {error}", 400)

    async def _free(self, tried: list[_Server]) -> _Server:
        """Return the server with the fewest requests, not one that has just been lost."""
        async with self._changed:
            while True:
                if self._failed is not None:
                    raise _NoneLeftError(self._failed)
                servers = list(self._servers.values())
                fresh = [server for server in servers if server not in tried]
                if fresh:
                    return min(fresh, key=lambda server: server.num_waiting)
                try:
                    await asyncio.wait_for(self._changed.wait(), 1.0)
                except TimeoutError:
                    tried.clear()  # it may have been the connection alone

    async def _ask_hedged(self, server: _Server, request: _Forwarded) -> Response:
        first = self._begin(server, request)
        try:
            if self._hedges and (limit := slow_after(self._seconds)) is not None:
                await asyncio.wait({first}, timeout=limit)
                others = [each for each in self._servers.values() if each is not server]
                if not first.done() and others:
                    other = min(others, key=lambda each: each.num_waiting)
                    return await _first_of(first, self._begin(other, request))
            return await first
        finally:
            first.cancel()

    def _begin(self, server: _Server, request: _Forwarded) -> asyncio.Task[Response]:
        """Begin to ask a server, which has the request from now on until the answer."""
        server.num_waiting += 1
        asking = asyncio.create_task(self._ask(server, request))
        self._asking.add(asking)

        def ended(_: object) -> None:
            server.num_waiting -= 1
            self._asking.discard(asking)

        asking.add_done_callback(ended)
        return asking

    async def _ask(self, server: _Server, request: _Forwarded) -> Response:
        loop, url = asyncio.get_running_loop(), f"http://{server.address}{request.path}"
        begun = loop.time()
        try:
            reply = await self._client.request(
                request.method, url, headers=request.headers, content=request.body
            )
        except httpx2.LocalProtocolError:
            raise
        except httpx2.TransportError as error:
            had_it = not isinstance(error, httpx2.ConnectError)
            raise _LostError(str(error) or type(error).__name__, had_it=had_it) from error
        # Of the request, or of a server that starts, ends or whose engine has died?
        if reply.status_code >= 500 and not await self._is_healthy(server):
            raise _LostError(f"it answered with {reply.status_code}", had_it=True)
        self._seconds.append(loop.time() - begun)
        kind = reply.headers.get("content-type", "application/json")
        return Response(reply.content, reply.status_code, {"content-type": kind})

    async def _is_healthy(self, server: _Server) -> bool:
        try:
            reply = await self._client.get(f"http://{server.address}/health", timeout=_PROBE)
        except httpx2.HTTPError:
            return False
        return reply.status_code == 200

    def close(self) -> None:
        """End all connections. Idempotent."""
        self._background.close(self._end())

    async def _end(self) -> None:
        self._uvicorn.should_exit = self._uvicorn.force_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._serving), _END_SECONDS)
        await cancel_others(_END_SECONDS)
        await self._client.aclose()


class _NoneLeftError(Exception):
    """All servers are lost for good."""


async def _first_of(first: asyncio.Task[Response], second: asyncio.Task[Response]) -> Response:
    """Return the reply that comes first, of servers that were not lost."""
    try:
        done, _ = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not isinstance(task.exception(), _LostError):
                return task.result()
        return await (second if first in done else first)
    finally:
        first.cancel()
        second.cancel()


async def _read(request: Request) -> _Forwarded:
    """Read a request.

    Raises:
        ValueError: It is too large.
        ClientDisconnect: It breaks off.
    """
    body, size = bytearray(), int(request.headers.get("content-length", 0))
    async for part in request.stream():
        body += part
        if max(size, len(body)) > _MOST_BYTES:
            raise ValueError(f"the request is larger than {_MOST_BYTES >> 20} MB")
    query = request.scope["query_string"].decode("latin-1")
    path = request.scope.get("raw_path", request.url.path.encode()).decode("latin-1")
    headers = [(name, value) for name, value in request.headers.items() if name not in _DROPPED]
    return _Forwarded(request.method, f"{path}?{query}" if query else path, headers, bytes(body))


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _refused(reason: str, status: int = 503) -> Response:
    return JSONResponse({"error": {"message": reason, "code": status}}, status)
