"""Advantages: NeMo RL's numbers, their failures mended, and what may never happen."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from laurel.config.grpo import GRPOConfig
from laurel.errors import ConfigError
from laurel.grpo.advantages import Advantages, resolve, teaches
from laurel.grpo.advantages import compute_advantages as by_rule

HEAD = {"leave_one_out_std": True}
"""NeMo RL's newest release: its deviation leaves the sample out as well; the rest is default."""
BASE = {**HEAD, "std_ddof": 0, "std_eps": 0.0}
"""Its first release."""
ONE_OF_16 = [1.0] + [0.0] * 15


def compute_advantages(rows: Any, chosen: GRPOConfig, **rest: Any) -> Advantages:
    return by_rule(rows, resolve(chosen), **rest)


def config(*, leave_one_out: bool = True, normalize: bool = True, **estimator: Any) -> GRPOConfig:
    return GRPOConfig.model_validate(
        {
            "adv_estimator": {
                "use_leave_one_out_baseline": None if leave_one_out else False,
                "scale": None if normalize else "none",
                **estimator,
            }
        }
    )


def one_group(rewards: list[float | None], chosen: GRPOConfig, **rest: Any) -> list[float]:
    values: list[float] = compute_advantages([rewards], chosen, **rest).values_BG[0].tolist()
    return values


def nemo(
    rewards: list[float], *, leave_one_out: bool, normalize: bool, ddof: int, eps: float
) -> list[float]:
    """The formulas of NeMo RL, sample by sample, in rational numbers until the square root."""
    advantages = []
    for i, reward in enumerate(rewards):
        others = [Fraction(r) for j, r in enumerate(rewards) if not leave_one_out or j != i]
        m = len(others)
        mean = sum(others, Fraction(0)) / m
        variance = sum((r * r for r in others), Fraction(0)) / m - mean * mean
        if ddof == 1:
            variance = variance * m / (m - 1) if m > 1 else Fraction(0)
        std = math.sqrt(variance)
        advantage = float(Fraction(reward) - mean)
        advantages.append(advantage / (std + eps) if normalize and std > 0 else advantage)
    return advantages


REWARDS = st.lists(
    st.floats(-40, 40).map(lambda r: round(r, 3)) | st.sampled_from([0.0, 1.0, 5.25]),
    min_size=2,
    max_size=12,
)


@pytest.mark.parametrize(("ddof", "eps"), [(0, 0.0), (1, 1e-6)], ids=["BASE", "HEAD"])
@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@given(rewards=REWARDS)
@example(rewards=ONE_OF_16)
@example(rewards=[0.1] * 7)
@settings(max_examples=40, deadline=None)
def test_the_numbers_are_those_of_nemo_rl(
    rewards: list[float], leave_one_out: bool, normalize: bool, ddof: int, eps: float
) -> None:
    chosen = config(
        leave_one_out=leave_one_out,
        normalize=normalize,
        std_ddof=ddof,
        std_eps=eps,
        leave_one_out_std=leave_one_out and normalize,
    )
    found = one_group(list(rewards), chosen)
    expected = nemo(rewards, leave_one_out=leave_one_out, normalize=normalize, ddof=ddof, eps=eps)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_lone_outlier_stays_unnormalised_only_as_in_nemo_rl() -> None:
    base, head = one_group(ONE_OF_16, config(**BASE)), one_group(ONE_OF_16, config(**HEAD))
    assert base[0] == head[0] == 1.0
    # The others: 14 zeros and a one among 15, so mean 1/15 and variance 14/225.
    assert base[1:] == pytest.approx([-1 / math.sqrt(14)] * 15, rel=1e-12)
    assert head[1] == pytest.approx(-(1 / 15) / (math.sqrt(14 / 225 * 15 / 14) + 1e-6), rel=1e-12)
    mended = one_group(ONE_OF_16, config(std_eps=0.0))
    # One deviation for all 16: mean 1/16, variance 15/256 * 16/15 = 1/16.
    assert mended == pytest.approx([4.0] + [-4 / 15] * 15, rel=1e-12)


