"""How a router asks its replicas, and what it makes of their faults. No second passes here."""

from __future__ import annotations

import asyncio
import math

import pytest

from laurel.rewards.remote.replica import FAULTS_TO_TRIP
from laurel.rewards.remote.router import Router, RouterOptions
from scripted_replicas import (
    FOUR,
    ScriptedReplica,
    broken,
    busy,
    dead,
    no_entry,
    of_another_model,
    one_too_few,
    one_too_many,
    question,
    reasons,
    refused,
    right_scores,
    routed,
    unreachable,
    with_value,
)
from virtual_time import in_virtual_time, now


def test_the_replica_with_the_fewest_outstanding_tokens_is_asked():
    replicas = [ScriptedReplica("a", [20.0]), ScriptedReplica("b")]
    long, *short = [question("w " * 4000, "x"), *(question(str(i), "x") for i in range(20))]

    async def main():
        router = Router(replicas, RouterOptions(), clock=now)
        first = asyncio.create_task(router.score([long]))
        await asyncio.sleep(1)
        for group in short:
            await router.score([group])
        await first

    in_virtual_time(main())
    assert [len(one.asked) for one in replicas] == [1, 20]


def test_of_equals_each_gets_its_share():
    replicas = [ScriptedReplica(name) for name in "abc"]

    async def main():
        router = Router(replicas, RouterOptions(), clock=now)
        for index in range(30):
            await router.score([question(str(index), "x")])

    in_virtual_time(main())
    assert [len(one.asked) for one in replicas] == [10, 10, 10]


def test_no_replica_gets_more_at_once_than_its_window():
    replicas = [ScriptedReplica(name, lambda *_: 0.1) for name in "ab"]
    groups = [question(str(i), "x") for i in range(100)]
    scores, _ = routed(replicas, groups, window=4)
    assert scores == right_scores(groups)
    assert [one.most_at_once for one in replicas] == [4, 4]


def test_long_groups_are_asked_in_parts_as_the_replicas_allow():
    replica = ScriptedReplica()
    replica.max_completions = 3
    scores, router = routed([replica], [question("Q", *"abcdefgh")], completions_per_request=5)
    assert scores == right_scores([question("Q", *"abcdefgh")])
    assert sorted(len(g.completions_G) for (g,) in replica.asked) == [2, 3, 3]
    assert router.counts["requests"] == 3


def test_equal_completions_are_asked_once():
    replica = ScriptedReplica()
    groups = [question("Q", "a", "b", "a", "a")]
    scores, _ = routed([replica], groups)
    assert scores == right_scores(groups)
    assert [len(g.completions_G) for (g,) in replica.asked] == [2]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (unreachable(), "connection"),
        (broken(), "5xx"),
        (busy(), "busy"),
        (with_value(math.nan), "nan"),
        (one_too_few, "count"),
        (one_too_many, "count"),
        ("hang", "timeout"),
        (no_entry(), "4xx"),
        (of_another_model, "version"),
        (KeyError("k"), "error"),
    ],
)
def test_without_a_good_replica_there_are_failures_with_their_reason(fault, reason):
    replicas = [ScriptedReplica(name, lambda *_: fault) for name in "ab"]

    async def main():
        router = Router(
            replicas, RouterOptions(timeout=60, attempt_timeout=9, version="1"), clock=now
        )
        began = now()
        scores = await router.score([question("Q", "a")])
        return scores, now() - began

    scores, seconds = in_virtual_time(main())
    assert reasons(scores) == [reason]
    assert all(one.value is None for row in scores for one in row)
    assert seconds <= 60.01


def test_what_is_refused_is_never_asked_again():
    replicas = [ScriptedReplica("a", lambda *_: refused()), ScriptedReplica("b")]
    replicas[1].script = replicas[0].script
    scores, router = routed(replicas)
    assert reasons(scores) == ["4xx"] * 4
    assert router.counts["attempts"] == 1
    assert all(health.is_usable for health in router.replica_health.values())


