"""A checkpoint between its beginning and its name: who wants it asks now and then, or waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laurel.models.background import Background

Written = Callable[[bool], float | None]
"""Asks whoever fills the directory of a checkpoint: the seconds that the writing took, or None
while it goes on; given True, it waits for the end. It raises what went wrong, after all have ended
that wrote, and is asked from the thread that began the save alone."""


class SaveUnderWay:
    """One save: first it is being written, then sealed, then it is whole or there is none."""

    def __init__(self, written: Written, seal: Callable[[], Path], *, seconds: float) -> None:
        """Nothing is asked yet.

        Args:
            written: See there.
            seal: Forces the files to the disk and gives them their name; leaves nothing behind
                where it fails.
            seconds: What the beginning took.
        """
        self._written = written
        self._seal = seal
        self._seconds = seconds
        self._sealing: Background | None = None
        self._path: Path | None = None
        self._failure: Exception | None = None

    @property
    def seconds(self) -> float:
        """Of work since its beginning, without the time in which nobody asked."""
        return self._seconds

    @property
    def is_over(self) -> bool:
        """Whether it is known to be whole, or that there is none."""
        return self._path is not None or self._failure is not None

    @property
    def is_sealing(self) -> bool:
        """Whether all is written, and the rest needs nobody but time."""
        return self._sealing is not None

    def ready(self) -> bool:
        """Whether `finish` would come back at once. It never waits, and brings the save on."""
        if self.is_over:
            return True
        if self._sealing is None:
            seconds = self._ask(is_awaited=False)
            if seconds is not None:
                self._sealing = Background("laurel-sealing")
                self._sealing.start(self._sealed)
            return self.is_over
        return self._sealing.outcome(is_awaited=False) is not None

    def finish(self) -> Path:
        """Wait for the end; where the checkpoint is. May be called again, with the same outcome.

        Raises:
            CheckpointError: The disk is full or refuses. Earlier checkpoints are as they were.
            Exception: What else went wrong in writing it.
        """
        if not self.is_over:
            if self._sealing is not None:
                self._sealing.outcome(is_awaited=True)
            elif self._ask(is_awaited=True) is not None:
                self._sealed()
        if self._failure is not None:
            raise self._failure
        assert self._path is not None
        return self._path

    def _ask(self, *, is_awaited: bool) -> float | None:
        try:
            seconds = self._written(is_awaited)
        except Exception as error:
            self._failure = error
            return None
        assert seconds is not None or not is_awaited
        self._seconds += seconds or 0.0
        return seconds

    def _sealed(self) -> Any:
        started = time.monotonic()
        try:
            path = self._seal()
        except Exception as error:
            self._failure = error
        else:
            self._seconds += time.monotonic() - started
            self._path = path