def test_a_group_by_hand() -> None:
    # Mean 3, deviations -2 -1 0 3: squares 14, variance 14/3 with n - 1 and 3.5 with n.
    rewards = [1.0, 2.0, 3.0, 6.0]
    plain = config(leave_one_out=False, std_eps=0.0)
    s = math.sqrt(14 / 3)
    assert one_group(rewards, plain) == pytest.approx([-2 / s, -1 / s, 0, 3 / s], rel=1e-12)
    centred = config(leave_one_out=False, normalize=False)
    assert one_group(rewards, centred) == [-2.0, -1.0, 0.0, 3.0]
    # Against the others' mean: times 4/3.
    against_others = one_group(rewards, config(normalize=False))
    assert against_others == pytest.approx([-8 / 3, -4 / 3, 0, 4], rel=1e-15)
    # Cut last, and only where there is a reward.
    cut = config(normalize=False).model_copy(
        update={"advantage_clip_low": -0.5, "advantage_clip_high": 2.0}
    )
    assert one_group([0.0, 9.0, None], cut) == [-0.5, 2.0, 0.0]


@pytest.mark.parametrize("seed", range(20))
def test_close_rewards_far_from_zero_keep_their_digits(seed: int) -> None:
    raw = 30.0 + 0.01 * np.random.default_rng(seed).standard_normal(16)
    exact = [Fraction(r) for r in raw.tolist()]
    mean = sum(exact, Fraction(0)) / 16
    std = math.sqrt(sum(((r - mean) ** 2 for r in exact), Fraction(0)) / 15)
    found = compute_advantages([raw.tolist()], config(leave_one_out=False, std_eps=0.0))
    assert found.metrics["reward_group_std"] == pytest.approx(std, rel=1e-12)
    expected = [float(r - mean) / std for r in exact]
    assert found.values_BG[0].tolist() == pytest.approx(expected, rel=1e-9)


ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo, others' mean": {"leave_one_out": True},
    "grpo, others' deviation": {"leave_one_out_std": True, "use_leave_one_out_baseline": True},
    "grpo, batch": {"scale": "batch"},
    "grpo, none": {"scale": "none"},
    "gdpo": {"name": "gdpo"},
    "reinforce_plus_plus": {"name": "reinforce_plus_plus"},
}


@pytest.mark.parametrize("chosen", ESTIMATORS.values(), ids=ESTIMATORS.keys())
@pytest.mark.parametrize("leave_one_out", [True, False])
@given(
    reward=st.floats(-1e6, 1e6), n=st.integers(1, 20), other=st.lists(st.floats(-5, 5), max_size=5)
)
@example(reward=0.1, n=10, other=[0.3, 0.7, 0.9])
@settings(max_examples=30, deadline=None)
def test_equal_rewards_give_exactly_zero(
    chosen: dict[str, Any], leave_one_out: bool, reward: float, n: int, other: list[float]
) -> None:
    rows = [[reward] * n, other]
    components = [[{"a": r, "b": -r} for r in row] for row in rows]
    found = compute_advantages(
        rows, config(**{"leave_one_out": leave_one_out, **chosen}), components_BG=components
    )
    assert not teaches(found.values_BG[0])


@pytest.mark.parametrize("chosen", ESTIMATORS.values(), ids=ESTIMATORS.keys())
@given(rewards=REWARDS, other=REWARDS, random=st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_the_order_of_the_samples_changes_no_bit(
    chosen: dict[str, Any], rewards: list[float], other: list[float], random: Any
) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)

    def values(row: list[float]) -> list[float]:
        rows = [row, other]
        components = [[{"a": r, "b": r * r} for r in one] for one in rows]
        found = compute_advantages(rows, config(**chosen), components_BG=components)
        first: list[float] = found.values_BG[0].tolist()
        return first

    whole = values(rewards)
    assert values([rewards[i] for i in order]) == [whole[i] for i in order]


@pytest.mark.parametrize("chosen", ESTIMATORS.values(), ids=ESTIMATORS.keys())
@given(rewards=st.lists(st.none() | st.floats(-5, 5), min_size=1, max_size=8), other=REWARDS)
@settings(max_examples=30, deadline=None)
def test_samples_without_a_reward_take_no_part(
    chosen: dict[str, Any], rewards: list[float | None], other: list[float]
) -> None:
    kept = [r for r in rewards if r is not None]
    components = [{} if r is None else {"a": r, "b": r * r} for r in rewards]
    others = [{"a": r, "b": r * r} for r in other]
    rule = config(**chosen)
    found = compute_advantages([rewards, other], rule, components_BG=[components, others])
    alone = compute_advantages(
        [kept, other], rule, components_BG=[[c for c in components if c], others]
    )
    values = found.values_BG[0]
    is_used = np.array([r is not None for r in rewards])
    assert values[~is_used].tolist() == [0.0] * (len(rewards) - len(kept))
    assert values[is_used].tolist() == alone.values_BG[0].tolist()
    assert found.metrics == alone.metrics


