"""Replicas of a reward model in processes: any of them may die, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest

import scoring_groups
from event_loops import in_loop
from laurel.errors import EnvironmentFailedError, WorkerError
from laurel.models.parallel.mesh import ParallelShape
from laurel.rewards import preparing
from laurel.rewards.loop_scorer import LoopScorer, OneModelDesk
from laurel.rewards.preparing import WORKER, Preparers
from laurel.rewards.replicas import ScoringCrew
from laurel.rewards.scorer import ContractScorer, LocalScorer
from laurel.types import Group, Message, Score, TokenGroup, group_of
from laurel.workers.spawned import SpawnedGroup
from process_group import ProcessGroup

NEAR = 1e-5


def groups(count: int, *, first: int = 0) -> list[Group]:
    said = ("By the gate.", "No.", "In the river, an old man says")
    return [
        group_of((Message("user", f"Where is number {i}?"),), said, group_id=str(i))
        for i in range(first, first + count)
    ]


def values(scorer: ContractScorer, asked: Sequence[Group]) -> list[float | None]:
    return [score.value for scores_G in scorer.score_now(asked) for score in scores_G]


class Made:
    """A crew of real processes, and what became of it."""

    def __init__(
        self, num_replicas: int, *, batch_timeout: float | None = None, **options: Any
    ) -> None:
        self.batch_timeout = batch_timeout
        self.groups: list[ProcessGroup] = []
        self.of: dict[int, ProcessGroup] = {}
        self.said: list[str] = []
        self.before_making: Callable[[], None] = lambda: None
        self.crew = ScoringCrew(self.make, num_replicas, say=self.said.append, **options)
        self.scorer = LoopScorer(self.crew)

    def make(self, index: int) -> ContractScorer:
        if len(self.of) > index:
            self.before_making()

        def group(worker: Any, *args: Any, **kwargs: Any) -> ProcessGroup:
            self.of[index] = ProcessGroup("reward_model", 1, worker, *args, **kwargs)
            self.groups.append(self.of[index])
            return self.of[index]

        return scoring_groups.grouped(
            group, shape=ParallelShape(), batch_timeout=self.batch_timeout
        )

    def kill(self, index: int) -> None:
        for process in self.of[index]._processes:
            process.kill()
            process.join(10)

    def close(self) -> None:
        self.scorer.close()
        for group in self.groups:
            group.kill()


@pytest.fixture
def crew() -> Iterator[Callable[..., Made]]:
    made: list[Made] = []

    def make(*args: Any, **kwargs: Any) -> Made:
        made.append(Made(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_two_replicas_score_as_one_model_and_both_work(crew: Callable[..., Made]) -> None:
    made, asked = crew(2), groups(12)
    expected = values(scoring_groups.local(True), asked)
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda g: values(made.scorer, [g]), asked))
    assert [v for one in found for v in one] == pytest.approx(expected, abs=NEAR)
    standings = made.crew._router.standings.values()
    assert all(len(standing.seconds) > 0 for standing in standings), "one had nothing to do"


def test_a_killed_replica_is_started_again_and_nothing_is_lost_or_doubled(
    crew: Callable[..., Made],
) -> None:
    made, asked = crew(2), groups(60)
    expected = values(scoring_groups.local(True), asked)
    verdicts: Counter[int] = Counter()
    killed = threading.Event()

    def ask(index: int) -> list[float | None]:
        if index == 20:
            made.kill(0)
            killed.set()
        found = values(made.scorer, [asked[index]])
        verdicts[index] += 1
        return found

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ask, range(60)))
    assert killed.is_set()
    assert set(verdicts.values()) == {1}
    assert len(verdicts) == 60
    assert [v for one in found for v in one] == pytest.approx(expected, abs=NEAR)
    made.crew.replicas[0].is_up.wait(60)
    made.kill(1)  # only the one that was started again is there now
    for first in range(100, 400, 3):  # until it is asked for some that nobody remembers
        some = groups(3, first=first)
        assert values(made.scorer, some) == pytest.approx(
            values(scoring_groups.local(True), some), abs=NEAR
        )
        if made.crew.restarts.number == 2:
            break
    assert made.crew.restarts.number == 2
    assert made.said[0].startswith(
        "reward_model replica 0 was lost (reward_model rank 0 of 1 died in score"
    )
    assert "restart 1 of 3 at most" in made.said[0]


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_replica_that_hangs_is_started_again_in_its_time(
    crew: Callable[..., Made], num_replicas: int
) -> None:
    made, asked = crew(num_replicas, batch_timeout=10.0), groups(20)
    expected = values(scoring_groups.local(True), asked)
    (stopped,) = made.of[0]._processes
    assert stopped.pid is not None
    os.kill(stopped.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda g: values(made.scorer, [g]), asked))
    assert [v for one in found for v in one] == pytest.approx(expected, abs=NEAR)
    assert made.crew.restarts.number == 1
    assert "no answer from rank 0 of 1 in score within 10 s" in made.said[0]
    assert not stopped.is_alive()


@pytest.mark.slow
def test_the_only_replica_is_waited_for(crew: Callable[..., Made]) -> None:
    made, asked = crew(1), groups(2)
    made.kill(0)
    expected = values(scoring_groups.local(True), asked)
    assert values(made.scorer, asked) == pytest.approx(expected, abs=NEAR)
    assert made.crew.restarts.number == 1


def test_when_none_is_left_it_is_an_error_that_says_so(crew: Callable[..., Made]) -> None:
    made = crew(2, max_restarts=0)
    made.kill(0)
    assert None not in values(made.scorer, groups(8)), "the other one did it"
    made.kill(1)
    with pytest.raises(WorkerError, match="no restart: 0 restarts are the limit of a run") as end:
        made.scorer.score_now(groups(8, first=50))  # none that it remembers
    assert end.value.exit_code == 75
    assert end.value.is_lost
    with pytest.raises(WorkerError, match="no other replica is left"):
        made.scorer.directly(lambda scorer: scorer.score_exactly(groups(1)))


def test_a_replica_that_fails_in_the_same_way_at_once_is_given_up(
    crew: Callable[..., Made],
) -> None:
    made = crew(1)

    def fail() -> None:
        raise WorkerError("no memory", exit_code=75)

    made.before_making = fail
    made.kill(0)
    with pytest.raises(WorkerError, match="failed in the same way"):
        made.scorer.score_now(groups(1))
    assert made.crew.restarts.number == 2


@pytest.mark.slow
def test_what_is_asked_directly_outlives_a_replica_too(crew: Callable[..., Made]) -> None:
    made = crew(2)
    made.kill(0)
    exact = made.scorer.score_exactly(groups(2))
    expected = scoring_groups.local(True).score_exactly(groups(2))
    assert [s.value for row in exact for s in row] == pytest.approx(
        [s.value for row in expected for s in row], abs=NEAR
    )
    made.crew.replicas[0].is_up.wait(60)


@pytest.mark.slow
def test_replicas_rest_and_one_that_was_lost_meanwhile_is_there_afterwards(
    crew: Callable[..., Made],
) -> None:
    made = crew(2)
    with made.scorer.resting():
        made.kill(1)
    assert None not in values(made.scorer, groups(6))
    assert made.crew.restarts.number == 1


class Sleeper(LocalScorer):
    """Says what it is told, computes when it is let, and may die when it is to sleep."""

    def __init__(self, *, dies: bool = False) -> None:
        like = scoring_groups.local(True)
        super().__init__(like.model, like.contract, batch_tokens=scoring_groups.BATCH_TOKENS)
        self.said: list[str] = []
        self.begun, self.may_go = threading.Event(), threading.Event()
        self.may_go.set()
        self._dies = dies

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        self.said.append("score")
        self.begun.set()
        assert self.may_go.wait(20), "nobody let it go on"
        return super().score_tokens(tokens)

    def sleep(self) -> None:
        if self._dies:
            raise WorkerError("it died", role="reward_model", exit_code=75)
        self.said.append("sleep")

    def wake(self) -> None:
        self.said.append("wake")


def test_one_that_is_started_again_while_they_rest_rests_too() -> None:
    made: list[Sleeper] = []

    def make(_: int) -> ContractScorer:
        made.append(Sleeper(dies=not made))
        return made[-1]

    crew = ScoringCrew(make, 1, say=lambda _: None)
    scorer = LoopScorer(crew)
    try:
        with scorer.resting():
            assert made[1].said == ["sleep"]
            assert crew.replicas[0]._batcher.is_asleep
        assert None not in values(scorer, groups(1))
        assert made[1].said == ["sleep", "wake", "score"]
        assert crew.restarts.number == 1
    finally:
        scorer.close()


@in_loop
async def test_nothing_is_under_way_while_they_rest_and_nothing_is_lost() -> None:
    one = Sleeper()
    crew = ScoringCrew(lambda _: one, 1)
    asked = groups(3)
    expected = [row[0].value for row in scoring_groups.local(True).score_now(asked)]
    one.may_go.clear()
    async with aclosing(crew):
        first = asyncio.create_task(crew.score(asked[:1]))
        assert await asyncio.to_thread(one.begun.wait, 20)
        second = asyncio.create_task(crew.score(asked[1:2]))
        (standing,) = crew._router.standings.values()
        while standing.in_flight < 2:
            await asyncio.sleep(0)
        resting = asyncio.create_task(crew.set_asleep(True))
        while not first.done() and standing.in_flight:  # what is being computed ends all the same
            await asyncio.sleep(0)
        one.may_go.set()
        await resting
        third = asyncio.create_task(crew.score(asked[2:]))
        assert (standing.in_flight, one.said) == (0, ["score", "sleep"])
        await crew.set_asleep(False)
        found = [(await task)[0][0].value for task in (first, second, third)]
        assert found == pytest.approx(expected, abs=NEAR)
        # What had been computed when they went to rest is not computed again.
        assert crew.replicas[0]._batcher.stats().computed == 3 * 3


def test_who_renders_for_all_is_lost_and_no_replica_is_to_blame(
    crew: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "MAX_RESTARTS", 0)
    made = crew(2)
    contract = scoring_groups.local(True).contract
    preparers = Preparers(contract, 1, partial(SpawnedGroup, WORKER))
    try:
        for replica in made.crew.replicas:
            replica.scorer.preparers = preparers
        (group,) = preparers.groups
        assert isinstance(group, SpawnedGroup)
        group._process.kill()
        group._process.wait()
        for ask in (made.scorer.score_now, made.scorer.prepare):
            with pytest.raises(WorkerError, match="reward_worker 0 was lost") as end:
                ask(groups(1))
            assert end.value.is_lost
        assert made.crew._router.counts["attempts"] == 1
        assert made.crew.restarts.number == 0
    finally:
        preparers.close()


@pytest.mark.slow
def test_one_that_is_back_as_all_ends_ends_too(crew: Callable[..., Made]) -> None:
    made = crew(1)
    restart = made.crew.restart
    closing = threading.Thread(target=made.scorer.close)

    def restart_and_close(*lost: Any) -> tuple[ContractScorer, bool] | None:
        scorer = restart(*lost)
        closing.start()
        while not made.crew.is_closed:
            time.sleep(0.001)
        return scorer

    made.crew.restart = restart_and_close  # type: ignore[method-assign]
    made.kill(0)
    with pytest.raises(EnvironmentFailedError, match="closed"):
        made.scorer.score_now(groups(1))
    closing.join(60)
    assert not closing.is_alive()
    assert made.crew.replicas[0]._restarting is not None
    assert not made.crew.replicas[0]._restarting.is_alive(), "the end waits for it"
    for thread in threading.enumerate():
        if thread.name == "laurel-restart":
            thread.join(60)
    assert len(made.groups) == 2
    assert not any(process.is_alive() for group in made.groups for process in group._processes)
    assert not [thread for thread in threading.enumerate() if thread.name == "laurel-batcher"]


@pytest.mark.parametrize("packing", [True, False], ids=["forest", "padded"])
def test_one_model_in_this_process_merges_what_many_threads_ask(packing: bool) -> None:
    asked = groups(16)
    expected = values(scoring_groups.local(packing), asked)
    scorer = LoopScorer(OneModelDesk(scoring_groups.local(packing)))
    try:
        apart = [
            Group(id=g.id, prompt=g.prompt, completions_G=(c,))
            for g in asked
            for c in g.completions_G
        ]
        with ThreadPoolExecutor(16) as threads:
            found = list(threads.map(lambda g: values(scorer, [g]), apart))
        assert [v for one in found for v in one] == pytest.approx(expected, abs=NEAR)
        assert scorer.path == ("forest" if packing else "padded")
        with scorer.resting():
            pass
        assert scorer.directly(lambda model: model.score_now(asked[:1]))[0][0].value == (
            pytest.approx(expected[0], abs=NEAR)
        )
    finally:
        scorer.close()
        scorer.close()
