"""A served model in several processes of this machine, any of which may die, behind one batcher.

They end with this process, however it ends, because they read from a pipe that it holds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from laurel.errors import ConfigError, EngineError, LaurelError, WorkerError
from laurel.extensions.server.service import ServedModel, ServingSpec
from laurel.rewards.batching import BackendReplicas, BatcherStats, BatchingScorer, KnownInput
from laurel.rewards.preparing import Prepared, Rendered
from laurel.rewards.spec import Say
from laurel.types import Group, Score, TokenGroup
from laurel.workers.process import threads_of_each
from laurel.workers.rendezvous import RankPlace
from laurel.workers.spawned import SpawnedGroup
from laurel.workers.supervisor import EndlessRestarts

MOST_RESTARTS = 8
"""Restarts of one replica in a row without a score in between, after which it stays dead."""
MOST_LOSSES = 2
"""Replicas that one batch may take down before its parts are scored by themselves."""
# The code of an internal error in sysexits.h. The process is restarted.
_BROKEN_EXIT_CODE = 70
_SLEEP_SECONDS = 60.0


def open_replicas(spec: ServingSpec, num_replicas: int, *, limit: float, say: Say) -> ServedModel:
    """Start replica processes, and wait until each has loaded and checked its model.

    Args:
        limit: Seconds of a batch after which a replica counts as hung, and is restarted.
        say: Called from any thread, with lines on the first model that is loaded, and on deaths.

    Raises:
        UserError: The model cannot be used.
        EngineError: A replica died while it started.
    """
    if num_replicas < 1:
        raise ConfigError(f"num_replicas={num_replicas}: at least one is needed")
    if spec.cpu_threads is None:
        spec = replace(spec, cpu_threads=threads_of_each(num_replicas))
    replicas = BackendReplicas(
        lambda index: ReplicaProcess(index, spec, limit=limit),
        num_replicas,
        name="replica",
        end=lambda process: process.close(),
        restarts=EndlessRestarts(MOST_RESTARTS, say),
        most_losses=MOST_LOSSES,
        ping=lambda process: process.death(),
        version=lambda process: process.version,
    )
    first = replicas.replicas[0].value
    for line in first.lines:
        say(line)
    scorer = ServedReplicas(replicas, spec, first.version)
    return ServedModel(name=first.model, version=first.version, scorer=scorer)


@dataclass(slots=True, kw_only=True)
class ReplicasStats(BatcherStats):
    """Counts what the batcher and its replicas have done so far."""

    attempts: int = 0
    """Calls of replicas."""
    faults: int = 0
    """Replicas that were lost."""
    ready: int = 0
    """Replicas that are ready now."""


class ServedReplicas(BatchingScorer):
    """Batches requests for replica processes; `close` ends them."""

    def __init__(
        self, replicas: BackendReplicas[ReplicaProcess], spec: ServingSpec, version: str
    ) -> None:
        super().__init__(
            replicas,
            model_version=version,
            limits=spec.batcher_limits,
            num_threads=len(replicas.replicas),
        )
        self.replicas = replicas

    def stats(self) -> ReplicasStats:
        """Return a copy of the statistics so far."""
        faults = self.replicas.restarts.number
        return ReplicasStats(
            **asdict(super().stats()),
            attempts=sum(replica.num_done for replica in self.replicas.replicas) + faults,
            faults=faults,
            ready=self.replicas.num_ready,
        )

    @property
    def is_broken(self) -> bool:
        """Whether all replicas are lost."""
        return self.is_lost

    @property
    def is_lost(self) -> bool:
        """Whether all replicas are lost, and none is restarted."""
        return self.replicas.failure is not None

    def close(self) -> None:
        """End the processes first, so that no thread waits for one that is starting. Idempotent."""
        self.replicas.close()
        super().close()


class ReplicaProcess:
    """Runs a model in a process of its own, as the backend of a batcher."""

    def __init__(self, index: int, spec: ServingSpec, *, limit: float) -> None:
        """Start the process, and load the model there.

        Args:
            limit: Time limit of one call, in seconds.

        Raises:
            UserError: The model cannot be used.
            EngineError: The process died meanwhile.
        """
        self._limit = limit
        try:
            self._group = SpawnedGroup("replica", ModelWorker, spec, local_rank=index)
        except WorkerError as error:
            if isinstance(error.__cause__, LaurelError):
                raise error.__cause__ from None
            why = str(error).partition("\n")[0]
            raise EngineError(f"replica {index} died while it started ({why})") from error
        self.model, self.version, self.lines = self._ask("about")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._group.pid

    def death(self) -> str | None:
        """Return how the process has ended; None while it is alive."""
        return self._group.death()

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """Tokenise groups in the process."""
        prepared: list[Prepared] = self._ask("prepare", groups)
        return prepared

    def prepare_rendered(self, row: Rendered) -> TokenGroup:
        """Tokenise one rendered conversation in the process."""
        tokens: TokenGroup = self._ask("prepare_rendered", row)
        return tokens

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        """Score tokenised groups in the process."""
        scores: list[tuple[Score, ...]] = self._ask("score_tokens", tokens)
        return scores

    def sleep(self) -> None:
        """Free the memory of the device."""
        self._ask("sleep", timeout=_SLEEP_SECONDS)

    def wake(self) -> None:
        """Undo `sleep`."""
        self._ask("wake", timeout=_SLEEP_SECONDS)

    def close(self) -> None:
        """End the process; a running call is finished, if that is soon."""
        self._group.shutdown()

    def _ask(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        try:
            return self._group.call_one(0, method, *arguments, timeout=timeout or self._limit)
        except WorkerError as error:
            if error.is_lost or error.__cause__ is None:
                raise
            raise error.__cause__ from None


class ModelWorker:
    """Holds the model of one replica process."""

    def __init__(self, place: RankPlace, spec: ServingSpec) -> None:
        """Load and check the model."""
        if spec.scorer is not None and spec.scorer.device != "cpu":
            import torch

            if (count := torch.cuda.device_count()) > 1:
                torch.cuda.set_device(place.local_rank % count)
        self._lines: list[str] = []
        self._model, self._version, self._backend = spec.opens(spec, say=self._lines.append)
        self._known = KnownInput()

    def about(self) -> tuple[str, str, list[str]]:
        """Return the model's name and version, and the lines logged while it was loaded."""
        return self._model, self._version, self._lines

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """Tokenise groups."""
        return self._backend.prepare(groups)

    def prepare_rendered(self, row: Rendered) -> TokenGroup:
        """Tokenise one rendered conversation."""
        return self._backend.prepare_rendered(row)

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        """Score tokenised groups; end the process, to be restarted, if all fails."""
        try:
            scores = self._backend.score_tokens(tokens)
        except EngineError:
            os._exit(_BROKEN_EXIT_CODE)
        except Exception:
            if self._known.is_scored_by(self._backend) is False:
                os._exit(_BROKEN_EXIT_CODE)
            raise
        self._known.note(tokens, scores)
        return scores

    def sleep(self) -> None:
        """Free the memory of the device."""
        self._backend.sleep()

    def wake(self) -> None:
        """Undo `sleep`."""
        self._backend.wake()

    def shutdown(self) -> None:
        """Free the model."""
        self._backend.close()
