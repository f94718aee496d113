"""Playing tasks with a scripted generator and scripted environments."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.environments.interface import EnvironmentInterface
from laurel.errors import DataError, EngineError, EnvironmentFailedError, WorkerError
from laurel.grpo.grading import RolloutStats
from laurel.grpo.rollouts import Rollouts
from laurel.types import (
    EnvironmentReturn,
    EnvironmentSpec,
    GenerationRequest,
    RolloutGroup,
    SamplingParams,
    Task,
)
from policy_fakes import (
    SAMPLING,
    ByteChat,
    Judge,
    Say,
    ScriptedGenerator,
    ids_of,
    rollouts_of,
    saying,
    task,
)

OFTEN_FAILS = {"max_failed_share": 1.0}


def play(
    rollouts: Rollouts, tasks: Sequence[Task], *, num_generations: int = 2, **options: Any
) -> list[RolloutGroup]:
    """Play once, and see to it that nothing is left: no task, no request, no thread, no noise."""
    complaints: list[Any] = []

    async def all_of_it() -> list[RolloutGroup]:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        defaults: dict[str, Any] = {"sampling": SAMPLING, "batch": (0, 0, 0)}
        try:
            playing = rollouts.play(tasks, num_generations=num_generations, **(defaults | options))
            groups = await asyncio.wait_for(playing, 20)
            rollouts.check_failures(groups)
            return groups
        finally:
            left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            assert not left, left

    try:
        return asyncio.run(all_of_it())
    finally:
        rollouts.close()
        assert not getattr(rollouts.generator, "open", None), "a request was not closed"
        assert not complaints


def threads_called(name: str) -> list[threading.Thread]:
    """Threads that are alive, after a moment to end."""
    for _ in range(2000):
        found = [t for t in threading.enumerate() if t.name == name]
        if not found:
            return []
        time.sleep(0.01)
    return found


def test_one_turn_becomes_a_rollout_with_its_tokens_reward_and_origin() -> None:
    generator = ScriptedGenerator(saying("yes", "no!"), weight_version=5)
    judge = Judge(lambda text, m: {"reward": len(text) + m["extra"], "answer": text.upper()})
    (group,) = play(rollouts_of(generator, judge=judge), [task("hi", extra=0.5)])
    assert group.prompt_ids.tolist() == ids_of("hi>").tolist()
    first, second = group.rollouts_G
    assert first.messages[0].role == "assistant"
    assert [r.messages[0].content for r in group.rollouts_G] == ["yes", "no!"]
    assert first.ids_L.tolist() == ids_of("yes").tolist()
    assert first.ids_L.dtype == np.int32
    assert first.mask_L.tolist() == [True] * 3
    assert first.logprobs_L.tolist() == [-0.5] * 3
    assert (first.reward, second.reward) == (3.5, 3.5)
    assert (first.answer, second.answer) == ("YES", "NO!")
    assert (first.failure, first.truncated, first.num_turns) == (None, False, 1)
    assert first.weight_version == 5
    assert judge.logs[0] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
    ]
    (asked,) = generator.requests
    assert asked.sampling == SAMPLING
    assert (asked.conversations_G, generator.ended) == ((), []), "no further turn will ask for it"


@pytest.mark.parametrize("judges", ["completion", "group", "batch"])
def test_a_greedy_completion_is_sampled_besides_and_scored_with_the_others(judges: str) -> None:
    judge = Judge(lambda text, m: {"reward": len(text)}, judges=judges)
    generator = ScriptedGenerator(
        lambda request: [
            (i, Say("greedy" if request.sampling.temperature == 0 else "ab"[: i + 1]))
            for i in range(len(request.seeds_G))
        ]
    )
    rollouts = rollouts_of(generator, judge=judge)
    groups = play(rollouts, [task("q"), task("r")], with_greedy=True)
    for group in groups:
        assert [one.reward for one in group.rollouts_G] == [1.0, 2.0]
        assert group.greedy is not None
        assert (group.greedy.messages[0].content, group.greedy.reward) == ("greedy", 6.0)
    asked = sorted((r.id, r.sampling.temperature, len(r.seeds_G)) for r in generator.requests)
    assert [(temperature, number) for _, temperature, number in asked] == [
        (SAMPLING.temperature, 2),
        (0.0, 1),
    ] * 2
    assert len({r.id for r in generator.requests}) == 4
    plain = ScriptedGenerator(generator.script)
    play(rollouts_of(plain, judge=Judge()), [task("q"), task("r")])
    # The others are those of a run without it.
    seeds = {r.id: r.seeds_G for r in generator.requests}
    assert all(seeds[r.id] == r.seeds_G for r in plain.requests)


def test_a_greedy_conversation_goes_on_greedily() -> None:
    generator = ScriptedGenerator(saying("a", "b"))
    judge = Judge(counting)
    (group,) = play(rollouts_of(generator, judge=judge, max_turns=3), [task("q")], with_greedy=True)
    temperatures = [r.sampling.temperature for r in generator.requests]
    assert temperatures.count(0.0) == 3
    assert group.greedy is not None
    assert (group.greedy.num_turns, group.greedy.reward) == (3, 6.0)
    assert len({r.id for r in generator.requests}) == len(generator.requests)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_engine_that_dies_beside_a_greedy_request_ends_both(temperature: float) -> None:
    def script(request: GenerationRequest) -> list[Any]:
        dies = request.sampling.temperature == temperature
        return [EngineError("dead")] if dies else saying("a")(request)

    with pytest.raises(EngineError, match="dead"):
        play(rollouts_of(ScriptedGenerator(script)), [task("q")], with_greedy=True)


def counting(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Over after the third turn; what is said and given back depends on the turn."""
    turn = metadata.get("turn", 1)
    return {
        "reward": float(turn),
        "over": turn == 3,
        "metadata": {"turn": turn + 1},
        "observation": {"role": "user", "content": f"t{turn}"},
        "stops": [["A"], None, ["C"]][turn - 1],
    }


def test_turns_go_on_until_the_environment_says_so() -> None:
    generator = ScriptedGenerator(saying("ab"))
    judge = Judge(counting, stop_strings=["first"])
    chat = ByteChat()
    rollouts = rollouts_of(generator, judge=judge, chat=chat, max_turns=9)
    ((rollout,),) = [
        g.rollouts_G
        for g in play(
            rollouts,
            [task("q")],
            num_generations=1,
            sampling=SamplingParams(max_new_tokens=8, stop_strings=("mine",)),
        )
    ]
    text = "ab[t1]>ab[t2]>ab"
    assert rollout.ids_L.tolist() == ids_of(text).tolist(), "the terminal observation is not told"
    expected = [character in "ab" for character in text]
    assert rollout.mask_L.tolist() == expected
    assert rollout.logprobs_L.tolist() == [-0.5 if mine else 0.0 for mine in expected]
    assert [m.role for m in rollout.messages] == ["assistant", "user"] * 2 + ["assistant"]
    assert rollout.reward == 1 + 2 + 3
    assert (rollout.num_turns, rollout.truncated) == (3, False)
    # Each turn continues from all that was said, and stops where the environment said last.
    assert [bytes(r.prompt_ids.tolist()).decode() for r in generator.requests] == [
        "q>",
        "q>ab[t1]>",
        "q>ab[t1]>ab[t2]>",
    ]
    assert [r.sampling.stop_strings for r in generator.requests] == [
        ("mine", "first"),
        ("mine", "A"),
        ("mine", "A"),
    ]
    assert [m.get("turn") for m in judge.metadata] == [None, 2, 3]
    # What a template is shown before the policy's latest turn does not contain that turn.
    assert [[m.content for m in history] for history in chat.histories] == [
        ["q"],
        ["q", "ab", "t1"],
    ]
    assert len({r.id for r in generator.requests}) == 3


def test_turns_with_invalid_calls_are_remembered() -> None:
    generator = ScriptedGenerator(saying("a"))
    judge = Judge(lambda text, m: {**counting(text, m), "invalid": m.get("turn", 1) != 2})
    (group,) = play(
        rollouts_of(generator, judge=judge, max_turns=3), [task("q")], num_generations=1
    )
    assert group.rollouts_G[0].invalid_turns == (0, 2)


def test_several_messages_of_an_environment_are_one_observation() -> None:
    shown: list[Any] = []

    class Showing(ByteChat):
        def prompt_ids(self, conversation: Any, /, *, tools: Any = ()) -> Any:
            shown.append(tools)
            return super().prompt_ids(conversation)

        def observation_ids(self, observation: Any, /, **rest: Any) -> Any:
            shown.append(rest["tools"])
            return super().observation_ids(observation, **rest)

    answers = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]
    judge = Judge(
        lambda text, given: {
            "over": "over" in given,
            "metadata": {"over": True},
            "observation": answers,
        }
    )
    judge.spec = EnvironmentSpec(tools=[{"type": "function"}])
    rollouts = rollouts_of(
        ScriptedGenerator(saying("ab")), judge=judge, chat=Showing(), max_turns=9
    )
    ((rollout,),) = [g.rollouts_G for g in play(rollouts, [task("q")], num_generations=1)]
    assert rollout.ids_L.tolist() == ids_of("ab[45]>ab").tolist()
    assert rollout.mask_L.tolist() == [character in "ab" for character in "ab[45]>ab"]
    said = [(m.role, m.content) for m in rollout.messages]
    assert said == [("assistant", "ab"), ("tool", "4"), ("tool", "5"), ("assistant", "ab")]
    assert rollout.turns == ((0, 0, 2), (3, 7, 9))
    assert judge.logs[-1][1:] == [{"role": role, "content": content} for role, content in said]
    assert shown == [[{"type": "function"}]] * 2


@pytest.mark.parametrize("observation", [[], "4", [{"role": "tool"}], [4], None])
def test_an_observation_that_is_no_messages_fails_its_sample(observation: Any) -> None:
    judge = Judge(lambda text, given: {"over": False, "observation": observation})
    rollouts = rollouts_of(ScriptedGenerator(saying("ab")), judge=judge, max_turns=9, **OFTEN_FAILS)
    (group,) = play(rollouts, [task("q")], num_generations=1)
    assert "is no observation" in (group.rollouts_G[0].failure or "")


def test_conversations_have_a_name_from_their_first_turn_to_their_end() -> None:
    ended_when: list[tuple[int, list[str]]] = []

    class Watching(ScriptedGenerator):
        def end_conversations(self, names: Sequence[str]) -> None:
            ended_when.append((len(self.requests), list(names)))
            super().end_conversations(names)

    generator = Watching(saying("ab"))
    stats = RolloutStats()
    rollouts = rollouts_of(generator, judge=Judge(counting), max_turns=9)
    play(rollouts, [task("q"), task("r")], num_generations=2, stats=stats)
    first = [r for r in generator.requests if len(r.seeds_G) == 2]
    assert [len(r.conversations_G) for r in first] == [2, 2]
    names = {name for r in first for name in r.conversations_G}
    assert len(names) == 4
    further = [r.conversations_G for r in generator.requests if r not in first]
    assert Counter(further) == {(name,): 2 for name in names}, "three turns each"
    assert set(generator.ended) == names
    assert stats.num_repeated == 4 * (len("q>ab[t1]>") + len("q>ab[t1]>ab[t2]>"))
    assert stats.num_cached == 0


def test_a_conversation_ends_also_where_its_group_fails() -> None:
    def script(request: GenerationRequest) -> Sequence[Any]:
        if len(request.seeds_G) == 1:
            return [EngineError("it died")]
        return saying("ab")(request)

    generator = ScriptedGenerator(script)
    with pytest.raises(EngineError, match="it died"):
        play(rollouts_of(generator, judge=Judge(counting), max_turns=9), [task("q")])
    assert set(generator.ended) == set(generator.requests[0].conversations_G) != set()


