"""A reward server as an ASGI application. Importing this needs the extra `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import math
import secrets
import time
from collections import Counter as Tally
from collections.abc import (
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qs

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.exceptions import HTTPException
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response
from starlette.routing import Route

from laurel.errors import ProtocolError, UserError
from laurel.rewards.remote import foreign
from laurel.rewards.remote.replica import failed, failure_reason
from laurel.rewards.remote.wire import (
    MISSING,
    SCORE_PATH,
    VERSION_HEADER,
    ScoreReply,
    ScoreRequest,
    dump,
    error_json,
    expect_object,
    expect_text,
    has_more_values,
    parse,
    read_score_request,
    score_reply,
)
from laurel.rewards.server.keys import (
    Keys,
    Network,
    OpenAddresses,
    Role,
    WrongKeys,
    is_loopback,
    names_a_key,
)
from laurel.rewards.server.openapi import docs_page, openapi_document
from laurel.rewards.server.service import (
    AccessLog,
    AnswerMemory,
    RefusedRequestError,
    RewardService,
    ScoredRequest,
    ScoringAnswer,
)
from laurel.types import Group, Score

# --------------------------------------------------------------------------------------------------
# What every request must pass before anybody reads it: host, key, size, time; and its log line.

_log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CALL = "laurel.call"
"""Key of the scope that has the `HttpCall`."""
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
class HttpCall:
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
            told = answer_of_error(call, error)
            if not call.status:
                await respond_error(counting, told)
        finally:
            watch.end()
            self._note(call)

    def _check(self, call: HttpCall) -> None:
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

    async def _body(self, call: HttpCall, receive: Receive) -> bytes:
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
    """Cancels a request whose client has gone."""

    def __init__(self, call: HttpCall, receive: Receive) -> None:
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


def _call_of(scope: Scope) -> HttpCall:
    headers = dict(scope["headers"])
    client = scope.get("client")
    wanted = headers.get(b"x-request-id", b"").decode("latin-1")
    return HttpCall(
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


def _headers_of(call: HttpCall) -> list[tuple[bytes, bytes]]:
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


def answer_of_error(call: HttpCall, error: Exception) -> RefusedRequestError:
    """What a client is told of an error that is ours; the log is told all of it."""
    _log.error("request %s failed", call.request_id, exc_info=error)
    message = f"the server failed; its log says why under {call.request_id}"
    return RefusedRequestError(500, "failed", message)


async def respond(send: Send, answer: ScoringAnswer, *headers: tuple[bytes, bytes]) -> None:
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
    await respond(send, ScoringAnswer(body, status=refusal.status), *headers)


Handler = Callable[[HttpCall], Awaitable[ScoringAnswer]]
_HTML = b"text/html; charset=utf-8"
_MOST_OF_A_PATH = 80
"""Characters of a path that there is not, in a message."""
_GAUGES = {"waiting": "completions_waiting", "ready": "replicas_ready"}
"""Figures of a scorer that do not only grow, and what they are called."""


def make_app(
    service: RewardService,
    options: GateOptions,
    *,
    limits: RequestLimits | None = None,
    access_log: AccessLog | None = None,
) -> App:
    """The whole server.

    Args:
        service: What it serves; it may still be without a model.
        options: Who may ask.
        limits: See there.
        access_log: Where requests are noted; None: nowhere.
    """
    endpoints = Endpoints(service, limits or RequestLimits())
    scores: dict[str, Handler] = {
        SCORE_PATH: endpoints.score,
        foreign.CLASSIFY_PATH: endpoints.classify,
        foreign.POOLING_PATH: endpoints.pooling,
        foreign.PAIRS_PATH: endpoints.pairs,
        foreign.EMBEDDINGS_PATH: endpoints.embeddings,
        foreign.GET_REWARD_PATH: endpoints.get_reward,
        foreign.REMOTE_RM_PATH: endpoints.remote_rm,
    }
    looks: dict[str, Handler] = {
        HEALTH_PATH: endpoints.health,
        "/ready": endpoints.ready,
        "/v1/models": endpoints.models,
        "/metrics": endpoints.metrics,
    }
    admin: dict[str, Handler] = {
        "/admin/sleep": endpoints.sleep,
        "/admin/wake": endpoints.wake,
        "/admin/load": endpoints.load,
    }
    needs_key = options.api_key is not None or options.admin_key is not None
    app = FastAPI(title="Laurel reward server", docs_url=None, redoc_url=None)
    page = ScoringAnswer(docs_page(openapi_document(needs_key=needs_key)), content_type=_HTML)

    async def docs(_: HttpCall) -> ScoringAnswer:
        return page

    looks[DOCS_PATH] = docs
    app.router.routes[:0] = [  # before the description: these are asked most
        *_routes(scores, "POST"),
        *_routes(looks, "GET"),
        *_routes(admin, "POST", is_admin=True),
    ]
    setattr(app, "openapi", partial(openapi_document, needs_key=needs_key))  # noqa: B010  (a method)
    methods = {**dict.fromkeys(scores, "POST"), **dict.fromkeys(looks, "GET")}
    methods |= dict.fromkeys(admin, "POST")
    app.add_exception_handler(HTTPException, partial(_not_served, methods))
    metrics = endpoints.figures = ServerMetrics(
        [*scores, *looks, *admin],
        counters=partial(_counters, service, access_log),
        gauges=partial(_gauges, service),
    )
    return Gate(app, options, metrics=metrics, access_log=access_log)


def _routes(handlers: dict[str, Handler], method: str, *, is_admin: bool = False) -> list[Route]:
    return [
        Route(path, _Endpoint(handler, is_admin=is_admin), methods=[method])
        for path, handler in handlers.items()
    ]


class _Endpoint:
    """One endpoint as ASGI: a handler, and its errors as answers."""

    def __init__(self, handler: Handler, *, is_admin: bool) -> None:
        self._handler = handler
        self._is_admin = is_admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: HttpCall = scope[CALL]
        try:
            if self._is_admin:
                _check_admin(call)
            answer = await self._handler(call)
        except ProtocolError as error:
            await respond_error(send, RefusedRequestError(400, "request", str(error)))
        except RefusedRequestError as refusal:
            await respond_error(send, refusal)
        except Exception as error:
            await respond_error(send, answer_of_error(call, error))
        else:
            call.version = answer.version
            await respond(send, answer)


async def _not_served(
    methods: Mapping[str, str], request: StarletteRequest, error: Exception
) -> Response:
    """No such path, or another method; says which there are."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        code = "path"
        there_are = ", ".join(f"{method} {path}" for path, method in methods.items())
        said = f"there is no {_shown(request)} here; there are: {there_are}"
    else:
        code = "method"
        wanted = (error.headers or {}).get("Allow", methods.get(request.url.path, ""))
        said = f"{_shown(request)} takes {wanted or 'another method'}, not {request.method:.20}"
    said += f". {DOCS_PATH} describes them"
    return Response(
        dump(error_json(code, said)), error.status_code, error.headers, "application/json"
    )


