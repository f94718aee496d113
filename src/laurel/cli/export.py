"""The command line of `laurel export`."""

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
        Path, typer.Option("--output", "-o", help="The directory to write.", metavar="DIR")
    ],
    model: ModelOption = "",
    step: Annotated[
        int | None, typer.Option(min=0, help="Of a run: this checkpoint, not the best.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of the weights that are written.")
    ] = "float32",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is there.")
    ] = False,
    evaluations: Annotated[
        list[Path] | None,
        typer.Option(
            "--eval", metavar="DIR", help="What laurel eval ... -o wrote, for the model card."
        ),
    ] = None,
    without_conversations: Annotated[
        bool,
        typer.Option(
            "--without-conversations", help="Leave no conversation of the data in scoring.json."
        ),
    ] = False,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="NAME", help="Then bring it to the hub: USER/MODEL.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="A repository that is made there is private.")
    ] = False,
    max_length: MaxLengthOption = None,
    device: DeviceOption = "auto",
    cpu_threads: ThreadsOption = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model as a plain Hugging Face directory, and test it.

    What is written needs nothing of Laurel. Reward models of OpenRLHF and
    LLaMA-Factory are understood, too.

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
