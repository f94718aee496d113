"""When a run ends before its last step: a signal, or a time budget."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection
from types import FrameType, TracebackType
from typing import Any, Literal

from laurel.errors import ConfigError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

Work = Literal["step", "validation", "save"]

SAVE_SAFETY = 1.5
"""A disk may be slower the next time."""
SHARE_IN_RESERVE, LARGEST_RESERVE = 0.1, 60.0
"""Share of the budget, and seconds at most, kept for a save while none has been measured."""


class StopRequest:
    """Turns the first signal into a flag that the loop reads between steps.

    A second one ends the process at once: whoever sends it does not want to wait for a save.
    """

    def __init__(self, on_signal: Callable[[str], None] = lambda name: None) -> None:
        """Remember whom to tell.

        Args:
            on_signal: Called with the name of the first signal.
        """
        self.signal: signal.Signals | None = None
        self._on_signal = on_signal
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        # The signal may have come in the middle of a print, which cannot be entered twice.
        with contextlib.suppress(RuntimeError):
            self._on_signal(self.signal.name)


class Deadline:
    """The time by which the last checkpoint has to be complete."""

    def __init__(self, budget: str | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock.

        Args:
            budget: `DD:HH:MM:SS`, or None for no limit.
            clock: Seconds.
        """
        self._clock = clock
        seconds = math.inf if budget is None else parse_duration(budget)
        self._end = clock() + seconds
        self._longest: dict[Work, float] = {
            "step": 0.0,
            "validation": 0.0,
            "save": min(LARGEST_RESERVE, seconds * SHARE_IN_RESERVE),
        }
        self._seen: set[Work] = set()

    def took(self, work: Work, seconds: float) -> None:
        """Learn how long something takes."""
        known = self._longest[work] if work in self._seen else 0.0
        self._longest[work] = max(known, seconds)
        self._seen.add(work)

    def is_near(self, *, before: Collection[Work] = ()) -> bool:
        """Whether one more step, and the save that must follow it, might end too late.

        Args:
            before: What the run would do before that step.
        """
        to_come = math.fsum(self._longest[work] for work in (*before, "step"))
        return self._clock() + to_come + SAVE_SAFETY * self._longest["save"] >= self._end


def parse_duration(text: str) -> float:
    """Seconds of a `DD:HH:MM:SS`.

    Raises:
        ConfigError: Not of that form.
    """
    match = re.fullmatch(r"(\d+):(\d{1,2}):(\d{1,2}):(\d{1,2})", text)
    if match is None:
        raise ConfigError(
            f"checkpointing.checkpoint_must_save_by={text!r} is not of the form DD:HH:MM:SS, "
            "e.g. 00:03:45:00 for three hours and three quarters"
        )
    days, hours, minutes, seconds = (int(part) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds
