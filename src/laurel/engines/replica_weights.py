"""Giving several engines the same weights at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from laurel.engines.weight_probe import Probe
from laurel.engines.weight_routes import Lost, Round, WeightRoute, name_of
from laurel.errors import EngineError
from laurel.protocols import WorkerGroup
from laurel.types import Weights


def send_weights(
    weights: Weights,
    groups: Mapping[int, WorkerGroup],
    *,
    route: WeightRoute,
    probe: Probe | None,
    has_all: bool = False,
    has_same: bool = False,
) -> Lost:
    """Give all of them the weights, and prove that they have them. Blocks; one thread does it all.

    Args:
        weights: What they shall draw from.
        groups: Of one `EngineWorker` each, by the replica's number; nothing is under way in them.
        route: How they get there.
        probe: The learner's log-probabilities; None: nothing is compared.
        has_all: Each engine has had all weights of an earlier version: those that change will do.
        has_same: Each engine has those of `weights.same_as`: the number will do.

    Returns:
        Those that were lost on the way; the others have the weights.

    Raises:
        EngineError: An engine refuses the weights, or computes something else than the learner.
    """
    round_of = Round(groups)
    if has_same:
        kept = ("keep_weights", weights.version, weights.same_as)
        versions = round_of.call(*kept, timeout=route.patience)
    else:
        changing_only = has_all and weights.changing is not None
        round_of.call("begin_weights", weights.version, changing_only, timeout=route.patience)
        route.carry(weights, round_of, changing_only=changing_only)
        versions = round_of.call("end_weights")
    for index, version in versions.items():
        if version != weights.version:
            raise EngineError(
                f"{name_of(groups[index], index)} has the weights of step {version}, "
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
    round_of: Round | None = None,
) -> Lost:
    """Compare what the engines make of the probe's tokens with what the learner makes of them.

    Raises:
        EngineError: They differ.
    """
    round_of = round_of or Round(groups)
    for index, answer in round_of.call("answer_probe").items():
        if answer is None:
            continue
        try:
            answer.require_agreement(probe, version=version)
        except EngineError as error:
            raise EngineError(f"{name_of(groups[index], index)}: {error}") from error
    return round_of.lost


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
