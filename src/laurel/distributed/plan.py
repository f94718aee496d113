"""The plan of a run, from its configuration alone: who gets which slots, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from laurel.config.grpo_training import GRPORun
from laurel.distributed.batch_plan import BatchPlan, plan_batches
from laurel.distributed.claims import Run, claim_of
from laurel.distributed.division import claims_of_grpo
from laurel.distributed.placement import claims_of_placement
from laurel.distributed.roles import Misfit, RoleName, RolePlan, grid, place


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Roles that have their slots, and what does not fit."""

    num_nodes: int
    slots_per_node: int
    roles: tuple[RolePlan, ...]
    """Only those that could be placed: all of them where the plan fits."""
    batches: tuple[BatchPlan, ...]
    """The arithmetic of their batches: those of a step, then those of a validation."""
    misfits: tuple[Misfit, ...]
    labels: Mapping[int, frozenset[str]]
    """Labels that nodes have, `key=value`, where they were said to have any."""

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        return not any(misfit.is_fatal for misfit in self.misfits)

    def role(self, name: RoleName) -> RolePlan | None:
        """One of the roles; None where the run has none, or it could not be placed."""
        return next((role for role in self.roles if role.name == name), None)

    def batch(self, name: RoleName) -> BatchPlan:
        """The batches of a step, of a role that was placed."""
        return next(b for b in self.batches if b.role == name and not b.is_validation)

    @property
    def num_idle(self) -> int:
        """Slots that no role has."""
        taken = {slot for role in self.roles if role.shares_with is None for slot in role.slots}
        return self.num_nodes * self.slots_per_node - len(taken)


def plan_run(config: Run) -> Plan:
    """Place every role of a run on the cluster that its configuration describes.

    All that does not fit is told at once. What it takes of memory is told by `memory`.
    """
    misfits: list[Misfit] = []
    num_nodes, slots_per_node = config.cluster.num_nodes, config.cluster.gpus_per_node
    if config.cluster.placement is not None:
        claims = claims_of_placement(config, misfits)
    elif isinstance(config, GRPORun):
        claims = claims_of_grpo(config, misfits)
    else:
        claims = [claim_of(config, "policy", grid(range(num_nodes), range(slots_per_node)))]
    roles = tuple(role for claim in claims if (role := place(claim, misfits)) is not None)
    return Plan(
        num_nodes=num_nodes,
        slots_per_node=slots_per_node,
        roles=roles,
        batches=plan_batches(config, roles, misfits),
        misfits=tuple(misfits),
        labels=_labels(config.cluster.labels),
    )


def _labels(nodes_of: Mapping[str, Sequence[int]]) -> dict[int, frozenset[str]]:
    found: dict[int, frozenset[str]] = {}
    for label, nodes in nodes_of.items():
        for node in nodes:
            found[node] = found.get(node, frozenset()) | {label}
    return found
