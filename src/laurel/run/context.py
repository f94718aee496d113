"""Provides the services that every training run needs: checkpoints, slots, loggers, benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rich.text import Text

from laurel.config.load import to_yaml
from laurel.config.policy import CheckpointingConfig
from laurel.errors import CheckpointError, ConfigError, counted
from laurel.models.checkpoint.store import LOCK_NAME, CheckpointStore
from laurel.observe.console import visible
from laurel.observe.loggers import next_run_dir, open_loggers
from laurel.observe.progress import ProgressWords, TrainingProgress
from laurel.observe.run_record import DATA_REPORT
from laurel.planning.memory import MASTER_BYTES
from laurel.planning.plan import optimizer_states
from laurel.training.stopping import WILL_SAVE, Deadline, Position, Selection, StopRequest

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.config.schemas import Run
    from laurel.environments.reward_model_environment import RewardModelEnvironment
    from laurel.evaluation.benchmarks import BenchmarkSet
    from laurel.models.checkpoint.card import CardFacts
    from laurel.protocols import Environment
    from laurel.run.allocation import Allocation
    from laurel.run.request import PlannedAllocation
    from laurel.training.learner_group import ModelFacts
    from laurel.training.loop import OnValidation, RunServices, Schedule
    from laurel.training.state import CheckpointParts, RunState
    from laurel.types import Score

R = TypeVar("R", bound="Run")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunContext(Generic[R]):
    """The configuration and the services from which the parts of a run are built."""

    config: R
    console: Console
    """The console that shows what is read, loaded and decided."""
    stack: ExitStack
    """The exit stack that closes everything that the run starts."""
    allocation: Allocation | None = None
    """The slots of each role on Ray; None if the run is in this process."""
    store: CheckpointStore | None = None
    """The store of checkpoints; None if no checkpoints are saved."""
    resume_from: Path | None = None
    """The checkpoint that the run resumes from; None if it starts anew."""
    day: date = field(default_factory=date.today)
    """The day on which the run began: templates print it instead of the current one."""
    deadline: Deadline = field(default_factory=partial(Deadline, None))
    """The deadline by which the run must have been saved."""
    selection: Selection = field(default_factory=partial(Selection, key=None))
    """How the best checkpoint is chosen."""

    def with_store(self, selection: Selection) -> RunContext[R]:
        """Return this context with the locked checkpoint store and the checkpoint to resume from.

        Raises:
            CheckpointError: `checkpointing.resume` does not allow the existing checkpoints.
        """
        saving, context = self.config.checkpointing, replace(self, selection=selection)
        if not saving.enabled:
            return context
        store = CheckpointStore(
            saving.checkpoint_dir,
            keep_top_k=saving.keep_top_k,
            metric_name=selection.key,
            higher_is_better=selection.higher_is_better,
        )
        root = store.root
        # Asked before the store is entered, which makes the directories for its lock.
        made = [path for path in (root, *root.parents) if not path.exists()]
        self.stack.enter_context(store)
        # Called while the lock is still held, so that no other run uses the directory by then.
        self.stack.callback(_remove_unused, made)
        if saving.resume == "never":
            if store.steps():
                raise CheckpointError(
                    f"checkpointing.resume=never and {saving.checkpoint_dir} holds checkpoints of "
                    f"{counted(len(store.steps()), 'step')}; choose another checkpoint_dir or "
                    "resume=auto"
                )
            return replace(context, store=store)
        newest = store.newest_whole()
        for skipped in newest.skipped:
            self.console.print(f"warning: skipped a checkpoint: {skipped}")
        if newest.path is None and (saving.resume == "required" or newest.skipped):
            raise CheckpointError(
                f"{saving.checkpoint_dir} holds no whole checkpoint to go on from"
                + (" (see the warnings above)" if newest.skipped else "")
                + "; start with checkpointing.resume=auto in an empty directory"
            )
        if newest.path is None:
            return replace(context, store=store)
        from laurel.training.state import read_day

        day = read_day(newest.path) or self.day
        return replace(context, store=store, resume_from=newest.path, day=day)

    def with_slots(self, planned: PlannedAllocation) -> RunContext[R]:
        """Return this context with all planned slots reserved, if there are any outside of here.

        Raises:
            ConfigError: The cluster does not have the slots.
            MissingDependencyError: Ray is not installed.
        """
        if not planned.are_remote:
            return self
        from laurel.run.allocation import open_allocation

        return replace(self, allocation=open_allocation(planned, self.stack, self.console))


def _remove_unused(made: Sequence[Path]) -> None:
    """Remove the directories created for checkpoints, if the run saved none.

    Args:
        made: The checkpoint directory and its created parents, innermost first; empty if it existed
            before.
    """
    with contextlib.suppress(OSError):
        if made and os.listdir(made[0]) == [LOCK_NAME]:
            (made[0] / LOCK_NAME).unlink()
            for directory in made:
                directory.rmdir()


def choose_run_dir(context: RunContext[R]) -> Path:
    """Choose the run's log directory: that of the resumed run, or the next free one."""
    from laurel.training.state import read_run_dir

    logging, resume_from = context.config.logger, context.resume_from
    before = resume_from and read_run_dir(resume_from)
    if not before:
        return next_run_dir(logging.log_dir)
    is_elsewhere = before.resolve().parent != Path(logging.log_dir).expanduser().resolve()
    if "log_dir" in logging.model_fields_set and is_elsewhere:
        context.console.print(
            f"warning: logger.log_dir={logging.log_dir} has no effect: a run that goes on logs "
            f"where it has logged, in {before}, so that its curves are in one place",
            soft_wrap=True,
        )
    return before


