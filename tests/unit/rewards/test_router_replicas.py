"""Replicas that are slow, of another model, added or removed. No second passes here."""

from __future__ import annotations

import asyncio

import pytest

from laurel.rewards.remote.replica import FAULTS_TO_TRIP
from laurel.rewards.remote.router import CanaryGroup, Router, RouterOptions
from scripted_replicas import (
    FOUR,
    ScriptedReplica,
    busy,
    of_another_model,
    question,
    reasons,
    right_scores,
    routed,
    unreachable,
)
from virtual_time import in_virtual_time, now


def test_the_first_requests_are_spread_though_one_probe_ends_before_the_other():
    class LateReplica(ScriptedReplica):
        async def probe(self, *, timeout):
            await asyncio.sleep(0.2)

    replicas = [ScriptedReplica("a", lambda *_: 0.1), LateReplica("b", lambda *_: 0.1)]
    groups = [question(str(i), "x") for i in range(10)]
    scores, _ = routed(replicas, groups)
    assert scores == right_scores(groups)
    assert [len(one.asked) for one in replicas] == [5, 5]


def test_a_probe_that_hangs_keeps_nobody_waiting_for_long():
    class HangingReplica(ScriptedReplica):
        async def probe(self, *, timeout):
            await self.released.wait()

    async def main():
        router = Router([ScriptedReplica("a"), HangingReplica("b")], RouterOptions(), clock=now)
        began = now()
        assert await router.score(FOUR) == right_scores(FOUR)
        await router.aclose()
        return now() - began

    assert in_virtual_time(main()) < 0.6


def slow_now_and_then(when):
    return lambda number, _: 1.0 if number % 25 == when else 0.01


def seconds_of_each(number, *, hedge):
    async def main():
        replicas = [
            ScriptedReplica(name, slow_now_and_then(when)) for name, when in (("a", 24), ("b", 12))
        ]
        router = Router(replicas, RouterOptions(hedge=hedge), clock=now)
        seconds = []
        for index in range(number):
            group, began = question(str(index), "x"), now()
            assert await router.score([group]) == right_scores([group])
            seconds.append(now() - began)
        return seconds, router, replicas

    return in_virtual_time(main())


def test_hedging_bounds_the_slow_tail():
    without, _, _ = seconds_of_each(300, hedge=False)
    seconds, router, replicas = seconds_of_each(300, hedge=True)
    assert max(without) == pytest.approx(1.0)
    assert max(seconds) < 0.15
    assert 0 < router.counts["hedges"] <= 15
    assert all(one.at_once == 0 for one in replicas), "the slower of two is given up"


def test_who_hangs_is_found_out_by_being_overtaken():
    def hangs_after_a_while(number, _):
        return 0.01 if number < 20 else "hang"

    async def main():
        replicas = [ScriptedReplica("a", hangs_after_a_while), ScriptedReplica("b")]
        router = Router(replicas, RouterOptions(hedge=True), clock=now)
        began = now()
        for index in range(100):
            await router.score([question(str(index), "x")])
        return now() - began, replicas

    seconds, replicas = in_virtual_time(main())
    assert seconds < 3
    assert len(replicas[0].asked) <= 20 + FAULTS_TO_TRIP + 3


def test_who_was_asked_before_anything_was_known_is_overtaken_too():
    async def main():
        replicas = [ScriptedReplica("a", lambda *_: "hang"), ScriptedReplica("b")]
        router = Router(replicas, RouterOptions(hedge=True), clock=now)
        began = now()
        groups = [question(str(index), "x") for index in range(60)]
        scores = await asyncio.gather(*(router.score([group]) for group in groups))
        return now() - began, scores, groups, router

    seconds, scores, groups, router = in_virtual_time(main())
    assert [one for (one,) in scores] == right_scores(groups)
    assert seconds < 5, "nothing waits for the deadline of an attempt, 30 seconds"
    assert router.counts["hedges"] > 0


def test_a_second_replica_is_waited_for_where_none_has_room():
    """All requests of one that hangs are saved, though there are more than another takes."""

    async def main():
        hangs = ScriptedReplica("a", lambda number, _: 0.01 if number < 20 else "hang")
        other = ScriptedReplica("b", lambda *_: 0.05)
        router = Router([hangs, other], RouterOptions(hedge=True, window=3), clock=now)
        for index in range(40):
            await router.score([question(str(index), "x")])
        groups = [question(f"late {index}", "x") for index in range(12)]
        began = now()
        assert await router.score(groups) == right_scores(groups)
        return now() - began

    assert in_virtual_time(main()) < 2


def test_hedging_asks_under_the_same_id_and_counts_one_verdict():
    _, _, replicas = seconds_of_each(100, hedge=True)
    ids = [one for replica in replicas for one in replica.request_ids]
    assert len(set(ids)) == 100
    assert len(ids) > 100


