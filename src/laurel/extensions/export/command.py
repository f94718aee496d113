"""The command `laurel export`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any

import typer

from laurel.errors import ConfigError
from laurel.extensions.export.options import ExportOptions
from laurel.plugins import Command


class Export(Command):
    """Write a model as a plain Hugging Face directory, and test it."""

    after = "score"

    def make(self, section: None, name: str) -> Callable[..., Any]:
        """Return the function."""
        return export_command

    def for_programs(self) -> ModuleType:
        """Return the module with `export_model`."""
        from laurel.extensions.export import programs

        return programs


def export_command(
    *,
    options: ExportOptions,
    is_average: Annotated[
        bool,
        typer.Option(
            "--average",
            help="Write the mean of the weights of the checkpoints and runs that are named.",
        ),
    ] = False,
) -> None:
    """Write a model as a plain Hugging Face directory, and test it.

    The directory loads without Laurel. Reward models of OpenRLHF and LLaMA-Factory can be exported
    as well. With --average the mean of several models is written, with golden scores of its own;
    how far their scores lie apart is shown, and stands in the card.

    Example: laurel export --model results/rm --output exported --eval results/last
    """
    from laurel.extensions.export.export import run_export

    if is_average != bool(options.average):
        raise ConfigError(
            "--average averages the models that are named: laurel export --average DIR DIR ... "
            "--output DIR. One model is exported with --model DIR"
        )
    run_export(options)