def test_an_observation_that_no_template_renders_fails_its_own_sample() -> None:
    class Particular(ByteChat):
        def observation_ids(self, observation: Any, /, **rest: Any) -> Any:
            if observation["content"] == "no":
                raise DataError("the template knows no such role")
            return super().observation_ids(observation, **rest)

    def verdict(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
        said = "no" if text == "a" else "yes"
        return {"reward": 1.0, "over": False, "observation": {"role": "user", "content": said}}

    generator = ScriptedGenerator(
        lambda request: list(enumerate([Say("a"), Say("b")][: len(request.seeds_G)]))
    )
    rollouts = rollouts_of(
        generator, judge=Judge(verdict), chat=Particular(), max_turns=2, **OFTEN_FAILS
    )
    (group,) = play(rollouts, [task("q")])
    assert group.rollouts_G[0].failure == "the template knows no such role"
    assert group.rollouts_G[0].reward is None


def test_the_oldest_weights_of_all_turns_are_told() -> None:
    generator = ScriptedGenerator(saying("a"), weight_version=3)

    def newer(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
        generator.weight_version += 1
        return {"over": False}

    (group,) = play(
        rollouts_of(generator, judge=Judge(newer), max_turns=3), [task()], num_generations=1
    )
    assert generator.weight_version == 6
    assert group.rollouts_G[0].weight_version == 3


def test_named_rewards_add_up_and_stay_apart() -> None:
    generator = ScriptedGenerator(saying("a"))
    judge = Judge(
        lambda text, m: {
            "rewards": {"x": 1.5, "y": -1.0},
            "over": bool(m.get("t")),
            "metadata": {"t": 1},
        }
    )
    (group,) = play(rollouts_of(generator, judge=judge, max_turns=3), [task()], num_generations=1)
    (rollout,) = group.rollouts_G
    assert rollout.components == {"x": 3.0, "y": -2.0}
    assert rollout.reward == 1.0


def test_equal_prompts_stay_two_groups_with_draws_of_their_own() -> None:
    generator = ScriptedGenerator(saying("a", "b"))
    tasks = [task("same", task_id="1"), task("same", task_id="2")]
    groups = play(rollouts_of(generator), tasks)
    assert [g.task.id for g in groups] == ["1", "2"]
    assert groups[0].id != groups[1].id
    assert [len(g.rollouts_G) for g in groups] == [2, 2]
    seeds = [seed for request in generator.requests for seed in request.seeds_G]
    assert len(set(seeds)) == 4


def test_metadata_of_a_task_is_not_shared_between_its_completions() -> None:
    generator = ScriptedGenerator(saying("a"))

    def spoil(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
        assert "spoiled" not in metadata
        metadata["spoiled"] = True
        return {}

    asked = task("q", truth="x")
    (group,) = play(rollouts_of(generator, judge=Judge(spoil)), [asked], num_generations=3)
    assert [r.failure for r in group.rollouts_G] == [None] * 3
    assert asked.metadata == {"truth": "x"}


def seeds_of(
    seed: int, batch: tuple[int, ...], num_tasks: int, num_generations: int, turns: int = 1
) -> dict[tuple[int, int, int], int]:
    """The seed of each (task, completion, turn)."""
    generator = ScriptedGenerator(saying("a"))
    judge = Judge(lambda text, m: {"over": False})
    rollouts = rollouts_of(generator, judge=judge, seed=seed, max_turns=turns)
    play(
        rollouts,
        [task(str(i)) for i in range(num_tasks)],
        batch=batch,
        num_generations=num_generations,
    )
    found = {}
    for request in generator.requests:
        index = int(bytes(request.prompt_ids[:1].tolist()).decode())
        turn = bytes(request.prompt_ids.tolist()).count(b"ok")
        parts = request.id.split("-")
        first = int(parts[len(batch) + 1]) if turn else 0
        for g, one in enumerate(request.seeds_G):
            found[index, first + g, turn] = one
    return found


def test_seeds_are_the_same_again_and_all_different() -> None:
    one = seeds_of(7, (0, 3, 0), 4, 5, turns=3)
    assert len(one) == 4 * 5 * 3
    assert seeds_of(7, (0, 3, 0), 4, 5, turns=3) == one
    everything = list(one.values())
    for other in [(8, (0, 3, 0)), (7, (0, 4, 0)), (7, (0, 3, 1)), (7, (1, 3))]:
        everything += seeds_of(*other, 4, 5, turns=3).values()
    assert len(set(everything)) == len(everything)
    assert all(0 <= seed < 2**63 for seed in everything)
    # More tasks or completions change nothing about those that were there.
    assert {k: v for k, v in seeds_of(7, (0, 3, 0), 6, 7, turns=3).items() if k in one} == one


def test_a_completion_judged_alone_goes_on_while_others_of_its_group_are_drawn() -> None:
    judge = Judge(lambda text, m: {"over": text == "b"}, judges="completion")

    def script(request: Any) -> Any:
        if len(request.seeds_G) == 1:
            return [(0, Say("b"))]
        return [(0, Say("a")), (1, Say("b", after=lambda: judge.calls == [["a"], ["b"]]))]

    generator = ScriptedGenerator(script)
    (group,) = play(rollouts_of(generator, judge=judge, max_turns=2), [task()])
    assert [r.num_turns for r in group.rollouts_G] == [2, 1]
    assert [r.truncated for r in group.rollouts_G] == [False, False]


def test_a_group_is_judged_whole_while_other_groups_are_drawn() -> None:
    judge = Judge()

    def script(request: Any) -> Any:
        late = request.prompt_ids[0] == ord("b")
        gate = (lambda: judge.calls == [["a0", "a1"]]) if late else None
        name = "b" if late else "a"
        return [(1, Say(f"{name}1", after=gate)), (0, Say(f"{name}0"))]

    finished: list[str] = []
    groups = play(
        rollouts_of(ScriptedGenerator(script), judge=judge),
        [task("b"), task("a")],
        on_group=lambda group: finished.append(group.task.id),
    )
    assert judge.calls == [["a0", "a1"], ["b0", "b1"]], "whole groups, in the order of completions"
    assert [g.task.id for g in groups] == ["b", "a"], "in the order that was asked for"
    assert finished == ["a", "b"], "told as they are finished"


def test_calls_run_side_by_side_up_to_the_limit() -> None:
    running, most = [0], [0]
    lock = threading.Lock()

    def busy(texts: list[str]) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.1)
        with lock:
            running[0] -= 1

    generator = ScriptedGenerator(saying("a"))
    stats = RolloutStats()
    rollouts = rollouts_of(generator, judge=Judge(before=busy), num_threads=3)
    play(rollouts, [task(str(i)) for i in range(9)], stats=stats)
    assert most[0] == 3
    assert stats.exposed >= 0.28
    assert stats.generation < stats.exposed
    assert not threads_called("environment")


def test_waiting_for_a_thread_is_not_held_against_a_call() -> None:
    generator = ScriptedGenerator(saying("a"))
    slow = Judge(before=lambda texts: time.sleep(0.25))
    rollouts = rollouts_of(generator, judge=slow, num_threads=1, environment_timeout=1.5)
    groups = play(rollouts, [task(str(i)) for i in range(8)])
    assert [r.failure for g in groups for r in g.rollouts_G] == [None] * 16


def fails_for(text: str, raise_it: Any, **options: Any) -> Judge:
    """An environment that misbehaves where a text is among those to judge."""

    def before(texts: list[str]) -> None:
        if text in texts:
            raise_it()

    return Judge(before=before, **options)


def raise_(error: BaseException) -> Any:
    def now() -> None:
        raise error

    return now


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no such thing"), "ValueError: no such thing"),
        (StopIteration(), "RuntimeError: StopIteration: "),
        (SystemExit(3), "RuntimeError: SystemExit: 3"),
        (KeyboardInterrupt(), "RuntimeError: KeyboardInterrupt: "),
        (TimeoutError("the server sleeps"), "TimeoutError: the server sleeps"),
        (asyncio.CancelledError(), "RuntimeError: CancelledError: "),
    ],
)
def test_an_exception_in_a_step_is_a_failure_of_those_samples(
    error: BaseException, reason: str
) -> None:
    generator = ScriptedGenerator(saying("good", "bad"))
    judge = fails_for("bad", raise_(error), judges="completion")
    groups = play(rollouts_of(generator, judge=judge), [task("1"), task("2")])
    for group in groups:
        good, bad = group.rollouts_G
        assert (good.reward, good.failure) == (1.0, None)
        assert bad.reward is None
        assert bad.failure is not None
        assert bad.failure.startswith(reason)
        assert "test_rollouts.py:" in bad.failure, "the line that raised it"
        assert bad.ids_L.tolist() == ids_of("bad").tolist(), "what was said is kept"


def test_a_judge_that_is_lost_ends_the_run_and_one_that_refuses_does_not() -> None:
    """However large a share may fail, and however few it still had to judge."""

    def fail_with(exit_code: int) -> list[RolloutGroup]:
        def verdict(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
            raise WorkerError("reward_model rank 0 of 1: gone", exit_code=exit_code)

        rollouts = rollouts_of(
            ScriptedGenerator(saying("yes")), judge=Judge(verdict), **OFTEN_FAILS
        )
        return play(rollouts, [task("hi")])

    (group,) = fail_with(WorkerError.exit_code)
    assert all("gone" in str(rollout.failure) for rollout in group.rollouts_G)
    with pytest.raises(WorkerError, match="reward_model rank 0 of 1: gone"):
        fail_with(WorkerError.LOST_EXIT_CODE)


def test_a_step_that_takes_too_long_fails_alone_and_its_thread_is_left_behind() -> None:
    free = threading.Event()
    generator = ScriptedGenerator(saying("good", "bad"))
    judge = fails_for("bad", lambda: free.wait(60), judges="completion")
    rollouts = rollouts_of(generator, judge=judge, environment_timeout=0.6, num_threads=1)
    groups = play(rollouts, [task(str(i)) for i in range(3)])
    for group in groups:
        good, bad = group.rollouts_G
        assert (good.reward, good.failure) == (1.0, None)
        assert bad.failure == "timeout: no verdict within 0.6 s (env.timeout_seconds)"
    hanging = [t for t in threading.enumerate() if t.name == "environment"]
    assert len(hanging) == 3, "each was given up in turn, though there is one thread"
    assert all(t.daemon for t in hanging), "no thread may keep the process from ending"
    free.set()
    assert not threads_called("environment")
    assert [r.failure for g in groups for r in g.rollouts_G].count(None) == 3, (
        "too late is too late"
    )


def returning(changes: dict[str, Any] | None) -> Any:
    """An environment whose verdict on two samples is wrong in one respect; or no verdict."""
    good: dict[str, Any] = {
        "observations": [{"role": "user", "content": "ok"}] * 2,
        "metadata": [None] * 2,
        "next_stop_strings": [None] * 2,
        "rewards": torch.ones(2),
        "terminateds": torch.tensor([True, True]),
    }

    class Fixed(Judge):
        def step(self, message_log_batch: Any, metadata: Any) -> Any:
            return None if changes is None else EnvironmentReturn(**(good | changes))

    return Fixed()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rewards": torch.ones(3)}, "returned 3 rewards; expected is a tensor of shape [2], one"),
        ({"rewards": torch.ones(2, 1)}, "returned rewards of shape [2, 1]; expected is"),
        ({"rewards": {"a": torch.ones(2), "b": torch.ones(1)}}, "returned 1 rewards['b']; "),
        ({"rewards": {}}, "returned rewards without any component; expected is"),
        ({"rewards": None}, "returned None as rewards; expected is"),
        ({"observations": []}, "returned 0 observations; expected is a list, one for each of 2"),
        ({"observations": None}, "returned None as observations; expected is a list"),
        ({"terminateds": torch.tensor([True])}, "returned 1 terminateds; expected is"),
        ({"answers": ["x"]}, "returned 1 answers; expected is"),
        (
            {"terminateds": torch.tensor([False, False]), "observations": [{"content": "x"}] * 2},
            "{'content': 'x'} is no observation: a role",
        ),
        (None, "returned None; expected is an EnvironmentReturn with a reward, one for each of 2"),
    ],
)
def test_a_verdict_of_the_wrong_shape_is_a_failure(
    changes: dict[str, Any] | None, reason: str
) -> None:
    rollouts = rollouts_of(
        ScriptedGenerator(saying("a")), judge=returning(changes), max_turns=2, **OFTEN_FAILS
    )
    (group,) = play(rollouts, [task()])
    for rollout in group.rollouts_G:
        assert rollout.reward is None
        assert rollout.failure is not None
        assert reason in rollout.failure
        if "returned" in reason:  # whoever wrote it finds it
            place = rf"^{__name__}\.returning\.<locals>\.Fixed\.step \(.*test_rollouts\.py:\d+\) "
            assert re.match(place, rollout.failure)


def test_what_an_environment_raises_is_told_with_a_line_of_its_own() -> None:
    class Deep(Judge):
        def step(self, message_log_batch: Any, metadata: Any) -> Any:
            return torch.zeros(2).reshape(3)  # which torch raises, here

    class Odd(Judge):
        def step(self, message_log_batch: Any) -> Any:  # type: ignore[override]
            return None

    place = r"\S*test_rollouts\.py:\d+"
    for judge, where in (
        (Deep(), rf"\({place}\)"),
        (Odd(), rf"\(calling \S*Odd\.step \({place}\)\)"),
    ):
        rollouts = rollouts_of(ScriptedGenerator(saying("a")), judge=judge, **OFTEN_FAILS)
        (group,) = play(rollouts, [task()])
        assert re.search(where + "$", str(group.rollouts_G[0].failure))