def test_fewer_than_two_rewards_say_nothing() -> None:
    found = compute_advantages([[None, 3.0], [None, None], [], [0.0, 2.0]], config(normalize=False))
    assert [values.tolist() for values in found.values_BG] == [[0, 0], [0, 0], [], [-2.0, 2.0]]
    assert found.metrics["groups_without_signal"] == 3.0
    assert found.metrics["frac_reward_zero_std"] == 0.0
    nothing = compute_advantages([[None]], config())
    assert nothing.metrics == {"groups_without_signal": 1.0, "groups_at_noise_floor": 0.0}


def test_one_deviation_for_the_batch() -> None:
    # Rewards 0 2 | 4 10: mean 4, squares 16 + 4 + 0 + 36 = 56, variance 14 over 4.
    chosen = config(leave_one_out=False, scale="batch", std_ddof=0, std_eps=0.0)
    assert all_of(EVEN, chosen) == pytest.approx(by_root(14, -1, 1, -3, 3), rel=1e-12)


def test_reinforce_plus_plus_by_hand() -> None:
    options: dict[str, Any] = {"name": "reinforce_plus_plus", "std_ddof": 0, "std_eps": 0.0}
    # Against the mean of the group: -1 1 -3 3, variance 20 / 4.
    assert all_of(EVEN, config(**options)) == pytest.approx(by_root(5, -1, 1, -3, 3), rel=1e-12)
    # The rewards themselves: mean 4, variance 14.
    found = all_of(EVEN, config(minus_baseline=False, **options))
    assert found == pytest.approx(by_root(14, -4, -2, 0, 6), rel=1e-12)


def test_gdpo_by_hand() -> None:
    parts = [
        [{"right": 1.0, "brief": 10.0}, {"right": 0.0, "brief": 30.0}],
        [{"right": 1.0, "brief": 20.0}, {"right": 1.0, "brief": 40.0}],
    ]
    chosen = config(
        name="gdpo", leave_one_out=False, std_ddof=0, std_eps=0.0, reward_weights=[1.0, 3.0]
    )
    # brief (weight 1): -1 1 | -1 1. right (weight 3): 1 -1 | 0 0. Sums: 2 -2 | -1 1; variance 2.5.
    found = all_of([[0.0, 0.0], [0.0, 0.0]], chosen, components_BG=parts)
    assert found == pytest.approx(by_root(2.5, 2, -2, -1, 1), rel=1e-12)


def test_gdpo_says_what_it_lacks() -> None:
    rows = [[0.0, 1.0]]
    with pytest.raises(ConfigError, match=r"named components .*found: none.*adv_estimator.name"):
        compute_advantages(rows, config(name="gdpo"))
    with pytest.raises(ConfigError, match="found: a, b"):
        compute_advantages(rows, config(name="gdpo"), components_BG=[[{"a": 1.0}, {"b": 1.0}]])
    with pytest.raises(ConfigError, match=r"2 weights for 1 component; .* a$"):
        compute_advantages(
            rows,
            config(name="gdpo", reward_weights=[1.0, 2.0]),
            components_BG=[[{"a": 1.0}, {"a": 0.0}]],
        )
    # Empty dictionaries are what an environment without components gives.
    with pytest.raises(ConfigError, match="found: none"):
        compute_advantages(rows, config(name="gdpo"), components_BG=[[{}, {}]])
    shaped = GRPOConfig.model_validate(
        {"adv_estimator": {"name": "gdpo"}, "reward_shaping": {"enabled": True}}
    )
    with pytest.raises(ConfigError, match="only their total"):
        resolve(shaped)


