"""Validates a policy on tasks that are not trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from laurel.config.grpo import GRPOConfig
from laurel.grpo.metrics import environment_metrics, rollout_metrics
from laurel.grpo.source import RolloutSource, Waiting
from laurel.protocols import Environment
from laurel.types import RolloutGroup, SamplingParams, Task

KEPT = ("reward_std", "reward_min", "reward_max", "truncation_rate", "avg_turns_per_sample")
"""The metrics of rollouts that a validation logs besides its own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyValidation:
    """Runs the validation tasks of a run, with the sampling parameters for validation."""

    tasks: Sequence[Task]
    config: GRPOConfig
    sampling: SamplingParams
    set_of: Mapping[str, str] = field(default_factory=dict)
    """The name of a task's validation set by the task's id; only named sets have entries."""

    @property
    def chosen(self) -> list[Task]:
        """The tasks that are validated: the first `max_val_samples` of each validation set."""
        counts: Counter[str] = Counter()
        chosen = []
        for task in self.tasks:
            name = self.set_of.get(task.id, "")
            counts[name] += 1
            if counts[name] <= self.config.max_val_samples:
                chosen.append(task)
        return chosen

    def by_set(self, groups: Sequence[RolloutGroup]) -> dict[str, list[RolloutGroup]]:
        """Return the groups by the name of their validation set; unnamed sets are omitted."""
        named: dict[str, list[RolloutGroup]] = {}
        for group in groups:
            name = self.set_of.get(group.task.id)
            if name is not None:
                named.setdefault(name, []).append(group)
        return named

    def play(
        self, source: RolloutSource, *, while_waiting: Waiting = lambda num_tasks: None
    ) -> list[RolloutGroup]:
        """Run the rollouts of the chosen tasks, in batches of `val_batch_size`.

        The seeds do not depend on the step, so validations differ only by the policy.

        Args:
            while_waiting: Called with the number of finished tasks, a few times a second and after
                each batch. If it raises an exception, the validation ends with that exception.

        Raises:
            EnvironmentFailedError: An environment failed on too many completions.
        """
        tasks = self.chosen
        groups: list[RolloutGroup] = []
        for first in range(0, len(tasks), self.config.val_batch_size):
            batch = tasks[first : first + self.config.val_batch_size]

            def count(num_tasks: int, *, before: int = first) -> None:
                while_waiting(before + num_tasks)

            groups += source.play(
                batch,
                num_generations=self.config.val_num_generations_per_prompt,
                sampling=self.sampling,
                batch=(first,),
                while_waiting=count,
            )
            while_waiting(first + len(batch))
        # Failures are checked over all batches, because the last may be a single completion.
        source.check_failures(groups)
        return groups


def validation_metrics(
    groups: Sequence[RolloutGroup], environments: Mapping[str, Environment]
) -> dict[str, float]:
    """Return the metrics of a validation; their names have no prefix such as `validation/`.

    `reward_mean` excludes completions without a reward, which `num_failures` counts. If every
    reward is 0 or 1, `accuracy` equals `reward_mean`, and `pass@k` is computed over the tasks whose
    k > 1 completions all have a reward. `avg_length` is in tokens.
    """
    measured = rollout_metrics(groups)
    figures = {"num_failures": measured.get("num_failures", 0.0)}
    if "reward" in measured:
        figures["reward_mean"] = measured["reward"]
    figures |= {name: measured[name] for name in KEPT if name in measured}
    if "mean_gen_tokens_per_sample" in measured:
        figures["avg_length"] = measured["mean_gen_tokens_per_sample"]
    rewards_BG = [[r.reward for r in g.rollouts_G if r.reward is not None] for g in groups]
    scored = [rewards_G for rewards_G in rewards_BG if rewards_G]
    figures["num_valid_samples"] = float(sum(map(len, scored)))
    if scored and all(reward in (0.0, 1.0) for rewards_G in scored for reward in rewards_G):
        figures["accuracy"] = figures["reward_mean"]
        width = max(len(group.rollouts_G) for group in groups)
        whole = [max(rewards_G) for rewards_G in scored if len(rewards_G) == width]
        if width > 1 and whole:
            figures[f"pass@{width}"] = float(np.mean(whole))
    return figures | environment_metrics(groups, environments)
