"""Processes of a reward model as what a server serves: with an end to the queue, and figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from laurel.errors import BusyError
from laurel.rewards.server.replica_processes import ReplicaProcesses
from laurel.types import Group, Score


@dataclass(slots=True, kw_only=True)
class ReplicasStats:
    """What happened so far."""

    requests: int = 0
    completions: int = 0
    scored: int = 0
    failed: int = 0
    """Completions that got a failure."""
    refused: int = 0
    """Requests that found the queue full."""
    cancelled: int = 0
    """Requests that nobody waited for any more."""
    attempts: int = 0
    """Requests to replicas."""
    faults: int = 0
    """Attempts and probes of which a replica made nothing."""
    waiting: int = 0
    """Completions that wait or are under way now."""
    ready: int = 0
    """Replicas that can be asked now."""


class ServedReplicas:
    """A `ServedScorer` over processes, in one event loop."""

    def __init__(self, replicas: ReplicaProcesses, *, max_waiting: int) -> None:
        """Take over processes; `aclose` ends them.

        Args:
            replicas: Those that score.
            max_waiting: Completions that may wait or be under way.
        """
        self._replicas = replicas
        self._max_waiting = max_waiting
        self._stats = ReplicasStats()
        self._began = time.monotonic()

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """See `protocols.Scorer`.

        Raises:
            BusyError: Too much waits already.
        """
        stats = self._stats
        size = sum(len(group.completions_G) for group in groups)
        if stats.waiting and stats.waiting + size > self._max_waiting:
            stats.refused += 1
            rate = stats.scored / (time.monotonic() - self._began)
            message = f"{stats.waiting} completions wait; no more than {self._max_waiting} may"
            raise BusyError(message, retry_after=min(60.0, stats.waiting / max(rate, 1.0)))
        stats.requests += 1
        stats.completions += size
        stats.waiting += size
        try:
            scores = await self._replicas.scorer.score(groups)
        except asyncio.CancelledError:
            stats.cancelled += 1
            raise
        finally:
            stats.waiting -= size
        failed = sum(score.failure is not None for scores_G in scores for score in scores_G)
        stats.failed += failed
        stats.scored += size - failed
        return scores

    def stats(self) -> ReplicasStats:
        """What happened so far; a copy."""
        counts = self._replicas.scorer.counts
        faults = sum(count for name, count in counts.items() if name.startswith("fault_"))
        ready = self._replicas.num_ready
        return replace(self._stats, attempts=counts["attempts"], faults=faults, ready=ready)

    @property
    def is_broken(self) -> bool:
        """Whether nobody is left who could score."""
        return self._replicas.are_lost

    @property
    def is_lost(self) -> bool:
        """The same, and nobody is started again."""
        return self._replicas.are_lost

    async def sleep(self) -> None:
        """See `ReplicaProcesses`."""
        await asyncio.to_thread(self._replicas.sleep)

    async def wake(self) -> None:
        """See `ReplicaProcesses`."""
        await asyncio.to_thread(self._replicas.wake)

    async def aclose(self) -> None:
        """End the router, then the processes."""
        await self._replicas.scorer.aclose()
        await asyncio.to_thread(self._replicas.close)
