"""The supervision of replaceable processes: starting, restarting and ending them."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from laurel.errors import LaurelError, WorkerError

_log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")

LAST_RESTART = 120.0
"""Seconds that `close` waits for a replica that is just being started."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


class ReplicaLoss(NamedTuple):
    """The loss of a replica, and the reaction to it."""

    notice: str
    refused: str | None
    """Why it is not restarted; None: it is."""
    pause: float = 0.0
    """Seconds before the restart."""

    def __str__(self) -> str:
        return self.notice if self.refused is None else f"{self.notice}; no restart: {self.refused}"


class Restartable(Protocol):
    """The state of a replica that a budget of restarts reads."""

    name: str
    last_failure: str | None
    """Reason of its restart, as long as it has done nothing since."""


class Restarts:
    """A budget of restarts; a replica that fails twice in the same way is not restarted.

    A repeated failure right after a start is no accident. Thread-safe.
    """

    def __init__(self, most: int, say: Callable[[str], None] = _log.warning) -> None:
        """Start without losses.

        Args:
            most: Restarts of all replicas together.
        """
        self.most = most
        self.say = say
        self._number = 0
        self._lock = threading.Lock()

    @property
    def number(self) -> int:
        """Number of restarts so far."""
        return self._number

    def after(self, failure: BaseException, of: Restartable) -> ReplicaLoss:
        """Count a loss, and report it where the replica may be restarted."""
        # What follows the first line is about the end of a run, or a traceback.
        reason = str(failure).partition("\n")[0]
        notice = f"{of.name} was lost ({reason})"
        with self._lock:
            if of.last_failure == reason:
                again = "it failed in the same way when it had just been started again"
                return ReplicaLoss(notice, again)
            if self._number >= self.most:
                return ReplicaLoss(notice, f"{self.most} restarts are the limit of a run")
            self._number += 1
            of.last_failure = reason
            count = f"restart {self._number} of {self.most} at most"
        self.say(f"{notice}; it is started again, {count}")
        return ReplicaLoss(notice, None)


class EndlessRestarts(Restarts):
    """A budget without a total limit, for servers that run for months.

    A replica that is lost `most` times in a row without having done anything is not restarted;
    pauses between its restarts grow.
    """

    def __init__(self, most: int, say: Callable[[str], None] = _log.warning) -> None:
        """Start with no losses; `most` is how often in a row a replica may die without any work."""
        super().__init__(most, say)
        self._in_a_row: dict[str, int] = {}

    def after(self, failure: BaseException, of: Restartable) -> ReplicaLoss:
        """Count a loss and decide on the restart."""
        reason = str(failure).partition("\n")[0]
        ended = re.search(r"signal \d+|exit code \d+", reason)
        notice = f"warning: {of.name} died ({ended[0] if ended else reason})"
        with self._lock:
            losses = 1 if of.last_failure is None else self._in_a_row[of.name] + 1
            self._in_a_row[of.name] = losses
            of.last_failure = reason
            if losses > self.most:
                return ReplicaLoss(notice, f"it died {losses} times in a row")
            self._number += 1
        self.say(f"{notice}; it is started again")
        pause = _FIRST_PAUSE * 2 ** (losses - 2) if losses > 1 else 0.0
        return ReplicaLoss(notice, None, min(_LONGEST_PAUSE, pause))


class Replica(Generic[T]):
    """One of several equal processes; its process may be replaced."""

    value: T
    """Handle of the process."""

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.state: Literal["starting", "ready", "waiting", "gone"] = "starting"
        self.is_busy = False
        self.num_done = 0
        """Number of calls that it has answered."""
        self.last_failure: str | None = None
        """Reason of its restart, as in `Restartable`."""


class Supervisor(Generic[T]):
    """A supervisor that starts replicas, restarts lost ones within a budget, and ends them.

    All methods are thread-safe, and block.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        replicas: Sequence[Replica[T]],
        *,
        end: Callable[[T], None],
        restarts: Restarts,
        bring_up: Callable[[T, int], str] = lambda value, index: "",
    ) -> None:
        """Start all replicas at the same time.

        Args:
            make: Starts the replica with this number; called again, when the one before has been
                ended, to start it anew.
            replicas: At least one, without a process.
            end: Ends one. Idempotent; one that is lost may raise a `LaurelError`.
            bring_up: Brings one that is started again to where the others are; what it returns is
                said after "is back".

        Raises:
            Exception: The first exception of `make`, where one cannot be started; the others are
                ended.
        """
        self.restarts = restarts
        self.replicas = replicas
        self.last_loss: ReplicaLoss | None = None
        self.last_failure: Exception | None = None
        self._make = make
        self._end = end
        self._bring_up = bring_up
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._started: set[int] = set()
        self._restarting: list[threading.Thread] = []
        try:
            in_parallel(self._start, self.replicas)
        except BaseException:
            self.close()
            raise
        for replica in self.replicas:
            replica.state = "ready"

    @property
    def is_closed(self) -> bool:
        """Whether all have been ended."""
        return self._closing.is_set()

    def _start(self, replica: Replica[T]) -> None:
        value = self._make(replica.index)
        with self._changed:
            is_late = self._closing.is_set()
            if not is_late:
                replica.value = value
                self._started.add(replica.index)
        if is_late:
            self._end(value)
            raise WorkerError(f"{replica.name} was started while all were ended")

    def restart(self, replica: Replica[T], failure: Exception) -> ReplicaLoss | None:
        """Restart a replica until it works; return the reason where that is no longer allowed."""
        reason: Exception | None = failure
        while reason is not None and not self.is_closed:
            with suppress(LaurelError):  # it is lost: however it ends
                self._end(replica.value)
            self.last_failure = reason
            loss = self.last_loss = self.restarts.after(reason, replica)
            if loss.refused is not None:
                self.restarts.say(str(loss))
                return loss
            if self._closing.wait(loss.pause):
                break
            try:
                self._start(replica)
                notice = self._bring_up(replica.value, replica.index)
            except Exception as error:  # whatever it is, the others go on
                reason = error
            else:
                reason = None
                self.restarts.say(f"{replica.name} is back{notice}")
        return None

    def close(self, *, patience: float = LAST_RESTART) -> None:
        """End all replicas, also those that are just being started. Idempotent.

        Args:
            patience: Seconds to wait for a replica that is just being started. Where that uses Ray
                and asks for something when its cluster has gone, Ray ends this process.
        """
        with self._changed:
            if self.is_closed:
                return
            self._closing.set()
            self._changed.notify_all()
            values = [self.replicas[index].value for index in sorted(self._started)]
            restarting = list(self._restarting)
        try:
            in_parallel(self._end, values)
        finally:
            for thread in restarting:
                thread.join(patience)
                if thread.is_alive():
                    _log.warning("a replica is still starting and has not been ended")


def in_parallel(work: Callable[[R], Any], arguments: Iterable[R]) -> None:
    """Call a function in a thread for each argument; the first exception is raised at the end."""
    errors: list[BaseException] = []

    def attempt(argument: R) -> None:
        try:
            work(argument)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=attempt, args=(one,), name="laurel-replica") for one in arguments
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
