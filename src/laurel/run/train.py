"""Runs the commands that train (`laurel rm`, `sft` and `grpo`), and prints how a run ended."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.text import Text

from laurel.config.load import COLUMN_KEYS, Override, load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.sft import SFTRun
from laurel.errors import ConfigError, DataError, UnsavedError, UserError
from laurel.observe.console import make_console, message_console, print_command, visible
from laurel.observe.json_output import write_json
from laurel.observe.user_code import ForkGuard
from laurel.run.request import plan_allocation
from laurel.sandbox.limits import has_no_gpu
from laurel.training.ray_guard import guard
from laurel.training.stopping import StopRequest, end_unsaved
from laurel.workers.process import check_counts

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.config.schemas import Kind, Run
    from laurel.config.yaml_tree import Section
    from laurel.observe.run_record import RunRecord
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
    """Run a training command and set the exit code of the process.

    A run that a signal or its time budget ended has saved its state and exits with 0; Ctrl-C exits
    with 130. With `as_json`, the outcome is also written as JSON to the stream of `json_output`.
    """
    before = multiprocessing.active_children()
    console = message_console(stderr=False)
    last = console if as_json else make_console()
    try:
        outcome = trained(kind, path, overrides, console, last=last, is_process=True)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, lambda number, frame: end_unsaved(128 + number))
        # Later on a run hears signals itself, until it has ended.
        at = "" if StopRequest.has_begun else " before the first step: nothing was saved yet"
        print(f"interrupted{at}", file=sys.stderr)
        sys.exit(130)
    else:
        if as_json:
            write_json(asdict(outcome))
    finally:  # of a run that failed, too
        end_children(but=before)
    if outcome.signal == "SIGINT":
        sys.exit(130)


def end_children(but: Sequence[multiprocessing.process.BaseProcess] = ()) -> None:
    """End the processes that a user's code left running, for which this process would wait."""
    left = [child for child in multiprocessing.active_children() if child not in but]
    if left:
        names = ", ".join(child.name for child in left)
        print(
            f"warning: an environment or a function started processes and left {len(left)} of them "
            f"running ({names}); they are ended",
            file=sys.stderr,
        )
    for child in left:
        child.kill()
        child.join()


def trained(
    kind: Kind,
    path: Path | None,
    overrides: Sequence[str | Override],
    console: Console,
    *,
    last: Console | None = None,
    is_process: bool = False,
) -> RunOutcome:
    """Train a model, print how the run ended and where its files are, and return the outcome.

    `last` is the console that shows how the run ended, if it is another one. `is_process` says that
    this process exists for the run alone, so that `ray_guard` may act.

    Raises:
        UserError: A setting, a file or a model cannot be used.
        TrainingError: The run failed.
    """
    loaded = load_config(_schema(kind), path, overrides)
    config = cast("Run", loaded.config)  # each of the schemas is a run's
    cluster = config.cluster
    # This needs neither torch nor data, so it is checked first.
    if cluster.device == "cuda" and cluster.address is None and has_no_gpu():
        raise ConfigError(
            "cluster.device=cuda: this machine has no GPU, or CUDA_VISIBLE_DEVICES hides it; set "
            "it to auto or cpu"
        )
    if cluster.address is None:
        check_counts(config)  # of a running cluster, each worker checks its own
    if is_process:
        with suppress(UserError):  # the run itself reports what cannot be planned
            if plan_allocation(config).are_remote:
                guard()
    use, unsaved = _use_of(kind, loaded.config), None
    train = _trainer(kind)
    for warning in loaded.warnings:
        console.print(f"warning: {warning}")
    try:
        # A user's fork that came back from here would end its parent's children. `guard` forks,
        # too, and its child is the run.
        with ForkGuard():
            outcome = train(loaded.config, console=console)
    except UnsavedError as error:
        unsaved, outcome = error, error.outcome
    limit = _limit(kind, loaded.config, outcome)
    conclude(outcome, last or console, use=use, limit=limit, unsaved=unsaved)
    # Raised only here: what was learned, and where it is logged, is shown in any case.
    if unsaved is not None:
        raise unsaved
    return outcome


