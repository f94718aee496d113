"""The commands of `laurel sandbox`."""

from __future__ import annotations

from typing import Annotated

import typer

from laurel.cli.completion import offer_layers
from laurel.cli.json_output import JsonOption

sandbox_app = typer.Typer(
    help="Where programs that a model wrote are run.", no_args_is_help=True, rich_markup_mode=None
)


@sandbox_app.callback()
def sandbox() -> None:
    """Where programs that a model wrote are run."""


@sandbox_app.command("check")
def check_sandbox(
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYER",
            autocompletion=offer_layers,
            help="Try without namespaces, landlock or seccomp. May be repeated.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Lock hostile programs in and say what holds on this machine.

    Also what is lost where something does not, and the remedy. The exit code is 1 where a run would
    be refused unless it is told to accept less.
    """
    from laurel.cli.sandbox_check import run_check

    if not run_check(without=frozenset(without or ()), as_json=as_json):
        raise typer.Exit(1)
