"""How a GRPO run's cluster is divided between its roles. The rules are NeMo RL's.

On one node its slots are divided; with several, the reward model and generation that is not
colocated get whole nodes. The policy has what is left.
"""

from __future__ import annotations

from collections.abc import Iterator

from laurel.config.grpo_training import GRPORun
from laurel.distributed.claims import claim_of, uses_reward_model
from laurel.distributed.roles import Claim, Misfit, RoleName, Slot, grid

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
            available // 2 + 1, available, least=_group(config, "policy"),
            group=_group(config, "generation"),
        )  # fmt: skip
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
