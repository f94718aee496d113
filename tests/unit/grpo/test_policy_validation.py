"""Which tasks a validation plays, how many at a time, and who hears of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from laurel.config.grpo import GRPOConfig
from laurel.errors import EnvironmentFailedError
from laurel.grpo.source import RolloutSource
from laurel.grpo.validation import PolicyValidation
from laurel.types import RolloutGroup, SamplingParams, Task
from policy_fakes import SAMPLING, Judge, ScriptedGenerator, rollouts_of, saying, task

TASKS = [task(f"{i}") for i in range(7)]
GREEDY = SamplingParams(max_new_tokens=5, temperature=0.0)


class Played:
    """A validation of seven tasks, played once."""

    def __init__(
        self, *, tasks: Sequence[Task] = TASKS, judge: Judge | None = None, **changes: Any
    ) -> None:
        config = GRPOConfig(num_prompts_per_step=1, **changes)
        judge = judge or Judge()
        self.generator = ScriptedGenerator(saying("a"))
        source = RolloutSource(
            rollouts_of(self.generator, judge=judge),
            TASKS,
            config,
            SAMPLING,
            shuffle=True,
            total_steps=9,
        )
        validation = PolicyValidation(tasks=tasks, config=config, sampling=GREEDY)
        self.heard: list[int] = []
        try:
            self.groups: list[RolloutGroup] = validation.play(
                source, while_waiting=self.heard.append
            )
        finally:
            source.close()


@pytest.mark.parametrize(
    ("limit", "batch", "expected"),
    [
        (256, 256, 7),
        (256, 3, 7),
        (3, 256, 3),  # D21: fewer samples than a batch holds
        (5, 2, 5),  # the last batch is not whole
        (1, 1, 1),
    ],
)
def test_d21_as_many_tasks_as_are_asked_for_and_there(
    limit: int, batch: int, expected: int
) -> None:
    played = Played(max_val_samples=limit, val_batch_size=batch)
    assert [group.task.id for group in played.groups] == [t.id for t in TASKS[:expected]]
    assert played.heard == sorted(played.heard)
    assert played.heard[-1] == expected
    assert len({group.id for group in played.groups}) == expected


def test_completions_are_drawn_as_validation_asks() -> None:
    played = Played(val_num_generations_per_prompt=3, val_batch_size=2)
    assert all(r.sampling == GREEDY for r in played.generator.requests)
    assert [len(r.seeds_G) for r in played.generator.requests] == [3] * 7
    seeds = [seed for r in played.generator.requests for seed in r.seeds_G]
    assert len(set(seeds)) == 21


def test_too_many_failures_are_told_of_the_whole_validation_and_not_of_its_last_batch() -> None:
    """Seven tasks, two at a time: the last batch is a single one, and it fails."""
    judge = Judge(lambda text, m: {"failure": "broken" if m.get("odd") else None})
    tasks = [*TASKS[:6], task("6", odd=True)]
    assert len(Played(tasks=tasks, judge=judge, val_batch_size=2).groups) == 7
    with pytest.raises(EnvironmentFailedError, match="could not judge 4 of 7"):
        Played(tasks=[*TASKS[:3], *(task(f"{i}", odd=True) for i in range(3, 7))], judge=judge)
