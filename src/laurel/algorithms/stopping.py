"""When a run ends before its last step: a signal, or a time budget."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from laurel.errors import ConfigError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


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
        self._end = None if budget is None else clock() + parse_duration(budget)
        self._longest_step = 0.0
        self._longest_save = 0.0

    def step_took(self, seconds: float) -> None:
        """Learn how long a step (with its validation) takes."""
        self._longest_step = max(self._longest_step, seconds)

    def save_took(self, seconds: float) -> None:
        """Learn how long a save takes."""
        self._longest_save = max(self._longest_save, seconds)

    def is_near(self) -> bool:
        """Whether one more step and a save after it might end too late."""
        if self._end is None:
            return False
        return self._clock() + self._longest_step + 1.5 * self._longest_save >= self._end


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
