"""Whatever replicas do, every completion gets exactly one verdict, and no number that is wrong."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.rewards.remote.replica import REASONS, ReplicaFault, failure_reason
from laurel.rewards.remote.router import Router, RouterOptions
from scripted_replicas import (
    ScriptedReplica,
    broken,
    busy,
    dead,
    no_entry,
    of_another_model,
    one_too_few,
    one_too_many,
    question,
    refused,
    right_scores,
    unreachable,
    with_value,
)
from virtual_time import in_virtual_time, now

REPLICA_FAULTS = {
    "dead": dead(),
    "unreachable": unreachable(),
    "500": broken(),
    "busy": busy(),
    "busy for a while": busy(3.0),
    "401": no_entry(),
    "NaN": with_value(math.nan),
    "infinite": with_value(-math.inf),
    "null": with_value(None),
    "too few": one_too_few,
    "too many": one_too_many,
    "another model": of_another_model,
    "bug": ZeroDivisionError("a bug"),
    "slow": 2.0,
    "hangs": "hang",
}
"""What is no fault of the request, so that a better replica loses nothing."""
ACTS = {
    **REPLICA_FAULTS,
    "refused": refused(),
    "refused, perhaps for one": refused(may_be_one_item=True),
    "right": None,
}
TIMEOUT = 120.0


def scripts(names):
    """What a replica does one after the other, and what it does after that."""
    return st.tuples(st.lists(st.sampled_from(sorted(names)), max_size=12), st.sampled_from(names))


def replica(name, script):
    acts, last = script
    return ScriptedReplica(
        name, lambda number, _: ACTS[acts[number] if number < len(acts) else last], version="1"
    )


def played(replicas, groups, **options):
    async def main():
        router = Router(
            replicas,
            RouterOptions(timeout=TIMEOUT, attempt_timeout=8, version="1", **options),
            clock=now,
        )
        began = now()
        scores = await router.score(groups)
        took = now() - began
        in_flight = [s.in_flight for s in router.replica_health.values()]
        await router.aclose()
        return scores, took, in_flight

    return in_virtual_time(main())


groups_of = st.lists(st.integers(0, 6), min_size=1, max_size=5).map(
    lambda sizes: [
        question(f"q{i}", *(f"{'w' * (i + 2 * j)} {j}" for j in range(n)))
        for i, n in enumerate(sizes)
    ]
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    groups=groups_of,
    told=st.lists(scripts(list(ACTS)), min_size=2, max_size=3),
    hedge=st.booleans(),
    window=st.integers(1, 4),
    most=st.integers(1, 8),
)
def test_every_completion_gets_one_verdict_and_never_a_wrong_number(
    groups, told, hedge, window, most
):
    replicas = [replica(name, script) for name, script in zip("abc", told, strict=False)]
    scores, seconds, in_flight = played(
        replicas, groups, hedge=hedge, window=window, completions_per_request=most
    )
    right = right_scores(groups)
    assert [len(row) for row in scores] == [len(row) for row in right]
    for row, right_row in zip(scores, right, strict=True):
        for one, right_one in zip(row, right_row, strict=True):
            if one.failure is None:
                assert one == right_one
            else:
                assert one.value is None
                assert failure_reason(one.failure) in REASONS
    assert seconds <= TIMEOUT + 0.1
    assert not any(in_flight)
    assert all(one.at_once == 0 for one in replicas)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    groups=groups_of,
    told=st.lists(scripts(list(REPLICA_FAULTS)), min_size=1, max_size=2),
    hedge=st.booleans(),
    window=st.integers(1, 4),
)
def test_nothing_is_lost_while_one_replica_is_well(groups, told, hedge, window):
    bad = [replica(name, script) for name, script in zip("ab", told, strict=False)]
    well = ScriptedReplica("well", version="1")
    scores, _, _ = played([*bad, well], groups, hedge=hedge, window=window)
    assert scores == right_scores(groups)


@settings(max_examples=60, deadline=None)
@given(
    groups=groups_of,
    told=st.lists(
        st.sampled_from(["dead", "unreachable", "500", "busy", "NaN", "too few", "hangs"]),
        max_size=8,
    ),
)
def test_faults_that_end_lose_nothing_even_with_one_replica(groups, told):
    only = replica("a", (told, "right"))
    scores, _, _ = played([only], groups)
    assert scores == right_scores(groups)
    counted = Counter(one for g in groups for c in g.completions_G for one in [c.messages[0]])
    assert counted.total() == sum(len(row) for row in scores)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.integers(1, 9))
def test_bad_items_fail_and_nothing_else_does(data, size):
    bad = data.draw(st.sets(st.integers(0, size - 1), max_size=size))
    fault = data.draw(
        st.sampled_from(
            [
                refused(may_be_one_item=True),
                with_value(math.nan),
                broken(),
                ReplicaFault("reply", "HTML"),
            ]
        )
    )
    words = [f"bad{i}" if i in bad else f"good{i}" for i in range(size)]

    def script(_, groups):
        said = [one.messages[-1].content for group in groups for one in group.completions_G]
        return fault if any(word.startswith("bad") for word in said) else None

    groups = [question("Q", *words), question("R", "x")]
    scores, _, _ = played([ScriptedReplica(name, script, version="1") for name in "ab"], groups)
    right = right_scores(groups)
    assert scores[1] == right[1]
    for index, (one, right_one) in enumerate(zip(scores[0], right[0], strict=True)):
        assert (one.value is None) == (index in bad)
        assert one == right_one or index in bad
