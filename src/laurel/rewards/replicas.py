"""A reward model in worker processes: its replicas, the scorer of one of them, and its ranks."""

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
from laurel.models.scoring import ScoringContract
from laurel.models.spec import ParallelShape
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
"""Restarts of all replicas together, as many as generator replicas have."""
MOST_LOSSES = 2
"""Replicas that one batch may take down before its parts are scored by themselves."""


def scoring_replicas(
    make: Callable[[int], ContractScorer],
    number: int,
    *,
    role: str = ROLE,
    say: Callable[[str], None] = _log.warning,
    max_restarts: int = MAX_RESTARTS,
) -> BackendReplicas[ContractScorer]:
    """Start replicas of a model, each in processes of its own.

    Args:
        make: Makes the scorer of the replica with this number; called again, from any thread, to
            restart a replica after it was closed.
        say: Called with a line on every restart.
        max_restarts: Restarts of all replicas together.

    Raises:
        LaurelError: A replica cannot be started.
    """
    return BackendReplicas(
        make,
        number,
        name=f"{role} replica",
        end=lambda scorer: scorer.close(),
        restarts=Restarts(max_restarts, say),
        is_lost=_is_lost,
        most_losses=MOST_LOSSES,
        version=lambda scorer: scorer.version,
    )


def _is_lost(scorer: ContractScorer, error: Exception) -> bool:
    # Lost tokenizer workers are not this scorer's own processes.
    if not isinstance(error, WorkerError) or error.role == WORKER:
        return False
    return error.is_lost or scorer.is_ended


# One replica, which may be sharded over ranks.


class GroupScorer(ContractScorer):
    """Scores groups with a worker group of `ScoringWorker`s.

    Conversations are rendered and packed here; each replica gets its share of the tokens, packed as
    `LocalScorer` would pack it. Once the worker group has failed, every call raises its
    `WorkerError`.
    """

    def __init__(
        self,
        group: WorkerGroup,
        *,
        batch_tokens: int = 8192,
        batch_timeout: float | None = None,
    ) -> None:
        """Take over a worker group; `close` ends it.

        Args:
            group: Workers of the class `ScoringWorker`.
            batch_tokens: Token budget of one forward pass.
            batch_timeout: Time limit in seconds of one micro-batch, of `sleep` and of `wake`, after
                which the group has failed; None: its own limit, as for `score_exactly`.

        Raises:
            WorkerError: The workers do not answer.
        """
        about: tuple[ScoringContract, Path, int, list[str], str] = group.call_one(0, "about")
        contract, self._path, self._num_outputs, said, version = about
        super().__init__(contract, batch_tokens=batch_tokens)
        self._version = version
        self._group = group
        self._batch_timeout = batch_timeout
        self._replicas: list[int] = group.call("replica")
        self.said: tuple[str, ...] = tuple(said)
        """Lines of the first rank on the model that it loaded."""

    @property
    def version(self) -> str:
        """Version of the model that the workers loaded."""
        return self._version

    @property
    def path(self) -> Path:
        """Form in which batches reach the model."""
        return self._path

    @property
    def num_replicas(self) -> int:
        """Number of models that score concurrently."""
        return max(self._replicas) + 1

    def _values(
        self, tokens: Sequence[TokenGroup], on_batch: OnBatch | None, *, exactly: bool
    ) -> np.ndarray:
        shares = divide_evenly([group.num_tokens for group in tokens], self.num_replicas)
        parts: list[list[list[int]]] = []
        least_shared: list[int | None] = []
        for share in shares:
            mine = [tokens[i] for i in share]
            divided, least = divide_into_micro_batches(self._path, mine, self.batch_tokens)
            parts.append([[share[i] for i in part] for part in divided])
            least_shared.append(least)
        batches = [[[tokens[i] for i in part] for part in mine] for mine in parts]
        pending = self._group.start_each(
            "score",
            [(batches[replica], exactly, least_shared[replica]) for replica in self._replicas],
        )
        limit = None
        if not exactly and self._batch_timeout is not None:
            limit = self._batch_timeout * max(1, *map(len, parts))
        given = pending.wait(timeout=limit)
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

    @property
    def is_ended(self) -> bool:
        """Whether a worker has ended."""
        return not all(self._group.alive())

    def sleep(self) -> None:
        """Free the device memory of all workers."""
        self._group.call("sleep", timeout=self._batch_timeout)

    def wake(self) -> None:
        """Undo `sleep`."""
        self._group.call("wake", timeout=self._batch_timeout)

    def close(self) -> None:
        """End the workers."""
        self._group.shutdown()


def divide_evenly(sizes: Sequence[int], shares: int) -> list[list[int]]:
    """Divide items into shares of similar sums: the largest first, to the smallest share so far.

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


# One rank of a worker group that scores. It knows neither Ray nor its group.


class Load(Protocol):
    """Loads a model, checks it, and reports what it found; with a mesh it is a collective call."""

    def __call__(self, *, say: Callable[[str], None], mesh: DeviceMesh | None) -> LocalScorer:
        """Load the scorer of this rank."""


class ScoringWorker:
    """Holds a replica of a model, or one rank's shards of it.

    Replicas are independent: each may be given any number of micro-batches.
    """

    def __init__(
        self,
        place: RankPlace,
        load: Load,
        *,
        shape: ParallelShape,
        device: Literal["auto", "cpu", "cuda"] = "auto",
    ) -> None:
        """Load and check the model.

        Args:
            load: Loads the model onto `device`; it must be picklable.
            shape: Shape of `dp_replicate` replicas with `tp` ranks each.

        Raises:
            ConfigError: Ranks and shape do not fit each other.
            UserError: The model is not a reward model, or has changed since it was saved.
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
        """Return the index of the replica that this rank computes."""
        return self._replica

    def about(self) -> tuple[ScoringContract, Path, int, list[str], str]:
        """Return the contract, the path of batches, the outputs K, the notes of loading, and the
        version of the model.
        """
        scorer = self._open()
        outputs = scorer.model.num_outputs
        return scorer.contract, scorer.path, outputs, self._said, scorer.version

    def score(
        self,
        batches: Sequence[Sequence[TokenGroup]],
        exactly: bool = False,
        least_shared: int | None = None,
    ) -> list[np.ndarray] | None:
        """Score micro-batches as `score_batches` does; every rank of a replica gets the same ones.

        Returns:
            float32 `[N, K]` of each micro-batch, from the first rank of the replica alone.
        """
        scorer = self._open()
        with in_higher_precision(scorer.model, wanted=exactly):
            values = score_batches(
                scorer.model,
                batches,
                pad_id=scorer.pad_id,
                least_shared=least_shared,
                part_tokens=scorer.batch_tokens,
            )
        return values if self._rank_in_replica == 0 else None

    def sleep(self) -> None:
        """Free the memory of the device until `wake`."""
        self._open().sleep()

    def wake(self) -> None:
        """Undo `sleep`."""
        self._open().wake()

    def shutdown(self) -> None:
        """Free the model and leave the process group."""
        self._scorer = None
        leave()

    def _open(self) -> LocalScorer:
        assert self._scorer is not None, "it has been shut down"
        return self._scorer
