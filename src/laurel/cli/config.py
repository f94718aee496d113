"""`laurel config`: a run's configuration, printed; and those of other systems, turned into ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from laurel.cli.app import App
from laurel.cli.options import ConfigOption, Overrides
from laurel.observe.json_output import JsonOption, write_json

SHOW = "show"


class ShowsByDefault(TyperGroup):
    """A group whose first command is meant where none is named: `laurel config --describe`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name of the command in front where it is left out."""
        first = args[0] if args else ""
        if first not in self.commands and first not in ("-h", "--help"):
            args = [SHOW, *args]
        return super().parse_args(ctx, args)


config_app = App(cls=ShowsByDefault, no_args_is_help=False)


@config_app.callback()
def config() -> None:
    """Print a run's configuration, or import another system's.

    `laurel config --for grpo --describe` is `laurel config show --for grpo --describe`.
    """


@config_app.command(SHOW)
def show_config(
    config: ConfigOption = None,
    overrides: Overrides = None,
    describe: Annotated[
        bool, typer.Option("--describe", help="Write what each key means above it.")
    ] = False,
    kind: Annotated[
        Literal["rm", "sft", "grpo"], typer.Option("--for", help="The command it is for.")
    ] = "rm",
    as_json: JsonOption = False,
) -> None:
    """Print the configuration of a run with every default, as YAML."""
    from laurel.config.load import load_config, to_yaml
    from laurel.config.schemas import SCHEMAS

    if as_json and describe:
        raise typer.BadParameter("--describe writes comments, and JSON has none")
    loaded = load_config(SCHEMAS[kind], config, overrides or [])
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if as_json:
        write_json(loaded.config.model_dump(mode="json"))
        return
    sys.stdout.write(to_yaml(loaded.config, describe=describe))


@config_app.command("import")
def import_config(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="YAML, JSON, or a script with the command line; - is stdin."
        ),
    ],
    system: Annotated[
        Literal["trl", "openrlhf", "verl", "nemo-rl"] | None,
        typer.Option("--from", help="The system that wrote it; else recognized by its keys."),
    ] = None,
    kind: Annotated[
        Literal["rm", "sft", "grpo"] | None,
        typer.Option("--for", help="The command it is for; else recognized by its keys."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write YAML here; else to stdout."),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="TRL: processes it was started with."),
    ] = None,
    total_steps: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Optimizer steps of the run, where a schedule needs them."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Turn a configuration of TRL, OpenRLHF, verl or NeMo RL into ours.

    Also says which keys were carried, which are not needed, and which cannot be carried, and why.

    Example: laurel config import grpo.yaml --from trl --devices 8 -o grpo_laurel.yaml
    """
    from laurel.cli.import_config import run_import
    from laurel.config.importing.sources import ImportRequest

    request = ImportRequest(
        path=Path(file), system=system, run=kind, devices=devices, total_steps=total_steps
    )
    run_import(request, output=output, as_json=as_json)