def _shown(request: StarletteRequest) -> str:
    """The path that was asked, as much as fits into a message."""
    return ascii(request.url.path[:_MOST_OF_A_PATH])[1:-1]


def _check_admin(call: HttpCall) -> None:
    """Whether who asks may change the server."""
    if not is_loopback(call.client):
        raise RefusedRequestError(403, "admin", "only this machine may ask that")
    if call.role != "admin":
        raise RefusedRequestError(403, "admin", "that needs the admin key, and not the API key")


def _counters(service: RewardService, access_log: AccessLog | None) -> dict[str, float]:
    scorer = _of_the_scorer(service)
    found = {f"scorer_{name}": count for name, count in scorer.items() if name not in _GAUGES}
    if access_log is not None:
        found["access_log_lines_lost"] = access_log.dropped
    return found


def _gauges(service: RewardService) -> dict[str, float]:
    found: dict[str, float] = {"ready": float(service.state == "ready")}
    if service.served is not None:
        found["requests_in_flight"] = service.served.in_flight
    scorer = _of_the_scorer(service)
    return found | {told: scorer[name] for name, told in _GAUGES.items() if name in scorer}


def _of_the_scorer(service: RewardService) -> dict[str, float]:
    """What the scorer counts, if it counts."""
    stats: Any = getattr(service.served and service.served.scorer, "stats", None)
    if stats is None:
        return {}
    return asdict(stats())


