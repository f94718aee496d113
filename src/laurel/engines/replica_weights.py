"""Giving several engines the same weights at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from laurel.distributed.worker_calls import Shared
from laurel.engines.weight_buckets import buckets_of
from laurel.engines.weight_probe import Probe
from laurel.errors import EngineError, WorkerError
from laurel.protocols import Pending, WorkerGroup
from laurel.types import Weights

Lost = dict[int, WorkerError]
"""Replicas whose process is gone, and why."""


def send_weights(
    weights: Weights,
    groups: Mapping[int, WorkerGroup],
    *,
    bucket_bytes: int,
    probe: Probe | None,
    has_all: bool = False,
) -> Lost:
    """Give all of them the weights, and prove that they have them. Blocks; one thread does it all.

    While the engines take one bucket the next is made, so two are in this process at a time. A
    bucket travels once, however many engines there are.

    Args:
        weights: What they shall draw from.
        groups: Of one `EngineWorker` each, by the replica's number; nothing is under way in them.
        bucket_bytes: Size of a bucket; larger tensors are buckets by themselves.
        probe: The learner's log-probabilities; None: nothing is compared.
        has_all: Each engine has had all weights of an earlier version: those that change will do.

    Returns:
        Those that were lost on the way; the others have the weights.

    Raises:
        EngineError: An engine refuses the weights, or computes something else than the learner.
    """
    round_of = _Round(groups)
    changing = weights.changing if has_all else None
    round_of.call("begin_weights", weights.version, changing is not None)
    under_way: dict[int, Pending] = {}
    for bucket in buckets_of((changing or weights.tensors)(), max_bytes=bucket_bytes):
        round_of.wait(under_way)
        under_way = round_of.start("take_weights", Shared(bucket))
    round_of.wait(under_way)
    for index, version in round_of.call("end_weights").items():
        if version != weights.version:
            raise EngineError(
                f"{name_of(groups[index], index)} has the weights of step {version}, "
                f"not those of step {weights.version} that it was given"
            )
    if probe is not None:
        require_proof(groups, probe, version=weights.version, round_of=round_of)
    return round_of.lost


def require_proof(
    groups: Mapping[int, WorkerGroup],
    probe: Probe,
    *,
    version: int,
    round_of: _Round | None = None,
) -> Lost:
    """Compare what the engines make of the probe's tokens with what the learner makes of them.

    Raises:
        EngineError: They differ.
    """
    round_of = round_of or _Round(groups)
    for index, answer in round_of.call("answer_probe").items():
        if answer is None:
            continue
        try:
            answer.require_agreement(probe, version=version)
        except EngineError as error:
            raise EngineError(f"{name_of(groups[index], index)}: {error}") from error
    return round_of.lost


def name_of(group: WorkerGroup, index: int) -> str:
    """A replica in messages."""
    return f"{group.role} replica {index}"


class _Round:
    """Calls to several groups side by side. Whose process is gone takes no part any more."""

    def __init__(self, groups: Mapping[int, WorkerGroup]) -> None:
        self._groups = groups
        self.lost: Lost = {}

    def start(self, method: str, *args: Any) -> dict[int, Pending]:
        """Ask everybody who is left."""
        left = [index for index in self._groups if index not in self.lost]
        started = {i: self._try(i, partial(self._groups[i].start, method, *args)) for i in left}
        return {index: pending for index, pending in started.items() if pending is not None}

    def wait(self, under_way: Mapping[int, Pending]) -> dict[int, Any]:
        """The results of those who are left after it."""
        found = {index: self._try(index, pending.wait) for index, pending in under_way.items()}
        return {index: result[0] for index, result in found.items() if result is not None}

    def call(self, method: str, *args: Any) -> dict[int, Any]:
        """`start` and `wait`."""
        return self.wait(self.start(method, *args))

    def _try(self, index: int, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except WorkerError as error:
            group = self._groups[index]
            if group.alive()[0]:  # it said no, and so would the next one in its place
                reason = error.__cause__ or error
                raise EngineError(f"{name_of(group, index)}: {reason}") from error
            self.lost[index] = error
            return None


def version_of(groups: Sequence[WorkerGroup]) -> int:
    """The version of the weights that all engines have.

    Raises:
        EngineError: They have different ones.
    """
    versions = [group.call_one(0, "weight_version") for group in groups]
    if len(set(versions)) > 1:
        raise EngineError(
            f"the replicas of {groups[0].role} begin with weights of the steps {versions}: they "
            "must all begin with the same"
        )
    version: int = versions[0]
    return version
