"""Defines the position of a run, and the conditions that end it before its last step.

A run ends early at a signal, at the end of its time budget, or without further tasks.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, ClassVar, Literal, NoReturn

from laurel.errors import ConfigError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

Work = Literal["step", "validation", "save"]

WILL_SAVE = "saving after this step, then ending (again: at once, unsaved)"
"""The message about the effects of the first signal and of the second."""

SAVE_SAFETY = 1.5
"""The factor on the expected time of a save, because the disk may be slower the next time."""
SHARE_IN_RESERVE, LARGEST_RESERVE = 0.1, 60.0
"""The share of the budget, and the maximum seconds, kept for a save until one is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position of a run: the number of its steps, and the state that decisions depend on."""

    step: int = 0
    bad_steps: int = 0
    """The number of consecutive steps that were not applied."""
    validated_at: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the weights of this step. Older values are dropped, because they could make
    weights the best that were never measured, or whose metrics were not finite.
    """
    before: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the validation before the first step; empty if there was none."""
    best_watched: float | None = None
    """The best value so far of the metric that early stopping watches."""
    num_stale: int = 0
    """The number of validations since that value."""

    def stepped(self, *, bad_steps: int, metrics: Mapping[str, float]) -> Position:
        """Return the position after one more step."""
        return replace(self, step=self.step + 1, bad_steps=bad_steps, metrics=metrics)

    def validated(self, metrics: Mapping[str, float]) -> Position:
        """Return the same position with the metrics of a validation."""
        return replace(
            self,
            validated_at=self.step,
            metrics={**self.metrics, **metrics},
            before=self.before if self.step else metrics,
        )


class NothingLeft(Exception):
    """Raised if there is no further step; the message gives the reason."""


class SignalCount:
    """A count of received signals in memory that forked processes share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    @property
    def count(self) -> int:
        """The number of received signals, at most two."""
        return self._memory[0]

    def add(self) -> None:
        """Count one more signal, up to two."""
        self._memory[0] = min(self._memory[0] + 1, 255)


_counted: SignalCount | None = None


def count_signals() -> SignalCount:
    """Share one signal count between the `StopRequest`s of this process and of its forks."""
    global _counted
    _counted = SignalCount()
    return _counted


def end_unsaved(status: int) -> NoReturn:
    """End this process immediately with an exit status, and print that it ends unsaved."""
    # The main thread may hold the console's lock, and a live display has hidden the cursor.
    shown = "\x1b[?25h\n" if os.isatty(2) else ""
    with suppress(OSError):
        os.write(2, f"{shown}ended unsaved\n".encode())
    os._exit(status)


class StopRequest:
    """A flag that the first signal sets, and that the loop reads between steps.

    A second signal ends the process immediately, without a save. A separate thread receives both,
    because Python's handlers wait until the main thread returns from torch, which takes as long as
    a backward pass.
    """

    has_begun: ClassVar[bool] = False
    """Whether this process has begun to listen for signals, because a run is being set up."""
    receiving: ClassVar[StopRequest | None] = None
    """The request that receives this process's signals, if one does."""

    def __init__(
        self,
        on_signal: Callable[[str], None] = lambda name: None,
        *,
        leave: Callable[[int], object] = end_unsaved,
    ) -> None:
        """Take the callbacks; signals are received while the context is open.

        Args:
            on_signal: Called once, in another thread, with the name of the first signal.
            leave: Called with the exit status at the second signal.
        """
        self.signal: signal.Signals | None = None
        self._heard_at = math.inf
        self._on_signal = on_signal
        self._leave = leave
        self._stack = ExitStack()
        self.before: dict[signal.Signals, Any] = {}
        """The handlers of the signals before, which a fork of this process gets back."""

    def __enter__(self) -> StopRequest:
        StopRequest.has_begun = True
        if threading.current_thread() is threading.main_thread():
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            listener = threading.Thread(target=self._listen, args=(ours,), daemon=True)
            listener.start()
            self._stack.callback(theirs.close)
            self._stack.callback(listener.join)
            # This ends the listener; a close would not, where a fork holds the socket as well.
            self._stack.callback(theirs.shutdown, socket.SHUT_RDWR)
            previous = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            self._stack.callback(signal.set_wakeup_fd, previous)
            for number in SIGNALS:
                # Without a handler Python would not write signals to the listener.
                previous_handler = signal.signal(number, lambda *_: None)
                self._stack.callback(signal.signal, number, previous_handler)
                self.before[number] = previous_handler
            StopRequest.receiving = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if StopRequest.receiving is self:
            StopRequest.receiving = None
        self._stack.close()

    @property
    def seconds(self) -> float:
        """The seconds since the first signal; 0 if there was none."""
        return max(time.monotonic() - self._heard_at, 0.0)

    def _listen(self, source: socket.socket) -> None:
        # The interpreter writes the numbers of signals to `source` as they arrive.
        with source:
            while numbers := source.recv(16):
                for number in numbers:
                    if number in SIGNALS:
                        self._take(signal.Signals(number))

    def _take(self, number: signal.Signals) -> None:
        if _counted is not None:
            _counted.add()
        if self.signal is not None:
            self._leave(128 + number)
            return
        self._heard_at = time.monotonic()
        self.signal = number
        self._on_signal(number.name)


# A signal of a fork is not the run's: the environment that forked it may end it with SIGTERM. Until
# the fork has its own handlers, none reaches it.


class _Forking(threading.local):
    # What a thread that forks blocked before.
    mask: Collection[int] | None = None


_forking = _Forking()


def _before_fork() -> None:
    if StopRequest.receiving is not None:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_in_parent() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)
        _forking.mask = None


def _after_in_child() -> None:
    request, StopRequest.receiving = StopRequest.receiving, None
    if request is not None:
        signal.set_wakeup_fd(-1)
        for number, handler in request.before.items():
            signal.signal(number, handler)
    _after_in_parent()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)


class Deadline:
    """The deadline by which a run must have saved its last checkpoint."""

    def __init__(self, budget: str | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock.

        Args:
            budget: The time budget as `DD:HH:MM:SS`; None for no limit.
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
        """Record the duration of a piece of work; the longest of each kind is expected."""
        known = self._longest[work] if work in self._seen else 0.0
        self._longest[work] = max(known, seconds)
        self._seen.add(work)

    def is_near(self, *, before: Collection[Work] = ()) -> bool:
        """Report whether one more step, and the save that must follow it, might end too late.

        Args:
            before: The work that would precede that step.
        """
        to_come = math.fsum(self._longest[work] for work in (*before, "step"))
        return self._clock() + to_come + SAVE_SAFETY * self._longest["save"] >= self._end


def parse_duration(text: str) -> float:
    """Parse `DD:HH:MM:SS` into seconds.

    Raises:
        ConfigError: The text does not have that form.
    """
    match = re.fullmatch(r"(\d+):(\d{1,2}):(\d{1,2}):(\d{1,2})", text)
    if match is None:
        raise ConfigError(
            f"checkpointing.checkpoint_must_save_by={text!r} is not of the form DD:HH:MM:SS, "
            "e.g. 00:03:45:00 for three hours and three quarters"
        )
    days, hours, minutes, seconds = (int(part) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds
