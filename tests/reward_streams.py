"""Groups that stream to reward servers while things happen to the servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
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
    """Groups on their way to rewards, one call for each, as they come from a rollout.

    They come again from the first for as long as something is still to happen to the servers, and
    for a while after it: how quick a machine is does not decide whether anybody notices.
    """

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
        self.num_happening = 0
        self.num_asked = 0
        self.num_wanted = 0
        self.counts: Mapping[str, int] = {}
        """Those of the router, which go on while it runs."""

    def after(self, number: int, do: Callable[[], object]) -> None:
        """Do something when so many groups have their scores, one after the other."""
        self.meanwhile[number] = do

    def run(
        self, groups: Sequence[Group] = GROUPS, *, until: str = "", within: float = 240.0
    ) -> list[tuple[Score, ...]]:
        """The scores of the groups, once a count is there whose name begins as it is given."""
        return asyncio.run(asyncio.wait_for(self._run(groups, until), within))

    async def _run(self, groups: Sequence[Group], until: str) -> list[tuple[Score, ...]]:
        scorer = HttpScorer(self.urls, api_key=self.api_key, options=self.options)
        places, turn = asyncio.Semaphore(40), asyncio.Lock()
        self.counts, self.num_wanted = scorer.counts, len(groups)
        try:
            async with asyncio.TaskGroup() as tasks:
                while (
                    self.num_asked < self.num_wanted
                    or self.meanwhile
                    or self.num_happening
                    or not any(name.startswith(until) for name in self.counts)
                ):
                    await places.acquire()
                    group = groups[self.num_asked % len(groups)]
                    task = tasks.create_task(self._score(scorer, self.num_asked, group, turn))
                    task.add_done_callback(lambda _: places.release())
                    self.num_asked += 1
        finally:
            await scorer.aclose()
        assert all(len(found) == 1 for found in self.verdicts.values()), "one verdict each"
        found = [self.verdicts[index][0] for index in range(self.num_asked)]
        assert all(one == found[index % len(groups)] for index, one in enumerate(found))
        return found[: len(groups)]

    async def _score(
        self, scorer: HttpScorer, index: int, group: Group, turn: asyncio.Lock
    ) -> None:
        self.verdicts.setdefault(index, []).extend(await scorer.score([group]))
        if len(self.verdicts) >= min(self.meanwhile, default=10**9):
            do = self.meanwhile.pop(min(self.meanwhile))
            self.num_happening += 1
            async with turn:
                await asyncio.to_thread(do)
            self.num_happening -= 1
            self.num_wanted = max(self.num_wanted, self.num_asked + 40)