def test_a_failure_in_a_later_turn_ends_that_conversation_without_a_reward() -> None:
    judge = Judge(
        lambda text, m: {
            "over": False,
            "metadata": {"t": 1},
            "failure": "lost" if m.get("t") else None,
        }
    )
    rollouts = rollouts_of(ScriptedGenerator(saying("a")), judge=judge, max_turns=5, **OFTEN_FAILS)
    (group,) = play(rollouts, [task()])
    for rollout in group.rollouts_G:
        assert (rollout.reward, rollout.failure, rollout.num_turns) == (None, "lost", 2)


@pytest.mark.parametrize(("share", "may_go_on"), [(0.5, True), (0.49, False), (0.0, False)])
def test_too_many_failures_end_the_run_and_name_the_environment(
    share: float, may_go_on: bool
) -> None:
    judge = Judge(lambda text, m: {"failure": "broken" if text == "bad" else None})
    rollouts = rollouts_of(
        ScriptedGenerator(saying("good", "bad")), judge=judge, max_failed_share=share
    )
    if may_go_on:
        play(rollouts, [task("1"), task("2")])
        return
    with pytest.raises(
        EnvironmentFailedError, match=r"'judge' could not judge 2 of 4 samples.*reason: broken"
    ):
        play(rollouts, [task("1"), task("2")])


def test_a_share_of_failures_is_that_of_each_environment() -> None:
    good, bad = Judge(), Judge(lambda text, m: {"failure": "broken"})
    rollouts = rollouts_of(ScriptedGenerator(saying("a")), environments={"good": good, "bad": bad})
    with pytest.raises(EnvironmentFailedError, match="'bad' could not judge 2 of 2"):
        play(rollouts, [task("1", name="bad"), *(task(str(i), name="good") for i in range(9))])


@pytest.mark.parametrize("alone", [True, False])
def test_an_engine_that_dies_in_a_later_turn_ends_everything(alone: bool) -> None:
    def script(request: Any) -> Any:
        if len(request.seeds_G) == 1:
            dies = request.id.split("-")[-2] == "0"
            return [EngineError("gone")] if dies else [None]
        return saying("a")(request)

    judge = Judge(lambda text, m: {"over": False}, judges="completion" if alone else "group")
    rollouts = rollouts_of(ScriptedGenerator(script), judge=judge, max_turns=3)
    with pytest.raises(EngineError, match="gone"):
        play(rollouts, [task("1"), task("2")], num_generations=3)


@pytest.mark.parametrize("alone", [True, False])
def test_an_engine_that_never_answers_is_given_up(alone: bool) -> None:
    rollouts = rollouts_of(
        ScriptedGenerator(lambda request: [(0, Say("a")), None]),
        judge=Judge(judges="completion" if alone else "group"),
        generation_timeout=0.2,
    )
    with pytest.raises(EngineError, match=r"finished nothing for .* \(policy.generation.timeout"):
        play(rollouts, [task("1"), task("2")])


def test_an_engine_that_will_not_even_let_go_is_given_up() -> None:
    class Stuck(ScriptedGenerator):
        async def generate(self, request: Any) -> Any:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.5)  # it takes its time to notice
            yield None

    with pytest.raises(EngineError, match="finished nothing"):
        play(rollouts_of(Stuck(saying("a")), generation_timeout=0.1), [task("1"), task("2")])


