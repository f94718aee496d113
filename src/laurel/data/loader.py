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
            self._order = permutation(self.num_rows, self.seed, epoch)
            self._epoch = epoch
        first = within * self.batch_size
        return [int(row) for row in self._order[first : first + self.batch_size]]

    def samples_before(self, step: int) -> int:
        """Rows read before step `step` (from 0)."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self.num_rows + within * self.batch_size


class Stream:
    """The rows of all epochs as one endless stream, a pure function of the place and a seed.

    For steps that take as many rows as they need. Each epoch has its own permutation; a step may
    take the end of one and the beginning of the next.
    """

    def __init__(self, num_rows: int, *, shuffle: bool, seed: int) -> None:
        self.num_rows = num_rows
        self.shuffle = shuffle
        self.seed = seed
        self._orders: dict[int, np.ndarray] = {}

    def rows(self, start: int, count: int) -> list[int]:
        """Indices of the rows at the places `start` to `start + count`."""
        places = (divmod(place, self.num_rows) for place in range(start, start + count))
        return [self._row(epoch, within) for epoch, within in places]

    def _row(self, epoch: int, within: int) -> int:
        if not self.shuffle:
            return within
        if epoch not in self._orders:
            self._orders = {epoch: permutation(self.num_rows, self.seed, epoch)}
        return int(self._orders[epoch][within])


def permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the rows in an epoch."""
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    # argsort of random keys: unlike `permutation`, its stream is fixed by the bit generator
    return np.argsort(generator.random(num_rows), kind="stable")
