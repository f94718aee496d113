"""A completion that takes replicas down, and with them whatever else they have at that moment."""

from __future__ import annotations

import asyncio
import random

import pytest

from fakes import WordScorer
from laurel.rewards.remote.replica import ReplicaReply, failure_reason
from laurel.rewards.remote.router import Router, RouterOptions
from scripted_replicas import dead, question, right_scores, unreachable
from virtual_time import in_virtual_time, now


class Mortal:
    """Answers after a while; a poison ends it sooner, with all that it has, and it is away."""

    max_completions = None

    def __init__(self, name, *, away=2.0):
        self.name = name
        self.deaths = 0
        self._away = away
        self._back_at = 0.0
        self._end = asyncio.Event()

    async def attempt(self, groups, *, request_id, timeout):
        if now() < self._back_at:
            raise unreachable()
        said = [one.messages[-1].content for group in groups for one in group.completions_G]
        end, is_poison = self._end, "poison" in said
        try:
            async with asyncio.timeout(0.2 if is_poison else 0.5):
                await end.wait()
        except TimeoutError:
            if not is_poison:
                return ReplicaReply(scores=await WordScorer().score(groups))
            self.deaths += 1
            self._back_at = now() + self._away
            self._end = asyncio.Event()
            end.set()
        raise dead()

    async def probe(self, *, timeout):
        if now() < self._back_at:
            raise unreachable()

    async def aclose(self):
        pass


def asked(poisoned, seed):
    """Groups of several sizes, and one that holds the poison, somewhere among them."""
    drawn = random.Random(seed)
    groups = [
        question(str(i), *(f"answer {j}" for j in range(drawn.randint(1, 5)))) for i in range(120)
    ]
    groups.insert(drawn.randrange(len(groups)), poisoned)
    return groups


def scored(groups, num_replicas, **options):
    """Scores, and how often replicas died."""

    async def main():
        replicas = [Mortal(str(i)) for i in range(num_replicas)]
        router = Router(replicas, RouterOptions(window=8, **options), clock=now)
        try:
            return await router.score(groups), sum(one.deaths for one in replicas)
        finally:
            await router.aclose()

    return in_virtual_time(main())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("answers", [("poison",), ("a", "poison", "b", "c")], ids=len)
def test_what_dies_with_it_is_scored_all_the_same(seed, num_replicas, answers):
    poisoned = question("P", *answers)
    groups = asked(poisoned, seed)
    scores, deaths = scored(groups, num_replicas)
    failed = [
        (group.id, completion.messages[-1].content, failure_reason(score.failure))
        for group, row in zip(groups, scores, strict=True)
        for completion, score in zip(group.completions_G, row, strict=True)
        if score.failure is not None
    ]
    assert failed == [(poisoned.id, "poison", "poison")]
    right = right_scores(groups)
    for row, wanted in zip(scores, right, strict=True):
        assert [s for s in row if s.failure is None] == [
            w for s, w in zip(row, wanted, strict=True) if s.failure is None
        ]
    assert deaths <= 9


@pytest.mark.parametrize("seed", range(3))
def test_several_of_them_are_found(seed):
    groups = asked(question("P", "a", "poison", "b"), seed)
    groups = [question("Q", "poison"), *groups, question("R", "poison", "c")]
    scores, _ = scored(groups, 3)
    for group, row, wanted in zip(groups, scores, right_scores(groups), strict=True):
        for completion, score, right in zip(group.completions_G, row, wanted, strict=True):
            if completion.messages[-1].content == "poison":
                assert failure_reason(score.failure) == "poison"
            else:
                assert score == right
