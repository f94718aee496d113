"""Which completions go to an environment together, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.errors import WorkerError
from laurel.grpo.grading import (
    MAX_PARTS,
    Calls,
    RolloutInProgress,
    RolloutStats,
    copy_reward_to_duplicates,
    parts_to_grade,
)
from laurel.types import JudgingUnit, Message, RolloutGroup, StepReward, Task
from policy_fakes import SAMPLING, Judge, Say, ScriptedGenerator, rollouts_of, saying, task


def play(
    judge: Judge, script: Any, tasks: Sequence[Task], *, num_generations: int, **options: Any
) -> list[RolloutGroup]:
    """What a generator, or one that says what a script says, is rewarded with."""
    generator = script if isinstance(script, ScriptedGenerator) else ScriptedGenerator(script)
    rollouts = rollouts_of(generator, judge=judge, **options)
    playing = rollouts.play(
        tasks, num_generations=num_generations, sampling=SAMPLING, batch=(0, 0, 0)
    )
    try:
        return asyncio.run(asyncio.wait_for(playing, 20))
    finally:
        rollouts.close()


def by_length(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
    return {"reward": float(len(text))}


def test_nothing_is_judged_before_the_last_completion_of_the_batch() -> None:
    drawn: list[int] = []
    generator = ScriptedGenerator(
        lambda request: [(i, Say("a" * (i + 1))) for i in range(len(request.seeds_G))]
    )
    judge = Judge(
        by_length, judges="batch", before=lambda texts: drawn.append(len(generator.events))
    )
    groups = play(judge, generator, [task(str(i)) for i in range(5)], num_generations=3)
    assert [len(call) for call in judge.calls] == [15], "one call for the whole batch"
    assert drawn == [15]
    assert [[r.reward for r in g.rollouts_G] for g in groups] == [[1.0, 2.0, 3.0]] * 5
    prompts = [log[0]["content"] for log in judge.logs]
    assert sorted(prompts) == sorted(str(i) for i in range(5) for _ in range(3))


def test_each_environment_has_its_own_call_and_the_others_do_not_wait() -> None:
    late, soon = Judge(by_length, judges="batch"), Judge(by_length)

    def script(request: Any) -> list[Any]:
        waits = None if request.id.endswith("-0") else (lambda: bool(soon.calls))
        return [(i, Say("ab", after=waits)) for i in range(len(request.seeds_G))]

    tasks = [task("a", name="soon"), task("b", name="late"), task("c", name="late")]
    play(late, script, tasks, num_generations=2, environments={"late": late, "soon": soon})
    assert [len(call) for call in late.calls] == [4]
    assert [len(call) for call in soon.calls] == [2]


def test_later_turns_of_such_an_environment_go_on_one_by_one() -> None:
    def twice(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
        turn = metadata.get("turn", 1)
        return {"reward": 1.0, "over": turn == 2, "metadata": {"turn": turn + 1}}

    judge = Judge(twice, judges="batch")
    groups = play(judge, saying("ab"), [task("a"), task("b")], num_generations=2, max_turns=3)
    assert [len(call) for call in judge.calls] == [4, 1, 1, 1, 1]
    assert {r.reward for g in groups for r in g.rollouts_G} == {2.0}


def test_one_call_that_fails_fails_all_of_the_batch_and_a_lost_worker_ends_it() -> None:
    def breaks(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("broken")

    judge = Judge(breaks, judges="batch")
    groups = play(judge, saying("ab"), [task("a"), task("b")], num_generations=2)
    failures = {r.failure for g in groups for r in g.rollouts_G}
    assert len(failures) == 1
    assert "ValueError: broken" in str(failures.pop())

    def dies(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
        raise WorkerError("gone", exit_code=WorkerError.LOST_EXIT_CODE)

    with pytest.raises(WorkerError, match="gone"):
        play(Judge(dies, judges="batch"), saying("ab"), [task("a"), task("b")], num_generations=2)


def test_a_whole_batch_may_take_as_long_as_its_groups() -> None:
    from threading import Event

    never = Event()
    judge = Judge(by_length, judges="batch", before=lambda texts: bool(never.wait(30)))
    groups = play(
        judge,
        saying("ab"),
        [task(str(i)) for i in range(3)],
        num_generations=2,
        environment_timeout=0.1,
    )
    never.set()
    reason = groups[0].rollouts_G[0].failure
    assert reason == "timeout: no verdict within 0.3 s (env.timeout_seconds)"


@given(st.integers(1, 40), st.sampled_from(get_args(JudgingUnit)))
def test_parts_hold_each_once_and_do_not_depend_on_anything_else(
    size: int, judges: JudgingUnit
) -> None:
    rollouts = [RolloutInProgress(index=i, metadata=None) for i in range(size)]
    parts = parts_to_grade(Judge(judges=judges), rollouts)
    assert [rollout for part in parts for rollout in part] == rollouts
    assert all(parts)
    if judges == "part":
        assert min(size, 2) <= len(parts) <= MAX_PARTS
    else:
        assert len(parts) == (size if judges == "completion" else 1)


def test_a_part_is_judged_while_another_is_still_being_drawn() -> None:
    judge = Judge(by_length, judges="part")

    def script(request: Any) -> list[Any]:
        # The first to end are of all parts; the last one ends when the other parts were judged.
        waits: Callable[[], bool] = lambda: len(judge.calls) == 3  # noqa: E731
        others = [(i, Say("w" * i)) for i in (4, 5, 6, 7)]
        return [
            (0, Say("a")),
            (2, Say("ab")),
            (3, Say("abc")),
            *others,
            (1, Say("abcd", after=waits)),
        ]

    groups = play(judge, script, [task()], num_generations=8)
    assert sorted(judge.calls[:3]) == [["ab", "abc"], ["w" * 4, "w" * 5], ["w" * 6, "w" * 7]]
    assert judge.calls[3:] == [["a", "abcd"]]
    assert [r.reward for r in groups[0].rollouts_G] == [1.0, 4.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_parts_that_are_short_beside_their_prompt_go_together() -> None:
    """The prompt has 2 tokens: a part is worth a call of its own from 4 on."""
    texts = ["a", "b", "cc", "dd", "e", "f", "ggg", "h"]
    expected = [["a", "b", "e", "f"], ["cc", "dd"], ["ggg", "h"]]
    for order in (range(8), reversed(range(8)), (7, 0, 3, 5, 6, 1, 4, 2)):
        judge = Judge(by_length, judges="part")

        def script(request: Any, order: Any = tuple(order)) -> list[Any]:
            return [(i, Say(texts[i])) for i in order]

        groups = play(judge, script, [task()], num_generations=8)
        assert sorted(judge.calls) == expected, "whoever ends first"
        assert [r.reward for r in groups[0].rollouts_G] == [float(len(t)) for t in texts]


class Noisy(Judge):
    """Never gives the same reward twice."""

    def __init__(self, **options: Any) -> None:
        self.given = 0

        def verdict(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
            self.given += 1
            failed = {"failure": "no"} if text == "bad" else {}
            return {"reward": float(self.given), "note": {"given": self.given}, **failed}

        super().__init__(verdict, **options)


def test_another_word_for_what_is_judged_is_refused() -> None:
    with pytest.raises(ValueError, match="judges='alone' must be one of completion, part, group"):
        Judge(judges="alone")  # type: ignore[arg-type]


def test_agreeing_keeps_components_apart() -> None:
    rollouts = [
        RolloutInProgress(
            index=i, metadata=None, messages=[Message("assistant", "x")], reward=float(i)
        )
        for i in range(2)
    ]
    rollouts[0].components = {"a": 1.0}
    rollouts[0].steps, rollouts[1].steps = [StepReward(3, 0.5)], [StepReward(4, 0.25)]
    copy_reward_to_duplicates(rollouts)
    rollouts[1].components["a"] = 5.0
    assert (rollouts[0].components, rollouts[1].reward) == ({"a": 1.0}, 0.0)
    assert rollouts[1].steps == [StepReward(4, 0.5)], "its own tokens, the first's reward"


def test_the_time_of_calls_side_by_side_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("laurel.grpo.grading.time.monotonic", lambda: now[0])
    stats = RolloutStats()
    calls = Calls(stats, 4)
    with calls.one():
        now[0] = 1.0
        with calls.one():
            now[0] = 3.0
        now[0] = 4.0
    now[0] = 10.0
    with calls.one():
        now[0] = 11.0
    assert (stats.environment, stats.judging) == (4.0 + 2.0 + 1.0, 5.0)


def test_what_says_the_same_gets_the_same_reward_where_it_was_judged_apart() -> None:
    texts = saying("x", "y", "x", "bad", "y", "bad")
    for judges in ("completion", "part"):
        groups = play(Noisy(judges=judges), texts, [task("a"), task("b")], num_generations=6)
        for group in groups:
            rewards = [r.reward for r in group.rollouts_G]
            assert rewards[0] == rewards[2]
            assert rewards[1] == rewards[4]
            assert rewards[0] != rewards[1]
            assert rewards[3] is rewards[5] is None
            judged = [r for r in group.rollouts_G if r.reward is not None]
            assert [r.note["given"] for r in judged] == [r.reward for r in judged]
        apart = {g.rollouts_G[0].reward for g in groups}
        assert len(apart) == 2, "groups have nothing to do with each other"
    for judges in ("group", "batch"):  # who judges a whole group may tell them apart
        (group,) = play(Noisy(judges=judges), saying("x", "x"), [task()], num_generations=2)
        assert [r.reward for r in group.rollouts_G] == [1.0, 2.0]
