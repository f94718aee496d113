"""A reward model behind addresses, in any of the protocols that reward servers speak."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx2

from laurel.config.environments import UrlProtocol
from laurel.errors import ConfigError, ProtocolError, key_of
from laurel.models.scoring import ScoringContract
from laurel.rewards.preparing import Preparing
from laurel.rewards.remote.foreign import Dialect, ForeignQuery, dialect_of
from laurel.rewards.remote.replica import Clock, RefusedError, ReplicaFault, ReplicaReply, failed
from laurel.rewards.remote.router import Router, RouterOptions
from laurel.rewards.remote.wire import VERSION_HEADER, dump, parse, read_error
from laurel.types import Completion, Conversation, Group, Score

NOT_TEXT = "text: the conversation holds half a character (a lone surrogate)"


class HttpReplica:
    """A reward server as a `Replica`."""

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
            url: Of the server, or of the endpoint itself.
            dialect: What it speaks.
            api_key: Sent as a bearer token.
            version: The version of the model that is asked for, where the protocol can say that.
            connections: At most at once.

        Raises:
            ConfigError: The address cannot be used.
        """
        self._http = HttpExchange(
            endpoint(url, dialect.path), api_key=api_key, connections=connections
        )
        self._dialect = dialect
        self.version = version

    @property
    def name(self) -> str:
        """See `Replica`."""
        return self._http.name

    @property
    def max_completions(self) -> int | None:
        """See `Replica`."""
        return self._dialect.max_completions

    async def attempt(
        self, groups: Sequence[Group], *, request_id: str, timeout: float
    ) -> ReplicaReply:
        """See `Replica`."""
        sound = [_sound(group) for group in groups]
        question = await self._question([one for one in sound if one.completions_G], request_id)
        version, value = "", None
        if question is not None and question.value is not None:
            answer = await self._http.post(question.value, request_id=request_id, timeout=timeout)
            version, value = answer.version, answer.value
        try:
            reply = question.read(value) if question is not None else ReplicaReply(scores=[])
        except ProtocolError as error:
            raise self._http.fault(error) from error
        rows = iter(reply.scores)
        scores = [
            _with_unsound(group, one, next(rows) if one.completions_G else ())
            for group, one in zip(groups, sound, strict=True)
        ]
        return ReplicaReply(scores=scores, version=reply.version or version)

    async def _question(self, groups: Sequence[Group], request_id: str) -> ForeignQuery | None:
        if not groups:
            return None
        ask = partial(self._dialect.ask, groups, request_id=request_id, version=self.version)
        return await asyncio.to_thread(ask) if self._dialect.takes_long else ask()

    async def probe(self, *, timeout: float) -> None:
        """See `Replica`. Any answer will do but one that says that it is not well."""
        await self._http.look("/health", timeout=timeout)

    async def aclose(self) -> None:
        """See `Replica`."""
        await self._http.aclose()


class HttpScorer(Router):
    """A `Scorer` over one or several servers of the same model; see `Router`.

    Example::

        scorer = HttpScorer(["http://127.0.0.1:8000"], protocol="laurel", api_key=key)
        ((score,),) = await scorer.score([group])
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        protocol: UrlProtocol = "laurel",
        api_key: str | None = None,
        contract: ScoringContract | None = None,
        model: str = "",
        reward_key: str = "",
        preparers: Preparing | None = None,
        options: RouterOptions | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Hold addresses; nothing is asked before the first score is.

        Args:
            urls: One for each server.
            protocol: What all of them speak.
            api_key: Sent as a bearer token.
            contract: See `dialect_of`.
            model: Likewise.
            reward_key: Likewise.
            preparers: Likewise. Whoever closes the scorer closes them (`close_scorer`).
            options: See `RouterOptions`.
            clock: Seconds; monotonic.

        Raises:
            ConfigError: An address or a protocol that cannot be used.
        """
        options = options or RouterOptions()
        self.preparers = preparers
        dialect = dialect_of(
            protocol, contract=contract, model=model, reward_key=reward_key, preparers=preparers
        )
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
    """The address of an endpoint, from that of its server or from its own."""
    found = checked_url(url)
    own = found.path.rstrip("/")
    if not path or own.endswith(path):
        return str(found)
    return str(found.copy_with(path=own + path))


def _is_text(conversation: Conversation) -> bool:
    try:
        for message in conversation:
            message.content.encode()
            message.role.encode()
    except UnicodeEncodeError:
        return False
    return True


def _sound(group: Group) -> Group:
    """Without the completions that cannot be sent as text."""
    if not _is_text(group.prompt):
        return Group(id=group.id, prompt=(), completions_G=())
    sound = tuple(one for one in group.completions_G if _is_text(one.messages))
    if len(sound) == len(group.completions_G):
        return group
    return Group(id=group.id, prompt=group.prompt, completions_G=sound)


def _with_unsound(group: Group, sound: Group, scores: Sequence[Score]) -> tuple[Score, ...]:
    """The scores of a group, with failures where nothing was sent."""
    sent: set[int] = set(map(id, sound.completions_G))
    left = iter(scores)

    def verdict(one: Completion) -> Score:
        return next(left) if id(one) in sent else failed(NOT_TEXT)

    return tuple(verdict(one) for one in group.completions_G)


# --------------------------------------------------------------------------------------------------
# JSON over HTTP to a server that nobody can vouch for: what it may say, and whose fault it is.

