"""Groups that stream to reward servers while things happen to the servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from laurel.rewards.remote.http import HttpScorer
from laurel.rewards.remote.router import RouterOptions
from laurel.types import Group, Score
from scripted_replicas import question, right_scores

GROUPS = [
    question(f"prompt {i}", *(f"answer {'w' * (i % 17 + j)}" for j in range(4))) for i in range(150)
]
RIGHT = right_scores(GROUPS)
SECONDS = 0.01
"""Of one request at a server, so that there is a middle of the batch."""


class Addressed(Protocol):
    """A server, for its address."""

    @property
    def url(self) -> str: ...


class Streamed:
    """Groups on their way to rewards, one call for each, as they come from a rollout."""

    def __init__(
        self,
        servers: Sequence[Addressed],
        *,
        api_key: str | None = None,
        **options: Any,
    ) -> None:
        self.api_key = api_key
        self.options = RouterOptions(**{"window": 4, "version": "1", **options})
        self.urls = [server.url for server in servers]
        self.verdicts: dict[int, list[tuple[Score, ...]]] = {}
        self.meanwhile: dict[int, Callable[[], object]] = {}
        self.counts: dict[str, int] = {}

    def after(self, number: int, do: Callable[[], object]) -> None:
        """Do something when so many groups have their scores."""
        self.meanwhile[number] = do

    def run(
        self, groups: Sequence[Group] = GROUPS, *, within: float = 120.0
    ) -> list[tuple[Score, ...]]:
        return asyncio.run(asyncio.wait_for(self._run(groups), within))

    async def _run(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        scorer = HttpScorer(self.urls, api_key=self.api_key, options=self.options)
        places = asyncio.Semaphore(40)
        try:
            async with asyncio.TaskGroup() as tasks:
                for index, group in enumerate(groups):
                    await places.acquire()
                    task = tasks.create_task(self._score(scorer, index, group))
                    task.add_done_callback(lambda _: places.release())
        finally:
            await scorer.aclose()
        self.counts = dict(scorer.counts)
        assert all(len(found) == 1 for found in self.verdicts.values()), "one verdict each"
        assert not self.meanwhile, "what was to happen in the middle did not"
        return [self.verdicts[index][0] for index in range(len(groups))]

    async def _score(self, scorer: HttpScorer, index: int, group: Group) -> None:
        self.verdicts.setdefault(index, []).extend(await scorer.score([group]))
        if len(self.verdicts) >= min(self.meanwhile, default=10**9):
            do = self.meanwhile.pop(min(self.meanwhile))
            await asyncio.to_thread(do)
