"""Figures of rollouts, worked by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from laurel.environments.composite import CompositeEnvironment
from laurel.errors import EnvironmentFailedError
from laurel.extensions.math.environment import MathEnvironment
from laurel.grpo.grading import RolloutStats
from laurel.grpo.metrics import (
    control_token_metrics,
    end_batch,
    environment_batch,
    environment_metrics,
    failures_with,
    grading_metrics,
    rollout_metrics,
    unended_metrics,
    unended_note,
)
from laurel.grpo.validation import validation_metrics
from laurel.observe.console import completion_rows
from laurel.types import SamplingParams
from policy_fakes import (
    ByteChat,
    Judge,
    ScriptedGenerator,
    rollout,
    rollout_group,
    rollouts_of,
    saying,
    task,
)

GROUPS = [
    rollout_group(
        rollout("xx", 1.0), rollout("xxx..x", 3.0, num_turns=2, truncated=True, begins=(4,))
    ),
    rollout_group(rollout("x", None), rollout("xxxxx", 2.0), prompt="defgh"),
]


def test_the_share_of_completions_that_spell_a_control_token() -> None:
    """Tokens of the policy, and the marks of templates that its judges may have."""
    said = rollout_group(*(rollout(text, 1.0) for text in ("a</s>", "<|im_end|>", "<b>", "")))
    assert control_token_metrics([said], ByteChat()) == {"completions/control_token_share": 0.5}
    assert control_token_metrics([], ByteChat()) == {}


def test_lengths_turns_and_rewards_by_hand() -> None:
    found = rollout_metrics(GROUPS)
    expected = {
        "total_turns": 5,
        "avg_turns_per_sample": 1.25,
        "max_turns_per_sample": 2,
        "sequences_per_rollout": 1.25,
        "natural_termination_rate": 0.75,
        "truncation_rate": 0.25,
        "mean_prompt_length": 4,
        "total_num_tokens": 3 + 3 + 5 + 5 + 2 + 6 + 1 + 5,
        "mean_total_tokens_per_sample": 7.5,
        "mean_gen_tokens_per_sample": 3,
        "max_gen_tokens_per_sample": 5,
        "mean_env_tokens_per_sample": 0.5,
        "completions/mean_length": 3,
        "completions/min_length": 1,
        "completions/max_length": 5,
        "completions/clipped_ratio": 0.25,
        "completions/mean_terminated_length": 8 / 3,
        "completions/min_terminated_length": 1,
        "completions/max_terminated_length": 5,
        "num_failures": 1,
        "reward/failed_other": 1,
        "reward": 2,
        "reward_std": np.std([1, 3, 2]),
        "reward_min": 1,
        "reward_max": 3,
    }
    assert found == pytest.approx(expected)
    assert all(type(value) is float for value in found.values())


def test_failures_are_counted_by_the_word_for_why() -> None:
    reasons = (
        "timeout: replica 0 took more than 3 s",
        "timeout: no verdict",
        "reward_model: nan: it is",
        "both: reward_model: 4xx: no",
        "ValueError: nan is no number (x.py:3)",
        "nothing",
    )
    failed = [rollout("x", None, failure=reason) for reason in reasons]
    found = rollout_metrics([rollout_group(*failed, rollout("x", 1.0))])
    words = {n.removeprefix("reward/failed_"): v for n, v in found.items() if "/failed_" in n}
    assert words == {"timeout": 2, "nan": 1, "4xx": 1, "other": 2}
    assert sum(words.values()) == found["num_failures"]
    more = failures_with(found, {"timeout": 3, "5xx": 1})
    assert (more["reward/failed_timeout"], more["reward/failed_5xx"]) == (5, 1)
    assert more["num_failures"] == found["num_failures"]
    assert more["num_failures_left_out"] == 4
    assert failures_with(found, {}) == {**found, "num_failures_left_out": 0.0}


def test_the_time_of_judging_and_how_much_of_it_was_hidden() -> None:
    stats = RolloutStats(environment=6.0, judging=4.0, exposed=1.0)
    assert grading_metrics(stats) == {
        "timing/train/rollout/environment": 6.0,
        "timing/train/rollout/environment_busy": 4.0,
        "timing/train/rollout/environment_exposed": 1.0,
        "performance/reward_hidden_share": 0.75,
    }
    assert "performance/reward_hidden_share" not in grading_metrics(RolloutStats())
    assert RolloutStats(judging=4.0, exposed=4.5).hidden_share == 0.0


def test_conversations_that_nobody_meant_to_end_are_counted_and_told() -> None:
    assert unended_metrics(RolloutStats()) == {}
    assert unended_note(RolloutStats(), max_turns=1) is None
    stats = RolloutStats(num_out_of_turns=3, num_cut_off=2)
    assert unended_metrics(stats) == {"unended_out_of_turns": 3, "unended_cut_off": 2}
    note = unended_note(stats, max_turns=1) or ""
    assert "3 for want of a second turn (grpo.max_rollout_turns=1;" in note
    assert "2 as the answer was cut off" in note
    assert "policy.generation.max_new_tokens" in note
    # A limit that was set is meant.
    assert unended_note(RolloutStats(num_out_of_turns=3), max_turns=2) is None


def test_where_all_failed_there_is_no_reward_and_where_all_were_cut_no_terminated_length() -> None:
    found = rollout_metrics([rollout_group(rollout("x", None, truncated=True))])
    assert "reward" not in found
    assert not any("terminated_length" in name for name in found)
    assert (found["num_failures"], found["truncation_rate"]) == (1, 1)
    assert rollout_metrics([]) == {}


def test_components_are_those_of_samples_that_have_a_reward() -> None:
    found = rollout_metrics(
        [
            rollout_group(
                rollout("x", 3.0, components={"a": 1.0, "b": 2.0}),
                rollout("x", None, components={"a": 100.0, "c": 1.0}),
                rollout("x", 5.0, components={"a": 5.0}),
            )
        ]
    )
    assert {name: value for name, value in found.items() if name.startswith("rewards/")} == {
        "rewards/a/mean": 3.0,
        "rewards/a/std": 2.0,
        "rewards/b/mean": 2.0,
        "rewards/b/std": 0.0,
    }


def test_each_environment_is_given_its_own_samples_that_have_a_reward() -> None:
    one, other, idle = Judge(), Judge(), Judge()
    groups = [
        rollout_group(
            rollout(
                "xx.x",
                1.0,
                answer="4",
                note={"timeout": True},
                truncated=True,
                components={"a": 0.5},
            ),
            rollout("x", None),
            prompt="p",
            name="one",
        ),
        rollout_group(rollout("xxx", 2.0), prompt="qq", name="other"),
    ]
    found = environment_metrics(groups, {"one": one, "other": other, "idle": idle})
    assert found == {"env/one/seen": 1.0, "env/other/seen": 1.0}
    assert not idle.batches
    (batch,) = one.batches
    assert batch["message_log"] == [
        [{"role": "user", "content": "p"}, {"role": "assistant", "content": "xx.x"}]
    ]
    assert (batch["prompt"], batch["completion"]) == (["p"], ["xx.x"])
    assert batch["group_ids"] == ["g-p"]
    assert batch["rewards"].tolist() == [1.0]
    assert batch["rewards"].dtype == torch.float32
    assert batch["components"]["a"].tolist() == [0.5]
    assert batch["components"]["a"].dtype == torch.float32
    assert batch["is_end"].tolist() == [False]
    assert batch["prompt_lengths"].tolist() == [1]
    assert batch["generation_lengths"].tolist() == [3]
    assert batch["generation_lengths"].dtype == torch.int64
    assert batch["answers"] == ["4"]
    assert batch["notes"] == [{"timeout": True}]
    assert batch["num_failures"] == 1


def test_a_batch_in_which_everything_failed_is_empty_and_still_handed_over() -> None:
    batch = environment_batch([rollout_group(rollout("x", None), rollout("xx", None))])
    assert batch["num_failures"] == 2
    assert batch["message_log"] == []
    assert batch["rewards"].shape == (0,)
    for name in ("is_end", "prompt_lengths", "generation_lengths"):
        assert batch[name].shape == (0,)
    assert batch["is_end"].dtype == torch.bool
    assert batch["prompt_lengths"].dtype == torch.int64


def test_names_are_not_prefixed_twice() -> None:
    class Prefixed(Judge):
        def global_post_process_and_metrics(self, batch: Any) -> Any:
            return batch, {"judge_env/mean_reward": 1.0, "plain": 2.0}

    found = environment_metrics([rollout_group(rollout("x", 1.0))], {"judge": Prefixed()})
    assert found == {"env/judge/mean_reward": 1.0, "env/judge/plain": 2.0}


@pytest.mark.parametrize("measured", [None, {"x": "many"}, {3: 1.0}, ValueError("odd")])
def test_an_environment_that_cannot_measure_is_named(measured: Any) -> None:
    class Broken(Judge):
        def global_post_process_and_metrics(self, batch: Any) -> Any:
            if isinstance(measured, Exception):
                raise measured
            return batch, measured

    with pytest.raises(EnvironmentFailedError, match="'judge' could not measure its batch"):
        environment_metrics([rollout_group(rollout("x", 1.0))], {"judge": Broken()})


class Learns(Judge):
    """Its state is the rewards that it was told were learned from."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.spec = replace(self.spec, has_state=True)
        self.learned: list[float] = []

    def end_batch(self, batch: Any) -> None:
        if any(reward < 0 for reward in batch["rewards"]):
            raise ValueError("odd")
        self.learned += batch["rewards"].tolist()


