"""Generator and served models on the same devices: only one of them ever has the memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.config.grpo import GRPOConfig, TreeConfig
from laurel.environments.composite import CompositeEnvironment
from laurel.environments.interface import EnvironmentInterface
from laurel.errors import EngineError
from laurel.grpo.grading import alone
from laurel.grpo.rollouts import VALIDATION
from laurel.grpo.shared_devices import SharedDevices
from laurel.grpo.source import RolloutSource
from laurel.types import EnvironmentReturn, Generated, GenerationRequest, RolloutGroup, Task
from policy_fakes import SAMPLING, Judge, Say, ScriptedGenerator, rollouts_of, saying, task

DRAWS, SCORES, LEARNS = (True, False), (False, True), (False, False)


@dataclass
class Memory:
    """The device: who has its memory, and all that was done there, in order."""

    generator: bool = True
    models: bool = True
    events: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)

    def say(self, event: str) -> None:
        if event in self.refused:
            raise EngineError(f"no {event}")
        self.events.append(event)

    @property
    def holders(self) -> tuple[bool, bool]:
        """Whether the generator has the memory, and whether the models have it."""
        return self.generator, self.models

    def rounds(self) -> list[str]:
        """The events, equal neighbours as one."""
        return [event for event, _ in groupby(self.events)]


class Generator(ScriptedGenerator):
    """Only draws while it alone has the memory."""

    memory: Memory

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        async for generated in super().generate(request):
            assert self.memory.holders == DRAWS
            self.memory.say("draw")
            yield generated
            assert self.memory.holders == DRAWS

    async def sleep(self) -> None:
        assert not self.open, "nothing may be running"
        self.memory.say("generator sleeps")
        await asyncio.sleep(0.001)
        self.memory.generator = False

    async def wake(self) -> None:
        assert not self.memory.models
        self.memory.say("generator wakes")
        await asyncio.sleep(0.001)
        self.memory.generator = True


class Served(Judge):
    """Asks models that only answer while they alone have the memory."""

    def __init__(self, memory: Memory, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.spec = replace(self.spec, rests=True)
        self.memory = memory
        self.num_closed = 0

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        assert self.memory.holders == SCORES
        self.memory.say("score")
        found = super().step(message_log_batch, metadata)
        assert self.memory.holders == SCORES
        return found

    @contextmanager
    def resting(self) -> Iterator[None]:
        self.memory.say("models sleep")
        self.memory.models = False
        try:
            yield
        finally:
            if not self.num_closed:
                assert not self.memory.generator
                self.memory.say("models wake")
                self.memory.models = True

    def shutdown(self) -> None:
        self.num_closed += 1


TO_SCORING = ["generator sleeps", "models wake", "score"]
TO_DRAWING = ["models sleep", "generator wakes", "draw"]


OPEN: list[SharedDevices] = []


@pytest.fixture(autouse=True)
def closing_them() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def parts_of(
    memory: Memory, judge: Judge, script: Any = None, **options: Any
) -> tuple[Any, Generator, SharedDevices]:
    generator = Generator(script or saying("a", "b"))
    generator.memory = memory
    environments = options.pop("environments", {"judge": judge})
    devices = SharedDevices(one for one in alone(environments.values()) if one.spec.rests)
    devices.attach(generator)
    OPEN.append(devices)
    rollouts = rollouts_of(generator, environments=environments, devices=devices, **options)
    return rollouts, generator, devices


def play(rollouts: Any, tasks: list[Task], *, number: int = 2, **options: Any) -> Any:
    playing = rollouts.play(
        tasks, num_generations=number, **({"sampling": SAMPLING, "batch": (0, 0, 0)} | options)
    )
    return asyncio.wait_for(playing, 20)


def played(rollouts: Any, tasks: list[Task], **options: Any) -> list[RolloutGroup]:
    try:
        groups: list[RolloutGroup] = asyncio.run(play(rollouts, tasks, **options))
        return groups
    finally:
        rollouts.close()


def until(number: int) -> Any:
    """A verdict of conversations that have so many turns."""

    def verdict(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
        turn = metadata.get("turn", 1)
        return {"over": turn >= number, "metadata": metadata | {"turn": turn + 1}}

    return verdict


TASKS = [task(f"q{i}") for i in range(4)]


@pytest.mark.parametrize("judges", ["completion", "part", "group", "batch"])
@pytest.mark.parametrize("num_turns", [1, 3])
def test_every_round_of_turns_is_drawn_whole_and_then_scored_whole(
    judges: Any, num_turns: int
) -> None:
    memory = Memory()
    judge = Served(memory, until(num_turns), judges=judges)
    rollouts, _, _ = parts_of(memory, judge, max_turns=5)
    groups = played(rollouts, TASKS, number=3)
    assert [r.num_turns for g in groups for r in g.rollouts_G] == [num_turns] * 12
    whole = ["models sleep", "draw", *TO_SCORING]
    for _ in range(num_turns - 1):
        whole += [*TO_DRAWING, *TO_SCORING]
    assert memory.rounds() == whole


def test_what_was_drawn_and_scored_is_what_it_is_without_sharing() -> None:
    def tokens(groups: list[RolloutGroup]) -> Any:
        return [(r.ids_L.tolist(), r.reward) for g in groups for r in g.rollouts_G]

    memory = Memory()
    judge = Served(memory, until(2), judges="completion")
    rollouts, generator, _ = parts_of(memory, judge, max_turns=5)
    shared = played(rollouts, TASKS)
    own = rollouts_of(
        plain := ScriptedGenerator(saying("a", "b")),
        judge=Judge(until(2), judges="completion"),
        max_turns=5,
    )
    assert tokens(played(own, TASKS)) == tokens(shared)
    seeds = {r.id: r.seeds_G for r in plain.requests}
    assert {r.id: r.seeds_G for r in generator.requests} == seeds


def test_other_environments_score_while_the_generator_draws() -> None:
    memory = Memory()
    served = Served(memory)
    quick = Judge(before=lambda texts: memory.say("quick"))
    both = {"judge": served, "quick": quick}
    rollouts, generator, _ = parts_of(memory, served, environments=both)
    generator.script = lambda request: [
        (i, Say("a", after=None if "quick" in request_text(request) else lambda: bool(quick.calls)))
        for i in range(2)
    ]
    groups = played(rollouts, [task("q"), task("quick", name="quick")])
    assert all(r.reward == 1.0 for g in groups for r in g.rollouts_G)
    # The other group was still being drawn.
    assert memory.rounds() == ["models sleep", "draw", "quick", "draw", *TO_SCORING]


def request_text(request: GenerationRequest) -> str:
    return bytes(request.prompt_ids.astype(np.uint8)).decode()


def test_a_composite_waits_for_its_part() -> None:
    memory = Memory()
    parts = {"served": Served(memory), "plain": Judge()}
    settings = {"parts": [{"env": "served"}, {"env": "plain"}]}
    both = CompositeEnvironment(settings, parts)
    assert both.spec.rests
    assert alone([both, parts["plain"], both]) == [*parts.values()]
    rollouts, _, _ = parts_of(memory, parts["served"], environments={"judge": both})
    (group,) = played(rollouts, [task("q")])
    assert [r.reward for r in group.rollouts_G] == [2.0, 2.0]
    assert memory.rounds() == ["models sleep", "draw", *TO_SCORING]


@pytest.mark.parametrize("at", ["turn", "segment"])
def test_branches_are_drawn_and_scored_in_turns(at: Any) -> None:
    class Forgetful(Served):
        close_conversations = EnvironmentInterface.close_conversations

    memory = Memory()
    judge = Forgetful(memory, until(2 if at == "turn" else 1))
    tree, turns = TreeConfig(rounds=2, branches=1), 3 if at == "turn" else 1
    rollouts, _, _ = parts_of(memory, judge, saying("abcd", "efgh"), max_turns=turns, tree=tree)
    groups = played(rollouts, TASKS[:2], number=2 + tree.rounds * tree.branches)
    assert all(r.reward is not None for g in groups for r in g.rollouts_G)


def test_a_call_that_fails_or_takes_too_long_leaves_the_devices_to_the_others() -> None:
    memory, hangs = Memory(), threading.Event()

    def before(texts: list[str]) -> None:
        if "late" in texts:
            hangs.wait(20)
        if "bad" in texts:
            raise ValueError("a bug")

    judge = Served(memory, until(2), judges="completion", before=before)
    script = saying("fine", "late", "bad")
    rollouts, _, _ = parts_of(memory, judge, script, max_turns=3, environment_timeout=0.2)
    try:
        (group,) = played(rollouts, [task("q")], number=3)
    finally:
        memory.models, memory.generator = True, False  # for the call that was given up
        hangs.set()
    assert [r.num_turns for r in group.rollouts_G] == [2, 1, 1]
    assert [r.failure is None for r in group.rollouts_G] == [True, False, False]


@pytest.mark.parametrize("refused", ["generator sleeps", "models wake", "models sleep"])
def test_what_does_not_change_ends_the_batch_with_its_error(refused: str) -> None:
    memory = Memory()
    judge = Served(memory, until(2))
    rollouts, _, _ = parts_of(memory, judge, max_turns=3)
    memory.refused = {refused}

    async def tries() -> None:
        with pytest.raises(EngineError, match=refused):
            await play(rollouts, TASKS)
        memory.refused = set()
        await play(rollouts, TASKS)

    try:
        asyncio.run(tries())
    finally:
        rollouts.close()


def test_a_generator_that_fails_lets_nobody_wait() -> None:
    memory = Memory()
    rollouts, _, _ = parts_of(
        memory,
        Served(memory, judges="completion"),
        lambda request: [(0, Say("a")), *([EngineError("died")] if "3" in request.id else [None])],
    )
    with pytest.raises(EngineError, match="died"):
        played(rollouts, TASKS)
    assert "score" not in memory.events


def config_of(**changes: Any) -> GRPOConfig:
    return GRPOConfig(**({"num_prompts_per_step": 2, "num_generations_per_prompt": 2} | changes))


@contextmanager
def source_of(memory: Memory, judge: Judge, script: Any = None, **changes: Any) -> Iterator[Any]:
    rollouts, generator, devices = parts_of(memory, judge, script, max_turns=3)
    source = RolloutSource(
        rollouts, TASKS, config_of(**changes), SAMPLING, shuffle=False, total_steps=100
    )
    try:
        yield source, generator, devices
    finally:
        source.close()
        devices.close()
        assert not generator.open


def test_between_batches_the_learner_has_the_memory_and_models_sleep_in_validations() -> None:
    memory = Memory()
    judge = Served(memory, until(2))
    with source_of(memory, judge) as (source, _, devices):
        for step in range(2):
            source.take(step)
            source.wait_for(devices.sleep())
            assert memory.holders == LEARNS
            source.wait_for(devices.sleep())
            source.wait_for(devices.wake())
            assert memory.holders == DRAWS
        source.play(TASKS, num_generations=1, sampling=SAMPLING, batch=(VALIDATION, 0))
        woken = memory.events.count("models wake")
    # The end of the run wakes nothing.
    assert memory.events.count("models wake") == woken
    assert judge.num_closed == 1


def test_what_is_drawn_again_is_drawn_by_the_generator_alone() -> None:
    memory = Memory()

    def verdict(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
        judge.verdicts += 1
        return {"reward": float(judge.verdicts > 4) * judge.verdicts}

    judge = Served(memory, verdict)
    judge.verdicts = 0
    changes = {"use_dynamic_sampling": True, "dynamic_sampling_max_gen_batches": 4}
    with source_of(memory, judge, **changes) as (source, _, _):
        batch = source.take(0)
    assert batch.num_batches == 2
    whole = ["models sleep", "draw", *TO_SCORING, *TO_DRAWING, *TO_SCORING]
    assert memory.rounds() == whole


@pytest.mark.parametrize("where", ["draw", "score"])
def test_a_step_that_is_given_up_leaves_nobody_waiting(where: str) -> None:
    memory, holds = Memory(), threading.Event()
    judge = Served(memory, before=lambda texts: where == "score" and holds.wait(20))
    script = saying("a") if where == "score" else lambda request: [(0, Say("a")), None]

    class Stopped(Exception):
        pass

    def stop(num_groups: int) -> None:
        if where in memory.events:
            raise Stopped

    with source_of(memory, judge, script) as (source, generator, _):
        with pytest.raises(Stopped):
            source.take(0, while_waiting=stop)
        holds.set()
        generator.script, where = saying("a", "b"), ""
        assert len(source.take(0).groups) == 2


def test_a_call_that_never_ends_holds_the_learner_up_for_no_longer_than_it_waits() -> None:
    memory = Memory()
    rollouts, _, devices = parts_of(memory, Served(memory))

    async def tries() -> None:
        async with devices.taken_for("scoring"):
            with pytest.raises(TimeoutError):
                await devices.sleep(patience=0.01)
            assert memory.holders == SCORES
        await devices.sleep(patience=20)

    try:
        asyncio.run(tries())
    finally:
        rollouts.close()
    assert memory.holders == LEARNS


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["generating", "scoring", "neither"]),
            st.integers(0, 6),  # when it comes
            st.integers(0, 3),  # how long it takes
            st.none() | st.integers(0, 8),  # when it is cancelled
        ),
        min_size=1,
        max_size=12,
    )
)
def test_no_schedule_overlaps_or_waits_for_ever(calls: list[Any]) -> None:
    memory = Memory()
    generator = Generator(saying("a"))
    generator.memory = memory
    inside: list[str] = []

    async def call(devices: SharedDevices, use: Any, after: int, seconds: int) -> None:
        await asyncio.sleep(after * 0.001)
        async with devices.taken_for(use):
            inside.append(use)
            assert set(inside) == {use}
            has = {"generating": DRAWS, "scoring": SCORES, "neither": LEARNS}
            assert memory.holders == has[use]
            try:
                await asyncio.sleep(seconds * 0.001)
            finally:
                inside.remove(use)

    async def all_of_them() -> list[Any]:
        devices = SharedDevices([Served(memory)])
        devices.attach(generator)
        loop, tasks = asyncio.get_running_loop(), []
        for use, after, seconds, cancelled in calls:
            tasks.append(asyncio.ensure_future(call(devices, use, after, seconds)))
            if cancelled is not None:
                loop.call_later(cancelled * 0.001, tasks[-1].cancel)
        try:
            return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        finally:
            devices.close()

    for (_, _, _, cancelled), end in zip(calls, asyncio.run(all_of_them()), strict=True):
        assert end is None or (cancelled is not None and isinstance(end, asyncio.CancelledError))
