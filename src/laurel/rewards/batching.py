"""Merges the requests of many clients into batches for a model that one thread computes.

Requests that arrive while a batch is computed wait; the next batch takes as many of them as fit its
token budget, oldest first. An idle model waits a moment for more requests. Equal sequences are
computed once, and sequences with a common prefix share it, whichever client sent them.
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
from laurel.rewards.preparing import (
    Prepared,
    Rendered,
    fill_in,
    filter_readable,
    is_text,
    rendered_rows,
    texts_of,
)
from laurel.types import Group, Message, Score, TokenGroup
from laurel.workers.replica_set import ReplicaSet, TakesDownError

if TYPE_CHECKING:
    from laurel.types import TokenIds


# Cache of scores, keyed by token sequence.

Key = bytes


def keys_of(tokens: TokenGroup) -> tuple[Key, ...]:
    """Return the cache key of each sequence of a group, independent of how the group is divided."""
    trunk = hashlib.blake2b(np.ascontiguousarray(tokens.trunk_ids).data, digest_size=16)
    keys = []
    reads_G = tokens.reads_G or ((),) * len(tokens.branches_ids_G)
    for branch_ids, is_cut, reads in zip(
        tokens.branches_ids_G, tokens.truncated_G, reads_G, strict=True
    ):
        digest = trunk.copy()
        digest.update(np.ascontiguousarray(branch_ids).data)
        if is_cut:
            digest.update(b"cut")  # a cut sequence never equals a whole one
        if reads:
            digest.update(repr(reads).encode())
        keys.append(digest.digest())
    return tuple(keys)


class ScoreCache:
    """Caches the most recently used scores of one version of one model."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._scores: OrderedDict[Key, Score] = OrderedDict()

    def known(self, keys: Iterable[Key]) -> dict[Key, Score]:
        """Return the cached scores among `keys`, and mark them as most recently used."""
        found = {key: self._scores[key] for key in keys if key in self._scores}
        for key in found:
            self._scores.move_to_end(key)
        return found

    def put(self, scores: Mapping[Key, Score]) -> None:
        """Store scores and evict the oldest; failures are not stored, as they may not recur."""
        self._scores.update((key, one) for key, one in scores.items() if one.failure is None)
        while len(self._scores) > self._max_entries:
            self._scores.popitem(last=False)


# Requests of many clients, as the token trees that a model computes.

