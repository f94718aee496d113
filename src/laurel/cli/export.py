"""Defines the command `laurel export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from laurel.cli.options import (
    DeviceOption,
    MaxLengthOption,
    ModelOption,
    SettingsOption,
    ThreadsOption,
)
from laurel.observe.json_output import JsonOption


def export_command(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The directory to write to.", metavar="DIR")
    ],
    model: ModelOption = "",
    step: Annotated[
        int | None,
        typer.Option(min=0, help="The checkpoint of a run to export. Default: the best one."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="The data type of the written weights.")
    ] = "float32",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model in the output directory.")
    ] = False,
    evaluations: Annotated[
        list[Path] | None,
        typer.Option(
            "--eval",
            metavar="DIR",
            help="Results of laurel eval ... -o DIR for the model card; repeatable.",
        ),
    ] = None,
    without_conversations: Annotated[
        bool,
        typer.Option(
            "--without-conversations",
            help="Remove the conversations of the training data from scoring.json.",
        ),
    ] = False,
    push_to_hub: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Upload the model to the hub as NAME, a USER/MODEL."),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository on the hub private.")
    ] = False,
    max_length: MaxLengthOption = None,
    device: DeviceOption = "auto",
    cpu_threads: ThreadsOption = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model as a plain Hugging Face directory, and test it.

    The directory loads without Laurel. Reward models of OpenRLHF and LLaMA-Factory can be exported
    as well.

    Example: laurel export --model results/rm --output exported --eval results/last
    """
    from laurel.export.export import run_export
    from laurel.export.options import ExportOptions

    options = ExportOptions(
        model=model,
        output=output,
        step=step,
        dtype=dtype,
        overwrite=overwrite,
        evaluations=evaluations or (),
        without_conversations=without_conversations,
        push_to_hub=push_to_hub,
        private=private,
        max_length=max_length,
        device=device,
        cpu_threads=cpu_threads,
        settings=settings or (),
        as_json=as_json,
    )
    run_export(options)
