"""Training a reward model: the loop.

    preferences --tokens--> micro-batches --model--> scores --loss--> gradient --> step

Everything it needs is made elsewhere (`cli/assemble.py`) and handed in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from laurel.algorithms.batches import Batcher
from laurel.algorithms.learner import Learner, Update
from laurel.algorithms.losses import RewardLoss
from laurel.algorithms.run_state import Position, RunState, write_bad_step
from laurel.algorithms.selection import Selection
from laurel.algorithms.stopping import Deadline, StopRequest, Work
from laurel.algorithms.validation import Validation, validate
from laurel.config.reward_training import RewardTrainingRun
from laurel.data.loader import StepOrder
from laurel.errors import CheckpointError, NonFiniteError
from laurel.models.checkpoint import CheckpointStore
from laurel.models.scoring import ScoringContract
from laurel.observe.console import PairRow, print_pairs
from laurel.observe.loggers import MetricLogger
from laurel.observe.progress import Phase, TrainingProgress
from laurel.observe.timers import Timers
from laurel.types import PreferenceSample

ALARM_AFTER_MISSES = 2
"""Saves in a row that fail before the run says so with every step."""


Ending = Literal["finished", "signal", "deadline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    step: int
    ended: Ending
    signal: str | None = None
    latest: Path | None = None
    """The newest checkpoint."""
    best: Path | None = None
    """The best one by the run's metric."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The latest of every validation metric, by full name."""
    seconds: float = 0.0


class RewardTraining:
    """One run of reward-model training."""

    def __init__(
        self,
        config: RewardTrainingRun,
        *,
        learner: Learner,
        loss: RewardLoss,
        batcher: Batcher,
        contract: ScoringContract,
        train: Sequence[PreferenceSample],
        validation: Mapping[str, Sequence[PreferenceSample]],
        selection: Selection,
        state: RunState,
        store: CheckpointStore | None,
        logger: MetricLogger,
        progress: TrainingProgress,
        stop: StopRequest,
        deadline: Deadline,
    ) -> None:
        self.config = config
        self.learner = learner
        self.loss = loss
        self.batcher = batcher
        self.contract = contract
        self.train = train
        self.validation = validation
        self.selection = selection
        self.state = state
        self.store = store
        self.logger = logger
        self.progress = progress
        self.stop = stop
        self.order = step_order(config, len(train))
        self.total_steps = total_steps(config, len(train))
        self.deadline = deadline
        self.timers = Timers()
        self.latest_metrics: dict[str, float] = {}
        self._missed_saves = 0
        self._latest: Path | None = None

    def run(self, position: Position) -> Outcome:
        """Train from a position to the end, a signal or the deadline."""
        started = time.monotonic()
        with self.progress:
            position = self._begin(position)
            ended: Ending = "finished" if self.stop.signal is None else "signal"
            while position.step < self.total_steps and ended == "finished":
                position = self._step(position)
                position, ended = self._after_step(position)
        step = position.step
        if self.store is not None and self._missed_saves:
            raise CheckpointError(
                f"the last checkpoint, of step {step}, could not be saved; the newest is "
                f"{self._latest or 'none'}"
            )
        return Outcome(
            step=step,
            ended=ended,
            signal=None if self.stop.signal is None else self.stop.signal.name,
            latest=self._latest,
            best=None if self.store is None else self.store.best(),
            metrics=self.latest_metrics,
            seconds=time.monotonic() - started,
        )

    # ------------------------------------------------------------------------------------- a step

    def _step(self, position: Position) -> Position:
        rows = self.order.rows(position.step)
        samples = [self.train[row] for row in rows]
        size = self.config.policy.train_micro_batch_size
        started = time.monotonic()
        with self.timers.time("total_step_time"):
            batch = self.batcher.cut(samples, micro_batch_size=size)
            update = self.learner.update(batch, self.loss)
        self.deadline.took("step", time.monotonic() - started)
        step = position.step + 1
        num_tokens = sum(sum(sample.tokens.lengths_G) for sample in samples)
        seconds = self.timers.collect()["total_step_time"]
        metrics = {f"train/{name}": value for name, value in update.metrics.items()} | {
            "train/global_valid_seqs": float(sum(len(s.tokens.lengths_G) for s in samples)),
            "train/global_valid_toks": float(num_tokens),
            "train/epoch": float(self.order.epoch_of(position.step)),
            "timing/train/total_step_time": seconds,
            "performance/computed_tokens": float(sum(m.num_tokens for m in batch)),
            "performance/num_micro_batches": float(len(batch)),
            "performance/tokens_per_second": num_tokens / seconds,
            "performance/groups_per_second": len(samples) / seconds,
        }
        bad_steps = self._judge(update, step, samples, position.bad_steps)
        metrics["train/bad_steps_in_a_row"] = float(bad_steps)
        self.logger.log(metrics, step=step)
        self.progress.step(step, metrics, pairs=len(samples), tokens=num_tokens)
        train_metrics = {f"train_{name}": value for name, value in update.metrics.items()}
        return position.stepped(bad_steps=bad_steps, metrics=train_metrics)

    def _judge(
        self, update: Update, step: int, samples: Sequence[PreferenceSample], bad_steps: int
    ) -> int:
        """Count a step that was not applied, keep its rows, and stop after too many."""
        if update.failure is None:
            return 0
        if not update.metrics and self.loss.count([s.preference for s in samples]) == 0:
            self.progress.message(f"step {step} skipped: {update.failure}")
            return bad_steps
        sources = [sample.preference.source for sample in samples]
        try:
            path = write_bad_step(self.state.run_dir, step, samples, update.failure)
            kept = f"Its rows are in {path}"
        except OSError as error:
            kept = f"Its rows could not be written down: {error}"
        self.progress.message(f"step {step} not applied: {update.failure}. {kept}")
        limit = self.config.rm.max_bad_steps
        if bad_steps + 1 >= limit:
            shown = ", ".join(sources[:8]) + (" ..." if len(sources) > 8 else "")
            raise NonFiniteError(
                f"{limit} steps in a row were not finite (the last: {update.failure} at step {step}"
                f", rows {shown}). {kept}. Lower policy.optimizer.kwargs."
                "lr, set policy.max_grad_norm, or train with policy.precision=float32; "
                "rm.max_bad_steps is the limit."
            )
        return bad_steps + 1

    def _after_step(self, position: Position) -> tuple[Position, Ending]:
        """Validate and save where it is due; a run that is to end only saves."""
        ended = self._reason_to_end(position)
        if ended == "finished" and self._validation_due(position.step):
            position = self._validate(position)
            if self.stop.signal is not None:
                ended = self._reason_to_end(position)
        if self.store is not None and (self._save_due(position.step) or ended != "finished"):
            self._save(position)
        return position, ended

    def _begin(self, position: Position) -> Position:
        """What comes before the first step.

        That is a validation where one is asked for, or where a signal took one that was due; the
        checkpoint that was saved without it then gets its figures.
        """
        step = position.step
        if self.store is not None and step > 0:
            self._latest = self.store.path_of(step)
        if self._validation_is_missing(position):
            position = self._validate(position)
            if self.store is not None and step > 0 and position.validated_at == step:
                self._save(position)
        return position

    def _reason_to_end(self, position: Position) -> Ending:
        """Why the run ends after this step, if there is more to do."""
        is_last = position.step >= self.total_steps
        if self.stop.signal is not None:
            return "finished" if is_last and not self._validation_is_missing(position) else "signal"
        if is_last:
            return "finished"
        before: list[Work] = ["validation"] if self._validation_due(position.step) else []
        before += ["save"] if self._save_due(position.step) else []
        return "deadline" if self.deadline.is_near(before=before) else "finished"

    # ------------------------------------------------------------------------ validating and saving

    def _save_due(self, step: int) -> bool:
        is_last = step >= self.total_steps
        periodic = step % self.config.checkpointing.save_period == 0
        return self.store is not None and (is_last or periodic)

    def _validation_due(self, step: int) -> bool:
        rm = self.config.rm
        periodic = rm.val_period > 0 and step % rm.val_period == 0
        at_end = rm.val_at_end and step >= self.total_steps
        ranks_save = self._save_due(step) and (self.selection.key or "").startswith("validation-")
        return bool(self.validation) and (periodic or at_end or ranks_save)

    def _validation_is_missing(self, position: Position) -> bool:
        if position.step == 0:
            return bool(self.validation) and self.config.rm.val_at_start
        return self._validation_due(position.step) and position.validated_at != position.step

    def _validate(self, position: Position) -> Position:
        """The position with the figures of all sets; as it was where a signal comes meanwhile.

        There may be little time left to save, and a resumed run makes up for the validation.
        """
        try:
            return self._validate_all(position)
        except _CutShort:
            self.timers.collect()
            return position

    def _validate_all(self, position: Position) -> Position:
        step, started = position.step, time.monotonic()
        logged: dict[str, float] = {}
        keyed: dict[str, float] = {}
        for name, samples in self.validation.items():
            with (
                self.progress.phase(f"validating {name}", len(samples)) as phase,
                self.timers.time("total_validation_time"),
            ):
                validation = validate(
                    self.learner, samples, loss=self.loss, batcher=self.batcher,
                    contract=self.contract, config=self.config.rm,
                    on_groups=partial(self._validated, phase),
                )  # fmt: skip
            seconds = self.timers.collect()["total_validation_time"]
            logged |= {f"validation-{name}/{k}": v for k, v in validation.metrics.items()}
            logged[f"timing/validation-{name}/total_validation_time"] = seconds
            keyed |= {f"validation-{name}_{k}": v for k, v in validation.metrics.items()}
            self._show(name, step, samples, validation)
            if name == next(iter(self.validation)):
                self.state.remember_reference(validation.scores_BG, step=step)
        total = "timing/validation/total_validation_time"
        logged[total] = math.fsum(v for k, v in logged.items() if k.startswith("timing/"))
        self.logger.log(logged, step=step)
        self.latest_metrics = {k: v for k, v in logged.items() if not k.startswith("timing/")}
        self.deadline.took("validation", time.monotonic() - started)
        return position.validated(keyed)

    def _validated(self, phase: Phase, count: int) -> None:
        phase.advance(count)
        if self.stop.signal is not None:
            raise _CutShort

    def _show(
        self, name: str, step: int, samples: Sequence[PreferenceSample], validation: Validation
    ) -> None:
        shown = ("loss", "accuracy", "margin_mean", "score_length_correlation", "ece")
        figures = "  ".join(
            f"{k} {validation.metrics[k]:.4f}" for k in shown if k in validation.metrics
        )
        self.progress.message(f"step {step}  validation-{name}  {figures}")
        count = self.config.logger.num_val_samples_to_print
        pairs = zip(samples, validation.scores_BG, strict=False)
        rows = [PairRow.of(sample.preference, scores) for sample, scores in pairs]
        table = [row for row in rows if row is not None][:count]
        if table:
            print_pairs(self.progress.console, f"validation-{name}, step {step}", table)
            self.logger.log_table(
                f"validation-{name}/pairs", PairRow.columns(), [row.cells for row in table],
                step=step,
            )  # fmt: skip

    def _save(self, position: Position) -> None:
        assert self.store is not None
        started = time.monotonic()
        metric = position.metrics.get(self.selection.key or "")
        try:
            with self.progress.phase("saving"), self.timers.time("checkpointing"):
                self._latest = self.store.save(
                    position.step,
                    lambda directory: self.state.write(directory, self.learner, position),
                    metric=metric,
                    info=self._info(position),
                )
        except CheckpointError as error:
            self._missed_saves += 1
            alarm = "ALARM: " if self._missed_saves >= ALARM_AFTER_MISSES else ""
            self.progress.message(f"{alarm}{error} (missed saves in a row: {self._missed_saves})")
            return
        finally:
            timing = self.timers.collect()
        self._missed_saves = 0
        self.deadline.took("save", time.monotonic() - started)
        self.logger.log({"timing/train/checkpointing": timing["checkpointing"]}, step=position.step)
        unranked = self.selection.key is not None and metric is None
        reason = f"; without {self.selection.key} it cannot be the best" if unranked else ""
        self.progress.message(f"saved {self._latest}{reason}")

    def _info(self, position: Position) -> dict[str, object]:
        """`training_info.json`, in the names its readers know."""
        return {
            "epoch": self.order.epoch_of(max(position.step - 1, 0)),
            "step": position.step % self.order.steps_per_epoch,
            "total_steps": position.step,
            "consumed_samples": self.order.samples_before(position.step),
            **position.metrics,
        }


class _CutShort(Exception):
    """A signal came in the middle of a validation."""


def step_order(config: RewardTrainingRun, num_rows: int) -> StepOrder:
    """The order of the training rows."""
    return StepOrder(
        num_rows,
        config.policy.train_global_batch_size,
        shuffle=config.data.shuffle,
        seed=config.rm.seed,
    )


def total_steps(config: RewardTrainingRun, num_rows: int) -> int:
    """Steps of the run: all epochs, or the limit."""
    steps = config.rm.max_num_epochs * step_order(config, num_rows).steps_per_epoch
    return steps if config.rm.max_num_steps < 0 else min(steps, config.rm.max_num_steps)
