"""Advantages of tokens from the rewards of steps: DeepSeekMath's formula by hand, and its edges."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.config.grpo import GRPOConfig
from laurel.config.grpo_run import GRPORun
from laurel.grpo.advantages import Advantages, compute_step_advantages, resolve
from laurel.grpo.metrics import rollout_metrics
from laurel.grpo.source import Batch, batch_from_dict, batch_to_dict
from laurel.types import Rollout, RolloutGroup, StepReward, Task
from policy_batches import gradient, labels, loss_of, outputs
from policy_fakes import (
    SAMPLING,
    ByteChat,
    Judge,
    ScriptedGenerator,
    rollout,
    rollout_group,
    rollouts_of,
    saying,
    task,
)


def config(**estimator: Any) -> GRPOConfig:
    return GRPOConfig.model_validate(
        {
            "advantage_clip_low": estimator.pop("clip_low", None),
            "adv_estimator": {
                "use_leave_one_out_baseline": estimator.pop("leave_one_out", False),
                "per_step": True,
                "std_ddof": 0,
                "std_eps": 0.0,
                **estimator,
            },
        }
    )


def stepped(text: str, *steps: tuple[int, float], reward: float | None = 1.0) -> Rollout:
    """A completion of one token a character; each `.` is the environment's."""
    return rollout(text, reward, steps=tuple(StepReward(*one) for one in steps))


# The rewards of six steps: their mean is 2/3, their deviation sqrt(2)/3. So 1 becomes 1/sqrt(2),
# and 0 becomes -sqrt(2).
THREE = rollout_group(
    stepped("aabbb", (2, 1.0), (5, 0.0)),
    stepped("aab", (2, 1.0)),
    stepped("abbc", (1, 0.0), (3, 1.0), (4, 1.0)),
)
UP, DOWN = 1 / math.sqrt(2), -math.sqrt(2)


def advantages_of(
    *groups: RolloutGroup, chosen: GRPOConfig | None = None, noise: float = 0.0
) -> Advantages:
    return compute_step_advantages(
        groups,
        [[r.reward for r in group.rollouts_G] for group in groups],
        resolve(chosen or config()),
        noise=[noise] * len(groups),
    )


def tokens_of(*groups: RolloutGroup, **options: Any) -> list[list[list[float]]]:
    found = advantages_of(*groups, **options).tokens_BGL
    assert found is not None
    return [[values_L.tolist() for values_L in tokens_GL] for tokens_GL in found]


def test_the_formula_of_deepseekmath_by_hand() -> None:
    (found,) = tokens_of(THREE)
    assert found[0] == pytest.approx([UP + DOWN] * 2 + [DOWN] * 3)
    # What comes after the last step gets nothing.
    assert found[1] == pytest.approx([UP, UP, 0.0])
    assert found[2] == pytest.approx([DOWN + 2 * UP, 2 * UP, 2 * UP, UP])


def test_each_is_compared_with_the_steps_of_the_others() -> None:
    (found,) = tokens_of(THREE, chosen=config(leave_one_out=True, scale="none"))
    # The means of the other completions' steps are 3/4, 3/5 and 2/3.
    assert found[0] == pytest.approx([0.25 - 0.75] * 2 + [-0.75] * 3)
    assert found[1] == pytest.approx([0.4, 0.4, 0.0])
    assert found[2] == pytest.approx([0.0, 2 / 3, 2 / 3, 1 / 3])


def test_steps_that_cancel_out_leave_no_rounding() -> None:
    # Their mean is 0.5, and 0.1 + 0.2 - 0.3 is not 0 in floating point.
    group = rollout_group(stepped("abc", (1, 0.6), (2, 0.7), (3, 0.2)), stepped("a", (1, 0.5)))
    (found,) = tokens_of(group, chosen=config(scale="none"))
    assert found[0] == [0.0, pytest.approx(-0.1), pytest.approx(-0.3)]


def test_the_deviation_of_the_batch() -> None:
    other = rollout_group(stepped("a", (1, 3.0)), stepped("a", (1, 5.0)))
    first, second = tokens_of(THREE, other, chosen=config(scale="batch"))
    values = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 3.0, 5.0]
    std = float(np.std(values))
    assert second == [pytest.approx([-1 / std]), pytest.approx([1 / std])]
    assert first[1][0] == pytest.approx((1 / 3) / std)


def test_the_noise_floor_and_the_limits() -> None:
    found = advantages_of(THREE, chosen=config(noise_floor_factor=10.0), noise=0.1)
    assert found.metrics["groups_at_noise_floor"] == 1.0
    assert found.tokens_BGL is not None
    assert found.tokens_BGL[0][1][0] == pytest.approx(1 / 3)  # divided by 10 x 0.1
    (cut,) = tokens_of(THREE, chosen=config(clip_low=-1.0))
    assert cut[0] == pytest.approx([UP + DOWN] * 2 + [-1.0] * 3)