# --------------------------------------------------------------------------------------------------
# Figures of a reward server for Prometheus.

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ServerMetrics:
    """Counts requests; all else is asked for when somebody looks."""

    def __init__(
        self,
        paths: Iterable[str],
        *,
        counters: Callable[[], Mapping[str, float]],
        gauges: Callable[[], Mapping[str, float]],
    ) -> None:
        """Begin to count.

        Args:
            paths: Those that have a name of their own in the figures; others are `other`.
            counters: Further figures that only grow, by name.
            gauges: Further figures, by name.
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
        """Count completions without a score by why they have none."""
        self._failures.update(reasons)

    def collect(self) -> Iterable[Metric]:
        """What `prometheus_client` asks for."""
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
        """All figures in Prometheus' format."""
        return generate_latest(self._registry)


# --------------------------------------------------------------------------------------------------
# What is done with each request that the gate lets in: the body in, the answer out.
#
# Bodies are read by `wire` and `foreign_wire`, not by a validator, which would take longer than all
# the rest; `description` says the same for people and generated clients.

_OF_THE_REQUEST = ("4xx", "poison", "text", "other")
"""Reasons of failures for which another try would be in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """How much one request may ask."""

    completions: int = 4096
    groups: int = 4096
    """Also of those without a completion: each takes time to read."""
    messages: int = 65_536
    """Of all conversations together."""
    values: int = 2**20
    """Numbers, texts, lists and objects of its JSON: token ids, above all."""
    nested: int = 2**17
    """Lists and objects among these: more than all messages, groups and completions need."""
    characters: int = 200_000
    """Of one conversation; a longer one has failed, and the others are scored."""


_LARGE_BODY = 2**18
"""Bytes that are read in some milliseconds."""
_READERS = 2
"""Large bodies that are read at a time: more would only take longer each."""
Request = TypeVar("Request")


class Endpoints:
    """The handlers. Each takes a call and gives an answer, or raises what becomes an error."""

    figures: ServerMetrics

    def __init__(self, service: RewardService, limits: RequestLimits) -> None:
        self._service = service
        self._limits = limits
        self._answers = AnswerMemory()
        self._reading = asyncio.Semaphore(_READERS)

    # -------------------------------------------------------------------------------- scores

    async def score(self, call: HttpCall) -> ScoringAnswer:
        """Our own: whole groups; or vLLM's, which is known by its keys."""
        request = await self._read(call, _read_either_score_request)
        if isinstance(request, foreign.ForeignRequest):
            return await self._pairs(call, request)

        async def answer() -> ScoringAnswer:
            scored = await self._scored(call, request.groups, version=request.model_version)
            reply = ScoreReply(
                scores=tuple(scored.scores),
                model=scored.model.name,
                model_version=scored.model.version,
                request_id=request.request_id,
            )
            return _answer(score_reply(request.groups, reply), scored)

        return await self._once(call, request.request_id, answer)

    async def classify(self, call: HttpCall) -> ScoringAnswer:
        """vLLM's, and SGLang's of the same name."""
        request = await self._read(call, foreign.read_classify_request)

        async def answer() -> ScoringAnswer:
            scores, scored = await self._values(call, request)
            counts = [score.num_tokens for score in scores]
            values = _maybe_squashed(scores, request)
            if request.is_native:
                is_list = request.is_list
                reply = foreign.native_classify_reply(values, counts, is_list=is_list)
                return _answer(reply, scored)
            reply = foreign.classify_reply(
                values,
                request_id=call.request_id,
                created=int(time.time()),
                model=scored.model.name,
                num_tokens=sum(counts),
            )
            return _answer(reply, scored)

        return await self._once(call, "", answer)

    async def pooling(self, call: HttpCall) -> ScoringAnswer:
        """vLLM's; of a reward model it gives what `/classify` gives."""
        request = await self._read(call, foreign.read_pooling_request)

        async def answer() -> ScoringAnswer:
            scores, scored = await self._values(call, request)
            with _in_float32():
                reply = foreign.pooling_reply(
                    _maybe_squashed(scores, request),
                    as_base64=request.as_base64,
                    request_id=call.request_id,
                    created=int(time.time()),
                    model=scored.model.name,
                    num_tokens=_num_tokens(scores),
                )
            return _answer(reply, scored)

        return await self._once(call, "", answer)

    async def pairs(self, call: HttpCall) -> ScoringAnswer:
        """vLLM's `/score`: queries, which the user says, and documents, which are the answers."""
        return await self._pairs(call, await self._read(call, _read_pairs_request))

    async def _pairs(self, call: HttpCall, request: foreign.ForeignRequest) -> ScoringAnswer:
        async def answer() -> ScoringAnswer:
            scores, scored = await self._values(call, request)
            reply = foreign.pairs_reply(
                _maybe_squashed(scores, request),
                request_id=call.request_id,
                created=int(time.time()),
                model=scored.model.name,
                num_tokens=_num_tokens(scores),
            )
            return _answer(reply, scored)

        return await self._once(call, "", answer)

    async def embeddings(self, call: HttpCall) -> ScoringAnswer:
        """SGLang's form of OpenAI's."""
        request = await self._read(call, foreign.read_embeddings_request)

        async def answer() -> ScoringAnswer:
            scores, scored = await self._values(call, request)
            with _in_float32():
                reply = foreign.embeddings_reply(
                    [_number(score) for score in scores],
                    model=scored.model.name,
                    num_tokens=_num_tokens(scores),
                    as_base64=request.as_base64,
                )
            return _answer(reply, scored)

        return await self._once(call, "", answer)

    async def get_reward(self, call: HttpCall) -> ScoringAnswer:
        """OpenRLHF's."""
        request = await self._read(call, foreign.read_get_reward_request)

        async def answer() -> ScoringAnswer:
            scores, scored = await self._values(call, request)
            values = [_number(score) for score in scores]
            return _answer(foreign.get_reward_reply(values), scored)

        return await self._once(call, "", answer)

    async def remote_rm(self, call: HttpCall) -> ScoringAnswer:
        """slime's; `?rendered=1` or `0` says whether a prompt that is a text has been rendered."""
        said = parse_qs(call.query).get("rendered")
        is_rendered = None if said is None else said[-1] in ("1", "true")
        request = await self._read(
            call, partial(foreign.read_remote_rm_request, rendered=is_rendered)
        )

        async def answer() -> ScoringAnswer:
            scores, scored = await self._values(call, request)
            return _answer(_number(scores[0]), scored)

        return await self._once(call, "", answer)

    async def _read(self, call: HttpCall, read: Callable[[Any], Request]) -> Request:
        """The request in a body. A large one is read beside the event loop, for others wait there.

        Raises:
            ProtocolError: It is none.
            RefusedRequestError: It has too many groups, messages or values.
        """

        def work() -> Request:
            value = parse(call.body)
            self._check_counts(value)
            return read(value)

        def work_beside() -> Request:
            # Parsing is one step for all other threads, so its length is bounded first.
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

    def _check_counts(self, value: Any) -> None:
        """Refuse what would take long to read, by its lists alone; other faults are found later."""
        limits = self._limits
        groups = value.get("groups") if isinstance(value, dict) else None
        groups = groups if isinstance(groups, list) else [value]
        if len(groups) > limits.groups:
            raise RefusedRequestError(
                413, "size", f"a request has {limits.groups:,} groups at most"
            )
        if isinstance(value, dict) and any(
            len(rows) > limits.completions for key, rows in value.items() if _are_rows(key, rows)
        ):
            raise self._too_many_completions()
        if sum(map(_num_messages, groups)) > limits.messages:
            message = f"a request has {limits.messages:,} messages at most"
            raise RefusedRequestError(413, "size", message)

    def _too_many_completions(self) -> RefusedRequestError:
        message = f"a request has {self._limits.completions:,} completions at most"
        return RefusedRequestError(413, "size", message)

    async def _once(
        self, call: HttpCall, request_id: str, answer: Callable[[], Awaitable[ScoringAnswer]]
    ) -> ScoringAnswer:
        """An answer; the same one where the client has named its request and asks again."""
        request_id = request_id or call.headers.get(b"x-request-id", b"").decode("latin-1")
        if not request_id:
            return await answer()
        asked = f"{call.path}?{call.query}\0".encode() + call.body
        digest = hashlib.blake2b(asked, digest_size=16).digest()
        return await self._answers.once(request_id, digest, answer)

    async def _values(
        self, call: HttpCall, request: foreign.ForeignRequest
    ) -> tuple[Sequence[Score], ScoredRequest]:
        """The scores of a request that has no place for a failure: all, or an error."""
        scored = await self._scored(call, request.groups or [request.rendered])
        scores = [score for scores_G in scored.scores for score in scores_G]
        for index, score in enumerate(scores):
            if score.failure is not None:
                message = f"conversation {index}: {score.failure}"
                if failure_reason(score.failure) in _OF_THE_REQUEST:
                    raise RefusedRequestError(422, "failed", message)
                raise RefusedRequestError(503, "failed", message, retry_after=1.0)
        return scores, scored

    async def _scored(
        self, call: HttpCall, groups: Sequence[Group], *, version: str = ""
    ) -> ScoredRequest:
        call.completions = sum(len(group.completions_G) for group in groups)
        if call.completions > self._limits.completions:
            raise self._too_many_completions()
        too_long: Mapping[tuple[int, int], Score] = {}
        if len(call.body) > self._limits.characters:
            groups, too_long = _without_too_long(groups, self._limits.characters)
        scored = await self._service.score(groups, version=version)
        if too_long:
            scored = replace(scored, scores=_with(scored.scores, too_long))
        failures = [
            score.failure
            for scores_G in scored.scores
            for score in scores_G
            if score.failure is not None
        ]
        if failures:
            call.failures = len(failures)
            self.figures.note_failures(map(failure_reason, failures))
        return scored

    # --------------------------------------------------------------------------------- looks

    async def health(self, call: HttpCall) -> ScoringAnswer:
        """That it lives, and can still become ready."""
        return ScoringAnswer(b"{}", status=503 if self._service.is_lost else 200)

    async def ready(self, call: HttpCall) -> ScoringAnswer:
        """Whether it takes requests."""
        state, body = self._state()
        served = self._service.served
        return ScoringAnswer(
            body, status=200 if state == "ready" else 503, version=served.version if served else ""
        )

    async def models(self, call: HttpCall) -> ScoringAnswer:
        """The model, in OpenAI's form."""
        served = self._service.served
        about = (
            []
            if served is None
            else [
                {
                    "id": served.name,
                    "object": "model",
                    "owned_by": "laurel",
                    "version": served.version,
                }
            ]
        )
        return ScoringAnswer(dump({"object": "list", "data": about}))

    async def metrics(self, call: HttpCall) -> ScoringAnswer:
        """Figures for Prometheus."""
        return ScoringAnswer(
            self.figures.text(), content_type=b"text/plain; version=0.0.4; charset=utf-8"
        )

    def _state(self) -> tuple[str, bytes]:
        state, served = self._service.state, self._service.served
        about = {"model": served.name, "model_version": served.version} if served else {}
        return state, dump({"state": state, **about})

    # ---------------------------------------------------------------------------------- admin

    async def sleep(self, call: HttpCall) -> ScoringAnswer:
        """Give memory back."""
        await self._service.sleep()
        return ScoringAnswer(self._state()[1])

    async def wake(self, call: HttpCall) -> ScoringAnswer:
        """Take requests again."""
        await self._service.wake()
        return ScoringAnswer(self._state()[1])

    async def load(self, call: HttpCall) -> ScoringAnswer:
        """Serve another model."""
        asked = expect_object(parse(call.body), "the request")
        name = expect_text(asked.get("model", MISSING), "'model', the directory,")
        try:
            await self._service.load(name)
        except (UserError, OSError) as error:
            raise RefusedRequestError(422, "model", str(error)) from error
        return ScoringAnswer(self._state()[1])


def _answer(value: Any, scored: ScoredRequest) -> ScoringAnswer:
    return ScoringAnswer(dump(value), version=scored.model.version)


def _read_either_score_request(value: Any) -> ScoreRequest | foreign.ForeignRequest:
    return _read_pairs_request(value) if foreign.names_pairs(value) else read_score_request(value)


def _read_pairs_request(value: Any) -> foreign.ForeignRequest:
    try:
        return foreign.read_pairs_request(value)
    except ProtocolError as error:
        if error.kind != "count":
            raise
        raise RefusedRequestError(422, "count", str(error)) from error


@contextlib.contextmanager
def _in_float32() -> Iterator[None]:
    try:
        yield
    except OverflowError as error:
        message = "a score is beyond float32, which base64 is of; ask for 'encoding_format' float"
        raise RefusedRequestError(422, "failed", message) from error


def _maybe_squashed(scores: Sequence[Score], request: foreign.ForeignRequest) -> list[float]:
    values = [_number(score) for score in scores]
    return [foreign.sigmoid(one) for one in values] if request.squashed else values


def _num_tokens(scores: Sequence[Score]) -> int:
    return sum(score.num_tokens for score in scores)


def _number(score: Score) -> float:
    assert score.value is not None, "failures have been refused"
    return score.value


