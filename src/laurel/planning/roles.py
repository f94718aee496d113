"""What a role is given: slots, the mesh of its ranks, or the reason why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal, TypeVar

from laurel.config.grpo import GRPORun
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.sft import SFTRun
from laurel.config.tree import Section

RoleName = Literal["policy", "generation", "reward_model"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Slot:
    """A GPU, or a CPU process where there are none."""

    node: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """How the ranks of a role are arranged; the last axis varies fastest."""

    dp: int
    """Ranks that share the batch. In training they also share weights, gradients, optimizer."""
    pp: int = 1
    """Ranks that share the layers."""
    cp: int = 1
    """Ranks that share each sequence."""
    tp: int = 1
    """Ranks that share each layer."""

    @property
    def size(self) -> int:
        """Ranks."""
        return self.dp * self.group_size

    @property
    def group_size(self) -> int:
        """Ranks that hold the model once between them: a replica of a frozen model."""
        return self.pp * self.cp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """Something in a configuration that the cluster, or the model, has no place for."""

    problem: str
    """What does not fit, with the keys."""
    mends: tuple[str, ...]
    """Changes each of which would mend it, `key=value` where one can be named."""
    is_fatal: bool = True
    """False: it can run, but slots lie idle or wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """What one role gets."""

    name: RoleName
    slots: tuple[Slot, ...]
    """In the order of their ranks: the ranks of a group are neighbours."""
    mesh: Mesh
    shares_with: RoleName | None = None
    """The role that these slots belong to, and that it takes turns with."""
    fraction: float = 1.0
    """Part of each slot; another role may have the rest, at the same time."""

    @property
    def groups(self) -> tuple[tuple[Slot, ...], ...]:
        """The slots that hold the model once, group by group."""
        size = self.mesh.group_size
        return tuple(self.slots[i : i + size] for i in range(0, len(self.slots), size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Slots for one role, as the rules or an explicit placement have it."""

    name: RoleName
    slots: tuple[Slot, ...]
    """In the order of their ranks."""
    pp: int = 1
    cp: int = 1
    tp: int = 1
    keys: str
    """What divides it, as the configuration calls it."""
    shares_with: RoleName | None = None
    fraction: float = 1.0
    is_placed: bool = True
    """False: there is no room; it is only checked whether its ranks could be arranged."""

    @property
    def group_size(self) -> int:
        """Slots that hold the model once between them."""
        return self.pp * self.cp * self.tp


def grid(nodes: Iterable[int], indices: Iterable[int]) -> tuple[Slot, ...]:
    """The same slots of several nodes, node by node."""
    indices = tuple(indices)
    return tuple(Slot(node=node, index=index) for node in nodes for index in indices)


def place(claim: Claim, misfits: list[Misfit]) -> RolePlan | None:
    """The claim's slots as a mesh; None where they cannot be arranged, or there is no room."""
    sizes = {"pipeline": claim.pp, "context": claim.cp, "tensor": claim.tp}
    group = " x ".join(
        f"{claim.keys}.{axis}_parallel_size={size}" for axis, size in sizes.items() if size > 1
    )
    each, rest, num_slots = claim.group_size, claim.pp * claim.cp, len(claim.slots)
    if num_slots % each:
        fitting = [] if num_slots % rest else divisors(num_slots // rest)
        mends = [f"{claim.keys}.tensor_parallel_size={size}" for size in fitting]
        misfits.append(
            Misfit(
                problem=f"{group}: groups of {each} do not divide the {num_slots} slots of "
                f"{claim.name}",
                mends=(*mends, f"a multiple of {each} slots for {claim.name}"),
            )
        )
        return None
    if not claim.is_placed:
        return None
    counts = Counter(slot.node for slot in claim.slots).values()
    if any(count % each for count in counts):
        misfits.append(_over_nodes(claim, group, counts))
        if misfits[-1].is_fatal:
            return None
    mesh = Mesh(dp=num_slots // each, pp=claim.pp, cp=claim.cp, tp=claim.tp)
    return RolePlan(
        name=claim.name,
        slots=claim.slots,
        mesh=mesh,
        shares_with=claim.shares_with,
        fraction=claim.fraction,
    )


def _over_nodes(claim: Claim, group: str, counts: Collection[int]) -> Misfit:
    """Groups that are not on one node each, of which each has so many slots for the role."""
    each, rest, common = claim.group_size, claim.pp * claim.cp, gcd(*counts)
    fitting = [] if common % rest else divisors(common // rest)
    mends = [f"{claim.keys}.tensor_parallel_size={size}" for size in fitting]
    why, is_fatal = "the network between nodes is slow", claim.name == "generation"
    if is_fatal:
        why = "vLLM starts the processes of one replica on one node"
        mends.append(f"a multiple of {each} slots of each node for {claim.name}")
    least, most = min(counts), max(counts)
    return Misfit(
        problem=f"{group}: groups of {each} slots reach over nodes, of which each has "
        f"{least if least == most else f'{least} to {most}'} for {claim.name}; {why}",
        mends=tuple(mends),
        is_fatal=is_fatal,
    )


def title(name: RoleName) -> str:
    """A role as people read it."""
    return name.replace("_", " ")


def divisors(number: int) -> list[int]:
    """All of a positive number, rising."""
    return [size for size in range(1, number + 1) if number % size == 0]


def where(slots: Iterable[Slot]) -> str:
    """Slots in words: `node 0, slots 4-7; nodes 1-3, slots 0-7 of each`."""
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
    """Rising numbers, `0-3,6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


# --------------------------------------------------------------------------------------------------
# Which roles a run has, and what divides the slots of each.

Run = RewardTrainingRun | SFTRun | GRPORun

PARALLEL_KEYS: Mapping[RoleName, str] = {
    "policy": "policy.dtensor_cfg",
    "generation": "policy.generation.vllm_cfg",
    "reward_model": "env.reward_model.dtensor_cfg",
}
"""What divides a role's slots into groups."""


def roles_of(config: Run) -> tuple[RoleName, ...]:
    """The roles of a run; the policy is always the first."""
    if not isinstance(config, GRPORun):
        return ("policy",)
    return ("policy", "generation", *(("reward_model",) if uses_reward_model(config) else ()))


def uses_reward_model(config: GRPORun) -> bool:
    """Whether any task may be judged by a reward model that this run loads and gives slots.

    It is enabled, or a data set names it; and no servers, judge or function stand in for it. One of
    several models is enough, and all that are loaded have the same slots.
    """
    if not config.env.reward_model.computes:
        return False
    blocks = [*config.data.train_sets(), *config.data.validation_sets()]
    waiting = [config.default_environment, *(block.env_name or "" for block in blocks)]
    named: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in named and name in config.env.composite:
            waiting += [part.env for part in config.env.composite[name].parts]
        named.add(name)
    return config.env.reward_model.enabled or "reward_model" in named


def claim_of(
    config: Run,
    name: RoleName,
    slots: tuple[Slot, ...],
    *,
    shares_with: RoleName | None = None,
    fraction: float = 1.0,
    is_placed: bool = True,
) -> Claim:
    """Slots for a role of the run, with what the configuration divides it by."""
    tp = pp = cp = 1
    if name == "generation" and isinstance(config, GRPORun):
        if draws_with_vllm(config):  # an engine of another kind has one slot
            vllm = config.policy.generation.vllm_cfg
            tp, pp = vllm.tensor_parallel_size, vllm.pipeline_parallel_size
    else:
        parallel = config.policy.dtensor_cfg
        if name == "reward_model" and isinstance(config, GRPORun):
            parallel = config.env.reward_model.dtensor_cfg
        tp, cp = parallel.tensor_parallel_size, parallel.context_parallel_size
    return Claim(
        name=name,
        slots=slots,
        keys=PARALLEL_KEYS[name],
        pp=pp,
        cp=cp,
        tp=tp,
        shares_with=shares_with,
        fraction=fraction,
        is_placed=is_placed,
    )


def draws_with_vllm(config: GRPORun) -> bool:
    """What `auto` means where nothing can be asked: vLLM, unless the run is for CPUs."""
    backend = config.policy.generation.backend
    return backend == "vllm" or (backend == "auto" and config.cluster.device != "cpu")


# --------------------------------------------------------------------------------------------------
# Changes to a configuration that are tried before they are named as mends.

S = TypeVar("S", bound=Section)
Change = Mapping[str, Any]
"""Key, `a.b.c`, to value."""


def with_changes(config: S, change: Change) -> S:
    """A copy of a section with some keys changed. What depends on them is not checked."""
    for key, value in change.items():
        first, _, rest = key.partition(".")
        if rest:
            value = with_changes(_section(config, first), {rest: value})
        config = config.model_copy(update={first: value})
    return config


def _section(config: Section, name: str) -> Section:
    """A section of a section; where it is null, its defaults."""
    section = getattr(config, name)
    if section is None:
        kinds = getattr(type(config).model_fields[name].annotation, "__args__", ())
        section = next(k for k in kinds if isinstance(k, type) and issubclass(k, Section))()
    assert isinstance(section, Section)
    return section


def as_typed(change: Change) -> str:
    """A change as it is typed on the command line."""
    return " ".join(f"{key}={_value(value)}" for key, value in change.items())


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
