"""The options of `laurel export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from laurel.run.options import (
    DeviceOption,
    JsonOption,
    MaxLengthOption,
    ModelOption,
    SettingsOption,
    ThreadsOption,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The options of `laurel export`."""

    average: Annotated[
        list[str] | None,
        typer.Argument(metavar="DIR...", help="The models to average, with --average."),
    ] = None
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The directory to write to.", metavar="DIR")
    ]
    model: ModelOption = ""
    step: Annotated[
        int | None,
        typer.Option(min=0, help="The checkpoint of a run to export. Default: the best one."),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="The data type of the written weights.")
    ] = "float32"
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model in the output directory.")
    ] = False
    evaluations: Annotated[
        list[Path] | None,
        typer.Option(
            "--eval",
            metavar="DIR",
            help="Results of laurel eval ... -o DIR for the model card; repeatable.",
        ),
    ] = None
    without_conversations: Annotated[
        bool,
        typer.Option(
            "--without-conversations",
            help="Remove the conversations of the training data from scoring.json.",
        ),
    ] = False
    push_to_hub: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Upload the model to the hub as NAME, a USER/MODEL."),
    ] = None
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository on the hub private.")
    ] = False
    max_length: MaxLengthOption = None
    device: DeviceOption = "auto"
    cpu_threads: ThreadsOption = None
    settings: SettingsOption = None
    as_json: JsonOption = False
