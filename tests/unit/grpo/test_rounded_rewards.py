"""What rounding leaves of sums of rewards is no advantage, in any estimator."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from laurel.config.grpo import GRPOConfig
from laurel.environments.composite import CompositeEnvironment
from laurel.environments.interface import EnvironmentInterface, precise
from laurel.grpo.advantages import compute_advantages, resolve
from laurel.types import RolloutGroup
from policy_fakes import SAMPLING, Judge, ScriptedGenerator, rollouts_of, saying, task

PARTS = {"a": 0.1, "b": 0.6, "c": 0.7, "d": 0.2, "e": 0.3, "f": -0.3}


def one_if_named(name: str) -> Judge:
    return Judge(lambda text, metadata: {"reward": float(name in text)})


def by_weights() -> EnvironmentInterface:
    parts = [{"env": name, "weight": weight} for name, weight in PARTS.items()]
    return CompositeEnvironment({"parts": parts}, {name: one_if_named(name) for name in PARTS})


def by_rewards() -> EnvironmentInterface:
    """The same components as float32, as many environments give them."""

    def named(text: str, metadata: Any) -> dict[str, Any]:
        return {"rewards": {name: w * (name in text) for name, w in PARTS.items()}}

    return Judge(named)


def by_turns() -> EnvironmentInterface:
    """One letter a turn: what a text adds up to is summed over its turns."""

    def one(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
        turn = metadata.get("turn", 0)
        reward = PARTS[text[turn]] if turn < len(text) else 0.0
        over = turn + 1 >= len(text)
        rewards = {"letters": reward, "nothing": 0.0}
        return {"rewards": rewards, "over": over, "metadata": {**metadata, "turn": turn + 1}}

    return Judge(one)


def played(environment: EnvironmentInterface, *texts: str) -> RolloutGroup:
    rollouts = rollouts_of(
        ScriptedGenerator(saying(*texts)), environments={"judge": environment}, max_turns=8
    )
    playing = rollouts.play([task()], num_generations=len(texts), sampling=SAMPLING, batch=(0,))
    try:
        (group,) = asyncio.run(asyncio.wait_for(playing, 20))
    finally:
        rollouts.close()
    return group


def rewards_of(environment: EnvironmentInterface, *texts: str) -> list[float | None]:
    return [one.reward for one in played(environment, *texts).rollouts_G]


SAME = {  # weights whose sums are the same numbers, and not the same in float64 or in float32
    "0.1 + 0.6 is 0.7": ("ab", "c"),
    "0.1 + 0.2 is 0.3": ("ad", "e"),
    "0.1 + 0.2 - 0.3 is 0": ("adf", "x"),
}


@pytest.mark.parametrize("made", [by_weights, by_rewards, by_turns])
@pytest.mark.parametrize("texts", SAME.values(), ids=SAME.keys())
def test_equal_sums_are_equal_rewards(made: Any, texts: tuple[str, str]) -> None:
    if made is by_turns and "x" in texts:
        texts = (texts[0], "af" + "d")  # the same terms in another order
    first, second = rewards_of(made(), *texts)
    assert first == second


def test_equal_sums_over_turns_are_equal_components() -> None:
    """GDPO would divide what rounding leaves by its own deviation."""
    long, short, other = played(by_turns(), "ad", "e", "c").rollouts_G
    assert long.components == short.components
    assert other.components["letters"] == 0.7


@pytest.mark.parametrize("made", [by_weights, by_rewards])
def test_real_differences_stay(made: Any) -> None:
    assert rewards_of(made(), "ab", "c", "cd") == [
        pytest.approx(0.7, abs=1e-15),
        pytest.approx(0.7, abs=1e-15),
        pytest.approx(0.9, abs=1e-15),
    ]


ESTIMATORS: list[dict[str, Any]] = [
    {},
    {"leave_one_out_std": True},
    {"scale": "batch"},
    {"scale": "none"},
    {"name": "gdpo"},
    {"name": "reinforce_plus_plus"},
    {"name": "reinforce_plus_plus", "minus_baseline": False},
]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_no_estimator_divides_by_less_than_the_noise(estimator: dict[str, Any], eps: float) -> None:
    """The case of the issue: three completions whose sums differ by the rounding of float32."""
    grpo = GRPOConfig.model_validate({"adv_estimator": {**estimator, "std_eps": eps}})
    rows = [[0.7, 0.7 + 3.7e-8, 0.7, 0.0], [0.7, 0.7 + 3.7e-8, 0.7, 0.7]]
    components = [[{"a": r, "b": 1.0} for r in row] for row in rows]
    found = compute_advantages(rows, resolve(grpo), noise=3.7e-8, components_BG=components)
    assert max(np.abs(values).max() for values in found.values_BG) <= 3.0
    # Of the second group nothing differs but noise.
    assert np.abs(found.values_BG[1]).max() <= (0.2 if estimator != ESTIMATORS[-1] else 0.7)


def test_others_that_differ_by_noise_alone_count_as_equal() -> None:
    """By hand: the others of the 0 are 0.7, 0.7 and 0.7 + 4e-8, with a deviation of 2.3e-8."""
    grpo = GRPOConfig.model_validate({"adv_estimator": {"leave_one_out_std": True, "std_eps": 0.0}})
    row = [0.7, 0.7, 0.7 + 4e-8, 0.0]
    loud = compute_advantages([row], resolve(grpo), noise=4e-8).values_BG[0]
    equal = compute_advantages([[0.7, 0.7, 0.7, 0.0]], resolve(grpo)).values_BG[0]
    assert equal[3] == pytest.approx(-0.7, abs=1e-15)
    assert loud.tolist() == pytest.approx(equal.tolist(), abs=1e-6)
    # Above the floor the deviation counts.
    assert compute_advantages([row], resolve(grpo), noise=1e-9).values_BG[0][3] < -1e7


def test_components_that_cancel_out_give_gdpo_no_signal() -> None:
    rows = [[1.0, 2.0, 4.0], [1.0, 3.0, 7.0]]
    parts = [[{"a": r, "b": 0.1 - r / 3} for r in row] for row in rows]
    grpo = GRPOConfig.model_validate({"adv_estimator": {"name": "gdpo", "std_eps": 0.0}})
    found = compute_advantages(rows, resolve(grpo), components_BG=parts)
    assert [values.tolist() for values in found.values_BG] == [[0.0] * 3] * 2


def test_float32_stands_for_its_shortest_decimal() -> None:
    given = torch.tensor([0.7, 1 / 3, -0.1, 1e-30, float("nan"), float("inf")])
    found = precise(given)
    assert found[:4].tolist() == [0.7, 0.33333334, -0.1, 1e-30]
    assert torch.equal(found.float()[:4], given[:4])
    assert found[4].isnan()
    assert found[5].isinf()
    exact = torch.tensor([1 / 3], dtype=torch.float64)
    assert precise(exact) is exact or torch.equal(precise(exact), exact)
