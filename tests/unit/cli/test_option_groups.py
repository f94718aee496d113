"""Dataclasses as options of a command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.testing import CliRunner

from laurel.cli.app import App


@dataclass(frozen=True, kw_only=True)
class Where:
    town: Annotated[str, typer.Option("--town", "-t", help="Which town.")] = "Rome"
    streets: Annotated[list[str] | None, typer.Option(help="Which streets.")] = None


@dataclass(frozen=True, kw_only=True)
class WhereAndWhen(Where):
    streets: Annotated[list[str] | None, typer.Option(help="All streets.")] = None
    year: Annotated[int, typer.Option(min=1)] = 44


def command_of(function: Any) -> typer.Typer:
    app = App()
    app.command()(function)
    return app


def test_fields_are_options_in_their_place_and_the_command_gets_the_dataclass():
    seen: list[Any] = []

    def walk(where: WhereAndWhen, fast: Annotated[bool, typer.Option("--fast")] = False) -> None:
        """Take a walk."""
        seen.append((where, fast))

    app = command_of(walk)
    done = CliRunner().invoke(app, ["-t", "Siena", "--streets", "a", "--streets", "b", "--fast"])
    assert done.exit_code == 0, done.output
    assert CliRunner().invoke(app, []).exit_code == 0
    assert seen == [
        (WhereAndWhen(town="Siena", streets=["a", "b"], year=44), True),
        (WhereAndWhen(), False),
    ]
    text = CliRunner().invoke(app, ["--help"]).output
    places = [text.index(word) for word in ("Take a walk", "--town", "--streets", "--year", "--fa")]
    assert places == sorted(places)
    assert "All streets." in text, "the field of the subclass, in the place of the first"
    assert CliRunner().invoke(app, ["--year", "0"]).exit_code == 2
