"""Requests of many clients, merged into batches of a model that one thread computes.

While a batch is computed the requests that come in wait, and the next batch takes what fits its
token budget of them, oldest first; an idle model waits a moment for company. What is equal is
computed once, and what begins alike shares its beginning, whoever asked for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from laurel.errors import BusyError, DataError, EngineError, is_lost_worker
from laurel.rewards.preparing import Prepared, Rendered, filter_readable, rendered_rows
from laurel.types import Group, Message, Score, SentTurn, TokenGroup
from laurel.workers.replica_set import ReplicaSet, TakesDownError

if TYPE_CHECKING:
    from laurel.types import TokenIds


# --------------------------------------------------------------------------------------------------
# Scores that a model gave before, by what it read.

Key = bytes


def keys_of(tokens: TokenGroup) -> tuple[Key, ...]:
    """What the sequences of a group are known by, however each is divided."""
    trunk = hashlib.blake2b(np.ascontiguousarray(tokens.trunk_ids).data, digest_size=16)
    keys = []
    for branch_ids, is_cut in zip(tokens.branches_ids_G, tokens.truncated_G, strict=True):
        digest = trunk.copy()
        digest.update(np.ascontiguousarray(branch_ids).data)
        if is_cut:
            digest.update(b"cut")  # no whole number of tokens
        keys.append(digest.digest())
    return tuple(keys)


class ScoreCache:
    """The scores that were wanted last. It belongs to one version of one model."""

    def __init__(self, max_entries: int) -> None:
        """Hold so many scores."""
        self._max_entries = max_entries
        self._scores: OrderedDict[Key, Score] = OrderedDict()

    def known(self, keys: Iterable[Key]) -> dict[Key, Score]:
        """The scores that are there of some keys; they are now the ones wanted last."""
        found = {key: self._scores[key] for key in keys if key in self._scores}
        for key in found:
            self._scores.move_to_end(key)
        return found

    def put(self, scores: Mapping[Key, Score]) -> None:
        """Remember scores, but no failures, which may not come again; forget the oldest ones."""
        self._scores.update((key, one) for key, one in scores.items() if one.failure is None)
        while len(self._scores) > self._max_entries:
            self._scores.popitem(last=False)


# --------------------------------------------------------------------------------------------------
# What many clients asked, as the trees that a model computes.

_SHORTEST_TRUNK = 16
"""Tokens; sharing fewer is not worth a tree."""


class Encoder(Protocol):
    """Turns what clients send into tokens."""

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """See `ContractScorer.prepare`."""

    def prepare_rendered(self, row: Rendered) -> TokenGroup:
        """See `ContractScorer.prepare_rendered`."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One group of one client, as tokens."""

    tokens: TokenGroup | None
    """Of the completions that can be rendered; None where none can."""
    failures: tuple[str | None, ...]
    """Of each completion."""
    keys: tuple[Key, ...]
    """Of each that can be rendered."""
    is_loose: bool
    """Whether its completions have nothing in common that is known of."""

    @classmethod
    def of(cls, prepared: Prepared, *, is_loose: bool = False) -> Unit:
        """What a scorer made of a group."""
        tokens, failures = prepared
        if tokens is None:
            return cls(None, failures, (), is_loose)
        keys = keys_of(tokens)
        return cls(tokens, failures, keys, is_loose or len(keys) == 1)

    @property
    def num_tokens(self) -> int:
        """What it adds to a batch, if nothing of it is known."""
        return 0 if self.tokens is None else self.tokens.num_tokens

    def verdicts(self, score_of: Mapping[Key, Score]) -> tuple[Score, ...]:
        """The scores of all completions, once all that could be rendered have one."""
        keys = iter(self.keys)
        return tuple(
            score_of[next(keys)] if failure is None else Score(value=None, failure=failure)
            for failure in self.failures
        )


@dataclass(frozen=True, slots=True, eq=False)
class KeyedTree:
    """A tree to be computed, and the key of each of its branches."""

    tokens: TokenGroup
    keys: tuple[Key, ...]

    def part(self, chosen: Sequence[int]) -> KeyedTree:
        """The same trunk with some of the branches."""
        tokens = replace(
            self.tokens,
            branches_ids_G=tuple(self.tokens.branches_ids_G[i] for i in chosen),
            truncated_G=tuple(self.tokens.truncated_G[i] for i in chosen),
        )
        return KeyedTree(tokens, tuple(self.keys[i] for i in chosen))


