"""The routes on which weights reach engines in other processes, behind one call.

`ObjectStore`: this process gathers the weights and puts them into Ray's object store once for all
engines. `BroadcastTransfer`: the learner's first rank broadcasts them to all engines, and this
process only coordinates. `HandleTransfer`: engines copy them from memory of the GPU that they share
with a rank of the learner. After a failure the object store delivers the remaining weights.
"""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from laurel.errors import EngineError, WorkerError
from laurel.generation.weights.broadcast import Meeting
from laurel.generation.weights.buckets import buckets_of
from laurel.generation.weights.handles import CHUNK_BYTES
from laurel.generation.weights.held import HeldDtype, as_held, common_dtype
from laurel.generation.weights.probe import Probe
from laurel.protocols import Pending, WorkerGroup
from laurel.types import Weights
from laurel.workers.calls import Shared
from laurel.workers.rendezvous import LOOPBACK


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransfer:
    """The chosen route of weights from the learner to the engines, and why it was chosen."""

    name: Literal["object_store", "broadcast", "ipc"]
    device: Literal["cpu", "cuda"] = "cpu"
    """The device on which a broadcast delivers weights."""
    reason: str = "by default"
    """Why this route was chosen, in words."""
    bucket_bytes: int | None = None
    """Bytes of weights that are sent at a time; None: the default of the route."""


Lost = dict[int, WorkerError]
"""The replicas whose process is gone, by number, each with the error that reported it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights(Weights):
    """Weights that a group of `LearnerWorker`s can broadcast to other processes."""

    sender: WorkerGroup


THROUGH_RAY = WeightTransfer(name="object_store")


BUCKET_BYTES = {"object_store": 64 << 20, "broadcast": 16 << 20, "ipc": CHUNK_BYTES}
"""Default bucket size of each route: the fastest of 16, 64 and 256 MiB
(`benchmarks/weight_transfer.py`); that of `ipc` was not measured."""


def route_of(
    transfer: WeightTransfer, *, patience: float, say: Callable[[str], None]
) -> ObjectStore:
    """Make the chosen route."""
    bucket_bytes = transfer.bucket_bytes or BUCKET_BYTES[transfer.name]
    if transfer.name == "object_store":
        return ObjectStore(bucket_bytes=bucket_bytes, patience=patience)
    if transfer.name == "ipc":
        return HandleTransfer(bucket_bytes=bucket_bytes, patience=patience, say=say)
    return BroadcastTransfer(
        bucket_bytes=bucket_bytes, patience=patience, say=say, device=transfer.device
    )


class Fanout:
    """Calls the same method on several groups concurrently.

    A group whose process is gone is recorded in `lost` and skipped by every later call.
    """

    def __init__(self, groups: Mapping[int, WorkerGroup]) -> None:
        self._groups = groups
        self.lost: Lost = {}

    @property
    def left(self) -> dict[int, WorkerGroup]:
        """The groups that are not lost, by the replica's number."""
        return {i: group for i, group in self._groups.items() if i not in self.lost}

    def name(self, index: int) -> str:
        """Return a replica's name for messages, such as `generation replica 2`."""
        return f"{self._groups[index].role} replica {index}"

    def start(self, method: str, *args: Any) -> dict[int, Pending]:
        """Call a method with the same arguments on every group that is not lost; do not wait."""
        return self.start_each(method, dict.fromkeys(self.left, args))

    def start_each(self, method: str, args: Mapping[int, tuple[Any, ...]]) -> dict[int, Pending]:
        """Call a method on each group that has an entry in `args`, without waiting.

        Args:
            args: The arguments of each group, by the replica's number.
        """
        started = {
            i: self._try(i, partial(self._groups[i].start, method, *own)) for i, own in args.items()
        }
        return {index: pending for index, pending in started.items() if pending is not None}

    def wait(
        self, under_way: Mapping[int, Pending], *, timeout: float | None = None
    ) -> dict[int, Any]:
        """Wait for calls, and return the results of the groups that answered.

        Args:
            under_way: The pending calls that `start` returned.
            timeout: Seconds for all of them together, after which a group that has not answered
                is lost; None: each group's own limit.
        """
        end = None if timeout is None else time.monotonic() + timeout
        found = {}
        for index, pending in under_way.items():
            rest = None if end is None else max(0.0, end - time.monotonic())
            found[index] = self._try(index, partial(pending.wait, timeout=rest))
        return {index: result[0] for index, result in found.items() if result is not None}

    def call(self, method: str, *args: Any, timeout: float | None = None) -> dict[int, Any]:
        """Call a method on every group that is not lost, and wait for the results.

        Args:
            timeout: Seconds for all groups together, after which those without an answer are lost.
                None: each group's own limit.

        Returns:
            The results of the groups that answered, by the replica's number.
        """
        return self.wait(self.start(method, *args), timeout=timeout)

    def _try(self, index: int, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except WorkerError as error:
            group = self._groups[index]
            if group.alive()[0]:  # it said no, and so would the next one in its place
                reason = error.__cause__ or error
                raise EngineError(f"{self.name(index)}: {reason}") from error
            self.lost[index] = error
            return None


class ObjectStore:
    """The route through Ray's object store. Its calls block.

    It makes the next bucket while the engines take one, so this process holds two at a time.
    """

    num_fallbacks = 0
    """Number of transfers on another route that failed and were completed by this one."""

    def __init__(self, *, bucket_bytes: int, patience: float) -> None:
        """Store the settings of the route.

        Args:
            bucket_bytes: Size of a bucket; a larger tensor gets a bucket of its own.
            patience: Seconds after which an engine that has not taken a bucket counts as lost.
        """
        self.bucket_bytes = bucket_bytes
        self.patience = patience

    def carry(
        self, weights: Weights, to: Fanout, *, changing_only: bool, held: HeldDtype | None = None
    ) -> None:
        """Send all buckets of a version to engines that have prepared for it (`begin_weights`).

        Args:
            to: The engines; those that are lost meanwhile are added to its `lost`.
            held: The dtype in which all engines hold their weights; None: they are sent as they
                are.

        Raises:
            EngineError: An engine refuses the weights.
            WorkerError: The learner is lost.
        """
        tensors = weights.changing if changing_only else None
        under_way: dict[int, Pending] = {}
        rounded = as_held((tensors or weights.tensors)(), held)
        for bucket in buckets_of(rounded, max_bytes=self.bucket_bytes):
            to.wait(under_way, timeout=self.patience)
            under_way = to.start("take_weights", Shared(bucket))
        to.wait(under_way, timeout=self.patience)


class DirectTransfer(ObjectStore):
    """A route from the learner's processes to the engines, without this one.

    Where it breaks, Ray's object store delivers the remaining weights.
    """

    what: str
    """The name of the route in messages."""

    def __init__(self, *, bucket_bytes: int, patience: float, say: Callable[[str], None]) -> None:
        """Store the settings of the route.

        Args:
            patience: Timeout in seconds for each bucket, and for the processes to meet.
            say: Logs one line of text; called for every transfer that breaks.
        """
        super().__init__(bucket_bytes=bucket_bytes, patience=patience)
        self._say = say
        self._is_given_up = False

    def carry(
        self, weights: Weights, to: Fanout, *, changing_only: bool, held: HeldDtype | None = None
    ) -> None:
        """Send the weights to all engines; after a failure, use Ray's object store.

        Raises:
            TypeError: The weights are not those of a learner group (`SentWeights`).
        """
        if not isinstance(weights, SentWeights):
            raise TypeError("only the weights of a LearnerGroup can go straight to engines")
        if not self._is_given_up and to.left:
            lost_before = set(to.lost)
            reason = self._send(weights.sender, to, changing_only=changing_only, held=held)
            if reason is None or not to.left:
                return
            self._tell(weights.version, reason, [i for i in to.lost if i not in lost_before], to)
            to.call("repeat_weights")
        super().carry(weights, to, changing_only=changing_only, held=held)

    def _tell(self, version: int, reason: str, lost: Iterable[int], to: Fanout) -> None:
        self.num_fallbacks += 1
        losses = [f"{to.name(index)} was lost" for index in lost]
        why = ", ".join(losses) or reason
        # Where nobody was lost the next one would break as well, and cost as much time.
        self._is_given_up = not losses
        self._say(
            f"{self.what} of the weights of step {version} broke off ({why}); the engines that "
            "are left get them through Ray's object store"
            + (", and all later ones too" if self._is_given_up else "")
        )

    @abstractmethod
    def _send(
        self, learner: WorkerGroup, to: Fanout, *, changing_only: bool, held: HeldDtype | None
    ) -> str | None:
        """Send all weights; return why a remaining engine lacks some, or None if none does."""


class HandleTransfer(DirectTransfer):
    """The route through GPU memory that a rank of the learner shares with each engine (CUDA IPC).

    Every rank writes each chunk into memory of its own GPU. An engine copies it from the GPU that
    it has in common with a rank.
    """

    what = "the transfer by CUDA IPC"

    def _send(
        self, learner: WorkerGroup, to: Fanout, *, changing_only: bool, held: HeldDtype | None
    ) -> str | None:
        reason: str | None = None
        try:
            learner.call("open_handles", changing_only, held, self.bucket_bytes)
            while reason is None and (chunks := learner.call("next_handles"))[0] is not None:
                handles = {gpu: handle for one in chunks for gpu, handle in one.handles.items()}
                chunk = chunks[0]._replace(handles=handles)
                answers = to.call("take_handles", chunk, timeout=self.patience)
                reason = next((why for why in answers.values() if why), None)
        except WorkerError as error:
            if not all(learner.alive()):
                raise
            reason = str(error).partition("\n")[0]
        finally:
            # However it ended, and first those who have the memory open.
            to.call("close_handles", timeout=self.patience)
            if all(learner.alive()):
                learner.call("close_handles")
        return reason


class BroadcastTransfer(DirectTransfer):
    """The route of broadcasts in a process group of learner and engines, kept until members change.

    Between GPUs, each member must have a GPU of its own.
    """

    what = "the broadcast"

    def __init__(
        self,
        *,
        bucket_bytes: int,
        patience: float,
        say: Callable[[str], None],
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        """Store the settings; the first transfer makes the broadcast group.

        Args:
            bucket_bytes: Size of a bucket. The learner's first rank holds two.
            patience: Timeout in seconds, for the members to join and for each bucket.
            say: Logs one line of text; called for every broadcast that fails.
            device: Device on which weights arrive; with `cuda` they go from GPU to GPU.
        """
        super().__init__(bucket_bytes=bucket_bytes, patience=patience, say=say)
        self._device = device
        self._numbers = itertools.count()
        self._met: tuple[WorkerGroup, ...] = ()
        """The learner and the engines of the current broadcast group."""
        self._meeting: Meeting | None = None

    def _send(
        self, learner: WorkerGroup, to: Fanout, *, changing_only: bool, held: HeldDtype | None
    ) -> str | None:
        reason = self._meet(learner, to)
        if reason is not None:
            return reason
        assert self._meeting is not None
        indices = list(to.left)
        invited = {i: (replace(self._meeting, rank=rank),) for rank, i in enumerate(indices, 1)}
        receiving = to.start_each("receive_weights", invited)
        sending = learner.start(
            "send_weights", self._meeting, changing_only, self.bucket_bytes, held
        )
        sent: str | None = sending.wait()[0]
        # A living rank has given up by itself before that.
        received = to.wait(receiving, timeout=1.5 * self.patience)
        reason = next((why for why in (sent, *received.values()) if why is not None), None)
        if reason is not None or len(received) < len(indices):
            self._met = ()
        return reason

    def _meet(self, learner: WorkerGroup, to: Fanout) -> str | None:
        """Invite all to one broadcast group, unless it exists; return the reason if that fails."""
        hosts = {*to.call("host", timeout=self.patience).values()}
        members = (learner, *to.left.values())
        if members == self._met:
            return None
        self._met = ()
        try:
            host = learner.call_one(0, "host")
            address = LOOPBACK if hosts <= {host} else host
            port = learner.call_one(0, "invite", address, len(members), self.patience)
        except WorkerError as error:
            if not all(learner.alive()):
                raise
            return str(error).partition("\n")[0]
        self._meeting = Meeting(
            number=next(self._numbers),
            rank=0,
            size=len(members),
            address=address,
            port=port,
            device=self._device,
            patience=self.patience,
        )
        self._met = members
        return None


# Giving several engines the same weights at once.


def send_weights(
    weights: Weights,
    groups: Mapping[int, WorkerGroup],
    *,
    route: ObjectStore,
    probe: Probe | None,
    has_all: bool = False,
    has_same: bool = False,
) -> Lost:
    """Give several engines the same weights, and check with the probe that they sample from them.

    The call blocks; one thread does all of it.

    Args:
        groups: Groups of one `EngineWorker` each, by the replica's number; no request is running in
            them.
        probe: Computes the learner's log-probabilities; None: nothing is compared.
        has_all: Whether each engine has loaded all weights of an earlier version, so that only
            those that training changes are sent.
        has_same: Whether each engine has the weights of `weights.same_as`, so that only the version
            number is sent.

    Returns:
        The replicas that were lost meanwhile; all others have the weights.

    Raises:
        EngineError: An engine refuses the weights, or computes log-probabilities that differ from
            those of the learner.
    """
    round_of = Fanout(groups)
    if has_same:
        kept = ("keep_weights", weights.version, weights.same_as)
        versions = round_of.call(*kept, timeout=route.patience)
    else:
        changing_only = has_all and weights.changing is not None
        begin = ("begin_weights", weights.version, changing_only)
        held = common_dtype(round_of.call(*begin, timeout=route.patience).values())
        route.carry(weights, round_of, changing_only=changing_only, held=held)
        versions = round_of.call("end_weights")
    for index, version in versions.items():
        if version != weights.version:
            raise EngineError(
                f"{round_of.name(index)} has the weights of step {version}, "
                f"not those of step {weights.version} that it was given"
            )
    if probe is not None and not has_same:
        require_proof(groups, probe, version=weights.version, round_of=round_of)
    return round_of.lost


def require_proof(
    groups: Mapping[int, WorkerGroup],
    probe: Probe,
    *,
    version: int,
    round_of: Fanout | None = None,
) -> Lost:
    """Compare the engines' log-probabilities of the probe's tokens with the learner's.

    Args:
        groups: Groups of one `EngineWorker` each, by the replica's number.
        round_of: Calls to the same groups, whose lost replicas are skipped; None: a new one.

    Returns:
        The replicas that were lost meanwhile or before.

    Raises:
        EngineError: They differ by more than the engine's tolerance.
    """
    round_of = round_of or Fanout(groups)
    for index, answer in round_of.call("answer_probe").items():
        if answer is None:
            continue
        try:
            answer.require_agreement(probe, version=version)
        except EngineError as error:
            raise EngineError(f"{round_of.name(index)}: {error}") from error
    return round_of.lost


def common_version(groups: Sequence[WorkerGroup]) -> int:
    """Return the version of the weights that all engines have.

    Raises:
        EngineError: Their versions differ.
    """
    versions = [group.call_one(0, "weight_version") for group in groups]
    if len(set(versions)) > 1:
        raise EngineError(
            f"the replicas of {groups[0].role} begin with weights of the steps {versions}: they "
            "must all begin with the same"
        )
    version: int = versions[0]
    return version
