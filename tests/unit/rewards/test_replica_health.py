"""When a replica is trusted, rests, is probed and is on trial. Times are a clock set by hand."""

from __future__ import annotations

import pytest

from laurel.rewards.remote.replica import (
    FAULTS_TO_TRIP,
    FIRST_REST,
    LONGEST_BUSY,
    LONGEST_REST,
    ReplicaFault,
    Standing,
    patience,
)
from scripted_replicas import ScriptedReplica, broken, busy, no_entry, unreachable


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def standing(clock):
    made = Standing(ScriptedReplica(), window=8, clock=clock)
    made.proved()
    return made


def trip(standing, clock):
    for _ in range(FAULTS_TO_TRIP):
        standing.failed(broken(), began=clock.now)


def rest(standing, clock):
    """Seconds until it wants a probe."""
    return standing.rests_until - clock.now


def test_a_new_replica_is_probed_before_it_gets_anything(clock):
    standing = Standing(ScriptedReplica(), window=8, clock=clock)
    assert standing.wants_probe
    assert not standing.is_usable
    standing.proved()
    assert standing.is_usable
    assert not standing.wants_probe
    assert not standing.is_on_trial


def test_faults_in_a_row_end_the_trust(standing, clock):
    for _ in range(FAULTS_TO_TRIP - 1):
        standing.failed(broken(), began=clock.now)
    assert standing.is_usable
    standing.succeeded(0.1)
    for _ in range(FAULTS_TO_TRIP - 1):
        standing.failed(broken(), began=clock.now)
    assert standing.is_usable, "a success lies between"
    standing.failed(broken(), began=clock.now)
    assert not standing.is_usable


@pytest.mark.parametrize("kind", ["version", "canary", "4xx"])
def test_a_fault_without_doubt_ends_it_at_once(standing, clock, kind):
    standing.failed(ReplicaFault(kind, "no"), began=clock.now)
    assert not standing.is_usable


def test_a_lost_connection_is_reason_for_a_probe_where_that_can_tell(clock):
    standing = Standing(ScriptedReplica(), window=8, clock=clock, has_canary=True)
    standing.proved()
    standing.failed(broken(), began=clock.now)
    assert standing.is_usable
    standing.failed(unreachable(), began=clock.now)
    assert standing.wants_probe, "at once"
    standing.proved()
    assert standing.is_usable
    assert not standing.is_on_trial


def test_it_is_left_alone_and_then_probed(standing, clock):
    trip(standing, clock)
    assert not standing.wants_probe
    clock.now += FIRST_REST
    assert standing.wants_probe
    assert not standing.is_usable
    standing.probing_since = clock.now
    assert not standing.wants_probe, "one probe at a time"


def test_after_a_probe_it_is_on_trial_with_one_request(standing, clock):
    trip(standing, clock)
    clock.now += FIRST_REST
    standing.proved()
    assert standing.is_usable
    assert standing.has_room
    standing.begin(1)
    assert not standing.has_room
    standing.succeeded(0.1)
    assert standing.has_room, "the trial is over"


def test_a_fault_on_trial_is_enough_and_the_rest_is_longer(standing, clock):
    trip(standing, clock)
    expected = FIRST_REST
    for _ in range(8):
        assert rest(standing, clock) == pytest.approx(expected)
        clock.now += expected
        standing.proved()
        standing.failed(broken(), began=clock.now)
        assert not standing.is_usable
        expected = min(LONGEST_REST, 2 * expected)
    assert expected == LONGEST_REST


def test_a_success_makes_the_next_rest_short_again(standing, clock):
    for _ in range(3):
        trip(standing, clock)
        clock.now = standing.rests_until
        standing.proved()
    standing.succeeded(0.1)
    trip(standing, clock)
    assert rest(standing, clock) == pytest.approx(FIRST_REST)


def test_many_requests_that_one_death_ends_are_one_rest(standing, clock):
    for _ in range(32):
        standing.failed(unreachable(), began=clock.now)
    assert rest(standing, clock) == pytest.approx(FIRST_REST)