def _without_too_long(
    groups: Sequence[Group], most: int
) -> tuple[list[Group], dict[tuple[int, int], Score]]:
    """Groups without the conversations that are too long, and the verdicts on those."""
    left, found = [], {}
    for row, group in enumerate(groups):
        kept = []
        said = sum(len(message.content) for message in group.prompt)
        for index, completion in enumerate(group.completions_G):
            length = said + sum(len(message.content) for message in completion.messages)
            if length > most:
                reason = f"4xx: {length:,} characters; a conversation has {most:,} at most"
                found[row, index] = failed(reason)
            else:
                kept.append(completion)
        left.append(replace(group, completions_G=tuple(kept)))
    return left, found


def _with(
    scores: Sequence[Sequence[Score]], too_long: Mapping[tuple[int, int], Score]
) -> list[tuple[Score, ...]]:
    """Scores, with further verdicts in their places."""
    found = list(map(list, scores))
    for (row, index), score in sorted(too_long.items(), key=lambda item: item[0]):
        found[row].insert(index, score)
    return list(map(tuple, found))


def _are_rows(key: str, value: Any) -> bool:
    """Whether what a request has under a key is a list with an entry for each conversation; one of
    numbers is the token ids of a single one."""
    if key in ("groups", "messages", "prompt") or not isinstance(value, list) or not value:
        return False
    return not isinstance(value[0], int | float)


def _num_messages(group: Any) -> int:
    """Messages of a group of ours or of a request that is one conversation, as far as they are."""
    if not isinstance(group, dict):
        return 0
    lists = [group.get(key) for key in ("prompt", "messages")]
    completions = group.get("completions")
    lists += completions if isinstance(completions, list) else []
    return sum(len(one) for one in lists if isinstance(one, list))
