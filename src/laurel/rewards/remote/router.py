"""One scorer over several replicas, any of which may die, lie, hang or be slow.

Every completion gets exactly one score: that of the first complete and valid reply to a request it
was in. Scoring has no side effects, so a request may be sent twice; one of two replies is dropped.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from laurel.errors import WorkerError, is_lost_worker
from laurel.rewards.remote.replica import (
    Clock,
    RefusedError,
    Replica,
    ReplicaFault,
    ReplicaHealth,
    ReplicaReply,
    check_scores,
    failed,
    patience,
)
from laurel.types import Completion, Group, Message, Score, group_of

POLL_SECONDS = 0.25
"""Time between checks whether enough answers are known to call one slow."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Bounds in seconds of the random pause before another attempt; the bound doubles each time."""
ALIVE_PAUSE = 0.2
"""Bound of the pause after a wrong answer: its replica is neither dead nor overloaded."""
_PROBE_SECONDS = 10.0  # limit of a probe that only asks whether a replica is alive


class Router:
    """Scores with the replicas of one model.

    Each attempt goes to the trusted replica with the fewest outstanding tokens, and the next one to
    another replica. All calls come from one event loop.
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
            replicas: Replicas, at least one when the first score is asked for.
            clock: Returns monotonic seconds.
        """
        self.options = options or RouterOptions()
        self.counts: Counter[str] = Counter()
        """Counts `requests`, `attempts`, `hedges`, `splits`, and `fault_<kind>` of each kind."""
        self._checks = ReplyChecks(version=self.options.version, canary=self.options.canary)
        self._clock = clock
        self._random = random.Random(seed)
        self.replica_health: dict[str, ReplicaHealth] = {}
        """Health record of each replica, by name."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._probes: set[asyncio.Task[None]] = set()
        self._gate_of: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._places = 0
        self._last_success = -float("inf")
        self._lost: WorkerError | None = None
        for replica in replicas:
            self.add(replica)

    def add(self, replica: Replica) -> None:
        """Use one more replica, once a probe of it has succeeded.

        Raises:
            ValueError: There is already a replica of that name.
        """
        if replica.name in self.replica_health:
            raise ValueError(f"there is a replica called {replica.name} already")
        self.replica_health[replica.name] = ReplicaHealth(
            replica,
            window=self.options.window,
            has_canary=self.options.canary is not None,
            clock=self._clock,
        )
        self._open_gate()
        self._wake_waiting()

    @property
    def version(self) -> str:
        """Version of the accepted model; empty before the first answer that has one."""
        return self._checks.version

    def expect(self, version: str) -> None:
        """Accept no other version from here on, as if the first answer had this one."""
        self._checks.version = self._checks.version or version

    async def aclose(self) -> None:
        """Close the replicas. Idempotent."""
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        replica_health, self.replica_health = self.replica_health, {}
        for health in replica_health.values():
            await health.replica.aclose()

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """Score groups; failures begin with one of `replica.REASONS`.

        Equal completions of a group are sent once.

        Raises:
            WorkerError: The tokenizer workers for all replicas are lost.
        """
        distinct = [
            replace(group, completions_G=tuple(dict.fromkeys(group.completions_G)))
            for group in groups
        ]
        verdicts: list[list[Score | None]] = [[None] * len(g.completions_G) for g in distinct]
        limits = (s.replica.max_completions for s in self.replica_health.values())
        most = min([self.options.completions_per_request, *(m for m in limits if m is not None)])
        deadline = self._clock() + self.options.timeout
        jobs = divide_into_jobs(distinct, most, deadline=deadline, began=self._clock())
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
            scatter_scores(group, one.completions_G, row)
            for group, one, row in zip(groups, distinct, verdicts, strict=True)
        ]

    async def _settle_in_turn(self, job: RouterJob, verdicts: list[list[Score | None]]) -> None:
        # Requests under way are limited to what replicas can take: waking every waiter is O(n^2).
        async with self._gate():
            await self._settle(job, verdicts)

    def _gate(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._gate_of is None or self._gate_of[0] is not loop:
            self._gate_of, self._places = (loop, asyncio.Semaphore(0)), 0
            self._open_gate()
        return self._gate_of[1]

    def _open_gate(self) -> None:
        wanted = self.options.window * (len(self.replica_health) + 1)
        while self._gate_of is not None and self._places < wanted:
            self._gate_of[1].release()
            self._places += 1

    async def _settle(self, job: RouterJob, verdicts: list[list[Score | None]]) -> None:
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

    async def _settle_parts(self, job: RouterJob, verdicts: list[list[Score | None]]) -> None:
        # Halves find the completion that spoils the others in few requests.
        self.counts["splits"] += 1
        async with asyncio.TaskGroup() as tasks:
            for half in halve_job(job, began=self._clock()):
                tasks.create_task(self._settle(half, verdicts))

    async def _pause(self, job: RouterJob) -> None:
        self._begin_probes()  # a replica that recovers is the better choice
        longest = ALIVE_PAUSE if job.got_an_answer else LONGEST_PAUSE
        bound = min(longest, FIRST_PAUSE * 2 ** min(job.tries, 16))
        elsewhere = any(
            health.is_usable and name not in job.avoided
            for name, health in self.replica_health.items()
        )
        left = max(0.0, job.deadline - self._clock())
        await asyncio.sleep(0 if elsewhere else min(left, self._random.uniform(0, bound)))

    async def _ask(self, job: RouterJob) -> ReplicaReply:
        health = await self._take(job)
        began = self._clock()
        first = self._begin(health, job)
        running = [first]
        try:
            if self.options.hedge:
                # A request that was sent before anything was known of answers is hedged as soon as
                # something is.
                while (
                    seconds := patience(self.replica_health.values())
                ) is None and not first.done():
                    await asyncio.wait((first,), timeout=POLL_SECONDS)
                if seconds is not None and not first.done():
                    await asyncio.wait((first,), timeout=max(0.0, began + seconds - self._clock()))
                if (other := await self._another(job, health, first)) is not None:
                    self.counts["hedges"] += 1
                    running.append(self._begin(other, job))
            return await first_good(running)
        finally:
            if not first.done() and succeeded(running[-1]):
                message = f"{health.replica.name} is far slower than others"
                health.failed(ReplicaFault("timeout", message), began=began)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _another(
        self, job: RouterJob, first: ReplicaHealth, attempt: asyncio.Task[ReplicaReply]
    ) -> ReplicaHealth | None:
        """Wait for a second free replica; None if the attempt ends first."""
        while not attempt.done():
            if (other := self._best(job, besides=first)) is not None:
                return other
            await self._wait_for_change(attempt, timeout=1.0)
        return None

    def _begin(self, health: ReplicaHealth, job: RouterJob) -> asyncio.Task[ReplicaReply]:
        ending = health.begin(job.tokens, is_dangerous=job.is_dangerous)
        task = asyncio.create_task(self._attempt(health, job))

        def end(_: asyncio.Task[ReplicaReply]) -> None:
            ending()  # in a callback: a task that is cancelled early runs nothing else
            self._wake_waiting()

        task.add_done_callback(end)
        return task

    async def _attempt(self, health: ReplicaHealth, job: RouterJob) -> ReplicaReply:
        began = self._clock()
        limit = max(0.001, min(self.options.attempt_timeout, job.deadline - began))
        self.counts["attempts"] += 1
        try:
            reply = await self._checks.ask(
                health.replica, [job.group], request_id=job.request_id, limit=limit
            )
        except ReplicaFault as fault:
            self.counts[f"fault_{fault.kind}"] += 1
            job.failed_at(health.replica.name, fault)
            # A deadline that leaves hardly any time is not the replica's fault.
            enough = min(self.options.attempt_timeout, self.options.timeout) / 2
            was_fair = fault.kind != "timeout" or limit >= enough
            if not job.is_to_blame_for(fault) and was_fair:
                health.failed(fault, began=began)
            raise
        # The replica has answered: the request is at fault.
        except RefusedError:
            health.succeeded(self._clock() - began)
            raise
        else:
            health.succeeded(self._clock() - began)
            self._last_success = self._clock()
            return reply

    async def _take(self, job: RouterJob) -> ReplicaHealth:
        """Wait for a replica for the next attempt.

        Raises:
            _NobodyError: There was none in time.
        """
        while True:
            now = self._clock()
            if self._lost is not None:
                raise self._lost
            if now >= job.deadline or self._all_refuse(job):
                faults = [health.last_fault for health in self.replica_health.values()]
                kinds = {fault.partition(":")[0] for fault in faults if fault}
                kind = kinds.pop() if len(kinds) == 1 else "timeout"
                found = (
                    "; ".join(filter(None, faults)) or "all were busy"
                    if faults
                    else "there is none"
                )
                raise _NobodyError(f"{kind}: no replica could be asked ({found})")
            self._begin_probes()
            joins = [s.joins_until for s in self.replica_health.values()]
            ends = [until for until in joins if until is not None]
            if not ends and (best := self._best(job)) is not None:
                return best
            ends += [s.rests_until for s in self.replica_health.values() if s.rests_until > now]
            await self._wait_for_change(timeout=max(0.001, min([job.deadline, *ends]) - now))

    def _best(
        self, job: RouterJob, *, besides: ReplicaHealth | None = None
    ) -> ReplicaHealth | None:
        usable = [
            health
            for name, health in self.replica_health.items()
            if health.is_usable and health is not besides and name not in job.refused_by
        ]
        others = [s for s in usable if s.replica.name not in job.avoided]
        # Replicas that the request failed at are asked again only where there is no other.
        with_room = [s for s in others or usable if s.has_room]
        if job.is_dangerous:
            with_room = [s for s in with_room if not s.has_dangerous]
        # Of equals the one with the fewest answers so far, or the first would get everything.
        return min(with_room, key=lambda s: (s.tokens, len(s.seconds)), default=None)

    def _all_refuse(self, job: RouterJob) -> bool:
        return bool(self.replica_health) and all(
            health.refuses_us or name in job.refused_by
            for name, health in self.replica_health.items()
        )

    async def _wait_for_change(self, *attempts: asyncio.Task[ReplicaReply], timeout: float) -> None:
        """Wait until a replica's state changes, an attempt ends, or the time is over."""
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

    def _begin_probes(self) -> None:
        for health in self.replica_health.values():
            is_old = health.probed_at + self.options.probe_seconds <= self._clock()
            again = self.options.canary is not None and is_old and health.is_usable
            if health.wants_probe or (again and health.probing_since is None):
                health.probing_since = self._clock()
                task = asyncio.create_task(self._probe(health))
                self._probes.add(task)
                task.add_done_callback(self._probes.discard)

    async def _probe(self, health: ReplicaHealth) -> None:
        limit = self.options.attempt_timeout
        if self.options.canary is None:
            limit = min(_PROBE_SECONDS, limit)
        began = self._clock()
        try:
            await self._checks.prove(health.replica, limit=limit)
        except ReplicaFault as fault:
            self.counts[f"fault_{fault.kind}"] += 1
            health.failed_probe(fault, began=began)
        except WorkerError as error:
            self._lost = error
        else:
            health.proved()
        finally:
            health.probing_since = None
            self._wake_waiting()


