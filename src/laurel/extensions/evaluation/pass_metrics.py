"""Figures of a policy on scored tasks: mean reward with its standard error, and pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

RewardsBG = Sequence[Sequence[float | None]]
"""The reward of each completion G of each task B; None where it could not be scored."""


def reward_metrics(rewards_BG: RewardsBG) -> dict[str, float]:
    """Return the mean reward over tasks, its standard error, and the counts of failures.

    Completions of the same task are correlated, so the standard error is computed over the means of
    the tasks. It is undefined, and omitted, for a single task.

    Returns:
        `reward_mean`, `reward_standard_error`, `num_completions`, `num_failures` (completions
        without a reward), `num_tasks` and `num_tasks_unjudged` (tasks without any reward). Without
        any reward at all there is no mean.
    """
    scored_B = [[reward for reward in row if reward is not None] for row in rewards_BG]
    # A task without any reward is left out: a mean of 0 would count a failure as a wrong answer.
    means = [fmean(row) for row in scored_B if row]
    figures: dict[str, float] = {}
    if means:
        figures["reward_mean"] = fmean(means)
    if len(means) > 1:
        figures["reward_standard_error"] = stdev(means) / math.sqrt(len(means))
    return figures | {
        "num_tasks": float(len(rewards_BG)),
        "num_tasks_unjudged": float(len(rewards_BG) - len(means)),
        "num_completions": float(sum(len(row) for row in rewards_BG)),
        "num_failures": float(sum(reward is None for row in rewards_BG for reward in row)),
    }


def pass_metrics(rewards_BG: RewardsBG) -> dict[str, float]:
    """Return `pass@k` for k = 1, 2, 4, ... and the number of completions of a task.

    A completion passes where its reward is at least 1. Each is the mean over the tasks that have at
    least k scored completions; a k that no task has is left out.
    """
    scored_B = [[reward for reward in row if reward is not None] for row in rewards_BG]
    most = max((len(row) for row in scored_B), default=0)
    figures: dict[str, float] = {}
    # Tasks with failures have fewer completions: for each k only those with enough take part.
    for k in sorted({2**i for i in range(most.bit_length())} | {most}):
        chances = [
            pass_at(k, num_sampled=len(row), num_passed=sum(reward >= 1 for reward in row))
            for row in scored_B
            if 0 < k <= len(row)
        ]
        if chances:
            figures[f"pass@{k}"] = fmean(chances)
    return figures


def pass_at(k: int, *, num_sampled: int, num_passed: int) -> float:
    """Return the chance that one of k completions passes, from n samples of which c passed.

    `1 - C(n - c, k) / C(n, k)`: the estimate without bias of Chen et al. (2021,
    arXiv:2107.03374, section 2.1).

    Raises:
        ValueError: k is more than the number of samples.
    """
    if not 1 <= k <= num_sampled or not 0 <= num_passed <= num_sampled:
        raise ValueError(f"pass@{k} of {num_passed} that passed among {num_sampled}")
    return 1.0 - math.comb(num_sampled - num_passed, k) / math.comb(num_sampled, k)
