"""The command `laurel init`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from laurel.errors import ConfigError
from laurel.extensions.starter.options import InitOptions
from laurel.plugins import Command


class Init(Command):
    """Write a commented configuration to start from."""

    after = "export"

    def make(self, section: None, name: str) -> Callable[..., Any]:
        """Return the function."""
        return init


def init(*, options: InitOptions) -> None:
    """Write a commented configuration to start from.

    It needs three things: a task, a model and data. On a terminal it asks for those that no option
    gives; without a terminal a missing one is an error. The configuration is fitted to this
    machine and to the data, which are examined as laurel data check does. The exit code is 2 if no
    row of the data fits.

    Example: laurel init --task rm --model Qwen/Qwen3-0.6B --data pairs.jsonl
    """
    from laurel.extensions.starter.starter import run_init

    if options.scratch and options.model is not None:
        raise ConfigError(
            f"--scratch makes a new model, and --model {options.model} names one; say one of them"
        )
    if not run_init(options):
        raise typer.Exit(2)
