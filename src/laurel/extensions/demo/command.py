"""The command `laurel demo`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from laurel.errors import if_interrupted
from laurel.plugins import Command
from laurel.run.options import JsonOption


class Demo(Command):
    """Run every stage of training on generated data."""

    after = "doctor"

    def make(self, section: None, name: str) -> Callable[..., Any]:
        """Return the function."""
        return demo


def demo(
    directory: Annotated[
        Path, typer.Option("--directory", "-d", help="The directory that everything is written to.")
    ] = Path("demo"),
    seed: Annotated[
        int, typer.Option(min=0, help="The seed of the data, the model and the sampling.")
    ] = 0,
    data_only: Annotated[
        bool,
        typer.Option(
            "--data-only",
            help="Write the data sets and the configurations, but train nothing.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run every stage of training on generated data: offline, in minutes.

    The demo generates data, fine-tunes a small model on it, trains a reward model, and trains a
    policy against that reward model with GRPO.
    """
    from laurel.extensions.demo.demo import run_demo, write_demo_data

    if data_only:
        write_demo_data(directory, seed=seed, as_json=as_json)
        return
    with if_interrupted(lambda: f"{directory} keeps what was made, and another demo starts over"):
        run_demo(directory, seed=seed, as_json=as_json)
