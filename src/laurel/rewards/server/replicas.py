"""A served model in processes of this machine, of which any may die: one batcher asks them all.

They end with this process, however it ends, because they read from a pipe that it holds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from laurel.errors import (
    ConfigError,
    EngineError,
    LaurelError,
    Terms,
    WorkerError,
    spoken_in,
    terms_in_use,
)
from laurel.rewards.batching import BackendReplicas, BatcherStats, BatchingScorer
from laurel.rewards.preparing import Prepared, Rendered
from laurel.rewards.server.service import (
    ModelSettings,
    ServedModel,
    batcher_limits,
    open_backend,
)
from laurel.rewards.spec import Say
from laurel.sandbox.limits import available_cores
from laurel.types import Group, Score, TokenGroup
from laurel.workers.rendezvous import RankPlace
from laurel.workers.spawned import SpawnedGroup
from laurel.workers.supervisor import EndlessRestarts

MOST_RESTARTS = 8
"""Of one replica in a row that scores nothing in between; then it stays away."""
MOST_LOSSES = 2
"""Replicas that may be lost with a batch before its parts are scored by themselves."""
_BROKEN_EXIT_CODE = 70
"""What sysexits.h calls an internal error. The process is started again."""
_SLEEP_SECONDS = 60.0


def open_replicas(
    settings: ModelSettings, num_replicas: int, *, limit: float, say: Say
) -> ServedModel:
    """Start processes that hold a model each, and wait until each has proven it.

    Args:
        settings: Of each. Without `cpu_threads` they share the cores.
        num_replicas: At least 1.
        limit: Seconds of a batch after which a replica hangs, and is started again.
        say: Told what the first of them loads, and what dies. From any thread.

    Raises:
        UserError: The model cannot be used.
        EngineError: One of them died while it started.
    """
    if num_replicas < 1:
        raise ConfigError(f"num_replicas={num_replicas}: at least one is needed")
    if settings.cpu_threads is None:
        settings = replace(settings, cpu_threads=max(1, available_cores() // num_replicas))
    terms = terms_in_use()
    replicas = BackendReplicas(
        lambda index: ReplicaProcess(index, settings, terms, limit=limit),
        num_replicas,
        name="replica",
        end=lambda process: process.close(),
        restarts=EndlessRestarts(MOST_RESTARTS, say),
        most_losses=MOST_LOSSES,
        ping=lambda process: process.death(),
    )
    first = replicas.replicas[0].value
    for line in first.said:
        say(line)
    scorer = ServedReplicas(replicas, settings, first.version)
    return ServedModel(name=first.model, version=first.version, scorer=scorer)


@dataclass(slots=True, kw_only=True)
class ReplicasStats(BatcherStats):
    """What happened so far, and to whom."""

    attempts: int = 0
    """Calls of replicas."""
    faults: int = 0
    """Replicas that were lost."""
    ready: int = 0
    """Replicas that can be asked now."""


class ServedReplicas(BatchingScorer):
    """A batcher over processes; `close` ends them."""

    def __init__(
        self, replicas: BackendReplicas[ReplicaProcess], settings: ModelSettings, version: str
    ) -> None:
        """Take over processes that hold the same version of a model."""
        super().__init__(
            replicas,
            model_version=version,
            limits=batcher_limits(settings),
            num_threads=len(replicas.replicas),
        )
        self.replicas = replicas

    def stats(self) -> ReplicasStats:
        """What happened so far; a copy."""
        faults = self.replicas.restarts.number
        return ReplicasStats(
            **asdict(super().stats()),
            attempts=sum(replica.num_done for replica in self.replicas.replicas) + faults,
            faults=faults,
            ready=self.replicas.num_ready,
        )

    @property
    def is_broken(self) -> bool:
        """Whether nobody is left who could score."""
        return self.is_lost

    @property
    def is_lost(self) -> bool:
        """The same, and nobody is started again."""
        return self.replicas.failure is not None

    def close(self) -> None:
        """End the processes first: nobody waits for one that is being started. Idempotent."""
        self.replicas.close()
        super().close()


class ReplicaProcess:
    """One process, as the backend of a batcher that it is."""

    def __init__(
        self, index: int, settings: ModelSettings, terms: Sequence[Terms], *, limit: float
    ) -> None:
        """Start it and have it load the model.

        Args:
            index: Among the replicas.
            settings: Of the model.
            terms: What settings are called in messages.
            limit: Seconds of one call.

        Raises:
            UserError: The model cannot be used.
            EngineError: It died meanwhile.
        """
        self._limit = limit
        try:
            self._group = SpawnedGroup("replica", ModelWorker, settings, terms, local_rank=index)
        except WorkerError as error:
            if isinstance(error.__cause__, LaurelError):
                raise error.__cause__ from None
            why = str(error).partition("\n")[0]
            raise EngineError(f"replica {index} died while it started ({why})") from error
        self.model, self.version, self.said = self._ask("about")

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._group.pid

    def death(self) -> str | None:
        """How the process has ended; None where it lives."""
        return self._group.death()

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """See `Encoder`."""
        found: list[Prepared] = self._ask("prepare", groups)
        return found

    def prepare_rendered(self, row: Rendered) -> TokenGroup:
        """See `Encoder`."""
        found: TokenGroup = self._ask("prepare_rendered", row)
        return found

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        """See `Backend`."""
        found: list[tuple[Score, ...]] = self._ask("score_tokens", tokens)
        return found

    def sleep(self) -> None:
        """See `Backend`."""
        self._ask("sleep", timeout=_SLEEP_SECONDS)

    def wake(self) -> None:
        """See `Backend`."""
        self._ask("wake", timeout=_SLEEP_SECONDS)

    def close(self) -> None:
        """See `Backend`. What it has under way is finished, if that is soon."""
        self._group.shutdown()

    def _ask(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        try:
            return self._group.call_one(0, method, *arguments, timeout=timeout or self._limit)
        except WorkerError as error:
            if error.is_lost or error.__cause__ is None:
                raise
            raise error.__cause__ from None


# --------------------------------------------------------------------------------------------------
# What is in such a process.


class ModelWorker:
    """The worker of one process: a model, as what a batcher asks."""

    def __init__(self, place: RankPlace, settings: ModelSettings, terms: Sequence[Terms]) -> None:
        """Load the model, and make it prove itself.

        Args:
            place: Which of several GPUs it takes, by turns.
            settings: Of the model.
            terms: What settings are called in messages.
        """
        _choose_device(settings, place.local_rank)
        self._said: list[str] = []
        self._model, self._version, self._backend = spoken_in(
            terms, open_backend, settings, say=self._said.append
        )
        self._known: list[TokenGroup] = []
        """A conversation that the model could score."""

    def about(self) -> tuple[str, str, list[str]]:
        """The model's name and version, and what was said of it."""
        return self._model, self._version, self._said

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """See `Encoder`."""
        return self._backend.prepare(groups)

    def prepare_rendered(self, row: Rendered) -> TokenGroup:
        """See `Encoder`."""
        return self._backend.prepare_rendered(row)

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        """See `Backend`. A device that fails at everything comes back only with a new process."""
        try:
            scores = self._backend.score_tokens(tokens)
        except EngineError:
            os._exit(_BROKEN_EXIT_CODE)
        except Exception:
            if self._known:
                try:
                    self._backend.score_tokens(self._known)
                except Exception:
                    os._exit(_BROKEN_EXIT_CODE)
            raise
        self._known = self._known or list(tokens[:1])
        return scores

    def sleep(self) -> None:
        """See `Backend`."""
        self._backend.sleep()

    def wake(self) -> None:
        """See `Backend`."""
        self._backend.wake()

    def shutdown(self) -> None:
        """Let the model go."""
        self._backend.close()


def _choose_device(settings: ModelSettings, index: int) -> None:
    if not settings.model or settings.device == "cpu":
        return
    import torch

    if (count := torch.cuda.device_count()) > 1:
        torch.cuda.set_device(index % count)
