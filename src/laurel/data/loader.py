"""Which rows make up which step."""

from __future__ import annotations

import math

import numpy as np


class StepOrder:
    """The rows of every step as a pure function of the step and a seed.

    There is no state to save: a run that goes on at step `n` reads what an uninterrupted run reads
    at step `n`. Each epoch has its own permutation; the last step of an epoch takes what is left,
    so no row is lost.
    """

    def __init__(self, num_rows: int, batch_size: int, *, shuffle: bool, seed: int) -> None:
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.steps_per_epoch = math.ceil(num_rows / batch_size)
        self._epoch = -1
        self._order = np.arange(num_rows)

    def epoch_of(self, step: int) -> int:
        """The epoch that step `step` (from 0) belongs to."""
        return step // self.steps_per_epoch

    def rows(self, step: int) -> list[int]:
        """Indices of the rows of step `step` (from 0)."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if self.shuffle and epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            # argsort of random keys: unlike `permutation`, its stream is fixed by the bit generator
            self._order = np.argsort(generator.random(self.num_rows), kind="stable")
            self._epoch = epoch
        first = within * self.batch_size
        return [int(row) for row in self._order[first : first + self.batch_size]]

    def samples_before(self, step: int) -> int:
        """Rows read before step `step` (from 0)."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self.num_rows + within * self.batch_size