def test_what_began_before_it_was_trusted_again_does_not_count(standing, clock):
    before = clock.now
    trip(standing, clock)
    clock.now += FIRST_REST
    standing.proved()
    for _ in range(10):
        standing.failed(unreachable(), began=before)
    assert standing.is_usable


def test_failed_probes_lengthen_the_rest(clock):
    standing = Standing(ScriptedReplica(), window=8, clock=clock)
    rests = []
    for _ in range(7):
        standing.failed_probe(unreachable(), began=clock.now)
        rests.append(rest(standing, clock))
        clock.now = standing.rests_until
    assert rests == pytest.approx([0.5, 1, 2, 4, 8, 15, 15])


def test_busy_is_no_mark_against_it_and_halves_what_it_gets(standing, clock):
    standing.succeeded(0.1)
    for _ in range(10):
        standing.failed(busy(), began=clock.now)
    assert standing.is_usable
    standing.begin(1)
    assert not standing.has_room
    for _ in range(200):
        standing.succeeded(0.1)
    assert standing.has_room
    for _ in range(7):
        standing.begin(1)
    assert not standing.has_room, "the window does not grow above what it was"


def test_busy_with_retry_after_is_respected(standing, clock):
    standing.failed(busy(4.0), began=clock.now)
    assert not standing.is_usable
    assert not standing.wants_probe
    clock.now += 3.9
    assert not standing.is_usable
    clock.now += 0.2
    assert standing.is_usable
    standing.failed(busy(1e9), began=clock.now)
    assert rest(standing, clock) == pytest.approx(LONGEST_BUSY)


def test_a_busy_probe_of_a_trusted_replica_changes_no_trust(standing, clock):
    standing.failed_probe(busy(), began=clock.now)
    assert standing.is_usable
    standing.failed_probe(ReplicaFault("canary", "other scores"), began=clock.now)
    assert not standing.is_usable


def test_who_refuses_us_is_known_until_it_is_trusted_again(standing, clock):
    standing.failed(no_entry(), began=clock.now)
    assert standing.refuses_us
    clock.now = standing.rests_until
    standing.proved()
    assert not standing.refuses_us


def test_a_late_success_does_not_end_a_rest(standing, clock):
    trip(standing, clock)
    standing.succeeded(0.1)
    assert not standing.is_usable
    assert standing.last_fault


def test_slow_is_twice_what_nineteen_of_twenty_took(clock):
    one, other = (Standing(ScriptedReplica(), window=8, clock=clock) for _ in range(2))
    for seconds in range(1, 20):
        one.succeeded(float(seconds))
    assert patience([one, other]) is None, "too few are known"
    other.succeeded(100.0)
    assert patience([one, other]) == pytest.approx(2 * 19.0)
    assert patience([one]) is None
    for _ in range(200):
        one.succeeded(0.001)
        other.succeeded(0.001)
    assert patience([one, other]) == pytest.approx(0.05), "and never less than this"


def test_a_first_probe_is_worth_a_short_wait(clock, standing):
    new = Standing(ScriptedReplica(), window=8, clock=clock)
    assert new.joins_until is None
    new.probing_since = clock.now
    assert new.joins_until == pytest.approx(clock.now + 0.5)
    clock.now += 0.6
    assert new.joins_until is None, "it hangs, perhaps"
    standing.probing_since = clock.now
    assert standing.joins_until is None, "it was probed before"


def test_who_is_started_anew_is_probed_at_once_and_has_no_record(standing, clock):
    for _ in range(6):
        trip(standing, clock)
        clock.now += rest(standing, clock)
        standing.failed_probe(unreachable(), began=clock.now)
    assert rest(standing, clock) == LONGEST_REST
    standing.came_back()
    assert standing.wants_probe
    standing.failed_probe(unreachable(), began=clock.now - 1)
    assert standing.wants_probe, "that probe was of its forerunner"
    standing.proved()
    assert standing.is_usable
    assert not standing.is_on_trial
    trip(standing, clock)
    assert rest(standing, clock) == FIRST_REST
