"""Replicas at work: who gets which order, and what happens when one is lost."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from laurel.distributed.restarts import Restarts
from laurel.engines.replica import Order, Replica
from laurel.engines.replica_weights import require_proof, send_weights, version_of
from laurel.engines.weight_probe import Probe
from laurel.engines.weight_routes import WeightRoute
from laurel.errors import EngineError, LaurelError, WorkerError
from laurel.protocols import WorkerGroup
from laurel.types import Weights

Result = TypeVar("Result")

POLL_SECONDS = 0.05
"""How long a busy replica that has nothing to tell may keep new requests from being told to it.
With many replicas it is longer: `POLL_SECONDS_EACH` times their number."""
POLL_SECONDS_EACH = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class CrewSettings:
    """See `GeneratorReplicas`."""

    make_group: Callable[[int], WorkerGroup]
    num_replicas: int
    current_weights: Callable[[], Weights | None]
    probe: Probe | None
    say: Callable[[str], None]
    max_restarts: int
    route: WeightRoute
    patience: float


class ReplicaCrew:
    """The replicas of a generator. Belongs to one event loop, except where it says otherwise.

    Whoever changes weights, or lets it rest, sees to it that no order is under way.
    """

    def __init__(self, settings: CrewSettings, *, on_failure: Callable[[], None]) -> None:
        """Make nothing yet: see `begin`.

        Args:
            settings: What does not change.
            on_failure: Called when the crew is of no use any more.
        """
        self.version = 0
        """Of the weights that all who are ready have."""
        self.failure: LaurelError | None = None
        """Why it is of no use any more."""
        self.restarts = Restarts(settings.max_restarts, settings.say)
        self.route = settings.route
        self._settings = settings
        self._on_failure = on_failure
        self._poll = max(POLL_SECONDS, POLL_SECONDS_EACH * settings.num_replicas)
        self._replicas: list[Replica] = []
        self._unplaced: list[Order] = []
        self._numbers = itertools.count()
        self._last_loss, self._last_exit_code = "", EngineError.exit_code
        self._has_first_weights = True
        self._is_updating = False
        self._is_asleep = False
        self._catching_up = asyncio.Lock()
        self._serving: list[asyncio.Task[None]] = []
        # A call at a time to each, and one thread that sends weights.
        self._threads = ThreadPoolExecutor(settings.num_replicas + 1, "laurel-replicas")
        # Of several threads.
        self._groups: list[WorkerGroup] = []
        self._is_closed = False

    async def begin(self) -> None:
        """Make all replicas, at the same time."""
        count = self._settings.num_replicas
        making = [self._in_thread(self._make, index) for index in range(count)]
        for made in await asyncio.gather(*making, return_exceptions=True):
            if isinstance(made, BaseException):
                raise made
            self._replicas.append(Replica(len(self._replicas), made))
        groups = [replica.group for replica in self._replicas]
        self.version = await self._in_thread(version_of, groups)
        if self._settings.probe is not None:
            lost = await self._in_thread(
                require_proof, dict(enumerate(groups)), self._settings.probe, version=self.version
            )
            for error in lost.values():
                raise error
        self._serving = [asyncio.create_task(self._serve(replica)) for replica in self._replicas]

    def shut_down(self) -> list[WorkerGroup]:
        """Make no group any more; those that must be shut down. Any thread may call it."""
        self._is_closed = True
        self._threads.shutdown(wait=False)
        return list(self._groups)

    # -------------------------------------------------------------------------------------- orders

    def place(self, order: Order) -> None:
        """Give an order to the replica with the least work, or keep it until there is one."""
        ready = [replica for replica in self._replicas if replica.state == "ready"]
        if self.failure is not None:
            order.fail(self.failure)
        elif ready:
            min(ready, key=lambda replica: replica.load).give(order, next(self._numbers))
        else:
            self._unplaced.append(order)
            if not any(replica.state == "starting" for replica in self._replicas):
                self.fail(
                    self._end(
                        ", no other replica is left, and the weights of step "
                        f"{self.version} cannot be had for it any more"
                    )
                )

    async def take_back(self, order: Order) -> None:
        """Come back when nobody works on an order any more."""
        order.is_aborted = True
        if any(replica.abort(order) for replica in self._replicas):
            await order.over.wait()
            return
        if order in self._unplaced:
            self._unplaced.remove(order)
        order.end()

    def fail(self, failure: LaurelError) -> None:
        """Be of no use from now on, for the first reason that was given."""
        self.failure = self.failure or failure
        orders, self._unplaced = self._unplaced, []
        for replica in self._replicas:
            orders += replica.give_up()
        for order in orders:
            order.fail(self.failure)
        self._on_failure()

    async def _serve(self, replica: Replica) -> None:
        """Speak to one replica while it has work, and start it again when it is lost."""
        try:
            while True:
                await replica.has_work.wait()
                if (failure := await self._exchange(replica)) is not None:
                    await self._restart(replica, failure)
        except LaurelError as error:
            self.fail(error)
        except Exception as error:
            failed = EngineError(f"{replica.name}: {type(error).__name__}: {error}")
            failed.__cause__ = error
            self.fail(failed)

    async def _exchange(self, replica: Replica) -> LaurelError | None:
        """Tell it what is new, and hear what has happened. Why it is lost, where it is."""
        news = replica.take_news()
        timeout = self._poll + self._settings.patience
        try:
            events = await self._call(replica, "exchange", *news, self._poll, timeout=timeout)
        except WorkerError as error:
            return error
        return replica.hear(events)

    # -------------------------------------------------------------------------- when all is at rest

    async def settle(self) -> None:
        """Wait until no replica is being started.

        Raises:
            LaurelError: It is of no use any more.
        """
        for replica in self._replicas:
            await replica.settled.wait()
        if self.failure is not None:
            raise self.failure

    async def take_weights(self, weights: Weights) -> None:
        """Give all replicas new weights, also those that wait for some.

        Raises:
            EngineError: See `GeneratorReplicas.update_weights`; it is of no use then.
        """
        self._is_updating = True
        try:
            left = self._replicas
            while left:
                lost = await self._send(weights, left)
                left = [self._replicas[index] for index in lost]
                await asyncio.gather(*(self._restart(r, lost[r.index]) for r in left))
        except LaurelError as error:
            self.fail(error)
            raise
        except Exception as error:
            self.fail(EngineError(f"the weights of step {weights.version}: {error}"))
            raise
        finally:
            self._is_updating = False
        for replica in self._replicas:
            replica.state = "ready"
        self.version, self._has_first_weights = weights.version, False

    async def _send(self, weights: Weights, replicas: list[Replica]) -> dict[int, WorkerError]:
        # Who has been started again meanwhile is not ready, and has to get all of them.
        has_same = weights.same_as == self.version and all(r.state == "ready" for r in replicas)
        lost = await self._in_thread(
            send_weights,
            weights,
            {replica.index: replica.group for replica in replicas},
            route=self.route,
            probe=self._settings.probe,
            has_all=all(replica.has_all_weights for replica in replicas),
            has_same=has_same,
        )
        for replica in replicas:
            if not has_same or replica.index in lost:
                replica.has_all_weights = replica.index not in lost
        return lost

    async def set_asleep(self, is_asleep: bool) -> None:
        """Send all replicas to sleep, or wake them."""
        self._is_asleep = is_asleep
        await asyncio.gather(*(self._rest(replica) for replica in self._replicas))

    async def _rest(self, replica: Replica) -> None:
        try:
            await self._call(replica, "sleep" if self._is_asleep else "wake")
        except WorkerError as error:
            await self._restart(replica, error)

    # ------------------------------------------------------------------------------------ restarts

    async def _restart(self, replica: Replica, failure: LaurelError) -> None:
        """Start a replica again, until it works. Others finish what it had.

        Raises:
            EngineError: That has been done too often.
        """
        replica.state = "starting"
        replica.settled.clear()
        try:
            for order in replica.give_up():
                self.place(order)
            reason: LaurelError | None = failure
            while reason is not None:
                self._count(replica, reason)
                reason = await self._try_to_start(replica)
        finally:
            replica.settled.set()
        orders, self._unplaced = self._unplaced, []
        for order in orders:
            self.place(order)

    def _count(self, replica: Replica, failure: LaurelError) -> None:
        """Allow one more restart, or say why not."""
        if self.failure is not None:
            raise self.failure
        loss = self.restarts.after(failure, replica)
        self._last_loss, self._last_exit_code = loss.told, failure.exit_code
        if loss.refused is not None:
            raise self._end(f"; no restart: {loss.refused}") from failure

    def _end(self, why: str) -> EngineError:
        """A loss that cannot be made good; a supervisor is told what the loss itself would say."""
        error = EngineError(f"{self._last_loss}{why}")
        error.exit_code = self._last_exit_code
        return error

    async def _try_to_start(self, replica: Replica) -> LaurelError | None:
        """Why it does not work, where it does not."""
        try:
            await self._in_thread(replica.group.shutdown)
            replica.has_all_weights = False
            replica.group = await self._in_thread(self._make, replica.index)
            if self._is_asleep:
                await self._call(replica, "sleep")
            is_ready = await self._catch_up(replica)
        except LaurelError as error:
            return error
        replica.state = "ready" if is_ready else "waiting"
        having = f"has the weights of step {self.version}" if is_ready else "waits for weights"
        self._settings.say(f"{replica.name} is back and {having}")
        return None

    async def _catch_up(self, replica: Replica) -> bool:
        """Give it the weights of the day. False: it must wait for the next ones."""
        if self._has_first_weights:
            return await self._in_thread(version_of, [replica.group]) == self.version
        if self._is_updating:  # they are on their way
            return False
        async with self._catching_up:  # the learner can be read by one at a time
            # While others draw, rollouts may come to their end, and then the learner works.
            if any(other.state == "ready" for other in self._replicas):
                return False
            weights = await self._in_thread(self._settings.current_weights)
            if weights is None or weights.version != self.version:
                return False
            for error in (await self._send(weights, [replica])).values():
                raise error
            replica.state = "ready"  # before another is asked about
            return True

    # ------------------------------------------------------------------------------------- threads

    def _make(self, index: int) -> WorkerGroup:
        group = self._settings.make_group(index)
        self._groups.append(group)
        if self._is_closed:
            group.shutdown()
            raise EngineError("the generator was closed")
        return group

    async def _in_thread(
        self, function: Callable[..., Result], *arguments: Any, **options: Any
    ) -> Result:
        work = functools.partial(function, *arguments, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _call(self, replica: Replica, method: str, *arguments: Any, **options: Any) -> Any:
        return await self._in_thread(replica.group.call_one, 0, method, *arguments, **options)