def test_the_end_of_a_batch_is_for_who_has_a_state_and_samples_in_it() -> None:
    one, idle, plain = Learns(), Learns(), Judge()
    groups = [
        rollout_group(rollout("x", 1.0), rollout("x", None), name="one"),
        rollout_group(name="plain"),
    ]
    end_batch(groups, {"one": one, "idle": idle, "plain": plain})
    assert (one.learned, idle.learned) == ([1.0], [])
    with pytest.raises(EnvironmentFailedError, match=r"'one' could not end its batch .*odd.*py:\d"):
        end_batch([rollout_group(rollout("x", -1.0), name="one")], {"one": one})


def test_d26_accuracy_is_said_of_zeros_and_ones_only() -> None:
    binary = [
        rollout_group(rollout("x", 1.0), rollout("xx", 0.0)),
        rollout_group(rollout("x", 0.0), rollout("x", 0.0)),
    ]
    found = validation_metrics(binary, {"judge": Judge()})
    assert found["reward_mean"] == found["accuracy"] == 0.25
    assert found["pass@2"] == 0.5
    assert found["avg_length"] == 1.25
    assert found["env/judge/seen"] == 4
    graded = [*binary, rollout_group(rollout("x", 0.5), rollout("x", 1.0))]
    found = validation_metrics(graded, {"judge": Judge()})
    assert found["reward_mean"] == pytest.approx(2.5 / 6)
    assert "accuracy" not in found
    assert "pass@2" not in found


