"""Reward servers that die, hang, lie and come back, as real processes.

Every case ends like a quiet run: a verdict on every completion, once, and the same numbers. Figures
in brackets are the cases of the project's fault matrix. Outages, deadlines, a slow tail and other
models [11, 13, 14, 15] are in `unit/rewards/test_router*.py`, where seconds cost nothing.
"""

import asyncio
import socket
import threading
from contextlib import ExitStack, contextmanager

import pytest

from laurel.rewards.remote.http import HttpScorer
from laurel.rewards.remote.replica import failure_reason
from laurel.rewards.remote.router import CanaryGroup, RouterOptions
from reward_servers import RewardServerProcess, wait_until
from reward_streams import GROUPS, RIGHT, SECONDS, Streamed
from scripted_replicas import question, right_scores


@pytest.fixture
def servers():
    """Makes servers in processes of their own."""
    with ExitStack() as stack:

        def started(*settings):
            return [
                stack.enter_context(RewardServerProcess(**{"seconds": SECONDS, **one}))
                for one in settings
            ]

        yield started


def test_a_quiet_run(servers):
    streamed = Streamed(servers({}, {}, {}))
    assert streamed.run() == RIGHT
    assert streamed.counts == {"requests": 150, "attempts": 150}


def test_a_replica_is_killed_in_mid_batch(servers):  # [1]
    three = servers({}, {}, {})
    streamed = Streamed(three)
    streamed.after(30, three[0].kill)
    assert streamed.run() == RIGHT
    assert streamed.counts["fault_connection"] > 0


def test_a_replica_that_was_killed_comes_back_and_is_used(servers):  # [1]
    one, other = servers({}, {})
    streamed = Streamed([one, other])
    streamed.after(20, one.kill)
    streamed.after(30, one.start)
    streamed.after(40, other.kill)  # the one that came back has to do the rest
    assert streamed.run() == RIGHT


def test_connections_are_refused_at_first(servers):  # [3]
    (late,) = servers({"is_up": False})
    streamed = Streamed([late])

    def start_when_it_was_missed():
        wait_until(lambda: streamed.counts.get("fault_connection"), seconds=60)
        late.start()

    starter = threading.Thread(target=start_when_it_was_missed)
    starter.start()
    try:
        assert streamed.run() == RIGHT
    finally:
        starter.join()


def test_one_that_never_answers_the_door(servers):  # [4]
    """A full backlog: neither an answer nor a refusal, as in a network that drops packets."""
    (good,) = servers({})
    with socket.socket() as door, ExitStack() as stack:
        door.bind(("127.0.0.1", 0))
        door.listen(0)
        for _ in range(4):
            knocking = stack.enter_context(socket.socket())
            knocking.setblocking(False)
            knocking.connect_ex(door.getsockname())
        streamed = Streamed([good], attempt_timeout=1.0)
        streamed.urls.insert(0, f"http://127.0.0.1:{door.getsockname()[1]}")
        assert streamed.run() == RIGHT


@pytest.mark.slow
def test_a_replica_hangs(servers):  # [2]
    three = servers({}, {}, {})
    streamed = Streamed(three, attempt_timeout=3.0)
    streamed.after(30, three[0].pause)
    assert streamed.run() == RIGHT
    assert 0 < streamed.counts["fault_timeout"] <= 12, "one round of requests, and then none"


@pytest.mark.slow
def test_a_replica_that_hung_goes_on(servers):  # [2, 20]
    """Its answers come when others have given theirs; they are ignored."""
    three = servers({}, {}, {})
    streamed = Streamed(three, hedge=True, attempt_timeout=5.0)
    streamed.after(60, three[0].pause)
    streamed.after(100, three[0].go_on)
    assert streamed.run() == RIGHT


# Every other fault, beside a good server: tests/unit/rewards/test_http_scorer.py.
@pytest.mark.slow_parameters("another group", "another version", "nothing")
@pytest.mark.parametrize(
    "fault", ["500", "429", "NaN", "half a body", "another group", "another version", "nothing"]
)
def test_a_replica_answers_wrongly(servers, fault):  # [3, 5, 6, 7, 8, 10, 11]
    two = servers({"fault": fault, "share": 1.0}, {})
    streamed = Streamed(two)
    assert streamed.run(GROUPS[:60], until="fault_") == RIGHT[:60]


@pytest.mark.parametrize("fault", ["500", "half a body"])
def test_every_replica_fails_three_times_in_ten(servers, fault):  # [5, 6]
    settings = [{"fault": fault, "share": 0.3, "seed": seed} for seed in range(3)]
    streamed = Streamed(servers(*settings))
    assert streamed.run(GROUPS[:80]) == RIGHT[:80]
    assert streamed.counts["attempts"] > 80


@pytest.mark.slow
def test_a_server_is_restarted_with_another_model_under_the_same_version(servers):  # [12]
    one, other = servers({}, {})
    known = tuple(score.value for score in right_scores([CanaryGroup().group])[0])
    streamed = Streamed([one, other], canary=CanaryGroup(values_G=known))

    def become_another():
        one.kill()
        one.start(weight=-1.0)

    streamed.after(30, become_another)
    assert streamed.run(until="fault_canary") == RIGHT


@pytest.mark.slow
def test_a_rolling_restart(servers):  # [21, 22]
    """Each in turn is killed and started again while the others score: no request is lost."""
    three = servers({}, {}, {})

    async def stream(scorer, is_over):
        while not is_over.is_set():
            assert await scorer.score(GROUPS) == RIGHT

    async def main():
        scorer = HttpScorer([s.url for s in three], options=RouterOptions(window=4, version="1"))
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stream(scorer, is_over))
            for name, server in zip(list(scorer.replica_health), three, strict=True):
                await asyncio.to_thread(server.kill)
                assert await scorer.score(GROUPS) == RIGHT
                await asyncio.to_thread(server.start)
                while not scorer.replica_health[name].is_usable:
                    assert await scorer.score(GROUPS) == RIGHT
            is_over.set()
        await scorer.aclose()

    asyncio.run(main())


@pytest.mark.slow
def test_poison_takes_down_every_replica_it_meets(servers):  # [16]
    """What kills whoever scores it is found, and takes nothing else with it."""
    poisoned = [question("P", "answer 1", "answer 7", "answer 3"), *GROUPS]
    three = servers(*({"poison": "answer 7"} for _ in range(3)))
    with restarting(three) as deaths:
        scores = Streamed(three).run(poisoned)
    right = right_scores(poisoned)
    assert scores[1:] == right[1:]
    assert (scores[0][0], scores[0][2]) == (right[0][0], right[0][2])
    assert failure_reason(scores[0][1].failure) == "poison"
    # Two of all of them, two of the half that holds it, and three of it alone.
    assert 3 <= len(deaths) <= 9


@contextmanager
def restarting(servers):
    """Start whoever dies again, and note it."""
    deaths, is_over = [], threading.Event()

    def watch():
        while not is_over.wait(0.01):
            for server in servers:
                if server.has_died:
                    deaths.append(server.port)
                    server.kill()
                    server.start()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield deaths
    finally:
        is_over.set()
        watching.join()


@pytest.mark.slow
def test_wall_clocks_jump(servers, monkeypatch):  # [28]
    jumps = iter(range(10**9))
    monkeypatch.setattr("time.time", lambda: 2e9 + 3600.0 * (-1) ** next(jumps))
    three = servers({}, {}, {})
    streamed = Streamed(three, hedge=True)
    streamed.after(30, three[0].kill)
    streamed.after(60, three[0].start)
    assert streamed.run() == RIGHT
