"""Groups with too few rewards: left out, counted, and others drawn in their place."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from laurel.config.grpo import GRPOConfig
from laurel.errors import EnvironmentFailedError
from laurel.grpo.source import Batch, BatchCollector
from policy_fakes import SAMPLING, Judge, ScriptedGenerator, rollouts_of, saying, task

TASKS = [task(str(i), task_id=str(i), number=i) for i in range(8)]


def failing(*numbers: int, texts: str = "ab", reason: str = "timeout: late") -> Judge:
    """Fails at these tasks, where the answer is one of these texts."""

    def verdict(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
        is_bad = metadata["number"] in numbers and text in texts
        return {"reward": float(ord(text)), **({"failure": reason} if is_bad else {})}

    return Judge(verdict)


def play(
    judge: Judge, *, steps: int = 1, share: float = 0.9, **config: Any
) -> tuple[list[Batch], BatchCollector]:
    defaults = {"num_prompts_per_step": 2, "num_generations_per_prompt": 3}
    settings = GRPOConfig(**{**defaults, **config})
    rollouts = rollouts_of(
        ScriptedGenerator(saying("a", "b", "c")), judge=judge, max_failed_share=share
    )
    collector = BatchCollector(
        rollouts, TASKS, settings, SAMPLING, shuffle=False, noise=lambda environment: 0.0
    )

    async def all_of_it() -> list[Batch]:
        return [await collector.play(step, on_group=lambda group: None) for step in range(steps)]

    try:
        return asyncio.run(all_of_it()), collector
    finally:
        rollouts.close()


def names(batch: Batch) -> list[str]:
    return [group.task.id for group in batch.groups]


def test_a_group_with_too_few_rewards_is_replaced_by_the_next_task() -> None:
    (batch, after), collector = play(failing(1), steps=2)
    assert names(batch) == ["0", "2"]
    assert (batch.num_batches, batch.num_replaced) == (2, 1)
    assert batch.failures_left_out == {"timeout": 2}
    assert len({group.id for group in batch.groups}) == 2
    assert names(after) == ["3", "4"]
    assert (after.num_replaced, after.failures_left_out) == (0, {})
    assert collector.consumed == 5


def test_a_group_with_enough_of_them_stays_and_its_failures_are_masked() -> None:
    (batch,), _ = play(failing(1, texts="a"))
    assert names(batch) == ["0", "1"]
    assert [r.reward for r in batch.groups[1].rollouts_G] == [
        None,
        float(ord("b")),
        float(ord("c")),
    ]
    assert (batch.num_replaced, batch.failures_left_out) == (0, {})


def test_a_group_whose_greedy_completion_failed_is_replaced_and_its_failure_counts() -> None:
    remax = {"adv_estimator": {"name": "remax"}, "num_generations_per_prompt": 1}
    (batch,), _ = play(failing(1, texts="a"), **remax)
    assert names(batch) == ["0", "2"]
    assert all(g.greedy is not None and g.greedy.reward == ord("a") for g in batch.groups)
    assert (batch.num_replaced, batch.failures_left_out) == (1, {"timeout": 2})
    with pytest.raises(EnvironmentFailedError, match="could not judge 6 of 6"):
        play(failing(*range(8), texts="a"), num_prompts_per_step=3, **remax)


def test_no_more_rewards_are_needed_than_there_are_completions() -> None:
    (whole,), _ = play(failing(), num_generations_per_prompt=1)
    assert names(whole) == ["0", "1"]


def test_after_so_many_tries_the_step_goes_on_with_what_it_has() -> None:
    (batch,), _ = play(failing(*range(1, 8)), dynamic_sampling_max_gen_batches=3)
    assert names(batch) == ["0", "3"]
    assert (batch.num_batches, batch.num_replaced) == (3, 2)
    assert batch.failures_left_out == {"timeout": 4}


def test_too_large_a_share_of_failures_still_ends_the_run() -> None:
    with pytest.raises(EnvironmentFailedError, match="could not judge 4 of 6 samples"):
        play(failing(0, 1), share=0.5)
    # One bad group among others is no such share, though it is all of one try.
    (batch,), _ = play(failing(1, 2), share=0.5)
    assert names(batch) == ["0", "3"]


def test_with_dynamic_sampling_such_a_group_is_one_without_a_signal() -> None:
    (batch,), _ = play(failing(1, texts="ab"), use_dynamic_sampling=True)
    assert "1" not in names(batch)
    assert batch.failures_left_out == {"timeout": 2}
