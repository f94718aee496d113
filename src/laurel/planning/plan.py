"""What a run requests of a cluster, and its plan: slots, the division of batches, and conflicts.

`run.request` makes a request from a configuration; the planner reads only the request. It carries
the configuration key of every setting that a message may name.

Where `cluster.placement` specifies slots, roles that name theirs get those. Roles that give a
number are packed into the free slots, the fullest nodes first. The remaining roles get what is
left. Among free slots the policy takes the first and the others the last, as the rules do, which
hold in all other cases.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from math import gcd
from typing import Literal

from laurel.config.policy import Precision, RoleName, RolePlacement

ONE_STATE = ("SGD", "Adagrad", "Lion")
"""Optimizers that keep one number for each weight; all others keep two, as AdamW does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """The items that a role processes together, in a training step or in a validation.

    An item is what `unit` names, such as a conversation.
    """

    unit: str
    """Kind of item: groups of completions (such as pairs), conversations or completions."""
    size: int
    """Number of items over all ranks: of an optimizer step, of a rollout, or of one validation
    batch."""
    longest: int
    """Number of tokens of the longest item."""
    tokens: int
    """Most tokens of one forward pass; for generation, of all running completions."""
    part_tokens: int | None = None
    """Most tokens of one forward pass where a larger group is computed in parts."""
    path_tokens: int = 0
    """Most tokens that a part attends to besides its own; 0: no group is larger than a pass."""
    updates: int = 1
    """Number of such batches in a training step."""
    is_validation: bool = False
    """Whether the batch belongs to a validation, and not to a training step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """The completions of a training step, which its optimizer steps divide into equal parts."""

    num_prompts: int
    per_prompt: int
    beside: int = 0
    """Completions of each prompt that are sampled and scored besides, and not trained on."""
    logprob_passes: int = 0
    """Number of forward passes over all completions, for their log-probabilities, before
    training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSlots:
    """Slots that a role requests for itself; the planner chooses each number that is None."""

    key: str
    """Key of the configuration section that requests the slots."""
    per_node: int | None = None
    nodes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRequest:
    """A role, its parallel sizes and the slots that it requests.

    The sizes divide the slots into groups of ranks that together hold the model once.
    """

    name: RoleName
    parallel_key: str
    """Key of the configuration section with the role's parallel sizes."""
    tp: int = 1
    cp: int = 1
    pp: int = 1
    own: OwnSlots | None = None
    """The slots that the role requests for itself; None if it shares the policy's."""
    batches: tuple[BatchRequest, ...] = ()
    """The role's batches: those of a training step, then those of a validation."""

    @property
    def group_size(self) -> int:
        """The number of ranks that together hold one copy of the model."""
        return self.pp * self.cp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRequest:
    """The low-rank adapters (LoRA) of a training run."""

    enabled: bool = False
    """Whether adapters are trained instead of the model's own weights."""
    dim: int = 8
    """Rank of each adapter, the inner size of its two factors."""
    layers: frozenset[str] = frozenset()
    """Names of the linear layers that get adapters; if empty, all do."""
    exclude: frozenset[str] = frozenset()
    """Names of the linear layers that get no adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """The settings that determine the memory of a training rank, besides its model and batch."""

    precision: Precision = "bfloat16"
    """Dtype of the forward and backward passes."""
    optimizer_states: int = 2
    """Number of values that the optimizer keeps for each weight (2 for AdamW)."""
    adapters: AdapterRequest = AdapterRequest()
    keeps_reference: bool = False
    """Whether a frozen copy of the weights is kept, as the reference policy. With adapters none is
    needed."""
    has_logits: bool = True
    """Whether the model has logits; False for a reward model, with one score for each sequence."""
    recomputes: bool = False
    """Whether the backward pass recomputes the activations."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks divide the tokens among them between the layers."""
    offloads: bool = False
    """Whether weights, gradients and optimizer states lie in the host's memory."""
    compiles: Literal["auto"] | bool = "auto"
    """Whether layers are compiled; `auto`: on a GPU that has the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingRequest:
    """The settings that determine the memory of a rank that generates completions."""

    has_own_weights: bool
    """Whether an engine with weights of its own generates, or the trained model itself."""
    precision: Precision
    """Dtype of the cached keys and values, and of that engine's weights."""
    longest: int
    """Number of tokens that the key-value cache must hold at least."""
    memory_share: float
    """Fraction of the device's memory that it takes for weights and cache."""
    runs_ahead: bool
    """Whether generation overlaps with training, so that it needs a copy of the weights."""
    through_host: bool = False
    """Whether the settings send new weights through the memory of the host, not from GPU to GPU."""
    conversation_bytes: int = 0
    """Most bytes of keys and values that are kept of conversations between their turns."""
    has_static_slots: bool = False
    """Whether the engine in process rounds the numbers of completions and tokens up to powers of
    two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelRequest:
    """The settings of a loaded reward model, which scores completions."""

    precision: Precision
    """Dtype of its weights."""
    compiles: Literal["auto"] | bool = "auto"
    """Whether its layers are compiled; `auto`: on a GPU that has the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModelRequest:
    """The servers of a model that a function asks, in the slots of the reward model."""

    precision: Precision
    """Dtype of its weights."""
    memory_share: float
    """Fraction of the device's memory that a server takes for weights, and keys and values."""
    replicas: int
    """Servers, which go round the groups of slots."""
    arguments: tuple[str, ...] = ()
    """Arguments of their program that the configuration gives."""
    sleeps: bool
    """Whether those in the policy's slots free that memory while it trains, and while a generator
    in the same slots samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """The roles of a run, the needs of each, and the size of the cluster."""

    num_nodes: int
    slots_per_node: int
    roles: tuple[RoleRequest, ...]
    """All roles; the policy is the first."""
    training: TrainingRequest
    drawing: DrawingRequest | None = None
    """How completions are generated; None if the run generates none."""
    reward_models: tuple[RewardModelRequest, ...] = ()
    """The settings of each loaded reward model."""
    served: ServedModelRequest | None = None
    """The model that the run serves in place of a loaded one."""
    step: StepRequest | None = None
    """Completions of a training step, to be divided evenly; None if there is no such constraint."""
    placement: Mapping[RoleName, RolePlacement] | None = None
    """The slots of roles as `cluster.placement` specifies them; None if the planner chooses all."""
    labels: Mapping[str, Sequence[int]]
    """For each node label that a placement may ask for, the numbers of the nodes that have it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device of every slot; `auto`: GPUs if there are any."""

    def role(self, name: RoleName) -> RoleRequest | None:
        """Return the role of this name; None if the run does not have it."""
        return next((role for role in self.roles if role.name == name), None)


def optimizer_states(name: str) -> int:
    """Return how many numbers an optimizer, named by its import path, keeps for each weight."""
    return 1 if name.rsplit(".", 1)[-1] in ONE_STATE else 2


# The plan.


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Slot:
    """A place for one rank: a GPU of a node, or a CPU process on a node without GPUs."""

    node: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The parallel sizes of a role's ranks, from dp (the slowest axis) to tp (the fastest)."""

    dp: int
    """Data-parallel size: ranks that divide the batch. In training they also divide weights,
    gradients and optimizer states."""
    pp: int = 1
    """Pipeline-parallel size: ranks that divide the layers among them."""
    cp: int = 1
    """Context-parallel size: ranks that divide each sequence."""
    tp: int = 1
    """Tensor-parallel size: ranks that divide each layer."""

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self.dp * self.group_size

    @property
    def group_size(self) -> int:
        """The number of ranks that together hold one copy of the model."""
        return self.pp * self.cp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Something that the run requests and that the cluster or model cannot meet, with a fix."""

    problem: str
    """A sentence on what does not fit, with the configuration keys."""
    fix: str
    """The nearest setting that fits, as `key=value` where one can be named."""
    is_fatal: bool = True
    """Whether the run cannot start; if False, it can, but slots lie idle or wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """The slots of one role, and the mesh of its ranks on them."""

    name: RoleName
    slots: tuple[Slot, ...]
    """Slots in the order of their ranks; the ranks of a group are neighbours."""
    mesh: Mesh
    shares_with: RoleName | None = None
    """The role that owns these slots, with which this one takes turns; None: they are its own."""
    fraction: float = 1.0
    """Fraction of each slot that the role uses; another role may use the rest at the same time."""

    @property
    def groups(self) -> tuple[tuple[Slot, ...], ...]:
        """The slots in groups, each of which holds one copy of the model."""
        size = self.mesh.group_size
        return tuple(self.slots[i : i + size] for i in range(0, len(self.slots), size))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRequirement:
    """The slots assigned to one role, by the rules or by `cluster.placement`.

    `place_role` arranges the role's ranks on them.
    """

    role: RoleRequest
    slots: tuple[Slot, ...]
    """Slots in the order of their ranks."""
    shares_with: RoleName | None = None
    fraction: float = 1.0
    is_placed: bool = True
    """Whether there is room; if False, `place_role` only checks whether groups divide the slots."""


