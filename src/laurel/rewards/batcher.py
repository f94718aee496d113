"""Requests of many clients, merged into batches of a model that one thread computes.

While a batch is computed the requests that come in wait, and the next batch takes what fits its
token budget of them, oldest first; an idle model waits a moment for company. What is equal is
computed once, and what begins alike shares its beginning, whoever asked for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from laurel.errors import BusyError, EngineError, is_lost_worker
from laurel.rewards.batch_jobs import Backend, BatcherLimits, BatcherStats, Job, hand_out
from laurel.rewards.merging import KeyedTree, Unit, halves, planned, units_of
from laurel.rewards.score_cache import Key, ScoreCache
from laurel.types import Group, Score, TokenGroup

_log = logging.getLogger(__name__)

_FAILURES_TO_DOUBT = 16
"""After so many computations that fail in a row the model is asked what it could score before: only
if it fails at that, too, it is the model's fault and not its input's."""
_CHARACTERS_PER_TOKEN = 3
"""Of a rough guess, before anything is tokenised."""

_Command = tuple[Callable[[], None], "Future[None]"]
_Waiting = tuple[Job, int, Unit]
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
        self._arrived: deque[Job] = deque()
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
        job = Job.of(groups, arrived=time.monotonic())
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

    def _submit(self, job: Job) -> None:
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

    def _wait_for_work(self) -> tuple[list[Job], list[_Command], bool]:
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

    def _taken(self) -> list[Job]:
        """The oldest requests, about two batches of them; all where this is closed."""
        if self._is_asleep and not self._is_closed:
            return []
        jobs: list[Job] = []
        characters = self._enough if self._backlog else 0
        while self._arrived and (self._is_closed or characters < 2 * self._enough):
            jobs.append(self._arrived.popleft())
            characters += jobs[-1].characters
            self._arrived_characters -= jobs[-1].characters
        return jobs

    def _prepare(self, jobs: Sequence[Job]) -> None:
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

    def _finished(self, batch: Sequence[_Waiting]) -> list[Job]:
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
        parts = halves(trees)
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

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
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
