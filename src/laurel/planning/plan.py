"""The plan of a run: the slots of each role, the division of its batches, and the conflicts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from laurel.config.policy import RoleName
from laurel.planning.placement import placed_requirements
from laurel.planning.request import BatchRequest, ClusterRequest, OwnSlots, StepRequest
from laurel.planning.roles import (
    Conflict,
    RolePlan,
    RoleRequirement,
    Slot,
    divisors,
    grid,
    place_role,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan(BatchRequest):
    """How a role's batch is divided among its data-parallel ranks or replicas (its shares)."""

    role: RoleName
    num_shares: int
    """Number of data-parallel ranks or replicas that divide the batch."""

    @property
    def per_share(self) -> int:
        """The largest number of items of a batch that one rank or replica gets."""
        return -(-self.size // self.num_shares)

    @property
    def num_micro_batches(self) -> int:
        """The most passes that one rank or replica needs: if every item has full length.

        One that is larger than a pass takes several. What parts compute twice counts once.
        """
        if self.longest > self.tokens:
            return self.per_share * -(-self.longest // self.tokens)
        return -(-self.per_share // (self.tokens // self.longest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The slots and batches of every role that was placed, and the conflicts that were found."""

    num_nodes: int
    slots_per_node: int
    roles: tuple[RolePlan, ...]
    """The roles that could be placed; all roles of the run if the plan fits."""
    batches: tuple[BatchPlan, ...]
    """How the batches of the placed roles are divided: those of a step, then those of a
    validation."""
    conflicts: tuple[Conflict, ...]
    labels: Mapping[int, frozenset[str]]
    """Labels (`key=value`) of each node that has any."""

    @property
    def fits(self) -> bool:
        """Whether the run can start: no conflict is fatal."""
        return not any(conflict.is_fatal for conflict in self.conflicts)

    def role(self, name: RoleName) -> RolePlan | None:
        """Return a role's plan; None if the run lacks the role or it could not be placed."""
        return next((role for role in self.roles if role.name == name), None)

    def batch(self, name: RoleName) -> BatchPlan:
        """Return how a placed role divides its batch of a training step."""
        return next(b for b in self.batches if b.role == name and not b.is_validation)

    @property
    def num_idle(self) -> int:
        """The number of slots that no role uses."""
        taken = {slot for role in self.roles if role.shares_with is None for slot in role.slots}
        return self.num_nodes * self.slots_per_node - len(taken)


def plan_run(request: ClusterRequest) -> Plan:
    """Assign slots to every role of a run on the cluster that it requests.

    Everything that does not fit is recorded in the plan's conflicts; `fit` checks device memory.
    """
    conflicts: list[Conflict] = []
    if request.placement is not None:
        requirements = placed_requirements(request, request.placement, conflicts)
    else:
        requirements = list(_Rules(request, _own_slots(request), conflicts).requirements())
    roles = tuple(
        role
        for requirement in requirements
        if (role := place_role(requirement, conflicts)) is not None
    )
    batches = _plan_batches(request, roles)
    conflicts += [
        _uneven(batch, request.step)
        for batch in batches
        if batch.role == "policy" and not batch.is_validation and batch.size % batch.num_shares
    ]
    labels: dict[int, frozenset[str]] = {}
    for label, nodes in request.labels.items():
        for node in nodes:
            labels[node] = labels.get(node, frozenset()) | {label}
    return Plan(
        num_nodes=request.num_nodes,
        slots_per_node=request.slots_per_node,
        roles=roles,
        batches=batches,
        conflicts=tuple(conflicts),
        labels=labels,
    )


# How the batches of a run are divided among the ranks of its roles.


def _plan_batches(request: ClusterRequest, roles: tuple[RolePlan, ...]) -> tuple[BatchPlan, ...]:
    """Return the batches of every placed role: of a training step, then of a validation."""
    dp = {role.name: role.mesh.dp for role in roles}
    batches = []
    for role in request.roles:
        for batch in role.batches if role.name in dp else ():
            tokens = batch.tokens
            if role.name == "generation":  # a share has no more completions under way than it has
                tokens = min(tokens, -(-batch.size // dp[role.name]) * batch.longest)
            said = asdict(batch) | {"tokens": tokens}
            if batch.part_tokens is not None:
                said["tokens"] = batch.part_tokens
            batches.append(BatchPlan(role=role.name, num_shares=dp[role.name], **said))
    return tuple(sorted(batches, key=lambda batch: batch.is_validation))


def _uneven(batch: BatchPlan, step: StepRequest | None) -> Conflict:
    """Return the conflict that ranks get unequal numbers of items of an optimizer step."""
    key, size, dp = "policy.train_global_batch_size", batch.size, batch.num_shares
    fitting = [size - size % dp, size - size % dp + dp]
    if step is not None:
        fitting = [n for n in divisors(step.num_prompts * step.per_prompt) if n % dp == 0]
    if nearest := sorted(filter(None, fitting), key=lambda n: abs(n - size)):
        fix = f"{key}={nearest[0]}"
    else:
        assert step is not None
        unit = dp // math.gcd(dp, step.per_prompt)
        prompts = max(1, round(step.num_prompts / unit)) * unit
        fix = f"grpo.num_prompts_per_step={prompts} {key}={prompts * step.per_prompt}"
    return Conflict(
        problem=f"{key}={size} {batch.unit} cannot be split evenly among {dp} data-parallel ranks",
        fix=fix,
    )


# How the rules divide a cluster between the roles. They are NeMo RL's.
#
# On one node its slots are divided; with several, the reward model and generation that is not
# colocated get whole nodes. The policy has what is left.


@dataclass(frozen=True, slots=True)
class _Rules:
    request: ClusterRequest
    own: Mapping[RoleName, OwnSlots]
    """The request of each role that wants slots of its own."""
    conflicts: list[Conflict]

    def requirements(self) -> Iterator[RoleRequirement]:
        """Yield the requirement of each role; add what cannot be placed to the conflicts."""
        num_nodes, total = self.request.num_nodes, self.request.slots_per_node
        generation, scorer = self.own.get("generation"), self.own.get("reward_model")
        if num_nodes == 1:
            yield from self._divided_node(scorer)
            return
        scoring, scorer_nodes = _sizes(scorer, nodes=1)
        left = num_nodes - scorer_nodes
        if scorer:
            self._check_scorer_nodes(scorer, scorer_nodes)
        if left <= 0:
            self.conflicts.append(self._too_few_nodes())
        elif generation is None:
            yield from self._shared(grid(range(left), range(total)))
        elif left == 1:
            yield from self._divided_node(None)
        else:
            yield from self._whole_nodes(left, generation)
        slots = grid(range(left, num_nodes), range(scoring))
        yield from self._apart("reward_model", slots, left > 0 and scoring <= total)

    def _divided_node(self, scorer: OwnSlots | None) -> Iterator[RoleRequirement]:
        """Divide the slots of one node: policy = all - generation - reward model."""
        total, generation = self.request.slots_per_node, self.own.get("generation")
        (scoring, _), (drawing, _) = _sizes(scorer), _sizes(generation)
        if generation and not drawing:
            there = total - scoring
            half = self._fewer("generation", there // 2 + 1, there)
            problem = (
                f"{generation.key}.gpus_per_node is not said: policy and generation divide the "
                "slots of one node, and generation is not colocated"
            )
            fix = "policy.generation.colocated.enabled=true"
            if half:
                fix = f"{generation.key}.gpus_per_node={half}"
            self.conflicts.append(Conflict(problem=problem, fix=fix))
        for own in (scorer, generation):
            if own and own.nodes not in (None, 1):
                problem = f"{own.key}.num_nodes={own.nodes}: there is one node to divide"
                self.conflicts.append(Conflict(problem=problem, fix=f"{own.key}.num_nodes=1"))
        free = total - drawing - scoring
        if free > 0:
            yield from self._shared(grid(range(1), range(free)))
        else:
            self.conflicts.append(self._too_few_slots(scoring, drawing))
        apart = grid(range(1), range(free, total))
        yield from self._apart("generation", apart[:drawing], free > 0)
        yield from self._apart("reward_model", apart[drawing:], free > 0)

    def _whole_nodes(self, num_nodes: int, generation: OwnSlots) -> Iterator[RoleRequirement]:
        """Give training and generation whole nodes, of those that the reward model leaves."""
        total, key = self.request.slots_per_node, generation.key
        if generation.per_node not in (None, total):
            problem = (
                f"{key}.gpus_per_node={generation.per_node}: {num_nodes} nodes are there for "
                f"policy and generation, so that generation gets whole nodes of {total} slots"
            )
            self.conflicts.append(Conflict(problem=problem, fix=f"{key}.gpus_per_node={total}"))
        if generation.nodes is None:
            problem = (
                f"{key}.num_nodes is not said: how many of the {num_nodes} nodes that policy and "
                "generation have are for generation?"
            )
            fix = f"{key}.num_nodes={max(1, num_nodes // 2)}"
            self.conflicts.append(Conflict(problem=problem, fix=fix))
            return
        training = num_nodes - generation.nodes
        if training <= 0:
            self.conflicts.append(self._too_few_nodes())
            return
        yield from self._shared(grid(range(training), range(total)))
        yield from self._apart("generation", grid(range(training, num_nodes), range(total)))

    def _shared(self, slots: tuple[Slot, ...]) -> Iterator[RoleRequirement]:
        """Yield the requirements of the policy and of the roles that share its slots."""
        for role in self.request.roles:
            if role.name not in self.own:
                owner: RoleName | None = None if role.name == "policy" else "policy"
                yield RoleRequirement(role=role, slots=slots, shares_with=owner)

    def _apart(
        self, name: RoleName, slots: tuple[Slot, ...], is_placed: bool = True
    ) -> Iterator[RoleRequirement]:
        """Yield the requirement of a role with slots of its own, if it has any."""
        role = self.request.role(name)
        if role is not None and slots:
            yield RoleRequirement(role=role, slots=slots, is_placed=is_placed)

    def _check_scorer_nodes(self, scorer: OwnSlots, nodes: int) -> None:
        key, total = f"{scorer.key}.gpus_per_node", self.request.slots_per_node
        asked, _ = _sizes(scorer)
        if asked == total:
            return
        problem = f"{key}={asked} is more than a node has: {total} slots"
        if asked < total:
            problem = (
                f"{key}={asked} of {total}: with several nodes the reward model has whole nodes, "
                f"and {nodes} x {total - asked} = {nodes * (total - asked)} slots are left idle"
            )
        self.conflicts.append(
            Conflict(problem=problem, fix=f"{key}={total}", is_fatal=asked > total)
        )

    def _too_few_slots(self, scoring: int, drawing: int) -> Conflict:
        """Return the conflict that the roles of one node request more slots than it has."""
        total, least = self.request.slots_per_node, self._group("policy")
        asked, said = _sum_of(scoring, drawing, least)
        fix = f"cluster.gpus_per_node={asked}"
        if scoring and not plan_run(replace(self.request, num_nodes=2)).conflicts:
            fix = "cluster.num_nodes=2"  # one of them is the reward model's
        elif scoring and drawing < total:  # then it shares the policy's
            fix = f"{self.own['reward_model'].key}.gpus_per_node=null"
        if fewer := self._fewer("generation", drawing, total - scoring):
            fix = f"{self.own['generation'].key}.gpus_per_node={fewer}"
        if fewer := self._fewer("reward_model", scoring, total - drawing):
            fix = f"{self.own['reward_model'].key}.gpus_per_node={fewer}"
        return Conflict(
            problem=f"the roles of a node need {said} slots, and it has "
            f"cluster.gpus_per_node={total}",
            fix=fix,
        )

    def _too_few_nodes(self) -> Conflict:
        """Return the conflict that the roles request more whole nodes than there are."""
        total = self.request.num_nodes
        _, scoring = _sizes(self.own.get("reward_model"), nodes=1)
        _, drawing = _sizes(self.own.get("generation"))
        asked, said = _sum_of(scoring, drawing, 1)
        fix = f"cluster.num_nodes={asked}"
        if 0 < (fewer := total - scoring - 1) < drawing:
            fix = f"{self.own['generation'].key}.num_nodes={fewer}"
        if 0 < (fewer := total - drawing - 1) < scoring:
            fix = f"{self.own['reward_model'].key}.num_nodes={fewer}"
        return Conflict(
            problem=f"the roles need {said} nodes, and there are cluster.num_nodes={total}",
            fix=fix,
        )

    def _fewer(self, name: RoleName, asked: int, there: int) -> int:
        """Return the most slots, below the request, that give whole groups to role and policy."""
        group, least = self._group(name), self._group("policy")
        sizes = range(group, min(asked, there), group)
        return max((size for size in sizes if (there - size) % least == 0), default=0)

    def _group(self, name: RoleName) -> int:
        role = self.request.role(name)
        return role.group_size if role else 1


def _own_slots(request: ClusterRequest) -> dict[RoleName, OwnSlots]:
    """Return the slots that roles have for themselves.

    A reward model without settings shares the policy's slots, as it does in a run of one process.
    On several nodes the configuration may give only its number of nodes.
    """
    own = {role.name: role.own for role in request.roles if role.own is not None}
    scorer = own.get("reward_model")
    if scorer is not None and scorer.per_node is None:
        del own["reward_model"]
        if scorer.nodes and request.num_nodes > 1:
            own["reward_model"] = replace(scorer, per_node=request.slots_per_node)
    return own


def _sizes(own: OwnSlots | None, *, nodes: int = 0) -> tuple[int, int]:
    """Return the slots per node and the number of nodes of a role's own slots; (0, 0) without any.

    The number of nodes defaults to `nodes`.
    """
    return (own.per_node or 0, own.nodes or nodes) if own else (0, 0)


def _sum_of(scoring: int, drawing: int, least: int) -> tuple[int, str]:
    asked = {"reward model ": scoring, "generation ": drawing, "policy at least ": least}
    total = sum(asked.values())
    said = " + ".join(f"{name}{count}" for name, count in asked.items() if count)
    return total, f"{said} = {total}"
