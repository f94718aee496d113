"""Defines the commands of `laurel data`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from laurel.cli.app import App
from laurel.cli.options import ModelOption, Overrides
from laurel.observe.json_output import JsonOption

data_app = App(help="Examine data files before a run.", no_args_is_help=True)


@data_app.callback()
def data() -> None:
    """Examine data files before a run."""


@data_app.command("check")
def check(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A file of JSON lines, JSON, CSV, Parquet or Arrow, also with .gz; a saved "
            "directory; or a hub name.",
        ),
    ],
    overrides: Overrides = None,
    trainer: Annotated[
        Literal["rm", "sft", "grpo"] | None,
        typer.Option("--for", help="The command that the file is for. Default: try all of them."),
    ] = None,
    model: ModelOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show what a data file holds, and which command can train on it.

    It also shows how many rows are left out and why, and the first row. With a model, the row is
    shown as tokens, with those that count in the loss and the one that the score is read from. The
    exit code is 2 if no row can be used.

    Example: laurel data check pairs.jsonl --model Qwen/Qwen3-0.6B data.prompt_key=question
    """
    from laurel.cli.data_check import run_data_check

    is_usable = run_data_check(
        file, trainer=trainer, model=model, overrides=overrides or [], as_json=as_json
    )
    if not is_usable:
        raise typer.Exit(2)
