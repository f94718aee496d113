"""How groups become requests, how requests are halved, and when one is suspected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.rewards.remote.replica import REASONS, ReplicaFault, failed, failure_reason
from laurel.rewards.remote.router import (
    ANSWERS_TO_CONDEMN,
    DEATHS_TO_CONDEMN,
    FAULTS_TO_SPLIT,
    RouterJob,
    divide_into_jobs,
    halve_job,
    scatter_scores,
)
from laurel.types import Score
from scripted_replicas import broken, busy, dead, no_entry, question, unreachable

BEGAN = 10.0


def job(*answers):
    (made,) = divide_into_jobs([question("Q", *answers)], 64, deadline=100.0, began=BEGAN)
    return made


def blamed(made, fault, times):
    for _ in range(times):
        made.blame(fault)
    return made


@given(sizes=st.lists(st.integers(0, 9), max_size=5), most=st.integers(1, 4))
def test_the_parts_of_groups_are_the_groups(sizes, most):
    groups = [question(str(i), *map(str, range(n))) for i, n in enumerate(sizes)]
    jobs = divide_into_jobs(groups, most, deadline=1.0, began=0.0)
    found = [[None] * n for n in sizes]
    for one in jobs:
        assert 0 < one.num_completions <= most
        assert one.group.prompt == groups[one.row].prompt
        for index, completion in enumerate(one.group.completions_G, start=one.first):
            assert found[one.row][index] is None
            found[one.row][index] = completion
    assert [tuple(row) for row in found] == [group.completions_G for group in groups]
    assert len({one.request_id for one in jobs}) == len(jobs)


@given(size=st.integers(2, 9), first=st.integers(0, 5))
def test_halves_are_the_whole(size, first):
    whole = RouterJob(
        group=question("Q", *map(str, range(size))), row=3, first=first, deadline=5.0, began=0.0
    )
    whole.failed_at("a", no_entry())
    one, other = halve_job(whole, began=2.0)
    assert one.group.completions_G + other.group.completions_G == whole.group.completions_G
    assert abs(one.num_completions - other.num_completions) <= 1
    assert (one.first, other.first) == (first, first + one.num_completions)
    for half in (one, other):
        assert (half.row, half.deadline, half.began) == (3, 5.0, 2.0)
        assert (half.tries, half.avoided, half.refused_by) == (0, {"a"}, {"a"})
    assert len({whole.request_id, one.request_id, other.request_id}) == 3


def test_equal_completions_get_the_verdict_of_the_one_that_was_asked():
    group = question("Q", "a", "b", "a")
    distinct = tuple(dict.fromkeys(group.completions_G))
    first, second = Score(value=1.0), failed("4xx: no")
    assert scatter_scores(group, distinct, [first, second]) == (first, second, first)
    with pytest.raises(AssertionError, match="without a verdict"):
        scatter_scores(group, distinct, [first, None])


def test_a_second_verdict_is_an_error_of_ours():
    verdicts = [[None, None]]
    asked = job("a", "b")
    asked.put(verdicts, Score(value=1.0))
    with pytest.raises(AssertionError, match="two verdicts"):
        asked.put(verdicts, Score(value=1.0))


def test_wrong_answers_split_whoever_else_was_scored():
    asked = blamed(job("a", "b"), broken(), FAULTS_TO_SPLIT - 1)
    assert not asked.is_suspect(last_success=0.0)
    assert blamed(asked, broken(), 1).is_suspect(last_success=0.0)


def test_deaths_split_and_condemn_only_while_others_are_scored():
    several = blamed(job("a", "b"), dead(), FAULTS_TO_SPLIT)
    assert not several.is_suspect(last_success=BEGAN - 1)
    assert several.is_suspect(last_success=BEGAN + 1)
    alone = blamed(job("a"), dead(), FAULTS_TO_SPLIT + DEATHS_TO_CONDEMN)
    assert not alone.is_suspect(last_success=BEGAN - 1), "an outage"
    assert alone.is_suspect(last_success=BEGAN + 1)
    assert alone.verdict_of_suspect.startswith("poison:")


def test_nothing_is_condemned_for_deaths_that_another_may_have_caused():
    asked = blamed(job("a"), dead(), FAULTS_TO_SPLIT)
    assert asked.is_dangerous, "from now on it is the only such one at a replica"
    assert not blamed(asked, dead(), DEATHS_TO_CONDEMN - 1).is_suspect(last_success=BEGAN + 1)
    assert asked.deaths > DEATHS_TO_CONDEMN
    assert blamed(asked, dead(), 1).is_suspect(last_success=BEGAN + 1)

    several = blamed(job("a", "b"), dead(), FAULTS_TO_SPLIT)
    for half in halve_job(several, began=BEGAN):
        assert half.is_dangerous
        assert not blamed(half, dead(), DEATHS_TO_CONDEMN - 1).is_suspect(last_success=BEGAN + 1)
        assert blamed(half, dead(), 1).is_suspect(last_success=BEGAN + 1)

    late = blamed(job("a"), ReplicaFault("timeout", "late"), DEATHS_TO_CONDEMN)
    assert not late.is_dangerous, "whoever is late takes nobody's connection along"
    assert late.is_suspect(last_success=BEGAN + 1)


def test_one_completion_is_condemned_by_wrong_answers_but_not_by_an_outage():
    wrong = blamed(job("a"), ReplicaFault("nan", "NaN"), ANSWERS_TO_CONDEMN - 1)
    assert not wrong.is_suspect(last_success=BEGAN + 1)
    wrong.blame(ReplicaFault("nan", "NaN"))
    assert wrong.is_suspect(last_success=0.0)
    assert failure_reason(wrong.verdict_of_suspect) == "nan"
    errors = blamed(job("a"), broken(), 10 * ANSWERS_TO_CONDEMN)
    assert not errors.is_suspect(last_success=BEGAN - 1)
    assert errors.is_suspect(last_success=BEGAN + 1)
    assert failure_reason(errors.verdict_of_suspect) == "5xx"


@pytest.mark.parametrize("fault", [unreachable(), busy(), no_entry()])
def test_what_never_reached_a_model_says_nothing_of_a_request(fault):
    for asked in (job("a"), job("a", "b")):
        assert not blamed(asked, fault, 100).is_suspect(last_success=BEGAN + 1)


def test_failures_are_counted_by_their_first_word():
    for reason in REASONS:
        assert failure_reason(f"{reason}: and why") == reason
    assert failure_reason("not finite") == "other"
    assert failure_reason("") == "other"
