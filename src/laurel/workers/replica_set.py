"""Equal processes that share calls, of which any may die, hang or be ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from laurel.errors import EngineError, WorkerError
from laurel.workers.calls import again
from laurel.workers.supervisor import Replica, Restarts, Supervisor

T = TypeVar("T")
R = TypeVar("R")


class TakesDownError(WorkerError):
    """A call that several replicas, one after the other, were lost with: it may be why."""


def is_lost(value: object, error: Exception) -> bool:
    """Whether the error of a call means that the process behind `value` is gone."""
    return isinstance(error, WorkerError) and error.is_lost


class ReplicaSet(Supervisor[T]):
    """Gives each call to a replica that is free; one that is lost is started again meanwhile.

    A call that was lost with its replica goes to another one, so calls may be made twice and must
    change nothing. A replica has one call at a time.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        number: int,
        *,
        name: str,
        end: Callable[[T], None],
        restarts: Restarts,
        is_lost: Callable[[T, Exception], bool] = is_lost,
        most_losses: int | None = None,
        ping: Callable[[T], str | None] | None = None,
        ping_seconds: float = 0.25,
    ) -> None:
        """Start all of them; see `Supervisor` for what is not said here.

        Args:
            make: See there.
            number: At least one.
            name: What they are called, before their number.
            end: See there.
            restarts: See there.
            is_lost: Whether what a call raised means that its replica is lost.
            most_losses: Replicas that one call may be lost with before it is refused; None: any.
            ping: What a replica has died of, None where it lives; asked of those that have nothing
                to do, so that they are there again when they are needed. None: not asked.
            ping_seconds: How often.

        Raises:
            Exception: See there.
        """
        self.failure: WorkerError | None = None
        """Why nobody can be asked any more."""
        self._is_lost = is_lost
        self._most_losses = most_losses
        self._new: Callable[[T], None] | None = None
        replicas = [Replica[T](index, f"{name} {index}") for index in range(number)]
        super().__init__(make, replicas, end=end, restarts=restarts, bring_up=self._as_others)
        if ping is not None:
            threading.Thread(
                target=self._watch, args=(ping, ping_seconds), name="laurel-ping", daemon=True
            ).start()

    @property
    def num_ready(self) -> int:
        """How many are there now."""
        return sum(replica.state == "ready" for replica in self.replicas)

    def call(self, work: Callable[[T], R], *, proves: bool = True) -> R:
        """What `work` makes of a replica that is free; waits for one.

        Args:
            work: What to do.
            proves: Whether a replica that has done it works, and may be started again when it fails
                once more as it did before.

        Raises:
            TakesDownError: Too many were lost with it.
            WorkerError: No replica is left.
            EngineError: All have been ended.
            Exception: What `work` raised for another reason than a loss.
        """
        losses = 0
        while True:
            replica = self._take()
            try:
                found = work(replica.value)
            except Exception as error:
                if self.is_closed:
                    raise self._ended() from error
                if not self._is_lost(replica.value, error):
                    self._give_back(replica)
                    raise
                self._lost(replica, error)
                losses += 1
                if losses == self._most_losses and self.failure is None:
                    reason = str(error).partition("\n")[0]
                    raise TakesDownError(
                        f"{losses} replicas were lost with it ({reason})"
                    ) from error
            else:
                if proves:
                    replica.last_failure = None
                replica.num_done += 1
                self._give_back(replica)
                return found

    def each(self, work: Callable[[T], None], *, new: Callable[[T], None] | None) -> None:
        """Do something to every replica that is left, between its calls.

        Args:
            work: What. One that is lost by it is started again.
            new: What is done from now on to those that are started again.

        Raises:
            Exception: What `work` raised first for another reason than a loss.
        """
        errors: list[Exception] = []
        with self._changed:
            self._new = new
            as_they_are = [(replica, replica.value) for replica in self.replicas]
        for replica, value in as_they_are:
            # One that was started meanwhile has been told by whoever started it.
            if self._take_this(replica) and replica.value is value:
                try:
                    work(value)
                except Exception as error:
                    if self._is_lost(value, error):
                        self._lost(replica, error)
                        continue
                    errors.append(error)
            self._give_back(replica)
        for replica in self.replicas:
            self._take_this(replica)
            self._give_back(replica)
        if errors:
            raise errors[0]

    def _lost(self, replica: Replica[T], failure: Exception) -> None:
        """Begin to start a replica again; whoever calls has taken it."""
        with self._changed:
            replica.state = "starting"
            replica.is_busy = False
            thread = threading.Thread(
                target=self._restart, args=(replica, failure), name="laurel-restart", daemon=True
            )
            self._restarting = [t for t in self._restarting if t.is_alive()] + [thread]
            thread.start()

    # ------------------------------------------------------------------------- whose turn it is

    def _take(self) -> Replica[T]:
        """The replica that has done least, of those that are free."""
        with self._changed:
            while True:
                self._check_open()
                free = [r for r in self.replicas if r.state == "ready" and not r.is_busy]
                if free:
                    chosen = min(free, key=lambda replica: replica.num_done)
                    chosen.is_busy = True
                    return chosen
                self._changed.wait()

    def _take_this(self, replica: Replica[T]) -> bool:
        """Wait for a replica; False where it is gone."""
        with self._changed:
            while not self.is_closed and replica.state != "gone":
                if replica.state == "ready" and not replica.is_busy:
                    replica.is_busy = True
                    return True
                self._changed.wait()
        return False

    def _give_back(self, replica: Replica[T]) -> None:
        with self._changed:
            replica.is_busy = False
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self.failure is not None:
            raise again(self.failure) from self.failure.__cause__
        if self.is_closed:
            raise self._ended()

    def _ended(self) -> EngineError:
        return EngineError(f"{self.replicas[0].name} has been shut down")

    # ---------------------------------------------------------------------------------- restarts

    def _restart(self, replica: Replica[T], failure: Exception) -> None:
        loss = self.restart(replica, failure)
        with self._changed:
            replica.state = "ready" if loss is None else "gone"
            if all(one.state == "gone" for one in self.replicas):
                self.failure = WorkerError(
                    f"{loss}; no other replica is left", exit_code=WorkerError.LOST_EXIT_CODE
                )
                self.failure.__cause__ = failure
            self._changed.notify_all()

    def _as_others(self, value: T, index: int) -> str:
        if self._new is not None:
            self._new(value)
        return ""

    def _watch(self, ping: Callable[[T], str | None], seconds: float) -> None:
        while not self._closing.wait(seconds):
            for replica in self.replicas:
                with self._changed:
                    is_idle = replica.state == "ready" and not replica.is_busy
                    replica.is_busy |= is_idle  # else a call could begin before it is found dead
                if is_idle and (death := ping(replica.value)) is not None:
                    self._lost(replica, WorkerError(death))
                elif is_idle:
                    self._give_back(replica)
