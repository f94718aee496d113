"""The options of `laurel serve`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from laurel import plugins
from laurel.run.options import (
    AggregateOption,
    BatchTokensOption,
    DeviceOption,
    JsonOption,
    MaxLengthOption,
    ModelOption,
    PrecisionOption,
    ThreadsOption,
)

if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[("laurel", *plugins.names("engines"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of `laurel serve`."""

    model: ModelOption = ""
    replicas: Annotated[
        int,
        typer.Option(metavar="N", help="The number of model replicas; 1 runs in this process."),
    ] = 1
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(help="The port to listen on; 0 chooses one that is free.")
    ] = 8000
    aggregate: AggregateOption = None
    engine: Annotated[EngineName, typer.Option(help="The engine that computes the scores.")] = (
        "laurel"
    )
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The environment variable with the API key. Default: LAUREL_API_KEY; without "
            "that, a generated key in a file.",
        ),
    ] = None
    admin_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The environment variable with the key for /admin. Default: LAUREL_ADMIN_KEY; "
            "without that, the API key.",
        ),
    ] = None
    no_api_key: Annotated[
        bool, typer.Option("--no-api-key", help="Require no key; only on a loopback address.")
    ] = False
    allow_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CIDR",
            help="A private network, such as 10.0.0.0/8, that needs no key for scores; repeatable.",
        ),
    ] = None
    precision: PrecisionOption = "float32"
    device: DeviceOption = "auto"
    cpu_threads: ThreadsOption = None
    max_length: MaxLengthOption = None
    date: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%d"],
            metavar="YYYY-MM-DD",
            help="The day that a chat template prints in place of the current one, for a model "
            "without scoring.json. Default: the day on which the server is started.",
        ),
    ] = None
    batch_tokens: BatchTokensOption = 8192
    max_waiting: Annotated[
        int,
        typer.Option(min=1, help="The most completions that wait; further requests get 429."),
    ] = 2000
    request_seconds: Annotated[
        float,
        typer.Option(min=0.1, help="The time limit of a request; after it the answer is 503."),
    ] = 120.0
    drain_seconds: Annotated[
        float,
        typer.Option(min=0, help="The time that accepted requests get when the server stops."),
    ] = 30.0
    access_log: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Log requests to this file as JSON lines; - is stderr, and none logs nothing.",
        ),
    ] = "-"
    log_texts: Annotated[
        bool, typer.Option("--log-texts", help="Add the texts of requests to the access log.")
    ] = False
    as_json: JsonOption = False
