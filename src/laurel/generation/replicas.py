"""Several engines in processes of their own that together are one generator.

Each is an `EngineWorker` in a worker group of one. A request goes, with all its completions, to the
replica that has the least to do; tokens depend on seeds alone, so it does not matter which. A
replica whose process or engine dies is started again in its place, and others finish what it had:
completions that have come are not asked for again, so none counts twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from laurel.errors import EngineError, LaurelError, UserError, WorkerError
from laurel.generation.engine_worker import EngineEvent
from laurel.generation.waiting import BackgroundLoop, PauseGate
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

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

ROLE = "generation"
PATIENCE = 120.0
POLL_SECONDS = 0.05
"""How long a busy replica without news may delay the requests that wait for it.
With many replicas it is longer: `POLL_SECONDS_EACH` times their number."""
POLL_SECONDS_EACH = 0.005


class GeneratorReplicas:
    """A `Generator` over replicas.

    Requests made in the same turn of the event loop go out together, in order. While there is
    nothing to generate it asks nobody anything. `make_group`, `current_weights`, `probe` and `say`
    are called in threads of its own.
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
        bucket_bytes: int | None = None,
        patience: float = PATIENCE,
    ) -> None:
        """Make the replicas, all at the same time.

        Args:
            make_group: Makes the group, of one `EngineWorker`, of the replica with this number;
                called again, when the one before has been shut down, to start it anew.
            num_replicas: At least one.
            current_weights: The weights of `weight_version`, for a replica that is started again
                between two updates when no other is left; None, or those of another version:
                they cannot be had, and the replica waits for the next update. Not asked before
                the first update, nor while others can generate.
            probe: The learner's log-probabilities of given tokens, at temperature 1: compared with
                the replicas' at the start and after every transfer. None: not compared.
            say: Called with a line for every restart.
            max_restarts: Of all replicas together, as long as this generator lives.
            transfer: How weights come: see `weight_routes`. For `broadcast` they must be those of a
                `LearnerGroup`.
            bucket_bytes: Of weights that travel at a time; None: what suits the way.
            patience: Seconds after which a replica that gives no sign is taken for dead.

        Raises:
            LaurelError: A replica cannot be made, has weights of another step, or computes
                something else than the learner.
        """
        self.transfer = transfer
        """As it was given."""
        self.weight_version = 0
        """Version of the weights that every ready replica has."""
        self._route = route_of(transfer, bucket_bytes=bucket_bytes, patience=patience, say=say)
        self._make_group = make_group
        self._current_weights = current_weights
        self._probe = probe
        self._patience = patience
        self._restarts = Restarts(max_restarts, say)
        self._poll = max(POLL_SECONDS, POLL_SECONDS_EACH * num_replicas)
        self._arriving: list[Order] = []
        self._arrival = threading.Lock()
        """Guards the list before it."""
        # What follows belongs to the loop in the background.
        self._gate = PauseGate()
        self._failure: LaurelError | None = None
        """Why it is unusable."""
        self._replicas: list[GeneratorReplica] = []
        self._supervisor: Supervisor[WorkerGroup] | None = None
        self._unplaced: list[Order] = []
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
        """Make all replicas, at the same time."""
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
        """End the generator. Shuts the groups down."""
        if self._background.close(self._end()):
            self._threads.shutdown(wait=False)
            if self._supervisor is not None:
                self._supervisor.close(patience=0.0)

    async def _end(self) -> None:
        self._fail(EngineError("the generator was closed"))
        await self._gate.empty()

    # ---------------------------------------------------------------------------------- generation

    @property
    def num_restarts(self) -> int:
        """How often a replica has been started again."""
        return self._restarts.number

    @property
    def num_weight_fallbacks(self) -> int:
        """Transfers of weights that broke off and ended through Ray's object store."""
        return self._route.num_fallbacks

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        """Stream the completions of a request as they end.

        What closes the iterator waits until the replica has dropped the request.

        What the engine refuses is raised where the first completion is awaited.
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
                    await self._elsewhere(self._withdraw(order))

    def _hand_over(self) -> None:
        """Let the requests that have arrived begin, in order."""
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

    async def _withdraw(self, order: Order) -> None:
        """Come back when nobody works on an order any more."""
        order.is_aborted = True
        if any(replica.abort(order) for replica in self._replicas):
            await order.over.wait()
        else:
            if order in self._unplaced:
                self._unplaced.remove(order)
            order.end()
        if order.task is not None:  # it may wait at the gate
            order.task.cancel()

    # --------------------------------------------------------------------------- weights and sleep

    async def update_weights(self, weights: Weights) -> None:
        """Take new weights, or only their version. After an error the generator is unusable.

        Raises:
            EngineError: An engine refuses the weights, computes something else than the learner,
                or has been lost too often.
        """
        await self._elsewhere(self._update(weights))

    async def _update(self, weights: Weights) -> None:
        """Give all replicas new weights, also those that wait for some."""
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
        """Give device memory back."""
        await self._elsewhere(self._set_asleep(True))

    async def wake(self) -> None:
        """Take memory again, and go on with requests."""
        await self._elsewhere(self._set_asleep(False))

    async def _set_asleep(self, is_asleep: bool) -> None:
        async with self._alone():
            self._is_asleep = is_asleep
            await asyncio.gather(*(self._rest(replica) for replica in self._replicas))

    async def _rest(self, replica: GeneratorReplica) -> None:
        try:
            await self._call(replica, "sleep" if self._is_asleep else "wake")
        except WorkerError as error:
            await self._restart(replica, error)

    async def _elsewhere(self, work: Coroutine[Any, Any, None]) -> None:
        # What has been begun is ended, even where the caller is cancelled.
        await asyncio.shield(asyncio.wrap_future(self._background.submit(work)))

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """New requests wait, those under way have ended, and no replica is being started."""
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

    # -------------------------------------------------------------------------------------- orders

    def _place(self, order: Order) -> None:
        """Give an order to the replica with the least work, or keep it until there is one."""
        ready = [replica for replica in self._replicas if replica.state == "ready"]
        if self._failure is not None:
            order.fail(self._failure)
        elif ready:
            min(ready, key=lambda replica: replica.load).give(order, next(self._numbers))
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
        """Speak to one replica while it has work, and start it again when it is lost."""
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
        """Tell it what is new, and hear what has happened. Why it is lost, where it is."""
        news = replica.take_news()
        timeout = self._poll + self._patience
        try:
            events = await self._call(replica, "exchange", *news, self._poll, timeout=timeout)
        except WorkerError as error:
            return error
        return replica.hear(events)

    def _send(self, weights: Weights, replicas: list[GeneratorReplica]) -> dict[int, WorkerError]:
        """Send weights, in a thread; the replicas that were lost meanwhile."""
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

    # ------------------------------------------------------------------------------------ restarts

    async def _restart(self, replica: GeneratorReplica, failure: LaurelError) -> None:
        """Start a replica again, until it works. Others finish what it had.

        Raises:
            EngineError: That has been done too often.
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
        """The error for a replica that is lost and may not restart any more."""
        assert self._supervisor is not None
        loss, failure = self._supervisor.last_loss, self._supervisor.last_failure
        error = EngineError(f"{'' if loss is None else loss.notice}{why}")
        error.exit_code = getattr(failure, "exit_code", EngineError.exit_code)
        return error

    # What follows runs in threads: where a replica is started, and where weights are sent.

    def _bring_up(self, group: WorkerGroup, index: int) -> str:
        """Let a replica that was started again rest as the others do, and have their weights."""
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
        """Give it the weights of the day. False: it must wait for the next ones."""
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


