"""`laurel rm`, `laurel sft`, `laurel grpo`: a configuration in, a trained model out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from laurel.cli.json_output import write_json
from laurel.cli.schemas import SCHEMAS, Kind
from laurel.config.load import load_config
from laurel.observe.console import make_console, message_console, print_metrics

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.algorithms.training_loop import Outcome
    from laurel.config.section import Section

_USES = {
    "rm": "laurel score --model {} conversations.jsonl",
    "sft": "laurel grpo policy.model_name={} ...",
    "grpo": "transformers.AutoModelForCausalLM.from_pretrained('{}')",
}


def run_training(
    kind: Kind, path: Path | None, overrides: Sequence[str], *, as_json: bool = False
) -> None:
    """The command: a run that a signal or its time budget ended has saved what it did and exits
    with 0; Ctrl-C exits with 130.

    Args:
        kind: Which command.
        path: The configuration file; None: the defaults.
        overrides: Changes to it.
        as_json: Write how it ended as JSON, too; see `json_output.stdout_for_json`.
    """
    console = message_console(stderr=False)
    last = console if as_json else make_console()
    outcome = trained(kind, path, overrides, console, last=last)
    if as_json:
        write_json(asdict(outcome))
    if outcome.signal == "SIGINT":
        sys.exit(130)


def trained(
    kind: Kind,
    path: Path | None,
    overrides: Sequence[str],
    console: Console,
    *,
    last: Console | None = None,
) -> Outcome:
    """Train, and say how it ended and where everything lies.

    Args:
        kind: Which command.
        path: The configuration file; None: the defaults.
        overrides: Changes to it.
        console: Told how it goes.
        last: Told how it ended; None: the same.

    Raises:
        UserError: Something that cannot be used.
        TrainingError: The run went wrong.
    """
    loaded = load_config(SCHEMAS[kind], path, overrides)
    outcome = _trainer(kind)(loaded.config, console=console, warnings=loaded.warnings)
    conclude(outcome, last or console, use=_USES[kind], limit=_limit(kind, loaded.config, outcome))
    return outcome


def _trainer(kind: Kind) -> Callable[..., Outcome]:
    """What runs it; its import takes a while, so the configuration is checked before."""
    if kind == "rm":
        from laurel.cli.assemble import train_reward_model

        return train_reward_model
    if kind == "sft":
        from laurel.cli.assemble_sft import fine_tune

        return fine_tune
    from laurel.cli.assemble_grpo import train_policy

    return train_policy


def _limit(kind: Kind, config: Section, outcome: Outcome) -> str | None:
    """What ended a run before the steps that were asked for, where its epochs did."""
    section = getattr(config, kind)
    if outcome.is_early or not 0 <= outcome.step < section.max_num_steps:
        return None
    if "max_num_steps" not in section.model_fields_set:
        return None
    return (
        f"{kind}.max_num_epochs={section.max_num_epochs} ended it before "
        f"{kind}.max_num_steps={section.max_num_steps}"
    )


def conclude(outcome: Outcome, console: Console, *, use: str, limit: str | None = None) -> None:
    """The last words of a run.

    Args:
        outcome: How it ended.
        console: Where they are said.
        use: What can be done with the model, with {} for its directory.
        limit: What made its last step the last, where that may surprise.
    """
    if outcome.metrics:
        print_metrics(console, "Last validation", outcome.metrics)
    at, seconds = f"after step {outcome.step}", f"{outcome.seconds:.0f} s"
    again = "run it again to go on"
    how = {
        "finished": f"finished {at}, in {seconds}" + (f": {limit}" if limit else ""),
        "signal": f"stopped by {outcome.signal} {at}, {seconds} in; {again}",
        "deadline": f"stopped by its time budget {at}, {seconds} in; {again}",
        "alarm": f"ended by an alarm {at}, in {seconds} (grpo.health.stop_on)",
    }[outcome.ended]
    console.print(how)
    if outcome.latest is not None:
        console.print(f"latest  {outcome.latest}")
    if outcome.best is not None:
        console.print(f"best    {outcome.best}")
        console.print(f"use it  {use.format(outcome.best)}", soft_wrap=True)
