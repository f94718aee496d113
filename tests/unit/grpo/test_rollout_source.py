"""Where batches come from: which weights they are drawn with, in what order, and how it ends."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from laurel import plugins
from laurel.config.grpo import GRPOConfig
from laurel.errors import EngineError, TrainingError
from laurel.grpo.source import Batch, RolloutSource
from laurel.training.stopping import NothingLeft
from laurel.types import SamplingParams, StepReward, Weights
from policy_fakes import SAMPLING, Judge, Say, ScriptedGenerator, rollouts_of, saying, task

TASKS = [task(f"task {i}") for i in range(10)]


def config_of(**changes: Any) -> GRPOConfig:
    defaults: dict[str, Any] = {"num_prompts_per_step": 3, "num_generations_per_prompt": 2}
    return GRPOConfig(**(defaults | changes))


@contextmanager
def source_of(
    generator: ScriptedGenerator,
    *,
    judge: Judge | None = None,
    total_steps: int = 100,
    shuffle: bool = True,
    noise: Callable[[str], float] = lambda name: 0.0,
    generation_timeout: float = 60.0,
    **changes: Any,
) -> Iterator[RolloutSource]:
    """A source; when it is closed, no thread of its is left."""
    judge, config = judge or Judge(), config_of(**changes)
    per_step = config.adv_estimator.per_step
    judge.spec = replace(judge.spec, gives_steps=per_step)
    rollouts = rollouts_of(
        generator,
        judge=judge,
        generation_timeout=generation_timeout,
        per_step=per_step,
        tree=config.tree,
    )
    source = RolloutSource(
        rollouts,
        TASKS,
        config,
        SAMPLING,
        shuffle=shuffle,
        total_steps=total_steps,
        noise=noise,
    )
    try:
        yield source
    finally:
        source.close()
        source.close()
        assert not generator.open
        deadline = time.monotonic() + 30
        while left := [t for t in threading.enumerate() if t.name in ("rollouts", "environment")]:
            assert time.monotonic() < deadline, left
            time.sleep(0.01)


def ids(batch: Batch) -> list[str]:
    return [group.task.id for group in batch.groups]


def versions(batch: Batch) -> set[int]:
    return {rollout.weight_version for group in batch.groups for rollout in group.rollouts_G}


def learn(source: RolloutSource, generator: ScriptedGenerator, steps: range) -> list[Batch]:
    """Take steps as the loop does: the weights change when nothing is being drawn."""
    batches = []
    for step in steps:
        batches.append(source.take(step))
        source.settle()
        weights = Weights(version=step + 1, tensors=list)
        source.wait_for(generator.update_weights(weights))
    return batches


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_a_batch_is_drawn_so_many_weights_ahead_of_its_step(staleness: int) -> None:
    generator = ScriptedGenerator(saying("a", "b"))
    with source_of(generator, max_staleness=staleness, total_steps=8) as source:
        batches = learn(source, generator, range(8))
        assert source.settle() == []
    assert [batch.step for batch in batches] == list(range(8))
    assert [versions(b) for b in batches] == [{max(0, s - staleness)} for s in range(8)]
    assert len(generator.requests) == 8 * 3, "nothing is drawn for steps beyond the last"


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_same_tasks_and_seeds_whatever_runs_ahead(staleness: int) -> None:
    def drawn(max_staleness: int) -> list[Any]:
        generator = ScriptedGenerator(saying("a", "b"))
        with source_of(generator, max_staleness=max_staleness, total_steps=6) as source:
            batches = learn(source, generator, range(6))
        assert [r.id for r in generator.requests] == [g.id for b in batches for g in b.groups]
        return [(r.id, r.prompt_ids.tolist(), r.seeds_G) for r in generator.requests]

    assert drawn(staleness) == drawn(0)


def test_generation_really_runs_while_nobody_waits_for_it() -> None:
    generator = ScriptedGenerator(saying("a"))
    with source_of(generator, max_staleness=1) as source:
        source.take(0)
        deadline = time.monotonic() + 60
        while len(generator.requests) < 6:  # nobody asks for the second batch
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_every_task_comes_once_in_an_epoch_and_epochs_differ() -> None:
    generator = ScriptedGenerator(saying("a"))
    with source_of(generator, num_prompts_per_step=4) as source:
        batches = [source.take(step) for step in range(5)]  # 20 places: two epochs of 10
    drawn = [name for batch in batches for name in ids(batch)]
    names = sorted(t.id for t in TASKS)
    assert sorted(drawn[:10]) == names
    assert sorted(drawn[10:]) == names
    assert drawn[:10] != drawn[10:]
    groups = [group.id for batch in batches for group in batch.groups]
    assert len(set(groups)) == 20


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("stop", [1, 3])
def test_a_source_goes_on_where_another_was(staleness: int, stop: int) -> None:
    def seen(batches: list[Batch]) -> list[Any]:
        return [(b.step, ids(b), [g.id for g in b.groups], versions(b)) for b in batches]

    straight = ScriptedGenerator(saying("a", "b"))
    with source_of(straight, max_staleness=staleness, total_steps=7) as source:
        expected = learn(source, straight, range(7))

    first = ScriptedGenerator(saying("a", "b"))
    with source_of(first, max_staleness=staleness, total_steps=7) as source:
        before = learn(source, first, range(stop))
        ahead, consumed = source.settle(), source.consumed
    assert [b.step for b in ahead] == list(range(stop, stop + staleness))

    second = ScriptedGenerator(saying("a", "b"), weight_version=stop)
    with source_of(second, max_staleness=staleness, total_steps=7) as source:
        source.put_back(ahead, consumed=consumed)
        after = learn(source, second, range(stop, 7))
    assert seen(before + after) == seen(expected)
    assert len(first.requests) + len(second.requests) == len(straight.requests)


class Stop(Exception):
    pass


def test_whoever_waits_can_stop_it_and_it_is_as_if_nothing_had_been_asked() -> None:
    is_stuck = [True]

    def script(request: Any) -> Any:
        stuck = is_stuck[0] and request.id.split("-")[1] == "1" and request.id.endswith("2")
        return [None] if stuck else saying("a", "b")(request)

    def stop_after_two(num_groups: int) -> None:
        seen.append(num_groups)
        if num_groups == 2:
            raise Stop

    seen: list[int] = []
    generator = ScriptedGenerator(script)
    with source_of(generator) as source:
        source.take(0)
        before = source.consumed
        with pytest.raises(Stop):
            source.take(1, while_waiting=stop_after_two)
        assert seen[-1] == 2
        assert not generator.open, "what was being drawn is let go"
        assert source.consumed == before
        assert source.settle() == []
        is_stuck[0] = False
        again = source.take(1)
    generator = ScriptedGenerator(lambda r: [None])
    with source_of(generator, max_staleness=2) as other:
        with pytest.raises(Stop):  # with others behind it
            other.take(0, while_waiting=stop)
        assert (other.consumed, other.settle()) == (0, [])
        generator.script = saying("a", "b")
        other.take(0)
        assert ids(other.take(1)) == ids(again)


def test_validation_can_be_stopped_and_leaves_what_is_ahead_alone() -> None:
    generator = ScriptedGenerator(saying("a"))
    with source_of(generator, max_staleness=1) as source:
        source.take(0)
        ahead = source.settle()
        generator.script = lambda r: [None]
        with pytest.raises(Stop):
            source.play(
                TASKS[:2], num_generations=1, sampling=SAMPLING, batch=(0,), while_waiting=stop
            )
        assert not generator.open
        assert source.settle() == ahead
        assert source.take(1) is ahead[0]


def test_validation_is_drawn_with_seeds_and_settings_of_its_own() -> None:
    generator = ScriptedGenerator(saying("a"))
    greedy = SamplingParams(max_new_tokens=3, temperature=0.0)
    with source_of(generator) as source:
        groups = source.play(TASKS[:2], num_generations=3, sampling=greedy, batch=(0,))
        again = source.play(TASKS[:2], num_generations=3, sampling=greedy, batch=(0,))
        source.take(0)
    assert [g.task.id for g in groups] == ["task 0", "task 1"]
    assert [len(g.rollouts_G) for g in groups] == [3, 3]
    assert all(r.sampling == greedy for r in generator.requests[:4])
    of_first = [seed for r in generator.requests[:2] for seed in r.seeds_G]
    assert of_first == [seed for r in generator.requests[2:4] for seed in r.seeds_G]
    assert not set(of_first) & {seed for r in generator.requests[4:] for seed in r.seeds_G}
    assert [g.id for g in groups] == [g.id for g in again]


@pytest.fixture
def threads_take_turns() -> Iterator[None]:
    """Whatever two threads do at the same time, they do in small pieces."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.parametrize("_", range(5))
