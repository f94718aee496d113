"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timers:
    """Named stopwatches of one thread, summed until they are collected.

    They nest: time inside an inner timer also counts for the outer one, and a name that is timed
    inside itself counts once. Example::

        with timers.time("total_step_time"):
            with timers.time("forward"):
                ...
        timers.collect()  # {"forward": 0.8, "total_step_time": 1.0}
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._running: set[str] = set()

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the time spent inside, also when it ends in an exception."""
        if name in self._running:
            yield
            return
        self._running.add(name)
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] += self._clock() - start
            self._running.remove(name)

    def collect(self) -> dict[str, float]:
        """Seconds per name since the last call. A timer still running counts when it has ended."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds
