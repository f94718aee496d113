"""GPG, OPO, pass@k and ReMax against numbers worked by hand, and what they refuse."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.config.grpo import GRPOConfig
from laurel.grpo.advantages import compute_advantages, greedy_rewards, resolve
from policy_fakes import rollout, rollout_group

NAMES = ("gpg", "opo", "pass_at_k", "remax")
REWARDS = st.lists(
    st.floats(-40, 40).map(lambda r: round(r, 3)) | st.sampled_from([0.0, 1.0]),
    min_size=2,
    max_size=7,
)


def config(name: str, **chosen: Any) -> GRPOConfig:
    estimator = {"name": name, **chosen.pop("adv_estimator", {})}
    return GRPOConfig.model_validate({"adv_estimator": estimator, **chosen})


def advantages(rewards: Any, chosen: GRPOConfig, **rest: Any) -> list[list[float]]:
    found = compute_advantages(rewards, resolve(chosen), **rest)
    return [values_G.tolist() for values_G in found.values_BG]


def test_gpg_scales_groups_up_that_others_thin_out() -> None:
    # Means 1/2 and 2/3; the rewards of the last group are equal, so 7 of 10 completions learn.
    groups = [[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    a = 10 / 7
    expected = [[a / 2, -a / 2, a / 2, -a / 2], [a / 3, a / 3, -2 * a / 3], [0.0] * 3]
    for found, values in zip(advantages(groups, config("gpg")), expected, strict=True):
        assert found == pytest.approx(values, rel=1e-12)
    assert advantages([[0.1] * 4, [7.0] * 3], config("gpg")) == [[0.0] * 4, [0.0] * 3]
    # A completion without a reward counts nowhere.
    assert advantages([[3.0, None, 1.0], [2.0, 2.0]], config("gpg")) == [
        [2.0, 0.0, -2.0],
        [0.0] * 2,
    ]


def test_opo_weighs_completions_by_their_length() -> None:
    # (1 x 100 + 0 x 200 + 1 x 700) / 1000 = 0.8.
    (found,) = advantages([[1.0, 0.0, 1.0]], config("opo"), lengths_BG=[[100, 200, 700]])
    assert found == pytest.approx([0.2, -0.8, 0.2], rel=1e-12)
    # Completions without a reward have no say, and completions of one length weigh alike.
    given_lengths = [[100, 999, 300]]
    (found,) = advantages([[4.0, None, 0.0]], config("opo"), lengths_BG=given_lengths)
    assert found == pytest.approx([3.0, 0.0, -1.0], rel=1e-12)
    assert advantages([[1.0, 3.0]], config("opo"), lengths_BG=[[5, 5]]) == [[-1.0, 1.0]]
    assert advantages([[0.3] * 3], config("opo"), lengths_BG=[[1, 2, 3]]) == [[0.0] * 3]
    assert advantages([[1.0, 0.0]], config("opo"), lengths_BG=[[0, 0]]) == [[0.5, -0.5]]


def test_the_best_of_all_learns_from_its_lead() -> None:
    undivided = config("pass_at_k", adv_estimator={"scale": "none"})
    assert advantages([[0.25, 2.0, 0.5]], undivided) == [[0.0, 1.5, 0.0]]
    assert advantages([[1.0, 0.0, 1.0]], undivided) == [[0.0] * 3]
    assert advantages([[1.0, None, 0.0]], undivided) == [[1.0, 0.0, 0.0]]
    # Mean 1, variance (1 + 1 + 4) / 2.
    divided = config("pass_at_k", adv_estimator={"std_eps": 0.0})
    (found,) = advantages([[0.0, 0.0, 3.0]], divided)
    assert found == pytest.approx([0.0, 0.0, 3 / math.sqrt(3)], rel=1e-12)


def test_pass_at_2_by_hand() -> None:
    chosen = config("pass_at_k", adv_estimator={"scale": "none", "pass_at_k": {"k": 2}})
    # With each of three others: 6 leads by 5, 4 and 3; 3 by 2, 1; 2 by 1.
    (found,) = advantages([[1.0, 2.0, 3.0, 6.0]], chosen)
    assert found == pytest.approx([0.0, 1 / 3, 1.0, 4.0], rel=1e-12)
    # Failures may leave fewer than k; one alone has nothing to lead.
    chosen = config("pass_at_k", adv_estimator={"scale": "none", "pass_at_k": {"k": 3}})
    assert advantages([[5.0, None, 2.0], [None, 7.0, None]], chosen) == [[3.0, 0.0, 0.0], [0.0] * 3]


@given(rewards=REWARDS, k=st.integers(2, 7))
@settings(max_examples=60, deadline=None)
def test_pass_at_k_is_the_mean_over_all_sets(rewards: list[float], k: int) -> None:
    k = min(k, len(rewards))
    chosen = config(
        "pass_at_k",
        num_generations_per_prompt=7,
        adv_estimator={"scale": "none", "pass_at_k": {"k": k}},
    )
    places = range(len(rewards))
    expected = []
    for i in places:
        others = [[rewards[j] for j in s] for s in combinations(set(places) - {i}, k - 1)]
        expected.append(sum(max(rewards[i] - max(s), 0.0) for s in others) / len(others))
    assert advantages([list(rewards)], chosen)[0] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_remax_compares_with_the_greedy_completion() -> None:
    groups, greedy = [[1.0, 0.0], [0.5, None], [1.0, 2.0]], [0.25, 2.0, None]
    found = advantages(groups, config("remax"), greedy_B=greedy)
    # Without a greedy completion that has a reward, nothing is learned from a group.
    assert found == [[0.75, -0.25], [-1.5, 0.0], [0.0, 0.0]]


def test_the_greedy_reward_is_scaled_and_shaped_like_the_others() -> None:
    group = rollout_group(rollout("abc", 0.5), greedy=rollout("defg", 1.0, truncated=True))
    plain = GRPOConfig()
    assert greedy_rewards([group], plain, longest=100) == [1.0]
    scaled = {"enabled": True, "target_max": 10.0}
    chosen = GRPOConfig.model_validate({"reward_scaling": scaled})
    assert greedy_rewards([group], chosen, longest=100) == [10.0]
    cut = {"enabled": True, "stop_properly_penalty_coef": 0.5}
    chosen = GRPOConfig.model_validate({"reward_shaping": cut})
    assert greedy_rewards([group], chosen, longest=100) == [0.5]
    assert greedy_rewards([rollout_group(rollout("abc", 0.5))], plain, longest=100) == [None]


@pytest.mark.parametrize("name", ["gpg", "opo", "pass_at_k"])
@given(rewards=REWARDS, data=st.data())
@settings(max_examples=30, deadline=None)
def test_the_order_of_completions_and_a_shift_of_rewards_change_nothing(
    name: str, rewards: list[float], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(rewards))))
    lengths = data.draw(st.lists(st.integers(1, 99), min_size=len(rewards), max_size=len(rewards)))
    chosen = config(name)
    (found,) = advantages([list(rewards)], chosen, lengths_BG=[lengths])
    (moved,) = advantages(
        [[rewards[i] + 8.0 for i in order]], chosen, lengths_BG=[[lengths[i] for i in order]]
    )
    assert moved == pytest.approx([found[i] for i in order], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "chosen", "named"),
    [
        *((name, {"adv_estimator": {"scale": "group"}}, "scale=group") for name in ("gpg", "opo")),
        ("remax", {"adv_estimator": {"scale": "batch"}}, "scale=batch"),
        *(
            (name, {"adv_estimator": {"use_leave_one_out_baseline": True}}, "leave_one_out")
            for name in NAMES
        ),
        *(
            (name, {"adv_estimator": {"leave_one_out_std": True}}, "leave_one_out")
            for name in NAMES
        ),
        *((name, {"adv_estimator": {"per_step": True}}, "per_step") for name in NAMES),
        ("pass_at_k", {"adv_estimator": {"scale": "batch"}}, "scale=batch"),
        ("pass_at_k", {"adv_estimator": {"pass_at_k": {"k": 17}}}, "num_generations_per_prompt"),
        ("remax", {"use_dynamic_sampling": True}, "use_dynamic_sampling"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, chosen: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        config(name, **chosen)


@pytest.mark.parametrize("name", NAMES[:3])
def test_others_compare_within_a_group(name: str) -> None:
    """A run refuses such groups of one (`test_schemas.py`)."""
    assert config(name, num_generations_per_prompt=1).compares_within_groups


def test_remax_needs_no_group() -> None:
    chosen = config("remax", num_generations_per_prompt=1)
    assert advantages([[2.0]], chosen, greedy_B=[0.5]) == [[1.5]]
