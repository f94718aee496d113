"""A reward model in processes: replicas, the scorer that speaks to one of them, and its ranks."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from laurel.errors import ConfigError, WorkerError
from laurel.models.forest.decoder import Path
from laurel.models.parallel.mesh import ParallelShape
from laurel.models.scoring import ScoringContract
from laurel.protocols import WorkerGroup
from laurel.rewards.batching import BackendReplicas
from laurel.rewards.preparing import WORKER
from laurel.rewards.scorer import (
    ContractScorer,
    LocalScorer,
    OnBatch,
    divide_into_micro_batches,
    in_higher_precision,
    in_order,
    score_batches,
)
from laurel.types import TokenGroup
from laurel.workers.process import choose_device
from laurel.workers.rendezvous import RankPlace, join, leave
from laurel.workers.supervisor import Restarts

_log = logging.getLogger(__name__)

ROLE = "reward_model"
MAX_RESTARTS = 3
"""Of all replicas together, as with the replicas that draw."""
MOST_LOSSES = 2
"""Replicas that may be lost with a batch before its parts are scored by themselves."""


def scoring_replicas(
    make: Callable[[int], ContractScorer],
    number: int,
    *,
    role: str = ROLE,
    say: Callable[[str], None] = _log.warning,
    max_restarts: int = MAX_RESTARTS,
) -> BackendReplicas[ContractScorer]:
    """Replicas of a model that work by themselves, each in processes of its own.

    Args:
        make: Makes the scorer of the replica with this number; called again, when the one before
            has been closed, to start it anew. Any thread.
        number: At least one.
        role: What they are, for messages.
        say: Told of every restart.
        max_restarts: Of all replicas together.

    Raises:
        LaurelError: One of them cannot be made.
    """
    return BackendReplicas(
        make,
        number,
        name=f"{role} replica",
        end=lambda scorer: scorer.close(),
        restarts=Restarts(max_restarts, say),
        is_lost=_is_lost,
        most_losses=MOST_LOSSES,
    )


def _is_lost(scorer: ContractScorer, error: Exception) -> bool:
    """Whether processes of the scorer itself are gone, and not those that render for it."""
    if not isinstance(error, WorkerError) or error.role == WORKER:
        return False
    return error.is_lost or scorer.is_ended


# --------------------------------------------------------------------------------------------------
# One of them, which may be spread over ranks.


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
        shares = divide_evenly([group.num_tokens for group in tokens], self.num_replicas)
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
        parts = divide_into_micro_batches(self._path, mine, self.batch_tokens, self.batch_size)
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


def divide_evenly(sizes: Sequence[int], shares: int) -> list[list[int]]:
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


# --------------------------------------------------------------------------------------------------
# One rank of a group of processes that score. It knows neither Ray nor its group.


class Load(Protocol):
    """Loads a model, checks it, and says what it found; with a mesh it is a collective call."""

    def __call__(self, *, say: Callable[[str], None], mesh: DeviceMesh | None) -> LocalScorer:
        """The scorer of this rank."""


class ScoringWorker:
    """Holds a replica of a model, or its share of one that several ranks compute together.

    The replicas know nothing of each other: each may be given any number of micro-batches.
    """

    def __init__(
        self,
        place: RankPlace,
        load: Load,
        *,
        shape: ParallelShape,
        device: Literal["auto", "cpu", "cuda"] = "auto",
    ) -> None:
        """Load the model; it has proven itself when this returns.

        Args:
            place: Where this rank stands.
            load: Loads the model onto `device`. It can travel between processes.
            shape: `dp_replicate` replicas of `tp` ranks each.
            device: What is computed on.

        Raises:
            ConfigError: Ranks and shape do not fit each other.
            UserError: Not a reward model, or not the one it was.
        """
        if shape.dp_shard != 1 or shape.num_ranks != place.world_size:
            raise ConfigError(
                f"{place.role}: {shape} does not make replicas of whole models out of "
                f"{place.world_size} ranks"
            )
        found = choose_device(device)
        if found.type == "cuda":
            torch.cuda.set_device(place.local_rank)
        mesh = None
        if shape.tp > 1:
            join(place, found)
            mesh = shape.mesh(found.type)
        self._replica, self._rank_in_replica = divmod(place.rank, shape.tp)
        self._said: list[str] = []
        self._scorer: LocalScorer | None = load(say=self._said.append, mesh=mesh)

    def replica(self) -> int:
        """Which replica this rank computes."""
        return self._replica

    def about(self) -> tuple[ScoringContract, Path, int, list[str]]:
        """The contract, how batches reach the model, its outputs K, and what was said of it."""
        scorer = self._open()
        return scorer.contract, scorer.path, scorer.model.num_outputs, self._said

    def score(
        self, batches: Sequence[Sequence[TokenGroup]], exactly: bool = False
    ) -> list[np.ndarray] | None:
        """Score micro-batches. Every rank of a replica is given the same ones.

        Returns:
            float32 `[N, K]` of each, from the first rank of the replica alone.
        """
        scorer = self._open()
        with in_higher_precision(scorer.model, wanted=exactly):
            values = score_batches(scorer.model, batches, pad_id=scorer.pad_id)
        return values if self._rank_in_replica == 0 else None

    def sleep(self) -> None:
        """Give the memory of the device back until `wake`."""
        self._open().sleep()

    def wake(self) -> None:
        """Take it again."""
        self._open().wake()

    def shutdown(self) -> None:
        """Let go of the model and of the other ranks."""
        self._scorer = None
        leave()

    def _open(self) -> LocalScorer:
        assert self._scorer is not None, "it has been shut down"
        return self._scorer
