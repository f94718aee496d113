"""Work that goes on behind the rest of a program: one piece after the other, in one thread."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Background:
    """Pieces of work in the order in which they were given; after one that fails, none is begun.

    They are of one batch until somebody was told what came of it; then a new batch begins. The
    process does not end before its pieces have.
    """

    def __init__(self, name: str) -> None:
        """Start nothing yet.

        Args:
            name: Of the thread.
        """
        self._name = name
        self._pieces: list[Future[float]] = []
        self._has_told = False

    def start(self, work: Callable[[], object]) -> None:
        """Do a piece of work when those before it are done.

        Args:
            work: Let go, with all that it holds, as soon as it is done.
        """
        if self._has_told:
            self._pieces = []
            self._has_told = False
        thread = ThreadPoolExecutor(1, self._name)
        self._pieces.append(thread.submit(_timed, work, tuple(self._pieces)))
        thread.shutdown(wait=False)  # it ends with the piece

    def outcome(self, *, is_awaited: bool) -> float | None:
        """Seconds of work, once all pieces are done; None while they are not.

        Args:
            is_awaited: Do not come back before they are.

        Raises:
            Exception: What went wrong in one of them; again in every call, until a new batch.
        """
        if not is_awaited and not all(piece.done() for piece in self._pieces):
            return None
        wait(self._pieces)
        self._has_told = True
        return sum(piece.result() for piece in self._pieces)


def _timed(work: Callable[[], object], before: tuple[Future[float], ...]) -> float:
    wait(before)
    if any(piece.exception() is not None for piece in before):
        return 0.0
    started = time.monotonic()
    try:
        work()
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # or they would keep what was to be written,
        del work  # and so would this one
        raise
    return time.monotonic() - started
