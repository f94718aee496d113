"""`laurel rm`, `laurel sft`, `laurel grpo`: a configuration in, a trained model out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from laurel.cli.assemble import train_reward_model
from laurel.cli.assemble_grpo import train_policy
from laurel.cli.assemble_sft import fine_tune
from laurel.config.grpo_training import GRPORun
from laurel.config.load import load_config
from laurel.config.reward_training import RewardTrainingRun
from laurel.config.section import Section
from laurel.config.sft_training import SFTRun
from laurel.observe.console import make_console, print_metrics

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.algorithms.training_loop import Outcome

Kind = Literal["rm", "sft", "grpo"]

SCHEMAS: dict[Kind, type[Section]] = {"rm": RewardTrainingRun, "sft": SFTRun, "grpo": GRPORun}
_TRAINERS: dict[Kind, Callable[..., Any]] = {
    "rm": train_reward_model,
    "sft": fine_tune,
    "grpo": train_policy,
}
_USES = {
    "rm": "laurel score --model {} conversations.jsonl",
    "sft": "laurel grpo policy.model_name={} ...",
    "grpo": "transformers.AutoModelForCausalLM.from_pretrained('{}')",
}


def run_training(kind: Kind, path: Path | None, overrides: Sequence[str]) -> None:
    """The command: a run that a signal or its time budget ended has saved what it did and exits
    with 0; Ctrl-C exits with 130.
    """
    if trained(kind, path, overrides, make_console()).signal == "SIGINT":
        sys.exit(130)


def trained(kind: Kind, path: Path | None, overrides: Sequence[str], console: Console) -> Outcome:
    """Train, and say how it ended and where everything lies.

    Raises:
        UserError: Something that cannot be used.
        TrainingError: The run went wrong.
    """
    loaded = load_config(SCHEMAS[kind], path, overrides)
    outcome: Outcome = _TRAINERS[kind](loaded.config, console=console, warnings=loaded.warnings)
    conclude(outcome, console, use=_USES[kind])
    return outcome


def conclude(outcome: Outcome, console: Console, *, use: str) -> None:
    """The last words of a run.

    Args:
        outcome: How it ended.
        console: Where they are said.
        use: What can be done with the model, with {} for its directory.
    """
    if outcome.metrics:
        print_metrics(console, "Last validation", outcome.metrics)
    how = {
        "finished": f"finished after step {outcome.step}",
        "signal": f"stopped by {outcome.signal} after step {outcome.step}; run it again to go on",
        "deadline": f"stopped by its time budget after step {outcome.step}; run it again to go on",
        "alarm": f"ended by an alarm after step {outcome.step} (grpo.health.stop_on)",
    }[outcome.ended]
    console.print(f"{how}, in {outcome.seconds:.0f} s")
    if outcome.latest is not None:
        console.print(f"latest  {outcome.latest}")
    if outcome.best is not None:
        console.print(f"best    {outcome.best}")
        console.print(f"use it  {use.format(outcome.best)}", soft_wrap=True)