class _NobodyError(Exception):
    """Raised when no replica could be had in time; the message is a failure."""


def _worker_error_in(group: BaseExceptionGroup[BaseException]) -> WorkerError | None:
    for error in group.exceptions:
        found = _worker_error_in(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, WorkerError):
            return found
    return None


# Concurrent attempts at the same request.


async def first_good(running: Sequence[asyncio.Task[ReplicaReply]]) -> ReplicaReply:
    """Return the first reply, or raise the first refusal, or else the error of the last attempt.

    Raises:
        RefusedError: The request is at fault.
        ReplicaFault: All attempts failed.
    """
    pending = set(running)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        best = min(done, key=_rank)
        if not pending or _rank(best) < 2:
            return best.result()


def _rank(task: asyncio.Task[ReplicaReply]) -> int:
    if succeeded(task):
        return 0
    return 1 if isinstance(task.exception(), RefusedError) else 2


def succeeded(task: asyncio.Task[ReplicaReply]) -> bool:
    """Whether an attempt has ended with a reply."""
    return task.done() and not task.cancelled() and task.exception() is None


# Checks of a reply: complete, finite, of the right model, and in time.

T = TypeVar("T")


class ReplyChecks:
    """Asks replicas, and rejects invalid replies."""

    def __init__(self, *, version: str, canary: CanaryGroup | None) -> None:
        """Start with the expected version and scores.

        Args:
            version: Version of the model; empty: that of the first answer.
            canary: A group with known scores, if there is one.
        """
        self.version = version
        self._is_wanted = bool(version)
        self.canary = canary
        self._expected = canary.values_G if canary is not None else None

    async def ask(
        self, replica: Replica, groups: Sequence[Group], *, request_id: str, limit: float
    ) -> ReplicaReply:
        """Ask a replica for scores, and check its reply.

        Raises:
            ReplicaFault: There is no valid reply within `limit` seconds.
            RefusedError: The replica says that the request is at fault.
        """
        asked = replica.attempt(groups, request_id=request_id, timeout=limit)
        reply = await _in_time(asked, replica, limit)
        check_scores(groups, reply.scores, name=replica.name)
        if reply.version and self.version and reply.version != self.version:
            message = f"{replica.name} has {reply.version[:80]!r}, not {self.version!r}"
            raise ReplicaFault("version", message)
        # A reply without any score comes from no model, so it has no version.
        has_score = any(score.value is not None for row in reply.scores for score in row)
        if self._is_wanted and not reply.version and has_score:
            message = f"{replica.name} does not say its version, which is to be {self.version!r}"
            raise ReplicaFault("version", message)
        self.version = self.version or reply.version
        return reply

    async def prove(self, replica: Replica, *, limit: float) -> None:
        """Check that a replica is alive and, with a canary, that it gives the expected scores.

        Raises:
            ReplicaFault: It does not.
        """
        if self.canary is None:
            return await _in_time(replica.probe(timeout=limit), replica, limit)
        try:
            most = replica.max_completions or len(self.canary.group.completions_G)
            found: list[float] = []
            for _, part in parts(self.canary.group, most):
                # A new id each time: a server may answer a known one without computing.
                reply = await self.ask(replica, [part], request_id=uuid.uuid4().hex, limit=limit)
                for score in reply.scores[0]:
                    if score.value is None:
                        raise ReplicaFault(
                            "canary",
                            f"{replica.name} has no score for a known conversation: "
                            f"{score.failure}",
                        )
                    found.append(score.value)
            self._expected = self._expected or tuple(found)
            for value, expected in zip(found, self._expected, strict=True):
                if not abs(value - expected) <= self.canary.tolerance * max(1.0, abs(expected)):
                    raise ReplicaFault(
                        "canary",
                        f"{replica.name} scores a known conversation {value:.6g}, not "
                        f"{expected:.6g}: it has another model, or it is broken",
                    )
        except RefusedError as refusal:
            raise ReplicaFault(
                "canary", f"{replica.name} refused a known conversation: {refusal}"
            ) from refusal


