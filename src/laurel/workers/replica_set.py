"""Equal processes that share calls, any of which may die or hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from laurel.errors import EngineError, ModelError, WorkerError, is_lost_worker
from laurel.workers.calls import again
from laurel.workers.supervisor import Replica, Restarts, Supervisor

T = TypeVar("T")
R = TypeVar("R")


class TakesDownError(WorkerError):
    """Raised for a call with which several replicas were lost in turn: it may be the cause."""


class ReplicaSet(Supervisor[T]):
    """A set of replicas: each call goes to a free one, and lost ones are restarted.

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
        is_lost: Callable[[T, Exception], bool] = lambda _, error: is_lost_worker(error),
        most_losses: int | None = None,
        ping: Callable[[T], str | None] | None = None,
        ping_seconds: float = 0.25,
        version: Callable[[T], str] = lambda _: "",
    ) -> None:
        """Start all replicas; parameters not listed here are those of `Supervisor`.

        Args:
            name: Name of the replicas, before their number.
            is_lost: Whether what a call raised means that its replica is lost.
            most_losses: Replicas that one call may be lost with before it is refused; None: any.
            ping: Cause of a replica's death, None where it lives; called for those that have
                nothing to do, so that they are there again when they are needed. None: not asked.
            ping_seconds: How often.
            version: Version of what a replica has loaded, which must be that of all others.

        Raises:
            ModelError: Two replicas have different versions.
            Exception: The first failure to start one.
        """
        self.failure: WorkerError | None = None
        """Why no replica can be called any more."""
        self._is_lost = is_lost
        self._most_losses = most_losses
        self._new: Callable[[T], None] | None = None
        replicas = [Replica[T](index, f"{name} {index}") for index in range(number)]
        super().__init__(make, replicas, end=end, restarts=restarts, bring_up=self._as_others)
        self._version_of, self._version = version, version(replicas[0].value)
        try:
            for replica in replicas:
                self._check_version(replica.value)
        except ModelError:
            self.close()
            raise
        if ping is not None:
            threading.Thread(
                target=self._watch, args=(ping, ping_seconds), name="laurel-ping", daemon=True
            ).start()

    @property
    def num_ready(self) -> int:
        """Number of replicas that are running now."""
        return sum(replica.state == "ready" for replica in self.replicas)

    def call(self, work: Callable[[T], R], *, proves: bool = True) -> R:
        """Run `work` on a free replica; waits for one.

        Args:
            proves: Whether a replica that has done it works, and may be started again when it fails
                once more as it did before.

        Raises:
            TakesDownError: Too many were lost with it.
            WorkerError: No replica is left.
            EngineError: All have been ended.
            Exception: An exception of `work` that is no loss.
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
        """Run a function on every remaining replica, between its calls.

        Args:
            work: Function of the replica. A replica that it loses is restarted.
            new: Function that is run from now on with restarted replicas.

        Raises:
            Exception: The first exception of `work` that is no loss.
        """
        errors: list[Exception] = []
        with self._changed:
            self._new = new
            as_they_are = [(replica, replica.value) for replica in self.replicas]
        for replica, value in as_they_are:
            # One that was started meanwhile has run it in its start.
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
        # The caller has taken the replica.
        with self._changed:
            replica.state = "starting"
            replica.is_busy = False
            thread = threading.Thread(
                target=self._restart, args=(replica, failure), name="laurel-restart", daemon=True
            )
            self._restarting = [t for t in self._restarting if t.is_alive()] + [thread]
            thread.start()

    def _take(self) -> Replica[T]:
        # The free replica that has done the fewest calls.
        with self._changed:
            while True:
                if self.failure is not None:
                    raise again(self.failure)
                if self.is_closed:
                    raise self._ended()
                free = [r for r in self.replicas if r.state == "ready" and not r.is_busy]
                if free:
                    chosen = min(free, key=lambda replica: replica.num_done)
                    chosen.is_busy = True
                    return chosen
                self._changed.wait()

    def _take_this(self, replica: Replica[T]) -> bool:
        # False where the replica is gone.
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

    def _ended(self) -> EngineError:
        return EngineError(f"{self.replicas[0].name} has been shut down")

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

    def _check_version(self, value: T) -> None:
        # Calls of one caller go to any of the replicas.
        if (found := self._version_of(value)) != self._version:
            raise ModelError(
                f"it has loaded version {found!r}, and this set serves {self._version!r}: the "
                "model's files were replaced. Restore them, or start all replicas anew"
            )

    def _as_others(self, value: T, index: int) -> str:
        self._check_version(value)
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
