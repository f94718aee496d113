"""Replicas of a reward model in worker groups: each works by itself, and any of them may die.

A replica that is lost is started again in its place, and others score what it had. Nothing of it
counts twice: scores of a group that is lost are not believed, and one verdict is given on each
completion (`Router`).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from laurel.errors import BusyError, ConfigError, LaurelError, WorkerError
from laurel.models.forest.decoder import Path
from laurel.models.parallel.mesh import ParallelShape
from laurel.models.scoring import ScoringContract
from laurel.protocols import WorkerGroup
from laurel.rewards.batching import BatchingScorer
from laurel.rewards.loop_scorer import batcher_limits
from laurel.rewards.preparing import WORKER, Prepared, Rendered
from laurel.rewards.remote.replica import ReplicaFault, ReplicaReply, ScorerReplica
from laurel.rewards.remote.router import Router, RouterOptions
from laurel.rewards.scorer import (
    ContractScorer,
    LocalScorer,
    OnBatch,
    divide_into_micro_batches,
    in_higher_precision,
    in_order,
    score_batches,
)
from laurel.types import Group, Score, TokenGroup
from laurel.workers.calls import again
from laurel.workers.process import choose_device
from laurel.workers.rendezvous import RankPlace, join, leave
from laurel.workers.worker_actor import Restarts

_log = logging.getLogger(__name__)
T = TypeVar("T")

ROLE = "reward_model"
MAX_RESTARTS = 3
"""Of all replicas together, as with the replicas that draw."""
OPTIONS = RouterOptions(
    timeout=24 * 3600.0,  # the environment's own limit is what ends a wait
    attempt_timeout=24 * 3600.0,  # a replica that hangs is lost by the limit of its group
    window=1024,  # its batcher wants to choose from many
)


class ScoringReplicaSet:
    """A `ScoringBackend` of replicas; one router gives each request to the least busy one."""

    def __init__(
        self,
        make: Callable[[int], ContractScorer],
        num_replicas: int,
        *,
        role: str = ROLE,
        say: Callable[[str], None] = _log.warning,
        max_restarts: int = MAX_RESTARTS,
        options: RouterOptions = OPTIONS,
    ) -> None:
        """Make the replicas, at the same time.

        Args:
            make: Makes the scorer, in processes of its own, of the replica with this number;
                called again, when the one before has been closed, to start it anew. Any thread.
            num_replicas: At least one.
            role: What they are, for messages.
            say: Told of every restart.
            max_restarts: Of all replicas together.
            options: How replicas are asked.

        Raises:
            LaurelError: One of them cannot be made.
        """
        self._make = make
        self.role = role
        self._say = say
        self._is_asleep = False
        self._is_closed = False
        self._asking: set[asyncio.Task[list[tuple[Score, ...]]]] = set()
        self._rest: asyncio.Future[None] | None = None
        """Done when replicas rest no more."""
        self._over: asyncio.Future[None] | None = None
        self._last_loss: WorkerError | None = None
        self.restarts = Restarts(max_restarts, say)
        self.replicas = [
            WorkerReplica(index, scorer, self)
            for index, scorer in enumerate(self._begun(num_replicas))
        ]
        self._router = Router(self.replicas, options)

    def _begun(self, number: int) -> list[ContractScorer]:
        made: dict[int, ContractScorer] = {}
        errors: list[BaseException] = []

        def begin(index: int) -> None:
            try:
                made[index] = self._make(index)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=begin, args=(index,)) for index in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            for scorer in made.values():
                scorer.close()
            raise errors[0]
        return [made[index] for index in range(number)]

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """See `protocols.Scorer`. What is under way when replicas go to rest is asked once more.

        Raises:
            WorkerError: No replica is left, or nobody who renders for them.
        """
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
            self._give_up_if_nobody_is_left()
        while True:
            while self._rest is not None:
                await self._first_of(self._rest)
            asking = asyncio.ensure_future(self._router.score(groups))
            self._asking.add(asking)
            try:
                await self._first_of(asking)
                if not asking.cancelled():
                    return asking.result()
            finally:
                self._asking.discard(asking)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    async def _first_of(self, awaited: asyncio.Future[Any]) -> None:
        """Wait for something, as long as there is a replica."""
        assert self._over is not None
        await asyncio.wait((awaited, self._over), return_when=asyncio.FIRST_COMPLETED)
        if not awaited.done():
            assert self._last_loss is not None
            raise again(self._last_loss)

    async def set_asleep(self, is_asleep: bool) -> None:
        """See `ScoringBackend`. No clock of a router runs meanwhile: it has nothing under way."""
        self._is_asleep = is_asleep
        if is_asleep and self._rest is None:
            self._rest = asyncio.get_running_loop().create_future()
            for asking in self._asking:
                asking.cancel()
        changes = (replica.rest(is_asleep) for replica in self.replicas)
        for failure in await asyncio.gather(*changes, return_exceptions=True):
            if failure is not None:
                raise failure
        if not is_asleep and self._rest is not None:
            self._rest.set_result(None)
            self._rest = None

    def directly(self, work: Callable[[ContractScorer], T]) -> T:
        """See `ScoringBackend`.

        Raises:
            WorkerError: No replica is left, or nobody who renders for them.
        """
        while True:
            left = [replica for replica in self.replicas if not replica.is_gone]
            if not left:
                assert self._last_loss is not None
                raise again(self._last_loss)
            chosen = next((r for r in left if r.is_up.is_set()), left[0])
            chosen.is_up.wait()
            scorer = chosen.scorer
            try:
                return work(scorer)
            except WorkerError as error:
                if error.role == WORKER or not (error.is_lost or scorer.is_ended):
                    raise
                chosen.lost(scorer, error)

    async def aclose(self) -> None:
        """See `ScoringBackend`."""
        self._is_closed = True
        await asyncio.gather(
            *(asyncio.to_thread(replica.scorer.close) for replica in self.replicas)
        )
        await self._router.aclose()

    @property
    def is_closed(self) -> bool:
        """Whether it has been told to end."""
        return self._is_closed

    # ------------------------------------------------------------------------------ restarts

    def restart(
        self, replica: WorkerReplica, failure: Exception
    ) -> tuple[ContractScorer, bool] | None:
        """A scorer in place of one that is lost, and whether it sleeps as the others do; None where
        there is to be none. Any thread."""
        reason: Exception | None = failure
        while reason is not None:
            if not self._may_restart(replica, reason):
                return None
            try:
                made, is_asleep = self._made(replica.index)
            except Exception as error:  # whatever it is, the others go on
                reason = error
            else:
                self._say(f"{replica.name} is back")
                if self._is_closed:
                    made.close()
                    return None
                return made, is_asleep
        return None

    def _made(self, index: int) -> tuple[ContractScorer, bool]:
        made = self._make(index)
        if is_asleep := self._is_asleep:
            try:
                made.sleep()
            except BaseException:
                made.close()
                raise
        return made, is_asleep

    def _may_restart(self, replica: WorkerReplica, failure: Exception) -> bool:
        if self._is_closed:
            return False
        loss = self.restarts.after(failure, replica)
        if loss.refused is None:
            return True
        self._say(str(loss))
        last = WorkerError(
            f"{loss}; no other replica is left",
            role=self.role,
            exit_code=WorkerError.LOST_EXIT_CODE,
        )
        last.__cause__ = failure
        self._last_loss = last
        return False

    def on_gone(self) -> None:
        """A replica will not come back. Any thread."""
        if self._over is not None:
            with suppress(RuntimeError):  # the loop has ended: nobody waits
                self._over.get_loop().call_soon_threadsafe(self._give_up_if_nobody_is_left)

    def _give_up_if_nobody_is_left(self) -> None:
        over = self._over
        if over is not None and not over.done() and all(r.is_gone for r in self.replicas):
            over.set_result(None)


# --------------------------------------------------------------------------------------------------
# One replica of a scoring replica set: a scorer in processes of its own, and what becomes of it.

LAST_RESTART = 120.0
"""Seconds that the end of a run waits for a replica that is just being started."""


class WorkerReplica:
    """One replica as the router sees it; see `rewards.replica.Replica`."""

    max_completions: None = None

    def __init__(self, index: int, scorer: ContractScorer, replica_set: ScoringReplicaSet) -> None:
        """Begin with a scorer that has proven itself.

        Args:
            index: Among the replicas.
            scorer: In processes of its own.
            replica_set: Starts it again.
        """
        self.index = index
        self.name = f"{replica_set.role} replica {index}"
        self.is_up = threading.Event()
        """It works, or will never work again; cleared while it is started."""
        self.is_gone = False
        self.last_failure: str | None = None
        """Why it was started again, as long as it has scored nothing since."""
        self._replica_set = replica_set
        self._lock = threading.Lock()
        self._restarting: threading.Thread | None = None
        self._take(scorer, is_asleep=False)

    def _take(self, scorer: ContractScorer, *, is_asleep: bool) -> None:
        self.scorer = scorer
        self._batcher = BatchingScorer(
            _Watched(scorer, self),
            model_version="",
            limits=batcher_limits(scorer),
            is_asleep=is_asleep,
        )
        self._merged = ScorerReplica(self._batcher, self.name)
        self.is_up.set()

    async def attempt(
        self, groups: Sequence[Group], *, request_id: str, timeout: float
    ) -> ReplicaReply:
        """See `Replica`.

        Raises:
            WorkerError: Who renders for all replicas is lost.
        """
        scorer, merged = self.scorer, self._merged
        self._check_up()
        try:
            reply = await merged.attempt(groups, request_id=request_id, timeout=timeout)
        except ReplicaFault as fault:
            self._check_same(scorer)
            lost = fault.__cause__
            # The loss of the replica itself is not told in this way, but by `_Watched`.
            if isinstance(lost, WorkerError) and lost.is_lost:
                raise lost from lost.__cause__
            raise
        self._check_same(scorer)  # what a lost one says of the last requests are no verdicts
        self.last_failure = None
        return reply

    def _check_same(self, scorer: ContractScorer) -> None:
        if self.scorer is not scorer or not self.is_up.is_set():
            raise ReplicaFault("connection", f"{self.name} was lost", in_mid_request=True)
        self._check_up()

    def _check_up(self) -> None:
        if self.is_gone or not self.is_up.is_set():
            raise ReplicaFault("connection", f"{self.name} is not there")

    async def probe(self, *, timeout: float) -> None:
        """See `Replica`. While it is started again, this waits."""
        if not await asyncio.to_thread(self.is_up.wait, timeout) or self.is_gone:
            raise ReplicaFault("connection", f"{self.name} is not there")

    async def aclose(self) -> None:
        """See `Replica`. Waits for a restart that is under way: where that uses Ray, and asks for
        something when its cluster has gone, Ray ends this process."""
        await asyncio.to_thread(self.scorer.close)
        await asyncio.to_thread(self._batcher.close)
        with self._lock:
            restarting = self._restarting
        if restarting is not None:
            await asyncio.to_thread(restarting.join, LAST_RESTART)
            if restarting.is_alive():
                _log.warning("%s is still being started; it is left behind", self.name)

    async def rest(self, is_asleep: bool) -> None:
        """Sleep, or wake; one that is lost is started again in that state."""
        while True:
            while not await asyncio.to_thread(self.is_up.wait, 1.0):
                pass
            scorer, batcher = self.scorer, self._batcher
            if self.is_gone:
                return
            try:
                return await (batcher.sleep() if is_asleep else batcher.wake())
            except BusyError:
                continue  # it was lost meanwhile
            except WorkerError as error:
                self.lost(scorer, error)

    def lost(self, scorer: ContractScorer, failure: WorkerError) -> None:
        """Begin to start it again, unless that has been begun. Any thread."""
        with self._lock:
            if self.scorer is not scorer or not self.is_up.is_set() or self.is_gone:
                return
            self.is_up.clear()
            self._restarting = threading.Thread(
                target=self._restart, args=(scorer, failure), name="laurel-restart", daemon=True
            )
            self._restarting.start()

    def _restart(self, scorer: ContractScorer, failure: WorkerError) -> None:
        with suppress(LaurelError):  # it is lost: however it ends
            scorer.close()
        self._batcher.close()
        made = self._replica_set.restart(self, failure)
        with self._lock:
            if made is None:
                self.is_gone = True
                self.is_up.set()
            else:
                self._take(made[0], is_asleep=made[1])
        if made is None:
            self._replica_set.on_gone()
        elif self._replica_set.is_closed:  # meanwhile, and without this one
            self._batcher.close()


class _Watched:
    """A scorer whose replica is told when its processes are lost; a batcher's backend."""

    def __init__(self, scorer: ContractScorer, replica: WorkerReplica) -> None:
        self._scorer = scorer
        self._replica = replica

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        return self._scorer.prepare(groups)

    def prepare_rendered(self, row: Rendered) -> TokenGroup:
        return self._scorer.prepare_rendered(row)

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        try:
            return self._scorer.score_tokens(tokens)
        except WorkerError as error:
            if not (error.is_lost or self._scorer.is_ended):
                raise
            self._replica.lost(self._scorer, error)
            # Nobody will believe these; an error would have the batcher look for who is to blame.
            lost = Score(value=None, failure=f"connection: {self._replica.name} was lost")
            return [(lost,) * len(group.branches_ids_G) for group in tokens]

    def sleep(self) -> None:
        self._scorer.sleep()

    def wake(self) -> None:
        self._scorer.wake()

    def close(self) -> None:
        self._scorer.close()


# --------------------------------------------------------------------------------------------------
# A reward model in other processes as a Scorer: replicas, each perhaps spread over ranks.


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