def checkpoint_parts(
    context: RunContext[R], facts: ModelFacts, card: CardFacts, *, day: date | None = None
) -> CheckpointParts:
    """Choose the log directory, and return what the checkpoints of the run hold."""
    from laurel.training.state import CheckpointParts

    saving = context.config.checkpointing
    return CheckpointParts(
        card=card,
        run_dir=choose_run_dir(context),
        config_yaml=to_yaml(context.config),
        save_optimizer=saving.save_optimizer,
        saves_in_background=saving.saves_in_background(facts.device),
        day=day,
    )


def describe_data(reports: Mapping[str, Any], run_dir: Path, console: Console) -> None:
    """Print the data reports; unchanged reports of a resumed run are summarized in one line."""
    try:
        before = json.loads((run_dir / DATA_REPORT).read_bytes())
    except (OSError, ValueError):
        before = {}
    alike = []
    for name, report in reports.items():
        # In the form that the file has: JSON knows no tuples, and its keys are texts.
        if before.get(name) == json.loads(json.dumps(report.to_dict())):
            alike.append(f"{name} ({counted(report.num_kept, 'row')})")
        else:
            console.print(report.render())
    if alike:
        said = f"data    as when the run began: {', '.join(alike)}; {run_dir / DATA_REPORT}"
        console.print(said, soft_wrap=True)


def describe_output(context: RunContext[R], run_dir: Path) -> None:
    """Print the directories to which the run writes logs and checkpoints."""
    saving = context.config.checkpointing
    context.console.print(f"logs    {run_dir}")
    if saving.enabled:
        context.console.print(f"saves   {saving.checkpoint_dir}")


def _checkpoint_bytes(context: RunContext[R], facts: ModelFacts) -> int:
    """Estimate the size in bytes of a checkpoint's tensors before one is written."""
    weights = MASTER_BYTES * facts.num_parameters
    if facts.num_trained != facts.num_parameters:
        # Adapters are saved beside the merged weights.
        weights += MASTER_BYTES * facts.num_trained
    optimizer, saving = context.config.policy.optimizer, context.config.checkpointing
    states = optimizer_states(optimizer.name) if saving.save_optimizer else 0
    return weights + MASTER_BYTES * states * facts.num_trained


def _num_saves(saving: CheckpointingConfig, first: int, last: int) -> int:
    """Count the saves after step `first`, up to step `last`, which is always saved."""
    period = saving.save_period
    return last // period - first // period + (last % period != 0) if first < last else 0


