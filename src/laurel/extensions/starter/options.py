"""The options of `laurel init`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from laurel.run.options import JsonOption


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
