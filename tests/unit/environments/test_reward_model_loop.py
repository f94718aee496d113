"""How a reward-model environment wants its completions, and that it does not matter to rewards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import WordScorer
from laurel.environments.composite import CompositeEnvironment
from laurel.environments.reward_model_environment import RewardModelEnvironment, scorer_spec_of
from laurel.errors import ConfigError
from laurel.rewards.loop_scorer import LoopScorer
from laurel.rewards.open import open_local
from laurel.types import JudgingUnit
from policy_fakes import Judge

LOGS = [
    [{"role": "user", "content": f"Where is {i}?"}, {"role": "assistant", "content": f"At {j}."}]
    for i in range(3)
    for j in range(4)
]


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> str:
    return str(checkpoint)


@pytest.fixture(scope="module")
def looped(model: str) -> Iterator[RewardModelEnvironment]:
    """With a scorer that merges, as on a GPU."""
    config = {"model_name": model, "precision": "float32"}
    with RewardModelEnvironment(config, device="cpu") as plain:
        inner = open_local(scorer_spec_of(plain.config, device="cpu"), say=lambda _: None)
    with RewardModelEnvironment(config, scorer=LoopScorer(inner)) as environment:
        yield environment


def test_what_each_wants(model: str, looped: RewardModelEnvironment) -> None:
    config = {"model_name": model, "precision": "float32"}
    with RewardModelEnvironment(config, device="cpu") as here:
        assert here.spec.judges == "part"
    with RewardModelEnvironment({**config, "use_reward_loop": False}, device="cpu") as late:
        assert late.spec.judges == "batch"
    with RewardModelEnvironment({}, scorer=WordScorer()) as given:
        assert given.spec.judges == "completion"
    assert looped.spec.judges == "completion"


def test_one_by_one_in_parts_and_all_together_give_the_same_rewards(
    model: str, looped: RewardModelEnvironment
) -> None:
    with RewardModelEnvironment(
        {"model_name": model, "precision": "float32", "use_reward_loop": False}, device="cpu"
    ) as late:
        expected = late.step(LOGS).rewards.tolist()
        noise = late.noise_floor()
        parts = [late.step(LOGS[i : i + 2]).rewards.tolist() for i in range(0, len(LOGS), 2)]
    alone = [looped.step([log]).rewards.tolist()[0] for log in LOGS]
    assert alone == pytest.approx(expected, abs=1e-5)
    assert [value for part in parts for value in part] == pytest.approx(expected, abs=1e-5)
    assert looped.noise_floor() == pytest.approx(noise), "measured past what is remembered"
    assert looped.preprocess_data(LOGS[:1])["input_ids"].shape[0] == 1


def test_replicas_without_the_loop_are_refused(model: str) -> None:
    config = {"model_name": model, "num_replicas": 2, "use_reward_loop": False}
    with pytest.raises(ConfigError, match=r"env\.reward_model\.num_replicas=2: without the reward"):
        RewardModelEnvironment(config, device="cpu")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("completion", "completion"), "completion"),
        (("completion", "part"), "part"),
        (("part", "group"), "group"),
        (("group", "completion", "part"), "group"),
        (("completion", "batch", "group"), "batch"),
    ],
)
def test_in_a_composite_the_most_patient_has_its_way(
    parts: tuple[JudgingUnit, ...], expected: JudgingUnit
) -> None:
    environments = {str(i): Judge(judges=judges) for i, judges in enumerate(parts)}
    composite = CompositeEnvironment(
        {"parts": [{"env": name} for name in environments]}, environments
    )
    assert composite.spec.judges == expected
