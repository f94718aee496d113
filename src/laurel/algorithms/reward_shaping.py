"""What happens to a reward between the environment and the advantages.

In this order: `reward_scaling`, then `reward_shaping`, then (where asked for) the divergence from
the reference policy is subtracted. Rollouts keep the reward that their environment gave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from laurel.config.grpo_training import GRPOConfig
from laurel.config.policy_loss import PolicyLossConfig
from laurel.config.rewards import RewardScalingConfig, RewardShapingConfig
from laurel.types import Rollout, RolloutGroup

if TYPE_CHECKING:
    from laurel.types import LogProbs, Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedRewards:
    """The rewards that are learned from."""

    rewards_BG: list[list[float | None]]
    """None where a sample failed, or was cut off and `overlong_filtering` leaves it out."""
    metrics: dict[str, float]
    """`reward_scaling/clamped_fraction` and `reward_shaping/{penalty_mean,penalized_fraction}`,
    over the samples with a reward; `overlong_filtered`: how many were left out."""


def scaled(reward: float, config: RewardScalingConfig) -> float:
    """The reward, cut to the source range and mapped linearly to the target range."""
    cut = min(max(reward, config.source_min), config.source_max)
    share = (cut - config.source_min) / (config.source_max - config.source_min)
    return config.target_min + share * (config.target_max - config.target_min)


def slope(config: RewardScalingConfig) -> float:
    """How much a scaled reward differs where the reward differs by 1, inside the source range."""
    if not config.enabled:
        return 1.0
    width = config.target_max - config.target_min
    return abs(width) / (config.source_max - config.source_min)


def overlong_penalty(num_tokens: int, config: RewardShapingConfig, *, longest: int) -> float:
    """What a completion of this length loses (DAPO, arXiv 2503.14476); never below 0.

    Nothing up to `max_response_length - overlong_buffer_length` tokens, `overlong_buffer_penalty`
    at `max_response_length`, a straight line in between and, as in NeMo RL, beyond.

    Args:
        num_tokens: Tokens that the policy wrote.
        config: See there.
        longest: `max_response_length` where the configuration has none.
    """
    limit = config.max_response_length or longest
    excess = num_tokens - (limit - config.overlong_buffer_length)
    return max(excess / config.overlong_buffer_length * config.overlong_buffer_penalty, 0.0)


def stopped_improperly(reward: float, *, coefficient: float) -> float:
    """The reward of a completion that was cut off: never more than it would have had.

    A positive reward is multiplied by the coefficient. Doing so to a negative one would raise it:
    that one is divided by the coefficient, or doubled where the coefficient is below 0.5.
    """
    if reward > 0.0:
        return coefficient * reward
    return reward / max(coefficient, 0.5)


def shaped(rollout: Rollout, reward: float, config: RewardShapingConfig, *, longest: int) -> float:
    """The reward after its penalty; with a `stop_properly_penalty_coef`, that is the only one."""
    if config.stop_properly_penalty_coef is None:
        num_tokens = int(rollout.mask_L.sum())
        return reward - overlong_penalty(num_tokens, config, longest=longest)
    if not rollout.truncated:
        return reward
    return stopped_improperly(reward, coefficient=config.stop_properly_penalty_coef)


def shape_rewards(
    groups: Sequence[RolloutGroup], config: GRPOConfig, *, longest: int
) -> ShapedRewards:
    """The rewards of a batch as `reward_scaling`, `reward_shaping` and `overlong_filtering` say.

    Args:
        groups: The rollouts, judged.
        config: See there.
        longest: `policy.max_total_sequence_length`.
    """
    rewards_BG, penalties = list[list[float | None]](), list[float]()
    num_clamped = num_filtered = 0
    scaling = config.reward_scaling
    for group in groups:
        row_G = list[float | None]()
        for rollout in group.rollouts_G:
            reward = rollout.reward
            if reward is not None and config.overlong_filtering and rollout.truncated:
                num_filtered += 1
                reward = None
            if reward is not None:
                if scaling.enabled:
                    num_clamped += not scaling.source_min <= reward <= scaling.source_max
                    reward = scaled(reward, scaling)
                before = reward
                if config.reward_shaping.enabled:
                    reward = shaped(rollout, reward, config.reward_shaping, longest=longest)
                penalties.append(before - reward)
            row_G.append(reward)
        rewards_BG.append(row_G)
    metrics = dict[str, float]()
    if config.overlong_filtering:
        metrics["overlong_filtered"] = float(num_filtered)
    if scaling.enabled and penalties:
        metrics["reward_scaling/clamped_fraction"] = num_clamped / len(penalties)
    if config.reward_shaping.enabled and penalties:
        metrics["reward_shaping/penalty_mean"] = float(np.mean(penalties))
        metrics["reward_shaping/penalized_fraction"] = float(np.mean(np.array(penalties) > 0.0))
    return ShapedRewards(rewards_BG=rewards_BG, metrics=metrics)


# ------------------------------------------------------------------------------- KL in the reward


def divergence(
    policy_L: LogProbs, reference_L: LogProbs, mask_L: Mask, config: PolicyLossConfig
) -> float:
    """The estimated divergence of a whole completion from the reference policy.

    The sum over the policy's own tokens of the estimator of `reference_policy_kl_type`, with its
    clamps. Not weighted by the penalty. k1 is the unbiased choice here; it may be negative. NaN
    where a log-probability is not finite, whatever the clamps.

    Args:
        policy_L: Log-probabilities under the policy that drew the completion.
        reference_L: The same under the reference.
        mask_L: The policy's own tokens; what the others hold is not read.
        config: See there.
    """
    given = reference_L[mask_L].astype(np.float64), policy_L[mask_L].astype(np.float64)
    if not np.isfinite(given).all():
        return math.nan
    lead = given[0] - given[1]
    if config.kl_input_clamp_value is not None:
        lead = np.clip(lead, -config.kl_input_clamp_value, config.kl_input_clamp_value)
    if config.reference_policy_kl_type == "k1":
        values = -lead
    elif config.reference_policy_kl_type == "k2":
        values = np.square(lead) / 2.0
    else:
        lead = np.minimum(lead, 20.0)  # as in `importance`: its exponential stays finite
        values = np.expm1(lead) - lead
    if config.kl_output_clamp_value is not None:
        values = np.clip(values, -config.kl_output_clamp_value, config.kl_output_clamp_value)
    return float(values.sum())


NO_DIVERGENCE = "the divergence from the reference policy is not finite (loss_fn.use_kl_in_reward)"


def fail_without_divergence(
    groups: Sequence[RolloutGroup], divergences_BG: Sequence[Sequence[float]]
) -> list[RolloutGroup]:
    """The groups, where a completion with a reward and no finite divergence has failed."""
    return [
        replace(
            group,
            rollouts_G=tuple(
                replace(rollout, reward=None, failure=NO_DIVERGENCE)
                if rollout.reward is not None and not math.isfinite(kl)
                else rollout
                for rollout, kl in zip(group.rollouts_G, divergences_G, strict=True)
            ),
        )
        for group, divergences_G in zip(groups, divergences_BG, strict=True)
    ]


def lacks_divergences(groups: Sequence[RolloutGroup]) -> bool:
    """Whether that is why there is no completion to learn from."""
    failures = [rollout.failure for group in groups for rollout in group.rollouts_G]
    return None not in failures and NO_DIVERGENCE in failures


def mean_divergence(
    rewards_BG: Sequence[Sequence[float | None]], divergences_BG: Sequence[Sequence[float]]
) -> dict[str, float]:
    """`kl_in_reward`: the mean over the samples with a reward; nothing where there is none."""
    rows = zip(rewards_BG, divergences_BG, strict=True)
    counted = [kl for row in rows for reward, kl in zip(*row, strict=True) if reward is not None]
    return {"kl_in_reward": float(np.mean(counted))} if counted else {}


def subtract_divergences(
    rewards_BG: Sequence[Sequence[float | None]],
    divergences_BG: Sequence[Sequence[float]],
    *,
    weight: float,
) -> list[list[float | None]]:
    """Rewards minus `weight` times the divergence of each completion; None stays None."""
    return [
        [None if reward is None else reward - weight * kl for reward, kl in zip(*rows, strict=True)]
        for rows in zip(rewards_BG, divergences_BG, strict=True)
    ]