def test_closing_in_the_middle_of_drawing_leaves_nothing(_: int, threads_take_turns: None) -> None:
    def take() -> None:
        with pytest.raises(CancelledError):
            source.take(0)

    generator = ScriptedGenerator(lambda r: [(0, Say("a")), None])
    with source_of(generator, max_staleness=2) as source:
        waiting = threading.Thread(target=take)
        waiting.start()
        while not generator.open:
            time.sleep(0.001)
        source.close()
        waiting.join(timeout=60)
        assert not waiting.is_alive(), "whoever waits is told"


def test_a_close_that_was_interrupted_can_be_repeated() -> None:
    ended = []

    async def interrupts() -> AsyncIterator[None]:
        try:
            yield
        finally:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.sleep(0.3)
            ended.append(True)

    async def begin(work: AsyncIterator[None]) -> None:
        await anext(work)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with source_of(ScriptedGenerator(lambda r: [(0, Say("a")), (1, Say("b"))])) as source:
            work = interrupts()
            source.take(0)
            source.wait_for(begin(work))
            with pytest.raises(KeyboardInterrupt):
                source.close()
            source.close()
            assert ended
            with pytest.raises(EngineError, match="rollouts was closed"):
                source.take(1)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_engine_that_never_answers_is_given_up() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    with source_of(ScriptedGenerator(saying("a")), generation_timeout=1.0) as source:
        with pytest.raises(EngineError, match="not answered for"):
            source.wait_for(forever())
        assert source.take(0).groups, "what it is asked next is heard"


