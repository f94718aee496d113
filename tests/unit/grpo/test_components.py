"""The components that GDPO compares: who gives them, and what is told where nobody does."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from environment_batches import log_of
from fakes import WordScorer
from laurel.config.environments import FunctionConfig
from laurel.config.grpo import AdvantageConfig
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.data.tasks import TaskData
from laurel.environments.composite import CompositeEnvironment
from laurel.environments.interface import EnvironmentInterface
from laurel.environments.reward_model_environment import RewardModelEnvironment
from laurel.errors import ConfigError
from laurel.extensions.math.environment import MathEnvironment
from laurel.extensions.reward_functions.scorer import FunctionScorer, score_of_result
from laurel.grpo.advantages import component_weights
from laurel.grpo.metrics import rollout_metrics
from laurel.rewards.ensemble import EnsembleScorer, Member
from laurel.run.grpo import check_components
from laurel.types import RolloutGroup
from policy_fakes import SAMPLING, Judge, ScriptedGenerator, rollouts_of, saying, task

GDPO = Path(__file__).parents[3] / "examples" / "configs" / "presets" / "gdpo.yaml"


def function_environment(function: Any) -> RewardModelEnvironment:
    config = FunctionConfig(path="given:function")
    scorer = FunctionScorer(config, function=function)
    return RewardModelEnvironment(
        {"function": {"path": "given:function"}}, scorer=cast(Any, scorer)
    )


def in_parts(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
    """As in verl's documentation: a total, and the rewards that are compared one by one."""
    return {
        "score": 10.0 * solution_str.count("a"),
        "accuracy_reward": float("a" in solution_str),
        "format_reward": float(solution_str.endswith(".")),
        "said": solution_str,
    }


