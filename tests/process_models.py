"""Small process reward models, and rows with labels of steps."""

from __future__ import annotations

import random
from typing import Any

import torch

from laurel.config.policy import RewardModelConfig, ScratchConfig
from laurel.models.loading.reward_model import LoadedRewardModel, load_reward_model
from laurel.models.spec import ModelSpec
from laurel.types import Completion, Group, Message

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
    spec = ModelSpec(
        scratch=ScratchConfig(hidden_size=32, vocab_size=400),
        precision="float32",
        reads_forests=reads_forests,
        head=RewardModelConfig(
            enabled=True,
            reward_model_type="process",
            step_separator=separator,
            step_aggregate=aggregate,
        ),
    )
    torch.set_num_threads(1)
    loaded = load_reward_model(
        spec,
        seed=seed,
        max_length=max_length,
        truncation_side="left",
        device=torch.device("cpu"),
        texts=TEXTS,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2, generator=generator)
    return loaded


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
