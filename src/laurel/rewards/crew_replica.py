"""One replica of a scoring crew: a scorer in processes of its own, and what becomes of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from laurel.errors import BusyError, LaurelError, WorkerError
from laurel.rewards.batcher import BatchingScorer
from laurel.rewards.contract_scorer import ContractScorer
from laurel.rewards.loop_scorer import limits_of
from laurel.rewards.remote.replica import ReplicaFault, Reply, ScorerReplica
from laurel.rewards.rendered import Rendered
from laurel.rewards.to_tokens import Prepared
from laurel.types import Group, Score, TokenGroup

if TYPE_CHECKING:
    from laurel.rewards.scoring_crew import ScoringCrew

_log = logging.getLogger(__name__)

LAST_RESTART = 120.0
"""Seconds that the end of a run waits for a replica that is just being started."""


class CrewReplica:
    """One replica as the router sees it; see `rewards.replica.Replica`."""

    max_completions: None = None

    def __init__(self, index: int, scorer: ContractScorer, crew: ScoringCrew) -> None:
        """Begin with a scorer that has proven itself.

        Args:
            index: Among the replicas.
            scorer: In processes of its own.
            crew: Starts it again.
        """
        self.index = index
        self.name = f"{crew.role} replica {index}"
        self.is_up = threading.Event()
        """It works, or will never work again; cleared while it is started."""
        self.is_gone = False
        self.last_failure: str | None = None
        """Why it was started again, as long as it has scored nothing since."""
        self._crew = crew
        self._lock = threading.Lock()
        self._restarting: threading.Thread | None = None
        self._take(scorer, is_asleep=False)

    def _take(self, scorer: ContractScorer, *, is_asleep: bool) -> None:
        self.scorer = scorer
        self._batcher = BatchingScorer(
            _Watched(scorer, self),
            model_version="", limits=limits_of(scorer), is_asleep=is_asleep,
        )  # fmt: skip
        self._merged = ScorerReplica(self._batcher, self.name)
        self.is_up.set()

    async def attempt(self, groups: Sequence[Group], *, request_id: str, timeout: float) -> Reply:
        """See `Replica`.

        Raises:
            WorkerError: Who renders for all replicas is lost.
        """
        scorer, merged = self.scorer, self._merged
        self._check_up()
        try:
            reply = await merged.attempt(groups, request_id=request_id, timeout=timeout)
        except ReplicaFault as fault:
            self._check_same(scorer)
            lost = fault.__cause__
            # The loss of the replica itself is not told in this way, but by `_Watched`.
            if isinstance(lost, WorkerError) and lost.is_lost:
                raise lost from lost.__cause__
            raise
        self._check_same(scorer)  # what a lost one says of the last requests are no verdicts
        self.last_failure = None
        return reply

    def _check_same(self, scorer: ContractScorer) -> None:
        if self.scorer is not scorer or not self.is_up.is_set():
            raise ReplicaFault("connection", f"{self.name} was lost", in_mid_request=True)
        self._check_up()

    def _check_up(self) -> None:
        if self.is_gone or not self.is_up.is_set():
            raise ReplicaFault("connection", f"{self.name} is not there")

    async def probe(self, *, timeout: float) -> None:
        """See `Replica`. While it is started again, this waits."""
        if not await asyncio.to_thread(self.is_up.wait, timeout) or self.is_gone:
            raise ReplicaFault("connection", f"{self.name} is not there")

    async def aclose(self) -> None:
        """See `Replica`. Waits for a restart that is under way: where that uses Ray, and asks for
        something when its cluster has gone, Ray ends this process."""
        await asyncio.to_thread(self.scorer.close)
        await asyncio.to_thread(self._batcher.close)
        with self._lock:
            restarting = self._restarting
        if restarting is not None:
            await asyncio.to_thread(restarting.join, LAST_RESTART)
            if restarting.is_alive():
                _log.warning("%s is still being started; it is left behind", self.name)

    async def rest(self, is_asleep: bool) -> None:
        """Sleep, or wake; one that is lost is started again in that state."""
        while True:
            while not await asyncio.to_thread(self.is_up.wait, 1.0):
                pass
            scorer, batcher = self.scorer, self._batcher
            if self.is_gone:
                return
            try:
                return await (batcher.sleep() if is_asleep else batcher.wake())
            except BusyError:
                continue  # it was lost meanwhile
            except WorkerError as error:
                self.lost(scorer, error)

    def lost(self, scorer: ContractScorer, failure: WorkerError) -> None:
        """Begin to start it again, unless that has been begun. Any thread."""
        with self._lock:
            if self.scorer is not scorer or not self.is_up.is_set() or self.is_gone:
                return
            self.is_up.clear()
            self._restarting = threading.Thread(
                target=self._restart, args=(scorer, failure), name="laurel-restart", daemon=True
            )
            self._restarting.start()

    def _restart(self, scorer: ContractScorer, failure: WorkerError) -> None:
        with suppress(LaurelError):  # it is lost: however it ends
            scorer.close()
        self._batcher.close()
        made = self._crew.restart(self, failure)
        with self._lock:
            if made is None:
                self.is_gone = True
                self.is_up.set()
            else:
                self._take(made[0], is_asleep=made[1])
        if made is None:
            self._crew.on_gone()
        elif self._crew.is_closed:  # meanwhile, and without this one
            self._batcher.close()


class _Watched:
    """A scorer whose replica is told when its processes are lost; a batcher's backend."""

    def __init__(self, scorer: ContractScorer, replica: CrewReplica) -> None:
        self._scorer = scorer
        self._replica = replica

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        return self._scorer.prepare(groups)

    def prepare_rendered(self, row: Rendered) -> TokenGroup:
        return self._scorer.prepare_rendered(row)

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        try:
            return self._scorer.score_tokens(tokens)
        except WorkerError as error:
            if not (error.is_lost or self._scorer.is_ended):
                raise
            self._replica.lost(self._scorer, error)
            # Nobody will believe these; an error would have the batcher look for who is to blame.
            lost = Score(value=None, failure=f"connection: {self._replica.name} was lost")
            return [(lost,) * len(group.branches_ids_G) for group in tokens]

    def sleep(self) -> None:
        self._scorer.sleep()

    def wake(self) -> None:
        self._scorer.wake()

    def close(self) -> None:
        self._scorer.close()