MOST_BYTES = 16 * 2**20
"""Of an answer."""
_CONNECT_SECONDS = 5.0
_KEEP_SECONDS = 4.0
"""Less than servers keep an idle connection, or requests would go into closed ones."""
_ABOUT_ONE_ITEM = (400, 413, 422)
_ABOUT_US = (401, 403, 404, 405, 407)
_ABOUT_THE_KEY = (401, 403)
"""The address or the key is wrong, whatever was asked."""
_BUSY = (429, 503)
_SHOWN = 200
"""Letters of what a server says that messages repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """What a server said with status 200."""

    value: Any
    version: str
    """Of its model; empty where it does not say."""


class HttpExchange:
    """Connections to one server. Redirects, proxies and compressed answers are refused."""

    def __init__(self, url: str, *, api_key: str | None = None, connections: int = 64) -> None:
        """Hold an address; nothing is sent yet.

        Args:
            url: Of the endpoint.
            api_key: Sent as a bearer token.
            connections: At most at once.

        Raises:
            ConfigError: Not an address of HTTP, or one with a password in it.
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
        """The address without its query, which may hold a secret; for messages."""
        return str(self.url.copy_with(query=None, fragment=None))

    async def post(self, value: Any, *, request_id: str = "", timeout: float) -> HttpAnswer:
        """Ask, once.

        Raises:
            ReplicaFault: No answer, or none that is JSON.
            RefusedError: A status that blames the request.
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
        """A reply that does not keep to its protocol, as a fault of its kind."""
        said = ascii(self._without_key(str(error))[:_SHOWN])[1:-1]
        if body and error.kind == "reply":
            said += f"; it begins {self._without_key(body.decode('utf-8', 'replace'))[:40]!a}"
        return ReplicaFault(error.kind, f"{self.name}: {said}")

    async def look(self, path: str, *, timeout: float) -> None:
        """See whether the server answers at all; it need not know the path.

        Raises:
            ReplicaFault: It does not, or says that it is not well.
        """
        url = self.url.copy_with(path=path, query=None)
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
            raise ReplicaFault("connection", f"{self.name}: {_said(error)}") from error
        except httpx2.TimeoutException as error:
            raise ReplicaFault("timeout", f"{self.name}: {_said(error)}") from error
        except httpx2.HTTPError as error:
            message = f"{self.name}: {_said(error)}"
            raise ReplicaFault("connection", message, in_mid_request=True) from error

    async def _body(self, response: httpx2.Response) -> bytes:
        coding = response.headers.get("Content-Encoding", "identity").lower()
        if coding != "identity":
            raise ReplicaFault("reply", f"{self.name} compressed its answer ({coding}) unasked")
        body = bytearray()
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > MOST_BYTES:
                raise ReplicaFault("reply", f"{self.name} answered more than {MOST_BYTES:,} bytes")
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
        """Whose fault a status is."""
        message = f"{self.name} answered {status}"
        if said := self._without_key(_reason_in(body)):
            message += f": {ascii(said[:_SHOWN])[1:-1]}"
        if status in _BUSY:
            return ReplicaFault("busy", message, retry_after=_seconds(headers.get("Retry-After")))
        if status == 408:
            return ReplicaFault("timeout", message)
        if status == 409:
            return ReplicaFault("version", message)
        if 300 <= status < 400:
            message += ": a redirect, which is not followed; name the final address"
            return ReplicaFault("4xx", message)
        if status in _ABOUT_US:
            return ReplicaFault("4xx", f"{message}; {_cure(status, has_key=bool(self._api_key))}")
        if 400 <= status < 500:
            return RefusedError(message, may_be_one_item=status in _ABOUT_ONE_ITEM)
        return ReplicaFault("5xx" if status >= 500 else "reply", message)

    def _without_key(self, said: str) -> str:
        """What a server says may hold what it was told."""
        return said.replace(self._api_key, "***") if self._api_key else said


def _cure(status: int, *, has_key: bool) -> str:
    """What whoever named the server can do about one of `_ABOUT_US`."""
    if status not in _ABOUT_THE_KEY:
        return "look at the path of its address, and whether it speaks this protocol"
    if has_key:
        return f"is what the variable of {key_of('api_key_env')} holds the key of this server?"
    return f"name the variable that holds its key in {key_of('api_key_env')}"


def checked_url(url: str) -> httpx2.URL:
    """An address, if it can be used.

    Raises:
        ConfigError: It cannot.
    """
    try:
        found = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"{_shown(url)} is no address: {error}") from error
    if found.scheme not in ("http", "https") or not found.host:
        raise ConfigError(f"{_shown(url)} is no address: it must begin with http:// or https://")
    if found.userinfo:
        raise ConfigError(
            f"the address of {found.host} has a password in it; name an environment variable that "
            "holds an API key instead"
        )
    return found


def _shown(url: str) -> str:
    """Without what may be a secret: a password, a query."""
    address = url.partition("?")[0].partition("#")[0]
    return ascii(address.rpartition("@")[2])


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _reason_in(body: bytes) -> str:
    try:
        return read_error(parse(body))
    except ProtocolError:
        return ""


def _seconds(header: str | None) -> float | None:
    """What `Retry-After` says, where it is a number of seconds."""
    if header is None or not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", header):
        return None
    return float(header)