def grid(nodes: Iterable[int], indices: Iterable[int]) -> tuple[Slot, ...]:
    """Return the slots with these indices on each of these nodes, node by node."""
    indices = tuple(indices)
    return tuple(Slot(node=node, index=index) for node in nodes for index in indices)


def place_role(requirement: RoleRequirement, conflicts: list[Conflict]) -> RolePlan | None:
    """Arrange a role's ranks on its slots as a mesh.

    Args:
        conflicts: The list to which conflicts are appended.

    Returns:
        The role's plan; None if its groups do not fit the slots, or if there is no room.
    """
    role, num_slots = requirement.role, len(requirement.slots)
    name, each = role.name, role.group_size
    sizes = {"pipeline": role.pp, "context": role.cp, "tensor": role.tp}
    group = " x ".join(
        f"{role.parallel_key}.{axis}_parallel_size={size}"
        for axis, size in sizes.items()
        if size > 1
    )
    if num_slots % each:
        conflicts.append(
            Conflict(
                problem=f"{group}: groups of {each} do not divide the {num_slots} slots of {name}",
                fix=_nearest_tp(role, num_slots) or f"a multiple of {each} slots for {name}",
            )
        )
        return None
    if not requirement.is_placed:
        return None
    counts = Counter(slot.node for slot in requirement.slots).values()
    if any(count % each for count in counts):
        is_fatal, least, most = name == "generation", min(counts), max(counts)
        why = "the network between nodes is slow"
        if is_fatal:
            why = "vLLM starts the processes of one replica on one node"
        conflicts.append(
            Conflict(
                problem=f"{group}: groups of {each} slots reach over nodes, of which each has "
                f"{least if least == most else f'{least} to {most}'} for {name}; {why}",
                fix=_nearest_tp(role, gcd(*counts))
                or f"a multiple of {each} slots of each node for {name}",
                is_fatal=is_fatal,
            )
        )
        if is_fatal:
            return None
    mesh = Mesh(dp=num_slots // each, pp=role.pp, cp=role.cp, tp=role.tp)
    return RolePlan(
        name=name,
        slots=requirement.slots,
        mesh=mesh,
        shares_with=requirement.shares_with,
        fraction=requirement.fraction,
    )


def _nearest_tp(role: RoleRequest, num_slots: int) -> str | None:
    """Return the setting of the nearest tensor-parallel size that fits the slots, if any does."""
    rest = role.pp * role.cp
    if num_slots % rest:
        return None
    size = min(divisors(num_slots // rest), key=lambda size: abs(size - role.tp))
    return f"{role.parallel_key}.tensor_parallel_size={size}"


def title(name: RoleName) -> str:
    """Return the name of a role with spaces instead of underscores, for messages."""
    return name.replace("_", " ")


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def where(slots: Iterable[Slot]) -> str:
    """Describe slots in words, such as `node 0, slots 4-7; nodes 1-3, slots 0-7 of each`."""
    indices: dict[int, list[int]] = {}
    for slot in sorted(slots):
        indices.setdefault(slot.node, []).append(slot.index)
    alike: dict[str, list[int]] = {}
    for node, found in indices.items():
        slots_of_node = f"slot{'s' if len(found) > 1 else ''} {as_ranges(found)}"
        alike.setdefault(slots_of_node, []).append(node)
    return "; ".join(
        f"node {nodes[0]}, {said}"
        if len(nodes) == 1
        else f"nodes {as_ranges(nodes)}, {said} of each"
        for said, nodes in alike.items()
    )


def as_ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers as ranges, such as `0-3,6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


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


PLACEMENT = "cluster.placement"
SLACK = 1e-6
"""Tolerance for rounding errors in sums of fractions of a slot."""


def placed_requirements(
    request: ClusterRequest, placement: Mapping[RoleName, RolePlacement], conflicts: list[Conflict]
) -> list[RoleRequirement]:
    """Assign slots to every role as `cluster.placement` specifies.

    Args:
        conflicts: The list to which a conflict is appended for all that cannot be placed.

    Returns:
        The slots of each role that has any.
    """
    return _Board(request, placement, conflicts).requirements()


class _Board:
    """The free part of every slot while slots are assigned."""

    def __init__(
        self,
        request: ClusterRequest,
        placement: Mapping[RoleName, RolePlacement],
        conflicts: list[Conflict],
    ) -> None:
        self.request, self.conflicts = request, conflicts
        self.num_nodes, self.total = request.num_nodes, request.slots_per_node
        self.free = [[1.0] * self.total for _ in range(self.num_nodes)]
        self.labels = self._labels()
        self.wishes: dict[RoleName, RolePlacement] = {}
        for name in placement:
            if self.request.role(name) is None:
                problem = f"{_key(name)}: this run has no {title(name)}; nothing is set aside"
                self._refuse(problem, f"{_key(name)}=null", is_fatal=False)
        for role in self.request.roles:
            name, own = role.name, role.own
            shares = None if name == "policy" else "policy"
            self.wishes[name] = placement.get(name) or RolePlacement(shares=shares)
            if own is not None and name not in placement:
                slots = "null" if own.per_node is None else own.per_node
                self._refuse(
                    f"{own.key} asks for slots, and {PLACEMENT} does not name {title(name)}, which "
                    "would share the policy's",
                    f"{_key(name)}.nodes={own.nodes or 1} {_key(name)}.slots={slots}",
                )
        self.taken: dict[RoleName, tuple[Slot, ...]] = dict.fromkeys(self.wishes, ())

    def requirements(self) -> list[RoleRequirement]:
        """Assign slots to all roles."""
        owners = [name for name, wish in self.wishes.items() if wish.shares is None]
        for name in sorted(owners, key=self._openness):
            wish = self.wishes[name]
            self.taken[name] = self._choose(name, wish)
            for slot in self.taken[name]:
                self.free[slot.node][slot.index] -= wish.fraction
        self._find_overlaps(owners)
        for name, wish in self.wishes.items():
            if wish.shares is not None and self.taken[wish.shares]:
                self.taken[name] = self._share(name, wish, self.taken[wish.shares])
        requirements = []
        for role in self.request.roles:
            wish = self.wishes[role.name]
            owner = wish.shares and (self.wishes[wish.shares].shares or wish.shares)
            fraction = self.wishes[owner or role.name].fraction
            if slots := self.taken[role.name]:
                requirements.append(
                    RoleRequirement(role=role, slots=slots, shares_with=owner, fraction=fraction)
                )
        return requirements

    def _refuse(self, problem: str, fix: str, *, is_fatal: bool = True) -> None:
        self.conflicts.append(Conflict(problem=problem, fix=fix, is_fatal=is_fatal))

    def _labels(self) -> dict[str, set[int]]:
        found = {}
        for label, nodes in self.request.labels.items():
            found[label] = {node for node in nodes if 0 <= node < self.num_nodes}
            if outside := as_ranges(sorted(set(nodes) - found[label])):
                self._refuse(
                    f"cluster.labels gives {label} to node {outside}; {self._counted_nodes()}",
                    f"take node {outside} out of the list of {label}",
                )
        return found

    def _openness(self, name: RoleName) -> tuple[int, int, int]:
        """Return a sort key: roles with more specific placements choose first."""
        wish, kinds = self.wishes[name], {list: 0, int: 1, type(None): 2}
        nodes = 0 if wish.labels else kinds[type(wish.nodes)]
        turn = ("reward_model", "generation", "policy").index(name)
        return kinds[type(wish.slots)], nodes, turn

    def _candidates(self, name: RoleName, wish: RolePlacement) -> list[int]:
        """Return the nodes that a role may use."""
        key, nodes = _key(name), list(range(self.num_nodes))
        if isinstance(wish.nodes, list):
            nodes = [node for node in wish.nodes if node < self.num_nodes]
            if outside := wish.nodes[len(nodes) :]:
                self._refuse(
                    f"{key}.nodes={_list(wish.nodes)}: there is no node {as_ranges(outside)}; "
                    f"{self._counted_nodes()}",
                    f"{key}.nodes={_list(nodes)}" if nodes else f"{key}.nodes=null",
                )
        fitting = nodes
        for label in wish.labels:
            if label in self.labels:
                fitting = [node for node in fitting if node in self.labels[label]]
            else:
                self._refuse_label(name, wish, label)
        lacking = [node for node in nodes if node not in fitting]
        if isinstance(wish.nodes, list) and lacking:
            self._refuse(
                f"{key}.labels={_list(wish.labels)}: node {as_ranges(lacking)} lacks one of them",
                f"{key}.nodes={_list(fitting)}" if fitting else f"{key}.labels=[]",
            )
        elif nodes and not fitting:
            problem = f"{key}.labels={_list(wish.labels)}: no node has all of them"
            self._refuse(problem, f"{key}.labels=[]")
        return fitting

    def _refuse_label(self, name: RoleName, wish: RolePlacement, label: str) -> None:
        """Add the conflict that no node has the label."""
        key, known = f"{_key(name)}.labels", sorted(self.labels)
        near = get_close_matches(label, known, n=1, cutoff=0.5)
        known_ones = (
            f"cluster.labels knows {', '.join(known)}" if known else "cluster.labels is empty"
        )
        fix = f"cluster.labels={{{label}: [0]}} with the nodes that have it"
        if near:
            fix = f"{key}={_list([other for other in wish.labels if other != label] + near)}"
        self._refuse(f"{key}: no node has the label {label}; {known_ones}", fix)

    def _counted_nodes(self) -> str:
        return f"cluster.num_nodes={self.num_nodes} are counted from 0 to {self.num_nodes - 1}"

    def _choose(self, name: RoleName, wish: RolePlacement) -> tuple[Slot, ...]:
        """Return the slots of a role that has its own; empty if there are not enough."""
        nodes = self._candidates(name, wish)
        if not nodes:
            return ()
        if isinstance(wish.slots, list):
            return self._named(name, wish, wish.slots, nodes)
        if wish.slots is not None or isinstance(wish.nodes, int):
            return self._packed(name, wish, nodes)
        left = [slot for n in nodes for slot in grid([n], self._usable(n, wish.fraction))]
        if not left:
            held = {other: len(slots) for other, slots in self.taken.items() if slots}
            said = ", ".join(f"{title(other)} {count}" for other, count in held.items())
            most = max(free for node in nodes for free in self.free[node])
            if most > SLACK:
                fix = f"{_key(name)}.fraction={math.floor(most * 1e4 + SLACK) / 1e4:g}"
            else:
                fix = self._in_turns(name)
            self._refuse(
                f"no slot is left for {title(name)}: of {self.num_nodes} x {self.total} slots are "
                f"taken: {said}",
                fix,
            )
        return tuple(left)

    def _named(
        self, name: RoleName, wish: RolePlacement, indices: list[int], nodes: list[int]
    ) -> tuple[Slot, ...]:
        """Return particular slots of each node."""
        there = [index for index in indices if index < self.total]
        if outside := indices[len(there) :]:
            key = f"{_key(name)}.slots"
            self._refuse(
                f"{key}={_list(indices)}: a node has no slot {as_ranges(outside)}; "
                f"cluster.gpus_per_node={self.total} are counted from 0 to {self.total - 1}",
                f"{key}={_list(there)}" if there else f"{key}=null",
            )
        if not isinstance(wish.nodes, int):
            return grid(nodes, there)
        fitting = [n for n in nodes if set(there) <= set(self._usable(n, wish.fraction))]
        if len(fitting) < wish.nodes:
            asked = f"slots [{as_ranges(indices)}]"
            return self._refuse_nodes(name, wish.nodes, len(fitting), asked, self._in_turns(name))
        return grid(self._fullest(name, wish.nodes, fitting), there)

    def _packed(self, name: RoleName, wish: RolePlacement, nodes: list[int]) -> tuple[Slot, ...]:
        """Return so many slots of each node, or whole nodes if no number of slots is given."""
        asked = wish.slots if isinstance(wish.slots, int) else self.total
        rooms = {node: len(self._usable(node, wish.fraction)) for node in nodes}
        short = [node for node in nodes if rooms[node] < asked]
        key = f"{_key(name)}.slots"
        if isinstance(wish.nodes, int):
            fitting = [node for node in nodes if rooms[node] >= asked]
            if len(fitting) < wish.nodes:
                most = max(rooms.values())
                number = min(wish.nodes, list(rooms.values()).count(most))
                fix = f"{_key(name)}.nodes={number} {key}={most}"
                fix = fix if most else self._in_turns(name)
                said = f"{asked} slots" if asked < self.total else f"all {asked} slots"
                return self._refuse_nodes(name, wish.nodes, len(fitting), said, fix)
            nodes = self._fullest(name, wish.nodes, fitting)
        elif short:
            least = min(rooms.values())
            have = f"has {least}" if len(short) == 1 else f"have {least} or more, but fewer,"
            self._refuse(
                f"{key}={asked} of each node: node {as_ranges(short)} {have} that are free",
                f"{key}={least}" if least else self._in_turns(name),
            )
            return ()
        return tuple(slot for n in nodes for slot in self._last_or_first(name, asked, n))

    def _refuse_nodes(
        self, name: RoleName, number: int, found: int, asked: str, fix: str
    ) -> tuple[Slot, ...]:
        """Add the conflict that too few nodes have room for a role.

        The fix is used where no node has room.
        """
        key, have = f"{_key(name)}.nodes", "has" if found < 2 else "have"
        self._refuse(
            f"{key}={number}: {found or 'none'} of the nodes {have} {asked} free",
            f"{key}={found}" if found else fix,
        )
        return ()

    def _fullest(self, name: RoleName, number: int, nodes: list[int]) -> list[int]:
        """Return the fullest nodes; among equals the policy gets the first, others the last."""
        way = 1 if name == "policy" else -1
        ordered = sorted(nodes, key=lambda node: (sum(self.free[node]), way * node))
        return sorted(ordered[:number])

    def _last_or_first(self, name: RoleName, number: int, node: int) -> tuple[Slot, ...]:
        """Return the fullest slots of a node, in the same order."""
        way, free = (1 if name == "policy" else -1), self.free[node]
        usable = self._usable(node, self.wishes[name].fraction)
        chosen = sorted(usable, key=lambda index: (free[index], way * index))[:number]
        return grid([node], sorted(chosen))

    def _usable(self, node: int, fraction: float) -> list[int]:
        """Return the slots of a node of which at least this fraction is free."""
        slots = enumerate(self.free[node])
        return [index for index, free in slots if free >= fraction - SLACK]

    def _in_turns(self, name: RoleName) -> str:
        """Return the settings with which a role shares the policy's slots.

        For the policy itself they are those of the other roles that have slots of their own.
        """
        others = [n for n, wish in self.wishes.items() if n != "policy" and wish.shares is None]
        settings = []
        for other in others if name == "policy" else [name]:
            settings.append(f"{_key(other)}.shares=policy")
            if self.wishes[other].fraction < 1:
                settings.append(f"{_key(other)}.fraction=1")
        slots = self.wishes[name].slots
        if isinstance(slots, int) and slots > self.total:
            settings.append(f"{_key(name)}.slots={self.total}")
        return " ".join(settings)

    def _find_overlaps(self, owners: Iterable[RoleName]) -> None:
        """Add a conflict for slots of which the roles together ask for more than one whole."""
        holders: dict[Slot, list[RoleName]] = {}
        for name in owners:
            for slot in self.taken[name]:
                if self.free[slot.node][slot.index] < -SLACK:
                    holders.setdefault(slot, []).append(name)
        groups: dict[tuple[RoleName, ...], list[Slot]] = {}
        for slot in sorted(holders):
            groups.setdefault(tuple(holders[slot]), []).append(slot)
        for names, slots in groups.items():
            load = sum(self.wishes[name].fraction for name in names)
            said = " and ".join(f"{title(n)} ({self.wishes[n].fraction:g})" for n in names)
            self._refuse(
                f"{said} together have {load:g} of each slot of {where(slots)}",
                self._apart(names, {slot.node for slot in slots}),
            )

    def _apart(self, names: Sequence[RoleName], nodes: set[int]) -> str:
        """Suggest unused slots of these nodes for one role, or an equal part of them for each."""
        spare = sorted(set.intersection(*(set(self._usable(node, 1.0)) for node in nodes)))
        for name in names:
            slots = self.wishes[name].slots
            if isinstance(slots, list) and len(spare) >= len(slots):
                return f"{_key(name)}.slots={_list(spare[: len(slots)])}"
        part = math.floor(1e4 / len(names)) / 1e4
        return " ".join(f"{_key(name)}.fraction={part:g}" for name in names)

    def _share(
        self, name: RoleName, wish: RolePlacement, owned: tuple[Slot, ...]
    ) -> tuple[Slot, ...]:
        """Return the slots that a role shares with another: all of them, or those that it picks."""
        has: dict[int, list[int]] = {}
        for slot in owned:
            has.setdefault(slot.node, []).append(slot.index)
        nodes = [node for node in self._candidates(name, wish) if node in has]
        wanted = wish.nodes if isinstance(wish.nodes, list) else []
        least = wish.nodes if isinstance(wish.nodes, int) else 1
        if len(nodes) < least or not has.keys() >= set(wanted):
            return self._refuse_pick(name, wish, "nodes", wish.nodes)
        nodes = nodes[:least] if isinstance(wish.nodes, int) else nodes
        if wish.slots is None:
            return tuple(slot for slot in owned if slot.node in nodes)
        picks = {
            node: wish.slots if isinstance(wish.slots, list) else has[node][: wish.slots]
            for node in nodes
        }
        count = len(wish.slots) if isinstance(wish.slots, list) else wish.slots
        if any(len(set(picks[node]) & set(has[node])) < count for node in nodes):
            return self._refuse_pick(name, wish, "slots", wish.slots)
        return tuple(slot for node in nodes for slot in grid([node], picks[node]))

    def _refuse_pick(
        self, name: RoleName, wish: RolePlacement, field: str, picked: int | list[int] | None
    ) -> tuple[Slot, ...]:
        """Add the conflict that a role picks nodes or slots that the role it shares with lacks."""
        assert wish.shares is not None
        key, labels_matter = f"{_key(name)}.{field}", wish.labels and field == "nodes"
        said = _list(picked) if isinstance(picked, list) else "null" if picked is None else picked
        self._refuse(
            f"{key}={said} with shares={wish.shares}: {title(wish.shares)} has not got them all",
            f"{key}=null" + (f" {_key(name)}.labels=[]" if labels_matter else ""),
        )
        return ()


def _key(name: RoleName) -> str:
    return f"{PLACEMENT}.{name}"


def _list(items: Iterable[object]) -> str:
    """Format a list as it is typed on the command line."""
    return f"[{','.join(map(str, items))}]"
