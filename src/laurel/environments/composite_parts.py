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
from laurel.errors import EnvironmentFailedError

Returns = Mapping[str, EnvironmentReturn]
"""Of each part, by its name."""


MOST_AT_ONCE = 160
"""Calls of one part: 64 of the batch that is being judged, 64 of a validation beside it, and 32
that were given up. A part that is merely slow is not refused in a run, therefore."""
PATIENCE_SECONDS = 30.0
"""How long a call beyond them waits for one to come back."""


class PartCalls:
    """Calls of one part, so many at a time, in threads that keep no process from ending.

    No thread can be ended from outside. Who asks gives a call up after a time and asks again, so a
    part that never comes back would take one more thread with every call.
    """

    def __init__(self, name: str) -> None:
        """Hold no thread.

        Args:
            name: The part's, for the message.
        """
        self._name = name
        self._limit = MOST_AT_ONCE
        self._places = threading.BoundedSemaphore(self._limit)

    def begin(
        self, step: Callable[..., EnvironmentReturn], *arguments: Any
    ) -> Future[EnvironmentReturn]:
        """Call it in a thread.

        Raises:
            EnvironmentFailedError: As many calls as may be have not come back, and none did soon.
        """
        if not self._places.acquire(timeout=PATIENCE_SECONDS):
            raise EnvironmentFailedError(
                f"{self._limit} calls of the part '{self._name}' of a composite environment have "
                "not come back, and threads cannot be ended; no more are begun until one does. "
                "Give what it waits for a time limit of its own, shorter than env.timeout_seconds"
            )
        future: Future[EnvironmentReturn] = Future()

        def run() -> None:
            try:
                result = step(*arguments)
            except BaseException as error:
                self._places.release()
                future.set_exception(error)
            else:
                self._places.release()
                future.set_result(result)

        try:
            name = f"laurel-composite-{self._name}"
            threading.Thread(target=run, name=name, daemon=True).start()
        except RuntimeError:  # the system gives no thread
            self._places.release()
            raise
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
