"""The reward server as an ASGI application; needs the extra `serve`."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
import re
import secrets
import time
from collections import Counter as Tally
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, get_type_hints
from urllib.parse import parse_qs

from fastapi import FastAPI, Request, Response, Security
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import Discriminator, Field, Tag, TypeAdapter
from pydantic_core import PydanticSerializationError, to_json
from starlette.exceptions import HTTPException

from laurel import __version__
from laurel.errors import ProtocolError, UserError
from laurel.extensions.server import foreign
from laurel.extensions.server.keys import (
    Keys,
    Network,
    OpenAddresses,
    Role,
    WrongKeys,
    is_loopback,
    names_a_key,
)
from laurel.extensions.server.service import (
    AccessLog,
    AnswerMemory,
    RefusedRequestError,
    RewardService,
    ScoredRequest,
    ScoringAnswer,
    State,
)
from laurel.rewards.preparing import fill_in, filter_readable
from laurel.rewards.remote.replica import failure_reason
from laurel.rewards.remote.wire import (
    MOST_ROWS,
    SCORE_PATH,
    VERSION_HEADER,
    Body,
    ErrorBody,
    ErrorFacts,
    ScoreReply,
    ScoreRequest,
    ScoringRequest,
    TooLargeError,
    dump,
    parse,
    validated,
)
from laurel.types import Group, Score

_log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CALL = "laurel.call"
"""Key of the ASGI scope that holds the `HttpCall`."""
ADMIN_PATHS = "/admin/"
"""Prefix of the paths that need a key from every address."""
HEALTH_PATH = "/health"
"""Path that needs no key."""
DOCS_PATH = "/docs"
DESCRIPTION_PATHS = (DOCS_PATH, "/openapi.json")
"""Paths that describe the API, and nothing of this server; they need no key on this machine, as
browsers cannot send one.
"""
# A client that sends a key knows that it sent one; the answers reveal nothing about the right ones.
_WHERE = "the lines that the server printed at its start say where its key is"
_NO_KEY = f"a key is needed: Authorization: Bearer KEY; {_WHERE}"
_WRONG_KEY = f"this key is not one of the server's; {_WHERE}"
# Most answers are ready before it pays to watch whether the client is still connected.
_SECONDS_BEFORE_WATCHING = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """Sets who may send requests, and how large they may be."""

    api_key: str | None
    """Key for scores; None: no key is needed."""
    admin_key: str | None = None
    """Key for `/admin` too; None: the API key is used there."""
    allow_from: tuple[Network, ...] = ()
    """Networks whose requests for scores need no key; see `OpenAddresses`."""
    hosts: tuple[str, ...] | None
    """Host names by which requests may call this server; None: any."""
    body_bytes: int = 8 * 2**20
    body_seconds: float = 15.0
    log_texts: bool = False
    """Whether the access log contains the bodies of requests."""


@dataclass(slots=True)
class HttpCall:
    """Holds one request, and what the access log says about it."""

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
    """The outermost layer of the server; the endpoints see only requests that it admits."""

    def __init__(
        self,
        api: FastAPI,
        options: GateOptions,
        *,
        access_log: AccessLog | None,
    ) -> None:
        self._api = api
        routes = [route for route in api.routes if isinstance(route, BodyRoute)]
        self._answers = {
            (method, route.path): route.answer for route in routes for method in route.methods or ()
        }
        self._options = options
        self._metrics: ServerMetrics = api.state.scoring.metrics
        self._access_log = access_log
        self._keys = Keys(options.api_key, options.admin_key)
        self._wrong_keys = WrongKeys()
        self._open_addresses = OpenAddresses(options.allow_from)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, as ASGI defines it."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served here")
        headers = dict(scope["headers"])
        client = scope.get("client")
        own_id = headers.get(b"x-request-id", b"").decode("latin-1")
        is_usable = 0 < len(own_id) <= 128 and own_id.isprintable()
        call = HttpCall(
            method=scope["method"],
            path=scope["path"],
            query=scope["query_string"].decode("latin-1"),
            headers=headers,
            client=client[0] if client else "",
            started=time.perf_counter(),
            # Not the system's randomness: asking for it lets other threads run, and takes longer
            # than the rest of the gate.
            request_id=own_id if is_usable else f"{_ORIGIN}-{next(_NUMBERS)}",
        )
        watch = _Watch(call, receive)

        async def counting(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_added_headers(call)]
            else:
                call.sent_bytes += len(message.get("body", b""))
            await send(message)

        try:
            _check_not_repeated(scope["headers"], len(call.headers))
            self._check(call)
            call.body = await self._body(call, receive)
            scope[CALL], scope["app"] = call, self._api
            watch.begin()
            answer = self._answers.get((call.method, call.path), self._api)
            await answer(scope, receive, counting)
        except (RefusedRequestError, ProtocolError) as error:
            refusal = _refusal_of(error)
            if refusal.status == 401 and (pause := self._wrong_keys.pause(call.client)):
                await asyncio.sleep(pause)
            await error_response(refusal)(scope, receive, counting)
        except asyncio.CancelledError:
            if not call.has_left:
                raise
            watch.forgive()
            call.status = 499
        except Exception as error:
            _log.error("request %s failed", call.request_id, exc_info=error)
            message = f"the server failed; its log says why under {call.request_id}"
            if not call.status:
                refusal = RefusedRequestError(500, "failed", message)
                await error_response(refusal)(scope, receive, counting)
        finally:
            watch.end()
            self._note(call)

    def _check(self, call: HttpCall) -> None:
        if not self._is_known_host(call.headers.get(b"host", b"")):
            raise RefusedRequestError(403, "host", "this server is not called by that name")
        call.role = self._keys.role_of(call.headers.get(b"authorization", b""))
        may_be_open = call.role is None and not call.path.startswith(ADMIN_PATHS)
        if may_be_open and self._open_addresses.opens(call.client, call.headers):
            # Clients without a key often send a dummy such as "EMPTY", which is ignored here.
            call.role = "score"
        is_open = call.path == HEALTH_PATH or (
            call.path in DESCRIPTION_PATHS and is_loopback(call.client)
        )
        if call.role is None and not is_open:
            header = call.headers.get(b"authorization", b"")
            raise RefusedRequestError(401, "key", _WRONG_KEY if names_a_key(header) else _NO_KEY)
        if call.path.startswith(ADMIN_PATHS):
            if not is_loopback(call.client):
                raise RefusedRequestError(403, "admin", "only this machine may send such requests")
            if call.role != "admin":
                message = "this path needs the admin key, not the API key"
                raise RefusedRequestError(403, "admin", message)

    def _is_known_host(self, header: bytes) -> bool:
        if self._options.hosts is None:
            return True
        host = header.decode("latin-1").lower()
        name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        return name in self._options.hosts

    async def _body(self, call: HttpCall, receive: Receive) -> bytes:
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

    def _note(self, call: HttpCall) -> None:
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
    """Cancels a request whose client has disconnected."""

    def __init__(self, call: HttpCall, receive: Receive) -> None:
        self._call = call
        self._receive = receive
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[None] | None = None

    def begin(self) -> None:
        loop = asyncio.get_running_loop()

        def start() -> None:
            self._watching = asyncio.ensure_future(self._watch())

        self._timer = loop.call_later(_SECONDS_BEFORE_WATCHING, start)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._call.status and self._task is not None:
            self._call.has_left = True
            self._task.cancel()

    def forgive(self) -> None:
        """Undo the cancellation, which has been handled."""
        if self._task is not None:
            self._task.uncancel()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()


def _check_not_repeated(headers: Sequence[tuple[bytes, bytes]], distinct: int) -> None:
    # Two keys are ambiguous: a proxy may have checked the other one.
    if len(headers) == distinct:
        return
    names = [name for name, _ in headers if name in _ONCE]
    for name in _ONCE:
        if names.count(name) > 1:
            message = f"the request has several {name.decode().title()} headers; send one"
            raise RefusedRequestError(400, "headers", message)


_ONCE = (b"authorization", b"host", b"content-length", b"x-request-id")


# Together an id that is unique among the requests of all servers.
_ORIGIN = secrets.token_hex(8)
_NUMBERS = itertools.count(1)


def _added_headers(call: HttpCall) -> list[tuple[bytes, bytes]]:
    headers = [
        (b"x-request-id", call.request_id.encode("latin-1")),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"no-store"),
    ]
    if call.version:
        headers.append((VERSION_HEADER.lower().encode(), call.version.encode("ascii", "replace")))
    if call.status in (408, 413):  # the rest of the body is not read
        headers.append((b"connection", b"close"))
    return headers


def error_response(refusal: RefusedRequestError) -> Response:
    """Build the answer to a refused request."""
    headers = {}
    if refusal.retry_after is not None:  # the header has whole seconds only
        headers["retry-after"] = str(max(1, math.ceil(refusal.retry_after)))
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    # Another connection may lead to another server; the rest of a slow body may never come.
    if refusal.code in ("draining", "slow"):
        headers["connection"] = "close"
    error = ErrorBody(error=ErrorFacts(code=refusal.code, message=str(refusal)))
    return Response(dump(error.model_dump()), refusal.status, headers, "application/json")


def _refusal_of(error: RefusedRequestError | ProtocolError) -> RefusedRequestError:
    if isinstance(error, RefusedRequestError):
        return error
    if isinstance(error, TooLargeError):
        return RefusedRequestError(413, "size", str(error))
    status, code = (422, "count") if error.kind == "count" else (400, "request")
    return RefusedRequestError(status, code, str(error))


async def _not_served(request: Request, error: Exception) -> Response:
    # The message lists the paths that there are.
    assert isinstance(error, HTTPException)
    shown = ascii(request.url.path[:_SHOWN_PATH])[1:-1]
    routes = [route for route in request.app.routes if isinstance(route, APIRoute)]
    methods = {
        route.path: ", ".join(route.methods or ()) for route in routes if route.include_in_schema
    }
    if error.status_code == 404:
        code = "path"
        there_are = ", ".join(f"{method} {path}" for path, method in methods.items())
        message = f"there is no {shown} here; there are: {there_are}"
    else:
        code = "method"
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{shown} takes {allowed}, not {request.method:.20}"
    response = error_response(
        RefusedRequestError(error.status_code, code, f"{message}. {DOCS_PATH} describes them")
    )
    response.headers.update(error.headers or {})
    return response


_SHOWN_PATH = 80  # characters of an unknown path in a message

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ServerMetrics:
    """Counts requests; further metrics are read when they are collected."""

    def __init__(
        self,
        paths: Iterable[str],
        *,
        counters: Callable[[], Mapping[str, float]],
        gauges: Callable[[], Mapping[str, float]],
    ) -> None:
        """Start counting.

        Args:
            paths: Paths with a label of their own in the metrics; others are `other`.
            counters: Returns further metrics that only grow, by name.
            gauges: Returns further metrics, by name.
        """
        self._paths = frozenset(paths)
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "laurel_requests",
            "Requests that were answered.",
            ("path", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "laurel_request_seconds",
            "From the head of a request to the end of its answer.",
            ("path",),
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._completions = 0
        self._failures: Tally[str] = Tally()
        self._failed = 0
        self._counters = counters
        self._gauges = gauges
        self._registry.register(self)
        self._of_path = {path: self._seconds.labels(path) for path in self._paths | {"other"}}
        self._of_status: dict[tuple[str, int], Counter] = {}

    def note(self, path: str, status: int, seconds: float, completions: int, failures: int) -> None:
        """Count one request."""
        name = path if path in self._paths else "other"
        counter = self._of_status.get((name, status))
        if counter is None:
            counter = self._of_status[name, status] = self._requests.labels(name, str(status))
        counter.inc()
        self._of_path[name].observe(seconds)
        self._completions += completions
        self._failed += failures

    def note_failures(self, reasons: Iterable[str]) -> None:
        """Count completions without a score by reason."""
        self._failures.update(reasons)

    def collect(self) -> Iterable[Metric]:
        """Yield the further metrics, for `prometheus_client`."""
        counts = {"completions": self._completions, "completions_failed": self._failed}
        for name, value in {**counts, **self._counters()}.items():
            yield CounterMetricFamily(f"laurel_{name}", f"{name} so far.", value=value)
        reasons = CounterMetricFamily("laurel_failures", "By their reason.", labels=["reason"])
        for reason, count in self._failures.items():
            reasons.add_metric([reason], count)
        yield reasons
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(f"laurel_{name}", f"{name} now.", value=value)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        return generate_latest(self._registry)


# Failures that another attempt at the same request would not change.
_OF_THE_REQUEST = ("4xx", "poison", "text", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits one request, besides the limits of its body's model."""

    completions: int = MOST_ROWS
    """Completions of all groups together."""
    values: int = 2**20
    """Numbers, texts, lists and objects of its JSON: token ids, above all."""
    nested: int = 2**17
    """Lists and objects among these: more than all messages, groups and completions need."""
    characters: int = 200_000
    """Characters of one conversation; a longer one fails, and the others are scored."""


