"""The checkpoints of a run, as its loop sees them: begun, and then whole or missed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from laurel.algorithms.run_state import Position, RunState
from laurel.algorithms.selection import Selection
from laurel.algorithms.stopping import Deadline
from laurel.errors import CheckpointError
from laurel.models.checkpoint import CheckpointStore
from laurel.models.save_under_way import SaveUnderWay
from laurel.observe.loggers import MetricLogger
from laurel.observe.progress import TrainingProgress

ALARM_AFTER_MISSES = 2
"""Saves in a row that fail before the run says so with every step."""

WAITED = "timing/train/checkpointing"
BEHIND = "timing/train/checkpointing_in_background"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    step: int
    save: SaveUnderWay
    seconds: float
    """That its beginning took."""
    in_background: bool
    remark: str


class Saving:
    """Saves one checkpoint after the other, in front of training or behind it.

    A disk that refuses costs a checkpoint and not the run, whenever it refuses. What is behind
    training is looked after between steps; the next save and the end of the run wait for it.
    """

    def __init__(
        self,
        state: RunState,
        store: CheckpointStore | None,
        *,
        selection: Selection,
        logger: MetricLogger,
        progress: TrainingProgress,
        deadline: Deadline,
    ) -> None:
        """Save nothing yet; see `training_loop.Surroundings`."""
        self.latest: Path | None = None
        """The newest checkpoint that is whole."""
        self.num_missed = 0
        """Saves in a row that failed."""
        self.failure: CheckpointError | None = None
        """Of the last save that failed."""
        self._state = state
        self._store = store
        self._selection = selection
        self._logger = logger
        self._progress = progress
        self._deadline = deadline
        self._begun: _Begun | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a checkpoint has been begun and is not known to be whole or missed."""
        return self._begun is not None

    def save(self, position: Position, info: Mapping[str, object], *, goes_on: bool) -> None:
        """Save a position, or begin to.

        Args:
            position: Where the run is.
            info: Goes into `training_info.json`.
            goes_on: There is training to be done meanwhile; otherwise nothing is copied, and the
                checkpoint is whole, or missed, when this returns.
        """
        assert self._store is not None
        started = time.monotonic()
        in_background = goes_on and self._state.saves_in_background
        metric = position.metrics.get(self._selection.key or "")
        with self._progress.phase("saving"):
            self.finish(position.step)
            try:
                save = self._store.begin(
                    position.step,
                    partial(self._state.write, position=position, in_background=in_background),
                    metric=metric,
                    info=info,
                )
            except CheckpointError as error:
                self._miss(error)
                return
            unranked = self._selection.key is not None and metric is None
            self._begun = _Begun(
                step=position.step,
                save=save,
                seconds=save.seconds,
                in_background=in_background,
                remark=f"; without {self._selection.key} it cannot be the best" if unranked else "",
            )
            if not in_background:
                self.finish(position.step)
        self._logger.log({WAITED: time.monotonic() - started}, step=position.step)

    def look(self, step: int) -> None:
        """Bring on what is under way, and say what became of it. Never waits.

        Args:
            step: Where the run is now.
        """
        if self._begun is not None and self._begun.save.ready():
            self.finish(step)

    def finish(self, step: int) -> None:
        """Wait for what is under way, if anything is.

        Args:
            step: Where the run is now.
        """
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
        self._deadline.took("save", begun.save.seconds)
        if begun.in_background:
            self._logger.log({BEHIND: begun.save.seconds - begun.seconds}, step=step)
        self._progress.message(f"saved {path}{begun.remark}", is_routine=True)

    def salvage(self, step: int) -> None:
        """The run has failed: keep what is under way, if that can still be written.

        Args:
            step: Where the run is now.
        """
        with suppress(Exception):
            self.finish(step)

    def is_saved(self, step: int) -> bool:
        """Whether there is nothing to save, or that has been done; waits for it where need be."""
        if self._begun is not None and self._begun.step == step:
            self.finish(step)
        return self._store is None or self.latest == self._store.path_of(step)

    def _miss(self, error: CheckpointError) -> None:
        self.num_missed += 1
        self.failure = error
        alarm = "ALARM: " if self.num_missed >= ALARM_AFTER_MISSES else ""
        self._progress.message(f"{alarm}{error} (missed saves in a row: {self.num_missed})")
