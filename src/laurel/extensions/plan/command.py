"""The command `laurel plan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from laurel.extensions.plan.options import PlanOptions
from laurel.plugins import Command
from laurel.run.options import ConfigOption, Overrides


class PlanCommand(Command):
    """Show where each part of a run would be placed, and whether it fits."""

    after = "sweep"

    def make(self, section: None, name: str) -> Callable[..., Any]:
        """Return the function."""
        return plan_command


def plan_command(
    config: ConfigOption = None, overrides: Overrides = None, *, options: PlanOptions
) -> None:
    """Show where each part of a run would be placed, and whether it fits.

    Nothing is loaded or started. For every setting that does not fit, the plan names the nearest
    one that does, and the exit code is 2.

    Example: laurel plan -c examples/configs/grpo_rm_1B.yaml --nodes 4 --gpus-per-node 8
    """
    from laurel.extensions.plan.plan import run_plan

    if not run_plan(config, overrides or [], options):
        raise typer.Exit(2)
