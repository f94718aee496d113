"""All commands of `laurel`, those of extensions among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import typer.main

from laurel.cli.main import app

Found = tuple[tuple[str, ...], Any, click.Context]
"""The words of a command, the command, and its context."""


def all_commands() -> Iterator[Found]:
    """Yield every command, in the order of the help."""
    yield from _below(typer.main.get_command(app), ("laurel",), None)


def _below(command: Any, path: tuple[str, ...], above: click.Context | None) -> Iterator[Found]:
    context = click.Context(command, parent=above, info_name=path[-1])
    if not hasattr(command, "list_commands"):
        yield path[1:], command, context
        return
    for name in command.list_commands(context):
        yield from _below(command.get_command(context, name), (*path, name), context)
