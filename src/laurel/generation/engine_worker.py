"""The worker that runs one generation engine in a process of its own.

The worker is a plain object whose methods are called one at a time; it knows neither Ray nor worker
groups. `generation/replicas.py` calls several of these workers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from laurel.errors import BroadcastError, EngineError, LaurelError
from laurel.generation.weights.broadcast import Meeting, WeightLink, received, torch_error_text
from laurel.generation.weights.buckets import Bucket, WeightStream
from laurel.generation.weights.handles import Chunk, OpenedMemory
from laurel.generation.weights.held import HeldDtype, HoldsRounded
from laurel.generation.weights.probe import ProbeAnswer
from laurel.protocols import Generator
from laurel.types import Generated, GenerationRequest, Weights
from laurel.workers.rendezvous import RankPlace
from laurel.workers.threads import BackgroundLoop

if TYPE_CHECKING:
    from torch import Tensor


class EngineEvent(NamedTuple):
    """A completion of a request, or the end of the request, as an `EngineWorker` reports it."""

    number: int
    what: Generated | LaurelError | None
    """A completion, the error that ended the request early, or None when the request finished or
    was aborted."""


@runtime_checkable
class Provable(Protocol):
    """A generator that can compute log-probabilities of fixed test tokens (the probe)."""

    async def answer_probe(self) -> ProbeAnswer:
        """Wait until no request is running, then compute the log-probabilities of the probe."""


class EngineWorker:
    """Runs one generation engine of any class and serves requests to it.

    While `exchange` waits for events, another thread may call the other methods.
    """

    def __init__(self, place: RankPlace, make_engine: Callable[[], Generator]) -> None:
        """Make the engine and the thread that runs it.

        Args:
            make_engine: Makes the engine; called once, in this constructor.
        """
        self._engine = make_engine()
        self._link = WeightLink(place)
        self._opened = OpenedMemory()
        self._background = BackgroundLoop(f"laurel-{place.role}-{place.rank}")
        self._running: dict[int, asyncio.Task[None]] = {}
        """The tasks of running requests, by request number; only the loop's thread uses them."""
        self._changed = threading.Condition()
        self._events: list[EngineEvent] = []
        self._is_open = True
        self._stream: WeightStream | None = None
        self._update: Future[None] | None = None

    def weight_version(self) -> int:
        """Return the version of the weights that the next token is sampled with."""
        return self._engine.weight_version

    def exchange(
        self,
        new: Sequence[tuple[int, GenerationRequest]],
        aborted: Sequence[int],
        ended: Sequence[str],
        wait: float,
    ) -> list[EngineEvent]:
        """Start and abort requests, and return the events since the last call.

        Requests of the same call start together, in order.

        Args:
            new: Requests to start, each with a number that was never used before.
            aborted: Numbers of requests to abort. Each of them still ends with a last event.
            wait: Seconds to wait for an event when there is none yet.
        """
        if ended:
            self._engine.end_conversations(ended)
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
        """Release the engine's device memory."""
        self._background.wait_for(self._engine.sleep())

    def wake(self) -> None:
        """Allocate the engine's device memory again and resume requests."""
        self._background.wait_for(self._engine.wake())

    def keep_weights(self, version: int, same_as: int) -> int:
        """Set the engine's version to a new one whose weights have the same values.

        Args:
            same_as: The version that the engine must have now, with equal weights.

        Returns:
            The version that the engine has afterwards.

        Raises:
            EngineError: The engine does not have the weights of `same_as`.
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

    def begin_weights(self, version: int, changing_only: bool = False) -> HeldDtype | None:
        """Prepare for the buckets of new weights; the engine first finishes running requests.

        Args:
            changing_only: Whether only the weights that training can change will be sent.

        Returns:
            The dtype in which the engine holds its weights; None: that of the learner.
        """
        if self._stream is not None:
            self._stream.cut(EngineError(f"the weights of step {version} came in between"))
        self._stream = WeightStream(version, changing_only=changing_only)
        self._update = self._background.submit(self._take(self._stream))
        return self._engine.held_dtype if isinstance(self._engine, HoldsRounded) else None

    async def _take(self, stream: WeightStream) -> None:
        try:
            await self._engine.update_weights(stream.weights)
        finally:
            stream.leave()

    def take_weights(self, bucket: Bucket) -> None:
        """Hand the next bucket to the engine; wait until it has started to read the one before.

        Raises:
            EngineError: The engine refuses the weights.
        """
        stream, update = self._under_way()
        stream.put(bucket)
        if update.done():
            update.result()

    def host(self) -> str:
        """Return the address at which other processes reach this one."""
        return self._link.host

    def receive_weights(self, meeting: Meeting) -> str | None:
        """Receive all buckets of a version that the learner broadcasts.

        Args:
            meeting: The broadcast group to join; see `WeightLink.group`.

        Returns:
            None when all buckets arrived; otherwise why the broadcast failed. After a failure the
            buckets can be sent again on another route, after a call of `repeat_weights`.

        Raises:
            EngineError: The engine refuses the weights.
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

    def take_handles(self, chunk: Chunk) -> str | None:
        """Copy a chunk of weights from GPU memory that a process of the learner shares.

        Returns:
            None when it was copied; otherwise why it cannot be, as in `receive_weights`.

        Raises:
            EngineError: The engine refuses the weights.
        """
        stream, update = self._under_way()
        try:
            bucket = self._opened.copy(chunk)
        except (BroadcastError, RuntimeError) as error:
            return torch_error_text(error) if isinstance(error, RuntimeError) else str(error)
        stream.put(bucket)
        if update.done():
            update.result()
        return None

    def close_handles(self) -> None:
        """Close the memory that `take_handles` has opened."""
        self._opened.close()

    def repeat_weights(self) -> None:
        """Prepare for all buckets to be sent again; tensors that arrived before are skipped."""
        stream, _ = self._under_way()
        stream.repeat()

    def end_weights(self) -> int:
        """Wait until the engine has loaded all weights; return the version that it has now.

        Raises:
            EngineError: The engine refuses the weights.
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
        """Compute the engine's log-probabilities of the fixed test tokens (the probe).

        Returns:
            The tokens, their log-probabilities and the tolerance; None if the engine has no probe.
        """
        if not isinstance(self._engine, Provable):
            return None
        return self._background.wait_for(self._engine.answer_probe())

    def shutdown(self) -> None:
        """End the engine and every running request. Idempotent."""
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
