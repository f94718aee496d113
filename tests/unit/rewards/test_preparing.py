"""Processes that tokenise: the same tokens, and any of them may die."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import pytest

import scoring_groups
from foreign_servers import foreign_server
from laurel.errors import WorkerError
from laurel.rewards import preparing
from laurel.rewards.loop_scorer import LoopScorer
from laurel.rewards.preparing import WORKER, Prepared, Preparers
from laurel.rewards.remote.dialects import dialect_of
from laurel.rewards.remote.http import HttpScorer
from laurel.rewards.remote.router import CanaryGroup, RouterOptions
from laurel.types import Completion, Group, Message, Score, group_of
from laurel.workers.spawned import SpawnedGroup
from reward_servers import wait_until

pytestmark = pytest.mark.usefixtures("warm_processes")

GROUPS = [
    group_of((Message("user", f"Number {i}?"),), ("Bread and wine.", "No."), group_id=str(i))
    for i in range(5)
]
NO_TOOLS = Group(
    id="tool",
    prompt=GROUPS[0].prompt,
    completions_G=(
        Completion(messages=(Message("tool", "x"),)),
        Completion(messages=(Message("user", "y"),)),
    ),
)


def plain(prepared: list[Prepared]) -> list[Any]:
    return [
        (
            tokens and (tokens.trunk_ids.tolist(), [b.tolist() for b in tokens.branches_ids_G]),
            failures,
        )
        for tokens, failures in prepared
    ]


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[Preparers, list[str]]]:
    said: list[str] = []
    contract = scoring_groups.local(True).contract
    preparers = Preparers(contract, 2, partial(SpawnedGroup, WORKER), say=said.append)
    yield preparers, said
    preparers.close()


def test_they_prepare_what_one_process_does_and_a_scorer_uses_them(
    workers: tuple[Preparers, list[str]],
) -> None:
    preparers, _ = workers
    here, there = scoring_groups.local(True), scoring_groups.local(True)
    there.preparers = preparers
    for groups in (GROUPS, [NO_TOOLS, *GROUPS], GROUPS[:1], []):
        assert plain(there.prepare(groups)) == plain(here.prepare(groups))
        assert there.score_now(groups) == here.score_now(groups)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[Preparers]:
    """Real ones that are dead and may not be replaced."""
    monkeypatch.setattr(preparing, "MAX_RESTARTS", 0)
    contract = scoring_groups.local(True).contract
    preparers = Preparers(contract, 1, partial(SpawnedGroup, WORKER))
    kill_all(preparers)
    yield preparers
    preparers.close()


def test_when_they_are_lost_too_often_it_is_no_failure_of_a_completion(lost: Preparers) -> None:
    scorer = scoring_groups.local(True)
    scorer.preparers = lost
    with closing(LoopScorer(scorer)) as loop:
        for _ in range(2):
            with pytest.raises(WorkerError, match="reward_worker 0 was lost") as end:
                loop.score_now(GROUPS)
            assert end.value.is_lost
        scorer.preparers = None  # the loop itself goes on
        assert all(
            score.failure is None for scores_G in loop.score_now(GROUPS) for score in scores_G
        )


class Hung:
    """A worker that answers nothing until it is ended."""

    def __init__(self) -> None:
        self.is_asked, self.is_ended = threading.Event(), threading.Event()

    def call_one(self, rank: int, method: str, *arguments: Any) -> Any:
        self.is_asked.set()
        self.is_ended.wait()
        raise WorkerError("it was ended")

    def shutdown(self) -> None:
        self.is_ended.set()


def test_they_are_ended_in_the_middle_of_a_call_that_hangs() -> None:
    hung: Any = Hung()
    preparers = Preparers(scoring_groups.local(True).contract, 1, lambda *_: hung)
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            preparers.prepare(GROUPS)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for work in (ask, preparers.close)]
    threads[0].start()
    assert hung.is_asked.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(failures) == 1


@pytest.mark.parametrize("has_canary", [False, True])
def test_servers_are_not_to_blame_for_them(lost: Preparers, has_canary: bool) -> None:
    options = RouterOptions(canary=CanaryGroup() if has_canary else None)
    with (
        foreign_server("vllm", scoring_groups.local(True).contract) as server,
        pytest.raises(WorkerError, match="reward_worker 0 was lost"),
    ):
        asyncio.run(scored_by_servers(server.url, "vllm", GROUPS, lost, options=options))
    assert server.asked == []


async def scored_by_servers(
    url: str,
    protocol: str,
    asked: Sequence[Group],
    preparers: Preparers | None,
    options: RouterOptions | None = None,
) -> list[tuple[Score, ...]]:
    scorer = HttpScorer(
        url,
        dialect_of(protocol, contract=scoring_groups.local(True).contract, preparers=preparers),
        preparers=preparers,
        options=options,
    )
    try:
        return await scorer.score(asked)
    finally:
        await scorer.aclose()


def all_have_worked(preparers: Preparers) -> bool:
    """Whether each has done something since it was started, after one more that somebody has done.

    One that is lost again before it has done anything is given up.
    """
    preparers.prepare(GROUPS)
    return all(
        replica.state == "ready" and replica.last_failure is None
        for replica in preparers.workers.replicas
    )


def kill_all(preparers: Preparers) -> None:
    wait_until(lambda: all_have_worked(preparers), seconds=60)
    for replica in preparers.workers.replicas:
        group = replica.value
        assert isinstance(group, SpawnedGroup)
        group._process.kill()
        group._process.wait()
