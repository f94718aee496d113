"""The plan of a run, from its configuration alone: who gets which slots, and what does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from laurel.config.environments import ScorerSource
from laurel.config.grpo import GRPOConfig, GRPORun
from laurel.config.reward_model import RewardTrainingConfig, RewardTrainingRun
from laurel.config.sft import SFTConfig, SFTRun
from laurel.planning.placement import claims_of_placement
from laurel.planning.roles import (
    Claim,
    Misfit,
    RoleName,
    RolePlan,
    Run,
    Slot,
    claim_of,
    divisors,
    grid,
    place,
    uses_reward_model,
)

# --------------------------------------------------------------------------------------------------
# How the batches of a run are divided among the ranks of its roles.

DEFAULT_JUDGED_LENGTH = 8192
"""Tokens of the longest conversation of a reward model that does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """What one role does with one batch. Numbers of micro-batches are for items of full length."""

    role: RoleName
    unit: str
    """What is counted: groups (pairs), conversations or completions."""
    size: int
    """Of all ranks: one optimizer step's, one rollout's, or those validated side by side."""
    num_shares: int
    """Data-parallel ranks, or replicas."""
    longest: int
    """Tokens of the longest item."""
    tokens: int
    """Tokens of one forward pass, at most."""
    updates: int = 1
    """Such batches in a step."""
    is_validation: bool = False
    """Not of a step."""

    @property
    def per_share(self) -> int:
        """Items of one share, at most."""
        return -(-self.size // self.num_shares)

    @property
    def num_micro_batches(self) -> int:
        """Forward passes of one share, at most: where every item has full length."""
        return -(-self.per_share // max(1, self.tokens // self.longest))


def plan_batches(
    config: Run, roles: Iterable[RolePlan], misfits: list[Misfit]
) -> tuple[BatchPlan, ...]:
    """For each role that was placed those of a step, and those of a validation where there is any.

    Training batches that cannot be split go to the misfits; validation splits any number.
    """
    dp = {role.name: role.mesh.dp for role in roles}
    plans = []
    if "policy" in dp:
        plans.append(_training(config, dp["policy"]))
        misfits += _check_split(config, plans[-1])
    if isinstance(config, GRPORun):
        grpo = config.grpo
        size = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
        plans += _rollouts(config, dp, size)
    if not _validates(config):
        return tuple(plans)
    if isinstance(config, GRPORun):
        tasks = min(config.grpo.val_batch_size, config.grpo.max_val_samples)
        size = tasks * config.grpo.val_num_generations_per_prompt
        found = _rollouts(config, dp, size)
    else:
        found = [_validation(config, dp["policy"])] if "policy" in dp else []
    return (*plans, *(replace(plan, is_validation=True) for plan in found))


def _validates(config: Run) -> bool:
    section = _section(config)
    is_asked = section.val_period > 0 or section.val_at_start or section.val_at_end
    has_more = isinstance(config, RewardTrainingRun) and bool(config.data.benchmark_sets())
    return is_asked and (bool(config.data.validation_sets()) or has_more)


def _section(config: Run) -> RewardTrainingConfig | SFTConfig | GRPOConfig:
    if isinstance(config, RewardTrainingRun):
        return config.rm
    return config.sft if isinstance(config, SFTRun) else config.grpo


def _training(config: Run, dp: int) -> BatchPlan:
    policy = config.policy
    return BatchPlan(
        role="policy",
        unit=_unit(config),
        size=policy.train_global_batch_size,
        num_shares=dp,
        longest=_longest(config),
        tokens=_budget(config, policy.train_micro_batch_size),
        updates=config.updates_per_rollout if isinstance(config, GRPORun) else 1,
    )


def _validation(config: RewardTrainingRun | SFTRun, dp: int) -> BatchPlan:
    section = config.rm if isinstance(config, RewardTrainingRun) else config.sft
    return BatchPlan(
        role="policy",
        unit=_unit(config),
        size=section.val_global_batch_size,
        num_shares=dp,
        longest=_longest(config),
        tokens=_budget(config, section.val_micro_batch_size),
    )


def _unit(config: Run) -> str:
    if isinstance(config, RewardTrainingRun):
        return "groups"
    return "conversations" if isinstance(config, SFTRun) else "completions"


def _longest(config: Run) -> int:
    """Tokens of the longest item: of a pair both conversations."""
    each = 2 if isinstance(config, RewardTrainingRun) else 1
    return each * config.policy.max_total_sequence_length


def _budget(config: Run, micro_batch_size: int) -> int:
    """Tokens of one forward pass: no item is divided."""
    policy, longest = config.policy, _longest(config)
    if policy.sequence_packing.enabled:
        budget = policy.token_budget(policy.sequence_packing)
    elif policy.dynamic_batching.enabled:
        budget = policy.token_budget(policy.dynamic_batching)
    else:
        budget = longest * micro_batch_size
    return max(longest, budget)


def _rollouts(config: GRPORun, dp: Mapping[RoleName, int], size: int) -> list[BatchPlan]:
    """The same completions are drawn, and judged where there is a reward model."""
    plans = [_drawing(config, dp["generation"], size)] if "generation" in dp else []
    return plans + ([_judging(config, dp["reward_model"], size)] if "reward_model" in dp else [])


def _drawing(config: GRPORun, replicas: int, size: int) -> BatchPlan:
    """A forward pass is one token of each completion under way; `tokens` is all they may hold."""
    longest = config.policy.max_total_sequence_length
    side_by_side = min(config.policy.generation.max_concurrent, -(-size // replicas))
    return BatchPlan(
        role="generation",
        unit="completions",
        size=size,
        num_shares=replicas,
        longest=longest,
        tokens=side_by_side * longest,
    )


def _judging(config: GRPORun, replicas: int, size: int) -> BatchPlan:
    """Of several models what the largest passes are."""
    passes = [_judged_at_once(judge) for judge in config.env.reward_model.loaded]
    return BatchPlan(
        role="reward_model",
        unit="completions",
        size=size,
        num_shares=replicas,
        longest=max(longest for longest, _ in passes),
        tokens=max(tokens for _, tokens in passes),
    )


def _judged_at_once(judge: ScorerSource) -> tuple[int, int]:
    """Tokens of the longest conversation and of one forward pass."""
    longest = judge.max_model_len or DEFAULT_JUDGED_LENGTH
    is_budget = judge.sequence_packing.enabled or judge.dynamic_batching.enabled
    budget = judge.batch_tokens if is_budget else judge.batch_size * longest
    return longest, max(longest, budget)


def _check_split(config: Run, plan: BatchPlan) -> list[Misfit]:
    """Every rank takes as many items of each optimizer step."""
    size, dp = plan.size, plan.num_shares
    if size % dp == 0:
        return []
    fitting = [size - size % dp, size - size % dp + dp]
    if isinstance(config, GRPORun):  # where optimizer steps divide a step's completions, too
        grpo = config.grpo
        whole = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
        fitting = [number for number in divisors(whole) if number % dp == 0]
    key = "policy.train_global_batch_size"
    nearest = sorted(filter(None, fitting), key=lambda number: abs(number - size))[:2]
    fewer = max(number for number in divisors(size) if number <= dp)
    problem = f"{key}={size} {plan.unit} cannot be split evenly among {dp} data-parallel ranks"
    mends = [f"{key}={n}" for n in nearest]
    if isinstance(config, GRPORun) and not nearest:
        each = config.grpo.num_generations_per_prompt
        unit = dp // math.gcd(dp, each)
        prompts = max(1, round(config.grpo.num_prompts_per_step / unit)) * unit
        mends = [f"grpo.num_prompts_per_step={prompts} {key}={prompts * each}"]
    mends.append(f"{fewer} data-parallel ranks instead of {dp}")
    return [Misfit(problem=problem, mends=tuple(mends))]


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


# --------------------------------------------------------------------------------------------------
# How a GRPO run's cluster is divided between its roles. The rules are NeMo RL's.
#
# On one node its slots are divided; with several, the reward model and generation that is not
# colocated get whole nodes. The policy has what is left.

REWARD = "env.reward_model.resources"
GENERATION = "policy.generation.colocated.resources"


def claims_of_grpo(config: GRPORun, misfits: list[Misfit]) -> list[Claim]:
    """What each role is to have; what cannot be had goes to the misfits."""
    if config.cluster.num_nodes == 1:
        return list(_on_one_node(config, misfits))
    return list(_on_several_nodes(config, misfits))


# ------------------------------------------------------------------------------------------ rules


def _on_one_node(config: GRPORun, misfits: list[Misfit]) -> Iterator[Claim]:
    """The slots of the node, divided: policy = all - generation - reward model."""
    total = config.cluster.gpus_per_node
    colocated, judge = config.policy.generation.colocated, _judge_resources(config)
    judging, judge_nodes = judge or (0, None)
    if judge_nodes not in (None, 1):
        misfits.append(_too_many_nodes(f"{REWARD}.num_nodes", judge_nodes))
    drawing = 0
    if not colocated.enabled:
        drawing = colocated.resources.gpus_per_node or 0
        _check_generation_on_one_node(config, judging, misfits)
    free = total - drawing - judging
    if free > 0:
        yield from _sharing(config, grid(range(1), range(free)))
    else:
        misfits.append(_too_few_slots(config, judging, drawing))
    if drawing:
        own = grid(range(1), range(free, free + drawing))
        yield claim_of(config, "generation", own, is_placed=free > 0)
    if judging:
        own = grid(range(1), range(free + drawing, total))
        yield claim_of(config, "reward_model", own, is_placed=free > 0)


def _on_several_nodes(config: GRPORun, misfits: list[Misfit]) -> Iterator[Claim]:
    """Whole nodes for the reward model, and for generation where it has its own."""
    num_nodes, total = config.cluster.num_nodes, config.cluster.gpus_per_node
    judge = _judge_resources(config)
    judging, judge_nodes = (judge[0], judge[1] or 1) if judge else (0, 0)
    if judging:
        _check_judging_nodes(judging, judge_nodes, total, misfits)
    policy_nodes = num_nodes - judge_nodes
    colocated = config.policy.generation.colocated
    if policy_nodes <= 0:
        drawing_nodes = 0 if colocated.enabled else colocated.resources.num_nodes or 0
        misfits.append(_too_few_nodes(num_nodes, judge_nodes, drawing_nodes))
    elif colocated.enabled:
        yield from _sharing(config, grid(range(policy_nodes), range(total)))
    elif policy_nodes == 1:
        yield from _on_a_divided_node(config, misfits)
    else:
        yield from _on_own_nodes(config, policy_nodes, judge_nodes, misfits)
    if judging:
        own = grid(range(policy_nodes, num_nodes), range(judging))
        is_placed = policy_nodes > 0 and judging <= total
        yield claim_of(config, "reward_model", own, is_placed=is_placed)


def _on_a_divided_node(config: GRPORun, misfits: list[Misfit]) -> Iterator[Claim]:
    """Training and generation on one node, beside nodes of the reward model."""
    _check_generation_on_one_node(config, 0, misfits)
    drawing = config.policy.generation.colocated.resources.gpus_per_node or 0
    total = config.cluster.gpus_per_node
    free = total - drawing
    if free > 0:
        yield from _sharing(config, grid(range(1), range(free)))
    else:
        misfits.append(_too_few_slots(config, 0, drawing))
    if drawing:
        own = grid(range(1), range(free, total))
        yield claim_of(config, "generation", own, is_placed=free > 0)


def _on_own_nodes(
    config: GRPORun, policy_nodes: int, judge_nodes: int, misfits: list[Misfit]
) -> Iterator[Claim]:
    """Training and generation each on whole nodes."""
    total = config.cluster.gpus_per_node
    own = config.policy.generation.colocated.resources
    if own.gpus_per_node not in (None, total):
        misfits.append(
            Misfit(
                problem=f"{GENERATION}.gpus_per_node={own.gpus_per_node}: {policy_nodes} nodes are "
                "there for policy and generation, so that generation gets whole nodes of "
                f"{total} slots",
                mends=(f"{GENERATION}.gpus_per_node={total}", f"{GENERATION}.gpus_per_node=null"),
            )
        )
    if own.num_nodes is None:
        misfits.append(
            Misfit(
                problem=f"{GENERATION}.num_nodes is not said: how many of the {policy_nodes} nodes "
                "that policy and generation have are for generation?",
                mends=(
                    f"{GENERATION}.num_nodes={max(1, policy_nodes // 2)}",
                    "policy.generation.colocated.enabled=true",
                ),
            )
        )
        return
    training_nodes = policy_nodes - own.num_nodes
    if training_nodes <= 0:
        misfits.append(_too_few_nodes(config.cluster.num_nodes, judge_nodes, own.num_nodes))
        return
    yield from _sharing(config, grid(range(training_nodes), range(total)))
    slots = grid(range(training_nodes, policy_nodes), range(total))
    yield claim_of(config, "generation", slots)


def _sharing(config: GRPORun, slots: tuple[Slot, ...]) -> Iterator[Claim]:
    """The policy, and the roles that have no slots of their own."""
    yield claim_of(config, "policy", slots)
    if config.policy.generation.colocated.enabled:
        yield claim_of(config, "generation", slots, shares_with="policy")
    if uses_reward_model(config) and _judge_resources(config) is None:
        yield claim_of(config, "reward_model", slots, shares_with="policy")


def _judge_resources(config: GRPORun) -> tuple[int, int | None] | None:
    """Slots of each node and nodes that are the reward model's own; None where it has none.

    Where nothing is said it shares the policy's slots, as it does in a run of one process.
    """
    own = config.env.reward_model.resources
    if not uses_reward_model(config):
        return None
    several = config.cluster.num_nodes > 1
    if own.gpus_per_node is None and not (several and own.num_nodes):
        return None
    return own.gpus_per_node or config.cluster.gpus_per_node, own.num_nodes


# ---------------------------------------------------------------------------------------- misfits


def _check_generation_on_one_node(config: GRPORun, judging: int, misfits: list[Misfit]) -> None:
    own = config.policy.generation.colocated.resources
    if own.gpus_per_node is None:
        available = config.cluster.gpus_per_node - judging
        half = _fewer(
            available // 2 + 1,
            available,
            least=_group(config, "policy"),
            group=_group(config, "generation"),
        )
        mends = [f"{GENERATION}.gpus_per_node={half}"] if half else []
        misfits.append(
            Misfit(
                problem=f"{GENERATION}.gpus_per_node is not said: policy and generation divide the "
                "slots of one node, and generation is not colocated",
                mends=(*mends, "policy.generation.colocated.enabled=true"),
            )
        )
    if own.num_nodes not in (None, 1):
        misfits.append(_too_many_nodes(f"{GENERATION}.num_nodes", own.num_nodes))


def _check_judging_nodes(num_slots: int, nodes: int, total: int, misfits: list[Misfit]) -> None:
    key = f"{REWARD}.gpus_per_node"
    if num_slots > total:
        misfits.append(
            Misfit(
                problem=f"{key}={num_slots} is more than a node has: {total} slots",
                mends=(f"{key}={total}", f"cluster.gpus_per_node={num_slots}"),
            )
        )
    elif num_slots < total:
        misfits.append(
            Misfit(
                problem=f"{key}={num_slots} of {total}: with several nodes the reward model has "
                f"whole nodes, and {nodes} x {total - num_slots} = {nodes * (total - num_slots)} "
                "slots are left idle",
                mends=(f"{key}={total}",),
                is_fatal=False,
            )
        )


def _too_many_nodes(key: str, asked: int | None) -> Misfit:
    return Misfit(
        problem=f"{key}={asked}: there is one node to divide",
        mends=(f"{key}=1", f"{key}=null"),
    )


def _too_few_slots(config: GRPORun, judging: int, drawing: int) -> Misfit:
    """All roles of a node, their sum, what there is, and what each could be instead."""
    total, least = config.cluster.gpus_per_node, _group(config, "policy")
    asked = _sum_of(judging, drawing, least)
    mends = [f"cluster.gpus_per_node={judging + drawing + least}"]
    group = _group(config, "reward_model")
    fewer = _fewer(judging, total - drawing, group=group, least=least)
    mends += [f"{REWARD}.gpus_per_node={fewer}"] if fewer else []
    group = _group(config, "generation")
    fewer = _fewer(drawing, total - judging, group=group, least=least)
    mends += [f"{GENERATION}.gpus_per_node={fewer}"] if fewer else []
    if judging and judging <= total and (total - drawing) > 0:
        mends.append(f"cluster.num_nodes={config.cluster.num_nodes + 1}")
        mends.append(f"{REWARD}.gpus_per_node=null (it shares the policy's slots)")
    return Misfit(
        problem=f"the roles of a node need {asked} slots, and it has cluster.gpus_per_node={total}",
        mends=tuple(mends),
    )


def _fewer(asked: int, available: int, *, group: int, least: int) -> int:
    """Most slots below what is asked, in whole groups, that leave whole groups to the policy."""
    sizes = range(group, min(asked, available), group)
    return max((size for size in sizes if (available - size) % least == 0), default=0)


def _sum_of(judging: int, drawing: int, least: int) -> str:
    roles = {"reward model": judging, "generation": drawing}
    asked = [f"{name} {count}" for name, count in roles.items() if count]
    return " + ".join([*asked, f"policy at least {least}"]) + f" = {judging + drawing + least}"


def _too_few_nodes(available: int, judging: int, drawing: int) -> Misfit:
    mends = [f"cluster.num_nodes={judging + drawing + 1}"]
    if fewer := _fewer(judging, available - drawing, group=1, least=1):
        mends.append(f"{REWARD}.num_nodes={fewer}")
    if fewer := _fewer(drawing, available - judging, group=1, least=1):
        mends.append(f"{GENERATION}.num_nodes={fewer}")
    return Misfit(
        problem=f"the roles need {_sum_of(judging, drawing, 1)} nodes, and there are "
        f"cluster.num_nodes={available}",
        mends=tuple(mends),
    )


def _group(config: GRPORun, name: RoleName) -> int:
    return claim_of(config, name, ()).group_size
