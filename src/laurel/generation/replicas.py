"""Several engines, each in a process of its own, that together are one generator.

Each engine is an `EngineWorker` in a worker group of one. A request goes, with all its completions,
to the replica with the fewest unfinished completions; tokens depend on seeds alone, so any replica
samples the same ones. A replica whose process or engine dies is restarted, and other replicas
finish its requests: only the missing completions are sampled again, so none counts twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from laurel.errors import EngineError, LaurelError, UserError, WorkerError
from laurel.generation.engine_worker import EngineEvent
from laurel.generation.weights.probe import Probe
from laurel.generation.weights.routes import (
    THROUGH_RAY,
    WeightTransfer,
    common_version,
    require_proof,
    route_of,
    send_weights,
)
from laurel.protocols import WorkerGroup
from laurel.types import Generated, GenerationRequest, Weights
from laurel.workers.supervisor import Replica, Restarts, Supervisor
from laurel.workers.threads import BackgroundLoop, PauseGate

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

ROLE = "generation"
PATIENCE = 120.0
POLL_SECONDS = 0.05
"""Most seconds that one call to a busy replica waits for events. New requests for that replica wait
until the call returns. With many replicas the limit is `POLL_SECONDS_EACH` times their number,
if that is longer."""
POLL_SECONDS_EACH = 0.005


class GeneratorReplicas:
    """A `Generator` that spreads requests over several engine processes and restarts dead ones.

    Requests made in the same turn of the event loop start together, in order. An idle generator
    sends no calls to its replicas. `make_group`, `current_weights`, `probe` and `say` are called in
    threads that the generator owns.
    """

    def __init__(
        self,
        make_group: Callable[[int], WorkerGroup],
        num_replicas: int,
        *,
        current_weights: Callable[[], Weights | None] = lambda: None,
        probe: Probe | None = None,
        say: Callable[[str], None] = _log.warning,
        max_restarts: int = 3,
        transfer: WeightTransfer = THROUGH_RAY,
        patience: float = PATIENCE,
    ) -> None:
        """Start all replicas concurrently.

        Args:
            make_group: Makes the worker group (of one `EngineWorker`) of the replica with the given
                number. It is called again for a restart, after the old group was shut down.
            current_weights: Returns the weights of `weight_version`. It is called when a replica
                restarts between two updates while no other replica can generate, and never before
                the first update. If it returns None or another version, the replica waits for the
                next update.
            probe: Computes the learner's log-probabilities of given tokens, at temperature 1, which
                are compared with those of the replicas at the start and after every transfer. None:
                nothing is compared.
            say: Logs one line of text; called at every restart and at every broadcast that fails.
            max_restarts: Most restarts of all replicas together in the life of this generator.
            transfer: The route of new weights. With `broadcast`, `update_weights` accepts only the
                weights of a `LearnerGroup`.
            patience: Seconds without an answer after which a replica counts as dead.

        Raises:
            LaurelError: A replica cannot be started, has weights of another step, or computes
                log-probabilities that differ from those of the learner.
        """
        self.transfer = transfer
        """The route of new weights, as passed to the constructor."""
        self.weight_version = 0
        """Version of the weights that every ready replica has."""
        self._route = route_of(transfer, patience=patience, say=say)
        self._make_group = make_group
        self._current_weights = current_weights
        self._probe = probe
        self._patience = patience
        self._restarts = Restarts(max_restarts, say)
        self._poll = max(POLL_SECONDS, POLL_SECONDS_EACH * num_replicas)
        self._arriving: list[Order] = []
        self._arrival = threading.Lock()
        """Guards `_arriving`."""
        # What follows belongs to the loop in the background.
        self._gate = PauseGate()
        self._failure: LaurelError | None = None
        """The error that made the generator unusable; None while it works."""
        self._replicas: list[GeneratorReplica] = []
        self._supervisor: Supervisor[WorkerGroup] | None = None
        self._unplaced: list[Order] = []
        self._holders: dict[str, GeneratorReplica] = {}
        """The replica that had the latest turn of each conversation, and may keep its keys and
        values."""
        self._numbers = itertools.count()
        self._has_first_weights = True
        self._is_updating = False
        self._is_asleep = False
        self._serving: list[asyncio.Task[None]] = []
        self._catching_up = threading.Lock()
        # A call at a time to each, and one thread that sends weights.
        self._threads = ThreadPoolExecutor(num_replicas + 1, "laurel-replicas")
        self._background = BackgroundLoop("laurel-replicas")
        try:
            self._background.wait_for(self._begin(num_replicas))
        except BaseException:
            self.close()
            raise

    async def _begin(self, num_replicas: int) -> None:
        self._replicas = [GeneratorReplica(i, f"{ROLE} replica {i}") for i in range(num_replicas)]
        self._supervisor = await self._in_thread(
            Supervisor,
            self._make_group,
            self._replicas,
            end=lambda group: group.shutdown(),
            restarts=self._restarts,
            bring_up=self._bring_up,
        )
        groups = [replica.value for replica in self._replicas]
        self.weight_version = await self._in_thread(common_version, groups)
        if self._probe is not None:
            lost = await self._in_thread(
                require_proof, dict(enumerate(groups)), self._probe, version=self.weight_version
            )
            for error in lost.values():
                raise error
        self._serving = [asyncio.create_task(self._serve(replica)) for replica in self._replicas]
        self._gate.open()

    def close(self) -> None:
        """End the generator and shut down the worker groups of all replicas."""
        if self._background.close(self._end()):
            self._threads.shutdown(wait=False)
            if self._supervisor is not None:
                self._supervisor.close(patience=0.0)

    async def _end(self) -> None:
        self._fail(EngineError("the generator was closed"))
        await self._gate.empty()

    @property
    def num_weight_fallbacks(self) -> int:
        """The number of weight broadcasts that failed and were completed by Ray's object store."""
        return self._route.num_fallbacks

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        """Stream the completions of a request, each as it ends.

        Closing the iterator waits until the replica has dropped the request. An error of the engine
        is raised where the first completion is awaited.
        """
        return self._completions(request)

    async def _completions(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        if not request.seeds_G:
            return
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Generated | LaurelError] = asyncio.Queue()

        def deliver(item: Generated | LaurelError) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop has ended, nobody waits
                loop.call_soon_threadsafe(inbox.put_nowait, item)

        order = Order(request, deliver)
        with self._arrival:
            self._arriving.append(order)
        loop.call_soon(self._hand_over)
        try:
            for _ in request.seeds_G:
                item = await inbox.get()
                if isinstance(item, LaurelError):
                    raise item
                yield item
        finally:
            if not order.is_over:
                self._hand_over()
                with contextlib.suppress(EngineError):  # closed, so it is over
                    await self._background.run_to_end(self._withdraw(order))

    def _hand_over(self) -> None:
        with self._arrival:
            orders, self._arriving = self._arriving, []
        if not orders:
            return
        try:
            self._background.submit(self._accept(orders))
        except EngineError as closed:
            for order in orders:
                order.fail(closed)

    async def _accept(self, orders: Iterable[Order]) -> None:
        for order in orders:
            order.task = asyncio.create_task(self._generate(order))

    async def _generate(self, order: Order) -> None:
        async with self._gate.request():
            self._place(order)
            await order.over.wait()

    def end_conversations(self, names: Sequence[str]) -> None:
        """Tell the replicas which conversations have ended, with the next call of each."""
        with contextlib.suppress(EngineError):  # closed
            self._background.submit(self._end_conversations(names))

    async def _end_conversations(self, names: Sequence[str]) -> None:
        for name in names:
            if (holder := self._holders.pop(name, None)) is not None:
                holder.ended.append(name)

    async def _withdraw(self, order: Order) -> None:
        """Abort an order and wait until no replica works on it."""
        order.is_aborted = True
        if any(replica.abort(order) for replica in self._replicas):
            await order.over.wait()
        else:
            if order in self._unplaced:
                self._unplaced.remove(order)
            order.end()
        if order.task is not None:  # it may wait at the gate
            order.task.cancel()

    async def update_weights(self, weights: Weights) -> None:
        """Load new weights into every replica, or set only the version if the values are unchanged.

        After an error the generator is unusable.

        Raises:
            EngineError: An engine refuses the weights, computes log-probabilities that differ from
                those of the learner, or was lost too often.
        """
        await self._background.run_to_end(self._update(weights))

    async def _update(self, weights: Weights) -> None:
        """Send new weights to all replicas, including those that wait for weights."""
        async with self._alone():
            self._is_updating = True
            try:
                left = self._replicas
                while left:
                    lost = await self._in_thread(self._send, weights, left)
                    left = [self._replicas[index] for index in lost]
                    await asyncio.gather(*(self._restart(r, lost[r.index]) for r in left))
            except LaurelError as error:
                self._fail(error)
                raise
            except Exception as error:
                self._fail(EngineError(f"the weights of step {weights.version}: {error}"))
                raise
            finally:
                self._is_updating = False
            for replica in self._replicas:
                replica.state = "ready"
            self.weight_version, self._has_first_weights = weights.version, False

    async def sleep(self) -> None:
        """Wait for running requests, then release the device memory of all replicas."""
        await self._background.run_to_end(self._set_asleep(True))

    async def wake(self) -> None:
        """Allocate the device memory of all replicas again and resume requests."""
        await self._background.run_to_end(self._set_asleep(False))

    async def _set_asleep(self, is_asleep: bool) -> None:
        async with self._alone():
            self._is_asleep = is_asleep
            await asyncio.gather(*(self._rest(replica) for replica in self._replicas))

    async def _rest(self, replica: GeneratorReplica) -> None:
        try:
            await self._call(replica, "sleep" if self._is_asleep else "wake")
        except WorkerError as error:
            await self._restart(replica, error)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Hold new requests back, and wait until none is running and no replica is starting."""
        async with self._gate.alone():
            try:
                for replica in self._replicas:
                    await replica.settled.wait()
                if self._failure is not None:
                    raise self._failure
                yield
            finally:
                if self._failure is not None or not self._is_asleep:
                    self._gate.open()

    def _place(self, order: Order) -> None:
        """Give an order to a replica, or keep it until a replica is ready.

        A conversation stays with its replica, and so does what branches off it; what begins goes to
        the replica with the least work.
        """
        ready = [replica for replica in self._replicas if replica.state == "ready"]
        names = order.request.conversations_G
        if self._failure is not None:
            order.fail(self._failure)
        elif ready:
            holder = self._holders.get(names[0]) if names else None
            holder = holder or self._holders.get(order.request.branch_of)
            chosen = holder if holder in ready else min(ready, key=lambda replica: replica.load)
            chosen.give(order, next(self._numbers))
            self._holders.update(dict.fromkeys(names, chosen))
        else:
            self._unplaced.append(order)
            if not any(replica.state == "starting" for replica in self._replicas):
                self._fail(
                    self._too_many(
                        ", no other replica is left, and the weights of step "
                        f"{self.weight_version} cannot be had for it any more"
                    )
                )

    def _fail(self, failure: LaurelError) -> None:
        """Fail permanently; the first failure wins."""
        self._failure = self._failure or failure
        orders, self._unplaced = self._unplaced, []
        for replica in self._replicas:
            orders += replica.give_up()
        for order in orders:
            order.fail(self._failure)
        self._gate.open()

    async def _serve(self, replica: GeneratorReplica) -> None:
        """Exchange requests and events with a replica while it has work; restart a lost replica."""
        try:
            while True:
                await replica.has_work.wait()
                if (failure := await self._exchange(replica)) is not None:
                    await self._restart(replica, failure)
        except LaurelError as error:
            self._fail(error)
        except Exception as error:
            failed = EngineError(f"{replica.name}: {type(error).__name__}: {error}")
            failed.__cause__ = error
            self._fail(failed)

    async def _exchange(self, replica: GeneratorReplica) -> LaurelError | None:
        """Send a replica its new requests and deliver its events; return why it is lost, if so."""
        news = replica.take_news()
        timeout = self._poll + self._patience
        try:
            events = await self._call(replica, "exchange", *news, self._poll, timeout=timeout)
        except WorkerError as error:
            return error
        return replica.hear(events)

    def _send(self, weights: Weights, replicas: list[GeneratorReplica]) -> dict[int, WorkerError]:
        """Send weights in a thread; return the replicas that were lost meanwhile."""
        # Who has been started again meanwhile is not ready, and has to get all of them.
        has_same = weights.same_as == self.weight_version and all(
            r.state == "ready" for r in replicas
        )
        lost = send_weights(
            weights,
            {replica.index: replica.value for replica in replicas},
            route=self._route,
            probe=self._probe,
            has_all=all(replica.has_all_weights for replica in replicas),
            has_same=has_same,
        )
        for replica in replicas:
            if not has_same or replica.index in lost:
                replica.has_all_weights = replica.index not in lost
        return lost

    async def _restart(self, replica: GeneratorReplica, failure: LaurelError) -> None:
        """Restart a replica until it works; other replicas finish its orders.

        Raises:
            EngineError: The replicas have used up their restarts.
        """
        assert self._supervisor is not None
        replica.state = "starting"
        replica.settled.clear()
        try:
            for order in replica.give_up():
                self._place(order)
            if self._failure is not None:
                raise self._failure
            loss = await self._in_thread(self._supervisor.restart, replica, failure)
            if loss is not None:
                raise self._too_many(f"; no restart: {loss.refused}") from failure
        finally:
            replica.settled.set()
        orders, self._unplaced = self._unplaced, []
        for order in orders:
            self._place(order)

    def _too_many(self, why: str) -> EngineError:
        """Return the error for a lost replica that may not restart again."""
        assert self._supervisor is not None
        loss, failure = self._supervisor.last_loss, self._supervisor.last_failure
        error = EngineError(f"{'' if loss is None else loss.notice}{why}")
        error.exit_code = getattr(failure, "exit_code", EngineError.exit_code)
        return error

    # What follows runs in threads: where a replica is started, and where weights are sent.

    def _bring_up(self, group: WorkerGroup, index: int) -> str:
        """Put a restarted replica to sleep if the others sleep, and give it their weights."""
        replica = self._replicas[index]
        replica.has_all_weights = False
        if self._is_asleep:
            group.call_one(0, "sleep")
        is_ready = self._catch_up(replica)
        replica.state = "ready" if is_ready else "waiting"
        return (
            f" and has the weights of step {self.weight_version}"
            if is_ready
            else " and waits for weights"
        )

    def _catch_up(self, replica: GeneratorReplica) -> bool:
        """Give a restarted replica the current weights; return False if there are none for it."""
        if self._has_first_weights:
            return common_version([replica.value]) == self.weight_version
        if self._is_updating:  # they are on their way
            return False
        with self._catching_up:  # the learner can be read by one at a time
            # While others generate, rollouts may end, and then the learner works.
            if any(other.state == "ready" for other in self._replicas):
                return False
            weights = self._current_weights()
            if weights is None or weights.version != self.weight_version:
                return False
            for error in self._send(weights, [replica]).values():
                raise error
            replica.state = "ready"  # before another is asked about
            return True

    async def _in_thread(
        self, function: Callable[..., Result], *arguments: Any, **options: Any
    ) -> Result:
        work = functools.partial(function, *arguments, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _call(
        self, replica: GeneratorReplica, method: str, *arguments: Any, **options: Any
    ) -> Any:
        return await self._in_thread(replica.value.call_one, 0, method, *arguments, **options)


# Requests on their way through replicas, and one replica as those who give it work see it.
#
# All of it belongs to one event loop, except where it says otherwise.

Deliver = Callable[[Generated | LaurelError], None]


class Order:
    """A generation request with a record of which of its completions are still missing."""

    def __init__(self, request: GenerationRequest, deliver: Deliver) -> None:
        """Record a request, all of whose completions are still missing.

        The constructor runs in the caller's thread.

        Args:
            request: A request with at least one seed.
            deliver: Receives every completion, or one error instead of the missing ones. It must
                not block.
        """
        self.request = request
        self.is_over = False
        """Whether nothing more will be delivered. Any thread may read it."""
        self.is_aborted = False
        self.over = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._deliver = deliver
        self._missing = list(range(len(request.seeds_G)))
        self._asked: list[int] = []
        """For each completion of the latest attempt, its index in the original request."""

    @property
    def num_missing(self) -> int:
        """The number of completions that have not arrived."""
        return len(self._missing)

    def rest(self) -> GenerationRequest:
        """Return a request for the missing completions only."""
        self._asked = list(self._missing)
        seeds_G = tuple(self.request.seeds_G[index] for index in self._asked)
        names = self.request.conversations_G
        conversations_G = tuple(names[index] for index in self._asked) if names else ()
        return replace(self.request, seeds_G=seeds_G, conversations_G=conversations_G)

    def take(self, generated: Generated) -> None:
        """Deliver a completion of the latest attempt, under its index in the original request.

        Raises:
            EngineError: The completion was not requested, or has arrived before.
        """
        known = 0 <= generated.index < len(self._asked)
        index = self._asked[generated.index] if known else generated.index
        if index not in self._missing:
            raise EngineError(f"it gave completion {index} of {self.request.id!r} unasked")
        self._missing.remove(index)
        if not self._missing:
            self.end()
        if not self.is_aborted:
            self._deliver(replace(generated, index=index))

    def fail(self, error: LaurelError) -> None:
        """Deliver an error in place of the missing completions."""
        if not self.is_over:
            self.end()
            self._deliver(error)

    def end(self) -> None:
        """Mark the order as over: no replica works on it any more."""
        self.is_over = True
        self.over.set()


class GeneratorReplica(Replica[WorkerGroup]):
    """A replica of one engine process, and the orders that it works on.

    Its worker group holds one `EngineWorker`. Its state is `waiting` while it needs weights that
    are not available before the next update.
    """

    def __init__(self, index: int, name: str) -> None:
        super().__init__(index, name)
        self.settled = asyncio.Event()
        """Set while the replica is not starting."""
        self.settled.set()
        self.has_work = asyncio.Event()
        self.has_all_weights = False
        """Whether it has loaded a full set of weights since its start, so that the next update may
        send only those that training changes."""
        self.ended: list[str] = []
        """The names of ended conversations of which its engine has not been informed."""
        self._orders: dict[int, Order] = {}
        self._new: list[tuple[int, GenerationRequest]] = []
        self._aborted: list[int] = []

    @property
    def load(self) -> int:
        """The number of unfinished completions of the replica."""
        return sum(order.num_missing for order in self._orders.values())

    def give(self, order: Order, number: int) -> None:
        """Assign an order to the replica, under a number that no other attempt has."""
        self._orders[number] = order
        self._new.append((number, order.rest()))
        self.has_work.set()

    def abort(self, order: Order) -> bool:
        """Start to abort an order; return False if the replica does not have it.

        The order ends when the engine has dropped it.
        """
        number = next((n for n, mine in self._orders.items() if mine is order), None)
        if number is None:
            return False
        if any(n == number for n, _ in self._new):  # the engine has not heard of it
            self._new = [(n, request) for n, request in self._new if n != number]
            del self._orders[number]
            order.end()
            return True
        self._aborted.append(number)
        self.has_work.set()
        return True

    def take_news(self) -> tuple[list[tuple[int, GenerationRequest]], list[int], list[str]]:
        """Return, and clear, the requests, aborts and ends that were not sent to the engine yet."""
        news = self._new, self._aborted, self.ended
        self._new, self._aborted, self.ended = [], [], []
        return news

    def hear(self, events: Sequence[EngineEvent]) -> LaurelError | None:
        """Deliver the engine's events to their orders; return the failure of the engine, if any."""
        failure: LaurelError | None = None
        for number, what in events:
            order = self._orders.get(number)
            if order is None:  # it is over
                continue
            if isinstance(what, Generated):
                self.last_failure = None
                try:
                    order.take(what)
                except EngineError as error:
                    return error
            elif isinstance(what, UserError):
                order.fail(what)
            elif what is not None and not order.is_aborted:
                failure = failure or what
            elif order.is_aborted:
                order.end()
            else:
                failure = EngineError(
                    f"it ended {order.request.id!r} without {order.num_missing} of its completions"
                )
            if order.is_over:
                del self._orders[number]
        if not self._orders:
            self.has_work.clear()
        return failure

    def give_up(self) -> list[Order]:
        """Drop all work; return the unfinished orders, in order, for other replicas to finish."""
        orders = list(self._orders.values())
        self._orders.clear()
        self.take_news()
        self.has_work.clear()
        for order in orders:
            if order.is_aborted:
                order.end()
        return [order for order in orders if not order.is_over]
