"""The command `laurel config show`, which is also `laurel config` without another."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any, Literal

import typer

from laurel.observe.json_output import json_stream, write_json
from laurel.plugins import Command
from laurel.run.options import ConfigOption, JsonOption, Overrides


class Show(Command):
    """Print the configuration of a run with every default, as YAML."""

    def make(self, section: None, name: str) -> Callable[..., Any]:
        """Return the function."""
        return show_config

    def for_programs(self) -> ModuleType:
        """Return `schema_text`."""
        from laurel.extensions.show_config import json_schema

        return json_schema


def show_config(
    config: ConfigOption = None,
    overrides: Overrides = None,
    describe: Annotated[
        bool, typer.Option("--describe", help="Print the meaning of each key above it.")
    ] = False,
    kind: Annotated[
        Literal["rm", "sft", "grpo"],
        typer.Option("--for", help="The command that the configuration is for."),
    ] = "rm",
    json_schema: Annotated[
        bool,
        typer.Option(
            "--json-schema",
            help="Print a JSON schema of configuration files, for an editor's completion.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the configuration of a run with every default, as YAML.

    Of plug-ins, such as environments, those are shown that the run uses or that are set; with
    `--describe` all are.
    """
    from laurel.config.grpo_run import GRPORun
    from laurel.config.load import load_config, to_yaml
    from laurel.config.plugged import with_chosen_plugins
    from laurel.config.schemas import SCHEMAS

    if json_schema:
        from laurel.extensions.show_config.json_schema import schema_text

        if config is not None or overrides or describe:
            raise typer.BadParameter(
                "--json-schema describes every configuration of a command; leave out --config, "
                "--describe and overrides"
            )
        json_stream().write(schema_text(kind))
        return
    if as_json and describe:
        raise typer.BadParameter("--describe writes comments, and JSON has none")
    loaded = load_config(SCHEMAS[kind], config, overrides or [])
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    run = with_chosen_plugins(loaded.config)
    if isinstance(run, GRPORun):
        from laurel.run.tasks import with_asked_environments

        run = with_asked_environments(run)
    if as_json:
        write_json(run.model_dump(mode="json"))
        return
    sys.stdout.write(to_yaml(run, describe=describe))
