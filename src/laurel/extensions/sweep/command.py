"""The command `laurel sweep`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laurel.extensions.sweep.options import SweepOptions
from laurel.plugins import Command


class SweepCommand(Command):
    """Search for the settings of a reward model that do best in validation."""

    after = "grpo"

    def make(self, section: None, name: str) -> Callable[..., Any]:
        """Return the function."""
        return sweep_command


def sweep_command(options: SweepOptions) -> None:
    """Search for the settings of a reward model that do best in validation.

    The best configuration is written as a file for laurel rm. A sweep that was stopped goes on with
    the same command.

    Example: laurel sweep -c rm.yaml 'policy.optimizer.kwargs.lr=log(1e-5,1e-3)' --folds 5
    """
    from laurel.extensions.sweep.run import run_sweep

    run_sweep(options)
