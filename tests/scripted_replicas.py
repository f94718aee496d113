"""Replicas that do as they are told. They score as `WordScorer`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fakes import WordScorer
from laurel.errors import BusyError
from laurel.protocols import Scorer
from laurel.rewards.remote.replica import (
    RefusedError,
    ReplicaFault,
    ReplicaReply,
    check_scores,
    close_scorer,
    failure_reason,
)
from laurel.rewards.remote.router import Router, RouterOptions
from laurel.types import Group, Message, Score, group_of
from virtual_time import in_virtual_time, now

Act = Callable[[ReplicaReply], Any] | BaseException | float | str | None
"""What is done with a request: a change of the right reply, an error, seconds before the right
reply, `hang`, or what is right."""
Script = Callable[[int, Sequence[Group]], Act]
"""From the number of a request, from 0, and what it asks for."""


class ScriptedReplica:
    """Keeps count of what it was asked and of what it answered."""

    max_completions: int | None = None

    def __init__(
        self,
        name: str = "a",
        script: Script | Sequence[Act] | None = None,
        *,
        version: str = "",
        probes: Sequence[ReplicaFault | None] = (),
        **scorer: Any,
    ) -> None:
        """Acts one after the other, then what is right; likewise the outcomes of probes."""
        self.name = name
        self.script = script
        self.version = version
        self.probes = list(probes)
        self.asked: list[Sequence[Group]] = []
        self.request_ids: list[str] = []
        self.limits: list[float] = []
        self.answers: Counter[str] = Counter()
        self.num_probes = 0
        self.most_at_once = 0
        self.at_once = 0
        self.is_closed = False
        self.released = asyncio.Event()
        """Lets go of what hangs."""
        self._scorer = WordScorer(**scorer)

    async def attempt(
        self, groups: Sequence[Group], *, request_id: str, timeout: float
    ) -> ReplicaReply:
        number = len(self.asked)
        self.asked.append(groups)
        self.request_ids.append(request_id)
        self.limits.append(timeout)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._act(self._told(number, groups), groups)
        finally:
            self.at_once -= 1

    def _told(self, number: int, groups: Sequence[Group]) -> Act:
        if callable(self.script):
            return self.script(number, groups)
        acts = self.script or ()
        return acts[number] if number < len(acts) else None

    async def _act(self, act: Act, groups: Sequence[Group]) -> ReplicaReply:
        await asyncio.sleep(act if isinstance(act, float) else 0)
        if isinstance(act, BaseException):
            raise act
        if act == "hang":
            await self.released.wait()
        reply = ReplicaReply(scores=await self._scorer.score(groups), version=self.version)
        if callable(act):
            reply = act(reply)
        self.answers.update(one.messages[-1].content for g in groups for one in g.completions_G)
        return reply

    async def probe(self, *, timeout: float) -> None:
        self.num_probes += 1
        await asyncio.sleep(0)
        if self.probes and (fault := self.probes.pop(0)) is not None:
            raise fault

    async def aclose(self) -> None:
        self.is_closed = True


def question(prompt: str, *answers: str) -> Group:
    return group_of((Message("user", prompt),), answers, group_id=f"group {prompt}")


def right_scores(groups: Sequence[Group]) -> list[tuple[Score, ...]]:
    """Without a loop: `WordScorer` waits for nothing."""
    coroutine = WordScorer().score(groups)
    try:
        coroutine.send(None)
    except StopIteration as done:
        return list(done.value)
    raise AssertionError("it waited")


FOUR = [question("Q", "a", "bb", "ccc", "dddd")]

Scores = list[tuple[Score, ...]]


def routed(
    replicas: Sequence[Any], groups: Sequence[Group] = FOUR, **options: Any
) -> tuple[Scores, Router]:
    """The scores, and the router that gave them, in a loop where time is free."""

    async def main() -> tuple[Scores, Router]:
        router = Router(replicas, RouterOptions(**options), clock=now)
        try:
            return await router.score(groups), router
        finally:
            await router.aclose()

    found: tuple[Scores, Router] = in_virtual_time(main())
    return found


def reasons(scores: Scores) -> list[str]:
    """The word that each failure is counted under; empty where there is a number."""
    return [failure_reason(one.failure) if one.failure else "" for row in scores for one in row]


def dead() -> ReplicaFault:
    return ReplicaFault("connection", "it was lost", in_mid_request=True)


def unreachable() -> ReplicaFault:
    return ReplicaFault("connection", "refused")


def broken() -> ReplicaFault:
    return ReplicaFault("5xx", "answered 500")


def busy(seconds: float | None = None) -> ReplicaFault:
    return ReplicaFault("busy", "answered 429", retry_after=seconds)


def no_entry() -> ReplicaFault:
    return ReplicaFault("4xx", "answered 401")


def refused(*, may_be_one_item: bool = False) -> RefusedError:
    return RefusedError("answered 422", may_be_one_item=may_be_one_item)


def with_value(value: Any) -> Callable[[ReplicaReply], ReplicaReply]:
    """The first score is something else."""

    def change(reply: ReplicaReply) -> ReplicaReply:
        first, *rest = reply.scores[0]
        return replace(reply, scores=[(replace(first, value=value), *rest), *reply.scores[1:]])

    return change


def one_too_few(reply: ReplicaReply) -> ReplicaReply:
    return replace(reply, scores=[reply.scores[0][:-1], *reply.scores[1:]])


def one_too_many(reply: ReplicaReply) -> ReplicaReply:
    return replace(reply, scores=[(*reply.scores[0], reply.scores[0][0]), *reply.scores[1:]])


def of_another_model(reply: ReplicaReply) -> ReplicaReply:
    changed = [tuple(replace(s, value=(s.value or 0) - 7) for s in g) for g in reply.scores]
    return ReplicaReply(scores=changed, version="another")


class ScorerReplica:
    """Any scorer as a replica. Its error, whatever it is, is a fault of the replica."""

    def __init__(self, scorer: Scorer, name: str) -> None:
        self._scorer = scorer
        self._name = name

    @property
    def name(self) -> str:
        """See `Replica`."""
        return self._name

    @property
    def max_completions(self) -> None:
        """See `Replica`."""
        return None

    async def attempt(
        self, groups: Sequence[Group], *, request_id: str, timeout: float
    ) -> ReplicaReply:
        """See `Replica`."""
        try:
            async with asyncio.timeout(timeout):
                scores = await self._scorer.score(groups)
        except TimeoutError as error:
            raise ReplicaFault("timeout", f"{self.name} took more than {timeout:.3g} s") from error
        except BusyError as error:
            message = f"{self.name}: {error}"
            raise ReplicaFault("busy", message, retry_after=error.retry_after) from error
        except Exception as error:  # a scorer may be anybody's
            message = f"{self.name}: {type(error).__name__}: {error}"
            raise ReplicaFault("error", message, in_mid_request=True) from error
        check_scores(groups, scores, name=self.name)
        return ReplicaReply(scores=scores)

    async def probe(self, *, timeout: float) -> None:
        """See `Replica`. Only its scores can tell."""

    async def aclose(self) -> None:
        """See `Replica`."""
        await close_scorer(self._scorer)