def _use_of(kind: Kind, config: Section) -> str:
    """Return a command that uses the trained model, with {} for the model's directory."""
    # `laurel score` reads files of JSON lines: validation rows or else training rows. Without such
    # a file the model is served, which needs none.
    if isinstance(config, RewardTrainingRun):
        for one in (*config.data.validation_sets().values(), *config.data.train_sets()):
            path = one.data_path or ""
            if path.endswith(".jsonl") and os.path.isfile(path):
                columns = {key: getattr(one, key.partition(".")[2]) for key in COLUMN_KEYS}
                said = [
                    f"{key}={column}"
                    for key, column in columns.items()
                    if column is not None and f"data.{column}_key" != key
                ]
                if config.data.on_bad_row == "skip":
                    said.append("data.on_bad_row=skip")
                # `format` would take a brace in the path for the place of the model.
                named = shlex.join([path, *said]).replace("{", "{{").replace("}", "}}")
                return f"laurel score --model {{}} {named}"
    return _USES[kind]


def _schema(kind: Kind) -> type[Section]:
    # As `config.schemas` has them, which imports the settings of environments for all.
    if kind == "rm":
        return RewardTrainingRun
    if kind == "sft":
        return SFTRun
    from laurel.config.grpo_run import GRPORun

    return GRPORun


def _trainer(kind: Kind) -> Callable[..., RunOutcome]:
    # These imports take a while, so the configuration is checked before.
    if kind == "rm":
        from laurel.run.reward_model import train_reward_model

        return train_reward_model
    if kind == "sft":
        from laurel.run.sft import fine_tune

        return fine_tune
    from laurel.run.grpo import train_policy

    return train_policy


def _limit(kind: Kind, config: Section, outcome: RunOutcome) -> str | None:
    """Explain that the epochs ended a run before its configured number of steps, if they did."""
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
    """Print how a run ended, on at most `MAX_LINES` lines if its paths fit the terminal.

    Args:
        use: A command that uses the model, with {} for the model's directory.
        limit: The reason why the run ended at its last step, if that may be unexpected.
        unsaved: The error that left the last checkpoint unsaved; it is printed first, and then that
            no step changed the policy, if none did.
    """
    at, seconds = f"after step {outcome.step}", f"{outcome.seconds:.0f} s"
    again, finished = "run it again to resume", f"finished {at}, in {seconds}"
    if outcome.latest is None:
        again = "nothing was saved, so it will start over"
        # Without an error, the configuration saves nothing.
        finished += "" if unsaved else "; nothing was saved (checkpointing.enabled=false)"
    problems = [] if unsaved is None else [f"problem: {unsaved}"]
    record = None if outcome.run_dir is None else _record_of(outcome.run_dir, console)
    if record is not None:
        from laurel.observe.report.findings import learned_nothing

        problems += [said] if (said := learned_nothing(record)) else []
    room = MAX_LINES
    for problem in map(Text, map(visible, problems)):
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
        by = f"  (by {outcome.best_by})" if outcome.best_by is not None else ""
        last.append(("best", f"{outcome.best}{by}"))
    if model is not None:
        last.append(("use it", use.format(model)))
    if outcome.run_dir is not None:
        last.append(("report", f"laurel report {outcome.run_dir}"))
        if record is not None:
            left = room - 1 - len(last)
            _say_what_came_out(record, console, room=left, said=problems)
    for label, text in last:
        if text.startswith("laurel "):
            print_command(console, f"{label:<8}", text)
        else:
            console.print(f"{label:<8}{text}", soft_wrap=True)


def _record_of(run_dir: Path, console: Console) -> RunRecord | None:
    """Read the log of a run; if it cannot be read, warn."""
    from laurel.observe.run_record import read_run_record

    try:
        return read_run_record(run_dir)
    except (DataError, OSError) as error:
        # The run has trained and saved, so this is no failure of it.
        console.print(f"warning: the log of the run cannot be read: {error}", soft_wrap=True)
        return None


def _say_what_came_out(
    record: RunRecord, console: Console, *, room: int, said: Sequence[str]
) -> None:
    """Print the run's results, and as many of the first findings as fit, but at least one.

    Findings that have been `said` are not repeated.
    """
    from laurel.observe.report.findings import first_findings, results

    lines = results(record)
    findings = [line for line in first_findings(record) if line not in said]
    texts = [Text(visible(line)) for line in (*lines, *findings)]
    for index, text in enumerate(texts):
        room -= len(text.wrap(console, console.width))
        if index > len(lines) and room < 0:
            break
        console.print(text)