def number(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    return float(len(solution_str))


def played(environment: EnvironmentInterface, *texts: str) -> RolloutGroup:
    rollouts = rollouts_of(ScriptedGenerator(saying(*texts)), environments={"judge": environment})
    playing = rollouts.play([task()], num_generations=len(texts), sampling=SAMPLING, batch=(0,))
    try:
        (group,) = asyncio.run(asyncio.wait_for(playing, 20))
    finally:
        rollouts.close()
    return group


def checked(*changes: str, **environments: EnvironmentInterface) -> None:
    """Check a run of the preset before its first batch."""
    config = load_config(GRPORun, GDPO, list(changes)).config
    tasks = [task(name=name) for name in environments]
    data = cast(TaskData, SimpleNamespace(train=tasks))
    check_components(cast(GRPORun, config), data, environments)


def test_a_functions_dictionary_is_its_components() -> None:
    with function_environment(in_parts) as environment:
        group = played(environment, "a.", "b.", "aa")
        assert environment.spec.components is None
    assert [one.reward for one in group.rollouts_G] == [10.0, 0.0, 20.0]
    assert [one.components for one in group.rollouts_G] == [
        {"accuracy_reward": 1.0, "format_reward": 1.0},
        {"accuracy_reward": 0.0, "format_reward": 1.0},
        {"accuracy_reward": 1.0, "format_reward": 0.0},
    ]
    figures = rollout_metrics([group])
    assert figures["rewards/format_reward/mean"] == pytest.approx(2 / 3)
    assert "rewards/score/mean" not in figures


def test_a_functions_number_has_none() -> None:
    with function_environment(number) as environment:
        group = played(environment, "a", "bc")
        checked(judge=environment)  # not known before the first batch
    with pytest.raises(ConfigError, match="found: none"):
        component_weights((one.components for one in group.rollouts_G), AdvantageConfig())


def test_a_model_and_several_models_give_one_number() -> None:
    with RewardModelEnvironment({"model_name": "m"}, scorer=cast(Any, WordScorer())) as one:
        assert one.spec.components == ()
    several = EnsembleScorer(
        [Member(name=name, scorer=cast(Any, WordScorer())) for name in ("x", "y")]
    )
    said = r"the environment reward_model: .*found: none"
    with (
        RewardModelEnvironment({"model_name": "m"}, scorer=several) as environment,
        pytest.raises(ConfigError, match=said),
    ):
        checked(reward_model=environment)


def test_a_component_that_is_not_finite_fails_its_completion() -> None:
    judge = Judge(lambda text, m: {"rewards": {"a": 1.0, "b": float(text)}})
    rollouts = played(judge, "1", "nan").rollouts_G
    assert rollouts[0].components == {"a": 1.0, "b": 1.0}
    assert (rollouts[1].reward, "'b'" in str(rollouts[1].failure)) == (None, True)


class One(Judge):
    """Says that it gives one number."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = MathEnvironment({}).spec


def weighed(*names: str, **settings: Any) -> CompositeEnvironment:
    parts = [{"env": name} for name in names] + settings.pop("more", [])
    return CompositeEnvironment(
        {"parts": parts, **settings}, {name: One() for name in ("a", "b", "c")}
    )


def test_what_composites_name() -> None:
    assert weighed("b", "a").spec.components == ("b", "a")
    gate = {"more": [{"env": "c", "gate": 0.5}]}
    assert weighed("a", **gate).spec.components == ("a", "gate")
    assert weighed("a", **gate, as_components=True).spec.components == ("a",)
    of_unknown = CompositeEnvironment({"parts": [{"env": "a"}]}, {"a": Judge()})
    assert of_unknown.spec.components is None
    outer = CompositeEnvironment(
        {"parts": [{"env": "both"}, {"env": "a"}]}, {"both": weighed("a", "b"), "a": One()}
    )
    assert outer.spec.components == ("both/a", "both/b", "a")
    # And they are those that it gives.
    returned = outer.step([log_of("x")], [{}])
    assert tuple(cast(Any, returned.rewards)) == outer.spec.components


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ((), "the environment math: grpo.adv_estimator.name=gdpo needs.*found: none"),
        (("grpo.adv_estimator.reward_weights=[1.0]",), "found: none"),
    ],
)
def test_what_gives_one_number_is_refused_at_the_start(changes: Any, said: str) -> None:
    with MathEnvironment({}) as environment, pytest.raises(ConfigError, match=said):
        checked(*changes, math=environment)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("[1.0]", "1 weight for 2 components; give one for each of: a, b"),
        ("[1.0,2.0,3.0]", "3 weights for 2 components"),
        ("{a: 1.0, form: 1.0}", "no component is called form; there are: a, b"),
    ],
)
def test_weights_that_do_not_fit_are_refused_at_the_start(weights: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked(f"grpo.adv_estimator.reward_weights={weights}", both=weighed("a", "b"))


def test_weights_that_fit() -> None:
    for weights in ("[1.0,2.0]", "{a: 1.0}", "{b: 0.5, a: 0.0}", "null"):
        checked(f"grpo.adv_estimator.reward_weights={weights}", both=weighed("a", "b"))
    with pytest.raises(ConfigError, match="found: a, b, c"):
        checked(one=weighed("a", "b"), other=weighed("a", "c"))
    chosen = AdvantageConfig(name="gdpo", reward_weights={"b": 0.5, "a": 0.0})
    assert component_weights([{"a": 1.0, "b": 2.0, "length": 9.0}], chosen) == {"b": 0.5}
    # A component that is not compared may be missing.
    assert component_weights(
        [{"b": 2.0}, {"b": 1.0, "length": 9.0}],
        chosen.model_copy(update={"reward_weights": {"b": 1.0}}),
    ) == {"b": 1.0}


def test_a_component_that_a_sample_lacks_is_named() -> None:
    """A function's numbers that are not finite are none."""
    samples = [score_of_result({"score": 1.0, "a": 1.0, "b": b}).parts for b in (0.0, math.nan)]
    with pytest.raises(ConfigError, match=r"found: a, b; some samples have no b, or one that is"):
        component_weights(samples, AdvantageConfig(name="gdpo"))


def test_weights_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="no weight other than 0"):
        load_config(GRPORun, GDPO, ["grpo.adv_estimator.reward_weights=[0.0,0.0]"])
