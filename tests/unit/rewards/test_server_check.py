"""Servers that are waited for when a run begins."""

import asyncio

import pytest

from laurel.errors import ConfigError
from laurel.rewards.remote.replica import ReplicaFault
from laurel.rewards.remote.server_check import ServerCheck
from scripted_replicas import ScriptedReplica, unreachable
from virtual_time import in_virtual_time, now


def checked(*replicas, patience=60.0):
    """What was said, when, and how long it took; the error, if there was one, last."""
    said = []

    async def main():
        began = now()
        check = ServerCheck(
            patience=patience,
            limit=30.0,
            where="here",
            clock=now,
            say=lambda line: said.append((round(now() - began), line)),
        )
        try:
            await check.check_all(replicas)
        except ConfigError as error:
            return round(now() - began), str(error)
        return round(now() - began), ""

    took, error = in_virtual_time(main())
    return said, took, error


def test_who_is_absent_is_named_at_once_and_now_and_then_until_patience_ends():
    absent = ScriptedReplica("http://h:1", probes=[unreachable()] * 1000)
    said, took, error = checked(absent)
    assert took == 60
    assert len(said) == 6
    assert said[0] == (
        0,
        "waiting for http://h:1, 60 s more at most (connect_patience): connection: refused",
    )
    assert [10 * i <= when < 10 * i + 2 * (i + 1) for i, (when, _) in enumerate(said)] == [True] * 6
    assert "http://h:1 does not answer: connection: refused. It was given 60 s (conn" in error
    assert absent.is_closed


def test_absent_ones_are_waited_for_side_by_side_and_who_comes_late_is_taken():
    late = [ScriptedReplica(f"http://h:{i}", probes=[unreachable()] * 8) for i in (1, 2, 3)]
    said, took, error = checked(*late)
    assert error == ""
    assert took < 20
    assert {line.split(",")[0] for _, line in said} == {
        f"waiting for http://h:{i}" for i in (1, 2, 3)
    }


def test_one_that_will_never_do_ends_the_wait_for_others():
    absent = ScriptedReplica("http://h:1", probes=[unreachable()] * 1000)
    wrong = ScriptedReplica("http://h:2", [ReplicaFault("4xx", "answered 401")])
    _, took, error = checked(absent, wrong)
    assert took == 0
    assert "http://h:2 refuses to score" in error
    assert absent.is_closed


def test_nobody_waits_any_more_when_the_check_is_given_up():
    absent = ScriptedReplica("http://h:1", probes=[unreachable()] * 1000)

    async def main():
        check = ServerCheck(patience=60, limit=30, where="", clock=now, say=lambda _: None)
        checking = asyncio.ensure_future(check.check_all([absent]))
        await asyncio.sleep(5)
        checking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await checking

    in_virtual_time(main())
    assert absent.is_closed
