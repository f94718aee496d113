"""Small process reward models, and rows with labels of steps."""

from __future__ import annotations

import random
from typing import Any

from laurel.config.policy import RewardModelConfig
from laurel.models.loading.reward_model import LoadedRewardModel
from laurel.types import Completion, Group, Message
from reward_models import random_reward_model

TEXTS = ("1 + 2 = 3", "Step 1: take 4\n\nStep 2: add 5\n\nSo it is 9.", "how much is it?")


def process_model(
    *,
    separator: str = "\n\n",
    aggregate: Any = "min",
    max_length: int = 128,
    reads_forests: bool = True,
    seed: int = 0,
) -> LoadedRewardModel:
    """A random process reward model whose logits are of size 1."""
    head = RewardModelConfig(
        reward_model_type="process",
        step_separator=separator,
        step_aggregate=aggregate,
    )
    return random_reward_model(
        head, TEXTS, max_length=max_length, seed=seed, reads_forests=reads_forests
    )


def solutions(question: str, *answers: str, group_id: str = "g") -> Group:
    """A question and answers to it, whose steps are separated in the text."""
    return Group(
        id=group_id,
        prompt=(Message("user", question),),
        completions_G=tuple(
            Completion(messages=(Message("assistant", answer),)) for answer in answers
        ),
    )


def stepwise_rows(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of TRL's form, in which the word `wrong` in a step makes it and all after it wrong."""
    chance = random.Random(seed)
    rows = []
    for number in range(count):
        size = chance.randint(2, 4)
        first = chance.randrange(size) if number % 2 else size
        steps = [f"step {i} is {'wrong' if i == first else 'right'}" for i in range(size)]
        rows.append(
            {
                "prompt": f"question {number}",
                "completions": steps,
                "labels": [i < first for i in range(size)],
            }
        )
    return rows
