"""A reward server as an ASGI application. Importing this needs the extra `serve`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from laurel.errors import ProtocolError
from laurel.rewards.remote import foreign_wire
from laurel.rewards.remote.wire import SCORE_PATH, dump, error_json
from laurel.rewards.server.access_log import AccessLog
from laurel.rewards.server.description import describe
from laurel.rewards.server.docs_page import docs_page
from laurel.rewards.server.endpoints import Endpoints, RequestLimits
from laurel.rewards.server.gate import (
    CALL,
    DOCS_PATH,
    HEALTH_PATH,
    App,
    Call,
    Gate,
    GateOptions,
    Receive,
    Scope,
    Send,
    failure_of,
    respond,
    respond_error,
)
from laurel.rewards.server.keys import is_loopback
from laurel.rewards.server.metrics import ServerMetrics
from laurel.rewards.server.serving import Answer, RefusedRequestError, RewardService

Handler = Callable[[Call], Awaitable[Answer]]
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
        foreign_wire.CLASSIFY_PATH: endpoints.classify,
        foreign_wire.POOLING_PATH: endpoints.pooling,
        foreign_wire.PAIRS_PATH: endpoints.pairs,
        foreign_wire.EMBEDDINGS_PATH: endpoints.embeddings,
        foreign_wire.GET_REWARD_PATH: endpoints.get_reward,
        foreign_wire.REMOTE_RM_PATH: endpoints.remote_rm,
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
    page = Answer(docs_page(describe(needs_key=needs_key)), content_type=_HTML)

    async def docs(_: Call) -> Answer:
        return page

    looks[DOCS_PATH] = docs
    app.router.routes[:0] = [  # before the description: these are asked most
        *_routes(scores, "POST"),
        *_routes(looks, "GET"),
        *_routes(admin, "POST", is_admin=True),
    ]
    setattr(app, "openapi", partial(describe, needs_key=needs_key))  # noqa: B010  (a method)
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
        call: Call = scope[CALL]
        try:
            if self._is_admin:
                _check_admin(call)
            answer = await self._handler(call)
        except ProtocolError as error:
            await respond_error(send, RefusedRequestError(400, "request", str(error)))
        except RefusedRequestError as refusal:
            await respond_error(send, refusal)
        except Exception as error:
            await respond_error(send, failure_of(call, error))
        else:
            call.version = answer.version
            await respond(send, answer)


async def _not_served(methods: Mapping[str, str], request: Request, error: Exception) -> Response:
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


def _shown(request: Request) -> str:
    """The path that was asked, as much as fits into a message."""
    return ascii(request.url.path[:_MOST_OF_A_PATH])[1:-1]


def _check_admin(call: Call) -> None:
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
    counted = stats()
    return {name: getattr(counted, name) for name in counted.__slots__}