async def _in_time(asked: Awaitable[T], replica: Replica, limit: float) -> T:
    try:
        async with asyncio.timeout(limit):
            return await asked
    except (ReplicaFault, RefusedError):
        raise
    except TimeoutError as error:
        message = f"{replica.name} did not answer in {limit:.3g} s"
        raise ReplicaFault("timeout", message) from error
    except Exception as error:  # whatever is wrong with one replica, the others go on
        if is_lost_worker(error):  # the tokenizer workers serve all replicas
            raise
        message = f"{replica.name}: {type(error).__name__}: {error}"
        raise ReplicaFault("error", message, in_mid_request=True) from error


# Groups as requests: divided, retried, halved, and put together again.

FAULTS_TO_SPLIT = 2
"""Faults after which the completions of a request are sent in halves."""
DEATHS_TO_CONDEMN = 3
"""Replicas that a completion may take down, or hang, before it counts as the cause.

A loss does not count if the replica had another suspected request at the time.
"""
ANSWERS_TO_CONDEMN = 12
"""Bad answers to a single completion after which it fails.

From a replica that fails at random, 30 times in 100, so many in a row come once in two million.
"""
_WRONG_ANSWERS = ("nan", "count", "reply")
_BAD_ANSWERS = (*_WRONG_ANSWERS, "5xx")
# Faults that say as much about a request as the loss of its replica does.
_DEATHS = ("timeout",)