def make_services(
    context: RunContext[R],
    *,
    schedule: Schedule,
    state: RunState,
    position: Position,
    facts: ModelFacts,
    reports: Mapping[str, Any],
    unit: str = "pairs",
    on_validation: OnValidation | None = None,
) -> RunServices:
    """Open the loggers, write the configuration and data reports, and install signal handlers.

    `unit` is what a step's throughput is counted in; `on_validation` is called after validations.

    Raises:
        CheckpointError: The disk has no room for the checkpoints of the run.
    """
    from laurel.training.loop import RunServices

    config, console, run_dir = context.config, context.console, state.run_dir
    if context.resume_from:
        console.print(f"resuming from {context.resume_from}, after step {position.step}")
    num_saves = _num_saves(config.checkpointing, position.step, schedule.total_steps)
    if context.store is not None and num_saves:
        size = _checkpoint_bytes(context, facts)
        try:
            warning = context.store.require_room(num_saves, estimated_bytes=size)
        except CheckpointError:
            with contextlib.suppress(OSError):
                run_dir.rmdir()  # fails if an earlier run has logged there
            raise
        if warning is not None:
            console.print(f"warning: {warning}", soft_wrap=True)
    progress = TrainingProgress(
        schedule.total_steps, position.step, console, words=ProgressWords(unit)
    )
    logger = open_loggers(
        config.logger,
        run_dir=run_dir,
        run_config=config.model_dump(mode="json"),
        resumed_step=position.step if context.resume_from else None,
        warn=progress.message,
    )
    context.stack.callback(logger.close)
    (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    text = json.dumps({name: report.to_dict() for name, report in reports.items()}, indent=1)
    (run_dir / DATA_REPORT).write_text(text + "\n", encoding="utf-8")
    stop = context.stack.enter_context(
        StopRequest(lambda name: progress.message(f"{name}: {WILL_SAVE}"))
    )
    return RunServices(
        schedule=schedule,
        state=state,
        store=context.store,
        selection=context.selection,
        logger=logger,
        progress=progress,
        stop=stop,
        deadline=context.deadline,
        on_validation=on_validation,
    )


# Benchmarks beside a run, of the trained reward model or of the one that scores in GRPO.

# A server must answer all of a request within one time limit.
CHUNK = 32
"""The number of groups in one request to a reward model."""


def describe_benchmark(name: str, benchmark: BenchmarkSet, console: Console) -> None:
    """Print the size of a benchmark, and limitations of its metrics."""
    _say(f"bench   {name}: {benchmark.described()}", console)
    for note in benchmark.notes():
        _say(f"note    {name}: {note}", console)


def reward_model_metrics(
    benchmarks: Sequence[BenchmarkSet], environments: Mapping[str, Environment], console: Console
) -> dict[str, float]:
    """Evaluate a GRPO run's reward model; return `reward_model/<Name>_<metric>` values.

    The reward model does not change during the run, so this is done once. Its raw scores are used,
    because the transformations into rewards do not change their order.

    Raises:
        ConfigError: No reward model scores completions in this run.
    """
    if not benchmarks:
        return {}
    model = _reward_model_among(environments)
    if model is None:
        raise ConfigError(
            "env.reward_model.benchmarks: no task of this run uses the environment 'reward_model' "
            f"(they use {', '.join(sorted(environments))}); leave them out"
        )
    metrics: dict[str, float] = {}
    for benchmark in benchmarks:
        name = f"reward_model/{benchmark.name}"
        describe_benchmark(name, benchmark, console)
        scores: list[tuple[Score, ...]] = []
        groups = benchmark.groups
        with console.status(f"measuring the reward model on {benchmark.name}") as status:
            for first in range(0, len(groups), CHUNK):
                scores += model.scores(groups[first : first + CHUNK])
                status.update(f"{name}: {len(scores):,} of {len(groups):,} rows")
        found = benchmark.figures(scores)
        shown = "  ".join(f"{key} {value:.4f}" for key, value in found.items())
        _say(f"judge   {benchmark.name}: {shown}", console)
        failures = [one.failure for of_row in scores for one in of_row if one.failure is not None]
        if failures:
            _say(
                f"warning: {name}: {counted(len(failures), 'completion')} got no score; the "
                f"first: {failures[0]}",
                console,
            )
        metrics |= {f"{name}_{key}": value for key, value in found.items()}
    return metrics


def _reward_model_among(environments: Mapping[str, Environment]) -> RewardModelEnvironment | None:
    """Find the environment named `reward_model`, even as part of a composite."""
    from laurel.environments.composite import CompositeEnvironment
    from laurel.environments.reward_model_environment import RewardModelEnvironment

    for name, environment in environments.items():
        if name == "reward_model" and isinstance(environment, RewardModelEnvironment):
            return environment
        if isinstance(environment, CompositeEnvironment):
            found = _reward_model_among(environment.parts)
            if found is not None:
                return found
    return None


def _say(line: str, console: Console) -> None:
    console.print(Text(visible(line)), soft_wrap=True)