def test_an_environment_that_takes_long_is_no_fault_of_the_engine() -> None:
    judge = Judge(before=lambda texts: time.sleep(1.5))
    rollouts = rollouts_of(ScriptedGenerator(saying("a")), judge=judge, generation_timeout=0.8)
    (group,) = play(rollouts, [task()])
    assert [r.failure for r in group.rollouts_G] == [None, None]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([(0, Say("a"))], r"without completions \[1\]"),
        ([], r"without completions \[0, 1\]"),
        ([(0, Say("a")), (0, Say("b"))], "1 tokens for completion 0"),
        ([(5, Say("a"))], "completion 5"),
        ([(0, Say("")), (1, Say("b"))], "0 tokens for completion 0"),
    ],
)
def test_an_engine_that_breaks_its_promise_is_told_of(answers: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        play(rollouts_of(ScriptedGenerator(lambda r: answers)), [task()])


@pytest.mark.parametrize("alone", [True, False])
def test_cancelling_closes_every_request(alone: bool) -> None:
    generator = ScriptedGenerator(lambda r: [(0, Say("a")), None])
    judge = Judge(lambda text, m: {"over": False}, judges="completion" if alone else "group")
    rollouts = rollouts_of(generator, judge=judge, max_turns=2)

    async def cancel_it() -> None:
        playing = asyncio.ensure_future(
            rollouts.play([task("1"), task("2")], num_generations=2, sampling=SAMPLING, batch=(0,))
        )
        while len(generator.open) < 2:
            await asyncio.sleep(0.001)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []

    asyncio.run(cancel_it())
    assert not generator.open
    rollouts.close()
    assert not threads_called("environment")


def test_an_exception_of_whoever_watches_comes_through() -> None:
    def complain(group: RolloutGroup) -> None:
        raise LookupError("the disk is full")

    with pytest.raises(LookupError, match="the disk is full"):
        play(rollouts_of(ScriptedGenerator(saying("a"))), [task("1"), task("2")], on_group=complain)


@settings(max_examples=40, deadline=None)
@given(
    turns=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    lengths=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    alone=st.booleans(),
)
def test_masks_tokens_and_turns_always_agree(
    turns: list[int], lengths: list[int], alone: bool
) -> None:
    def verdict(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
        played = metadata.get("played", 0) + 1
        return {
            "over": played == metadata["turns"],
            "reward": 1.0,
            "metadata": metadata | {"played": played},
        }

    generator = ScriptedGenerator(
        lambda r: [(i, Say("x" * lengths[i % len(lengths)])) for i in range(len(r.seeds_G))]
    )
    judge = Judge(verdict, judges="completion" if alone else "group")
    tasks = [task(str(i), turns=t) for i, t in enumerate(turns)]
    groups = play(
        rollouts_of(generator, judge=judge, max_turns=4, max_length=200),
        tasks,
        num_generations=len(lengths),
    )
    for group, expected in zip(groups, turns, strict=True):
        for rollout in group.rollouts_G:
            assert len(rollout.ids_L) == len(rollout.mask_L) == len(rollout.logprobs_L)
            assert rollout.num_turns == expected
            assert rollout.reward == expected
            assert not rollout.truncated
            assert set(rollout.ids_L[rollout.mask_L].tolist()) == {ord("x")}
            assert ord("x") not in rollout.ids_L[~rollout.mask_L]
            assert len(rollout.messages) == 2 * expected - 1
    assert Counter(len(call) for call in judge.calls)[1] > 0 or len(lengths) > 1


@pytest.mark.parametrize(
    ("finish", "limits", "num_turns", "expected"),
    [
        ("stop", {"max_turns": 1}, 1, (2, 0)),
        ("stop", {"max_turns": 3}, 3, (2, 0)),
        ("length", {"max_turns": 5}, 1, (0, 2)),
        # "q>" 2 + "abcd" 4 + "[ok]>" 5 + "abcd" 4 = 15; another turn would make 24.
        ("stop", {"max_turns": 9, "max_length": 16}, 2, (0, 2)),
    ],
    ids=["one turn", "three turns", "answer cut off", "context"],
)
def test_what_ends_against_its_environments_will_is_judged_marked_and_counted(
    finish: Any, limits: dict[str, int], num_turns: int, expected: tuple[int, int]
) -> None:
    for over in (False, True):
        generator = ScriptedGenerator(
            lambda r: [(i, Say("abcd", finish)) for i in range(len(r.seeds_G))]
        )
        judge = Judge(lambda text, m, over=over: {"over": over, "reward": 0.25})
        stats = RolloutStats()
        (group,) = play(rollouts_of(generator, judge=judge, **limits), [task()], stats=stats)
        for rollout in group.rollouts_G:
            assert rollout.num_turns == (1 if over else num_turns)
            assert rollout.reward == 0.25 * rollout.num_turns
            assert rollout.truncated == (not over or finish == "length")
            assert rollout.mask_L[-1], "no observation comes after the last turn"
        counts = (stats.num_out_of_turns, stats.num_cut_off)
        assert counts == ((0, 0) if over else expected)
        room = limits.get("max_length", 64) - len(generator.requests[-1].prompt_ids)
        assert generator.requests[-1].sampling.max_new_tokens == min(8, room)


def cut_off(request: GenerationRequest) -> Sequence[Any]:
    return [(i, Say("ab", "length")) for i in range(len(request.seeds_G))]


def dies_in_second_turn(request: GenerationRequest) -> Sequence[Any]:
    return [EngineError("it died")] if len(request.seeds_G) == 1 else saying("ab")(request)


@pytest.mark.parametrize(
    ("script", "verdict", "limits", "num_turns", "is_told"),
    [
        (saying("ab"), lambda text, turn: {"over": turn == 2}, {}, 2, False),
        (saying("ab"), lambda text, turn: {"over": False, "failure": "no idea"}, {}, 1, True),
        (saying("ab"), lambda text, turn: {"over": True, "failure": "no idea"}, {}, 1, False),
        (saying("ab"), lambda text, turn: {"over": True, "reward": float("nan")}, {}, 1, False),
        (saying("ab"), lambda text, turn: {"over": False, "reward": float("nan")}, {}, 1, True),
        (saying("ab"), lambda text, turn: raise_(ValueError("no")), {}, 1, True),
        (saying("ab"), lambda text, turn: {"over": False, "observation": 3}, {}, 1, True),
        (saying("ab"), lambda text, turn: {"over": False}, {}, 3, True),
        (cut_off, lambda text, turn: {"over": False}, {}, 1, True),
        (saying("ab"), lambda text, turn: {"over": False}, {"max_length": 9}, 1, True),
        (dies_in_second_turn, lambda text, turn: {"over": False}, {}, 1, True),
        (lambda request: [EngineError("it died")], lambda text, turn: {}, {}, 0, False),
    ],
    ids=[
        "ended by it",
        "failure",
        "failure that ends it",
        "no finite reward that ends it",
        "no finite reward",
        "exception",
        "no observation",
        "out of turns",
        "answer cut off",
        "context",
        "engine dies",
        "never seen",
    ],
)
@pytest.mark.parametrize("judges", ["completion", "group", "batch"])
def test_an_environment_is_told_once_of_conversations_that_it_has_not_ended(
    script: Any, verdict: Any, limits: dict[str, int], num_turns: int, is_told: bool, judges: Any
) -> None:
    """`num_turns` is how many turns of each it has seen."""

    def judge_turn(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
        turn = metadata.get("turn", 0) + 1
        return {"metadata": {"turn": turn}, **verdict(text, turn)}

    judge = Judge(judge_turn, judges=judges)
    defaults = {"max_turns": 3, "max_length": 64, **OFTEN_FAILS}
    rollouts = rollouts_of(ScriptedGenerator(script), judge=judge, **(defaults | limits))
    with contextlib.suppress(EngineError):
        play(rollouts, [task("q"), task("r")])
    seen = Counter((m["laurel_conversation_id"], m["laurel_group_id"]) for m in judge.metadata)
    told = Counter((m["laurel_conversation_id"], m["laurel_group_id"]) for m in judge.closed)
    # Where a batch ends early, some calls have been asked for and not begun.
    assert set(told) >= set(seen) if is_told else not told
    assert set(told.values()) <= {1}
    assert set(told) == set(seen) or not is_told or script is dies_in_second_turn
    assert set(seen.values()) == ({num_turns} if num_turns else set())
    if num_turns > 1:
        assert {m["turn"] for m in judge.closed} <= {num_turns}, "the last metadata"


def test_a_conversation_that_is_given_up_is_told_of_while_its_step_still_runs() -> None:
    free = threading.Event()
    judge = fails_for("bad", lambda: free.wait(60), judges="completion")
    generator = ScriptedGenerator(saying("good", "bad"))
    play(rollouts_of(generator, judge=judge, environment_timeout=0.3, **OFTEN_FAILS), [task()])
    bad = [m for text, m in zip(judge.calls, judge.metadata, strict=True) if text == ["bad"]]
    assert judge.closed == bad
    free.set()
    assert not threads_called("environment")


def test_an_environment_that_cannot_close_is_a_warning(caplog: Any) -> None:
    class Stubborn(Judge):
        def close_conversations(self, metadata: Any) -> None:
            raise OSError("the line is dead")

    judge = Stubborn(lambda text, m: {"over": False})
    (group,) = play(rollouts_of(ScriptedGenerator(saying("a")), judge=judge), [task()])
    assert [r.reward for r in group.rollouts_G] == [1.0, 1.0]
    (said,) = caplog.messages
    assert re.search(r"Stubborn\.close_conversations \(.*test_rollouts.py:\d+\) has not ", said)
    assert re.search(r"closed 2 conversations: OSError: the line is dead \(.*:\d+\)", said)


@pytest.mark.parametrize("keeps", [True, False])
def test_only_an_environment_that_keeps_something_is_told(monkeypatch: Any, keeps: bool) -> None:
    class Forgets(Judge):
        close_conversations = EnvironmentInterface.close_conversations

    told = list[Any]()
    monkeypatch.setattr("laurel.grpo.grading.close_quietly", lambda *given: told.append(given))
    judge = (Judge if keeps else Forgets)(lambda text, m: {"over": False})
    (group,) = play(rollouts_of(ScriptedGenerator(saying("a")), judge=judge), [task()])
    assert [r.reward for r in group.rollouts_G] == [1.0, 1.0]
    assert bool(told) is keeps


def test_cancelling_tells_environments_of_what_they_have_seen() -> None:
    def script(request: GenerationRequest) -> Sequence[Any]:
        first = len(request.seeds_G) == 2
        return [(0, Say("a")), (1, Say("b"))] if first else [None]

    judge = Judge(lambda text, m: {"over": text == "b"}, judges="completion")
    generator = ScriptedGenerator(script)
    rollouts = rollouts_of(generator, judge=judge, max_turns=2)

    async def cancel_it() -> None:
        playing = asyncio.ensure_future(
            rollouts.play([task("1"), task("2")], num_generations=2, sampling=SAMPLING, batch=(0,))
        )
        while len(generator.open) < 2 or len(judge.calls) < 4:
            await asyncio.sleep(0.001)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(cancel_it())
    rollouts.close()
    seen = {
        m["laurel_conversation_id"]: text
        for [text], m in zip(judge.calls, judge.metadata, strict=True)
    }
    assert sorted(seen[m["laurel_conversation_id"]] for m in judge.closed) == ["a", "a"]


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        ({"reward": float("nan")}, r".*Judge\.step \(.*\) returned the reward nan; expected is a"),
        ({"reward": float("-inf")}, r".*Judge\.step \(.*\) returned the reward -inf; expected"),
        ({"reward": float("nan"), "failure": "no idea"}, "no idea$"),
    ],
)
def test_a_sample_without_a_finite_reward_fails_alone(verdict: Any, reason: str) -> None:
    judge = Judge(lambda text, m: verdict if text == "bad" else {"reward": 0.5})
    (group,) = play(rollouts_of(ScriptedGenerator(saying("good", "bad")), judge=judge), [task()])
    assert [r.reward for r in group.rollouts_G] == [0.5, None]
    assert group.rollouts_G[0].failure is None
    assert re.match(reason, str(group.rollouts_G[1].failure))