@dataclass(slots=True, kw_only=True)
class RouterJob:
    """Holds a request: completions of one group, and the faults so far."""

    group: Group
    row: int
    """Index of the group in the call."""
    first: int
    """Index of its first completion in that group."""
    deadline: float
    began: float
    """Time at which it was first sent, or split off another request."""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tries: int = 0
    deaths: int = 0
    deaths_alone: int = 0
    """Deaths of which no other request is suspected."""
    losses: int = 0
    """Deaths that ended a connection, and with it all other requests of the replica."""
    bad_answers: int = 0
    errors: int = 0
    """Bad answers that were a server error."""
    is_part_of_suspect: bool = False
    is_part_of_dangerous: bool = False
    reason: str = ""
    """Reason for the latest failure."""
    avoided: frozenset[str] = frozenset()
    """Replicas that have failed with it."""
    refused_by: frozenset[str] = frozenset()
    """Replicas that refuse this client or its key; never asked again."""

    @property
    def num_completions(self) -> int:
        """Number of completions in the request."""
        return len(self.group.completions_G)

    @property
    def got_an_answer(self) -> bool:
        """Whether the latest attempt ended with a wrong answer, rather than with none."""
        return self.reason.startswith(_WRONG_ANSWERS)

    @property
    def is_dangerous(self) -> bool:
        """Whether it may be what takes replicas down, with all their requests."""
        return self.is_part_of_dangerous or self.losses >= FAULTS_TO_SPLIT

    @property
    def tokens(self) -> int:
        """Rough number of tokens: four characters each."""
        group = self.group
        messages = (*group.prompt, *(m for one in group.completions_G for m in one.messages))
        return 1 + sum(len(message.content) for message in messages) // 4

    def failed_at(self, name: str, fault: ReplicaFault) -> None:
        """Record a fault at a replica, so that the next attempt goes to another if there is one."""
        self.avoided |= {name}
        if fault.kind == "4xx":
            self.refused_by |= {name}

    def is_to_blame_for(self, fault: ReplicaFault) -> bool:
        """Whether the request may have caused a fault, as there was a bad answer to it before."""
        # Such a fault does not count against the replica, or bad items would exclude good replicas.
        return fault.kind in _BAD_ANSWERS and (self.is_part_of_suspect or self.bad_answers > 0)

    def blame(self, fault: ReplicaFault) -> None:
        """Record why an attempt failed."""
        self.tries += 1
        self.reason = str(fault)
        is_late = fault.kind in _DEATHS
        self.deaths += fault.in_mid_request or is_late
        self.deaths_alone += is_late or (fault.in_mid_request and self.is_dangerous)
        self.losses += fault.in_mid_request
        self.bad_answers += fault.kind in _BAD_ANSWERS
        self.errors += fault.kind == "5xx"

    def is_suspect(self, last_success: float) -> bool:
        """Whether the request is the likely cause of its faults, rather than the replicas."""
        # If no replica has scored anything since the request began, there is an outage, which says
        # nothing about the request: deaths and server errors do not count then. Wrong answers do.
        is_outage = last_success <= self.began
        if self.num_completions > 1:
            spoiled = self.bad_answers >= FAULTS_TO_SPLIT
            return spoiled or (self.deaths >= FAULTS_TO_SPLIT and not is_outage)
        counted = self.bad_answers - self.errors if is_outage else self.bad_answers
        return counted >= ANSWERS_TO_CONDEMN or (self._is_poison and not is_outage)

    @property
    def _is_poison(self) -> bool:
        return self.deaths_alone >= DEATHS_TO_CONDEMN

    @property
    def verdict_of_suspect(self) -> str:
        """Failure of a single completion that is given up."""
        if not self._is_poison:
            return self.reason
        return f"poison: {self.deaths} replicas were lost while they scored it ({self.reason})"

    def put(self, verdicts: list[list[Score | None]], score: Score) -> None:
        """Store the same score for every completion."""
        self.put_all(verdicts, [(score,) * self.num_completions])

    def put_all(
        self, verdicts: list[list[Score | None]], scores: Sequence[Sequence[Score]]
    ) -> None:
        """Store the scores of a reply."""
        (scores_G,) = scores
        for index, score in enumerate(scores_G, start=self.first):
            assert verdicts[self.row][index] is None, "a completion got two verdicts"
            verdicts[self.row][index] = score