_LARGE_BODY = 2**18  # bytes that are parsed in a few milliseconds
# Large bodies that are parsed concurrently: more would only take longer each.
_READERS = 2


class Scoring:
    """Reads requests, and answers those for scores."""

    def __init__(
        self, service: RewardService, metrics: ServerMetrics, limits: RequestLimits
    ) -> None:
        self.service = service
        self.metrics = metrics
        self._limits = limits
        self._answers = AnswerMemory()
        self._reading = asyncio.Semaphore(_READERS)

    async def read(self, call: HttpCall, kind: TypeAdapter[Any]) -> Any:
        """Read the body of a request; a large one in a thread, as other requests wait in the loop.

        Raises:
            ProtocolError: It is not a valid body.
            RefusedRequestError: It has too many groups, messages or values.
        """

        def work() -> Any:
            value = parse(call.body)
            flags = parse_qs(call.query).get("rendered") if call.query else None
            rendered = None if flags is None else flags[-1] in ("1", "true")
            body = validated(kind.validate_python, value, rendered=rendered)
            if isinstance(body, ScoringRequest):
                _ = body.as_groups  # built here, since many rows take long
            return body

        def work_beside() -> Any:
            # Parsing blocks all other threads, so the number of values is bounded first.
            values, nested = self._limits.values, self._limits.nested
            if has_more_values(call.body, values, nested):
                message = f"a request has {values:,} numbers, texts and lists at most"
                message = f"{message}, and {nested:,} of these may be lists and objects"
                raise RefusedRequestError(413, "size", message)
            return work()

        if len(call.body) <= _LARGE_BODY:
            return work()
        async with self._reading:
            return await asyncio.to_thread(work_beside)

    async def answer(self, call: HttpCall, body: ScoreRequest) -> Response:
        """Answer in Laurel's form: whole groups, each completion with its score or its failure."""

        async def make() -> ScoringAnswer:
            groups = body.as_groups
            scored = await self._scored(call, groups, version=body.model_version)
            about = {"model": scored.model.name, "model_version": scored.model.version}
            reply = ScoreReply.of(groups, scored.scores, **about, request_id=body.request_id)
            return _answer(reply, scored)

        return await self._once(call, body.request_id, make)

    async def answer_foreign(self, call: HttpCall, body: foreign.ForeignRequest) -> Response:
        """Answer in another project's form, which has no failures: all scores, or an error."""

        async def make() -> ScoringAnswer:
            scored = await self._scored(call, body.as_groups)
            scores = [score for scores_G in scored.scores for score in scores_G]
            values = [_value_of(score, index) for index, score in enumerate(scores)]
            facts = foreign.ScoredRows(
                scores=values,
                num_tokens=[score.num_tokens for score in scores],
                model=scored.model.name,
                request_id=call.request_id,
                created=int(time.time()),
            )
            try:
                return _answer(body.reply(facts), scored)
            except OverflowError as error:
                message = "a score exceeds float32, the type of base64; ask for "
                message += "'encoding_format' float"
                raise RefusedRequestError(422, "failed", message) from error

        return await self._once(call, "", make)

    async def _once(
        self,
        call: HttpCall,
        request_id: str,
        make: Callable[[], Coroutine[Any, Any, ScoringAnswer]],
    ) -> Response:
        """Return an answer; the stored one where the client repeats a request with its id."""
        request_id = request_id or call.headers.get(b"x-request-id", b"").decode("latin-1")
        if request_id:
            content = f"{call.path}?{call.query}\0".encode() + call.body
            digest = hashlib.blake2b(content, digest_size=16).digest()
            answer = await self._answers.once(request_id, digest, make)
        else:
            answer = await make()
        call.version = answer.version
        return Response(answer.body, media_type="application/json")

    async def _scored(
        self, call: HttpCall, groups: Sequence[Group], *, version: str = ""
    ) -> ScoredRequest:
        call.completions = sum(len(group.completions_G) for group in groups)
        if call.completions > self._limits.completions:
            message = f"a request has {self._limits.completions:,} completions at most"
            raise RefusedRequestError(413, "size", message)
        most = self._limits.characters
        if len(call.body) <= most:
            scored = await self.service.score(groups, version=version)
        else:
            read = [_without_too_long(group, most) for group in groups]
            scored = await self.service.score([group for group, _ in read], version=version)
            scores = [fill_in(why, row) for (_, why), row in zip(read, scored.scores, strict=True)]
            scored = replace(scored, scores=scores)
        failures = [
            score.failure
            for scores_G in scored.scores
            for score in scores_G
            if score.failure is not None
        ]
        if failures:
            call.failures = len(failures)
            self.metrics.note_failures(map(failure_reason, failures))
        return scored


