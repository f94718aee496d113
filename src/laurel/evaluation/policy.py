"""How good a policy is at tasks that were judged: mean reward, pass@k, and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

RewardsBG = Sequence[Sequence[float | None]]
"""Of each completion G of each task B; None: it could not be judged."""


def reward_figures(rewards_BG: RewardsBG) -> dict[str, float]:
    """The mean reward over tasks, how sure it is, and what could not be judged.

    Completions of a task are alike, so that the standard error is taken over tasks: each counts by
    the mean of its completions. It is left out of one task alone.

    Returns:
        `reward_mean`, `reward_standard_error`, `num_completions`, `num_failures` (completions
        without a reward), `num_tasks` and `num_tasks_unjudged` (tasks without any reward). Without
        any reward at all there is no mean.
    """
    judged_B = [[reward for reward in row if reward is not None] for row in rewards_BG]
    means = [fmean(row) for row in judged_B if row]
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


def pass_figures(rewards_BG: RewardsBG, *, passing: float = 1.0) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4, ... and the number of completions of a task.

    Args:
        rewards_BG: A completion passes where its reward is at least `passing`.
        passing: See there.

    Returns:
        Each is the mean over the tasks that have at least k judged completions; a k that no task
        has is left out.
    """
    judged_B = [[reward for reward in row if reward is not None] for row in rewards_BG]
    most = max((len(row) for row in judged_B), default=0)
    figures: dict[str, float] = {}
    for k in sorted({2**i for i in range(most.bit_length())} | {most}):
        chances = [
            pass_at(k, num_drawn=len(row), num_passed=sum(reward >= passing for reward in row))
            for row in judged_B
            if 0 < k <= len(row)
        ]
        if chances:
            figures[f"pass@{k}"] = fmean(chances)
    return figures


def pass_at(k: int, *, num_drawn: int, num_passed: int) -> float:
    """Chance that one of k completions passes, from n that were drawn, c of which passed.

    `1 - C(n - c, k) / C(n, k)`: the estimate without bias of Chen et al. (2021,
    arXiv:2107.03374, section 2.1).

    Raises:
        ValueError: More are asked for than were drawn.
    """
    if not 1 <= k <= num_drawn or not 0 <= num_passed <= num_drawn:
        raise ValueError(f"pass@{k} of {num_passed} that passed among {num_drawn}")
    return 1.0 - math.comb(num_drawn - num_passed, k) / math.comb(num_drawn, k)
