"""The command `laurel data check`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any, Literal

import typer

from laurel.plugins import Command
from laurel.run.options import JsonOption, ModelOption, Overrides


class DataCheck(Command):
    """Show what a data file holds, and which command can train on it."""

    def make(self, section: None, name: str) -> Callable[..., Any]:
        """Return the function."""
        return data_check

    def for_programs(self) -> ModuleType:
        """Return the module with `examine_data`."""
        from laurel.extensions.data_check import check

        return check


def data_check(
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
    from laurel.extensions.data_check.check import run_data_check

    is_usable = run_data_check(
        file, trainer=trainer, model=model, overrides=overrides or [], as_json=as_json
    )
    if not is_usable:
        raise typer.Exit(2)