def test_who_has_no_reward_or_no_step_changes_no_other() -> None:
    failed = replace(stepped("ab", (1, 9.0), (2, 9.0)), reward=None, failure="broken")
    more = replace(THREE, rollouts_G=(*THREE.rollouts_G, failed, stepped("abc")))
    (found,) = tokens_of(more)
    assert found[:3] == tokens_of(THREE)[0]
    assert found[3:] == [[0.0, 0.0], [0.0, 0.0, 0.0]]


def test_equal_steps_and_a_lone_completion_teach_nothing() -> None:
    equal = rollout_group(stepped("ab", (1, 0.1), (2, 0.1)), stepped("a", (1, 0.1)))
    alone = rollout_group(stepped("ab", (1, 0.0), (2, 1.0)), stepped("a"))
    for leave_one_out in (False, True):
        for group in (equal, alone):
            found = advantages_of(group, chosen=config(leave_one_out=leave_one_out))
            assert found.tokens_BGL is not None
            assert not any(values_L.any() for values_L in found.tokens_BGL[0])
            assert found.metrics["groups_without_signal"] == 1.0


def test_figures_are_of_the_tokens_that_the_policy_wrote() -> None:
    heard = rollout_group(stepped("a.b", (1, 1.0), (3, 0.0)), stepped("ab", (2, 1.0)))
    found = advantages_of(heard)
    assert found.tokens_BGL is not None
    written = [
        *found.tokens_BGL[0][0][[0, 2]].tolist(),
        *found.tokens_BGL[0][1].tolist(),
    ]
    assert found.metrics["advantages/mean"] == pytest.approx(np.mean(written))
    assert found.values_BG[0].tolist() == pytest.approx(
        [np.mean(written[:2]), np.mean(written[2:])]
    )
    figures = rollout_metrics([heard, rollout_group(stepped("a"), rollout("b", 1.0))])
    assert figures["steps/mean_reward"] == pytest.approx(2 / 3)
    assert figures["steps/mean_per_completion"] == 1.0
    assert figures["steps/share_without"] == pytest.approx(1 / 3)
    assert "steps/mean_reward" not in rollout_metrics([rollout_group(rollout("b", 1.0))])


def test_steps_of_one_completion_alone_are_divided_by_nothing() -> None:
    alone = rollout_group(stepped("ab", (1, 0.0), (2, 1.0)), stepped("a"))
    found = advantages_of(alone, THREE, noise=100.0)
    assert found.metrics["groups_at_noise_floor"] == 1.0, "the other group"
    assert found.metrics["groups_without_signal"] == 1.0


ROWS = st.lists(st.lists(st.floats(-3, 3, allow_nan=False), max_size=4), min_size=2, max_size=5)


@given(rows=ROWS, leave_one_out=st.booleans(), turned=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_the_order_of_completions_changes_no_bit(
    rows: list[list[float]], leave_one_out: bool, turned: Any
) -> None:
    group = rollout_group(
        *(stepped("a" * 4, *((i + 1, v) for i, v in enumerate(row))) for row in rows)
    )
    order = list(range(len(rows)))
    turned.shuffle(order)
    other = replace(group, rollouts_G=tuple(group.rollouts_G[i] for i in order))
    chosen = config(leave_one_out=leave_one_out, std_eps=1e-6)
    (straight,), (shuffled,) = tokens_of(group, chosen=chosen), tokens_of(other, chosen=chosen)
    assert [straight[i] for i in order] == shuffled


def test_each_token_is_learned_by_its_own_advantage() -> None:
    row = labels([9.0, 9.0], [[-1.0, -1.0, -1.0], [-1.0]])
    own = (np.array([2.0, 0.0, -1.0]), np.array([4.0]))
    row = replace(row, advantages_GL=own)
    loss = loss_of()
    assert gradient(loss, outputs([-1.0] * 4), [row]) == pytest.approx([-2.0, 0.0, 1.0, -4.0])
    for same in (row.subset([1]), pickle.loads(pickle.dumps(row)).subset([1])):
        assert [values.tolist() for values in same.advantages_GL] == [[4.0]]
    assert loss.has_signal(row)
    # The advantage of an observation is ignored.
    heard = replace(row.subset([0]), masks_GL=(np.array([False, True, False]),))
    assert not loss.has_signal(heard)


def played(*texts: str, per_step: bool = True, **verdict: Any) -> tuple[Rollout, ...]:
    judge = Judge(lambda text, metadata: {k: v(text) for k, v in verdict.items()})
    judge.spec = replace(judge.spec, gives_steps=True)
    rollouts = rollouts_of(
        ScriptedGenerator(saying(*texts)), judge=judge, max_length=64, per_step=per_step
    )
    playing = rollouts.play(
        [task()], num_generations=len(texts), sampling=SAMPLING, batch=(0, 0, 0)
    )
    try:
        (group,) = asyncio.run(asyncio.wait_for(playing, 20))
    finally:
        rollouts.close()
    return group.rollouts_G


def test_ends_of_steps_become_tokens() -> None:
    first, second = played("né;ab", "x", steps=lambda text: [StepReward(2, 0.5), StepReward(5, 1.0)]
    if len(text) > 1 else [StepReward(1, 0.25)])  # fmt: skip
    assert first.steps == (StepReward(3, 0.5), StepReward(6, 1.0)), "the second letter has 2 bytes"
    assert second.steps == (StepReward(1, 0.25),)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([StepReward(3, 1.0)], "end at"),
        ([StepReward(0, 1.0)], "end at"),
        ([StepReward(2, 1.0), StepReward(1, 1.0)], "end at"),
        ([StepReward(1, math.nan)], "not finite"),
        ([StepReward(1.0, 0.5)], "as steps"),  # type: ignore[arg-type]
        ([(1, 0.5, 2)], "as steps"),
        ([(1, torch.ones(2))], "as steps"),
        (7, "as steps"),
        (None, "None as steps"),
    ],
)
def test_steps_that_cannot_be_are_a_failure(steps: Any, reason: str) -> None:
    (found,) = played("ab", steps=lambda text: steps)
    assert found.reward is None
    assert reason in str(found.failure)


