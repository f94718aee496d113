"""Allocates resources to a run's roles: in this process, or in slots of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from laurel.config.policy import RoleName
from laurel.errors import ConfigError
from laurel.planning.plan import Plan
from laurel.planning.roles import where
from laurel.run.request import request_of
from laurel.workers.launch import (
    backend_of,
    device_of,
    open_cluster,
    plan_to_run,
    reserve_roles,
    whole_units,
)
from laurel.workers.reservations import Resources

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.config.schemas import Run
    from laurel.models.parallel.mesh import ParallelShape
    from laurel.protocols import WorkerGroup
    from laurel.workers.ray_cluster import Reservation
    from laurel.workers.ray_group import RayGroup


BESIDE_GPUS = Resources(cpus=0.1)
"""The resources of a worker that has no slot, in a run whose slots are GPUs."""
# Roles may have all CPUs, and Ray spreads over nodes only what takes a resource.
BESIDE_CPUS = Resources(cpus=0, others={"memory": 2**28})
"""The resources of a worker that has no slot, in a run whose slots are CPUs; memory in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedAllocation:
    """A plan of the slots of every role, before anything is reserved."""

    config: Run
    plan: Plan
    are_remote: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Allocation:
    """The resources that each role of a run has: by default in this process, or on Ray."""

    plan: Plan | None = None
    reservations: Mapping[RoleName, Reservation] = field(default_factory=dict)
    """The reserved Ray slots of each role; empty if everything runs in this process."""
    stack: ExitStack | None = None
    """The exit stack that ends all worker groups; None if everything runs in this process."""

    @property
    def are_remote(self) -> bool:
        """Report whether the roles run in other processes, on Ray."""
        return bool(self.reservations)

    def num_slots(self, role: RoleName) -> int:
        """Return the number of Ray slots that a remote role has."""
        return self.reservations[role].size

    def take_turns(self, role: RoleName) -> bool:
        """Report whether a role shares the policy's slots, so that the two must take turns."""
        found = self.plan.role(role) if self.plan is not None else None
        return self.are_remote and found is not None and found.shares_with == "policy"

    def shape_of(self, role: RoleName) -> ParallelShape:
        """Return how a role's model is spread over its ranks.

        A trained model is sharded over its data-parallel ranks; a scoring model is whole on each.
        """
        from laurel.models.parallel.mesh import ParallelShape

        assert self.plan is not None
        found = self.plan.role(role)
        assert found is not None, f"{role} has no place"
        mesh = found.mesh
        if role == "policy":
            return ParallelShape(dp_shard=mesh.dp, cp=mesh.cp, tp=mesh.tp)
        return ParallelShape(dp_replicate=mesh.dp, tp=mesh.tp)

    def group(
        self,
        role: RoleName,
        worker_class: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        slots_each: int = 1,
        share: float = 1.0,
        name: str | None = None,
        **kwargs: Any,
    ) -> WorkerGroup:
        """Start a group of workers in the slots of a role; the group ends with the run.

        `ranks` are the slots to use (None uses all), and `slots_each` neighbours of one node are
        for each worker. `share` is the fraction of the role's share of each slot that the workers
        get, and `name` stands for the role in messages.
        """
        from laurel.workers.ray_group import RayGroup

        title = name or role
        if ranks is not None:
            title = f"{title} {','.join(map(str, ranks))}"
        part = self.slots(role, title, ranks, share=share).joined(slots_each)
        return self._kept(RayGroup(part, worker_class, *args, **kwargs))

    def slots(
        self, role: RoleName, title: str, ranks: Sequence[int] | None = None, *, share: float = 1.0
    ) -> Reservation:
        """Return some slots of a role, or a fraction of each, under a title for messages."""
        slots = self.reservations[role]
        chosen = range(slots.size) if ranks is None else ranks
        return slots.part(title, chosen, share=whole_units(slots.share * share))

    def group_of_one(
        self, role: str, worker_class: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> WorkerGroup:
        """Start one worker without a slot, spread over the cluster's nodes with others of its role.

        The worker ends with the run.
        """
        from laurel.workers.ray_actor import SpreadGroup

        slot = next(iter(self.reservations.values())).each
        each = BESIDE_GPUS if slot.gpus else BESIDE_CPUS
        return self._kept(SpreadGroup(role, each, worker_class, *args, **kwargs))

    def _kept(self, group: RayGroup) -> WorkerGroup:
        assert self.stack is not None
        self.stack.callback(group.shutdown)
        return group

    def describe(self) -> list[str]:
        """Return one line of text per role and its slots; empty if roles are in this process."""
        if self.plan is None or not self.are_remote:
            return []
        return [
            f"{role.name}: {where(role.slots)}"
            + (f", in turns with {role.shares_with}" if role.shares_with else "")
            for role in self.plan.roles
        ]


def plan_allocation(config: Run) -> PlannedAllocation:
    """Plan the slots of every role of a run without reserving or starting anything.

    Raises:
        ConfigError: The run does not fit; the message names every problem and the nearest setting.
    """
    plan = plan_to_run(request_of(config))
    # These can be planned, but are not implemented.
    parallel, key = config.policy.dtensor_cfg, "policy.dtensor_cfg"
    if (cp := parallel.context_parallel_size) > 1 and not config.policy.sequence_packing.enabled:
        raise ConfigError(
            f"{key}.context_parallel_size={cp}: only token forests are divided; set it to 1, or "
            "policy.sequence_packing.enabled to true"
        )
    policy = plan.role("policy")
    if parallel.cpu_offload and policy is not None and policy.mesh.size == 1:
        raise ConfigError(
            f"{key}.cpu_offload=true: shares of a spread model can be kept on the host, and the "
            "policy has one rank; set it to false, or give it more slots (cluster.gpus_per_node)"
        )
    return PlannedAllocation(
        config=config, plan=plan, are_remote=backend_of(plan, config.cluster) == "ray"
    )


def open_allocation(planned: PlannedAllocation, stack: ExitStack, console: Console) -> Allocation:
    """Start or join the cluster, and reserve all slots before anything is loaded.

    Raises:
        ConfigError: Slots are missing; the message says what is free and who holds the rest.
        MissingDependencyError: Ray is not installed.
    """
    if not planned.are_remote:
        return Allocation()
    plan, settings = planned.plan, planned.config.cluster
    with console.status("reserving slots"):
        cluster = stack.enter_context(open_cluster(plan, settings))
        cluster.wait_until_settled()
        reservations = reserve_roles(
            plan, cluster, device_of(settings, cluster), patience=settings.patience_seconds
        )
    return Allocation(plan=plan, reservations=reservations, stack=stack)