def test_who_wants_nothing_from_us_is_asked_once_and_at_once_told():
    """A wrong key or address: no use to wait for the deadline."""
    replicas = [ScriptedReplica(name, lambda *_: no_entry()) for name in "ab"]

    async def main():
        router = Router(replicas, RouterOptions(), clock=now)
        began = now()
        return await router.score([question("Q", "a")]), now() - began

    scores, seconds = in_virtual_time(main())
    assert reasons(scores) == ["4xx"]
    assert [len(one.asked) for one in replicas] == [1, 1]
    assert seconds < 1


def test_a_bad_item_never_fails_its_request():
    def script(_, groups):
        return refused(may_be_one_item=True) if "bad" in said(groups) else None

    replica = ScriptedReplica("a", script)
    answers = [*"abcdefg", "bad", *"hijklmno"]
    scores, router = routed([replica], [question("Q", *answers)])
    found = reasons(scores)
    assert [i for i, reason in enumerate(found) if reason] == [7]
    assert found[7] == "4xx"
    (right,) = right_scores([question("Q", *answers)])
    assert [s for s in scores[0] if s.value is not None] == [*right[:7], *right[8:]]
    assert router.counts["splits"] == 4
    assert replica.answers == dict.fromkeys([*"abcdefghijklmno"], 1)


def said(groups):
    return [one.messages[-1].content for group in groups for one in group.completions_G]


def test_a_replica_that_stays_bad_is_left_alone():
    bad = ScriptedReplica("a", lambda *_: broken())
    groups = [question(str(i), "x") for i in range(200)]
    scores, _ = routed([bad, ScriptedReplica("b", lambda *_: 0.001)], groups, window=4)
    assert scores == right_scores(groups)
    assert len(bad.asked) <= FAULTS_TO_TRIP + 4


def test_an_outage_is_waited_out():
    """Everything is down for 20 seconds; nothing is lost, and nothing is taken for poison."""

    def down(*_):
        return dead() if now() < 1020.0 else None

    replicas = [ScriptedReplica(name, down) for name in "ab"]
    groups = [question(str(i), "a", "b") for i in range(50)]
    scores, _ = routed(replicas, groups)
    assert scores == right_scores(groups)
    assert sum(len(one.asked) for one in replicas) < 50 + 200, "it is no storm"


def test_retry_after_is_respected():
    times = []

    def script(number, _):
        times.append(now())
        return busy(7.0) if number == 0 else None

    scores, _ = routed([ScriptedReplica("a", script)])
    assert scores == right_scores(FOUR)
    assert times[1] - times[0] >= 7.0


def test_busy_goes_elsewhere_without_waiting():
    async def main():
        replicas = [ScriptedReplica("a", lambda *_: busy(20.0)), ScriptedReplica("b")]
        router = Router(replicas, RouterOptions(), clock=now)
        began = now()
        scores = [await router.score([question(str(i), "x")]) for i in range(10)]
        assert now() - began < 0.1
        assert len(replicas[0].asked) == 1
        return scores

    assert in_virtual_time(main()) == [right_scores([question(str(i), "x")]) for i in range(10)]


def test_the_deadline_is_for_everything():
    async def main():
        replica = ScriptedReplica("a", lambda *_: 3.0)
        router = Router([replica], RouterOptions(timeout=10, window=2), clock=now)
        began = now()
        scores = await router.score([question(str(i), "x") for i in range(40)])
        assert now() - began == pytest.approx(10, abs=0.01)
        assert router.replica_health["a"].is_usable, (
            "who was cut short by the deadline is not to blame"
        )
        return scores, replica

    scores, replica = in_virtual_time(main())
    assert reasons(scores).count("") == 6
    assert set(reasons(scores)) == {"", "timeout"}
    assert max(replica.limits) <= 10
