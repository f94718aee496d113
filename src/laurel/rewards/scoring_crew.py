"""Replicas of a reward model in worker groups: each works by itself, and any of them may die.

A replica that is lost is started again in its place, and others score what it had. Nothing of it
counts twice: scores of a group that is lost are not believed, and one verdict is given on each
completion (`Router`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from laurel.distributed.restarts import Restarts
from laurel.distributed.worker_calls import again
from laurel.errors import WorkerError
from laurel.rewards.contract_scorer import ContractScorer
from laurel.rewards.crew_replica import CrewReplica
from laurel.rewards.preparing import WORKER
from laurel.rewards.remote.router import Router
from laurel.rewards.remote.router_options import RouterOptions
from laurel.types import Group, Score

_log = logging.getLogger(__name__)
T = TypeVar("T")

ROLE = "reward_model"
MAX_RESTARTS = 3
"""Of all replicas together, as with the replicas that draw."""
OPTIONS = RouterOptions(
    timeout=24 * 3600.0,  # the environment's own limit is what ends a wait
    attempt_timeout=24 * 3600.0,  # a replica that hangs is lost by the limit of its group
    window=1024,  # its batcher wants to choose from many
)


class ScoringCrew:
    """A `Desk` of replicas; one router gives each request to the one with the least to do."""

    def __init__(
        self,
        make: Callable[[int], ContractScorer],
        num_replicas: int,
        *,
        role: str = ROLE,
        say: Callable[[str], None] = _log.warning,
        max_restarts: int = MAX_RESTARTS,
        options: RouterOptions = OPTIONS,
    ) -> None:
        """Make the replicas, at the same time.

        Args:
            make: Makes the scorer, in processes of its own, of the replica with this number;
                called again, when the one before has been closed, to start it anew. Any thread.
            num_replicas: At least one.
            role: What they are, for messages.
            say: Told of every restart.
            max_restarts: Of all replicas together.
            options: How replicas are asked.

        Raises:
            LaurelError: One of them cannot be made.
        """
        self._make = make
        self.role = role
        self._say = say
        self._is_asleep = False
        self._is_closed = False
        self._asking: set[asyncio.Task[list[tuple[Score, ...]]]] = set()
        self._rest: asyncio.Future[None] | None = None
        """Done when replicas rest no more."""
        self._over: asyncio.Future[None] | None = None
        self._last_loss: WorkerError | None = None
        self.restarts = Restarts(max_restarts, say)
        self.replicas = [
            CrewReplica(index, scorer, self)
            for index, scorer in enumerate(self._begun(num_replicas))
        ]
        self._router = Router(self.replicas, options)

    def _begun(self, number: int) -> list[ContractScorer]:
        made: dict[int, ContractScorer] = {}
        errors: list[BaseException] = []

        def begin(index: int) -> None:
            try:
                made[index] = self._make(index)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=begin, args=(index,)) for index in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            for scorer in made.values():
                scorer.close()
            raise errors[0]
        return [made[index] for index in range(number)]

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """See `protocols.Scorer`. What is under way when replicas go to rest is asked once more.

        Raises:
            WorkerError: No replica is left, or nobody who renders for them.
        """
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
            self._give_up_if_nobody_is_left()
        while True:
            while self._rest is not None:
                await self._first_of(self._rest)
            asking = asyncio.ensure_future(self._router.score(groups))
            self._asking.add(asking)
            try:
                await self._first_of(asking)
                if not asking.cancelled():
                    return asking.result()
            finally:
                self._asking.discard(asking)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    async def _first_of(self, awaited: asyncio.Future[Any]) -> None:
        """Wait for something, as long as there is a replica."""
        assert self._over is not None
        await asyncio.wait((awaited, self._over), return_when=asyncio.FIRST_COMPLETED)
        if not awaited.done():
            assert self._last_loss is not None
            raise again(self._last_loss)

    async def set_asleep(self, is_asleep: bool) -> None:
        """See `Desk`. No clock of a router runs meanwhile: it has nothing under way."""
        self._is_asleep = is_asleep
        if is_asleep and self._rest is None:
            self._rest = asyncio.get_running_loop().create_future()
            for asking in self._asking:
                asking.cancel()
        changes = (replica.rest(is_asleep) for replica in self.replicas)
        for failure in await asyncio.gather(*changes, return_exceptions=True):
            if failure is not None:
                raise failure
        if not is_asleep and self._rest is not None:
            self._rest.set_result(None)
            self._rest = None

    def directly(self, work: Callable[[ContractScorer], T]) -> T:
        """See `Desk`.

        Raises:
            WorkerError: No replica is left, or nobody who renders for them.
        """
        while True:
            left = [replica for replica in self.replicas if not replica.is_gone]
            if not left:
                assert self._last_loss is not None
                raise again(self._last_loss)
            chosen = next((r for r in left if r.is_up.is_set()), left[0])
            chosen.is_up.wait()
            scorer = chosen.scorer
            try:
                return work(scorer)
            except WorkerError as error:
                if error.role == WORKER or not (error.is_lost or scorer.is_ended):
                    raise
                chosen.lost(scorer, error)

    async def aclose(self) -> None:
        """See `Desk`."""
        self._is_closed = True
        await asyncio.gather(
            *(asyncio.to_thread(replica.scorer.close) for replica in self.replicas)
        )
        await self._router.aclose()

    @property
    def is_closed(self) -> bool:
        """Whether it has been told to end."""
        return self._is_closed

    # ------------------------------------------------------------------------------ restarts

    def restart(
        self, replica: CrewReplica, failure: Exception
    ) -> tuple[ContractScorer, bool] | None:
        """A scorer in place of one that is lost, and whether it sleeps as the others do; None where
        there is to be none. Any thread."""
        reason: Exception | None = failure
        while reason is not None:
            if not self._may_restart(replica, reason):
                return None
            try:
                made, is_asleep = self._made(replica.index)
            except Exception as error:  # whatever it is, the others go on
                reason = error
            else:
                self._say(f"{replica.name} is back")
                if self._is_closed:
                    made.close()
                    return None
                return made, is_asleep
        return None

    def _made(self, index: int) -> tuple[ContractScorer, bool]:
        made = self._make(index)
        if is_asleep := self._is_asleep:
            try:
                made.sleep()
            except BaseException:
                made.close()
                raise
        return made, is_asleep

    def _may_restart(self, replica: CrewReplica, failure: Exception) -> bool:
        if self._is_closed:
            return False
        loss = self.restarts.after(failure, replica)
        if loss.refused is None:
            return True
        self._say(str(loss))
        last = WorkerError(
            f"{loss}; no other replica is left", role=self.role,
            exit_code=WorkerError.LOST_EXIT_CODE,
        )  # fmt: skip
        last.__cause__ = failure
        self._last_loss = last
        return False

    def on_gone(self) -> None:
        """A replica will not come back. Any thread."""
        if self._over is not None:
            with suppress(RuntimeError):  # the loop has ended: nobody waits
                self._over.get_loop().call_soon_threadsafe(self._give_up_if_nobody_is_left)

    def _give_up_if_nobody_is_left(self) -> None:
        over = self._over
        if over is not None and not over.done() and all(r.is_gone for r in self.replicas):
            over.set_result(None)
