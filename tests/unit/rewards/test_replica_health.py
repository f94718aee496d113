"""When a replica is trusted, rests, is probed and is on trial. Times are a clock set by hand."""

from __future__ import annotations

import pytest

from laurel.rewards.remote.replica import (
    FAULTS_TO_TRIP,
    FIRST_REST,
    LONGEST_BUSY,
    LONGEST_REST,
    ReplicaFault,
    ReplicaHealth,
    patience,
)
from scripted_replicas import ScriptedReplica, broken, busy, unreachable


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def health(clock):
    made = ReplicaHealth(ScriptedReplica(), window=8, clock=clock)
    made.proved()
    return made


def trip(health, clock):
    for _ in range(FAULTS_TO_TRIP):
        health.failed(broken(), began=clock.now)


def rest(health, clock):
    """Seconds until it wants a probe."""
    return health.rests_until - clock.now


def test_a_new_replica_is_probed_before_it_gets_anything(clock):
    health = ReplicaHealth(ScriptedReplica(), window=8, clock=clock)
    assert health.wants_probe
    assert not health.is_usable
    health.proved()
    assert health.is_usable
    assert not health.wants_probe
    assert not health.is_on_trial


def test_faults_in_a_row_end_the_trust(health, clock):
    for _ in range(FAULTS_TO_TRIP - 1):
        health.failed(broken(), began=clock.now)
    assert health.is_usable
    health.succeeded(0.1)
    for _ in range(FAULTS_TO_TRIP - 1):
        health.failed(broken(), began=clock.now)
    assert health.is_usable, "a success lies between"
    health.failed(broken(), began=clock.now)
    assert not health.is_usable


@pytest.mark.parametrize("kind", ["version", "canary", "4xx"])
def test_a_fault_without_doubt_ends_it_at_once(health, clock, kind):
    health.failed(ReplicaFault(kind, "no"), began=clock.now)
    assert not health.is_usable


def test_a_lost_connection_is_reason_for_a_probe_where_that_can_tell(clock):
    health = ReplicaHealth(ScriptedReplica(), window=8, clock=clock, has_canary=True)
    health.proved()
    health.failed(broken(), began=clock.now)
    assert health.is_usable
    health.failed(unreachable(), began=clock.now)
    assert health.wants_probe, "at once"
    health.proved()
    assert health.is_usable
    assert not health.is_on_trial


def test_it_is_left_alone_and_then_probed(health, clock):
    trip(health, clock)
    assert not health.wants_probe
    clock.now += FIRST_REST
    assert health.wants_probe
    assert not health.is_usable
    health.probing_since = clock.now
    assert not health.wants_probe, "one probe at a time"


def test_after_a_probe_it_is_on_trial_with_one_request(health, clock):
    trip(health, clock)
    clock.now += FIRST_REST
    health.proved()
    assert health.is_usable
    assert health.has_room
    health.begin(1)
    assert not health.has_room
    health.succeeded(0.1)
    assert health.has_room, "the trial is over"


def test_a_fault_on_trial_is_enough_and_the_rest_is_longer(health, clock):
    trip(health, clock)
    expected = FIRST_REST
    for _ in range(8):
        assert rest(health, clock) == pytest.approx(expected)
        clock.now += expected
        health.proved()
        health.failed(broken(), began=clock.now)
        assert not health.is_usable
        expected = min(LONGEST_REST, 2 * expected)
    assert expected == LONGEST_REST


def test_a_success_makes_the_next_rest_short_again(health, clock):
    for _ in range(3):
        trip(health, clock)
        clock.now = health.rests_until
        health.proved()
    health.succeeded(0.1)
    trip(health, clock)
    assert rest(health, clock) == pytest.approx(FIRST_REST)


def test_many_requests_that_one_death_ends_are_one_rest(health, clock):
    for _ in range(32):
        health.failed(unreachable(), began=clock.now)
    assert rest(health, clock) == pytest.approx(FIRST_REST)


def test_what_began_before_it_was_trusted_again_does_not_count(health, clock):
    before = clock.now
    trip(health, clock)
    clock.now += FIRST_REST
    health.proved()
    for _ in range(10):
        health.failed(unreachable(), began=before)
    assert health.is_usable


def test_failed_probes_lengthen_the_rest(clock):
    health = ReplicaHealth(ScriptedReplica(), window=8, clock=clock)
    rests = []
    for _ in range(7):
        health.failed_probe(unreachable(), began=clock.now)
        rests.append(rest(health, clock))
        clock.now = health.rests_until
    assert rests == pytest.approx([0.5, 1, 2, 4, 8, 15, 15])


def test_busy_is_no_mark_against_it_and_halves_what_it_gets(health, clock):
    health.succeeded(0.1)
    for _ in range(10):
        health.failed(busy(), began=clock.now)
    assert health.is_usable
    health.begin(1)
    assert not health.has_room
    for _ in range(200):
        health.succeeded(0.1)
    assert health.has_room
    for _ in range(7):
        health.begin(1)
    assert not health.has_room, "the window does not grow above what it was"


def test_busy_with_retry_after_is_respected(health, clock):
    health.failed(busy(4.0), began=clock.now)
    assert not health.is_usable
    assert not health.wants_probe
    clock.now += 3.9
    assert not health.is_usable
    clock.now += 0.2
    assert health.is_usable
    health.failed(busy(1e9), began=clock.now)
    assert rest(health, clock) == pytest.approx(LONGEST_BUSY)


def test_a_busy_probe_of_a_trusted_replica_changes_no_trust(health, clock):
    health.failed_probe(busy(), began=clock.now)
    assert health.is_usable
    health.failed_probe(ReplicaFault("canary", "other scores"), began=clock.now)
    assert not health.is_usable


def test_a_late_success_does_not_end_a_rest(health, clock):
    trip(health, clock)
    health.succeeded(0.1)
    assert not health.is_usable
    assert health.last_fault


def test_slow_is_twice_what_nineteen_of_twenty_took(clock):
    one, other = (ReplicaHealth(ScriptedReplica(), window=8, clock=clock) for _ in range(2))
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


def test_a_first_probe_is_worth_a_short_wait(clock, health):
    new = ReplicaHealth(ScriptedReplica(), window=8, clock=clock)
    assert new.joins_until is None
    new.probing_since = clock.now
    assert new.joins_until == pytest.approx(clock.now + 0.5)
    clock.now += 0.6
    assert new.joins_until is None, "it hangs, perhaps"
    health.probing_since = clock.now
    assert health.joins_until is None, "it was probed before"
