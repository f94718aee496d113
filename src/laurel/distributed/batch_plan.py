"""How the batches of a run are divided among the ranks of its roles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from laurel.config.grpo_training import GRPOConfig, GRPORun
from laurel.config.reward_training import RewardTrainingConfig, RewardTrainingRun
from laurel.config.scorers import ScorerSource
from laurel.config.sft_training import SFTConfig, SFTRun
from laurel.distributed.claims import Run
from laurel.distributed.roles import Misfit, RoleName, RolePlan, divisors

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
        role="policy", unit=_unit(config), size=policy.train_global_batch_size, num_shares=dp,
        longest=_longest(config), tokens=_budget(config, policy.train_micro_batch_size),
        updates=config.updates_per_rollout if isinstance(config, GRPORun) else 1,
    )  # fmt: skip


def _validation(config: RewardTrainingRun | SFTRun, dp: int) -> BatchPlan:
    section = config.rm if isinstance(config, RewardTrainingRun) else config.sft
    return BatchPlan(
        role="policy", unit=_unit(config), size=section.val_global_batch_size, num_shares=dp,
        longest=_longest(config), tokens=_budget(config, section.val_micro_batch_size),
    )  # fmt: skip


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
        role="generation", unit="completions", size=size, num_shares=replicas,
        longest=longest, tokens=side_by_side * longest,
    )  # fmt: skip


def _judging(config: GRPORun, replicas: int, size: int) -> BatchPlan:
    """Of several models what the largest passes are."""
    passes = [_judged_at_once(judge) for judge in config.env.reward_model.loaded]
    return BatchPlan(
        role="reward_model", unit="completions", size=size, num_shares=replicas,
        longest=max(longest for longest, _ in passes), tokens=max(tokens for _, tokens in passes),
    )  # fmt: skip


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
