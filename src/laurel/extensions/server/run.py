"""Runs a reward server in this process: its socket, event loop, signals and end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Literal

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from laurel.errors import ConfigError
from laurel.extensions.server.service import RewardService, ServedModel

_IDLE_SECONDS = 75
_BACKLOG = 4096
# Time that a connection without a byte has when the server is asked to end.
_SILENT_SECONDS = 2.0
_ROUND_SECONDS = 0.05
# Clients that keep opening connections must not keep a server from ending.
_ACCEPT_SECONDS = 5.0
# Time that other connections without an answer have when the drain time is over.
_LAST_SECONDS = 0.5
# Interval of the checks whether any replica is left.
_CHECK_SECONDS = 0.5


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 is any that is free.

    Raises:
        ConfigError: The address or the port cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host} is no address of this machine: {error}") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"--host {host} is no address of this machine") from error
        raise ConfigError(
            f"--port {port} of {host} cannot be used: {error.strerror}. Name another one, or 0 for "
            "any that is free"
        ) from error
    return listener


class ServerRun:
    """Runs one server from start to end. `run` blocks; `stop` is thread-safe."""

    def __init__(
        self,
        app: Any,
        service: RewardService,
        listener: socket.socket,
        *,
        drain_seconds: float = 30.0,
    ) -> None:
        """Hold the parts of a server; nothing is started.

        Args:
            listener: Socket that `listen` returned; it is closed at the end.
            drain_seconds: Time that accepted requests have when the server is asked to end.
        """
        config = uvicorn.Config(
            app,
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=5,
        )
        self._server = _Server(config)
        self._service = service
        self._listener = listener
        self._drain_seconds = drain_seconds
        self.unanswered = 0
        """Requests, complete or begun, that had no answer at the end."""
        self.silent = 0
        """Connections without a single byte that were closed at the end."""
        self.lost_all = False
        """Whether it ended because all replicas are lost."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None

    def run(
        self,
        open_model: Callable[[], Awaitable[ServedModel]],
        *,
        on_ready: Callable[[ServedModel], None] = lambda _: None,
    ) -> None:
        """Serve until asked to end; requests are refused until the model is loaded.

        In the main thread SIGTERM and SIGINT end it after accepted requests are finished; a second
        signal ends the process at once.
        """
        factory = self._server.config.get_loop_factory()
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(self._run(open_model, on_ready))

    def stop(self) -> None:
        """Finish accepted requests, and end."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end)

    async def _run(
        self,
        open_model: Callable[[], Awaitable[ServedModel]],
        on_ready: Callable[[ServedModel], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._end)
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        opening = asyncio.ensure_future(open_model())
        watching: asyncio.Future[None] | None = None
        try:
            await asyncio.wait([serving, opening], return_when=asyncio.FIRST_COMPLETED)
            if opening.done() and not serving.done():
                model = opening.result()
                self._service.begin(model)
                on_ready(model)

            async def end_when_lost() -> None:
                # A supervisor can start the server again; by itself it would refuse forever.
                while not self._service.is_lost:
                    await asyncio.sleep(_CHECK_SECONDS)
                self.lost_all = True
                self._service.give_up()
                await self._answer_all(_SILENT_SECONDS)
                self._server.should_exit = True

            watching = asyncio.ensure_future(end_when_lost())
            await serving
        finally:
            opening.cancel()
            if watching is not None:
                watching.cancel()
            self._server.should_exit = True
            with contextlib.suppress(Exception):
                await serving
            await self._service.aclose()

    def _end(self) -> None:
        if self._ending is not None:
            os._exit(1)

        async def drain() -> None:
            began = time.monotonic()
            await self._service.drain(self._drain_seconds)
            await self._answer_all(self._drain_seconds - (time.monotonic() - began))
            self._server.should_exit = True

        self._ending = asyncio.ensure_future(drain())

    async def _answer_all(self, seconds: float) -> None:
        """Let every connection without an answer get one, which by now is most often a refusal."""
        # A request that was sent, or is being sent, would be lost without a message if its
        # connection were closed: the system resets connections with unread bytes.
        began = time.monotonic()
        connections = self._server.server_state.connections
        while _unread([self._listener]) and time.monotonic() - began < _ACCEPT_SECONDS:
            await asyncio.sleep(_ROUND_SECONDS)  # connections in the backlog are accepted meanwhile
        for server in getattr(self._server, "servers", ()):
            server.close()
        while True:
            await asyncio.sleep(_ROUND_SECONDS)
            of_kind: dict[str, list[Any]] = {"silent": [], "begun": [], "idle": []}
            for connection in list(connections):
                of_kind[_kind_of(connection)].append(connection)
            unread = _unread([connection.transport for connection in of_kind["idle"]])
            begun, silent = len(of_kind["begun"]) + len(unread), len(of_kind["silent"])
            for connection in of_kind["idle"]:
                if connection.transport not in unread:
                    connection.shutdown()
            passed = time.monotonic() - began
            waits = begun and passed < max(seconds, _LAST_SECONDS)
            if not waits and (not silent or passed >= min(seconds, _SILENT_SECONDS)):
                self.unanswered, self.silent = begun, silent
                return


def _unread(sources: Sequence[socket.socket | asyncio.Transport]) -> list[Any]:
    # The system resets a connection that is closed with unread bytes, so these are found first.
    poll = select.poll()
    source_of = {}
    for source in sources:
        if isinstance(source, socket.socket):
            number = source.fileno()
        else:
            number = -1 if source.is_closing() else source.get_extra_info("socket").fileno()
        if number >= 0:
            source_of[number] = source
            poll.register(number, select.POLLIN)
    return [source_of[number] for number, event in poll.poll(0) if event & select.POLLIN]


def _kind_of(connection: Any) -> Literal["silent", "begun", "idle"]:
    """Classify a connection: no byte yet, a request without its answer, or neither."""
    cycle = connection.cycle
    if getattr(connection, "is_before_a_head", False):
        return "begun" if connection.has_begun else "silent"
    if cycle is None:
        return "silent"
    return "idle" if cycle.response_complete else "begun"


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `ServerRun`."""
        yield


