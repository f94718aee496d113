"""One scorer over several replicas, of which any may die, lie, hang or be slow.

Every completion gets exactly one verdict: that of the first whole and valid reply to a request it
was in. Scoring changes nothing, so a request may be sent twice; of two replies one is dropped.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from laurel.errors import WorkerError
from laurel.rewards.remote.first_reply import first_good, succeeded
from laurel.rewards.remote.replica import RefusedError, Replica, ReplicaFault, Reply, failed
from laurel.rewards.remote.replica_health import Clock, Standing, patience
from laurel.rewards.remote.reply_checks import ReplyChecks
from laurel.rewards.remote.requests import Job, divide, halves, spread
from laurel.rewards.remote.router_options import RouterOptions
from laurel.types import Group, Score

LOOKING = 0.25
"""Seconds between looks whether enough answers are known to call one slow."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Bounds in seconds of the random pause before another try; the bound doubles each time."""
ALIVE_PAUSE = 0.2
"""The longest after a wrong answer: who gives one is neither dead nor overloaded."""
_PROBE_SECONDS = 10.0
"""Limit of a probe that only looks whether a replica lives."""


class Router:
    """A `Scorer` over replicas of one model.

    Each try goes to the replica with the fewest outstanding tokens that is trusted, and the next
    one to another. All calls come from one event loop.
    """

    def __init__(
        self,
        replicas: Iterable[Replica],
        options: RouterOptions | None = None,
        *,
        clock: Clock = time.monotonic,
        seed: int = 0,
    ) -> None:
        """Take over replicas; `aclose` ends them.

        Args:
            replicas: At least one when the first score is asked for.
            options: See there.
            clock: Seconds; never one that is set by hand or from outside.
            seed: Of the pauses.
        """
        self.options = options or RouterOptions()
        self.counts: Counter[str] = Counter()
        """`requests`, `attempts`, `hedges`, `splits`, and `fault_<kind>` of each kind."""
        self._checks = ReplyChecks(version=self.options.version, canary=self.options.canary)
        self._clock = clock
        self._random = random.Random(seed)
        self._standings: dict[str, Standing] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._probes: set[asyncio.Task[None]] = set()
        self._gate_of: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._places = 0
        self._last_success = -float("inf")
        self._lost: WorkerError | None = None
        for replica in replicas:
            self.add(replica)

    # ------------------------------------------------------------------------------ replicas

    def add(self, replica: Replica) -> None:
        """Use one more replica, once a probe of it has succeeded.

        Raises:
            ValueError: There is one of that name.
        """
        if replica.name in self._standings:
            raise ValueError(f"there is a replica called {replica.name} already")
        self._standings[replica.name] = Standing(
            replica,
            window=self.options.window,
            has_canary=self.options.canary is not None,
            clock=self._clock,
        )
        self._open_gate()
        self._wake_waiting()

    def came_back(self, name: str) -> None:
        """A replica that had died is there again: probe it at once. Any thread."""
        loop = None if self._gate_of is None else self._gate_of[0]
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            if loop is not None:
                loop.call_soon_threadsafe(self._came_back, name)

    def _came_back(self, name: str) -> None:
        standing = self._standings.get(name)
        if standing is not None:
            standing.came_back()
            self._begin_probes()

    @property
    def version(self) -> str:
        """Of the model whose scores are believed; empty before the first answer that has one."""
        return self._checks.version

    @property
    def standings(self) -> Mapping[str, Standing]:
        """What is known of each replica."""
        return self._standings

    async def aclose(self) -> None:
        """End the replicas. Idempotent."""
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        standings, self._standings = self._standings, {}
        for standing in standings.values():
            await standing.replica.aclose()

    # --------------------------------------------------------------------------------- scoring

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """See `protocols.Scorer`. Failures begin with one of `replica.REASONS`.

        Completions of a group that say the same are asked once.

        Raises:
            WorkerError: Who renders for all replicas is lost.
        """
        distinct = [
            replace(group, completions_G=tuple(dict.fromkeys(group.completions_G)))
            for group in groups
        ]
        verdicts: list[list[Score | None]] = [[None] * len(g.completions_G) for g in distinct]
        limits = (s.replica.max_completions for s in self._standings.values())
        most = min([self.options.completions_per_request, *(m for m in limits if m is not None)])
        deadline = self._clock() + self.options.timeout
        jobs = divide(distinct, most, deadline=deadline, began=self._clock())
        self.counts["requests"] += len(jobs)
        try:
            async with asyncio.TaskGroup() as tasks:
                for job in jobs:
                    tasks.create_task(self._settle_in_turn(job, verdicts))
        except BaseExceptionGroup as group:
            if (lost := _worker_error_in(group)) is not None:
                raise lost from lost.__cause__
            raise
        return [
            spread(group, one.completions_G, row)
            for group, one, row in zip(groups, distinct, verdicts, strict=True)
        ]

    async def _settle_in_turn(self, job: Job, verdicts: list[list[Score | None]]) -> None:
        """No more at a time than replicas can take, or waking all who wait would take for ever."""
        async with self._gate():
            await self._settle(job, verdicts)

    def _gate(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._gate_of is None or self._gate_of[0] is not loop:
            self._gate_of, self._places = (loop, asyncio.Semaphore(0)), 0
            self._open_gate()
        return self._gate_of[1]

    def _open_gate(self) -> None:
        """As wide as the replicas need."""
        wanted = self.options.window * (len(self._standings) + 1)
        while self._gate_of is not None and self._places < wanted:
            self._gate_of[1].release()
            self._places += 1

    async def _settle(self, job: Job, verdicts: list[list[Score | None]]) -> None:
        """Ask until there is a verdict on every completion of a request."""
        while True:
            try:
                reply = await self._ask(job)
            except RefusedError as refusal:
                if not (refusal.may_be_one_item and job.num_completions > 1):
                    return job.put(verdicts, failed(str(refusal)))
                return await self._settle_parts(job, verdicts)
            except _NobodyError as nobody:
                return job.put(verdicts, failed(job.reason or str(nobody)))
            except ReplicaFault as fault:
                job.blame(fault)
                if job.is_suspect(self._last_success):
                    if job.num_completions == 1:
                        return job.put(verdicts, failed(job.verdict_of_suspect))
                    return await self._settle_parts(job, verdicts)
                await self._pause(job)
            else:
                return job.put_all(verdicts, reply.scores)

    async def _settle_parts(self, job: Job, verdicts: list[list[Score | None]]) -> None:
        """Half by half, to find the one that spoils the rest."""
        self.counts["splits"] += 1
        async with asyncio.TaskGroup() as tasks:
            for half in halves(job, began=self._clock()):
                tasks.create_task(self._settle(half, verdicts))

    async def _pause(self, job: Job) -> None:
        self._begin_probes()  # who comes back meanwhile is the better one to ask
        longest = ALIVE_PAUSE if job.got_an_answer else LONGEST_PAUSE
        bound = min(longest, FIRST_PAUSE * 2 ** min(job.tries, 16))
        elsewhere = any(
            standing.is_usable and name not in job.avoided
            for name, standing in self._standings.items()
        )
        left = max(0.0, job.deadline - self._clock())
        await asyncio.sleep(0 if elsewhere else min(left, self._random.uniform(0, bound)))

    # ------------------------------------------------------------------------------- one try

    async def _ask(self, job: Job) -> Reply:
        standing = await self._take(job)
        began = self._clock()
        first = self._begin(standing, job)
        running = [first]
        try:
            if self.options.hedge:
                await self._until_slow(first, began)
                if (other := await self._another(job, standing, first)) is not None:
                    self.counts["hedges"] += 1
                    running.append(self._begin(other, job))
            return await first_good(running)
        finally:
            if not first.done() and succeeded(running[-1]):
                message = f"{standing.replica.name} is far slower than others"
                standing.failed(ReplicaFault("timeout", message), began=began)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _until_slow(self, attempt: asyncio.Task[Reply], began: float) -> None:
        """Wait until an attempt has ended, or is slow, as soon as enough is known to tell."""
        while (seconds := patience(self._standings.values())) is None and not attempt.done():
            await asyncio.wait((attempt,), timeout=LOOKING)
        if seconds is not None and not attempt.done():
            await asyncio.wait((attempt,), timeout=max(0.0, began + seconds - self._clock()))

    async def _another(
        self, job: Job, first: Standing, attempt: asyncio.Task[Reply]
    ) -> Standing | None:
        """A second replica, as soon as there is one; None where the first has answered by then."""
        while not attempt.done():
            if (other := self._best(job, besides=first)) is not None:
                return other
            await self._news(attempt, timeout=1.0)
        return None

    def _begin(self, standing: Standing, job: Job) -> asyncio.Task[Reply]:
        ending = standing.begin(job.tokens, is_dangerous=job.is_dangerous)
        task = asyncio.create_task(self._attempt(standing, job))
        task.add_done_callback(partial(self._end, ending))
        return task

    def _end(self, ending: Callable[[], None], _: asyncio.Task[Reply]) -> None:
        ending()  # in a callback: a task that is cancelled early runs nothing else
        self._wake_waiting()

    async def _attempt(self, standing: Standing, job: Job) -> Reply:
        """One try at one replica."""
        began = self._clock()
        limit = max(0.001, min(self.options.attempt_timeout, job.deadline - began))
        self.counts["attempts"] += 1
        try:
            reply = await self._checks.ask(
                standing.replica, [job.group], request_id=job.request_id, limit=limit
            )
        except ReplicaFault as fault:
            self.counts[f"fault_{fault.kind}"] += 1
            job.failed_at(standing.replica.name, fault)
            if not job.is_to_blame_for(fault) and self._was_fair(fault, limit):
                standing.failed(fault, began=began)
            raise
        except RefusedError:
            standing.succeeded(self._clock() - began)
            raise
        else:
            standing.succeeded(self._clock() - began)
            self._last_success = self._clock()
            return reply

    def _was_fair(self, fault: ReplicaFault, limit: float) -> bool:
        """Whether the replica is to blame, and not a deadline that left it hardly any time."""
        enough = min(self.options.attempt_timeout, self.options.timeout) / 2
        return fault.kind != "timeout" or limit >= enough

    # ------------------------------------------------------------------------------- choosing

    async def _take(self, job: Job) -> Standing:
        """A replica for the next try.

        Raises:
            _NobodyError: None could be had in time.
        """
        while True:
            now = self._clock()
            if self._lost is not None:
                raise self._lost
            if now >= job.deadline or self._all_refuse(job):
                raise _NobodyError(self._why_nobody())
            self._begin_probes()
            joins = [s.joins_until for s in self._standings.values()]
            ends = [until for until in joins if until is not None]
            if not ends and (best := self._best(job)) is not None:
                return best
            ends += [s.rests_until for s in self._standings.values() if s.rests_until > now]
            await self._news(timeout=max(0.001, min([job.deadline, *ends]) - now))

    def _best(self, job: Job, *, besides: Standing | None = None) -> Standing | None:
        usable = [
            standing
            for name, standing in self._standings.items()
            if standing.is_usable and standing is not besides and name not in job.refused_by
        ]
        others = [s for s in usable if s.replica.name not in job.avoided]
        with_room = [s for s in others or usable if s.has_room]
        if job.is_dangerous:
            with_room = [s for s in with_room if not s.has_dangerous]
        # Of equals the one with the fewest answers so far, or the first would get everything.
        return min(with_room, key=lambda s: (s.tokens, len(s.seconds)), default=None)

    def _all_refuse(self, job: Job) -> bool:
        """Whether there are replicas, and none of them will ever want what is asked."""
        return bool(self._standings) and all(
            standing.refuses_us or name in job.refused_by
            for name, standing in self._standings.items()
        )

    def _why_nobody(self) -> str:
        faults = [standing.last_fault for standing in self._standings.values()]
        kinds = {fault.partition(":")[0] for fault in faults if fault}
        kind = kinds.pop() if len(kinds) == 1 else "timeout"
        found = "; ".join(filter(None, faults)) or "all were busy" if faults else "there is none"
        return f"{kind}: no replica could be asked ({found})"

    async def _news(self, *attempts: asyncio.Task[Reply], timeout: float) -> None:
        """Wait until a replica is free or changes its mind, an attempt ends, or for so long."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            either: list[asyncio.Future[Any]] = [future, *attempts]
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            future.cancel()

    def _wake_waiting(self) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)

    # -------------------------------------------------------------------------------- probing

    def _begin_probes(self) -> None:
        for standing in self._standings.values():
            is_old = standing.probed_at + self.options.probe_seconds <= self._clock()
            again = self.options.canary is not None and is_old and standing.is_usable
            if standing.wants_probe or (again and standing.probing_since is None):
                standing.probing_since = self._clock()
                task = asyncio.create_task(self._probe(standing))
                self._probes.add(task)
                task.add_done_callback(self._probes.discard)

    async def _probe(self, standing: Standing) -> None:
        limit = self.options.attempt_timeout
        if self.options.canary is None:
            limit = min(_PROBE_SECONDS, limit)
        began = self._clock()
        try:
            await self._checks.prove(standing.replica, limit=limit)
        except ReplicaFault as fault:
            self.counts[f"fault_{fault.kind}"] += 1
            standing.failed_probe(fault, began=began)
        except WorkerError as error:
            self._lost = error
        else:
            standing.proved()
        finally:
            standing.probing_since = None
            self._wake_waiting()


class _NobodyError(Exception):
    """No replica could be had in time; the message is a failure."""


def _worker_error_in(group: BaseExceptionGroup[BaseException]) -> WorkerError | None:
    """The one that ended a group of tasks, where one did."""
    for error in group.exceptions:
        found = _worker_error_in(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, WorkerError):
            return found
    return None
