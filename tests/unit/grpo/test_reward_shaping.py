"""Scaled rewards, penalties that never help, and the divergence in the reward."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.config.grpo import (
    GRPOConfig,
    PolicyLossConfig,
    RewardScalingConfig,
    RewardShapingConfig,
)
from laurel.grpo.advantages import (
    NO_DIVERGENCE,
    completion_divergence,
    fail_without_divergence,
    lacks_divergences,
    mean_divergence,
    overlong_penalty,
    scaled,
    shape_rewards,
    slope,
    stopped_improperly,
    subtract_divergences,
)
from laurel.types import Rollout, RolloutGroup, Task


def rollout(
    reward: float | None, *, own: int = 4, others: int = 0, truncated: bool = False
) -> Rollout:
    """A completion with `own` tokens of the policy after `others` of the environment."""
    length = own + others
    return Rollout(
        messages=(),
        ids_L=np.zeros(length, np.int32),
        mask_L=np.arange(length) >= others,
        logprobs_L=np.zeros(length, np.float32),
        reward=reward,
        failure=None if reward is not None else "no verdict",
        truncated=truncated,
    )


def group(*rollouts: Rollout) -> RolloutGroup:
    task = Task(id="t", prompt=(), environment="math")
    return RolloutGroup(id="g", task=task, prompt_ids=np.ones(1, np.int32), rollouts_G=rollouts)


def shaping(**chosen: Any) -> GRPOConfig:
    return GRPOConfig.model_validate({"reward_shaping": {"enabled": True, **chosen}})


def test_rewards_are_cut_and_mapped() -> None:
    options = RewardScalingConfig(
        enabled=True, source_min=-2.0, source_max=6.0, target_min=0.0, target_max=100.0
    )
    given_rewards = (-3.0, -2.0, 0.0, 6.0, 7.0)
    assert [scaled(r, options) for r in given_rewards] == [0.0, 0.0, 25.0, 100.0, 100.0]
    turned = options.model_copy(update={"target_min": 100.0, "target_max": 0.0})
    assert slope(options) == slope(turned) == 12.5
    groups = [group(*map(rollout, given_rewards), rollout(None))]
    found = shape_rewards(groups, GRPOConfig(reward_scaling=options), longest=4)
    assert found.rewards_BG == [[0.0, 0.0, 25.0, 100.0, 100.0, None]]
    assert found.metrics == {"reward_scaling/clamped_fraction": 0.4}
    off = GRPOConfig(reward_scaling=options.model_copy(update={"enabled": False}))
    assert slope(off.reward_scaling) == 1.0
    found = shape_rewards(groups, off, longest=4)
    assert found.rewards_BG == [[*given_rewards, None]]
    assert found.metrics == {}


def test_the_penalty_for_length_is_a_straight_line() -> None:
    # Nothing up to 60 tokens, 2 at 100, and on at the same slope.
    options = RewardShapingConfig(
        enabled=True,
        overlong_buffer_length=40,
        overlong_buffer_penalty=2.0,
        max_response_length=100,
    )
    lengths = (0, 60, 61, 80, 100, 120)
    found = [overlong_penalty(n, options, longest=7) for n in lengths]
    assert found == pytest.approx([0.0, 0.0, 0.05, 1.0, 2.0, 3.0], rel=1e-12)


def test_only_the_policys_own_tokens_are_long() -> None:
    chosen = shaping(overlong_buffer_length=4)
    found = shape_rewards(
        [group(rollout(1.0, own=6, others=50), rollout(1.0, own=8), rollout(None, own=90))],
        chosen,
        longest=10,
    )
    assert found.rewards_BG == [[1.0, 0.5, None]]
    assert found.metrics == {
        "reward_shaping/penalty_mean": 0.25,
        "reward_shaping/penalized_fraction": 0.5,
    }


def test_what_was_cut_off_keeps_a_share_of_a_good_reward_and_more_of_a_bad_one() -> None:
    chosen = shaping(stop_properly_penalty_coef=0.8, overlong_buffer_length=1)
    rewards = (2.0, 0.0, -2.0)
    found = shape_rewards(
        [group(*(rollout(r, truncated=cut) for cut in (True, False) for r in rewards))],
        chosen,
        longest=2,
    )
    assert found.rewards_BG == [[1.6, 0.0, -2.5, 2.0, 0.0, -2.0]]
    assert stopped_improperly(-3.0, coefficient=0.0) == -6.0
    assert stopped_improperly(3.0, coefficient=0.0) == 0.0


@given(
    reward=st.floats(-1e6, 1e6),
    own=st.integers(0, 40),
    truncated=st.booleans(),
    buffer=st.integers(1, 30),
    penalty=st.floats(0, 10),
    coefficient=st.none() | st.floats(0, 1),
)
def test_shaping_never_raises_a_reward(
    reward: float, own: int, truncated: bool, buffer: int, penalty: float, coefficient: float | None
) -> None:
    chosen = shaping(
        overlong_buffer_length=buffer,
        overlong_buffer_penalty=penalty,
        stop_properly_penalty_coef=coefficient,
    )
    sample = rollout(reward, own=own, truncated=truncated)
    found = shape_rewards([group(sample)], chosen, longest=20).rewards_BG[0][0]
    assert found is not None
    assert found <= reward
    assert sample.reward == reward


def test_scaling_comes_before_the_penalty() -> None:
    chosen = GRPOConfig.model_validate(
        {
            "reward_scaling": {"enabled": True, "source_max": 10.0},
            "reward_shaping": {"enabled": True, "stop_properly_penalty_coef": 0.5},
        }
    )
    found = shape_rewards([group(rollout(5.0, truncated=True))], chosen, longest=9)
    assert found.rewards_BG == [[0.25]]


def test_cut_off_completions_can_be_left_out() -> None:
    chosen = GRPOConfig(overlong_filtering=True)
    found = shape_rewards(
        [group(rollout(1.0, truncated=True), rollout(2.0), rollout(None, truncated=True))],
        chosen,
        longest=9,
    )
    assert found.rewards_BG == [[None, 2.0, None]]
    assert found.metrics == {"overlong_filtered": 1.0}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", -(math.log(2) - 0.5)),
        ("k2", math.log(2) ** 2 / 2 + 0.125),
        ("k3", (2 - 1 - math.log(2)) + (math.exp(-0.5) - 1 + 0.5)),
    ],
)
def test_the_divergence_of_a_completion(kind: Any, expected: float) -> None:
    policy = np.array([-2.0, math.nan, -1.0], np.float32)
    reference = np.array([-2.0 + math.log(2), math.inf, -1.5], np.float32)
    mask = np.array([True, False, True])
    options = PolicyLossConfig(reference_policy_kl_type=kind)
    assert completion_divergence(policy, reference, mask, options) == pytest.approx(
        expected, rel=1e-6
    )


def test_the_divergence_is_clamped() -> None:
    options = PolicyLossConfig(
        reference_policy_kl_type="k1", kl_input_clamp_value=3.0, kl_output_clamp_value=2.0
    )
    far = np.array([0.0, -9.0, -1.0], np.float32)
    near = np.array([-9.0, 0.0, -2.0], np.float32)
    assert completion_divergence(far, near, np.ones(3, bool), options) == 1.0  # 2 - 2 + 1
    unclamped = options.model_copy(
        update={"kl_input_clamp_value": None, "kl_output_clamp_value": None}
    )
    assert completion_divergence(far, near, np.array([True, False, False]), unclamped) == 9.0
    worst = np.array([-1000.0], np.float32)
    k3 = unclamped.model_copy(update={"reference_policy_kl_type": "k3"})
    assert math.isfinite(completion_divergence(worst, -worst, np.ones(1, bool), k3))


@pytest.mark.parametrize("of_policy", [0.0, math.nan, -math.inf])
@pytest.mark.parametrize("of_reference", [0.0, math.nan, -math.inf, math.inf])
def test_a_divergence_from_what_is_not_finite_is_no_number(
    of_policy: float, of_reference: float
) -> None:
    """The clamps would make one of it."""
    policy, reference = (np.array([-1.0, n], np.float32) for n in (of_policy, of_reference))
    options = PolicyLossConfig(kl_input_clamp_value=20.0, kl_output_clamp_value=10.0)
    found = completion_divergence(policy, reference, np.ones(2, bool), options)
    assert math.isnan(found) is not (of_policy == of_reference == 0.0)


def test_completions_without_a_divergence_have_failed() -> None:
    others = replace(rollout(None), failure="no verdict")
    three = group(rollout(1.0), rollout(2.0), others)
    (found,) = fail_without_divergence([three], [[0.5, math.nan, math.inf]])
    assert [r.reward for r in found.rollouts_G] == [1.0, None, None]
    assert [r.failure for r in found.rollouts_G] == [None, NO_DIVERGENCE, "no verdict"]
    assert found.rollouts_G[0] is three.rollouts_G[0]
    assert not lacks_divergences([three])
    assert not lacks_divergences([found]), "one is left"
    assert lacks_divergences(fail_without_divergence([three], [[math.nan] * 3]))
    assert not lacks_divergences([group(others)]), "that is another reason"


def test_the_divergence_is_taken_from_the_reward() -> None:
    found = subtract_divergences([[1.0, None], [-2.0]], [[4.0, 9.0], [2.0]], weight=0.25)
    assert found == [[0.0, None], [-2.5]]
    figures = mean_divergence([[1.0, None], [0.0, 2.0]], [[0.5, 99.0], [1.0, 1.5]])
    assert figures == {"kl_in_reward": 1.0}, "that of the samples with a reward"
    assert mean_divergence([[None]], [[3.0]]) == {}
