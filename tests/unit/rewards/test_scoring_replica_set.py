"""Replicas of a reward model in processes: any of them may die, and nothing is lost or doubled."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import pytest

import scoring_groups
from laurel.errors import WorkerError
from laurel.models.spec import ParallelShape
from laurel.rewards import preparing
from laurel.rewards.loop_scorer import LoopScorer
from laurel.rewards.preparing import WORKER, Preparers
from laurel.rewards.replicas import scoring_replicas
from laurel.rewards.scorer import ContractScorer, LocalScorer
from laurel.types import Group, Message, Score, TokenGroup, group_of
from laurel.workers.spawned import SpawnedGroup
from process_group import ProcessGroup
from reward_servers import wait_until

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
    """A replica set of real processes, and what became of it."""

    def __init__(
        self, num_replicas: int, *, batch_timeout: float | None = None, **options: Any
    ) -> None:
        self.batch_timeout = batch_timeout
        self.groups: list[ProcessGroup] = []
        self.of: dict[int, ProcessGroup] = {}
        self.said: list[str] = []
        self.before_making: Callable[[], None] = lambda: None
        self.replicas = scoring_replicas(self.make, num_replicas, say=self.said.append, **options)
        self.scorer = LoopScorer(self.replicas)

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

    def until_all_are_ready(self) -> None:
        wait_until(lambda: self.replicas.num_ready == len(self.replicas.replicas), seconds=60)

    def kill(self, index: int) -> None:
        for process in self.of[index]._processes:
            process.kill()
            process.join(10)

    def close(self) -> None:
        self.scorer.close()
        for group in self.groups:
            group._kill()


@pytest.fixture
def replica_set() -> Iterator[Callable[..., Made]]:
    made: list[Made] = []

    def make(*args: Any, **kwargs: Any) -> Made:
        made.append(Made(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_killed_replica_is_started_again_and_nothing_is_lost_or_doubled(
    replica_set: Callable[..., Made],
) -> None:
    made, asked = replica_set(2), groups(60)
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
    made.until_all_are_ready()
    made.kill(1)  # only the one that was started again is there now
    for first in range(100, 400, 3):  # until it is asked for some that nobody remembers
        some = groups(3, first=first)
        assert values(made.scorer, some) == pytest.approx(
            values(scoring_groups.local(True), some), abs=NEAR
        )
        if made.replicas.restarts.number == 2:
            break
    assert made.replicas.restarts.number == 2
    assert made.said[0].startswith(
        "reward_model replica 0 was lost (reward_model rank 0 of 1 died in score"
    )
    assert "restart 1 of 3 at most" in made.said[0]


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

    replicas = scoring_replicas(make, 1, say=lambda _: None)
    with closing(LoopScorer(replicas)) as scorer:
        with scorer.resting():
            assert made[1].said == ["sleep"]
            assert scorer.batcher.is_asleep
        assert None not in values(scorer, groups(1))
        assert made[1].said == ["sleep", "wake", "score"]
        assert replicas.restarts.number == 1


def test_nothing_is_under_way_while_they_rest_and_nothing_is_lost() -> None:
    one = Sleeper()
    scorer = LoopScorer(scoring_replicas(lambda _: one, 1))
    asked = groups(3)
    expected = [row[0].value for row in scoring_groups.local(True).score_now(asked)]
    one.may_go.clear()
    with ThreadPoolExecutor(4) as threads:
        tasks = [threads.submit(scorer.score_now, asked[:1])]
        assert one.begun.wait(20)
        tasks.append(threads.submit(scorer.score_now, asked[1:2]))
        while scorer.batcher.stats().waiting < 6:
            time.sleep(0.001)
        resting = threads.submit(scorer.batcher.sleep_now)
        while not scorer.batcher.is_asleep:
            time.sleep(0.001)
        assert one.said == ["score"], "what is being computed ends first"
        one.may_go.set()
        resting.result(20)
        tasks.append(threads.submit(scorer.score_now, asked[2:]))
        assert one.said == ["score", "sleep"]
        scorer.batcher.wake_now()
        found = [task.result(20)[0][0].value for task in tasks]
    assert found == pytest.approx(expected, abs=NEAR)
    assert scorer.batcher.stats().computed == 3 * 3
    scorer.close()


def test_who_renders_for_all_is_lost_and_no_replica_is_to_blame(
    replica_set: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "MAX_RESTARTS", 0)
    made = replica_set(2)
    contract = scoring_groups.local(True).contract
    with closing(Preparers(contract, 1, partial(SpawnedGroup, WORKER))) as preparers:
        for replica in made.replicas.replicas:
            replica.value.preparers = preparers
        group = preparers.workers.replicas[0].value
        assert isinstance(group, SpawnedGroup)
        group._process.kill()
        group._process.wait()
        direct = partial(made.scorer.directly, lambda scorer: scorer.prepare(groups(1)))
        for ask in (partial(made.scorer.score_now, groups(1)), direct):
            with pytest.raises(WorkerError, match="reward_worker 0 was lost") as end:
                ask()
            assert end.value.is_lost
        assert made.replicas.restarts.number == 0