def planned(units: Iterable[Unit], known: Container[Key]) -> list[KeyedTree]:
    """What has to be computed for units: nothing that is known, and nothing twice.

    A group stays one tree. Conversations that came alone become trees by what they share.
    """
    seen: set[Key] = set()
    trees: list[KeyedTree] = []
    loners: list[KeyedTree] = []
    for unit in units:
        if unit.tokens is None:
            continue
        wanted: list[int] = []
        for index, key in enumerate(unit.keys):
            if key not in seen and key not in known:
                seen.add(key)
                wanted.append(index)
        tree = KeyedTree(unit.tokens, unit.keys)
        if unit.is_loose:
            loners += [tree.part([index]) for index in wanted]
        elif wanted:
            trees.append(tree.part(wanted) if len(wanted) < len(unit.keys) else tree)
    return [*trees, *join_single_branches(loners)]


def join_single_branches(loners: Sequence[KeyedTree]) -> list[KeyedTree]:
    """Trees of one branch each, joined where their sequences begin alike.

    In sorted order, neighbours are joined where they share at least half of what either shares
    with its other neighbour: so the prompts that have a system message in common stay apart, and
    the completions of one prompt find each other.
    """
    if len(loners) < 2:
        return list(loners)
    ids = {id(tree): _whole(tree.tokens) for tree in loners}
    ordered = sorted(loners, key=lambda tree: ids[id(tree)].tobytes())
    rows = [ids[id(tree)] for tree in ordered]
    shared = [_num_shared(rows[i], rows[i + 1]) for i in range(len(rows) - 1)]
    trees: list[KeyedTree] = []
    first = 0
    for i, common in enumerate(shared):
        around = max(shared[max(i - 1, 0) : i + 2])
        if common < _SHORTEST_TRUNK or 2 * common < around:
            trees.append(_one_tree(ordered[first : i + 1], rows[first : i + 1], shared[first:i]))
            first = i + 1
    trees.append(_one_tree(ordered[first:], rows[first:], shared[first:]))
    return trees


def _whole(tokens: TokenGroup) -> TokenIds:
    return np.concatenate([tokens.trunk_ids, tokens.branches_ids_G[0]])


def _num_shared(one: TokenIds, other: TokenIds) -> int:
    """Tokens that both begin with, so that each has one more."""
    size = min(len(one), len(other)) - 1
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else max(size, 0)


def _one_tree(
    trees: Sequence[KeyedTree], rows: Sequence[TokenIds], shared: Sequence[int]
) -> KeyedTree:
    trunk = min(shared, default=0)
    tokens = TokenGroup(
        id="",
        trunk_ids=rows[0][:trunk],
        branches_ids_G=tuple(row[trunk:] for row in rows),
        truncated_G=tuple(tree.tokens.truncated_G[0] for tree in trees),
    )
    return KeyedTree(tokens, tuple(tree.keys[0] for tree in trees))


