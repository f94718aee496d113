"""The estimator `tree`, against numbers worked by hand for a tree of seven leaves.

    prompt --- a1 - a2 - a3      0 = a1 a2 a3
      |         |    `-- c       1 = b
      |         |-- d            2 = a1 a2 c
      |         `-- e1 - e2      3 = a1 d
      |              `-- f       4 = a1 e1 e2
      |-- b1 - b2                5 = a1 e1 f
           `-- g                 6 = b1 g

Their rewards are 1, 0, 1, 0, 0, 1 and 2.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.config.grpo import GRPOConfig
from laurel.grpo.advantages import Advantages, compute_advantages, resolve
from laurel.grpo.branching import Segment, tree_segments
from laurel.types import Branch, Rollout
from policy_fakes import rollout

LEAVES = [
    rollout("aabbcc", 1.0),
    rollout("xxyy", 0.0),
    rollout("aabbzz", 1.0, branch=Branch(0, 4)),
    rollout("aad", 0.0, branch=Branch(0, 2)),
    rollout("aaefg", 0.0, branch=Branch(0, 2)),
    rollout("aaehh", 1.0, branch=Branch(4, 3)),
    rollout("xxz", 2.0, branch=Branch(1, 2)),
]
REWARDS = [one.reward for one in LEAVES]


def config(credit: str, **chosen: Any) -> GRPOConfig:
    estimator = {"name": "tree", "tree": {"credit": credit}, **chosen.pop("adv_estimator", {})}
    tree = {"branches": 5, "rounds": 1}
    given = {"adv_estimator": estimator, "tree": tree, "num_generations_per_prompt": 7}
    return GRPOConfig.model_validate({**given, **chosen})


def advantages(
    chosen: GRPOConfig,
    rewards: Any = REWARDS,
    leaves: list[Rollout] = LEAVES,
    *,
    noise: float = 0.0,
) -> Advantages:
    segments = tree_segments(leaves)
    return compute_advantages([rewards], resolve(chosen), noise=noise, segments_BG=[segments])


def test_within_the_group_and_within_the_tree_by_hand() -> None:
    # Of the group the mean is 5/7; of the tree of 0 (0, 2, 3, 4, 5) 3/5; of that of 1 (1, 6) 1.
    plain = {"scale": "none", "use_leave_one_out_baseline": False}
    (found,) = advantages(config("completion", adv_estimator=plain)).values_BG
    right, wrong = 1 - 5 / 7, -5 / 7
    expected = [
        *(right + 2 / 5, wrong - 1.0, right + 2 / 5, wrong - 3 / 5),
        *(wrong - 3 / 5, right + 2 / 5, 2 - 5 / 7 + 1.0),
    ]
    assert found == pytest.approx(expected, rel=1e-12)
    # Each divided by the deviation of its own: variances 4/7, 3/10 and 2.
    plain = {"use_leave_one_out_baseline": False, "std_eps": 0.0}
    (found,) = advantages(config("completion", adv_estimator=plain)).values_BG
    group, first, second = math.sqrt(4 / 7), math.sqrt(3 / 10), math.sqrt(2)
    assert found[0] == pytest.approx(right / group + 0.4 / first, rel=1e-12)
    assert found[3] == pytest.approx(wrong / group - 0.6 / first, rel=1e-12)
    assert found[6] == pytest.approx((9 / 7) / group + 1.0 / second, rel=1e-12)


def test_monte_carlo_values_of_segments_by_hand() -> None:
    # V: a2 1, e1 1/2, so a1 (1 + 0 + 1/2) / 3 = 1/2; b1 1; the prompt 3/4.
    # Weights 7 p / m: a1 7/10, b1 7/4; below a1 a2 and e1 7/12, d 7/6; below b1 7/4; others 7/12.
    plain = {"scale": "none", "use_leave_one_out_baseline": False}
    found = advantages(config("segment", adv_estimator=plain))
    assert found.tokens_BGL is not None
    a1, b1 = -1 / 4 * 7 / 10, 1 / 4 * 7 / 4
    expected = [
        [a1] * 2 + [1 / 2 * 7 / 12] * 2 + [0.0] * 2,
        [b1] * 2 + [-7 / 4] * 2,
        [a1] * 2 + [1 / 2 * 7 / 12] * 2 + [0.0] * 2,
        [a1] * 2 + [-1 / 2 * 7 / 6],
        [a1] * 2 + [0.0] + [-1 / 2 * 7 / 12] * 2,
        [a1] * 2 + [0.0] + [1 / 2 * 7 / 12] * 2,
        [b1] * 2 + [7 / 4],
    ]
    for tokens_L, values in zip(found.tokens_BGL[0], expected, strict=True):
        assert tokens_L.tolist() == pytest.approx(values, rel=1e-12)
    means = [sum(values) / len(values) for values in expected]
    assert np.array([m.mean() for m in found.tokens_BGL[0]]) == pytest.approx(means, rel=1e-12)
    assert found.values_BG[0].tolist() == pytest.approx(means, rel=1e-12)
    # Against the others alone: a2 against the mean of d and e1, and so on.
    found = advantages(config("segment", adv_estimator={"scale": "none"}))
    assert found.tokens_BGL is not None
    first = found.tokens_BGL[0][0]
    assert first == pytest.approx([-1 / 2 * 7 / 10] * 2 + [3 / 4 * 7 / 12] * 2 + [0.0] * 2)
    ends = [float(tokens_L[-1]) for tokens_L in found.tokens_BGL[0]]
    assert ends == pytest.approx([0.0, -7 / 2, 0.0, -7 / 8, -7 / 12, 7 / 12, 7 / 2], rel=1e-12)
    # Divided by the deviation of the group.
    divided = advantages(config("segment", adv_estimator={"std_eps": 0.0})).tokens_BGL
    assert divided is not None
    assert divided[0][0] == pytest.approx(first / math.sqrt(4 / 7), rel=1e-12)


@pytest.mark.parametrize("credit", ["completion", "segment"])
def test_nothing_is_divided_by_less_than_the_noise_floor(credit: str) -> None:
    plain = {"use_leave_one_out_baseline": False, "noise_floor_factor": 10.0}
    undivided = advantages(config(credit, adv_estimator={**plain, "scale": "none"}))
    found = advantages(config(credit, adv_estimator=plain), noise=2.0)
    assert found.values_BG[0] == pytest.approx(undivided.values_BG[0] / 20.0, rel=1e-12)


def test_segments_are_clipped_and_figures_count_the_tokens_that_were_written() -> None:
    plain = {"scale": "none", "use_leave_one_out_baseline": False}
    heard = [True] * 4 + [False] * 2  # the last two tokens of 0 are the environment's
    leaves = [replace(LEAVES[0], mask_L=np.array(heard)), *LEAVES[1:]]
    wide = advantages(config("segment", adv_estimator=plain), leaves=leaves)
    chosen = config(
        "segment", adv_estimator=plain, advantage_clip_low=-0.5, advantage_clip_high=0.2
    )
    found = advantages(chosen, leaves=leaves)
    assert wide.tokens_BGL is not None
    assert found.tokens_BGL is not None
    written = []
    for one, cut_L, free_L in zip(leaves, found.tokens_BGL[0], wide.tokens_BGL[0], strict=True):
        assert cut_L.tolist() == np.clip(free_L, -0.5, 0.2).tolist()
        written += cut_L[one.mask_L].tolist()
    assert found.metrics["advantages/mean"] == pytest.approx(np.mean(written), rel=1e-9)
    assert found.metrics["advantages/min"] == -0.5


def test_segments_of_equal_values_have_no_advantage_by_rounding() -> None:
    plain = {"use_leave_one_out_baseline": False}
    for tenths in range(1, 30):
        alike = tenths / 10
        rewards = [alike, 0.7, alike, alike, alike, alike, 5.0]
        found = advantages(config("segment", adv_estimator=plain), rewards).tokens_BGL
        assert found is not None
        for index in (0, 2, 3, 4, 5):  # behind a1
            assert not found[0][index][2:].any()


def test_the_gradient_of_segments_has_no_bias() -> None:
    """All draws of a policy of two bits, one of whose two completions is continued once."""
    first, second, rewards = 0.3, (0.6, 0.2), {(0, 0): 0.0, (0, 1): 1.0, (1, 0): 3.0, (1, 1): 0.5}
    chosen = config(
        "segment",
        tree={"branches": 1, "rounds": 1},
        num_generations_per_prompt=3,
        adv_estimator={"scale": "none"},
    )
    total = np.zeros(3)
    for bits in product((0, 1), repeat=5):
        for source in (0, 1):
            said = [bits[0:2], bits[2:4], (bits[2 * source], bits[4])]
            chance = 0.5
            for place, bit in enumerate(bits):
                one = first if place in (0, 2) else second[bits[{1: 0, 3: 2, 4: 2 * source}[place]]]
                chance *= one if bit else 1 - one
            leaves = [rollout("01"[a] + "01"[b], rewards[a, b]) for a, b in said]
            leaves[2] = replace(leaves[2], branch=Branch(source, 1))
            values = advantages(chosen, [one.reward for one in leaves], leaves).tokens_BGL
            assert values is not None
            for (a, b), tokens_L in zip(said, values[0], strict=True):
                total[0] += chance * tokens_L[0] * (a - first) / 3
                total[1 + a] += chance * tokens_L[1] * (b - second[a]) / 3
    value = [second[a] * rewards[a, 1] + (1 - second[a]) * rewards[a, 0] for a in (0, 1)]
    expected = [first * (1 - first) * (value[1] - value[0])]
    for a, reach in ((0, 1 - first), (1, first)):
        slope = rewards[a, 1] - rewards[a, 0]
        expected.append(reach * second[a] * (1 - second[a]) * slope)
    assert total == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("credit", ["completion", "segment"])
def test_a_completion_without_a_reward_takes_no_part(credit: str) -> None:
    rewards = [*REWARDS[:3], None, *REWARDS[4:]]
    without = [one for i, one in enumerate(LEAVES) if i != 3]
    shifted = [
        replace(one, branch=Branch(one.branch.of - (one.branch.of > 3), one.branch.length))
        if one.branch is not None
        else one
        for one in without
    ]
    found = advantages(config(credit), rewards)
    fewer = advantages(config(credit), [r for r in rewards if r is not None], shifted)
    assert found.values_BG[0][3] == 0.0
    assert np.delete(found.values_BG[0], 3) == pytest.approx(fewer.values_BG[0], rel=1e-12)
    # Below a1 no one is left beside a2 and e1; below b1 one alone has nothing to be compared with.
    alone = advantages(config(credit), [None] * 5 + [1.0, None])
    assert alone.values_BG[0].tolist() == [0.0] * 7
    equal = advantages(config(credit), [0.1] * 7)
    assert equal.values_BG[0].tolist() == [0.0] * 7
    assert equal.metrics["groups_without_signal"] == 1.0


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_branches_of_a_place_balance_and_a_shift_changes_nothing(data: st.DataObject) -> None:
    rewards = data.draw(st.lists(st.integers(-8, 8).map(float), min_size=7, max_size=7))
    plain = {"scale": "none", "use_leave_one_out_baseline": False}
    found = advantages(config("segment", adv_estimator=plain), rewards).tokens_BGL
    moved = advantages(config("segment", adv_estimator=plain), [r + 4.0 for r in rewards])
    assert found is not None
    assert moved.tokens_BGL is not None
    sums: dict[int, float] = {}
    for path, tokens_L in zip(tree_segments(LEAVES), found[0], strict=True):
        for before, segment in pairwise([Segment(-1, 0, 0), *path]):
            sums[before.id] = sums.get(before.id, 0.0) + float(tokens_L[segment.end - 1])
    assert list(sums.values()) == pytest.approx([0.0] * len(sums), abs=1e-9)
    for ours, theirs in zip(found[0], moved.tokens_BGL[0], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tree": None}, "grpo.tree"),
        ({"num_generations_per_prompt": 5}, "leave none of num_generations_per_prompt=5"),
        ({"adv_estimator": {"name": "remax"}}, "greedy"),
        ({"adv_estimator": {"scale": "batch"}}, "scale=batch"),
        (
            {"tree": {"branches": 5, "rounds": 1, "segment": 8}, "max_rollout_turns": 2},
            "segment=8 has no effect",
        ),
        ({"tree": {"branches": 5, "rounds": 1, "segment": ""}}, "ends no segment"),
        ({"tree": {"branches": 5, "rounds": 1, "segment": 0}}, "greater than or equal to 1"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        config("completion", **given)