@pytest.mark.parametrize("other", [{"version": "2"}, {}], ids=["another", "none"])
def test_who_does_not_say_the_version_that_is_wanted_is_never_believed(other):
    replicas = [ScriptedReplica("a", version="1"), ScriptedReplica("b", **other)]
    groups = [question(str(i), "x") for i in range(20)]
    scores, router = routed(replicas, groups, version="1")
    assert scores == right_scores(groups)
    assert router.version == "1"
    assert router.counts["fault_version"] == len(replicas[1].asked) > 0


def test_the_version_of_the_first_answer_is_that_of_all():
    replicas = [ScriptedReplica("a", version="1"), ScriptedReplica("b", of_another_model)]
    replicas[1].script = [None, *[of_another_model] * 1000]
    groups = [question(str(i), "x") for i in range(20)]
    scores, router = routed(replicas, groups)
    assert scores == right_scores(groups)
    assert router.version == "1"


def test_a_replica_with_other_scores_for_the_canary_gets_nothing():
    """It says nothing of its version, so nothing else would tell."""
    other = ScriptedReplica("b", weight=-1.0)
    canary = CanaryGroup(values_G=tuple(s.value for s in right_scores([CanaryGroup().group])[0]))
    groups = [question(str(i), "x") for i in range(20)]
    scores, router = routed([other, ScriptedReplica("a")], groups, canary=canary)
    assert scores == right_scores(groups)
    assert all(asked[0].id == "canary" for asked in other.asked)
    assert router.counts["fault_canary"] >= 1


def test_a_replica_that_becomes_another_is_found_out_by_the_next_canary():
    other = ScriptedReplica("b")

    async def main():
        router = Router(
            [ScriptedReplica("a"), other],
            RouterOptions(canary=CanaryGroup(), probe_seconds=5),
            clock=now,
        )
        assert await router.score(FOUR) == right_scores(FOUR)
        other._scorer.weight = -1.0
        await asyncio.sleep(6)
        await router.score(FOUR)  # starts the probe
        await asyncio.sleep(0.1)
        groups = [question(str(i), "x") for i in range(20)]
        return await router.score(groups), right_scores(groups)

    scores, right = in_virtual_time(main())
    assert scores == right


def test_the_canary_is_asked_in_parts_and_never_under_an_id_twice():
    replica = ScriptedReplica()
    replica.max_completions = 1
    scores, _ = routed([replica], canary=CanaryGroup())
    assert scores == right_scores(FOUR)
    assert len(set(replica.request_ids)) == len(replica.request_ids) == 4 + 2


def test_a_canary_that_finds_a_full_queue_ends_no_trust():
    replica = ScriptedReplica("a", [None, None, busy(0.5)])
    scores, router = routed([replica], canary=CanaryGroup(), probe_seconds=0.0)
    assert scores == right_scores(FOUR)
    assert router.counts["fault_canary"] == 0


def test_after_a_lost_connection_the_canary_is_asked_before_anything_else():
    """Behind the same address there may be another model by then."""
    replica = ScriptedReplica("a", [None, unreachable()])
    groups = [question("Q", "x")]
    scores, _ = routed([replica], groups, canary=CanaryGroup(), probe_seconds=1000)
    assert scores == right_scores(groups)
    asked = [one.id for one, *_ in replica.asked]
    assert asked == ["canary", "group Q", "canary", "group Q"]


def test_one_that_is_added_takes_over_at_once():
    async def main():
        router = Router([ScriptedReplica("a", lambda *_: "hang")], RouterOptions(), clock=now)
        under_way = asyncio.create_task(router.score([question("Q", "x")]))
        await asyncio.sleep(1)
        router.add(ScriptedReplica("b"))
        with pytest.raises(ValueError, match="called b already"):
            router.add(ScriptedReplica("b"))
        began = now()
        scores = await under_way
        assert now() - began < 31
        return scores

    assert in_virtual_time(main()) == right_scores([question("Q", "x")])


def test_without_replicas_everything_fails():
    scores, _ = routed([], timeout=5)
    assert reasons(scores) == ["timeout"] * 4
    assert "there is none" in scores[0][0].failure


def test_cancelling_a_call_ends_what_it_asked():
    async def main():
        replica = ScriptedReplica("a", lambda *_: "hang")
        router = Router([replica], RouterOptions(), clock=now)
        call = asyncio.create_task(router.score([question(str(i), "x") for i in range(50)]))
        await asyncio.sleep(1)
        assert replica.at_once > 0
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        health = router.replica_health["a"]
        assert (replica.at_once, health.in_flight, health.tokens) == (0, 0, 0)
        replica.script = None
        return await router.score(FOUR)

    assert in_virtual_time(main()) == right_scores(FOUR)


def test_ending_closes_the_replicas():
    replicas = [ScriptedReplica("a"), ScriptedReplica("b", probes=[unreachable()])]
    routed(replicas)
    assert all(one.is_closed for one in replicas)
