"""A reward server in this process: its socket, its event loop, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from laurel.errors import ConfigError
from laurel.rewards.server.service import RewardService, ServedModel

Result = TypeVar("Result")

_IDLE_SECONDS = 75
_BACKLOG = 4096
_SILENT_SECONDS = 2.0
"""What is left to a connection that has sent nothing when the server is told to end."""
_ROUND_SECONDS = 0.05
_MOST_ACCEPTING = 5.0
"""Clients that open connections without end must not keep a server from its end."""
_LAST_SECONDS = 0.5
"""What is left to every other one that has no answer yet, where all its time is over."""
_LOOK_SECONDS = 0.5
"""Between two looks whether anybody is left who could score."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any that is free.

    Raises:
        ConfigError: The address cannot be had.
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
            f"--port {port} of {host} cannot be had: {error.strerror}. Name another one, or 0 for "
            "any that is free"
        ) from error
    return listener


class ServerRun:
    """One server from its start to its end. `run` blocks; `stop` may be called from any thread."""

    def __init__(
        self,
        app: Any,
        service: RewardService,
        listener: socket.socket,
        *,
        drain_seconds: float = 30.0,
    ) -> None:
        """Hold all that is needed; nothing is started.

        Args:
            app: See `server.make_app`.
            service: What it serves.
            listener: See `listen`; it is closed in the end.
            drain_seconds: What was accepted may take when it is told to end.
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
        """Requests, whole or begun, that were left without an answer in the end."""
        self.silent = 0
        """Connections that were closed in the end without a byte having come."""
        self.lost_all = False
        """Whether it ended because nobody is left who could score."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None

    def run(
        self,
        open_model: Callable[[], Awaitable[ServedModel]],
        *,
        on_ready: Callable[[ServedModel], None] = lambda _: None,
    ) -> None:
        """Serve until told to end. Requests are refused until the model is there.

        In the main thread SIGTERM and SIGINT end it: first what was accepted is finished; a second
        one ends the process at once.

        Args:
            open_model: Gives the model; its error ends the server and is raised.
            on_ready: Told of it.
        """
        factory = self._server.config.get_loop_factory()
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(self._run(open_model, on_ready))

    def stop(self) -> None:
        """Finish what was accepted, and end."""
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
            watching = asyncio.ensure_future(self._end_when_lost())
            await serving
        finally:
            opening.cancel()
            if watching is not None:
                watching.cancel()
            self._server.should_exit = True
            with contextlib.suppress(Exception):
                await serving
            await self._service.aclose()

    async def _end_when_lost(self) -> None:
        """A supervisor can start the server again; by itself it would refuse for ever."""
        while not self._service.is_lost:
            await asyncio.sleep(_LOOK_SECONDS)
        self.lost_all = True
        self._service.give_up()
        await self._answer_all(_SILENT_SECONDS)
        self._server.should_exit = True

    def _end(self) -> None:
        if self._ending is not None:
            os._exit(1)
        self._ending = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        began = time.monotonic()
        await self._service.drain(self._drain_seconds)
        await self._answer_all(self._drain_seconds - (time.monotonic() - began))
        self._server.should_exit = True

    async def _answer_all(self, seconds: float) -> None:
        """Let every connection that has no answer yet have one, which by now is most often a no.

        What a client has sent, or is sending, would be lost without a word if its connection were
        closed: the system resets connections that hold what nobody has read.
        """
        began = time.monotonic()
        connections = self._server.server_state.connections
        while _have_come([self._listener]) and time.monotonic() - began < _MOST_ACCEPTING:
            await asyncio.sleep(_ROUND_SECONDS)  # those that wait to be accepted are
        for server in getattr(self._server, "servers", ()):
            server.close()
        while True:
            await asyncio.sleep(_ROUND_SECONDS)
            of_kind: dict[str, list[Any]] = {"silent": [], "begun": [], "idle": []}
            for connection in list(connections):
                of_kind[_kind_of(connection)].append(connection)
            unread = _have_come([one.transport for one in of_kind["idle"]])
            begun, silent = len(of_kind["begun"]) + len(unread), len(of_kind["silent"])
            for connection in of_kind["idle"]:
                if connection.transport not in unread:
                    connection.shutdown()
            passed = time.monotonic() - began
            waits = begun and passed < max(seconds, _LAST_SECONDS)
            if not waits and (not silent or passed >= min(seconds, _SILENT_SECONDS)):
                self.unanswered, self.silent = begun, silent
                return


def _have_come(sources: Sequence[socket.socket | asyncio.Transport]) -> list[Any]:
    """Those of some sockets and transports at which something waits that nobody has read."""
    poll = select.poll()
    of = {}
    for source in sources:
        if isinstance(source, socket.socket):
            number = source.fileno()
        else:
            number = -1 if source.is_closing() else source.get_extra_info("socket").fileno()
        if number >= 0:
            of[number] = source
            poll.register(number, select.POLLIN)
    return [of[number] for number, event in poll.poll(0) if event & select.POLLIN]


def _kind_of(connection: Any) -> Literal["silent", "begun", "idle"]:
    """Of a connection: nothing has come, something has come that has no answer, or neither."""
    cycle = connection.cycle
    if getattr(connection, "is_before_a_head", False):
        return "begun" if connection.has_begun else "silent"
    if cycle is None:
        return "silent"
    return "idle" if cycle.response_complete else "begun"


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """`ServerRun` does that."""
        yield


async def in_thread(work: Callable[[], Result], *, name: str) -> Result:
    """The result of work that may take long and that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def run() -> None:
        try:
            result, error = work(), None
        except BaseException as raised:
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(_settle, future, result, error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name=name, daemon=True).start()
    return await future


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


# --------------------------------------------------------------------------------------------------
# uvicorn's reading of HTTP, with limits that it does not have.

MOST_CONNECTIONS = 8192
_HEAD_SECONDS = 10.0
"""From the first byte of a request, or the beginning of a connection, to the end of its head."""
_MOST_HEAD_BYTES, _MOST_HEADERS = 16 * 2**10, 64
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


class LimitedProtocol(HttpToolsProtocol):
    """Closes connections that send a head slowly or without end, and those beyond the most."""

    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    """Of a head that has not ended, as they came."""
    _parsed_bytes = 0
    """Of a head, as the parser gives its parts: also where it came in one read."""
    _is_in_head = True
    has_begun = False
    """Whether the first byte of a request has come."""

    @property
    def is_before_a_head(self) -> bool:
        """Whether a request is expected whose head has not all come: the first one of a connection,
        or one that has begun."""
        return self._timer is not None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.close()
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._have_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Part of a request, or several."""
        if self._is_in_head and b"pgrade" in data:
            data = _without_upgrade(data)
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self.has_begun = True
        self._expect_head()

    def on_url(self, url: bytes) -> None:
        """Part of the first line."""
        self._parsed_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._parsed_bytes += len(name) + len(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The end of a head."""
        self._have_head()
        if len(self.headers) > _MOST_HEADERS or self._parsed_bytes > _MOST_HEAD_BYTES:
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


def _without_upgrade(data: bytes) -> bytes:
    """The same without the wish for another protocol, which a server may pass over (RFC 9110, 7.8).

    The parser would take the body for that protocol's: Java's client asks for h2c with every POST.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"", head) + end + rest
