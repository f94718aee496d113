"""The worker that runs one engine in a process of its own.

The worker is a plain object whose methods are called one at a time; it knows neither Ray nor
groups. `generation/replicas.py` calls several of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from laurel.errors import BroadcastError, EngineError, LaurelError
from laurel.generation.waiting import BackgroundLoop
from laurel.generation.weights.broadcast import Meeting, WeightLink, received
from laurel.generation.weights.buckets import Bucket, WeightStream
from laurel.generation.weights.probe import ProbeAnswer
from laurel.protocols import Generator
from laurel.types import Generated, GenerationRequest, Weights
from laurel.workers.rendezvous import RankPlace

if TYPE_CHECKING:
    from torch import Tensor


class EngineEvent(NamedTuple):
    """A completion of a request, or the error that ended it."""

    number: int
    what: Generated | LaurelError | None
    """A completion; why the request ended early; None: it is over, finished or aborted."""


@runtime_checkable
class Provable(Protocol):
    """A generator that can say what its weights make of the probe's tokens."""

    async def answer_probe(self) -> ProbeAnswer:
        """The answer, when no request is under way."""


class EngineWorker:
    """Holds an engine, whatever its class, and generates what it is asked for with it.

    While `exchange` waits, another thread may call the other methods.
    """

    def __init__(self, place: RankPlace, make_engine: Callable[[], Generator]) -> None:
        """Make the engine.

        Args:
            place: Of this worker.
            make_engine: Called once, here.
        """
        self._engine = make_engine()
        self._link = WeightLink(place)
        self._background = BackgroundLoop(f"laurel-{place.role}-{place.rank}")
        self._running: dict[int, asyncio.Task[None]] = {}
        """Requests under way, by number; only the loop's thread touches them."""
        self._changed = threading.Condition()
        self._events: list[EngineEvent] = []
        self._is_open = True
        self._stream: WeightStream | None = None
        self._update: Future[None] | None = None

    def weight_version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        return self._engine.weight_version

    # ---------------------------------------------------------------------------------- generation

    def exchange(
        self,
        new: Sequence[tuple[int, GenerationRequest]],
        aborted: Sequence[int],
        wait: float,
    ) -> list[EngineEvent]:
        """Take requests, and tell what has happened since the last call.

        Requests that come together begin together, in order.

        Args:
            new: Requests, each with a number that no other has had.
            aborted: Numbers of those that nobody wants any more. Each still comes to its end.
            wait: Seconds that there may be nothing to tell.
        """
        if new or aborted:
            self._background.wait_for(self._begin(new, aborted))
        with self._changed:
            self._changed.wait_for(lambda: self._events or not self._is_open, timeout=wait)
            events, self._events = self._events, []
        return events

    async def _begin(
        self, new: Sequence[tuple[int, GenerationRequest]], aborted: Sequence[int]
    ) -> None:
        for number in aborted:
            if (task := self._running.get(number)) is not None:
                task.cancel()
        for number, request in new:
            self._running[number] = asyncio.create_task(self._generate(number, request))

    async def _generate(self, number: int, request: GenerationRequest) -> None:
        end: LaurelError | None = None
        try:
            async with aclosing(self._engine.generate(request)) as completions:
                async for generated in completions:
                    self._tell(EngineEvent(number, generated))
        except asyncio.CancelledError:  # aborted, and by now the engine has dropped it
            pass
        except LaurelError as error:
            end = error
        except Exception as error:  # whatever it is, it must be able to travel
            end = EngineError(f"the engine failed: {type(error).__name__}: {error}")
        del self._running[number]
        self._tell(EngineEvent(number, end))

    def _tell(self, event: EngineEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def sleep(self) -> None:
        """Give device memory back."""
        self._background.wait_for(self._engine.sleep())

    def wake(self) -> None:
        """Take memory again, and go on with requests."""
        self._background.wait_for(self._engine.wake())

    # ------------------------------------------------------------------------------------- weights

    def keep_weights(self, version: int, same_as: int) -> int:
        """Take the weights of one version for those of another; the version the engine has now.

        Raises:
            EngineError: It has not the weights of `same_as`.
        """
        found = self._engine.weight_version
        if found != same_as:
            raise EngineError(
                f"the weights of step {version} are those of step {same_as}, and the engine has "
                f"those of step {found}"
            )
        weights = Weights(version=version, tensors=_absent, same_as=same_as)
        self._background.wait_for(self._engine.update_weights(weights))
        return self._engine.weight_version

    def begin_weights(self, version: int, changing_only: bool = False) -> None:
        """Prepare for the buckets of new weights; the engine first finishes running requests.

        Args:
            version: The version of the weights.
            changing_only: Whether only the weights that training can change will be sent.
        """
        if self._stream is not None:
            self._stream.cut(EngineError(f"the weights of step {version} came in between"))
        self._stream = WeightStream(version, changing_only=changing_only)
        self._update = self._background.submit(self._take(self._stream))

    async def _take(self, stream: WeightStream) -> None:
        try:
            await self._engine.update_weights(stream.weights)
        finally:
            stream.leave()

    def take_weights(self, bucket: Bucket) -> None:
        """Take the next bucket, when the engine has begun with the one before.

        Raises:
            EngineError: The engine refuses what it got.
        """
        stream, update = self._under_way()
        stream.put(bucket)
        if update.done():
            update.result()

    def host(self) -> str:
        """The address at which other processes reach this one."""
        return self._link.host

    def receive_weights(self, meeting: Meeting) -> str | None:
        """Take all buckets from the learner itself.

        Args:
            meeting: See `WeightLink.group`.

        Returns:
            Why they did not all come, after which they may come in another way (`repeat_weights`);
            None: they did.

        Raises:
            EngineError: The engine refuses what it got.
        """
        stream, update = self._under_way()
        try:
            for bucket in received(self._link.group(meeting)):
                stream.put(bucket)
                if update.done():
                    self._link.close()
                    update.result()
        except BroadcastError as error:
            self._link.close()
            return str(error)
        return None

    def repeat_weights(self) -> None:
        """All buckets will come again, from the first on. The engine goes on where it is."""
        stream, _ = self._under_way()
        stream.repeat()

    def end_weights(self) -> int:
        """Wait until all weights are where they belong; the version that the engine has now.

        Raises:
            EngineError: The engine refuses what it got.
        """
        stream, update = self._under_way()
        stream.complete()
        self._stream = self._update = None
        update.result()
        return self._engine.weight_version

    def _under_way(self) -> tuple[WeightStream, Future[None]]:
        if self._stream is None or self._update is None:
            raise EngineError("weights came without a beginning")
        return self._stream, self._update

    def answer_probe(self) -> ProbeAnswer | None:
        """The engine's answer to the probe; None for an engine that has no answer."""
        if not isinstance(self._engine, Provable):
            return None
        return self._background.wait_for(self._engine.answer_probe())

    # ----------------------------------------------------------------------------------------- end

    def shutdown(self) -> None:
        """End the engine. What is under way is over. Idempotent."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        if self._stream is not None:
            self._stream.cut(EngineError("the engine was closed"))
        self._link.close()
        self._engine.close()
        self._background.close(_nothing())


def _absent() -> Iterator[tuple[str, Tensor]]:
    raise EngineError("weights that have not changed are not sent")


async def _nothing() -> None:
    """The last thing to do is nothing."""
