"""The commands of `laurel data`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from laurel.cli.app import App
from laurel.cli.options import ModelOption, Overrides
from laurel.observe.json_output import JsonOption

data_app = App(help="What data files are, and what becomes of them.", no_args_is_help=True)


@data_app.callback()
def data() -> None:
    """What data files are, and what becomes of them."""


@data_app.command("check")
def check(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="JSON lines, JSON, CSV, Parquet, Arrow, each also with .gz; a saved directory or "
            "a hub name.",
        ),
    ],
    overrides: Overrides = None,
    trainer: Annotated[
        Literal["rm", "sft", "grpo"] | None,
        typer.Option("--for", help="The command it is meant for; default: all are tried."),
    ] = None,
    model: ModelOption = "",
    as_json: JsonOption = False,
) -> None:
    """Say what a data file is, and which command it fits.

    Also what is left out, and the first row. With a model, in its tokens, with those that count
    in the loss and the one that the score is read from. The exit code is 2 where no row can be
    used.

    Example: laurel data check pairs.jsonl --model Qwen/Qwen3-0.6B data.prompt_key=question
    """
    from laurel.cli.data_check import run_data_check

    is_usable = run_data_check(
        file, trainer=trainer, model=model, overrides=overrides or [], as_json=as_json
    )
    if not is_usable:
        raise typer.Exit(2)
