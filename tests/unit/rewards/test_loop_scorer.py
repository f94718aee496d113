"""What a reward loop lets wait."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from laurel.rewards.batching import BatcherLimits, BatchingScorer
from laurel.rewards.loop_scorer import batcher_limits
from laurel.types import Message, group_of
from scripted_backend import ScriptedBackend, null_scores


@pytest.mark.slow
def test_a_run_is_never_refused_for_the_length_of_its_texts() -> None:
    scorer: Any = SimpleNamespace(batch_tokens=8192)
    most = BatcherLimits().max_waiting_characters
    groups = [
        group_of((Message("user", letter * (most // 2)),), ("a",), group_id=letter)
        for letter in "xyz"
    ]
    batcher = BatchingScorer(ScriptedBackend(), model_version="", limits=batcher_limits(scorer))

    async def ask() -> list[Any]:
        return await asyncio.gather(*(batcher.score([group]) for group in groups))

    try:
        assert asyncio.run(ask()) == [[null_scores(group)] for group in groups]
    finally:
        batcher.close()
