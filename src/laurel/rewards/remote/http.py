"""A reward model behind HTTP addresses, in any protocol of a reward server."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx2

from laurel.config.environments import checked_urls
from laurel.errors import ConfigError, ProtocolError, key_of
from laurel.rewards.preparing import Preparing, fill_in, filter_readable, is_text
from laurel.rewards.remote.dialects import Dialect, ServerQuery, dialect_of
from laurel.rewards.remote.replica import Clock, RefusedError, ReplicaFault, ReplicaReply
from laurel.rewards.remote.router import Router, RouterOptions
from laurel.rewards.remote.wire import VERSION_HEADER, dump, parse, read_error
from laurel.types import Conversation, Group

# JSON over HTTP to an untrusted server: limits of its answers, and which side is at fault.

MAX_BYTES = 16 * 2**20
"""Limit of an answer's size."""
_CONNECT_SECONDS = 5.0
# Less than servers keep an idle connection, or requests would be sent on closed ones.
_KEEP_SECONDS = 4.0
_ABOUT_ONE_ITEM = (400, 413, 422)
# The address or the key is wrong, whatever the request.
_ABOUT_CLIENT = (401, 403, 404, 405, 407)
_ABOUT_THE_KEY = (401, 403)
_BUSY = (429, 503)
_SHOWN = 200  # characters of a server's message that errors repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """Holds the answer of a server with status 200."""

    value: Any
    version: str
    """Version of the server's model; empty where it gives none."""


class HttpExchange:
    """Keeps connections to one server; refuses redirects, proxies and compressed answers."""

    def __init__(self, url: str, *, api_key: str | None = None, connections: int = 64) -> None:
        """Hold an address; nothing is sent yet.

        Args:
            api_key: Sent as a bearer token.

        Raises:
            ConfigError: Not an HTTP address, or one with a password in it.
        """
        self.url = checked_url(url)
        self._api_key = api_key
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            if not re.fullmatch(r"[!-~]+", api_key):
                raise ConfigError(f"{self.name}: the API key has blanks or is not plain ASCII")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connections = connections
        self._client: tuple[asyncio.AbstractEventLoop, httpx2.AsyncClient] | None = None

    @property
    def name(self) -> str:
        """Address without its query, which may hold a secret; for messages."""
        return str(self.url.copy_with(query=None, fragment=None))

    async def post(self, value: Any, *, request_id: str = "", timeout: float) -> HttpAnswer:
        """Send one request.

        Raises:
            ReplicaFault: There is no answer, or it is not JSON.
            RefusedError: The status says that the request is at fault.
        """
        headers = {"Content-Type": "application/json"}
        if request_id:
            headers["X-Request-Id"] = request_id
        status, found, body = await self._exchange(
            "POST", self.url, timeout=timeout, content=dump(value), headers=headers
        )
        if status != 200:
            raise self._error(status, found, body)
        try:
            return HttpAnswer(value=parse(body), version=found.get(VERSION_HEADER, ""))
        except ProtocolError as error:
            raise self.fault(error, body) from error

    def fault(self, error: ProtocolError, body: bytes = b"") -> ReplicaFault:
        """Convert a violation of the protocol into a fault of its kind."""
        message = ascii(self._without_key(str(error))[:_SHOWN])[1:-1]
        if body and error.kind == "reply":
            message += f"; it begins {self._without_key(body.decode('utf-8', 'replace'))[:40]!a}"
        return ReplicaFault(error.kind, f"{self.name}: {message}")

    async def probe(self, *, timeout: float) -> None:
        """Ask whether the server is healthy; any answer passes but one that says it is not.

        Raises:
            ReplicaFault: It does not answer, or reports that it is unhealthy.
        """
        url = self.url.copy_with(path="/health", query=None)
        status, found, body = await self._exchange("GET", url, timeout=timeout)
        if status >= 500 or status in _BUSY:
            raise self._error(status, found, body)

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        client, self._client = self._client, None
        if client is not None and client[0] is asyncio.get_running_loop():
            await client[1].aclose()

    async def _exchange(
        self, method: str, url: httpx2.URL, *, timeout: float, **content: Any
    ) -> tuple[int, httpx2.Headers, bytes]:
        limits = httpx2.Timeout(timeout, connect=min(_CONNECT_SECONDS, timeout))
        try:
            async with self._open().stream(method, url, timeout=limits, **content) as response:
                return response.status_code, response.headers, await self._body(response)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            raise ReplicaFault("connection", f"{self.name}: {_text_of(error)}") from error
        except httpx2.TimeoutException as error:
            raise ReplicaFault("timeout", f"{self.name}: {_text_of(error)}") from error
        except httpx2.HTTPError as error:
            message = f"{self.name}: {_text_of(error)}"
            raise ReplicaFault("connection", message, in_mid_request=True) from error

    async def _body(self, response: httpx2.Response) -> bytes:
        coding = response.headers.get("Content-Encoding", "identity").lower()
        if coding != "identity":
            raise ReplicaFault("reply", f"{self.name} compressed its answer ({coding}) unasked")
        body = bytearray()
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > MAX_BYTES:
                raise ReplicaFault("reply", f"{self.name} answered more than {MAX_BYTES:,} bytes")
        return bytes(body)

    def _open(self) -> httpx2.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            limits = httpx2.Limits(
                max_connections=self._connections,
                max_keepalive_connections=self._connections,
                keepalive_expiry=_KEEP_SECONDS,
            )
            client = httpx2.AsyncClient(
                headers=self._headers,
                limits=limits,
                verify=True,
                follow_redirects=False,
                trust_env=False,
            )
            self._client = loop, client
        return self._client[1]

    def _error(self, status: int, headers: httpx2.Headers, body: bytes) -> Exception:
        """Convert a status into an error of the replica or of the request."""
        message = f"{self.name} answered {status}"
        with suppress(ProtocolError):
            if reason := self._without_key(read_error(parse(body))):
                message += f": {ascii(reason[:_SHOWN])[1:-1]}"
        if status in _BUSY:
            wait = headers.get("Retry-After", "")
            is_number = re.fullmatch(r"\d{1,6}(\.\d{1,6})?", wait) is not None
            return ReplicaFault("busy", message, retry_after=float(wait) if is_number else None)
        if status == 408:
            return ReplicaFault("timeout", message)
        if status == 409:
            return ReplicaFault("version", message)
        if 300 <= status < 400:
            message += ": a redirect, which is not followed; name the final address"
            return ReplicaFault("4xx", message)
        if status in _ABOUT_CLIENT:
            if status not in _ABOUT_THE_KEY:
                cure = "look at the path of its address, and whether it speaks this protocol"
            elif self._api_key:
                cure = f"does the variable of {key_of('api_key_env')} hold the key of this server?"
            else:
                cure = f"name the variable that holds its key in {key_of('api_key_env')}"
            return ReplicaFault("4xx", f"{message}; {cure}")
        if 400 <= status < 500:
            return RefusedError(message, may_be_one_item=status in _ABOUT_ONE_ITEM)
        return ReplicaFault("5xx" if status >= 500 else "reply", message)

    def _without_key(self, text: str) -> str:
        # A server may repeat the request, and with it the key.
        return text.replace(self._api_key, "***") if self._api_key else text


