"""Several engines in processes of their own that together are one generator.

Each is an `EngineWorker` in a worker group of one. A request goes, with all its completions, to the
replica that has the least to do; tokens depend on seeds alone, so it does not matter which. A
replica whose process or engine dies is started again in its place, and others finish what it had:
completions that have come are not asked for again, so none counts twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

from laurel.engines.background_loop import BackgroundLoop
from laurel.engines.pause_gate import PauseGate
from laurel.engines.replica import Order
from laurel.engines.replica_crew import CrewSettings, ReplicaCrew
from laurel.engines.weight_probe import Probe
from laurel.engines.weight_routes import THROUGH_RAY, WeightTransfer, route_of
from laurel.errors import EngineError, LaurelError
from laurel.protocols import WorkerGroup
from laurel.types import Generated, GenerationRequest, Weights

_log = logging.getLogger(__name__)

PATIENCE = 120.0


class GeneratorReplicas:
    """A `Generator` over replicas.

    Requests made in the same turn of the event loop go out together, in order. While there is
    nothing to draw it asks nobody anything. `make_group`, `current_weights`, `probe` and `say` are
    called in threads of its own.
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
                the first update, nor while others can draw.
            probe: The learner's log-probabilities of given tokens, at temperature 1: compared with
                the replicas' at the start and after every transfer. None: not compared.
            say: Told of every restart.
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
        settings = CrewSettings(
            make_group=make_group,
            num_replicas=num_replicas,
            current_weights=current_weights,
            probe=probe,
            say=say,
            max_restarts=max_restarts,
            route=route_of(transfer, bucket_bytes=bucket_bytes, patience=patience, say=say),
            patience=patience,
        )
        self._arriving: list[Order] = []
        self._arrival = threading.Lock()
        """Of the list before it."""
        self._gate = PauseGate()
        self._crew = ReplicaCrew(settings, on_failure=self._gate.open)
        self._is_asleep = False
        self._background = BackgroundLoop("laurel-replicas")
        try:
            self._background.wait_for(self._begin())
        except BaseException:
            self.close()
            raise

    async def _begin(self) -> None:
        await self._crew.begin()
        self._gate.open()

    def close(self) -> None:
        """See `Generator`. Shuts the groups down."""
        if not self._background.close(self._end()):
            return
        ending = [
            threading.Thread(target=group.shutdown, name="laurel-closing")
            for group in self._crew.shut_down()
        ]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join()

    async def _end(self) -> None:
        self._crew.fail(EngineError("the generator was closed"))
        await self._gate.empty()

    # ---------------------------------------------------------------------------------- generation

    @property
    def weight_version(self) -> int:
        """See `Generator`."""
        return self._crew.version

    @property
    def num_restarts(self) -> int:
        """How often a replica has been started again."""
        return self._crew.restarts.number

    @property
    def num_weight_fallbacks(self) -> int:
        """Transfers of weights that broke off and ended through Ray's object store."""
        return self._crew.route.num_fallbacks

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        """See `Generator`. What closes the iterator waits until the replica has let go.

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
                    await self._elsewhere(self._take_back(order))

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
            order.task = asyncio.create_task(self._draw(order))

    async def _draw(self, order: Order) -> None:
        async with self._gate.request():
            self._crew.place(order)
            await order.over.wait()

    async def _take_back(self, order: Order) -> None:
        await self._crew.take_back(order)
        if order.task is not None:  # it may wait at the gate
            order.task.cancel()

    # --------------------------------------------------------------------------- weights and sleep

    async def update_weights(self, weights: Weights) -> None:
        """See `Generator`. After an error the generator is of no use.

        Raises:
            EngineError: An engine refuses the weights, computes something else than the learner,
                or has been lost too often.
        """
        await self._elsewhere(self._update(weights))

    async def _update(self, weights: Weights) -> None:
        async with self._alone():
            await self._crew.take_weights(weights)

    async def sleep(self) -> None:
        """See `Generator`."""
        await self._elsewhere(self._set_asleep(True))

    async def wake(self) -> None:
        """See `Generator`."""
        await self._elsewhere(self._set_asleep(False))

    async def _set_asleep(self, is_asleep: bool) -> None:
        async with self._alone():
            self._is_asleep = is_asleep
            await self._crew.set_asleep(is_asleep)

    async def _elsewhere(self, work: Coroutine[Any, Any, None]) -> None:
        # What has been begun is ended, even where the caller is cancelled.
        await asyncio.shield(asyncio.wrap_future(self._background.submit(work)))

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """New requests wait, those under way have ended, and no replica is being started."""
        async with self._gate.alone():
            try:
                await self._crew.settle()
                yield
            finally:
                if self._crew.failure is not None or not self._is_asleep:
                    self._gate.open()
