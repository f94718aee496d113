"""States of a reward server, independent of HTTP: which model answers, and whether it may now.

::

    loading -> ready <-> asleep
                 |          |
                 +----------+--> draining        broken: ready, but the model fails at everything
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

from laurel.errors import BusyError, LaurelError, speaking
from laurel.rewards.batching import Backend, BatcherLimits, BatchingScorer
from laurel.rewards.remote.replica import close_scorer
from laurel.rewards.spec import Say, ScorerSpec, find_reward_model
from laurel.rewards.version import model_version
from laurel.types import Group, Score

Changed = TypeVar("Changed")
State = Literal["loading", "ready", "asleep", "draining", "broken"]


class RefusedRequestError(Exception):
    """Raised for a request that is answered with an error."""

    def __init__(
        self, status: int, code: str, message: str, *, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        """Status code of HTTP."""
        self.code = code
        self.retry_after = retry_after
        """Seconds after which the client may try again."""


class ServedScorer(Protocol):
    """A scorer that a server can serve, closed by its `aclose` or `close`."""

    @property
    def is_broken(self) -> bool:
        """Whether it has long failed at every request."""

    @property
    def is_lost(self) -> bool:
        """Whether that is permanent: only a new start of the server can fix it."""

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """Score groups, as `protocols.Scorer` describes."""

    async def sleep(self) -> None:
        """Free the memory of devices."""

    async def wake(self) -> None:
        """Undo `sleep`."""


_LOST = "every replica of the model is lost for good; the server ends, to be started again"


@dataclass(slots=True, kw_only=True, eq=False)
class ServedModel:
    """Holds a checked model, and the number of its running requests."""

    name: str
    version: str
    scorer: ServedScorer
    in_flight: int = 0
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that the last running request sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRequest:
    """Holds the scores of a request, and the model that gave all of them."""

    scores: list[tuple[Score, ...]]
    model: ServedModel


OpenModel = Callable[[str], Awaitable[ServedModel]]
"""Loads and checks the model of a directory."""


class RewardService:
    """Serves a model through the states of a server, in one event loop."""

    def __init__(
        self,
        *,
        open_model: OpenModel | None = None,
        request_seconds: float = 120.0,
        sleep_seconds: float = 30.0,
    ) -> None:
        """Begin without a model.

        Args:
            open_model: Opens the models for `load`; None: the model cannot be changed.
            sleep_seconds: Time that running requests have before the model sleeps anyway.
        """
        self._open_model = open_model
        self._request_seconds = request_seconds
        self._sleep_seconds = sleep_seconds
        self._served: ServedModel | None = None
        self._is_asleep = False
        self._is_draining = False
        self._scoring: set[asyncio.Task[Any]] = set()
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()

    @property
    def state(self) -> State:
        """Current state, which decides on requests."""
        if self._is_draining:
            return "draining"
        if self._served is None:
            return "loading"
        if self._is_asleep:
            return "asleep"
        return "broken" if self._served.scorer.is_broken else "ready"

    @property
    def served(self) -> ServedModel | None:
        """Model that the next request gets; None while it is loaded."""
        return self._served

    def begin(self, model: ServedModel) -> None:
        """Serve a first model."""
        self._served = model

    async def score(self, groups: Sequence[Group], *, version: str = "") -> ScoredRequest:
        """Score groups with the current model.

        Raises:
            RefusedRequestError: The state or the version is wrong, the queue is full, or time is
                over.
        """
        served = self._admitted(version)
        served.in_flight += 1
        task = asyncio.current_task()
        assert task is not None
        self._scoring.add(task)
        try:
            async with asyncio.timeout(self._request_seconds):
                scores = await served.scorer.score(groups)
        except TimeoutError as error:
            message = f"there was no score within {self._request_seconds:g} s"
            raise RefusedRequestError(503, "timeout", message, retry_after=1.0) from error
        except BusyError as error:
            raise RefusedRequestError(
                429, "busy", str(error), retry_after=error.retry_after
            ) from error
        except LaurelError as error:
            raise RefusedRequestError(503, "broken", str(error), retry_after=5.0) from error
        except asyncio.CancelledError:
            if not self.is_lost:
                raise
            task.uncancel()
            raise RefusedRequestError(503, "broken", _LOST, retry_after=5.0) from None
        finally:
            self._scoring.discard(task)
            served.in_flight -= 1
            if not served.in_flight:
                served.quiet.set()
        return ScoredRequest(scores=scores, model=served)

    @property
    def is_lost(self) -> bool:
        """Whether all replicas are lost, and none will be restarted."""
        return self._served is not None and self._served.scorer.is_lost

    def give_up(self) -> None:
        """Refuse requests that wait for lost replicas: no score will come."""
        for task in self._scoring:
            task.cancel()

    def _admitted(self, version: str) -> ServedModel:
        state = self.state
        if self.is_lost:
            raise RefusedRequestError(503, "broken", _LOST, retry_after=5.0)
        if self._served is None or state in ("asleep", "draining"):
            raise RefusedRequestError(503, state, f"the server is {state}", retry_after=1.0)
        if version and version != self._served.version:
            message = f"this server has version {self._served.version!r}, not {version!r}"
            raise RefusedRequestError(409, "version", message)
        return self._served

    async def sleep(self) -> None:
        """Finish accepted requests, refuse new ones, and free the memory of devices.

        Raises:
            RefusedRequestError: The state does not allow it.
        """
        await self._run_to_end(self._sleep())

    async def _sleep(self) -> None:
        async with self._one_change() as served:
            if self._is_asleep:
                return
            self._is_asleep = True
            try:
                await _until_quiet(served, self._sleep_seconds)
                await served.scorer.sleep()
            except BaseException:
                self._is_asleep = False
                raise

    async def wake(self) -> None:
        """Take requests again after `sleep`."""
        await self._run_to_end(self._wake())

    async def _wake(self) -> None:
        async with self._one_change() as served:
            if self._is_asleep:
                await served.scorer.wake()
                self._is_asleep = False

    async def load(self, name: str) -> ServedModel:
        """Serve another model once it is loaded and checked; until then the old one answers.

        Raises:
            RefusedRequestError: The state does not allow it, or the model cannot be changed.
            UserError: It cannot be used; the old one stays.
        """
        if self._open_model is None:
            raise RefusedRequestError(409, "fixed", "this server cannot change its model")
        return await self._run_to_end(self._load(name, self._open_model))

    async def _load(self, name: str, open_model: OpenModel) -> ServedModel:
        async with self._one_change() as old:
            if self._is_asleep:
                raise RefusedRequestError(409, "asleep", "wake the server first")
            new = await open_model(name)
            if self._is_draining:
                await close_scorer(new.scorer)
                raise RefusedRequestError(503, "draining", "the server is draining")
            self._served = new
            await _until_quiet(old, self._request_seconds)
            await close_scorer(old.scorer)
            return new

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and finish accepted ones; False if some did not end in time."""
        self._is_draining = True
        return self._served is None or await _until_quiet(self._served, seconds)

    async def aclose(self) -> None:
        """Close the model. Idempotent."""
        self._is_draining = True
        served, self._served = self._served, None
        if served is not None:
            await close_scorer(served.scorer)

    async def _run_to_end(self, change: Coroutine[Any, Any, Changed]) -> Changed:
        # A change of state runs to its end even if its caller is cancelled: an interrupted one
        # could leave a sleeping model that counts as awake, or a loaded one that is never closed.
        task = asyncio.ensure_future(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    @contextlib.asynccontextmanager
    async def _one_change(self) -> AsyncIterator[ServedModel]:
        # A second change is refused, not queued: its caller could not know which model it would
        # meet.
        if self._changing.locked():
            raise RefusedRequestError(409, "changing", "another change is running", retry_after=1)
        served, state = self._served, self.state
        if served is None or state == "draining":
            raise RefusedRequestError(503, state, f"the server is {state}", retry_after=1.0)
        async with self._changing:
            yield served


async def _until_quiet(served: ServedModel, seconds: float) -> bool:
    """Wait until a model that gets no new requests has finished all; False if time is over."""
    try:
        async with asyncio.timeout(seconds):
            while served.in_flight:
                served.quiet.clear()
                await served.quiet.wait()
    except TimeoutError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class ScoringAnswer:
    """Holds the body of an answer to a request for scores."""

    body: bytes
    """The JSON text."""
    version: str = ""
    """Version of the model that scored."""


class _Answering:
    """Holds an answer that is being computed, and the number of requests that wait for it."""

    def __init__(self, digest: bytes, making: asyncio.Task[ScoringAnswer]) -> None:
        self.digest = digest
        self.making = making
        self.waiting = 0


class AnswerMemory:
    """Stores answers by request id, so that a repeated request is not computed again."""

    def __init__(self, *, max_entries: int = 10_000, max_bytes: int = 2**26) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: OrderedDict[str, tuple[bytes, ScoringAnswer]] = OrderedDict()
        self._under_way: dict[str, _Answering] = {}

    async def once(
        self, request_id: str, digest: bytes, make: Callable[[], Coroutine[Any, Any, ScoringAnswer]]
    ) -> ScoringAnswer:
        """Return the answer to a request, computed only if it is neither stored nor being computed.

        Args:
            request_id: Id of all attempts at the same request.
            digest: Digest of the whole request.
            make: Computes the answer; cancelled when all callers have left. Its errors are not
                stored.

        Raises:
            RefusedRequestError: Another request had this id.
        """
        if (stored := self._known.get(request_id)) is not None:
            self._check(digest, stored[0], request_id)
            self._known.move_to_end(request_id)
            return stored[1]
        entry = self._under_way.get(request_id)
        if entry is None or entry.making.cancelling():
            entry = _Answering(digest, asyncio.create_task(make()))
            self._under_way[request_id] = entry
        self._check(digest, entry.digest, request_id)
        entry.waiting += 1
        try:
            answer = await asyncio.shield(entry.making)
        finally:
            entry.waiting -= 1
            if not entry.waiting:
                entry.making.cancel()
            if self._under_way.get(request_id) is entry and not entry.waiting:
                del self._under_way[request_id]
        if request_id not in self._known:
            self._known[request_id] = digest, answer
            self._bytes += len(answer.body)
            while len(self._known) > self._max_entries or self._bytes > self._max_bytes:
                _, (_, dropped) = self._known.popitem(last=False)
                self._bytes -= len(dropped.body)
        return answer

    def _check(self, digest: bytes, stored: bytes, request_id: str) -> None:
        if digest != stored:
            raise RefusedRequestError(
                422, "request_id", f"another request had the id {request_id[:80]!r}"
            )


def open_model(spec: ServingSpec, *, say: Say) -> tuple[str, str, Backend]:
    """Load the model of a spec, and check it; blocks.

    Returns:
        Its name, its version, and the backend that computes its scores.

    Raises:
        UserError: The model is not a reward model, or has changed since it was saved.
    """
    assert spec.scorer is not None
    name = spec.scorer.model.name or ""
    place = spec.scorer.found or find_reward_model(name)
    from laurel.rewards.open import open_scorer
    from laurel.rewards.scorer import ContractScorer
    from laurel.workers.process import prepare

    with speaking(*spec.scorer.names):
        prepare(spec.scorer.device, cpu_threads=spec.cpu_threads, seed=0)
    scorer = open_scorer(replace(spec.scorer, found=place), say=say)
    assert isinstance(scorer, ContractScorer)
    return name, model_version(place.name, scorer.contract.rules), scorer


Opening = Callable[..., tuple[str, str, Backend]]
"""Opens what a `ServingSpec` says, as `open_model` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSpec:
    """Describes a model to serve, in this process or in others."""

    scorer: ScorerSpec | None = None
    """Scorer of the model; None where `opens` needs none."""
    limits: BatcherLimits = field(default_factory=BatcherLimits)
    cpu_threads: int | None = None
    """Threads of a CPU; None: as `prepare` chooses."""
    opens: Opening = open_model
    """A function of a module, which the processes of replicas import."""

    @property
    def batcher_limits(self) -> BatcherLimits:
        """Limits of the batcher: as set, with batches of the scorer's size."""
        if self.scorer is None:  # a cache would answer in the place of what is measured
            return replace(self.limits, cache_entries=0)
        return replace(self.limits, batch_tokens=self.scorer.batch_tokens)


def open_served(spec: ServingSpec, *, say: Say) -> ServedModel:
    """Open a model in this process for a service; `open_model` describes the arguments."""
    name, version, backend = spec.opens(spec, say=say)
    scorer = BatchingScorer(backend, model_version=version, limits=spec.batcher_limits)
    return ServedModel(name=name, version=version, scorer=scorer)


_MOST_WAITING = 20_000
# The thread looks for records at intervals: waking it for each would cost more than the writing.
_SECONDS_BETWEEN = 0.1


class AccessLog:
    """Writes records in a thread. A full disk or a slow reader costs lines only."""

    def __init__(self, target: str, *, say: Callable[[str], None]) -> None:
        """Open a log.

        Args:
            target: A file, which is appended to; `-` is standard error.

        Raises:
            OSError: The file cannot be opened.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.dup(2) if target == "-" else os.open(target, flags, 0o600)
        self._say = say
        self._has_warned = False
        self.dropped = 0
        """Number of lost lines."""
        self._records: deque[Mapping[str, Any]] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="laurel-access-log", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue a record without blocking."""
        if len(self._records) >= _MOST_WAITING:
            self._lose(1, "it is written too slowly")
        else:
            self._records.append(record)

    def close(self) -> None:
        """Write queued records, for two seconds at most. Idempotent."""
        self._closing.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(_SECONDS_BETWEEN)
            while self._records:
                records = [self._records.popleft() for _ in range(min(256, len(self._records)))]
                text = "".join(
                    json.dumps(record, separators=(",", ":")) + "\n" for record in records
                )
                rest = memoryview(text.encode("ascii"))
                try:
                    while rest:
                        rest = rest[os.write(self._descriptor, rest) :]
                except OSError as error:
                    self._lose(len(records), str(error))

    def _lose(self, count: int, why: str) -> None:
        self.dropped += count
        if not self._has_warned:
            self._has_warned = True
            self._say(f"warning: the access log loses lines: {why}")