@pytest.mark.parametrize("dies_at", [0, 2])
def test_what_goes_wrong_in_the_background_is_raised_where_it_is_needed(dies_at: int) -> None:
    def script(request: Any) -> Any:
        dies = request.id.split("-")[1] == str(dies_at)
        return [EngineError("out of memory")] if dies else saying("a")(request)

    generator = ScriptedGenerator(script)
    with source_of(generator, max_staleness=1) as source:
        for step in range(dies_at):
            source.take(step)
        with pytest.raises(EngineError, match="out of memory"):
            source.take(dies_at)


def by_task(rewards: dict[str, tuple[float | None, ...]]) -> Any:
    """A generator and a judge: completion `i` of a task gets the `i`-th reward; None fails."""
    generator = ScriptedGenerator(
        lambda r: [(i, Say(f"{bytes(r.prompt_ids.tolist()).decode()[:-1]} {i}")) for i in range(2)]
    )

    def verdict(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
        name, _, index = text.rpartition(" ")
        reward = rewards.get(name, (1.0, 1.0))[int(index)]
        return {"failure": "none"} if reward is None else {"reward": reward}

    return generator, Judge(verdict)


SIGNAL = {f"task {i}": (0.0, 1.0) for i in (1, 2, 5, 7, 8, 9)}


def test_dynamic_sampling_keeps_groups_with_a_signal_until_the_step_is_full() -> None:
    generator, judge = by_task(SIGNAL)
    with source_of(
        generator, judge=judge, shuffle=False, use_dynamic_sampling=True, max_num_epochs=2
    ) as source:
        first = source.take(0)  # 0 1 2 | 3 4 5
        assert ids(first) == ["task 1", "task 2", "task 5"]
        assert (first.num_batches, first.num_discarded, first.num_without_signal) == (2, 0, 3)
        assert first.stats.num_tokens == 2 * 3 * 2 * len("task 0 1"), "also of those left out"
        assert source.consumed == 6
        second = source.take(1)  # 6 7 8 | 9 0 1
        assert ids(second) == ["task 7", "task 8", "task 9"]
        assert (second.num_batches, second.num_discarded, second.num_without_signal) == (2, 1, 2)
        assert source.consumed == 12
    seeds = [seed for request in generator.requests for seed in request.seeds_G]
    assert len(set(seeds)) == len(seeds)


def test_with_advantages_per_step_the_steps_of_a_group_must_differ() -> None:
    generator, judge = by_task(SIGNAL)
    rewarded = judge.verdict
    values = {f"task {i}": (0.0, 1.0) for i in (0, 3, 4)}  # their totals are equal

    def verdict(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
        name, _, index = text.rpartition(" ")
        value = values.get(name, (0.5, 0.5))[int(index)]
        return {**rewarded(text, metadata), "steps": [StepReward(len(text), value)]}

    judge.verdict = verdict
    changes = {"use_dynamic_sampling": True, "adv_estimator": {"per_step": True}}
    with source_of(generator, judge=judge, shuffle=False, **changes) as source:
        assert ids(source.take(0)) == ["task 0", "task 3", "task 4"]


def test_more_tasks_can_be_drawn_at_once() -> None:
    generator, judge = by_task(SIGNAL)
    with source_of(
        generator, judge=judge, shuffle=False, use_dynamic_sampling=True, batch_multiplier=2.0
    ) as source:
        batch = source.take(0)
    assert ids(batch) == ["task 1", "task 2", "task 5"]
    assert (batch.num_batches, batch.num_without_signal) == (1, 3)


def test_without_dynamic_sampling_everything_is_kept_and_nothing_more_is_drawn() -> None:
    generator, judge = by_task(SIGNAL)
    with source_of(generator, judge=judge, shuffle=False, batch_multiplier=2.0) as source:
        batch = source.take(0)
    assert ids(batch) == ["task 0", "task 1", "task 2"]
    assert (batch.num_batches, batch.num_without_signal) == (1, 0)


def test_dynamic_sampling_gives_up_and_says_why() -> None:
    generator, judge = by_task({"task 1": (0.0, 1.0)})
    with (
        source_of(
            generator,
            judge=judge,
            shuffle=False,
            use_dynamic_sampling=True,
            dynamic_sampling_max_gen_batches=3,
        ) as source,
        pytest.raises(
            TrainingError, match=r"after 3 batches .*max_gen_batches\) step 1 has 1 of 3 groups"
        ),
    ):
        source.take(0)
    assert len(generator.requests) == 9


@pytest.mark.parametrize(
    ("rewards", "noise", "scaling", "keeps"),
    [
        ((0.0, 1.0), 0.0, {}, True),
        ((1.0, 1.0), 0.0, {}, False),
        ((0.30001, 0.3), 0.0, {}, True),
        ((0.0, None), 0.0, {}, False),
        ((0.0, 0.021), 0.001, {}, True),  # standard deviation 0.0105, more than 10 times the noise
        ((0.0, 0.019), 0.001, {}, False),
        # The deviation and 10 times the noise, 0.01, are both halved.
        ((0.0, 0.021), 0.001, {"enabled": True, "target_max": 0.5}, True),
        # 2 and 3 are both 1 after the clamp to [0, 1]: the step would learn nothing from them.
        ((2.0, 3.0), 0.0, {"enabled": True}, False),
    ],
)
def test_what_counts_as_a_signal(
    rewards: tuple[float | None, float | None],
    noise: float,
    scaling: dict[str, Any],
    keeps: bool,
) -> None:
    generator, judge = by_task({"task 0": rewards})
    options: dict[str, Any] = {"noise": lambda name: noise, "reward_scaling": scaling}
    assert has_signal(generator, judge, shuffle=False, **options) is keeps


FEW = {name: rewards for name, rewards in SIGNAL.items() if name != "task 9"}


def test_dynamic_sampling_ends_with_the_tasks_of_all_epochs() -> None:
    """Five of ten tasks have a signal: the second step lacks one."""
    generator, judge = by_task(FEW)
    options: dict[str, Any] = {"judge": judge, "shuffle": False, "use_dynamic_sampling": True}
    with source_of(generator, **options) as source:
        source.take(0)  # 0 1 2 | 3 4 5
        with pytest.raises(
            NothingLeft, match=r"no step 2: all 10 tasks .*_epochs=1\), and .* 2 of 3"
        ):
            source.take(1, while_waiting=lambda num_groups: None)  # 6 7 8 | 9, and no more
        assert len(generator.requests) == 10
        assert source.consumed == 6, "with more epochs the step is begun again"
        assert source.settle() == []
    with source_of(generator, max_num_epochs=2, **options) as source:
        source.put_back([], consumed=6)
        assert ids(source.take(1)) == ["task 7", "task 8", "task 1"]


@pytest.mark.parametrize("staleness", [1, 3])
def test_tasks_can_be_used_up_ahead_of_the_step_that_needs_them(staleness: int) -> None:
    generator, judge = by_task(FEW)
    with source_of(
        generator, judge=judge, shuffle=False, use_dynamic_sampling=True, max_staleness=staleness
    ) as source:
        source.take(0)
        for _ in range(2):
            assert source.settle() == [], "the step that is being learned is not lost"
            assert source.consumed == 6
        with pytest.raises(NothingLeft, match="step 2: all 10 tasks"):
            source.take(1)
        assert len(generator.requests) == 10, "no later step tries what is left"
        assert source.consumed == 6


def test_fewer_tasks_than_a_step_needs_are_enough_for_one() -> None:
    """As without dynamic sampling."""
    generator = ScriptedGenerator(saying("a", "b"))
    judge = Judge(lambda text, m: {"reward": float(text == "b")})
    options: dict[str, Any] = {"num_prompts_per_step": 14, "use_dynamic_sampling": True}
    with source_of(generator, judge=judge, **options) as source:
        assert len(source.take(0).groups) == 14


class Counts(Judge):
    """Counts whom it judged; a call that has begun is counted when it ends."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.num_judged = 0
        self.lock = threading.Lock()

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        verdict = super().step(message_log_batch, metadata)
        with self.lock:
            self.num_judged += len(message_log_batch)
        return verdict


@pytest.mark.parametrize("is_ended", [True, False])
def test_rollouts_ahead_that_take_too_long_are_given_up_and_drawn_again(is_ended: bool) -> None:
    """The last group of the batch after the next hangs: at its environment, or at its engine."""

    def stuck(request: Any) -> bool:
        return bool(hangs[0] and request.id == "0-2-0-2")

    def script(request: Any) -> Any:
        return [None] if stuck(request) and not is_ended else saying("a", "b")(request)

    def hang(texts: list[str]) -> None:
        if is_ended and hangs[0] and next(numbers) == 9:
            release.wait(60)

    hangs, release, numbers = [True], threading.Event(), itertools.count(1)
    judge = Counts(before=hang)
    generator = ScriptedGenerator(script)
    asked: list[int] = []
    with source_of(generator, judge=judge, max_staleness=2) as source:
        source.take(0)
        ahead = source.settle(is_patient=lambda: asked.append(judge.num_judged) or asked[-1] < 16)
        assert [batch.step for batch in ahead] == [1]
        assert not generator.open
        assert source.consumed == 6
        release.set()
        assert source.settle() == ahead
        hangs[0] = False
        assert source.take(1) is ahead[0]
        drawn = [ids(batch) for batch in source.settle()]
    with source_of(ScriptedGenerator(saying("a", "b")), max_staleness=2) as other:
        batches = [other.take(step) for step in range(4)]
    assert drawn == [ids(batch) for batch in batches[2:]]


def test_whoever_is_patient_loses_nothing() -> None:
    is_open = threading.Event()
    generator = ScriptedGenerator(lambda r: [(i, Say("a", after=is_open.is_set)) for i in (0, 1)])
    asked: list[bool] = []

    def is_patient() -> bool:
        asked.append(True)
        if len(asked) == 2:
            is_open.set()
        return True

    with source_of(generator, max_staleness=1) as source:
        source.put_back([Batch(step=0, groups=[])], consumed=3)
        source.take(0)
        assert [batch.step for batch in source.settle(is_patient=is_patient)] == [1]
        assert len(asked) >= 2


def test_it_ends_where_a_loop_runs_already() -> None:
    """As in a notebook, whose kernel has one in the thread that runs the cells."""

    async def cell() -> Batch:
        with source_of(ScriptedGenerator(saying("a")), max_staleness=1) as source:
            return source.take(0)

    assert asyncio.run(cell()).groups


def has_signal(generator: ScriptedGenerator, judge: Judge, **options: Any) -> bool:
    """Whether a step of one group can be filled at the first try."""
    options |= {"use_dynamic_sampling": True, "dynamic_sampling_max_gen_batches": 1}
    with source_of(generator, judge=judge, num_prompts_per_step=1, **options) as source:
        try:
            return len(source.take(0).groups) == 1
        except TrainingError:
            return False


def test_completions_that_the_loss_leaves_out_are_no_signal() -> None:
    generator = ScriptedGenerator(lambda r: [(0, Say("a", "length")), (1, Say("b"))])
    judge = Judge(lambda text, m: {"reward": float(text == "b")})
    assert has_signal(generator, judge)
    assert not has_signal(generator, judge, overlong_filtering=True)


def test_dynamic_sampling_for_gdpo_looks_at_the_components() -> None:
    """Completions that are good at different things have the same total, and may have much to
    teach: with equal weights it cancels out.
    """
    named = {"a": {"right": 1.0, "short": 0.0}, "b": {"right": 0.0, "short": 1.0}}
    generator, judge = saying("a", "b"), Judge(lambda text, m: {"rewards": named[text]})
    weighted = {"name": "gdpo", "reward_weights": {"right": 2.0, "short": 1.0}}
    assert has_signal(ScriptedGenerator(generator), judge, adv_estimator=weighted)
    assert not has_signal(ScriptedGenerator(generator), judge, adv_estimator={"name": "gdpo"})
    assert not has_signal(ScriptedGenerator(generator), judge)


@pytest.mark.parametrize("name", sorted({*plugins.names("advantages")} - {"gdpo", "remax", "tree"}))
def test_a_group_from_which_its_estimator_learns_nothing_has_no_signal(name: str) -> None:
    """The best two are equal, so neither adds anything to the best of all three.

    `gdpo` compares components, `tree` completions that branch (below), and `remax` is refused with
    dynamic sampling.
    """
    generator = ScriptedGenerator(saying("a", "a", "b"))
    judge = Judge(lambda text, m: {"reward": float(text == "a")})
    options = {"num_generations_per_prompt": 3, "adv_estimator": {"name": name}}
    assert has_signal(generator, judge, **options) is (name != "pass_at_k")


def test_the_best_two_may_be_equal_by_the_clamp_of_scaling_alone() -> None:
    judge = Judge(lambda text, m: {"reward": {"a": 2.0, "b": 1.0, "c": 0.0}[text]})
    options = {"num_generations_per_prompt": 3, "adv_estimator": {"name": "pass_at_k"}}
    generator = saying("a", "b", "c")
    assert has_signal(ScriptedGenerator(generator), judge, **options)
    options["reward_scaling"] = {"enabled": True, "source_min": 0.0, "source_max": 1.0}
    assert not has_signal(ScriptedGenerator(generator), judge, **options)


@pytest.mark.parametrize("credit", ["completion", "segment"])
def test_dynamic_sampling_compares_completions_that_branch(credit: str) -> None:
    def script(request: Any) -> list[Any]:
        size = request.sampling.max_new_tokens
        texts = ["cc"] if request.branch_of else ["aaaa", "bbbb"]
        return [(index, Say(text[:size])) for index, text in enumerate(texts)]

    options = {
        "num_generations_per_prompt": 3,
        "tree": {"branches": 1, "rounds": 1, "segment": 2},
        "adv_estimator": {"name": "tree", "tree": {"credit": credit}},
    }
    judge = Judge(lambda text, m: {"reward": float("c" in text)})
    assert has_signal(ScriptedGenerator(script), judge, **options)
    judge = Judge(lambda text, m: {"reward": 1.0})
    assert not has_signal(ScriptedGenerator(script), judge, **options)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_completion_without_a_finite_component_fails_alone(dynamic: bool) -> None:
    named = {
        "a": {"right": 1.0, "short": 0.0},
        "b": {"right": 0.0, "short": 1.0},
        "c": {"right": 1.0},  # a function's result that is not finite is left out of its parts
        "d": {"right": 1.0, "short": 1.0},
    }
    judge = Judge(lambda text, m: {"parts": named[text]})
    generator = ScriptedGenerator(saying(*named))
    options = {"num_generations_per_prompt": 4, "adv_estimator": {"name": "gdpo"}}
    with source_of(
        generator, judge=judge, num_prompts_per_step=1, use_dynamic_sampling=dynamic, **options
    ) as source:
        (group,) = source.take(0).groups
    assert [one.reward is None for one in group.rollouts_G] == [False, False, True, False]
    assert "'short'" in (group.rollouts_G[2].failure or "")


def stop(num_groups: int) -> None:
    raise Stop
