"""Conversations that environments judge, and a batch of what they said of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from laurel.types import EnvironmentReturn


def log_of(*answers: str) -> list[dict[str, str]]:
    """A question, and what the policy said to it."""
    said = [{"role": "assistant", "content": answer} for answer in answers]
    return [{"role": "user", "content": "What is it?"}, *said]


def total(returned: EnvironmentReturn) -> list[float]:
    """The rewards, summed over components where there are several."""
    rewards: Any = returned.rewards
    if isinstance(rewards, dict):
        rewards = torch.stack(list(rewards.values())).sum(dim=0)
    return rewards.tolist()  # type: ignore[no-any-return]


def batch_of(
    logs: Sequence[list[dict[str, str]]],
    returned: EnvironmentReturn,
    group_ids: Sequence[str] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """What an environment is given at the end of a batch; some of it may be said otherwise."""
    size = len(logs)
    return {
        "message_log": logs,
        "prompt": [log[0]["content"] for log in logs],
        "completion": [log[-1]["content"] for log in logs],
        "group_ids": group_ids or [str(i) for i in range(size)],
        "rewards": torch.tensor(total(returned), dtype=torch.float32),
        "components": returned.rewards if isinstance(returned.rewards, dict) else {},
        "is_end": torch.ones(size, dtype=torch.bool),
        "prompt_lengths": torch.full((size,), 10),
        "generation_lengths": torch.arange(1, size + 1) * 100,
        "answers": returned.answers or [None] * size,
        "notes": returned.notes or [None] * size,
        "num_failures": 0,
        **changes,
    }
