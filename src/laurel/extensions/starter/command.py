"""The command `laurel init`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from laurel.errors import ConfigError
from laurel.plugins import Command
from laurel.run.options import JsonOption


class Init(Command):
    """Write a commented configuration to start from."""

    after = "export"

    def make(self, section: None, name: str) -> Callable[..., Any]:
        """Return the function."""
        return init


@dataclass(frozen=True, slots=True, kw_only=True)
class InitOptions:
    """The options of `laurel init`."""

    column_words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=COLUMN",
            help="The names of columns, which the file gets: data.prompt_key=, data.chosen_key=, "
            "data.rejected_key= and the like; also data.on_bad_row=skip.",
        ),
    ] = None
    task: Annotated[
        Literal["rm", "grpo-math", "grpo-rm", "grpo-code"] | None,
        typer.Option(
            "--task", "-t", help="What to train. Without it, laurel init asks on a terminal."
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="The model to start from: a directory, a hub name or a GGUF file. Without it, "
            "laurel init asks on a terminal.",
        ),
    ] = None
    scratch: Annotated[
        bool,
        typer.Option(
            "--scratch", help="Start from a small, newly initialized model; this needs no hub."
        ),
    ] = False
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            metavar="DATA",
            help="The training rows: a file, a data set's name or a hub name. Without it, laurel "
            "init asks on a terminal.",
        ),
    ] = None
    reward_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="For --task grpo-rm: the reward model that scores completions. Default: "
            "results/rm.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The file to write. Default: TASK.yaml."
        ),
    ] = None
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Overwrite the file, and the schema beside it, if they exist."
        ),
    ] = False
    as_json: JsonOption = False


def init(*, options: InitOptions) -> None:
    """Write a commented configuration to start from.

    It needs three things: a task, a model and data. On a terminal it asks for those that no option
    gives; without a terminal a missing one is an error. The configuration is fitted to this
    machine and to the data, which are examined as laurel data check does. The exit code is 2 if no
    row of the data fits.

    Example: laurel init --task rm --model Qwen/Qwen3-0.6B --data pairs.jsonl
    """
    from laurel.extensions.starter.starter import run_init

    if options.scratch and options.model is not None:
        raise ConfigError(
            f"--scratch makes a new model, and --model {options.model} names one; say one of them"
        )
    if not run_init(options):
        raise typer.Exit(2)
