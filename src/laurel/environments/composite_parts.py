"""What the parts of a composite environment say, put together."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from laurel.environments.interface import EnvironmentReturn

Returns = Mapping[str, EnvironmentReturn]
"""Of each part, by its name."""


def begun(step: Callable[..., EnvironmentReturn], *arguments: Any) -> Future[EnvironmentReturn]:
    """A call in a thread of its own, which keeps no process from ending if it never comes back."""
    future: Future[EnvironmentReturn] = Future()

    def run() -> None:
        try:
            future.set_result(step(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="laurel-composite", daemon=True).start()
    return future


def spread(
    judged: EnvironmentReturn | None, chosen: Sequence[int], metadata: Sequence[Any]
) -> EnvironmentReturn:
    """What a part said of some conversations, among those that it has not been asked about."""
    size, place = len(metadata), {index: i for i, index in enumerate(chosen)}

    def filled(values: Sequence[Any] | None, default: Any) -> list[Any]:
        return [values[place[i]] if values and i in place else default for i in range(size)]

    def placed(values: Tensor) -> Tensor:
        whole = torch.zeros(size, dtype=values.dtype)
        whole[list(chosen)] = values.to("cpu")
        return whole

    if judged is None:
        rewards: Tensor | dict[str, Tensor] = torch.zeros(size)
    elif isinstance(judged.rewards, Tensor):
        rewards = placed(judged.rewards)
    else:
        rewards = {name: placed(values) for name, values in judged.rewards.items()}
    found = judged.metadata if judged is not None else None
    return EnvironmentReturn(
        observations=filled(judged and judged.observations, {"role": "environment", "content": ""}),
        metadata=[found[place[i]] if found and i in place else metadata[i] for i in range(size)],
        next_stop_strings=[None] * size,
        rewards=rewards,
        terminateds=torch.zeros(size, dtype=torch.bool),
        answers=filled(judged and judged.answers, None),
        failures=filled(judged and judged.failures, None),
    )


def total_of(rewards: Tensor | Mapping[str, Tensor]) -> Tensor:
    """The reward of each sample, float32 [B]: the sum of its components where it has any."""
    if isinstance(rewards, Tensor):
        return rewards.float()
    return torch.stack([one.float() for one in rewards.values()]).sum(dim=0)


def failures_of(judged: EnvironmentReturn, totals_B: Sequence[float]) -> list[str | None]:
    """Why a part has no reward for each sample. One that is not finite is none."""
    given = judged.failures or [None] * len(totals_B)
    return [
        f"the reward is {reward}" if reason is None and not math.isfinite(reward) else reason
        for reason, reward in zip(given, totals_B, strict=True)
    ]


def joined(returns: Returns, index: int) -> str:
    """What all of them say to a conversation, each thing once."""
    said = (one.observations[index]["content"] for one in returns.values())
    return "\n".join(dict.fromkeys(text for text in said if text))


def stops(returns: Returns, index: int) -> list[str] | None:
    """All strings that any part wants the policy to stop at."""
    wanted = [one.next_stop_strings[index] for one in returns.values()]
    if all(one is None for one in wanted):
        return None
    return list(dict.fromkeys(text for one in wanted for text in one or []))


def answer_of(returns: Returns, index: int) -> str | None:
    """The answer as the first part read it that read one."""
    found = (one.answers[index] for one in returns.values() if one.answers is not None)
    return next((text for text in found if text is not None), None)


def rows_of(batch: Mapping[str, Any], wanted: list[int]) -> dict[str, Any]:
    """The batch with only these samples."""
    size = len(batch["group_ids"])
    rows: dict[str, Any] = {}
    for key, values in batch.items():
        if isinstance(values, Tensor) and values.ndim and len(values) == size:
            rows[key] = values[wanted]
        elif isinstance(values, list | tuple) and len(values) == size:
            rows[key] = [values[index] for index in wanted]
        else:
            rows[key] = values
    return rows
