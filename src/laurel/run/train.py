"""`laurel rm`, `laurel sft`, `laurel grpo`: a configuration in, a trained model out."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.text import Text

from laurel.config.load import load_config
from laurel.config.overrides import COLUMN_KEYS, Override
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.schemas import SCHEMAS, Kind
from laurel.errors import ConfigError, DataError, UnsavedError, UserError
from laurel.observe.console import make_console, message_console, print_command, visible
from laurel.observe.json_output import write_json
from laurel.run.allocation import plan_allocation
from laurel.sandbox.limits import has_no_gpu
from laurel.training.ray_guard import guard

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.config.policy import ClusterConfig
    from laurel.config.schemas import Run
    from laurel.config.yaml_tree import Section
    from laurel.training.loop import RunOutcome

MAX_LINES = 10
_USES = {
    "rm": "laurel serve --model {}",
    "sft": "laurel init --task grpo-math --model {}",
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
    outcome = trained(kind, path, overrides, console, last=last, is_process=True)
    if as_json:
        write_json(asdict(outcome))
    if outcome.signal == "SIGINT":
        sys.exit(130)


def trained(
    kind: Kind,
    path: Path | None,
    overrides: Sequence[str | Override],
    console: Console,
    *,
    last: Console | None = None,
    is_process: bool = False,
) -> RunOutcome:
    """Train, and say how it ended and where everything lies.

    Args:
        kind: Which command.
        path: The configuration file; None: the defaults.
        overrides: Changes to it.
        console: Told how it goes.
        last: Told how it ended; None: the same.
        is_process: Whether this process is there for the run alone; see `ray_guard.guard`.

    Raises:
        UserError: Something that cannot be used.
        TrainingError: The run went wrong.
    """
    loaded = load_config(SCHEMAS[kind], path, overrides)
    config = cast("Run", loaded.config)  # what each of the schemas is
    _check_device(config.cluster)
    if is_process:
        with suppress(UserError):  # what cannot be planned is told later, in its place
            if plan_allocation(config).are_remote:
                guard()
    use, unsaved = _use_of(kind, loaded.config), None
    try:
        outcome = _trainer(kind)(loaded.config, console=console, warnings=loaded.warnings)
    except UnsavedError as error:
        unsaved, outcome = error, error.outcome
    limit = _limit(kind, loaded.config, outcome)
    conclude(outcome, last or console, use=use, limit=limit, unsaved=unsaved)
    if unsaved is not None:
        raise unsaved
    return outcome


def _check_device(cluster: ClusterConfig) -> None:
    """What needs neither torch nor data to be told, first.

    Raises:
        ConfigError: A GPU is asked for and this machine has none.
    """
    if cluster.device == "cuda" and cluster.address is None and has_no_gpu():
        raise ConfigError(
            "cluster.device=cuda: this machine has no GPU, or CUDA_VISIBLE_DEVICES hides it; set "
            "it to auto or cpu"
        )


def _use_of(kind: Kind, config: Section) -> str:
    """A command that can be pasted as it stands, with {} for the model.

    A reward model scores rows that it was validated on, or learned from, where `laurel score` reads
    them: a file of JSON lines. Otherwise it is served, which needs no file.
    """
    if isinstance(config, RewardTrainingRun):
        for one in (*config.data.validation_sets().values(), *config.data.train_sets()):
            path = one.data_path or ""
            if path.endswith(".jsonl") and os.path.isfile(path):
                columns = {key: getattr(one, key.partition(".")[2]) for key in COLUMN_KEYS}
                said = [
                    f"{key}={column}"
                    for key, column in columns.items()
                    if f"data.{column}_key" != key
                ]
                named = shlex.join([path, *said]).replace("{", "{{").replace("}", "}}")
                return f"laurel score --model {{}} {named}"
    return _USES[kind]


def _trainer(kind: Kind) -> Callable[..., RunOutcome]:
    """What runs it; its import takes a while, so the configuration is checked before."""
    if kind == "rm":
        from laurel.run.reward_model import train_reward_model

        return train_reward_model
    if kind == "sft":
        from laurel.run.sft import fine_tune

        return fine_tune
    from laurel.run.grpo import train_policy

    return train_policy


def _limit(kind: Kind, config: Section, outcome: RunOutcome) -> str | None:
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


def conclude(
    outcome: RunOutcome,
    console: Console,
    *,
    use: str,
    limit: str | None = None,
    unsaved: UnsavedError | None = None,
) -> None:
    """The last words of a run, at most `MAX_LINES` where the terminal has room for its paths.

    Args:
        outcome: How it ended.
        console: Where they are said.
        use: What can be done with the model, with {} for its directory.
        limit: What made its last step the last, where that may surprise.
        unsaved: What became of its last checkpoint, where that is nowhere; said first.
    """
    at, seconds = f"after step {outcome.step}", f"{outcome.seconds:.0f} s"
    again, finished = "run it again to go on", f"finished {at}, in {seconds}"
    if outcome.latest is None:
        again = "nothing was saved, so it will start over"
        # Without a word of what went wrong, nobody wanted it saved.
        finished += "" if unsaved else "; nothing was saved (checkpointing.enabled=false)"
    room = MAX_LINES
    if unsaved is not None:
        problem = Text(visible(f"problem: {unsaved}"))
        room -= len(problem.wrap(console, console.width))
        console.print(problem)
    how = {
        "finished": finished + (f": {limit}" if limit else ""),
        "signal": f"stopped by {outcome.signal} {at}, {seconds} in; {again}",
        "deadline": f"stopped by its time budget {at}, {seconds} in; {again}",
        "alarm": f"ended by an alarm {at}, in {seconds} (grpo.health.stop_on)",
    }[outcome.ended]
    console.print(how)
    model = outcome.best or outcome.latest
    last = []
    if outcome.latest is not None and outcome.latest != outcome.best:
        last.append(("latest", str(outcome.latest)))
    if outcome.best is not None:
        last.append(("best", str(outcome.best)))
    if model is not None:
        last.append(("use it", use.format(model)))
    if outcome.run_dir is not None:
        last.append(("report", f"laurel report {outcome.run_dir}"))
        _say_what_came_out(outcome.run_dir, console, room=room - 1 - len(last))
    for label, text in last:
        if text.startswith("laurel "):
            print_command(console, f"{label:<8}", text)
        else:
            console.print(f"{label:<8}{text}", soft_wrap=True)


def _say_what_came_out(run_dir: Path, console: Console, *, room: int) -> None:
    """The results, then as many of the first findings as there is room for, but at least one."""
    from laurel.observe.report.last_words import first_findings, results
    from laurel.observe.run_record import read_run_record

    try:
        record = read_run_record(run_dir)
        lines, findings = results(record), first_findings(record)
    except (DataError, OSError) as error:  # a run that has trained and saved has not failed
        console.print(f"warning: what the run logged cannot be read: {error}", soft_wrap=True)
        return
    texts = [Text(visible(line)) for line in (*lines, *findings)]
    for index, text in enumerate(texts):
        room -= len(text.wrap(console, console.width))
        if index > len(lines) and room < 0:
            break
        console.print(text)