# Tokens. Sharing fewer does not repay a tree of its own.
_SHORTEST_TRUNK = 16


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Holds one group of one client, tokenised."""

    tokens: TokenGroup | None
    """Tokens of the completions that can be rendered; None where none can."""
    failures: tuple[str | None, ...]
    """Failure of each completion; None where it can be rendered."""
    keys: tuple[Key, ...]
    """Cache key of each completion that can be rendered."""
    is_loose: bool
    """Whether the completions are not known to share a prompt."""

    @classmethod
    def of(cls, prepared: Prepared, *, is_loose: bool = False) -> Unit:
        """Build a unit from a tokenised group."""
        tokens, failures = prepared
        if tokens is None:
            return cls(None, failures, (), is_loose)
        keys = keys_of(tokens)
        return cls(tokens, failures, keys, is_loose or len(keys) == 1)

    @property
    def num_tokens(self) -> int:
        """Tokens that the unit adds to a batch if none of it is cached."""
        return 0 if self.tokens is None else self.tokens.num_tokens

    def verdicts(self, score_of: Mapping[Key, Score]) -> tuple[Score, ...]:
        """Return the score of every completion, given the scores of all that could be rendered."""
        return fill_in(self.failures, (score_of[key] for key in self.keys))


@dataclass(frozen=True, slots=True, eq=False)
class KeyedTree:
    """Holds a token tree to be computed, and the cache key of each of its branches."""

    tokens: TokenGroup
    keys: tuple[Key, ...]

    def part(self, chosen: Sequence[int]) -> KeyedTree:
        """Return the same trunk with the chosen branches only."""
        return KeyedTree(self.tokens.select(chosen), tuple(self.keys[i] for i in chosen))


def planned(units: Iterable[Unit], known: Container[Key]) -> list[KeyedTree]:
    """Return the trees to compute for units: nothing that is known, and nothing twice."""
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
        # A group stays one tree. Conversations that came alone are joined into trees by common
        # prefix.
        tree = KeyedTree(unit.tokens, unit.keys)
        if unit.is_loose:
            loners += [tree.part([index]) for index in wanted]
        elif wanted:
            trees.append(tree.part(wanted) if len(wanted) < len(unit.keys) else tree)
    return [*trees, *join_single_branches(loners)]


def join_single_branches(loners: Sequence[KeyedTree]) -> list[KeyedTree]:
    """Join trees of one branch each where their sequences have a common prefix."""
    if len(loners) < 2:
        return list(loners)
    ids = {id(tree): _whole(tree.tokens) for tree in loners}
    ordered = sorted(loners, key=lambda tree: ids[id(tree)].tobytes())
    rows = [ids[id(tree)] for tree in ordered]
    shared = [_num_shared(rows[i], rows[i + 1]) for i in range(len(rows) - 1)]
    trees: list[KeyedTree] = []
    first = 0
    # In sorted order, neighbours are joined where they share at least half of what either shares
    # with its other neighbour. Prompts that only have a system message in common therefore stay
    # apart, while the completions of one prompt find each other.
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
    # One token less than the shorter one: every branch needs a token of its own.
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
        # Positions count from the start of the sequence, wherever its trunk ends.
        reads_G=tuple(reads for tree in trees for reads in tree.tokens.reads_G),
    )
    return KeyedTree(tokens, tuple(tree.keys[0] for tree in trees))


def halve_trees(trees: Sequence[KeyedTree]) -> tuple[list[KeyedTree], list[KeyedTree]] | None:
    """Split trees into two halves; None where there is only one branch."""
    if len(trees) > 1:
        middle = len(trees) // 2
        return list(trees[:middle]), list(trees[middle:])
    (tree,) = trees
    count = len(tree.keys)
    if count == 1:
        return None
    return [tree.part(range(count // 2))], [tree.part(range(count // 2, count))]


def units_of(encoder: Backend, groups: Sequence[Group]) -> list[Unit]:
    """Tokenise groups; a completion that cannot be read fails alone.

    Raises:
        WorkerError: Too many of the tokenizer workers were lost.
    """
    rows_of = [rendered_rows(group) for group in groups]
    unrendered = [group for group, rows in zip(groups, rows_of, strict=True) if rows is None]
    prepared = iter(_prepared(encoder, unrendered) if unrendered else ())
    return [
        Unit.of(next(prepared))
        if rows is None
        else Unit.of(_prepare_rows(encoder, rows), is_loose=True)
        for rows in rows_of
    ]


def _prepared(encoder: Backend, groups: Sequence[Group]) -> list[Prepared]:
    if all(is_text(message.content) for group in groups for message in _messages(group)):
        try:
            return encoder.prepare(groups)
        except Exception as error:  # the completion at fault is found below
            if is_lost_worker(error):
                raise
    return [_prepare_carefully(encoder, group) for group in groups]


def _prepare_rows(encoder: Backend, rows: Sequence[Rendered | None]) -> Prepared:
    found: list[TokenGroup] = []
    failures: list[str | None] = []
    for row in rows:
        failure = None
        try:
            if row is None:
                raise DataError("it is neither a list of token ids nor a prompt with its response")
            if not all(map(is_text, texts_of(row))):
                raise DataError(_UNPAIRED_SURROGATE)
            found.append(encoder.prepare_rendered(row))
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
        reads_G=tuple(reads for one in found for reads in one.reads_G),
    )
    return tokens, tuple(failures)


_UNPAIRED_SURROGATE = "it contains an unpaired UTF-16 surrogate"


def _unreadable(error: Exception) -> str:
    """Return why a completion has no tokens; raise the error itself if a worker was lost."""
    if is_lost_worker(error):
        raise error
    return f"it cannot be read: {type(error).__name__}: {error}"


def _prepare_carefully(encoder: Backend, group: Group) -> Prepared:
    sound, failures = filter_readable(group, partial(_why_not, encoder))
    if not sound.completions_G:
        return None, failures
    try:
        ((tokens, _),) = encoder.prepare([sound])
    except Exception as error:
        failed = _unreadable(error)
        return None, tuple(failure or failed for failure in failures)
    return tokens, failures


def _why_not(encoder: Backend, alone: Group) -> str | None:
    if not all(is_text(message.content) for message in _messages(alone)):
        return _UNPAIRED_SURROGATE
    try:
        ((_, (failure,)),) = encoder.prepare([alone])
    except Exception as error:
        return _unreadable(error)
    return failure


def _messages(group: Group) -> Iterator[Message]:
    yield from group.prompt
    for one in group.completions_G:
        yield from one.messages


# The queue of a batcher: its requests, limits and statistics.


B = TypeVar("B", bound="Backend")


class Backend(Protocol):
    """Computes scores in blocking calls; a batcher calls it from up to `num_threads` threads."""

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """Render and tokenise groups; one that cannot be rendered carries a failure."""

    def prepare_rendered(self, row: Rendered) -> TokenGroup:
        """Tokenise one conversation that its client has rendered."""

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        """Return a score for each branch, in order."""

    def sleep(self) -> None:
        """Free the memory of devices."""

    def wake(self) -> None:
        """Undo `sleep`."""

    def close(self) -> None:
        """Free all resources. Idempotent."""


class KnownInput:
    """A conversation that a model could score, which tells a broken model from bad input."""

    def __init__(self) -> None:
        self._tokens: TokenGroup | None = None

    def note(self, tokens: Sequence[TokenGroup], scores: Sequence[Sequence[Score]]) -> None:
        """Keep the first conversation that got a score."""
        if self._tokens is None:
            scored = (
                group.select([index])
                for group, scores_G in zip(tokens, scores, strict=True)
                for index, score in enumerate(scores_G)
                if score.value is not None
            )
            self._tokens = next(scored, None)

    def is_scored_by(self, backend: Backend) -> bool | None:
        """Report whether a model still scores it; None where it has scored nothing yet."""
        if self._tokens is None:
            return None
        try:
            ((score,),) = backend.score_tokens([self._tokens])
        except Exception:
            return False
        return score.value is not None


class BackendReplicas(ReplicaSet[B]):
    """Sends each call to a free replica of a backend."""

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """Prepare groups on a free replica; the call does not prove the replica healthy."""
        return self.call(lambda one: one.prepare(groups), proves=False)

    def prepare_rendered(self, row: Rendered) -> TokenGroup:
        """Prepare a rendered row on a free replica; the call does not prove the replica healthy."""
        return self.call(lambda one: one.prepare_rendered(row), proves=False)

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        """Score on a free replica."""
        return self.call(lambda one: one.score_tokens(tokens))

    def sleep(self) -> None:
        """Let all replicas sleep, those restarted meanwhile too."""
        try:
            self.each(lambda one: one.sleep(), new=lambda one: one.sleep())
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                self.wake()
            raise

    def wake(self) -> None:
        """Wake all replicas."""
        self.each(lambda one: one.wake(), new=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherLimits:
    """Limits the size of a batch and of the queue."""

    batch_tokens: int = 8192
    """Distinct tokens of a batch; a larger group is computed alone, in parts."""
    max_delay: float = 0.002
    """Seconds that an idle model waits for more requests."""
    max_waiting: int = 2000
    """Completions queued or running; a larger request is accepted when the queue is empty."""
    max_waiting_characters: int = 2**26
    """Characters of the completions queued or running; a larger request likewise."""
    cache_entries: int = 65536
    """Scores in the cache; 0 turns it off."""


@dataclass(slots=True, kw_only=True)
class BatcherStats:
    """Counts what a batcher has done so far."""

    requests: int = 0
    completions: int = 0
    scored: int = 0
    failed: int = 0
    """Completions that ended with a failure."""
    refused: int = 0
    """Requests refused because the queue was full."""
    cancelled: int = 0
    computed: int = 0
    """Completions that the model computed; the others were cached or equal to another."""
    computed_tokens: int = 0
    batches: int = 0
    busy_seconds: float = 0.0
    waiting: int = 0
    """Completions queued or running now."""


@dataclass(slots=True, eq=False)
class ScoringJob:
    """Holds one request, which is done when each of its groups is.

    The future of a request from an event loop is touched by that loop only.
    """

    groups: Sequence[Group]
    size: int
    characters: int
    arrived: float
    loop: asyncio.AbstractEventLoop | None
    """The event loop of the caller; None where a thread waits."""
    future: Any
    """An asyncio future of that loop, or one of `concurrent.futures`."""
    is_cancelled: bool = False
    error: Exception | None = None
    results: list[tuple[Score, ...]] = field(default_factory=list)
    missing: int = 0

    @classmethod
    def of(
        cls, groups: Sequence[Group], *, loop: asyncio.AbstractEventLoop | None = None
    ) -> ScoringJob:
        """Create a request that arrives now, from an event loop or from a thread."""
        size = sum(len(group.completions_G) for group in groups)
        characters = sum(len(one.content) for group in groups for one in _messages(group))
        future: Any = Future() if loop is None else loop.create_future()
        return cls(groups, size, characters, time.monotonic(), loop, future)

    def settle(self) -> None:
        """Resolve the future once; called in the job's own loop, if it has one."""
        if self.future.done():  # the caller was cancelled
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