def halve_trees(trees: Sequence[KeyedTree]) -> tuple[list[KeyedTree], list[KeyedTree]] | None:
    """Trees in two parts; None where there is only one branch."""
    if len(trees) > 1:
        middle = len(trees) // 2
        return list(trees[:middle]), list(trees[middle:])
    (tree,) = trees
    count = len(tree.keys)
    if count == 1:
        return None
    return [tree.part(range(count // 2))], [tree.part(range(count // 2, count))]


# ------------------------------------------------------------------------------------- to tokens


def units_of(encoder: Encoder, groups: Sequence[Group]) -> list[Unit]:
    """The tokens of groups; whatever is wrong with a completion is a failure of that one alone.

    Raises:
        WorkerError: Too many of those who render were lost.
    """
    rows_of = [rendered_rows(group) for group in groups]
    said = [group for group, rows in zip(groups, rows_of, strict=True) if rows is None]
    prepared = iter(_prepared(encoder, said) if said else ())
    return [
        Unit.of(next(prepared))
        if rows is None
        else Unit.of(_prepare_rows(encoder, rows), is_loose=True)
        for rows in rows_of
    ]


def _prepared(encoder: Encoder, groups: Sequence[Group]) -> list[Prepared]:
    if all(_is_text(message.content) for group in groups for message in _messages(group)):
        try:
            return encoder.prepare(groups)
        except Exception as error:  # whose fault it is is found below
            if is_lost_worker(error):
                raise
    return [_prepare_carefully(encoder, group) for group in groups]


def _prepare_rows(encoder: Encoder, rows: Sequence[Rendered | None]) -> Prepared:
    """Conversations that their client has rendered, as branches without a trunk."""
    found: list[TokenGroup] = []
    failures: list[str | None] = []
    for row in rows:
        failure = None
        try:
            found.append(_prepare_row(encoder, row))
        except DataError as error:
            failure = str(error)
        except Exception as error:
            failure = _unreadable(error)
        failures.append(failure)
    if not found:
        return None, tuple(failures)
    tokens = TokenGroup(
        id="",
        trunk_ids=found[0].trunk_ids[:0],
        branches_ids_G=tuple(map(_whole, found)),
        truncated_G=tuple(one.truncated_G[0] for one in found),
    )
    return tokens, tuple(failures)


def _prepare_row(encoder: Encoder, row: Rendered | None) -> TokenGroup:
    if row is None:
        raise DataError("it is neither a list of token ids nor a prompt with its response")
    texts = [row] if isinstance(row, str) else row[:2] if isinstance(row, SentTurn) else []
    if not all(map(_is_text, texts)):
        raise DataError(_HALF_A_CHARACTER)
    return encoder.prepare_rendered(row)


_HALF_A_CHARACTER = "it holds half a character (a lone surrogate)"


def _unreadable(error: Exception) -> str:
    """Why a completion has no tokens; the error itself where that is the fault of none."""
    if is_lost_worker(error):
        raise error
    return f"it cannot be read: {type(error).__name__}: {error}"


def _prepare_carefully(encoder: Encoder, group: Group) -> Prepared:
    sound, failures = filter_readable(group, partial(_why_not, encoder))
    if not sound.completions_G:
        return None, failures
    try:
        ((tokens, _),) = encoder.prepare([sound])
    except Exception as error:
        failed = _unreadable(error)
        return None, tuple(failure or failed for failure in failures)
    return tokens, failures


def _why_not(encoder: Encoder, alone: Group) -> str | None:
    """Why a group of one completion cannot be rendered."""
    if not all(_is_text(message.content) for message in _messages(alone)):
        return _HALF_A_CHARACTER
    try:
        ((_, (failure,)),) = encoder.prepare([alone])
    except Exception as error:
        return _unreadable(error)
    return failure


def _messages(group: Group) -> Iterator[Message]:
    yield from group.prompt
    for one in group.completions_G:
        yield from one.messages


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --------------------------------------------------------------------------------------------------
# What waits in a batcher: requests, how many there may be, and what became of them.


B = TypeVar("B", bound="Backend")


class Backend(Encoder, Protocol):
    """A model whose calls block. It is called by as many threads at a time as its batcher has."""

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        """A score for each branch, in order."""

    def sleep(self) -> None:
        """Give the memory of devices back."""

    def wake(self) -> None:
        """Be as before `sleep`."""

    def close(self) -> None:
        """Free everything. Idempotent."""


class BackendReplicas(ReplicaSet[B]):
    """A backend of replicas: each call goes to one that is free."""

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """See `Encoder`."""
        return self.call(lambda one: one.prepare(groups), proves=False)

    def prepare_rendered(self, row: Rendered) -> TokenGroup:
        """See `Encoder`."""
        return self.call(lambda one: one.prepare_rendered(row), proves=False)

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        """See `Backend`."""
        return self.call(lambda one: one.score_tokens(tokens))

    def sleep(self) -> None:
        """See `Backend`. Those that are started again meanwhile sleep as well."""
        try:
            self.each(lambda one: one.sleep(), new=lambda one: one.sleep())
        except BaseException:
            with suppress(Exception):  # the first error is the one to tell
                self.wake()
            raise

    def wake(self) -> None:
        """See `Backend`."""
        self.each(lambda one: one.wake(), new=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherLimits:
    """How much is taken at once, and how much may wait."""

    batch_tokens: int = 8192
    """Distinct tokens of a batch; a larger group travels alone."""
    max_delay: float = 0.002
    """Seconds that an idle model waits for company."""
    max_waiting: int = 2000
    """Completions that may wait or be under way. A request of more is taken where nothing does."""
    max_waiting_characters: int = 2**26
    """Of their text; likewise."""
    cache_entries: int = 65536
    """Scores that are remembered; 0: none."""


@dataclass(slots=True, kw_only=True)
class BatcherStats:
    """What happened so far."""

    requests: int = 0
    completions: int = 0
    scored: int = 0
    failed: int = 0
    """Completions that got a failure."""
    refused: int = 0
    """Requests that found the queue full."""
    cancelled: int = 0
    computed: int = 0
    """Completions that the model computed; the others were equal to one that it had."""
    computed_tokens: int = 0
    batches: int = 0
    busy_seconds: float = 0.0
    waiting: int = 0
    """Completions that wait or are under way now."""


@dataclass(slots=True, eq=False)
class ScoringJob:
    """One request. It is done when each of its groups is.

    The future of one that came from an event loop is touched by that loop only.
    """

    groups: Sequence[Group]
    size: int
    characters: int
    arrived: float
    loop: asyncio.AbstractEventLoop | None
    """None: a thread waits."""
    future: Any
    """Of a loop, or of `concurrent`."""
    is_cancelled: bool = False
    error: Exception | None = None
    results: list[tuple[Score, ...]] = field(default_factory=list)
    missing: int = 0

    @classmethod
    def of(
        cls, groups: Sequence[Group], *, loop: asyncio.AbstractEventLoop | None = None
    ) -> ScoringJob:
        """A request that arrives now, of an event loop or of a thread."""
        size = sum(len(group.completions_G) for group in groups)
        characters = sum(map(_characters, groups))
        future: Any = Future() if loop is None else loop.create_future()
        return cls(groups, size, characters, time.monotonic(), loop, future)

    def settle(self) -> None:
        """Give the answer to whoever waits, once. In the job's own loop, if it has one."""
        if self.future.done():  # whoever waited has gone
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.results)


def hand_out(jobs: Iterable[ScoringJob]) -> None:
    """Settle jobs in their loops, from any thread; each loop is woken once."""
    of_loop: dict[asyncio.AbstractEventLoop, list[ScoringJob]] = {}
    for job in jobs:
        if job.loop is None:
            job.settle()
        else:
            of_loop.setdefault(job.loop, []).append(job)
    for loop, some in of_loop.items():
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle_all, some)


def _settle_all(jobs: Iterable[ScoringJob]) -> None:
    for job in jobs:
        job.settle()


def _characters(group: Group) -> int:
    """Of the distinct text of a group."""
    said = sum(len(message.content) for message in group.prompt)
    for completion in group.completions_G:
        for message in completion.messages:
            said += len(message.content)
    return said


_log = logging.getLogger(__name__)

_FAILURES_TO_DOUBT = 16
"""After so many computations that fail in a row the model is asked what it could score before: only
if it fails at that, too, it is the model's fault and not its input's."""
_CHARACTERS_PER_TOKEN = 3
"""Of a rough guess, before anything is tokenised."""

_Waiting = tuple[ScoringJob, int, Unit]
"""A group that waits for its batch: its request, its index there, and its tokens."""


class BatchingScorer:
    """A `Scorer` for many callers at once, in any event loops and threads.

    A caller that is cancelled takes its request back if its batch has not begun.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        model_version: str,
        limits: BatcherLimits | None = None,
        is_asleep: bool = False,
        num_threads: int = 1,
    ) -> None:
        """Start the threads that compute; `close` ends them and the backend.

        Args:
            backend: What computes. Nobody else may call it.
            model_version: Of its weights. What is remembered belongs to them.
            limits: See there.
            is_asleep: The backend has given its memory back: requests wait for `wake`.
            num_threads: Batches that the backend computes at a time.
        """
        self.model_version = model_version
        self._backend = backend
        self._limits = limits or BatcherLimits()
        self._cache = ScoreCache(self._limits.cache_entries)
        self._changed = threading.Condition()
        """Of all that follows."""
        self._arrived: deque[ScoringJob] = deque()
        self._backlog: deque[_Waiting] = deque()
        self._stats = BatcherStats()
        self._arrived_characters = 0
        self._waiting_characters = 0
        self._enough = self._limits.batch_tokens * _CHARACTERS_PER_TOKEN
        self._num_busy = 0
        self._is_asleep = is_asleep
        self._is_closed = False
        self._is_broken = False
        self._failures_in_a_row = 0
        self._known: TokenGroup | None = None
        """A conversation that the model could score."""
        self._changing = threading.Lock()
        """Held while the backend falls asleep or wakes."""
        self._threads = [
            threading.Thread(target=self._run, name="laurel-batcher", daemon=True)
            for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    # -------------------------------------------------------------------------------- callers

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """See `protocols.Scorer`. A group may be one of `rendered.rendered_group`.

        Raises:
            BusyError: The queue is full, or this is closed.
            EngineError: The model computes nothing any more.
            WorkerError: Who renders for the model, or every replica of it, is lost.
        """
        if not groups:
            return []
        job = ScoringJob.of(groups, loop=asyncio.get_running_loop())
        self._submit(job)
        try:
            found: list[tuple[Score, ...]] = await job.future
            return found
        except asyncio.CancelledError:
            job.is_cancelled = True
            raise
        finally:
            self._release(job)

    def score_now(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """The same for a thread without an event loop."""
        if not groups:
            return []
        job = ScoringJob.of(groups)
        self._submit(job)
        try:
            found: list[tuple[Score, ...]] = job.future.result()
            return found
        finally:
            self._release(job)

    def stats(self) -> BatcherStats:
        """What happened so far; a copy."""
        with self._changed:
            return replace(self._stats)

    @property
    def is_broken(self) -> bool:
        """Whether the model fails at everything."""
        return self._is_broken

    @property
    def is_lost(self) -> bool:
        """Never: a later call may succeed, and whoever watches `is_broken` can start it again."""
        return False

    @property
    def is_asleep(self) -> bool:
        """Whether requests wait for `wake`."""
        return self._is_asleep

    async def sleep(self) -> None:
        """Give the memory of devices back once the batch under way is done. Requests wait."""
        await asyncio.to_thread(self.sleep_now)

    async def wake(self) -> None:
        """Compute again."""
        await asyncio.to_thread(self.wake_now)

    def sleep_now(self) -> None:
        """`sleep` for a thread without an event loop."""
        with self._changing:
            with self._changed:
                self._check_open()
                if self._is_asleep:
                    return
                self._is_asleep = True
                self._changed.wait_for(lambda: not self._num_busy)
            try:
                self._backend.sleep()
            except BaseException:
                self._go_on()
                raise

    def wake_now(self) -> None:
        """`wake` for a thread without an event loop."""
        with self._changing:
            with self._changed:
                self._check_open()
            if self._is_asleep:
                self._backend.wake()
                self._go_on()

    def _go_on(self) -> None:
        with self._changed:
            self._is_asleep = False
            self._changed.notify_all()

    def close(self) -> None:
        """End it all after the batches under way; what still waits fails. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._fail_all()
        for thread in self._threads:
            thread.join()
        self._fail_all()  # what was being prepared
        self._backend.close()

    def _fail_all(self) -> None:
        with self._changed:
            waiting = [*self._arrived, *(job for job, _, _ in self._backlog)]
            self._arrived.clear()
        self._fail(waiting, BusyError("this scorer was closed meanwhile", retry_after=5.0))

    def _submit(self, job: ScoringJob) -> None:
        with self._changed:
            self._check_open()
            stats, limits = self._stats, self._limits
            is_full = (
                stats.waiting + job.size > limits.max_waiting
                or self._waiting_characters + job.characters > limits.max_waiting_characters
            )
            if stats.waiting and is_full:
                stats.refused += 1
                raise BusyError(
                    f"{stats.waiting} completions wait and the queue holds {limits.max_waiting}; "
                    "ask again later",
                    retry_after=self._seconds_for(stats.waiting),
                )
            stats.requests += 1
            stats.completions += job.size
            stats.waiting += job.size
            self._waiting_characters += job.characters
            self._arrived_characters += job.characters
            self._arrived.append(job)
            # A thread waits for the first, and then a moment: the others need not wake it.
            if len(self._arrived) == 1 or self._arrived_characters >= self._enough:
                self._changed.notify_all()

    def _release(self, job: ScoringJob) -> None:
        """Nobody waits for a request any more."""
        with self._changed:
            self._stats.waiting -= job.size
            self._waiting_characters -= job.characters
            if job.is_cancelled:
                self._stats.cancelled += 1
                with suppress(ValueError):  # a thread has it
                    self._arrived.remove(job)
                    self._arrived_characters -= job.characters

    def _check_open(self) -> None:
        if self._is_closed:
            raise BusyError("this scorer is closed", retry_after=5.0)

    def _seconds_for(self, completions: int) -> float:
        stats = self._stats
        rate = stats.computed / stats.busy_seconds if stats.busy_seconds > 0 else 1000.0
        return min(60.0, max(0.05, completions / max(rate, 1e-3)))

    # ----------------------------------------------------------------------------- the threads

    def _run(self) -> None:
        while (jobs := self._wait_for_work()) is not None:
            try:
                if jobs:
                    self._prepare([job for job in jobs if not job.is_cancelled])
            except Exception as error:  # whatever it is, nobody may wait for ever
                self._fail(jobs, _as_told(error))
            if batch := self._next_batch():
                self._one_batch(batch)
            with self._changed:
                self._num_busy -= 1
                self._changed.notify_all()

    def _wait_for_work(self) -> list[ScoringJob] | None:
        """What came in; waits where there is nothing to do, and a moment for company.

        None: this is closed.
        """
        with self._changed:
            while not self._is_closed:
                if not self._is_asleep and self._backlog:
                    break
                if not self._arrived or self._is_asleep:
                    self._changed.wait()
                    continue
                left = self._arrived[0].arrived + self._limits.max_delay - time.monotonic()
                if left <= 0 or self._arrived_characters >= self._enough:
                    break
                self._changed.wait(left)
            if self._is_closed:
                return None
            self._num_busy += 1
            return self._taken()

    def _taken(self) -> list[ScoringJob]:
        """The oldest requests, about two batches of them."""
        jobs: list[ScoringJob] = []
        characters = self._enough if self._backlog else 0
        while self._arrived and characters < 2 * self._enough:
            jobs.append(self._arrived.popleft())
            characters += jobs[-1].characters
            self._arrived_characters -= jobs[-1].characters
        return jobs

    def _prepare(self, jobs: Sequence[ScoringJob]) -> None:
        """Tokenise requests and put them into the backlog."""
        units = iter(units_of(self._backend, [group for job in jobs for group in job.groups]))
        with self._changed:
            for job in jobs:
                job.missing = len(job.groups)
                job.results = [()] * job.missing
                self._backlog.extend((job, index, next(units)) for index in range(job.missing))
            self._changed.notify_all()

    def _next_batch(self) -> list[_Waiting]:
        """The oldest of the backlog, as much as the budget holds."""
        batch: list[_Waiting] = []
        budget = self._limits.batch_tokens
        with self._changed:
            while self._backlog:
                job, _, unit = self._backlog[0]
                if job.is_cancelled:
                    self._backlog.popleft()
                    continue
                budget -= unit.num_tokens
                if batch and budget < 0:
                    break
                batch.append(self._backlog.popleft())
        return batch

    def _one_batch(self, batch: Sequence[_Waiting]) -> None:
        """Compute a batch, and hand its scores out."""
        try:
            done = self._finished(batch, self._compute([unit for _, _, unit in batch]))
        except Exception as error:
            self._fail([job for job, _, _ in batch], _as_told(error))
        else:
            hand_out(done)

    def _finished(
        self, batch: Sequence[_Waiting], score_of: Mapping[Key, Score]
    ) -> list[ScoringJob]:
        """Put scores where they belong; the requests that have all of theirs now."""
        done = []
        with self._changed:  # parts of a request may be in batches of several threads
            for job, index, unit in batch:
                scores = unit.verdicts(score_of)
                job.results[index] = scores
                job.missing -= 1
                failures = sum(score.failure is not None for score in scores)
                self._stats.failed += failures
                self._stats.scored += len(scores) - failures
                if not job.missing:
                    done.append(job)
        return done

    def _compute(self, units: Sequence[Unit]) -> dict[Key, Score]:
        """Every score of the units, remembered or computed."""
        with self._changed:
            known = self._cache.known(key for unit in units for key in unit.keys)
        trees = planned(units, known)
        if not trees:
            return known
        started = time.monotonic()
        found = dict(self._computed(trees))
        # Where nothing could be scored yet, there is nothing that would show whose fault it is.
        self._is_broken = self._failures_in_a_row >= _FAILURES_TO_DOUBT
        with self._changed:
            self._cache.put(found)
            self._stats.busy_seconds += time.monotonic() - started
            self._stats.computed += len(found)
            self._stats.computed_tokens += sum(tree.tokens.num_tokens for tree in trees)
            self._stats.batches += 1
        return known | found

    def _computed(self, trees: Sequence[KeyedTree]) -> list[tuple[Key, Score]]:
        """The scores of trees; what makes the model fail is found by halving and fails alone.

        Raises:
            EngineError: The model fails at what it could score before, too.
        """
        found = self._tried(trees)
        if not isinstance(found, Exception):
            return found
        parts = halve_trees(trees)
        if parts is None:
            _log.warning("a conversation makes the model fail", exc_info=found)
            failure = f"the model failed: {type(found).__name__}"
            if isinstance(found, TakesDownError):
                failure = f"poison: {found}"
            return [(trees[0].keys[0], Score(value=None, failure=failure))]
        return [*self._computed(parts[0]), *self._computed(parts[1])]

    def _tried(self, trees: Sequence[KeyedTree]) -> list[tuple[Key, Score]] | Exception:
        """The scores of trees, or why there are none."""
        try:
            scores = self._backend.score_tokens([tree.tokens for tree in trees])
            found = [
                (key, score)
                for tree, scores_G in zip(trees, scores, strict=True)
                for key, score in zip(tree.keys, scores_G, strict=True)
            ]
        except EngineError:  # it says itself that it is of no use any more: no input's fault
            self._is_broken = True
            raise
        except Exception as error:
            if is_lost_worker(error):  # no replica is left that could compute
                raise
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= _FAILURES_TO_DOUBT and self._fails_at_known():
                self._is_broken = True
                raise EngineError(f"the model fails at everything: {error}") from error
            return error
        self._failures_in_a_row = 0
        if self._known is None:
            self._known = _scored_one(trees, scores)
        return found

    def _fails_at_known(self) -> bool:
        """Whether the model cannot score any more what it could; False where it never could."""
        if self._known is None:
            return False
        try:
            ((score,),) = self._backend.score_tokens([self._known])
        except Exception:
            return True
        if score.value is None:
            return True
        self._failures_in_a_row = 0
        return False

    def _fail(self, jobs: Sequence[ScoringJob], error: Exception) -> None:
        lost = set(jobs)
        with self._changed:
            self._backlog = deque(entry for entry in self._backlog if entry[0] not in lost)
        for job in lost:
            job.error = error
        hand_out(lost)


def _scored_one(trees: Sequence[KeyedTree], scores: Sequence[Sequence[Score]]) -> TokenGroup | None:
    """The first conversation with a score."""
    for tree, scores_G in zip(trees, scores, strict=True):
        for index, score in enumerate(scores_G):
            if score.value is not None:
                return tree.part([index]).tokens
    return None


def _as_told(error: Exception) -> Exception:
    """What callers are told of an error that nothing they asked is to blame for."""
    if isinstance(error, EngineError) or is_lost_worker(error):
        return error
    _log.error("the batcher failed", exc_info=error)
    return EngineError(f"the batcher failed: {error}")
