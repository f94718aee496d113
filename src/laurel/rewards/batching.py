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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from laurel.errors import BusyError, DataError, EngineError, is_lost_worker
from laurel.rewards.preparing import Prepared, Rendered, filter_readable, rendered_rows
from laurel.types import Group, Message, Score, SentTurn, TokenGroup

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
        """Hold so many scores after each `trim`."""
        self._max_entries = max_entries
        self._scores: OrderedDict[Key, Score] = OrderedDict()
        self._failures: dict[Key, Score] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._scores or key in self._failures

    def __len__(self) -> int:
        return len(self._scores) + len(self._failures)

    def get(self, key: Key) -> Score:
        """A score that is there; it is now the one wanted last."""
        if key in self._failures:
            return self._failures[key]
        self._scores.move_to_end(key)
        return self._scores[key]

    def put(self, key: Key, score: Score) -> None:
        """Remember a score."""
        (self._scores if score.failure is None else self._failures)[key] = score

    def trim(self) -> None:
        """Forget failures, which may not come again, and then the scores wanted longest ago."""
        self._failures.clear()
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

    def verdicts(self, cache: ScoreCache) -> tuple[Score, ...]:
        """The scores of all completions, once the cache has them."""
        known = iter(self.keys)
        return tuple(
            cache.get(next(known)) if failure is None else Score(value=None, failure=failure)
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


def planned(units: Iterable[Unit], cache: ScoreCache) -> list[KeyedTree]:
    """What has to be computed for units: nothing that the cache knows, and nothing twice.

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
            if key not in seen and key not in cache:
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


class Backend(Encoder, Protocol):
    """A model whose calls block. Only one thread calls it, one call at a time."""

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        """A score for each branch, in order."""

    def sleep(self) -> None:
        """Give the memory of devices back."""

    def wake(self) -> None:
        """Be as before `sleep`."""

    def close(self) -> None:
        """Free everything. Idempotent."""


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
    """One request. It is done when each of its groups is. Its future is touched by its loop only,
    everything else by one thread at a time."""

    groups: Sequence[Group]
    size: int
    characters: int
    arrived: float
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[tuple[Score, ...]]]
    is_cancelled: bool = False
    error: Exception | None = None
    results: list[tuple[Score, ...]] = field(default_factory=list)
    missing: int = 0

    @classmethod
    def of(cls, groups: Sequence[Group], *, arrived: float) -> ScoringJob:
        """A request of the running event loop."""
        loop = asyncio.get_running_loop()
        size = sum(len(group.completions_G) for group in groups)
        characters = sum(map(_characters, groups))
        return cls(groups, size, characters, arrived, loop, loop.create_future())

    def settle(self) -> None:
        """Give the answer to whoever waits. In the job's own loop."""
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

_Command = tuple[Callable[[], None], "Future[None]"]
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
    ) -> None:
        """Start the thread that computes; `close` ends it and the backend.

        Args:
            backend: What computes. Nobody else may call it.
            model_version: Of its weights. What is remembered belongs to them.
            limits: See there.
            is_asleep: The backend has given its memory back: requests wait for `wake`.
        """
        self.model_version = model_version
        self._backend = backend
        self._limits = limits or BatcherLimits()
        self._cache = ScoreCache(self._limits.cache_entries)
        self._changed = threading.Condition()
        self._arrived: deque[ScoringJob] = deque()
        self._commands: deque[_Command] = deque()
        self._backlog: deque[_Waiting] = deque()  # only the thread touches it
        self._stats = BatcherStats()
        self._arrived_characters = 0
        self._waiting_characters = 0
        self._enough = self._limits.batch_tokens * _CHARACTERS_PER_TOKEN
        self._is_asleep = is_asleep
        self._is_closed = False
        self._is_broken = False
        self._failures_in_a_row = 0
        self._known: TokenGroup | None = None
        """A conversation that the model could score."""
        self._thread = threading.Thread(target=self._run, name="laurel-batcher", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------------- callers

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """See `protocols.Scorer`. A group may be one of `rendered.rendered_group`.

        Raises:
            BusyError: The queue is full, or this is closed.
            EngineError: The model computes nothing any more.
            WorkerError: Who renders for the model is lost.
        """
        if not groups:
            return []
        job = ScoringJob.of(groups, arrived=time.monotonic())
        self._submit(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            job.is_cancelled = True
            raise
        finally:
            with self._changed:
                self._stats.waiting -= job.size
                self._waiting_characters -= job.characters
                if job.is_cancelled:
                    self._stats.cancelled += 1
                    with suppress(ValueError):  # the thread has it
                        self._arrived.remove(job)
                        self._arrived_characters -= job.characters

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

        def sleep() -> None:
            if not self._is_asleep:
                self._backend.sleep()
                self._is_asleep = True

        await asyncio.wrap_future(self._command(sleep))

    async def wake(self) -> None:
        """Compute again."""

        def wake() -> None:
            if self._is_asleep:
                self._backend.wake()
                self._is_asleep = False

        await asyncio.wrap_future(self._command(wake))

    def close(self) -> None:
        """End it all after the batch under way; what still waits fails. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        self._backend.close()

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
            # The thread waits for the first, and then a moment: the others need not wake it.
            if len(self._arrived) == 1 or self._arrived_characters >= self._enough:
                self._changed.notify()

    def _command(self, command: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        with self._changed:
            self._check_open()
            self._commands.append((command, done))
            self._changed.notify()
        return done

    def _check_open(self) -> None:
        if self._is_closed:
            raise BusyError("this scorer is closed", retry_after=5.0)

    def _seconds_for(self, completions: int) -> float:
        stats = self._stats
        rate = stats.computed / stats.busy_seconds if stats.busy_seconds > 0 else 1000.0
        return min(60.0, max(0.05, completions / max(rate, 1e-3)))

    # ------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            jobs, commands, is_closed = self._wait_for_work()
            for command, done in commands:
                _settle(done, command)
            if is_closed:
                waiting = [*jobs, *(job for job, _, _ in self._backlog)]
                self._fail(waiting, BusyError("this scorer was closed meanwhile", retry_after=5.0))
                return
            try:
                self._prepare([job for job in jobs if not job.is_cancelled])
            except Exception as error:  # whatever it is, nobody may wait for ever
                self._fail(jobs, _as_told(error))
            if self._backlog and not self._is_asleep:
                self._one_batch()

    def _wait_for_work(self) -> tuple[list[ScoringJob], list[_Command], bool]:
        """What came in; waits where there is nothing to do, and a moment for company."""
        with self._changed:
            while not (self._is_closed or self._commands):
                if self._backlog and not self._is_asleep:
                    break
                if not self._arrived or self._is_asleep:
                    self._changed.wait()
                    continue
                left = self._arrived[0].arrived + self._limits.max_delay - time.monotonic()
                if left <= 0 or self._arrived_characters >= self._enough:
                    break
                self._changed.wait(left)
            jobs, commands = self._taken(), list(self._commands)
            self._commands.clear()
            return jobs, commands, self._is_closed

    def _taken(self) -> list[ScoringJob]:
        """The oldest requests, about two batches of them; all where this is closed."""
        if self._is_asleep and not self._is_closed:
            return []
        jobs: list[ScoringJob] = []
        characters = self._enough if self._backlog else 0
        while self._arrived and (self._is_closed or characters < 2 * self._enough):
            jobs.append(self._arrived.popleft())
            characters += jobs[-1].characters
            self._arrived_characters -= jobs[-1].characters
        return jobs

    def _prepare(self, jobs: Sequence[ScoringJob]) -> None:
        """Tokenise requests and put them into the backlog."""
        units = iter(units_of(self._backend, [group for job in jobs for group in job.groups]))
        for job in jobs:
            job.missing = len(job.groups)
            job.results = [()] * job.missing
            self._backlog.extend((job, index, next(units)) for index in range(job.missing))

    def _one_batch(self) -> None:
        """Compute the oldest of the backlog, as much as the budget holds, and hand it out."""
        batch: list[_Waiting] = []
        budget = self._limits.batch_tokens
        while self._backlog:
            job, _, unit = self._backlog[0]
            if job.is_cancelled:
                self._backlog.popleft()
                continue
            budget -= unit.num_tokens
            if batch and budget < 0:
                break
            batch.append(self._backlog.popleft())
        try:
            self._compute([unit for _, _, unit in batch])
            done = self._finished(batch)
        except Exception as error:
            self._fail([job for job, _, _ in batch], _as_told(error))
            return
        hand_out(done)
        self._cache.trim()

    def _finished(self, batch: Sequence[_Waiting]) -> list[ScoringJob]:
        """Put scores where they belong; the requests that have all of theirs now."""
        done = []
        failed = scored = 0
        for job, index, unit in batch:
            scores = unit.verdicts(self._cache)
            job.results[index] = scores
            job.missing -= 1
            failures = sum(score.failure is not None for score in scores)
            failed += failures
            scored += len(scores) - failures
            if not job.missing:
                done.append(job)
        with self._changed:
            self._stats.failed += failed
            self._stats.scored += scored
        return done

    def _compute(self, units: Sequence[Unit]) -> None:
        """See to it that the cache knows every score of the units."""
        trees = planned(units, self._cache)
        if not trees:
            return
        started = time.monotonic()
        scores = self._computed(trees)
        # Where nothing could be scored yet, there is nothing that would show whose fault it is.
        self._is_broken = self._failures_in_a_row >= _FAILURES_TO_DOUBT
        for key, score in scores:
            self._cache.put(key, score)
        with self._changed:
            self._stats.busy_seconds += time.monotonic() - started
            self._stats.computed += len(scores)
            self._stats.computed_tokens += sum(tree.tokens.num_tokens for tree in trees)
            self._stats.batches += 1

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
            failure = Score(value=None, failure=f"the model failed: {type(found).__name__}")
            return [(trees[0].keys[0], failure)]
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


def _settle(done: Future[None], command: Callable[[], None]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        command()
    except Exception as error:
        done.set_exception(error)
    else:
        done.set_result(None)
