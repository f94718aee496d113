"""Lets the generator and models that score have the memory of shared devices one after the other.

    generating --(nothing is being generated, something waits for a score)--> scoring
    scoring ----(nothing is being scored, something waits for the policy)---> generating

Calls of one kind run side by side. While any of them runs, calls of the other kind wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Literal

from laurel.protocols import Environment, Generator
from laurel.workers.threads import in_thread

Use = Literal["generating", "scoring", "neither"]
"""Who has the memory; `neither` leaves it to the learner."""


class SharedDevices:
    """The devices that the generator and the models of some environments share.

    It begins with the models asleep, so that a generator can be made. All coroutines belong to one
    event loop.
    """

    def __init__(self, environments: Iterable[Environment]) -> None:
        """Put the models of these environments to sleep (`Environment.resting`)."""
        self._environments = tuple(environments)
        self._generator: Generator | None = None
        self._generator_sleeps = False
        # Holds the models asleep; None: they are awake.
        self._models_sleep: ExitStack | None = None
        self._put_models_to_sleep()
        # None after a change that failed, and left nobody knows what.
        self._use: Use | None = "generating"
        self._num_calls = 0
        self._waiting: list[tuple[Use, asyncio.Future[None]]] = []
        self._change: asyncio.Task[None] | None = None

    def attach(self, generator: Generator) -> None:
        """Take the generator, which is awake."""
        self._generator = generator

    @asynccontextmanager
    async def taken_for(self, use: Use) -> AsyncIterator[None]:
        """Wait until the devices can be used so, and use them while the context is open.

        Raises:
            EngineError: The generator or a model's server did not free its memory, or take it.
        """
        await self._enter(use)
        try:
            yield
        finally:
            self._leave()

    async def sleep(self, *, patience: float | None = None) -> None:
        """Free the memory of all of them for the learner, once no call is running.

        Raises:
            EngineError: The generator or a model's server did not free its memory.
            TimeoutError: That took more than `patience` seconds.
        """
        async with asyncio.timeout(patience), self.taken_for("neither"):
            pass

    async def wake(self) -> None:
        """Let the generator have the memory."""
        async with self.taken_for("generating"):
            pass

    async def _enter(self, use: Use) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.append((use, place))
        self._go_on()
        try:
            await place
        except asyncio.CancelledError:
            # It may have been let in at the same moment.
            if place.done() and not place.cancelled() and place.exception() is None:
                self._leave()
            raise

    def _leave(self) -> None:
        self._num_calls -= 1
        self._go_on()

    def _go_on(self) -> None:
        """Let in who may go on; where nobody is left, begin to change to the use that is waited
        for."""
        if self._change is not None:
            return
        self._waiting = [one for one in self._waiting if not one[1].done()]
        for use, place in self._waiting:
            if use == self._use:
                self._num_calls += 1
                place.set_result(None)
        others = [use for use, place in self._waiting if not place.done()]
        if others and not self._num_calls:
            self._change = asyncio.ensure_future(self._change_to(others[0]))

    # A task of its own: a caller that is cancelled leaves no change half made.
    async def _change_to(self, use: Use) -> None:
        self._use = None
        try:
            await self._share_out(use)
            self._use = use
        except Exception as error:
            for wanted, place in self._waiting:
                if wanted == use and not place.done():
                    place.set_exception(error)
        finally:
            self._change = None
        self._go_on()

    async def _share_out(self, use: Use) -> None:
        """Free what is not used, before anything else takes its memory."""
        assert self._generator is not None
        if use != "scoring" and self._models_sleep is None:
            await in_thread(self._put_models_to_sleep, name="models-sleep")
        if use != "generating" and not self._generator_sleeps:
            await self._generator.sleep()
            self._generator_sleeps = True
        if use == "generating" and self._generator_sleeps:
            await self._generator.wake()
            self._generator_sleeps = False
        if use == "scoring" and self._models_sleep is not None:
            await in_thread(self._wake_models, name="models-wake")

    def _put_models_to_sleep(self) -> None:
        with ExitStack() as stack:
            for environment in self._environments:
                stack.enter_context(environment.resting())
            self._models_sleep = stack.pop_all()

    def _wake_models(self) -> None:
        asleep, self._models_sleep = self._models_sleep, None
        if asleep is not None:
            asleep.close()

    def close(self) -> None:
        """Shut the environments down: their models need not wake to end. Idempotent."""
        for environment in self._environments:
            environment.shutdown()
        with suppress(Exception):  # of what has ended
            self._wake_models()