def test_a_conversation_that_is_cut_off_needs_no_steps() -> None:
    """The environment would have gone on, and there is no further turn."""
    (found,) = played("ab", steps=lambda text: None, over=lambda text: False)
    assert (found.failure, found.reward, found.steps) == (None, 1.0, None)
    assert found.truncated
    (advantages_GL,) = tokens_of(rollout_group(*THREE.rollouts_G, found))
    assert advantages_GL == [*tokens_of(THREE)[0], [0.0] * len(found.ids_L)]


def test_a_failure_to_place_steps_says_so(monkeypatch: Any) -> None:
    def broken(*given: Any) -> list[int]:
        raise KeyError("no such token")

    monkeypatch.setattr(ByteChat, "token_ends", broken)
    (found,) = played("ab", steps=lambda text: [StepReward(1, 0.5)])
    assert found.reward is None
    said = str(found.failure)
    assert said.startswith(
        "the tokens that end its steps were not found: KeyError: 'no such token'"
    )


def test_steps_of_numpy_and_torch_become_plain_numbers() -> None:
    given = [(np.int64(1), np.float32(0.5)), (torch.tensor(2), torch.tensor(0.25))]
    (found,) = played("ab", steps=lambda text: given)
    assert found.failure is None
    assert found.steps == (StepReward(1, 0.5), StepReward(2, 0.25))
    assert json.loads(json.dumps(found.steps)) == [[1, 0.5], [2, 0.25]]


def test_steps_that_nothing_reads_fail_no_answer() -> None:
    (found,) = played("ab", per_step=False, steps=lambda text: [StepReward(9, math.nan)])
    assert (found.failure, found.steps) == (None, None)
    assert found.reward is not None


def test_the_place_of_steps_is_sought_beside_the_loop(monkeypatch: Any) -> None:
    threads = list[str]()

    def ends_of(*given: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return [1]

    monkeypatch.setattr(ByteChat, "token_ends", lambda self, *given: ends_of(*given))
    (found,) = played("a", steps=lambda text: [StepReward(1, 0.5)])
    assert found.steps == (StepReward(1, 0.5),)
    assert threads == ["environment"]


def test_a_checkpoint_holds_the_steps() -> None:
    batch = Batch(
        step=1, groups=[replace(THREE, rollouts_G=(*THREE.rollouts_G, rollout("b", 1.0)))]
    )
    tasks: dict[str, Task] = {THREE.task.id: THREE.task}
    (found,) = batch_from_dict(batch_to_dict(batch), tasks).groups
    assert [r.steps for r in found.rollouts_G] == [*(r.steps for r in THREE.rollouts_G), None]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"grpo": {"adv_estimator": {"per_step": True, "name": "gdpo"}}}, "name=gdpo"),
        (
            {"grpo": {"adv_estimator": {"per_step": True, "name": "reinforce_plus_plus"}}},
            "name=reinforce_plus_plus",
        ),
        (
            {"grpo": {"adv_estimator": {"per_step": True, "leave_one_out_std": True}}},
            "leave_one_out_std",
        ),
        ({"grpo": {"reward_scaling": {"enabled": True}}}, "reward_scaling"),
        ({"grpo": {"reward_shaping": {"enabled": True}}}, "reward_shaping"),
        ({"loss_fn": {"use_kl_in_reward": True}}, "use_kl_in_reward"),
        (
            {"env": {"reward_model": {"transform": {"normalize": "running", "clip": [-1, 1]}}}},
            "transform.normalize=running",
        ),
        (
            {"loss_fn": {"sequence_level_importance_ratios": True, "token_level_loss": False}},
            "sequence_level_importance_ratios",
        ),
    ],
)
def test_what_compares_completions_is_refused_by_name(changes: Any, named: str) -> None:
    changes = {**changes, "grpo": {"adv_estimator": {"per_step": True}, **changes.get("grpo", {})}}
    with pytest.raises(ValueError, match=named):
        GRPORun.model_validate(changes)