def _answer(reply: Any, scored: ScoredRequest) -> ScoringAnswer:
    try:
        text = to_json(reply)
    except PydanticSerializationError:  # an unpaired surrogate in a group's id
        text = dump(reply.model_dump())
    return ScoringAnswer(text, version=scored.model.version)


def _value_of(score: Score, index: int) -> float:
    if score.failure is not None:
        message = f"conversation {index}: {score.failure}"
        if failure_reason(score.failure) in _OF_THE_REQUEST:
            raise RefusedRequestError(422, "failed", message)
        raise RefusedRequestError(503, "failed", message, retry_after=1.0)
    assert score.value is not None
    return score.value


def _without_too_long(group: Group, most: int) -> tuple[Group, tuple[str | None, ...]]:
    """Return the group of the conversations that are short enough, and the failure of each."""
    prompt = sum(len(message.content) for message in group.prompt)

    def why_not(alone: Group) -> str | None:
        (completion,) = alone.completions_G
        length = prompt + sum(len(message.content) for message in completion.messages)
        if length <= most:
            return None
        return f"4xx: {length:,} characters; a conversation has {most:,} at most"

    return filter_readable(group, why_not)


# The endpoints. /docs and /openapi.json show their signatures and docstrings.


class BodyRoute(APIRoute):
    """Documents an endpoint with FastAPI, and reads its body with `Scoring`."""

    # FastAPI's own way to an endpoint parses bodies in the event loop, where one of some megabytes
    # blocks all others, and accepts NaN and repeated keys. Its router, middleware and handler cost
    # each request 60 us, where all else here, with a scorer that takes no time, costs 75. So the
    # gate calls these routes itself, and FastAPI for the rest: the description, and unknown paths.

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        form = get_type_hints(endpoint, include_extras=True).get("body")
        self._kind = None if form is None else TypeAdapter(form)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI defines it."""
        request = Request(scope)
        body = []
        if self._kind is not None:
            scoring: Scoring = request.app.state.scoring
            body = [await scoring.read(scope[CALL], self._kind)]
        response: Response = await self.endpoint(request, *body)
        await response(scope, receive, send)


class ModelBody(Body):
    """The model that is served."""

    id: str
    object: Literal["model"] = "model"
    owned_by: str = "laurel"
    version: str


class ModelsReply(Body):
    """The models in OpenAI's form."""

    object: Literal["list"] = "list"
    data: list[ModelBody]


