"""The command `laurel doctor`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from laurel.plugins import Command
from laurel.run.options import JsonOption


class Doctor(Command):
    """Show what this machine has, and try what a run relies on."""

    after = "serve"

    def make(self, section: None, name: str) -> Callable[..., Any]:
        """Return the function."""
        return doctor


def doctor(
    trial: Annotated[
        bool,
        typer.Option("--trial", help="Try what a run relies on, with models made on the spot."),
    ] = False,
    minutes: Annotated[
        float,
        typer.Option(min=0, help="The minutes of a trial. Checks not begun by then are skipped."),
    ] = 10.0,
    report: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The JSON file of a trial, to attach to an issue."),
    ] = Path("laurel-trial.json"),
    as_json: JsonOption = False,
) -> None:
    """Show what this machine has and what Laurel will use.

    A trial prints a table of checks, each with pass, fail or skipped: exactness of shared prompts,
    memory and speed, weight transfer, several ranks, vLLM. The exit code is 1 where one fails.

    Example: laurel doctor --trial --minutes 20
    """
    from laurel.extensions.doctor.doctor import run_doctor, run_doctor_trial

    if not trial:
        run_doctor(as_json=as_json)
    elif not run_doctor_trial(minutes=minutes, report=report, as_json=as_json):
        raise typer.Exit(1)