def divide_into_jobs(
    groups: Sequence[Group], most: int, *, deadline: float, began: float
) -> list[RouterJob]:
    """Divide groups into requests of at most `most` completions."""
    return [
        RouterJob(group=part, row=row, first=first, deadline=deadline, began=began)
        for row, group in enumerate(groups)
        for first, part in parts(group, most)
    ]


def parts(group: Group, most: int) -> list[tuple[int, Group]]:
    """Divide a group into parts of at most `most` completions, each with the index of its first."""
    number = len(group.completions_G)
    if 0 < number <= most:
        return [(0, group)]
    return [
        (first, replace(group, completions_G=group.completions_G[first : first + most]))
        for first in range(0, number, most)
    ]


def halve_job(job: RouterJob, *, began: float) -> list[RouterJob]:
    """Split a request into two with the same deadline."""
    middle = job.num_completions // 2
    completions = job.group.completions_G
    return [
        RouterJob(
            group=replace(job.group, completions_G=part),
            row=job.row,
            first=first,
            deadline=job.deadline,
            began=began,
            avoided=job.refused_by,
            refused_by=job.refused_by,
            is_part_of_suspect=True,
            is_part_of_dangerous=job.is_dangerous,
        )
        for first, part in (
            (job.first, completions[:middle]),
            (job.first + middle, completions[middle:]),
        )
    ]