class StateReply(Body):
    """The state of the server, and the model, once it has one."""

    state: State
    model: str = Field(default="", exclude_if=lambda model: not model)
    model_version: str = Field(default="", exclude_if=lambda version: not version)


class LoadRequest(Body):
    """A request to serve another model."""

    model: str = Field(description="A directory on this machine")


# pydantic puts the tags into the places of errors, where they must not look like keys of the body.
EitherScoreRequest = Annotated[
    Annotated[ScoreRequest, Tag("its groups")] | Annotated[foreign.PairsRequest, Tag("its pairs")],
    Discriminator(lambda value: "its pairs" if foreign.names_pairs(value) else "its groups"),
]


async def score_groups(request: Request, body: EitherScoreRequest) -> Response:
    """Score whole groups; a prompt and its completions are one group.

    A completion without a score has a failure that says why, and the others are not affected. An
    empty list, here and wherever a path takes a list to score, is answered with an empty list. A
    `request_id` that comes again with the same request gets the same answer. With a
    `model_version`, a server of another version refuses the request. vLLM's pairs are answered
    here, too; see `/score`.
    """
    if not isinstance(body, ScoreRequest):
        return await _answer_foreign(request, body)
    scoring: Scoring = request.app.state.scoring
    return await scoring.answer(request.scope[CALL], body)