MAX_CONNECTIONS = 8192
# From the first byte of a request, or the start of a connection, to the end of the head.
_HEAD_SECONDS = 10.0
_MAX_HEAD_BYTES, _MAX_HEADERS = 16 * 2**10, 64
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with limits on slow and endless heads and on connections."""

    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0  # of an unfinished head, as received
    _parsed_bytes = 0  # of a head, as parsed: also where it came in one read
    _is_in_head = True
    has_begun = False
    """Whether the first byte of a request has come."""

    @property
    def is_before_a_head(self) -> bool:
        """Whether the head of the first or a begun request is incomplete."""
        return self._timer is not None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of the first head, or close a connection above the limit."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.close()
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit of a closed connection."""
        self._have_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, within the limit of a head's size."""
        if self._is_in_head and b"pgrade" in data:
            # A server may ignore the request for another protocol (RFC 9110, 7.8), and the parser
            # would take the body as that protocol's: Java's client asks for h2c with every POST.
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"", head) + end + rest
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        """Start the time limit of a request's head."""
        super().on_message_begin()
        self.has_begun = True
        self._expect_head()

    def on_url(self, url: bytes) -> None:
        """Count the bytes of the first line."""
        self._parsed_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the bytes of one header."""
        self._parsed_bytes += len(name) + len(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the limits of a complete head."""
        self._have_head()
        if len(self.headers) > _MAX_HEADERS or self._parsed_bytes > _MAX_HEAD_BYTES:
            self.transport.close()
            return
        super().on_headers_complete()

    def _expect_head(self) -> None:
        self._is_in_head = True
        self._head_bytes = self._parsed_bytes = 0
        if self._timer is None:
            self._timer = self.loop.call_later(_HEAD_SECONDS, self._close_slow)

    def _have_head(self) -> None:
        self._is_in_head = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_slow(self) -> None:
        self._timer = None
        self.transport.close()
