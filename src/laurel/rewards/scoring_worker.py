"""One rank of a group of processes that score. It knows neither Ray nor its group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from laurel.distributed.process import choose_device
from laurel.distributed.rendezvous import Place, join, leave
from laurel.errors import ConfigError
from laurel.models.decoder import Path
from laurel.models.parallel import ParallelShape
from laurel.models.scoring import ScoringContract
from laurel.rewards.local import LocalScorer, in_higher_precision, score_batches
from laurel.types import TokenGroup


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
        place: Place,
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
