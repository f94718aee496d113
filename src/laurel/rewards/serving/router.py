"""One address for several servers: each request goes to the one with the fewest."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx2

from laurel.generation.waiting import BackgroundLoop, cancel_others

_MOST_BYTES = 64 << 20
_END_SECONDS, _PROBE = 5.0, 10.0
_LOOK = 1.0
"""Seconds between two looks whether a client still waits."""
_KEPT = 200
"""Durations of which `hedge` knows the longest of 95 %."""
_DROPPED = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "accept-encoding"}
)


@dataclass(eq=False)
class _Server:
    address: str
    num_waiting: int = 0


@dataclass(frozen=True)
class _Reply:
    status: int
    body: bytes
    kind: str = "application/json"
    gone: bool = field(default=False)


class RequestRouter:
    """Passes requests on, in an event loop in a thread of its own.

    A request whose server is lost goes to another one, or waits until there is one: a lost server
    is an outage, and never an answer. Requests are repeated, so they must change nothing.
    """

    def __init__(self, *, patience: float, hedge: bool) -> None:
        """Listen at a free port of this machine; `patience` is how long a request waits."""
        self._patience = patience
        self._hedges = hedge
        self._servers: dict[int, _Server] = {}
        self._seconds: deque[float] = deque(maxlen=_KEPT)
        self._failed: str | None = None
        self._background = BackgroundLoop("laurel-model-router")
        self.address = self._background.wait_for(self._open())

    async def _open(self) -> str:
        self._changed = asyncio.Condition()
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx2.AsyncClient(timeout=None, limits=limits, trust_env=False)
        self._serving = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = self._serving.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    def add(self, index: int, address: str) -> None:
        """Ask a server, too."""
        self._background.wait_for(self._set(index, _Server(address)))

    def remove(self, index: int) -> None:
        """Ask a server no more."""
        self._background.wait_for(self._set(index, None))

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

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, EOFError):
                try:
                    while (request := await _read(reader)) is not None:
                        answer = asyncio.create_task(self._answered(*request))
                        if not await _is_awaited(answer, reader):
                            return
                        await _write(writer, answer.result())
                except (ValueError, httpx2.InvalidURL, httpx2.LocalProtocolError) as error:
                    await _write(
                        writer, _refused(f"no request that can be passed on: {error}", 400)
                    )
        finally:
            writer.close()

    async def _answered(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> _Reply:
        tried: list[_Server] = []
        try:
            async with asyncio.timeout(self._patience) as clock:
                while True:
                    server = await self._free(tried)
                    clock.reschedule(None)  # it has been found; the answer may take its time
                    reply = await self._hedged(server, method, path, headers, body)
                    if not reply.gone:
                        return reply
                    tried.append(server)
                    clock.reschedule(asyncio.get_running_loop().time() + self._patience)
        except TimeoutError:
            return _refused(f"no server answered within {self._patience:g} s")
        except _NoneLeftError as error:
            return _refused(str(error))

    async def _free(self, tried: list[_Server]) -> _Server:
        """Return the server with the fewest requests, not one that has just been lost."""
        async with self._changed:
            while True:
                if self._failed is not None:
                    raise _NoneLeftError(self._failed)
                known = list(self._servers.values())
                fresh = [one for one in known if one not in tried]
                if fresh:
                    return min(fresh, key=lambda one: one.num_waiting)
                try:
                    await asyncio.wait_for(self._changed.wait(), 1.0)
                except TimeoutError:
                    tried.clear()  # it may have been the connection alone

    async def _hedged(
        self, server: _Server, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> _Reply:
        first = self._begun(server, method, path, headers, body)
        try:
            if self._hedges and len(self._seconds) >= 20:
                limit = 2 * sorted(self._seconds)[int(0.95 * len(self._seconds))]
                await asyncio.wait({first}, timeout=limit)
                others = [one for one in self._servers.values() if one is not server]
                if not first.done() and others:
                    other = min(others, key=lambda one: one.num_waiting)
                    second = self._begun(other, method, path, headers, body)
                    return await _first_of(first, second)
            return await first
        finally:
            first.cancel()

    def _begun(
        self, server: _Server, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> asyncio.Task[_Reply]:
        """Begin to ask a server, which has the request from now on until the answer."""
        server.num_waiting += 1
        asking = asyncio.create_task(self._asked(server, method, path, headers, body))

        def ended(_: object) -> None:
            server.num_waiting -= 1

        asking.add_done_callback(ended)
        return asking

    async def _asked(
        self, server: _Server, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> _Reply:
        loop, url = asyncio.get_running_loop(), f"http://{server.address}{path}"
        begun = loop.time()
        try:
            reply = await self._client.request(method, url, headers=dict(headers), content=body)
        except httpx2.LocalProtocolError:  # it breaks the rules, and no server gets it
            raise
        except httpx2.TransportError as error:
            return _Reply(503, str(error).encode(), gone=True)
        self._seconds.append(loop.time() - begun)
        kind = reply.headers.get("content-type", "application/json")
        # Of the request, or of a server that starts, ends or whose engine has died?
        gone = reply.status_code >= 500 and not await self._is_healthy(server)
        return _Reply(reply.status_code, reply.content, kind, gone=gone)

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
        self._serving.close()
        await cancel_others(_END_SECONDS)
        await self._client.aclose()


class _NoneLeftError(Exception):
    """All servers are lost for good."""


async def _first_of(first: asyncio.Task[_Reply], second: asyncio.Task[_Reply]) -> _Reply:
    """Return the reply that comes first, of servers that were not lost."""
    try:
        done, _ = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            if not one.result().gone:
                return one.result()
        return await (second if first in done else first)
    finally:
        first.cancel()
        second.cancel()


async def _is_awaited(answer: asyncio.Task[_Reply], reader: asyncio.StreamReader) -> bool:
    """Wait for an answer; cancel it, and return False, when its client has gone away."""
    try:
        while not answer.done():
            await asyncio.wait({answer}, timeout=_LOOK)
            if reader.at_eof():
                return False
        return True
    finally:
        answer.cancel()


def _refused(reason: str, status: int = 503) -> _Reply:
    return _Reply(status, json.dumps({"error": {"message": reason, "code": status}}).encode())


async def _write(writer: asyncio.StreamWriter, reply: _Reply) -> None:
    head = (
        f"HTTP/1.1 {reply.status} .\r\ncontent-type: {reply.kind}\r\n"
        f"content-length: {len(reply.body)}\r\n\r\n"
    )
    writer.write(head.encode() + reply.body)
    await writer.drain()


async def _read(
    reader: asyncio.StreamReader,
) -> tuple[str, str, dict[str, str], bytes] | None:
    """Read a request; None at the end of the connection.

    Raises:
        ValueError: It is malformed, or too large.
        EOFError: It breaks off.
    """
    line = (await reader.readline()).decode("latin-1").split()
    if not line:
        return None
    if len(line) < 2 or not line[1].startswith("/"):
        raise ValueError(f"it begins with {' '.join(line)!r}")
    headers: dict[str, str] = {}
    while name := (await reader.readline()).decode("latin-1").strip():
        key, _, value = name.partition(":")
        headers[key.strip().lower()] = value.strip()
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = b""
        while size := int((await reader.readline()).split(b";")[0], 16):
            body += await reader.readexactly(_bounded(len(body) + size) - len(body))
            await reader.readline()
        while (await reader.readline()).strip():
            pass  # what may follow the last chunk
    else:
        body = await reader.readexactly(_bounded(int(headers.get("content-length", 0))))
    return line[0], line[1], {k: v for k, v in headers.items() if k not in _DROPPED}, body


def _bounded(size: int) -> int:
    if size > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MB")
    return size
