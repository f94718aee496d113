"""What a batch of rollouts is made of: the next tasks, and the groups of them that are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from laurel.algorithms.judging import Clock
from laurel.algorithms.rollout_metrics import failure_counts
from laurel.algorithms.rollouts import Rollouts
from laurel.algorithms.stopping import NothingLeft
from laurel.config.grpo_training import GRPOConfig
from laurel.data.loader import Stream
from laurel.errors import TrainingError
from laurel.types import RolloutGroup, SamplingParams, Task

TRAINING, VALIDATION = 0, 1
"""First of the numbers that seed a batch."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """The rollouts of one step."""

    step: int
    """The step (from 0) that learns from them."""
    groups: list[RolloutGroup]
    clock: Clock = field(default_factory=Clock)
    num_batches: int = 1
    """Batches of generation it took, with dynamic sampling."""
    num_discarded: int = 0
    """Groups with a signal that were more than the step needs."""
    num_without_signal: int = 0
    """Groups that dynamic sampling left out."""
    num_replaced: int = 0
    """Groups in whose place others were drawn, as too few of them have a reward."""
    failures_left_out: dict[str, int] = field(default_factory=dict)
    """Completions without a reward in groups that were left out, by the word for why."""

    def leave_out(self, groups: Sequence[RolloutGroup]) -> None:
        """Count what failed in groups that the step will not see."""
        for word, number in failure_counts(groups).items():
            self.failures_left_out[word] = self.failures_left_out.get(word, 0) + number


class BatchPlayer:
    """Plays the batches of a run, one after the other."""

    def __init__(
        self,
        rollouts: Rollouts,
        tasks: Sequence[Task],
        config: GRPOConfig,
        sampling: SamplingParams,
        *,
        shuffle: bool,
        noise: Callable[[str], float],
    ) -> None:
        """See `RolloutSource`."""
        self.tasks = tasks
        self.consumed = 0
        """Tasks of the stream that batches were begun with."""
        self._rollouts = rollouts
        self._config = config
        self._sampling = sampling
        self._stream = Stream(len(tasks), shuffle=shuffle, seed=config.seed)
        self._noise = noise

    async def play(self, step: int, *, on_group: Callable[[RolloutGroup], None]) -> Batch:
        """The batch of a step.

        Args:
            step: From 0.
            on_group: Called as soon as a group is finished, also for one that is left out.

        Raises:
            NothingLeft: Dynamic sampling has used up the tasks of all epochs.
            TrainingError: It has found too few groups with a signal.
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
                clock=batch.clock,
                on_group=on_group,
            )
            self._rollouts.check_failures(played)
            batch.num_batches = number + 1
            useful = [group for group in played if self._has_signal(group)]
            batch.num_without_signal += len(played) - len(useful)
            batch.leave_out([group for group in played if not self._has_signal(group)])
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
        """Fill a batch with groups that have enough rewards; after so many tries, with others."""
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
                clock=batch.clock,
                on_group=on_group,
            )
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

    def _is_valid(self, group: RolloutGroup) -> bool:
        """Whether enough of its completions have a reward."""
        num_valid = sum(rollout.reward is not None for rollout in group.rollouts_G)
        return num_valid >= min(self._config.min_valid_per_group, len(group.rollouts_G))

    def _what_it_has(self, batch: Batch) -> str:
        return (
            f"step {batch.step + 1} has {len(batch.groups)} of "
            f"{self._config.num_prompts_per_step} groups whose rewards differ."
        )

    def _next_tasks(self, batch: Batch) -> list[Task]:
        """The tasks of one batch of generation, with dynamic sampling.

        Raises:
            NothingLeft: All epochs are used up.
        """
        config = self._config
        count = config.num_prompts_per_step
        num_tasks = max(config.max_num_epochs * len(self.tasks), count)
        count = min(round(count * config.batch_multiplier), num_tasks - self.consumed)
        if count <= 0:
            raise NothingLeft(
                f"no step {batch.step + 1}: all {num_tasks} tasks have been drawn "
                f"(grpo.max_num_epochs={config.max_num_epochs}), and "
                f"{self._what_it_has(batch)}"
            )
        rows = self._stream.rows(self.consumed, count)
        self.consumed += count
        return [self.tasks[row] for row in rows]

    def _has_signal(self, group: RolloutGroup) -> bool:
        """Whether its rewards differ by more than the noise of who gave them."""
        used = [
            r
            for r in group.rollouts_G
            if r.reward is not None and not (r.truncated and self._config.overlong_filtering)
        ]
        columns = [[r.reward for r in used if r.reward is not None]]
        if self._config.adv_estimator.name == "gdpo":  # which compares them one by one
            names = sorted({name for r in used for name in r.components})
            columns = [[r.components.get(name, 0.0) for r in used] for name in names] or columns
        floor = self._config.adv_estimator.noise_floor_factor * self._noise(group.task.environment)
        return (
            len(used) > 1
            and self._is_valid(group)
            and any(
                float(np.ptp(column)) > 0 and float(np.std(column)) >= floor for column in columns
            )
        )
