"""The command line of `laurel init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from laurel.observe.json_output import JsonOption


def init(
    task: Annotated[
        Literal["rm", "grpo-math", "grpo-rm", "grpo-code"] | None,
        typer.Option("--task", "-t", help="What is to be trained; asked for if not said."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="The model to begin with: a directory or a hub name; asked for if not said.",
        ),
    ] = None,
    scratch: Annotated[
        bool,
        typer.Option(
            "--scratch", help="Begin with a small new model, made here; no hub is needed for it."
        ),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            metavar="DATA",
            help="Training rows: a file, a data set's name, or a hub name; asked for if not said.",
        ),
    ] = None,
    reward_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Of grpo-rm: who judges; default: results/rm, never asked for."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Default: the task's name, .yaml."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write over a file that is there.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a commented configuration to start from.

    It asks three questions: task, model, data. On a terminal what no option says is asked;
    elsewhere it is an error. The machine is looked at, and so is the data, as laurel data check
    does.

    Example: laurel init --task rm --model Qwen/Qwen3-0.6B --data pairs.jsonl
    """
    from laurel.cli.starter import run_init
    from laurel.errors import ConfigError

    if scratch and model is not None:
        raise ConfigError(
            f"--scratch makes a new model, and --model {model} names one; say one of them"
        )
    model = "scratch" if scratch else model
    run_init(task, model, data, reward_model, output, force=force, as_json=as_json)