_log = logging.getLogger(__name__)

# After so many failed computations in a row, the model is asked for a score that it could give
# before: if that fails too, the model is at fault and not its input.
_FAILURES_TO_DOUBT = 16
_CHARACTERS_PER_TOKEN = 3  # a rough guess, before anything is tokenised

# A group in the backlog: its request, its index there, and its tokens.
_Waiting = tuple[ScoringJob, int, Unit]


class BatchingScorer:
    """Scores for many callers at once, in any event loops and threads.

    A caller that is cancelled withdraws its request if its batch has not begun.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        model_version: str,
        limits: BatcherLimits | None = None,
        num_threads: int = 1,
    ) -> None:
        """Start the threads that compute; `close` ends them and the backend.

        Args:
            backend: Computes the scores. Nothing else may call it.
            model_version: Version of the weights, which the cache belongs to.
            num_threads: Batches that the backend computes concurrently.
        """
        self.model_version = model_version
        self._backend = backend
        self._limits = limits or BatcherLimits()
        self._cache = ScoreCache(self._limits.cache_entries)
        # Guards all that follows.
        self._changed = threading.Condition()
        self._arrived: deque[ScoringJob] = deque()
        self._backlog: deque[_Waiting] = deque()
        self._stats = BatcherStats()
        self._arrived_characters = 0
        self._waiting_characters = 0
        self._enough = self._limits.batch_tokens * _CHARACTERS_PER_TOKEN
        self._num_busy = 0
        self._is_asleep = False
        self._is_closed = False
        self._is_broken = False
        self._failures_in_a_row = 0
        self._known = KnownInput()
        # Held while the backend falls asleep or wakes.
        self._changing = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name="laurel-batcher", daemon=True)
            for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """Score groups, which may be made by `rendered_group`; the protocol is `protocols.Scorer`.

        Raises:
            BusyError: The queue is full, or the scorer is closed.
            EngineError: The model computes nothing any more.
            WorkerError: The tokenizer workers, or all replicas of the model, are lost.
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
        """Score groups from a thread without an event loop."""
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
        """Return a copy of the statistics so far."""
        with self._changed:
            return replace(self._stats)

    @property
    def is_broken(self) -> bool:
        """Whether the model fails at every input."""
        return self._is_broken

    @property
    def is_lost(self) -> bool:
        """Always False: a later call may succeed once the owner restarts a broken model."""
        return False

    @property
    def is_asleep(self) -> bool:
        """Whether requests wait for `wake`."""
        return self._is_asleep

    async def sleep(self) -> None:
        """Free the memory of devices once the current batch is done; requests wait."""
        await asyncio.to_thread(self.sleep_now)

    async def wake(self) -> None:
        """Compute again after `sleep`."""
        await asyncio.to_thread(self.wake_now)

    def sleep_now(self) -> None:
        """Sleep, from a thread without an event loop."""
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
        """Wake, from a thread without an event loop."""
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
        """End the threads after the current batches; requests that still wait fail. Idempotent."""
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
            # Where nothing waits, a request of any size is taken: it would never fit otherwise.
            if stats.waiting and is_full:
                stats.refused += 1
                rate = stats.computed / stats.busy_seconds if stats.busy_seconds > 0 else 1000.0
                raise BusyError(
                    f"the queue is full: {stats.waiting} completions wait, and its limit is "
                    f"{limits.max_waiting}; ask again later",
                    retry_after=min(60.0, max(0.05, stats.waiting / max(rate, 1e-3))),
                )
            stats.requests += 1
            stats.completions += job.size
            stats.waiting += job.size
            self._waiting_characters += job.characters
            self._arrived_characters += job.characters
            self._arrived.append(job)
            # The first request wakes a thread, which then waits a moment: later ones need not.
            if len(self._arrived) == 1 or self._arrived_characters >= self._enough:
                self._changed.notify_all()

    def _release(self, job: ScoringJob) -> None:
        with self._changed:
            self._stats.waiting -= job.size
            self._waiting_characters -= job.characters
            if job.is_cancelled:
                self._stats.cancelled += 1
                with suppress(ValueError):  # a thread has taken it already
                    self._arrived.remove(job)
                    self._arrived_characters -= job.characters

    def _check_open(self) -> None:
        if self._is_closed:
            raise BusyError("this scorer is closed", retry_after=5.0)

    def _run(self) -> None:
        while (jobs := self._wait_for_work()) is not None:
            try:
                if jobs:
                    self._prepare([job for job in jobs if not job.is_cancelled])
            except Exception as error:  # a request must not wait forever, whatever the error
                self._fail(jobs, _as_engine_error(error))
            if batch := self._next_batch():
                try:
                    scores = self._compute([unit for _, _, unit in batch])
                    done = self._finished(batch, scores)
                except Exception as error:
                    self._fail([job for job, _, _ in batch], _as_engine_error(error))
                else:
                    hand_out(done)
            with self._changed:
                self._num_busy -= 1
                self._changed.notify_all()

    def _wait_for_work(self) -> list[ScoringJob] | None:
        """Wait for requests, and a moment longer for more to fill the batch; None once closed."""
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
            # The oldest requests, about two batches of them.
            jobs: list[ScoringJob] = []
            characters = self._enough if self._backlog else 0
            while self._arrived and characters < 2 * self._enough:
                jobs.append(self._arrived.popleft())
                characters += jobs[-1].characters
                self._arrived_characters -= jobs[-1].characters
            return jobs

    def _prepare(self, jobs: Sequence[ScoringJob]) -> None:
        units = iter(units_of(self._backend, [group for job in jobs for group in job.groups]))
        with self._changed:
            for job in jobs:
                job.missing = len(job.groups)
                job.results = [()] * job.missing
                self._backlog.extend((job, index, next(units)) for index in range(job.missing))
            self._changed.notify_all()

    def _next_batch(self) -> list[_Waiting]:
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

    def _finished(
        self, batch: Sequence[_Waiting], score_of: Mapping[Key, Score]
    ) -> list[ScoringJob]:
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
        with self._changed:
            known = self._cache.known(key for unit in units for key in unit.keys)
        trees = planned(units, known)
        if not trees:
            return known
        started = time.monotonic()
        found = dict(self._computed(trees))
        # Until one score succeeds, nothing shows whether the model or its input is at fault.
        self._is_broken = self._failures_in_a_row >= _FAILURES_TO_DOUBT
        with self._changed:
            self._cache.put(found)
            self._stats.busy_seconds += time.monotonic() - started
            self._stats.computed += len(found)
            self._stats.computed_tokens += sum(tree.tokens.num_tokens for tree in trees)
            self._stats.batches += 1
        return known | found

    def _computed(self, trees: Sequence[KeyedTree]) -> list[tuple[Key, Score]]:
        """Compute trees; a conversation that makes the model fail is found by halving and fails
        alone.

        Raises:
            EngineError: The model also fails at a conversation that it could score before.
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
        """Return the scores of trees, or the error that the model raised."""
        try:
            scores = self._backend.score_tokens([tree.tokens for tree in trees])
            found = [
                (key, score)
                for tree, scores_G in zip(trees, scores, strict=True)
                for key, score in zip(tree.keys, scores_G, strict=True)
            ]
        except EngineError:  # the model says that it is broken: no input is at fault
            self._is_broken = True
            raise
        except Exception as error:
            if is_lost_worker(error):  # no replica is left that could compute
                raise
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= _FAILURES_TO_DOUBT:
                is_scored = self._known.is_scored_by(self._backend)
                if is_scored is False:
                    self._is_broken = True
                    raise EngineError(
                        f"the model fails, also on a conversation that it scored before: {error}"
                    ) from error
                if is_scored:
                    self._failures_in_a_row = 0
            return error
        self._failures_in_a_row = 0
        self._known.note([tree.tokens for tree in trees], scores)
        return found

    def _fail(self, jobs: Sequence[ScoringJob], error: Exception) -> None:
        lost = set(jobs)
        with self._changed:
            self._backlog = deque(entry for entry in self._backlog if entry[0] not in lost)
        for job in lost:
            job.error = error
        hand_out(lost)


def _as_engine_error(error: Exception) -> Exception:
    # No request is at fault, so callers get the same error for all of them.
    if isinstance(error, EngineError) or is_lost_worker(error):
        return error
    _log.error("the batcher failed", exc_info=error)
    return EngineError(f"the batcher failed: {error}")
