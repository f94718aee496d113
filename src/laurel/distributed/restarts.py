"""How often replicas that are lost may be started again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol


class Loss(NamedTuple):
    """What has become of a replica, and what is done about it."""

    told: str
    """In words; said already where it is started again."""
    refused: str | None
    """Why it is not started again; None: it is."""

    def __str__(self) -> str:
        return self.told if self.refused is None else f"{self.told}; no restart: {self.refused}"


class Restartable(Protocol):
    """A replica."""

    name: str
    last_failure: str | None
    """Why it was started again, as long as it has brought nothing since."""


class Restarts:
    """Allows restarts up to a number, and none of a replica that fails as it did before.

    For what fails in the same way when it has just been started is no accident. Safe to use from
    several threads.
    """

    def __init__(self, most: int, say: Callable[[str], None]) -> None:
        """Begin without a loss.

        Args:
            most: Restarts of all replicas together.
            say: Told of every restart.
        """
        self.most = most
        self._say = say
        self._number = 0
        self._lock = threading.Lock()

    @property
    def number(self) -> int:
        """How many there have been."""
        return self._number

    def after(self, failure: BaseException, of: Restartable) -> Loss:
        """Count a loss, and say so where the replica may be started again."""
        # What follows the first line is about the end of a run, or a traceback.
        reason = str(failure).partition("\n")[0]
        told = f"{of.name} was lost ({reason})"
        with self._lock:
            if of.last_failure == reason:
                again = "it failed in the same way when it had just been started again"
                return Loss(told, again)
            if self._number == self.most:
                return Loss(told, f"{self.most} restarts are the limit of a run")
            self._number += 1
            of.last_failure = reason
            count = f"restart {self._number} of {self.most} at most"
        self._say(f"{told}; it is started again, {count}")
        return Loss(told, None)