async def classify(request: Request, body: foreign.ClassifyRequest) -> Response:
    """Score conversations as vLLM's and SGLang's `/classify` do.

    With `input` or `messages` it is vLLM's, whose answer is the sigmoid of the score unless
    `use_activation` (once `activation`, and before that `softmax`) is false. With `text` or
    `input_ids` it is SGLang's, whose answer is the score.
    """
    return await _answer_foreign(request, body)


async def pooling(request: Request, body: foreign.PoolingRequest) -> Response:
    """Score conversations as vLLM's `/pooling` does.

    The request is that of `/classify` with `input` or `messages`. `base64` is of float32,
    little-endian.
    """
    return await _answer_foreign(request, body)


async def score_pairs(request: Request, body: foreign.PairsRequest) -> Response:
    """Score pairs as vLLM's `/score` does.

    A query is a message of the user, and a document the answer to score; send one query and its
    documents, or as many of both. The answer is the sigmoid of the score unless `use_activation` is
    false. `/v1/score` answers the same, and distinguishes Laurel's own form by its `groups`.
    """
    return await _answer_foreign(request, body)


async def embeddings(request: Request, body: foreign.EmbeddingsRequest) -> Response:
    """Score conversations as SGLang's and OpenAI's `/v1/embeddings` do.

    The embedding of a conversation is its score. OpenAI's client asks for `base64`, which is of
    float32, little-endian.
    """
    return await _answer_foreign(request, body)


async def get_reward(
    request: Request, body: foreign.GetRewardRequest, rendered: Literal["0", "1"] | None = None
) -> Response:
    """Score conversations as OpenRLHF's remote reward model does.

    `query` has whole conversations. One that begins with its entry of `prompts` is scored as
    `/remote_rm` scores that prompt and the rest; any other counts as rendered.
    """
    return await _answer_foreign(request, body)


async def remote_rm(
    request: Request, body: foreign.RemoteRmRequest, rendered: Literal["0", "1"] | None = None
) -> Response:
    """Score a response as slime's `remote_rm` does.

    The answer is the score. A prompt that is a text counts as rendered where it ends with the
    model's request for an answer, and otherwise as a message of the user; with marks of a template
    elsewhere it is refused, unless `?rendered=1` or `?rendered=0` says which it is.
    """
    return await _answer_foreign(request, body)


async def _answer_foreign(request: Request, body: foreign.ForeignRequest) -> Response:
    scoring: Scoring = request.app.state.scoring
    return await scoring.answer_foreign(request.scope[CALL], body)


async def health(request: Request) -> Response:
    """Report whether the process is alive and can still become ready; needs no key."""
    is_lost = _service(request).is_lost
    return Response(b"{}", 503 if is_lost else 200, media_type="application/json")


async def ready(request: Request) -> Response:
    """Report whether the server takes requests."""
    service = _service(request)
    if service.served is not None:
        request.scope[CALL].version = service.served.version
    return _state(request, status=200 if service.state == "ready" else 503)


async def models(request: Request) -> Response:
    """List the model that is served, in OpenAI's form."""
    served = _service(request).served
    data = [] if served is None else [ModelBody(id=served.name, version=served.version)]
    return Response(to_json(ModelsReply(data=data)), media_type="application/json")


async def metrics(request: Request) -> Response:
    """Return the metrics for Prometheus."""
    scoring: Scoring = request.app.state.scoring
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return Response(scoring.metrics.text(), media_type=kind)


async def sleep(request: Request) -> Response:
    """Finish accepted requests, and free the memory of devices."""
    await _service(request).sleep()
    return _state(request)


async def wake(request: Request) -> Response:
    """Take requests again."""
    await _service(request).wake()
    return _state(request)


async def load(request: Request, body: LoadRequest) -> Response:
    """Serve the model of another directory once it has reproduced its golden scores."""
    try:
        await _service(request).load(body.model)
    except (UserError, OSError) as error:
        raise RefusedRequestError(422, "model", str(error)) from error
    return _state(request)


def _service(request: Request) -> RewardService:
    scoring: Scoring = request.app.state.scoring
    return scoring.service


def _state(request: Request, status: int = 200) -> Response:
    service = _service(request)
    about = {}
    if service.served is not None:
        about = {"model": service.served.name, "model_version": service.served.version}
    reply = StateReply(state=service.state, **about)
    return Response(to_json(reply), status, media_type="application/json")


_SCORES: dict[str, tuple[Callable[..., Any], Any]] = {
    SCORE_PATH: (score_groups, ScoreReply | foreign.PairsReply),
    foreign.CLASSIFY_PATH: (
        classify,
        foreign.ClassifyReply | foreign.NativeReply | list[foreign.NativeReply],
    ),
    foreign.POOLING_PATH: (pooling, foreign.PoolingReply),
    foreign.PAIRS_PATH: (score_pairs, foreign.PairsReply),
    foreign.EMBEDDINGS_PATH: (embeddings, foreign.EmbeddingsReply),
    foreign.GET_REWARD_PATH: (get_reward, foreign.GetRewardReply),
    foreign.REMOTE_RM_PATH: (remote_rm, float),
}
_LOOKS: dict[str, tuple[Callable[..., Any], Any]] = {
    HEALTH_PATH: (health, dict[str, Any]),
    "/ready": (ready, StateReply),
    "/v1/models": (models, ModelsReply),
    "/metrics": (metrics, None),
}
_ADMIN: dict[str, tuple[Callable[..., Any], Any]] = {
    "/admin/sleep": (sleep, StateReply),
    "/admin/wake": (wake, StateReply),
    "/admin/load": (load, StateReply),
}
_REFUSALS = {
    400: "Not the JSON that this page describes",
    401: "No key, or one that is not the server's; the message says which",
    403: "Another host name, or a path that needs this machine and the admin key",
    408: "The body did not come in time",
    409: "Not the requested version, or another change of state is running",
    413: "Too large",
    415: "Not `application/json`, or compressed",
    422: "A conversation that cannot be scored where the format has no place for that, a request "
    "id that another request had, or a model that cannot be used",
    429: "The queue is full: see `Retry-After`",
    503: "Not ready, or not in time: see `Retry-After`",
}