def test_what_nulls_stand_for() -> None:
    assert resolve(config()).rule.scale == "group"
    assert resolve(config(scale="batch")).rule.scale == "batch"
    assert resolve(config()).rule.leave_one_out
    alone = resolve(config(use_leave_one_out_baseline=False))
    assert not alone.rule.leave_one_out
    assert not resolve(config(name="reinforce_plus_plus")).rule.leave_one_out
    asked = config(name="reinforce_plus_plus", use_leave_one_out_baseline=True)
    assert resolve(asked).rule.leave_one_out


def test_the_figures_of_a_batch() -> None:
    rows = [[0.0, 0.0], [1.0, 1.0], [1.0, 0.0], [None, None], [0.0, 1.0]]
    found = compute_advantages(rows, config(normalize=False)).metrics
    assert found == pytest.approx(
        {
            "groups_without_signal": 3.0,
            "groups_at_noise_floor": 0.0,
            "advantages/mean": 0.0,
            "advantages/max": 1.0,
            "advantages/min": -1.0,
            "advantages/std": math.sqrt(4 / 8),
            "advantages/sum": 0.0,
            "reward": 0.5,
            "reward_std": math.sqrt(2 / 7),
            "reward_group_std": math.sqrt(0.5) / 2,
            "frac_reward_zero_std": 0.5,
            "baseline_reward/pct_0": 25.0,
            "baseline_reward/pct_1": 25.0,
            "baseline_reward/pct_mixed": 50.0,
        },
        rel=1e-12,
    )
    scored = compute_advantages([[0.0, 0.5]], config()).metrics
    assert "baseline_reward/pct_mixed" not in scored


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="must be None"):
        compute_advantages([[0.0, reward]], config())


@pytest.mark.parametrize("name", ["grpo", "gdpo", "reinforce_plus_plus"])
def test_a_noisy_scorer_does_not_damp_the_groups_of_an_exact_one(name: str) -> None:
    rows = [[0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0]]
    components = [[{"a": r} for r in row] for row in rows]
    chosen = config(name=name, leave_one_out=False, std_eps=0.0, std_ddof=0)
    found = compute_advantages(rows, chosen, noise=[0.2, 0.0], components_BG=components)
    exact = compute_advantages(rows, chosen, components_BG=components)
    assert exact.values_BG[1].tolist() == [-1.0, 1.0, 1.0, -1.0]
    if name == "grpo":  # the others are divided by one deviation of the whole batch
        assert found.values_BG[0].tolist() == [-0.25, 0.25, 0.25, -0.25]
        assert found.values_BG[1].tolist() == [-1.0, 1.0, 1.0, -1.0]
        assert found.metrics["groups_at_noise_floor"] == 1.0
    both = compute_advantages(rows, chosen, noise=0.2, components_BG=components)
    assert np.abs(found.values_BG[1]).max() > np.abs(both.values_BG[1]).max()


@pytest.mark.parametrize("name", ["grpo", "gdpo", "reinforce_plus_plus"])
def test_differences_that_are_noise_stay_small(name: str) -> None:
    """Also where a whole batch is normalised once more."""
    rows = [[1.0, 1.0 + 3e-4, 1.0 - 3e-4]] * 3
    components = [[{"a": r} for r in row] for row in rows]

    def found(noise: float, **chosen: Any) -> Advantages:
        rule = config(name=name, leave_one_out=False, std_eps=0.0, **chosen)
        return compute_advantages(rows, rule, noise=noise, components_BG=components)

    # Divided by ten times the noise instead of by 3e-4.
    noisy = found(1e-3)
    assert noisy.values_BG[0].tolist() == pytest.approx([0, 0.03, -0.03], rel=1e-3)
    assert noisy.metrics["groups_at_noise_floor"] == 3.0
    for healthy in (found(1e-6), found(1e-3, noise_floor_factor=0.0)):
        assert healthy.metrics["advantages/max"] > 0.9
        assert healthy.metrics["groups_at_noise_floor"] == 0.0


EVEN: list[list[float]] = [[0.0, 2.0], [4.0, 10.0]]


def all_of(rows: list[list[float]], chosen: GRPOConfig, **rest: Any) -> list[float]:
    """The advantages of a batch, one after another."""
    values: list[float] = np.concatenate(
        compute_advantages(rows, chosen, **rest).values_BG
    ).tolist()
    return values


def by_root(variance: float, *values: float) -> list[float]:
    return [value / math.sqrt(variance) for value in values]