def checked_url(url: str) -> httpx2.URL:
    """Parse an HTTP address.

    Raises:
        ConfigError: The address cannot be used.
    """
    try:
        checked_urls([url])
        return httpx2.URL(url)
    except (ValueError, httpx2.InvalidURL) as error:
        raise ConfigError(str(error)) from error


def _text_of(error: Exception) -> str:
    return str(error) or type(error).__name__


# A reward server as a replica, and servers of one model as a scorer.

NOT_TEXT = "text: the conversation contains an unpaired UTF-16 surrogate"


class HttpReplica(HttpExchange):
    """Asks a reward server; a `Replica` of the router."""

    def __init__(
        self,
        url: str,
        dialect: Dialect,
        *,
        api_key: str | None = None,
        version: str = "",
        connections: int = 64,
    ) -> None:
        """Hold an address.

        Args:
            url: Address of the server, or of the endpoint itself.
            version: Model version to ask for, where the protocol can name one.

        Raises:
            ConfigError: The address cannot be used.
        """
        super().__init__(endpoint(url, dialect.path), api_key=api_key, connections=connections)
        self._dialect = dialect
        self.version = version

    @property
    def max_completions(self) -> int | None:
        """Limit of completions in one request; None: no limit."""
        return self._dialect.max_completions

    async def attempt(
        self, groups: Sequence[Group], *, request_id: str, timeout: float
    ) -> ReplicaReply:
        """Score groups once; completions that are not valid text fail without being sent."""
        readable = [_sendable(group) for group in groups]
        left = [one for one, _ in readable if one.completions_G]
        question: ServerQuery | None = None
        if left:
            ask = partial(self._dialect.ask, left, request_id=request_id, version=self.version)
            question = await asyncio.to_thread(ask) if self._dialect.takes_long else ask()
        version, value = "", None
        if question is not None and question.value is not None:
            answer = await self.post(question.value, request_id=request_id, timeout=timeout)
            version, value = answer.version, answer.value
        try:
            reply = question.read(value) if question is not None else ReplicaReply(scores=[])
        except ProtocolError as error:
            raise self.fault(error) from error
        rows = iter(reply.scores)
        scores = [
            fill_in(failures, next(rows) if one.completions_G else ()) for one, failures in readable
        ]
        return ReplicaReply(scores=scores, version=reply.version or version)


class HttpScorer(Router):
    """Scores with one or several servers of the same model, as a `Router` does.

    Example::

        scorer = HttpScorer(["http://127.0.0.1:8000"], dialect_of("laurel"), api_key=key)
        ((score,),) = await scorer.score([group])
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        dialect: Dialect | None = None,
        *,
        api_key: str | None = None,
        preparers: Preparing | None = None,
        options: RouterOptions | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Hold addresses; nothing is asked before the first score is.

        Args:
            dialect: What the servers are asked, and how their answers are read; None: that of
                Laurel's own servers.
            api_key: Sent as a bearer token.
            preparers: Those of the dialect; `close_scorer` closes them with the scorer.
            clock: Returns monotonic seconds.

        Raises:
            ConfigError: An address cannot be used.
        """
        options = options or RouterOptions()
        self.preparers = preparers
        dialect = dialect or dialect_of("laurel")
        super().__init__(
            [
                HttpReplica(
                    url,
                    dialect,
                    api_key=api_key,
                    version=options.version,
                    connections=options.window + 2,
                )
                for url in dict.fromkeys([urls] if isinstance(urls, str) else urls)
            ],
            options,
            clock=clock,
        )


def endpoint(url: str, path: str) -> str:
    """Return the URL of an endpoint, given that of its server or its own."""
    found = checked_url(url)
    own = found.path.rstrip("/")
    if not path or own.endswith(path):
        return str(found)
    return str(found.copy_with(path=own + path))


def _sendable(group: Group) -> tuple[Group, tuple[str | None, ...]]:
    """Return the group of the completions that are valid text, and the failure of each."""

    def are_text(conversation: Conversation) -> bool:
        return all(is_text(one.content) and is_text(one.role) for one in conversation)

    is_whole = are_text(group.prompt)
    return filter_readable(
        group,
        lambda alone: None if is_whole and are_text(alone.completions_G[0].messages) else NOT_TEXT,
    )