def scatter_scores(
    group: Group, distinct: Sequence[Completion], verdicts: Sequence[Score | None]
) -> tuple[Score, ...]:
    """Return the scores of all completions of a group, given those of its distinct ones."""
    given = [score for score in verdicts if score is not None]
    assert len(given) == len(distinct), "a completion was left without a verdict"
    of = dict(zip(distinct, given, strict=True))
    return tuple(of[completion] for completion in group.completions_G)


# Options of a router.

CANARY = group_of(
    (Message("user", "How many are two and two?"),), ("Four.", "Five."), group_id="canary"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryGroup:
    """Holds a group whose scores show whether a replica computes correctly."""

    group: Group = CANARY
    values_G: tuple[float, ...] | None = None
    """Expected scores; None: those that the first replica gives."""
    tolerance: float = 5e-2
    """Allowed difference, in units of max(1, |score|)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """Sets the limits and the checks of a router."""

    timeout: float = 120.0
    """Time limit in seconds of one call; completions without a score by then fail."""
    attempt_timeout: float = 30.0
    """Time limit in seconds of one attempt."""
    completions_per_request: int = 64
    """Limit of completions in one request; a larger group is sent in parts."""
    window: int = 32
    """Limit of concurrent requests to one replica."""
    hedge: bool = False
    """Whether to ask another replica as well, where an answer takes twice as long as 95 % of
    them.
    """
    canary: CanaryGroup | None = None
    """Group with known scores to probe replicas with; None: only ask whether they are alive."""
    probe_seconds: float = 5.0
    """Interval of the canary's probes while there is work, in seconds."""
    version: str = ""
    """Required version of the model; empty: that of the first answer."""
