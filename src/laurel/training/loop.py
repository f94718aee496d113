"""Runs the loop around the steps of every training run: validating, saving, resuming, stopping.

An algorithm defines a step, its metrics and a validation (`step`, `summarize`, `measure`). This
loop decides the order, logs and shows each step, and decides what happens at a signal, on a full
disk or after a bad batch.
"""

from __future__ import annotations

import gc
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from laurel.config.policy import CheckpointingConfig
from laurel.errors import (
    CheckpointError,
    NonFiniteError,
    TrainingError,
    UnsavedError,
    counted,
)
from laurel.models.checkpoint.store import CheckpointStore, SaveUnderWay
from laurel.observe.progress import Timers, TrainingProgress
from laurel.protocols import MetricLogger
from laurel.training.learner import Update
from laurel.training.state import RunState
from laurel.training.stopping import (
    Deadline,
    EarlyStopping,
    Goal,
    NothingLeft,
    Position,
    Selection,
    StopRequest,
    Work,
)

if TYPE_CHECKING:
    from laurel.config.grpo import GRPOConfig
    from laurel.config.reward_model import RewardTrainingConfig
    from laurel.config.sft import SFTConfig

Ending = Literal["finished", "signal", "deadline", "alarm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The outcome of a run."""

    step: int
    ended: Ending
    signal: str | None = None
    latest: Path | None = None
    """The newest checkpoint; None if the run has none."""
    best: Path | None = None
    """The best checkpoint by the run's metric; None if there is none."""
    best_by: str | None = None
    """The name of the metric that ranks the checkpoints; None if none does."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The latest value of every validation metric, by full name."""
    seconds: float = 0.0
    is_early: bool = False
    """Whether a goal, an alarm or a lack of tasks ended the run early; the reason was printed."""
    run_dir: Path | None = None
    """The log directory, which `observe.run_record.read_run_record` reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The steps at which validation and saving are due."""

    total_steps: int
    section: GRPOConfig | RewardTrainingConfig | SFTConfig
    """The section of the algorithm, which has the periods of validations."""
    saving: CheckpointingConfig
    has_validation: bool
    """Whether there is a validation set."""
    goal: Goal | None = None
    """The target of a validation metric that ends the run."""
    early_stopping: EarlyStopping | None = None
    """The validation metric that ends the run when it no longer improves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunServices:
    """What a loop needs besides the algorithm: the schedule, checkpoints, loggers, stop signals."""

    schedule: Schedule
    state: RunState
    store: CheckpointStore | None
    selection: Selection
    logger: MetricLogger
    progress: TrainingProgress
    stop: StopRequest
    deadline: Deadline
    on_validation: OnValidation | None = None


OnValidation = Callable[[int, Mapping[str, float]], str | None]
"""Called with the step and metrics of each validation; a reason that it returns ends the run."""

NEW_OBJECTS = 50_000
"""The number of new objects at which the garbage collector runs within a step."""


@contextmanager
def long_lived_objects() -> Iterator[None]:
    """Exclude all existing objects from garbage collections, and run them rarely, in the context.

    The caller collects after each step. Otherwise a step of 16,384 completions spends a quarter of
    a second on each collection of the libraries' objects, and a third of a second in all on those
    of its own objects, of which few are in cycles.
    """
    thresholds = gc.get_threshold()
    is_ours = not _has_frozen()
    gc.collect()
    if is_ours:
        gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if is_ours:
            gc.unfreeze()


_frozen_by_caller = False


def _has_frozen() -> bool:
    """Report whether the caller has frozen objects, now or at an earlier run of this process.

    They stay frozen, and could not be distinguished from what a run freezes.
    """
    global _frozen_by_caller
    # Counting a million takes a tenth of a second, so it is done once. Python 3.12 itself begins
    # with some hundreds; a process with torch has 100,000 and more.
    _frozen_by_caller = _frozen_by_caller or gc.get_freeze_count() >= 10_000
    return _frozen_by_caller


class Interrupted(Exception):
    """Raised when a signal interrupts a phase that can be repeated: validation or rollouts."""


Taken = TypeVar("Taken")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """What a run logs, shows and keeps of a step."""

    metrics: Mapping[str, float]
    """The metrics to log, by full name."""
    kept: Mapping[str, float]
    """The metrics that the position keeps, by their names in `metric_name`."""
    bad_steps: int
    """The number of consecutive bad steps, including this one."""
    num_rows: int
    num_tokens: int


class TrainingLoop(ABC, Generic[Taken]):
    """Runs the training of one algorithm; subclasses define a step and a validation."""

    def __init__(self, services: RunServices) -> None:
        self.services = services
        self.schedule = services.schedule
        self.state = services.state
        self.timers = Timers()
        self.latest_metrics: dict[str, float] = {}
        self._ended_by_alarm = self._is_early = False
        self.saving = Saving(services)

    @abstractmethod
    def step(self, position: Position) -> Taken:
        """Take the step that follows a position.

        Raises:
            Interrupted: A signal came before anything was changed (`check_stop`).
            NothingLeft: There is nothing left to train on, and nothing was changed.
        """

    @abstractmethod
    def summarize(
        self, position: Position, taken: Taken, timing: Mapping[str, float]
    ) -> StepSummary:
        """Return the metrics of a step that was taken at this position.

        Args:
            position: The position before the step.
            timing: The seconds of the step (`total_step_time`), and those of its parts by name.

        Raises:
            NonFiniteError: Too many steps in a row were not applied (`bad_steps`).
        """

    def after_logging(self, step: int, taken: Taken) -> None:
        """Write what a step leaves besides its metrics, which are logged by then."""

    @abstractmethod
    def measure(self, step: int) -> tuple[dict[str, float], dict[str, float]]:
        """Validate; return metrics by their names in logs, and in `metric_name`.

        Raises:
            Interrupted: A signal came meanwhile (`check_stop`).
        """

    def alarm(self) -> str | None:
        """Return the reason if an alarm ends the run; called after steps and validations."""
        return None

    def info(self, position: Position) -> dict[str, object]:
        """Return the entries of `training_info.json` that describe a position."""
        return {"total_steps": position.step, **position.metrics}

    def run(self, position: Position) -> RunOutcome:
        """Train from a position to the end, a signal or the deadline."""
        started = time.monotonic()
        with self.services.progress, long_lived_objects():
            position, ended = self._train(position)
        outcome = RunOutcome(
            step=position.step,
            ended=ended,
            signal=None if self.services.stop.signal is None else self.services.stop.signal.name,
            latest=self.saving.latest,
            best=None if self.services.store is None else self.services.store.best(),
            best_by=self.services.selection.key,
            metrics=self.latest_metrics,
            seconds=time.monotonic() - started,
            is_early=self._is_early,
            run_dir=self.state.run_dir,
        )
        # The weights end with this process: a run whose last save failed is no success.
        if self.services.store is None or not self.saving.num_missed:
            return outcome
        if self.saving.latest is not None:
            raise UnsavedError(
                f"the last checkpoint, of step {position.step}, could not be saved; the newest is "
                f"{self.saving.latest}",
                outcome=outcome,
            )
        raise UnsavedError(
            f"nothing of this run was saved, and its weights are lost: {self.saving.failure}",
            outcome=outcome,
        )

    def _train(self, position: Position) -> tuple[Position, Ending]:
        try:
            position = self._begin(position)
            ended: Ending = "finished" if self.services.stop.signal is None else "signal"
            while position.step < self.schedule.total_steps and ended == "finished":
                try:
                    position = self.take_step(position)
                    gc.collect(1)  # the cycles of this step, among no older objects
                except Interrupted:
                    ended = "signal"
                    # The seconds of a step that was not taken belong to no step.
                    self.timers.collect()
                    if position.step > 0 and not self.saving.is_saved(position.step):
                        self._save(position, goes_on=False)
                except NothingLeft as reason:
                    position, ended = self._end_early(position, reason)
                else:
                    position, ended = self._after_step(position)
        except Exception:
            # A checkpoint that was begun before the error is as good as any other.
            self.saving.salvage(position.step)
            raise
        self.saving.finish(position.step)
        if ended == "finished" and self._ended_by_alarm:
            ended = "alarm"
        return position, ended

    def take_step(self, position: Position) -> Position:
        """Take a step, log and show its metrics, and return the position after it.

        Raises:
            Interrupted, NothingLeft: Nothing was changed.
            NonFiniteError: Too many steps in a row were not applied.
        """
        with self.timers.time("total_step_time"):
            taken = self.step(position)
        timing = self.timers.collect()
        self.services.deadline.took("step", timing["total_step_time"])
        summary, step = self.summarize(position, taken, timing), position.step + 1
        self.services.logger.log(summary.metrics, step=step)
        self.services.progress.step(
            step, summary.metrics, pairs=summary.num_rows, tokens=summary.num_tokens
        )
        self.after_logging(step, taken)
        return position.stepped(bad_steps=summary.bad_steps, metrics=summary.kept)

    def check_stop(self) -> None:
        """Raise `Interrupted` if a signal has arrived; called in phases that can be repeated."""
        if self.services.stop.signal is not None:
            raise Interrupted

    def bad_steps(self, update: Update, bad_steps: int, *, where: str, kept: str) -> int:
        """Return the number of consecutive bad steps after this one; raise an error after too many.

        Args:
            bad_steps: The number of consecutive bad steps before.
            where: The step and its rows, in words.
            kept: A sentence about where the rows of the step were written.
        """
        if update.failure is None:
            return 0
        limit = self.schedule.section.max_bad_steps
        if bad_steps + 1 >= limit:
            raise NonFiniteError(
                f"{limit} steps in a row were not finite (the last: {update.failure} at {where}). "
                f"{kept}. Lower policy.optimizer.kwargs.lr, set policy.max_grad_norm, or train "
                "with policy.precision=float32; max_bad_steps is the limit."
            )
        return bad_steps + 1

    def _begin(self, position: Position) -> Position:
        # A validation precedes the first step if it is configured, or if a signal interrupted one
        # that was due. The checkpoint that was saved without its metrics then gets them.
        step = position.step
        if self.services.store is not None and step > 0:
            self.saving.latest = self.services.store.path_of(step)
        if self._validation_is_missing(position):
            position = self._validate(position)
            if self.services.store is not None and step > 0 and position.validated_at == step:
                self._save(position, goes_on=step < self.schedule.total_steps)
        self._check_validation(position)
        self._check_alarm(position)
        return position

    def _after_step(self, position: Position) -> tuple[Position, Ending]:
        # A run that must end only saves.
        self.saving.look(position.step)
        self._check_alarm(position)
        ended = self._reason_to_end(position)
        if ended == "finished" and self._validation_is_missing(position):
            position = self._validate(position)
            self._check_validation(position)
            self._check_alarm(position)
            if self.services.stop.signal is not None:
                ended = self._reason_to_end(position)
        if self.services.store is not None and (
            self._save_due(position.step) or ended != "finished"
        ):
            goes_on = ended == "finished" and position.step < self.schedule.total_steps
            self._save(position, goes_on=goes_on)
        return position, ended

    def _end_early(self, position: Position, reason: NothingLeft) -> tuple[Position, Ending]:
        # The validation and the save after a last step, unless they are done already.
        if position.step == 0:
            raise TrainingError(f"nothing was learned: {reason}")
        self.timers.collect()
        self._make_last(position, str(reason))
        if self._validation_is_missing(position) or not self.saving.is_saved(position.step):
            return self._after_step(position)
        return position, self._reason_to_end(position)

    def _check_validation(self, position: Position) -> None:
        # The metrics of an earlier step say nothing about these weights.
        if position.validated_at != position.step:
            return
        stopping, goal = self.schedule.early_stopping, self.schedule.goal
        if (
            stopping is not None
            and position.num_stale >= stopping.patience
            and position.step < self.schedule.total_steps
        ):
            best = "never measured"
            if position.best_watched is not None:
                best = f"no better than {position.best_watched:.4f}"
            self._make_last(
                position,
                f"step {position.step} is the last: {stopping.key} was {best} in "
                f"{counted(position.num_stale, 'validation')} (rm.early_stopping.patience)",
            )
        if self.services.on_validation is not None:
            why = self.services.on_validation(position.step, position.metrics)
            if why is not None and position.step < self.schedule.total_steps:
                self._make_last(position, f"step {position.step} is the last: {why}")
        if goal is None:
            return
        value = position.metrics.get(goal.key)
        if value is None:
            self.services.progress.message(f"step {position.step}: no {goal.key} to end the run by")
        elif value >= goal.threshold:
            self._make_last(
                position,
                f"step {position.step} is the last: {goal.key}={value:.4f} has reached "
                f"{goal.threshold:g} (grpo.stop_at_validation_threshold)",
            )

    def _check_alarm(self, position: Position) -> None:
        # An alarm does not end a run whose last step this was anyway.
        why = self.alarm()
        if why is not None and position.step < self.schedule.total_steps:
            self._ended_by_alarm = True
            self._make_last(position, f"step {position.step} is the last: {why}")

    def _make_last(self, position: Position, why: str) -> None:
        self.services.progress.message(why)
        self._is_early = True
        self.schedule = replace(self.schedule, total_steps=position.step)

    def _reason_to_end(self, position: Position) -> Ending:
        # Returns why the run ends after this step although there is more to do.
        is_last = position.step >= self.schedule.total_steps
        if self.services.stop.signal is not None:
            return "finished" if is_last and not self._validation_is_missing(position) else "signal"
        if is_last:
            return "finished"
        before: list[Work] = ["validation"] if self._validation_due(position.step) else []
        before += ["save"] if self._save_due(position.step) else []
        before += ["save"] if self.saving.is_under_way else []  # the next one waits for it
        return "deadline" if self.services.deadline.is_near(before=before) else "finished"

    def _save_due(self, step: int) -> bool:
        is_last = step >= self.schedule.total_steps
        periodic = step % self.schedule.saving.save_period == 0
        return self.services.store is not None and (is_last or periodic)

    def _validation_due(self, step: int) -> bool:
        schedule, section = self.schedule, self.schedule.section
        periodic = section.val_period > 0 and step % section.val_period == 0
        at_end = section.val_at_end and step >= schedule.total_steps
        # Without the metric a checkpoint could not become the best one.
        ranks_save = self._save_due(step) and (self.services.selection.key or "").startswith(
            "validation"
        )
        return schedule.has_validation and (periodic or at_end or ranks_save)

    def _validation_is_missing(self, position: Position) -> bool:
        if position.step == 0:
            return self.schedule.has_validation and self.schedule.section.val_at_start
        return self._validation_due(position.step) and position.validated_at != position.step

    def _validate(self, position: Position) -> Position:
        # If a signal comes meanwhile, the position is not changed: there may be little time left to
        # save, and a resumed run repeats the validation.
        started = time.monotonic()
        try:
            logged, keyed = self.measure(position.step)
        except Interrupted:
            self.timers.collect()
            self.state.hurries = True
            self.services.progress.message(
                f"the validation of step {position.step} was broken off, and nothing of it is "
                "recorded; the resumed run makes it anew"
            )
            return position
        total = "timing/validation/total_validation_time"
        logged[total] = math.fsum(v for k, v in logged.items() if k.startswith("timing/"))
        self.services.logger.log(logged, step=position.step)
        self.latest_metrics = {k: v for k, v in logged.items() if not k.startswith("timing/")}
        self.services.deadline.took("validation", time.monotonic() - started)
        position = position.validated(keyed)
        stopping = self.schedule.early_stopping
        # A validation that is only due to a save, or to a limit of steps that is raised later,
        # does not count: a run in pieces ends where it would have ended in one piece.
        if stopping is None or position.step % self.schedule.section.val_period:
            return position
        return stopping.watched(position)

    def _save(self, position: Position, *, goes_on: bool) -> None:
        self.saving.save(position, self.info(position), goes_on=goes_on)
        self.timers.collect()  # discards the times of scoring for the checkpoint


# The checkpoints of a run in its loop: they are begun, and then complete or missed.

ALARM_AFTER_MISSES = 2
"""The number of consecutive failed saves from which on each failure is reported as an alarm."""

WAITED = "timing/train/checkpointing"
BEHIND = "timing/train/checkpointing_in_background"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    step: int
    save: SaveUnderWay
    seconds: float
    """The seconds that the beginning of the save took."""
    in_background: bool
    remark: str


class Saving:
    """Saves the checkpoints of a run, one after the other, in the foreground or the background.

    After an error of the disk a checkpoint is missing, but the run goes on. Background saves are
    polled between steps; the next save and the end of the run wait for them.
    """

    def __init__(self, services: RunServices) -> None:
        self.latest: Path | None = None
        """The newest complete checkpoint."""
        self.num_missed = 0
        """The number of consecutive failed saves."""
        self.failure: CheckpointError | None = None
        """The error of the last failed save."""
        self._services = services
        self._begun: _Begun | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a checkpoint has been begun whose outcome is not known yet."""
        return self._begun is not None

    def save(self, position: Position, info: Mapping[str, object], *, goes_on: bool) -> None:
        """Save a checkpoint, or begin to save it in the background.

        Args:
            info: The content of `training_info.json`.
            goes_on: Whether training goes on meanwhile. Otherwise the checkpoint is complete or
                missed when this returns, and nothing is copied for it.
        """
        assert self._services.store is not None
        started = time.monotonic()
        in_background = goes_on and self._services.state.saves_in_background
        metric = position.metrics.get(self._services.selection.key or "")
        with self._services.progress.phase("saving"):
            self.finish(position.step)
            try:
                save = self._services.store.begin(
                    position.step,
                    partial(
                        self._services.state.write, position=position, in_background=in_background
                    ),
                    metric=metric,
                    info=info,
                )
            except CheckpointError as error:
                self._miss(error)
                return
            unranked = self._services.selection.key is not None and metric is None
            self._begun = _Begun(
                step=position.step,
                save=save,
                seconds=save.seconds,
                in_background=in_background,
                remark=f"; without {self._services.selection.key} it cannot be the best"
                if unranked
                else "",
            )
            if not in_background:
                self.finish(position.step)
        self._services.logger.log({WAITED: time.monotonic() - started}, step=position.step)

    def look(self, step: int) -> None:
        """Check on a background save without waiting, and log its outcome once it has finished."""
        if self._begun is not None and self._begun.save.ready():
            self.finish(step)

    def finish(self, step: int) -> None:
        """Wait for a background save, if there is one, and log its outcome at `step`."""
        if self._begun is None:
            return
        begun, self._begun = self._begun, None
        try:
            path = begun.save.finish()
        except CheckpointError as error:
            self._miss(error)
            return
        self.latest = path
        self.num_missed = 0
        self._services.deadline.took("save", begun.save.seconds)
        if begun.in_background:
            self._services.logger.log({BEHIND: begun.save.seconds - begun.seconds}, step=step)
        self._services.progress.message(f"saved {path}{begun.remark}", is_routine=True)

    def salvage(self, step: int) -> None:
        """Finish a background save, if possible, after the run has failed at `step`."""
        # The error that ended the run is the one to report.
        with suppress(Exception):
            self.finish(step)

    def is_saved(self, step: int) -> bool:
        """Report whether a step is saved or needs no save; wait for a save in progress."""
        if self._begun is not None and self._begun.step == step:
            self.finish(step)
        return self._services.store is None or self.latest == self._services.store.path_of(step)

    def _miss(self, error: CheckpointError) -> None:
        self.num_missed += 1
        self.failure = error
        alarm = "ALARM: " if self.num_missed >= ALARM_AFTER_MISSES else ""
        self._services.progress.message(
            f"{alarm}{error} (missed saves in a row: {self.num_missed})"
        )