def test_failures_are_in_no_figure_of_a_validation_and_counted() -> None:
    found = validation_metrics(
        [rollout_group(rollout("x", 1.0), rollout("x", None)), rollout_group(rollout("x", None))],
        {},
    )
    assert (found["num_failures"], found["reward_mean"], found["accuracy"]) == (2, 1.0, 1.0)
    nothing = validation_metrics([rollout_group(rollout("x", None))], {})
    assert nothing["num_failures"] == 1
    assert "reward_mean" not in nothing
    assert "accuracy" not in nothing


def test_pass_at_k_counts_tasks_that_were_all_judged() -> None:
    """A task of which only one of two completions was judged says nothing about two."""
    found = validation_metrics(
        [
            rollout_group(rollout("x", 1.0), rollout("x", 0.0)),
            rollout_group(rollout("x", 0.0), rollout("x", None)),
        ],
        {},
    )
    assert found["pass@2"] == 1.0
    assert found["accuracy"] == pytest.approx(1 / 3)


def test_rows_tell_everything_of_a_rollout() -> None:
    groups = [
        rollout_group(
            rollout("x.x", 1.0, answer="4", num_turns=2, weight_version=3),
            prompt="p",
            ground_truth=4,
        ),
        rollout_group(rollout("x", None), prompt="q"),
    ]
    one, other = completion_rows(groups, step=9, advantages_BG=[np.array([0.5]), [0.0]])
    assert (one.step, one.task, one.group, one.environment) == (9, "p", "g-p", "judge")
    assert (one.prompt, one.completion, one.reward, one.advantage) == ("p", "x.x", 1.0, 0.5)
    assert (one.answer, one.expected, one.num_tokens) == ("4", "4", 2)
    assert (one.num_turns, one.weight_version) == (2, 3)
    assert (other.reward, other.failure, other.expected) == (None, "broken", None)
    assert completion_rows(groups, step=0)[0].advantage is None


def test_two_tasks_with_the_same_words_are_measured_each_by_its_own_verdict() -> None:
    """The prompt and the answer are equal, and what is right is not."""

    def composite() -> CompositeEnvironment:
        parts = {"parts": [{"env": "choice", "weight": 1.0}]}
        choice = MathEnvironment({"verifier_type": "english_multichoice"})
        return CompositeEnvironment(parts, {"choice": choice})

    def figures_of(environment: CompositeEnvironment) -> dict[str, float]:
        return environment_metrics(groups, {"both": environment})

    tasks = [
        task("A or B?", name="both", task_id=gold, ground_truth=gold) for gold in ("A", "B", "C")
    ]
    environment = composite()
    rollouts = rollouts_of(
        ScriptedGenerator(saying("Answer: A")), environments={"both": environment}, max_length=99
    )
    playing = rollouts.play(
        tasks,
        num_generations=2,
        sampling=SamplingParams(max_new_tokens=16),
        batch=(0, 0, 0),
    )
    groups = asyncio.run(playing)
    rollouts.close()
    assert [[r.reward for r in group.rollouts_G] for group in groups] == [[1, 1], [0, 0], [0, 0]]
    measured = figures_of(environment)
    assert measured["env/both/choice/accuracy"] == pytest.approx(1 / 3)
    assert measured["env/both/choice/pass@samples_per_prompt"] == pytest.approx(1 / 3)
    assert figures_of(composite()) == measured, "they are computed from the batch alone"
