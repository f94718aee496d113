"""`laurel rm`: a configuration in, a trained reward model out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from laurel.cli.assemble import train_reward_model
from laurel.config.load import load_config
from laurel.config.reward_training import RewardTrainingRun
from laurel.observe.console import make_console, print_metrics

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.algorithms.reward_training import Outcome


def run_reward_training(path: Path | None, overrides: Sequence[str]) -> None:
    """Train, and say how it ended and where everything lies.

    A run that a signal or its time budget ended has saved what it did and exits with 0; Ctrl-C
    exits with 130.
    """
    loaded = load_config(RewardTrainingRun, path, overrides)
    console = make_console()
    outcome = train_reward_model(loaded.config, console=console, warnings=loaded.warnings)
    conclude(outcome, console)
    if outcome.signal == "SIGINT":
        sys.exit(130)


def conclude(outcome: Outcome, console: Console) -> None:
    """The last words of a run."""
    if outcome.metrics:
        print_metrics(console, "Last validation", outcome.metrics)
    how = {
        "finished": f"finished after step {outcome.step}",
        "signal": f"stopped by {outcome.signal} after step {outcome.step}; run it again to go on",
        "deadline": f"stopped by its time budget after step {outcome.step}; run it again to go on",
    }[outcome.ended]
    console.print(f"{how}, in {outcome.seconds:.0f} s")
    if outcome.latest is not None:
        console.print(f"latest  {outcome.latest}")
    if outcome.best is not None:
        console.print(f"best    {outcome.best}")
        console.print(f"use it  laurel score --model {outcome.best} conversations.jsonl")
