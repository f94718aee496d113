"""Answers of a careless pupil to tasks of reasoning-gym, for a warm start by `laurel sft`.

The form of an answer is always right, and most answers are wrong: each is that of another task
with the probability `share_wrong`. Used by recipes/reasoning_gym_sft_cpu.yaml.
"""

import random
from collections.abc import Iterator
from typing import Any

from laurel.config.data import GeneratorConfig, TaskSetConfig
from laurel.extensions.reasoning_gym.environment import made_rows
from laurel.extensions.reasoning_gym.settings import ReasoningGymEnvironmentConfig

TASKS = {
    "leg_counting": GeneratorConfig(
        config={"min_animals": 1, "max_animals": 1, "min_instances": 1, "max_instances": 3}
    )
}


def careless(
    seed: int = 0, count: int = 6000, share_wrong: float = 0.6
) -> Iterator[dict[str, Any]]:
    rows = made_rows(
        TaskSetConfig(tasks=dict(TASKS)),
        ReasoningGymEnvironmentConfig(answer_tag=None, system_prompt=None),
    )
    assert rows.make is not None
    made = []
    for index in range(count):
        # At other tries the generator has drawn a prompt of validation, and None is made.
        tries = (rows.make(index, attempt) for attempt in range(1000))
        made.append(next(row for row in tries if row is not None))
    generator = random.Random(seed)
    for row in made:
        shown = generator.choice(made) if generator.random() < share_wrong else row
        yield {
            "messages": [*row["prompt"], {"role": "assistant", "content": shown["answer"]}],
        }