def make_api(
    service: RewardService,
    *,
    needs_key: bool,
    limits: RequestLimits | None = None,
    access_log: AccessLog | None = None,
) -> FastAPI:
    """Build the endpoints and their description; `make_app` adds the gate."""
    api = FastAPI(
        title="Laurel reward server",
        version=__version__,
        docs_url=DOCS_PATH,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        exception_handlers={HTTPException: _not_served},
    )
    metrics_of = ServerMetrics(
        [*_SCORES, *_LOOKS, *_ADMIN, DOCS_PATH],
        counters=partial(_counters, service, access_log),
        gauges=partial(_gauges, service),
    )
    api.state.scoring = Scoring(service, metrics_of, limits or RequestLimits())
    api.router.route_class = BodyRoute
    refusals: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody, "description": text} for status, text in _REFUSALS.items()
    }
    success: dict[int | str, dict[str, Any]] = {
        200: {"headers": {VERSION_HEADER: {"schema": {"type": "string"}}}}
    }
    key = [Security(HTTPBearer(auto_error=False))] if needs_key else []
    for path, (endpoint, reply) in (_SCORES | _ADMIN).items():
        api.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            tags=["scores" if path in _SCORES else "admin"],
            response_model=reply,
            responses=success | refusals,
            dependencies=key,
        )
    for path, (endpoint, reply) in _LOOKS.items():
        api.add_api_route(
            path,
            endpoint,
            methods=["GET"],
            tags=["looks"],
            response_model=reply,
            response_class=JSONResponse if reply is not None else Response,
            responses={
                200: {} if reply is not None else {"content": {"text/plain": {}}},
                **{status: refusals[status] for status in (401, 403)},
                503: {"model": reply, "description": "It is not ready"},
            },
            dependencies=key if path != HEALTH_PATH else [],
        )
        api.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
    return api


def make_app(
    service: RewardService,
    options: GateOptions,
    *,
    limits: RequestLimits | None = None,
    access_log: AccessLog | None = None,
) -> App:
    """Build the server."""
    needs_key = options.api_key is not None or options.admin_key is not None
    api = make_api(service, needs_key=needs_key, limits=limits, access_log=access_log)
    return Gate(api, options, access_log=access_log)


# Statistics of a scorer that do not only grow, and their names as metrics.
_GAUGES = {"waiting": "completions_waiting", "ready": "replicas_ready"}


def _counters(service: RewardService, access_log: AccessLog | None) -> dict[str, float]:
    scorer = _scorer_stats(service)
    counters = {f"scorer_{name}": count for name, count in scorer.items() if name not in _GAUGES}
    if access_log is not None:
        counters["access_log_lines_lost"] = access_log.dropped
    return counters


def _gauges(service: RewardService) -> dict[str, float]:
    gauges: dict[str, float] = {"ready": float(service.state == "ready")}
    if service.served is not None:
        gauges["requests_in_flight"] = service.served.in_flight
    scorer = _scorer_stats(service)
    return gauges | {metric: scorer[name] for name, metric in _GAUGES.items() if name in scorer}


def _scorer_stats(service: RewardService) -> dict[str, float]:
    stats: Any = getattr(service.served and service.served.scorer, "stats", None)
    if stats is None:
        return {}
    return asdict(stats())


_BEGINS_A_VALUE = re.compile(rb'[,\[{]|"[^"\\]*+(?:\\.[^"\\]*+)*+"')


def has_more_values(body: bytes, most: int, most_nested: int) -> bool:
    """Whether a JSON text exceeds limits of its values, and of its lists and objects.

    Commas and opening brackets are counted, of which there is about one for each value. Only if
    they are too many is the text searched for those outside of strings. Other threads can run
    during that search, but not while the text is parsed.

    Args:
        most: Limit of numbers, strings, lists and objects together.
        most_nested: Limit of lists and objects, each of which takes ten times as long to parse as a
            number.
    """
    nested = body.count(b"[") + body.count(b"{")
    if nested <= most_nested and nested + body.count(b",") <= most:
        return False
    found = nested = 0
    for piece in _BEGINS_A_VALUE.finditer(body):
        sign = piece[0]
        if len(sign) == 1:  # a string has at least two
            found += 1
            nested += sign != b","
        if found > most or nested > most_nested:
            return True
    return False
