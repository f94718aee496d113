"""A reward model in other processes as a Scorer: replicas, each perhaps spread over ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from laurel.models.decoder import Path
from laurel.models.scoring import ScoringContract
from laurel.protocols import WorkerGroup
from laurel.rewards.contract_scorer import ContractScorer, OnBatch
from laurel.rewards.local import divide, in_order
from laurel.types import TokenGroup


class GroupScorer(ContractScorer):
    """Scores groups with the models that a group of `ScoringWorker`s holds.

    Conversations are rendered and packed here; each replica gets its share of the tokens. What a
    replica is given is packed as `LocalScorer` would pack it. A group of workers that fails raises
    its `WorkerError` from every call after.
    """

    def __init__(
        self,
        group: WorkerGroup,
        *,
        batch_tokens: int = 8192,
        batch_size: int | None = None,
        batch_timeout: float | None = None,
    ) -> None:
        """Take over a group of workers; `close` ends it.

        Args:
            group: Its workers are `ScoringWorker`s.
            batch_tokens: See `ContractScorer`.
            batch_size: Likewise.
            batch_timeout: Seconds of one micro-batch, of `sleep` and of `wake`, after which the
                group has failed; None: the group's own limit, as for `score_exactly`.

        Raises:
            WorkerError: They do not answer.
        """
        about: tuple[ScoringContract, Path, int, list[str]] = group.call_one(0, "about")
        contract, self._path, self._num_outputs, said = about
        super().__init__(contract, batch_tokens=batch_tokens, batch_size=batch_size)
        self._group = group
        self._batch_timeout = batch_timeout
        self._replicas: list[int] = group.call("replica")
        self.said: tuple[str, ...] = tuple(said)
        """What the first rank found when it loaded the model."""

    @property
    def path(self) -> Path:
        """See `ContractScorer`."""
        return self._path

    @property
    def num_replicas(self) -> int:
        """Models that score side by side."""
        return max(self._replicas) + 1

    def _values(
        self, tokens: Sequence[TokenGroup], on_batch: OnBatch | None, *, exactly: bool
    ) -> np.ndarray:
        shares = share_out([group.num_tokens for group in tokens], self.num_replicas)
        parts = [self._divided(tokens, share) for share in shares]
        batches = [[[tokens[i] for i in part] for part in mine] for mine in parts]
        pending = self._group.start_each(
            "score", [(batches[replica], exactly) for replica in self._replicas]
        )
        given = pending.wait(timeout=self._limit(parts, exactly=exactly))
        values = [given[self._replicas.index(replica)] for replica in range(self.num_replicas)]
        if on_batch is not None:
            for batch in (batch for mine in batches for batch in mine):
                on_batch(len(batch), sum(group.num_tokens for group in batch))
        return in_order(
            tokens,
            [part for mine in parts for part in mine],
            [scores_NK for mine in values for scores_NK in mine],
            num_outputs=self._num_outputs,
        )

    def _limit(self, parts: Sequence[Sequence[object]], *, exactly: bool) -> float | None:
        """Seconds for micro-batches, of which each replica has its own to do."""
        if exactly or self._batch_timeout is None:
            return None
        return self._batch_timeout * max(1, *map(len, parts))

    def _divided(self, tokens: Sequence[TokenGroup], share: Sequence[int]) -> list[list[int]]:
        """Micro-batches of one replica, as indices into `tokens`."""
        mine = [tokens[i] for i in share]
        parts = divide(self._path, mine, self.batch_tokens, self.batch_size)
        return [[share[i] for i in part] for part in parts]

    @property
    def is_ended(self) -> bool:
        """See `ContractScorer`."""
        return not all(self._group.alive())

    def sleep(self) -> None:
        """See `ContractScorer`."""
        self._group.call("sleep", timeout=self._batch_timeout)

    def wake(self) -> None:
        """See `ContractScorer`."""
        self._group.call("wake", timeout=self._batch_timeout)

    def close(self) -> None:
        """End the workers."""
        self._group.shutdown()


def share_out(sizes: Sequence[int], shares: int) -> list[list[int]]:
    """Divide items so that the sums are near each other: the largest first, to the least so far.

    Returns:
        Indices of the items of each share, ascending; they depend only on the arguments.
    """
    taken: list[list[int]] = [[] for _ in range(shares)]
    loads = [(0, share) for share in range(shares)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, share = heapq.heappop(loads)
        taken[share].append(index)
        heapq.heappush(loads, (load + sizes[index], share))
    return [sorted(items) for items in taken]
