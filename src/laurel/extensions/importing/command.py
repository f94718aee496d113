"""The command `laurel config import`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from laurel import plugins
from laurel.plugins import Command
from laurel.run.options import JsonOption

if TYPE_CHECKING:
    System = str
else:
    System = Literal[tuple(plugins.names("importers"))]


class ConfigImport(Command):
    """Convert the configuration of another system to Laurel's."""

    after = "show"

    def make(self, section: None, name: str) -> Callable[..., Any]:
        """Return the function."""
        return import_config


def import_config(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A YAML or JSON file, or a script with the command line; - reads stdin.",
        ),
    ],
    system: Annotated[
        System | None,
        typer.Option("--from", help="The system of the file. Default: recognized by its keys."),
    ] = None,
    kind: Annotated[
        Literal["rm", "sft", "grpo"] | None,
        typer.Option("--for", help="The command to import for. Default: recognized by the keys."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write YAML to this file. Default: stdout."
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="For TRL: the number of processes of the run."),
    ] = None,
    total_steps: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="The optimizer steps of the run, if a schedule needs them."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Convert a configuration of TRL, OpenRLHF, verl or NeMo RL to Laurel's.

    It also lists the keys that were carried over, those that are not needed, and those that cannot
    be carried over, each with the reason.

    Example: laurel config import grpo.yaml --from trl --devices 8 -o grpo_laurel.yaml
    """
    from laurel.extensions.importing.import_config import run_import
    from laurel.extensions.importing.sources import ImportRequest

    request = ImportRequest(
        path=Path(file), system=system, run=kind, devices=devices, total_steps=total_steps
    )
    run_import(request, output=output, as_json=as_json)
