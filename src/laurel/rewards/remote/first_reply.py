"""Several attempts at the same request: which of them counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from laurel.rewards.remote.replica import RefusedError, Reply


async def first_good(running: Sequence[asyncio.Task[Reply]]) -> Reply:
    """The first reply, or the first refusal; where there is neither, the error of the last.

    Raises:
        RefusedError: The request is to blame.
        ReplicaFault: None of the attempts was any good.
    """
    pending = set(running)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        best = min(done, key=_rank)
        if not pending or _rank(best) < 2:
            return best.result()


def _rank(task: asyncio.Task[Reply]) -> int:
    if succeeded(task):
        return 0
    return 1 if isinstance(task.exception(), RefusedError) else 2


def succeeded(task: asyncio.Task[Reply]) -> bool:
    """Whether an attempt has ended with a reply."""
    return task.done() and not task.cancelled() and task.exception() is None
