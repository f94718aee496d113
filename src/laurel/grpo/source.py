"""Samples the batches of a GRPO run, ahead of its steps, and saves them in its checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from laurel import plugins
from laurel.config.grpo import GRPOConfig, HealthConfig
from laurel.data.tasks import EndlessTasks
from laurel.errors import EngineError, TrainingError
from laurel.grpo.advantages import (
    component_weights,
    compute_advantages,
    fail_without_components,
    resolve,
    scaled,
    slope,
)
from laurel.grpo.branching import tree_segments
from laurel.grpo.grading import RolloutStats
from laurel.grpo.metrics import failure_counts
from laurel.grpo.rollouts import CLOSING_SECONDS, TRAINING, VALIDATION, Rollouts
from laurel.observe.health import Alarms
from laurel.protocols import Environment
from laurel.training.epochs import permutation
from laurel.training.learner import Learner
from laurel.training.state import CheckpointParts, PolicyRunState, hash_of, write_bad_rows
from laurel.training.stopping import NothingLeft
from laurel.types import (
    Branch,
    Message,
    Rollout,
    RolloutGroup,
    SamplingParams,
    StepReward,
    Task,
    Turn,
)
from laurel.workers.threads import BackgroundLoop, cancel_others

if TYPE_CHECKING:
    from laurel.models.chat import ChatFormat
    from laurel.protocols import Environment


# How a batch is collected: the next tasks are taken, and some of their groups are kept.

Tasks = Sequence[Task] | EndlessTasks
"""The tasks of a run by their number; `EndlessTasks` makes each when it is its turn."""


MIN_VALID = 2
"""Completions of a group that must have a reward, where there are as many: one alone has nothing to
be compared with."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """The groups of rollouts that one step trains on, and how they were collected."""

    step: int
    """The number of the step, from 0, that trains on the groups."""
    groups: list[RolloutGroup]
    stats: RolloutStats = field(default_factory=RolloutStats)
    num_batches: int = 1
    """The number of batches of generation that were needed."""
    num_discarded: int = 0
    """The number of groups with different rewards beyond those that the step needs."""
    num_without_signal: int = 0
    """The number of groups that dynamic sampling dropped, because their rewards hardly differ."""
    num_replaced: int = 0
    """The number of groups that were replaced: too few of their completions have a reward."""
    failures_left_out: dict[str, int] = field(default_factory=dict)
    """Counts of the completions without a reward in dropped groups, by reason."""

    def leave_out(self, groups: Sequence[RolloutGroup]) -> None:
        """Add the failures in groups that are dropped from the batch to `failures_left_out`."""
        for word, number in failure_counts(groups).items():
            self.failures_left_out[word] = self.failures_left_out.get(word, 0) + number


class Stream:
    """An endless stream of the rows of all epochs, as a pure function of position and seed.

    It serves steps that need different numbers of rows. Each epoch has its own permutation, and a
    step may take the end of one epoch and the beginning of the next.
    """

    def __init__(self, num_rows: int, *, shuffle: bool, seed: int) -> None:
        self.num_rows = num_rows
        self.shuffle = shuffle
        self.seed = seed
        self._orders: dict[int, np.ndarray] = {}

    def rows(self, start: int, count: int) -> list[int]:
        """Return the indices of the rows at positions `start` to `start + count`."""
        return [self._row(*divmod(place, self.num_rows)) for place in range(start, start + count)]

    def _row(self, epoch: int, within: int) -> int:
        if not self.shuffle:
            return within
        if epoch not in self._orders:
            # Only the latest epoch is kept, as positions rise.
            self._orders = {epoch: permutation(self.num_rows, self.seed, epoch)}
        return int(self._orders[epoch][within])


class BatchCollector:
    """Generates training batches one after the other, and drops or replaces unusable groups."""

    def __init__(
        self,
        rollouts: Rollouts,
        tasks: Tasks,
        config: GRPOConfig,
        sampling: SamplingParams,
        *,
        shuffle: bool,
        noise: Callable[[str], float],
    ) -> None:
        """Begin with the first task of the set; `RolloutSource` describes the arguments."""
        self.tasks = tasks
        self.consumed = 0
        """The number of tasks of the stream that batches have used so far."""
        self._rollouts = rollouts
        self._config = config
        self._sampling = sampling
        self._stream = Stream(len(tasks), shuffle=shuffle, seed=config.seed)
        self._noise = noise
        estimator = plugins.find(plugins.Advantage, config.adv_estimator.name)
        self._reads_components = estimator.reads_components
        self._with_greedy = estimator.baseline == "greedy"
        self._estimator = resolve(config)

    async def play(self, step: int, *, on_group: Callable[[RolloutGroup], None]) -> Batch:
        """Generate the batch of a step.

        Args:
            step: The number of the step, from 0.
            on_group: Called with each group as soon as it is finished, even if it is dropped.

        Raises:
            NothingLeft: Dynamic sampling has used up the tasks of all epochs.
            TrainingError: Dynamic sampling has found too few groups whose rewards differ.
        """
        config, batch = self._config, Batch(step=step, groups=[])
        limit = config.dynamic_sampling_max_gen_batches
        if not config.use_dynamic_sampling:
            return await self._play_until_valid(batch, limit, on_group)
        for number in range(limit):
            played = await self._rollouts.play(
                self._next_tasks(batch),
                num_generations=config.num_generations_per_prompt,
                sampling=self._sampling,
                batch=(TRAINING, step, number),
                with_greedy=self._with_greedy,
                stats=batch.stats,
                on_group=on_group,
            )
            played = self._checked(played)
            self._rollouts.check_failures(played)
            batch.num_batches = number + 1
            useful = [group for group in played if self._has_signal(group)]
            batch.num_without_signal += len(played) - len(useful)
            batch.leave_out([group for group in played if group not in useful])
            batch.groups += useful
            if len(batch.groups) >= config.num_prompts_per_step:
                batch.num_discarded = len(batch.groups) - config.num_prompts_per_step
                batch.groups = batch.groups[: config.num_prompts_per_step]
                return batch
        raise TrainingError(
            f"dynamic sampling: after {limit} batches of generation "
            f"(grpo.dynamic_sampling_max_gen_batches) {self._what_it_has(batch)} "
            "The tasks are too easy or too hard for this policy, or the environment gives all "
            "completions the same reward."
        )

    async def _play_until_valid(
        self, batch: Batch, limit: int, on_group: Callable[[RolloutGroup], None]
    ) -> Batch:
        # Groups without enough rewards are replaced by those of other tasks; the number of tries is
        # limited.
        config, size = self._config, self._config.num_prompts_per_step
        everything: list[RolloutGroup] = []
        for number in range(limit):
            rows = self._stream.rows(self.consumed, size - len(batch.groups))
            self.consumed += len(rows)
            played = await self._rollouts.play(
                [self.tasks[row] for row in rows],
                num_generations=config.num_generations_per_prompt,
                sampling=self._sampling,
                batch=(TRAINING, batch.step, number),
                with_greedy=self._with_greedy,
                stats=batch.stats,
                on_group=on_group,
            )
            played = self._checked(played)
            everything += played
            self._rollouts.check_failures(everything)
            batch.num_batches = number + 1
            poor = [group for group in played if not self._is_valid(group)]
            batch.groups += [group for group in played if self._is_valid(group)]
            if not poor:
                return batch
            if number + 1 == limit:
                batch.groups += poor
                return batch
            batch.num_replaced += len(poor)
            batch.leave_out(poor)
        raise AssertionError("a batch has at least one try")

    def _checked(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        if not self._reads_components:
            return groups
        return fail_without_components(groups, self._config.adv_estimator)

    def _is_valid(self, group: RolloutGroup) -> bool:
        if self._with_greedy and (group.greedy is None or group.greedy.reward is None):
            return False
        num_valid = sum(rollout.reward is not None for rollout in group.rollouts_G)
        return num_valid >= min(MIN_VALID, len(group.rollouts_G))

    def _what_it_has(self, batch: Batch) -> str:
        return (
            f"step {batch.step + 1} has {len(batch.groups)} of "
            f"{self._config.num_prompts_per_step} groups whose rewards differ."
        )

    def _next_tasks(self, batch: Batch) -> list[Task]:
        # With dynamic sampling a step may need several batches of generation.
        config = self._config
        count = config.num_prompts_per_step
        num_tasks = max(config.num_epochs * len(self.tasks), count)
        count = min(round(count * config.batch_multiplier), num_tasks - self.consumed)
        if count <= 0:
            raise NothingLeft(
                f"no step {batch.step + 1}: all {num_tasks} tasks have been used "
                f"(grpo.max_num_epochs={config.num_epochs}), and "
                f"{self._what_it_has(batch)}"
            )
        rows = self._stream.rows(self.consumed, count)
        self.consumed += count
        return [self.tasks[row] for row in rows]

    def _has_signal(self, group: RolloutGroup) -> bool:
        # Rewards must differ by more than their noise.
        rewards_G = [self._reward(rollout) for rollout in group.rollouts_G]
        pairs = zip(group.rollouts_G, rewards_G, strict=True)
        used = [rollout for rollout, reward in pairs if reward is not None]
        columns = [[reward for reward in rewards_G if reward is not None]]
        if self._reads_components and used:  # the estimator compares them one by one
            weights = component_weights((r.components for r in used), self._config.adv_estimator)
            columns = [[r.components[name] for r in used] for name in weights]
        if self._config.adv_estimator.per_step:
            rows = [[step.value for step in r.steps] for r in used if r.steps]
            columns = [[value for row in rows for value in row]] if len(rows) > 1 else []
        noise = slope(self._config.reward_scaling) * self._noise(group.task.environment)
        floor = self._config.adv_estimator.noise_floor_factor * noise
        return (
            len(used) > 1
            and self._is_valid(group)
            and any(
                float(np.ptp(column)) > 0 and float(np.std(column)) >= floor for column in columns
            )
            and (self._config.adv_estimator.per_step or self._teaches(group, rewards_G, noise))
        )

    def _reward(self, rollout: Rollout) -> float | None:
        # Rewards that the clamp of `reward_scaling` makes equal give no signal.
        scaling, reward = self._config.reward_scaling, rollout.reward
        if reward is None or (rollout.truncated and self._config.overlong_filtering):
            return None
        return scaled(reward, scaling) if scaling.enabled else reward

    def _teaches(
        self, group: RolloutGroup, rewards_G: Sequence[float | None], noise: float
    ) -> bool:
        # An estimator may learn nothing of rewards that differ: pass@k, if the best are equal.
        found = compute_advantages(
            [rewards_G],
            self._estimator,
            noise=[noise],
            components_BG=[[one.components for one in group.rollouts_G]],
            lengths_BG=[[int(one.mask_L.sum()) for one in group.rollouts_G]],
            segments_BG=None if self._config.tree is None else [tree_segments(group.rollouts_G)],
        )
        return not found.metrics["groups_without_signal"]


T = TypeVar("T")

Waiting = Callable[[int], None]

SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(slots=True, kw_only=True, eq=False)
class _Ahead:
    step: int
    future: Future[Batch] = field(default_factory=Future)
    # The number of tasks used when the batch was begun; None if it is not begun, or used none.
    before: int | None = None

    @property
    def is_finished(self) -> bool:
        future = self.future
        return future.done() and not future.cancelled() and future.exception() is None


def noise_floor(environments: Mapping[str, Environment], name: str, *, per_step: bool) -> float:
    """Return the noise floor of the rewards that are compared: of completions, or of steps."""
    environment = environments[name]
    return environment.step_noise_floor() if per_step else environment.noise_floor()


class RolloutSource:
    """Yields the batches of a run's steps in order; rollouts run in a background thread."""

    def __init__(
        self,
        rollouts: Rollouts,
        tasks: Tasks,
        config: GRPOConfig,
        sampling: SamplingParams,
        *,
        shuffle: bool,
        total_steps: int,
        noise: Callable[[str], float] = lambda environment: 0.0,
    ) -> None:
        """Start the background thread.

        Args:
            rollouts: Runs the rollouts; `close` closes it too.
            shuffle: Whether each epoch reads the tasks in another random order.
            total_steps: The maximum number of steps. With dynamic sampling there may be fewer,
                because it uses at most the tasks of all epochs.
            noise: Maps the name of an environment to the standard deviation of the errors of its
                rewards. Dynamic sampling drops groups whose rewards deviate less than
                `noise_floor_factor` times that.
        """
        self._rollouts = rollouts
        self._collector = BatchCollector(
            rollouts, tasks, config, sampling, shuffle=shuffle, noise=noise
        )
        self._max_staleness = config.max_staleness
        self._total_steps = total_steps
        self._next = 0
        self._num_played = 0
        self._ahead: deque[_Ahead] = deque()
        # Held while cancelled tasks end, and while the loop is stopped.
        self._ending = threading.RLock()
        self._is_stopped = False
        self._nothing_left: NothingLeft | None = None
        self._background = BackgroundLoop("rollouts")
        self._one_at_a_time = asyncio.Lock()

    @property
    def chat(self) -> ChatFormat:
        """The policy's chat format."""
        return self._rollouts.chat

    @property
    def tasks(self) -> Tasks:
        """The training set."""
        return self._collector.tasks

    @property
    def consumed(self) -> int:
        """The number of tasks that batches have used so far; repeated epochs count again."""
        return self._collector.consumed

    def take(self, step: int, *, while_waiting: Waiting = lambda num_groups: None) -> Batch:
        """Return the batch of a step, and begin the batches that may be generated ahead.

        Args:
            step: The number of the step. Calls must follow the order of the steps.
            while_waiting: Called a few times a second with the number of groups finished so far. If
                it raises an exception, the exception is raised here, and unfinished batches are
                discarded as if they had never been requested.

        Raises:
            NothingLeft: Dynamic sampling has used up the tasks of all epochs.
        """
        if not self._ahead:
            self._next = step
        last = min(step + self._max_staleness, self._total_steps - 1)
        while self._next <= last:
            ahead = _Ahead(step=self._next)
            ahead.future = self._background.submit(self._collect(ahead))
            self._ahead.append(ahead)
            self._next += 1
        try:
            batch = self._wait(self._ahead[0].future, while_waiting)
        except BaseException:
            self._give_up()
            raise
        self._ahead.popleft()
        assert batch.step == step
        return batch

    def settle(self, *, is_patient: Callable[[], bool] = lambda: True) -> list[Batch]:
        """Wait until no rollout is in progress, and return the batches generated ahead.

        Args:
            is_patient: Called a few times a second. Once it returns False, unfinished batches are
                discarded as if they had never been requested, and only finished ones are returned.
        """
        for ahead in list(self._ahead):
            while not wait((ahead.future,), timeout=SECONDS_BETWEEN_LOOKS).done:
                if not is_patient():
                    self._give_up()
                    return self._finished()
            if not isinstance(ahead.future.exception(), NothingLeft):  # the step may never come
                ahead.future.result()
        return self._finished()

    def _finished(self) -> list[Batch]:
        return [ahead.future.result() for ahead in self._ahead if ahead.is_finished]

    def put_back(self, batches: Sequence[Batch], *, consumed: int) -> None:
        """Restore the state of a checkpoint.

        Args:
            consumed: The number of tasks that had been used.
        """
        self._collector.consumed = consumed
        for batch in batches:
            ahead = _Ahead(step=batch.step)
            ahead.future.set_result(batch)
            self._ahead.append(ahead)
            self._next = batch.step + 1

    def play(
        self,
        tasks: Sequence[Task],
        *,
        num_generations: int,
        sampling: SamplingParams,
        batch: tuple[int, ...],
        while_waiting: Waiting = lambda num_groups: None,
    ) -> list[RolloutGroup]:
        """Run the rollouts of validation tasks.

        The caller checks failures with `check_failures`.

        Args:
            tasks: Tasks whose prompts fit into the context.
            batch: Numbers that identify this batch within a validation; the seeds depend on them.
            while_waiting: Called a few times a second with the number of groups finished so far. If
                it raises an exception, the exception is raised here, and the rollouts are
                cancelled.

        Returns:
            A group for each task, in order.
        """
        self._num_played = 0
        future = self._background.submit(
            self._rollouts.play(
                tasks,
                num_generations=num_generations,
                sampling=sampling,
                batch=(VALIDATION, *batch),
                on_group=self._count,
            )
        )
        try:
            return self._wait(future, while_waiting)
        except BaseException:
            self._drop([future])
            raise

    def check_failures(self, groups: Sequence[RolloutGroup]) -> None:
        """Check that no environment failed on too many completions (`env.max_failed_share`).

        Raises:
            EnvironmentFailedError: An environment failed on more.
        """
        self._rollouts.check_failures(groups)

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the generator in the event loop of the rollouts; return its result.

        Raises:
            EngineError: The coroutine did not end within the time limit of generation.
        """
        limit = self._rollouts.limits.generation_timeout

        async def bounded() -> T:
            try:
                return await asyncio.wait_for(coroutine, limit)
            except TimeoutError:
                raise EngineError(
                    f"the generator has not answered for {limit:.0f} s "
                    "(policy.generation.timeout_seconds)"
                ) from None

        return self._background.wait_for(bounded())

    def close(self) -> None:
        """Cancel the rollouts and end the thread; a call that was interrupted can be repeated."""
        with self._ending:
            try:
                if not self._is_stopped:
                    # A copy: a thread that waits removes what is cancelled.
                    self._drop([ahead.future for ahead in tuple(self._ahead)])
                    self._is_stopped = True
                self._background.close(self._end(), patience=0.0)
            finally:
                self._rollouts.close()

    async def _end(self) -> None:
        await cancel_others(1.0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.get_running_loop().shutdown_asyncgens(), timeout=1.0)

    def _wait(self, future: Future[T], while_waiting: Waiting) -> T:
        while not wait((future,), timeout=SECONDS_BETWEEN_LOOKS).done:
            while_waiting(self._num_played)
        return future.result()

    def _give_up(self) -> None:
        # Unfinished batches are discarded as if they had never been requested.
        kept = list(takewhile(lambda ahead: ahead.is_finished, self._ahead))
        lost = list(self._ahead)[len(kept) :]
        self._drop(ahead.future for ahead in lost)
        self._ahead = deque(kept)
        if lost:
            self._next = lost[0].step
        if lost and lost[0].before is not None:  # the others were begun after it, or not at all
            self._collector.consumed = lost[0].before

    def _drop(self, futures: Iterable[Future[Any]]) -> None:
        # Returns when nothing is sampled any more.
        for future in futures:
            future.cancel()

        async def others_have_ended() -> None:
            current = asyncio.current_task()
            if others := [task for task in asyncio.all_tasks() if task is not current]:
                await asyncio.wait(others, timeout=CLOSING_SECONDS)

        with self._ending:
            # The tasks behind the futures end a little later, which is awaited here. Once the loop
            # is being stopped, `close` has awaited them, and the loop would not run this.
            if not self._is_stopped:
                self._background.wait_for(others_have_ended())

    def _count(self, group: RolloutGroup) -> None:
        self._num_played += 1

    async def _collect(self, ahead: _Ahead) -> Batch:
        async with self._one_at_a_time:
            if self._nothing_left is not None:
                raise self._nothing_left
            ahead.before = self.consumed
            self._num_played = 0
            try:
                return await self._collector.play(ahead.step, on_group=self._count)
            except NothingLeft as reason:  # more epochs would begin this step once more
                self._collector.consumed, ahead.before = ahead.before, None
                self._nothing_left = reason
                raise


class GRPORunState(PolicyRunState):
    """Saves and restores a GRPO run.

    A checkpoint holds the policy, the position in the task stream, the rollouts generated ahead,
    and the state of environments and alarms.
    """

    def __init__(
        self,
        learner: Learner,
        parts: CheckpointParts,
        rows: Mapping[str, str],
        *,
        source: RolloutSource,
        environments: Mapping[str, Environment],
        alarms: Alarms | None = None,
    ) -> None:
        super().__init__(learner, parts, rows)
        self._source = source
        self._environments = environments
        self.alarms = alarms or Alarms(HealthConfig(enabled=False))

    def more(self) -> dict[str, Any]:
        """Return the state that only GRPO adds to a checkpoint.

        This is the position in the task stream, the batches generated ahead, and the states of
        environments and alarms. The call waits until no rollout is in progress.
        """
        return {
            "consumed": self._source.consumed,
            "ahead": [batch_to_dict(batch) for batch in self._source.settle()],
            "environments": {
                name: environment.state_dict()
                for name, environment in self._environments.items()
                if environment.spec.has_state
            },
            "alarms": self.alarms.state_dict(),
        }

    def restore_more(self, more: Mapping[str, Any]) -> None:
        """Restore the state of GRPO from `more`, which the method `more` returned."""
        known = self._source.tasks
        if isinstance(known, EndlessTasks):
            saved = {group["task"] for batch in more["ahead"] for group in batch["groups"]}
            tasks = {task_id: known.of_id(task_id) for task_id in saved}
        else:
            tasks = {task.id: task for task in known}
        if "notes" in more:
            # Older checkpoints hold notes apart, by environment.
            left = {name: iter(_notes_of_rollouts(noted)) for name, noted in more["notes"].items()}
            for group in (group for batch in more["ahead"] for group in batch["groups"]):
                name = tasks[group["task"]].environment
                for rollout in group["rollouts"]:
                    if name in left and rollout["reward"] is not None:
                        rollout["note"] = next(left[name], None)
        ahead = [batch_from_dict(batch, tasks) for batch in more["ahead"]]
        self._source.put_back(ahead, consumed=more["consumed"])
        for name, state in more["environments"].items():
            self._environments[name].load_state_dict(state)
        if "alarms" in more:  # older checkpoints have none
            self.alarms.load_state_dict(more["alarms"])


_ARRAYS = ("ids_L", "mask_L", "logprobs_L")


def batch_to_dict(batch: Batch) -> dict[str, Any]:
    """Convert a batch to a dict that a checkpoint can hold; each task is saved as its id."""
    return {
        "step": batch.step,
        "clock": asdict(batch.stats),
        "num_batches": batch.num_batches,
        "num_discarded": batch.num_discarded,
        "num_without_signal": batch.num_without_signal,
        "num_replaced": batch.num_replaced,
        "failures_left_out": batch.failures_left_out,
        "groups": [
            {
                "id": group.id,
                "task": group.task.id,
                "prompt_ids": torch.from_numpy(np.array(group.prompt_ids)),
                "rollouts": [_rollout_to_dict(rollout) for rollout in group.rollouts_G],
                "greedy": None if group.greedy is None else _rollout_to_dict(group.greedy),
            }
            for group in batch.groups
        ],
    }


def _rollout_to_dict(rollout: Rollout) -> dict[str, Any]:
    return {name: getattr(rollout, name) for name in Rollout.__dataclass_fields__} | {
        "messages": [[m.role, m.content] for m in rollout.messages],
        "components": dict(rollout.components),
        "steps": None if rollout.steps is None else [list(s) for s in rollout.steps],
        "branch": None if rollout.branch is None else list(rollout.branch),
        "turns": [list(turn) for turn in rollout.turns],
        **{k: torch.from_numpy(np.array(getattr(rollout, k))) for k in _ARRAYS},
    }


def batch_from_dict(saved: Mapping[str, Any], tasks: Mapping[str, Task]) -> Batch:
    """Convert the result of `batch_to_dict` to a batch."""
    return Batch(
        step=saved["step"],
        stats=RolloutStats(**saved["clock"]),
        num_batches=saved["num_batches"],
        num_discarded=saved["num_discarded"],
        num_without_signal=saved["num_without_signal"],
        num_replaced=saved.get("num_replaced", 0),  # older checkpoints have neither
        failures_left_out=dict(saved.get("failures_left_out", {})),
        groups=[
            RolloutGroup(
                id=group["id"],
                task=tasks[group["task"]],
                prompt_ids=group["prompt_ids"].numpy(),
                rollouts_G=tuple(map(_rollout_from_dict, group["rollouts"])),
                greedy=_rollout_from_dict(group["greedy"]) if group.get("greedy") else None,
            )
            for group in saved["groups"]
        ],
    )


def _rollout_from_dict(saved: Mapping[str, Any]) -> Rollout:
    return Rollout(
        **{
            **saved,
            "messages": tuple(Message(*said) for said in saved["messages"]),
            "steps": _steps_from(saved.get("steps")),
            "turns": tuple(Turn(*one) for one in saved.get("turns", ())),
            "invalid_turns": tuple(saved.get("invalid_turns", ())),
            "branch": Branch(*saved["branch"]) if saved.get("branch") else None,
            "begins": tuple(saved.get("begins", ())),
            **{name: saved[name].numpy() for name in _ARRAYS},
        }
    )


def _steps_from(saved: Sequence[Sequence[Any]] | None) -> tuple[StepReward, ...] | None:
    # Older checkpoints have none.
    return None if saved is None else tuple(StepReward(*step) for step in saved)


def _notes_of_rollouts(noted: Any) -> Sequence[Any]:
    if not isinstance(noted, Mapping):
        return noted or ()
    # A composite has notes of its own and of its parts, which may be composites.
    parts = {name: _notes_of_rollouts(of_part) for name, of_part in noted["parts"].items()}
    return [
        rewards and {"rewards": rewards, "parts": {name: p[i] for name, p in parts.items() if p}}
        for i, rewards in enumerate(noted["own"])
    ]


def fingerprint_of_tasks(tasks: Sequence[Task]) -> str:
    """Return a hash of the prompts and metadata of a task set, in order."""
    rows = ([[m.role, m.content] for m in task.prompt] for task in tasks)
    return hash_of(
        json.dumps([row, task.id, task.environment, dict(task.metadata)], default=repr)
        for row, task in zip(rows, tasks, strict=True)
    )


def write_bad_rollouts(
    run_dir: Path, step: int, groups: Sequence[RolloutGroup], reason: str
) -> Path:
    """Write the rollouts of a step whose update was not applied to a file; return its path."""
    rows = (
        {
            "source": group.task.source,
            "prompt": [[m.role, m.content] for m in group.task.prompt],
            "completions": [
                [[m.role, m.content] for m in rollout.messages] for rollout in group.rollouts_G
            ],
            "rewards": [rollout.reward for rollout in group.rollouts_G],
            "steps": [rollout.steps for rollout in group.rollouts_G],
            "lengths": [len(rollout.ids_L) for rollout in group.rollouts_G],
        }
        for group in groups
    )
    return write_bad_rows(run_dir, step, rows, reason=reason)