# --------------------------------------------------------------------------------------------------
# Requests on their way through replicas, and one replica as those who give it work see it.
#
# All of it belongs to one event loop, except where it says otherwise.

Deliver = Callable[[Generated | LaurelError], None]


class Order:
    """A request, and which of its completions have not come yet."""

    def __init__(self, request: GenerationRequest, deliver: Deliver) -> None:
        """Take a request, in the caller's thread.

        Args:
            request: With at least one seed.
            deliver: Receives every completion, or one error instead of the rest. Must not block.
        """
        self.request = request
        self.is_over = False
        """Nothing will be delivered any more. May be read by any thread."""
        self.is_aborted = False
        self.over = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._deliver = deliver
        self._missing = list(range(len(request.seeds_G)))
        self._asked: list[int] = []
        """Index of each completion that the latest attempt has asked for."""

    @property
    def num_missing(self) -> int:
        """Completions that have not come yet."""
        return len(self._missing)

    def rest(self) -> GenerationRequest:
        """Make a request for the completions that are missing."""
        self._asked = list(self._missing)
        seeds_G = tuple(self.request.seeds_G[index] for index in self._asked)
        return replace(self.request, seeds_G=seeds_G)

    def take(self, generated: Generated) -> None:
        """Hand on a completion of the latest attempt.

        Raises:
            EngineError: It was not asked for, or has come before.
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
        """Deliver an error instead of what is missing."""
        if not self.is_over:
            self.end()
            self._deliver(error)

    def end(self) -> None:
        """Note that nobody works on it any more."""
        self.is_over = True
        self.over.set()


class GeneratorReplica(Replica[WorkerGroup]):
    """One engine in a group of one `EngineWorker`, and the orders that it works on.

    While it waits for weights that nobody can give it now, its state is `waiting`.
    """

    def __init__(self, index: int, name: str) -> None:
        """Begin without work; see `Replica`."""
        super().__init__(index, name)
        self.settled = asyncio.Event()
        """It is not starting."""
        self.settled.set()
        self.has_work = asyncio.Event()
        self.has_all_weights = False
        """It has been given them since it was started, and since then those that change."""
        self._orders: dict[int, Order] = {}
        self._new: list[tuple[int, GenerationRequest]] = []
        self._aborted: list[int] = []

    @property
    def load(self) -> int:
        """The number of completions that are not finished."""
        return sum(order.num_missing for order in self._orders.values())

    def give(self, order: Order, number: int) -> None:
        """Give it an order, under a number that no other attempt has."""
        self._orders[number] = order
        self._new.append((number, order.rest()))
        self.has_work.set()

    def abort(self, order: Order) -> bool:
        """Begin to abort an order; it ends when the engine has dropped it. False: not here."""
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

    def take_news(self) -> tuple[list[tuple[int, GenerationRequest]], list[int]]:
        """Take the requests and aborts that the engine does not have yet."""
        news = self._new, self._aborted
        self._new, self._aborted = [], []
        return news

    def hear(self, events: Sequence[EngineEvent]) -> LaurelError | None:
        """Deliver the engine's events. Returns the failure that ended the engine, if any."""
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
        """Forget all work; the orders that somebody else must finish, in order."""
        orders = list(self._orders.values())
        self._orders.clear()
        self.take_news()
        self.has_work.clear()
        for order in orders:
            if order.is_aborted:
                order.end()
        return [order for order in orders if not order.is_over]
