"""The options of `laurel eval policy`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from laurel.run.options import JsonOption, ModelOption


def _complete_tasks() -> list[str]:
    """List the named data sets of tasks, as shell completions."""
    from laurel import plugins
    from laurel.data.task_formats import names_of_sets

    return [*names_of_sets(), *plugins.names("rows")]


def _complete_environments() -> list[str]:
    """List the environments that need no configuration, as shell completions."""
    from laurel.environments.registry import built_in

    return built_in()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPolicyOptions:
    """The options of `laurel eval policy`, besides the configuration and its overrides."""

    model: ModelOption = ""
    environment: Annotated[
        str,
        typer.Option(
            "--environment",
            "-e",
            autocompletion=_complete_environments,
            help="The environment that grades completions. Default: the one that the data names.",
        ),
    ] = ""
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=_complete_tasks,
            help="The tasks, such as GSM8K, HumanEval or MBPP.",
        ),
    ] = None
    data_path: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The file of the tasks, if they are not on the hub."),
    ] = None
    num_generations: Annotated[
        int,
        typer.Option(
            "-n", "--num-generations", min=1, help="The number of completions of each task."
        ),
    ] = 1
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="The sampling temperature. Default: 0 for one completion, otherwise that of the "
            "configuration.",
        ),
    ] = None
    max_samples: Annotated[int | None, typer.Option(min=1, help="The most tasks to evaluate.")] = (
        None
    )
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The longest completion of one turn. Default: as long as the context allows.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write JSON to this file.", metavar="FILE"),
    ] = None
    samples: Annotated[
        Path | None,
        typer.Option(help="Write the completions to this Parquet file.", metavar="FILE"),
    ] = None
    as_json: JsonOption = False
