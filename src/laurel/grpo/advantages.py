"""Computes advantages from rewards: how much better each completion is than its alternatives.

Everything is computed in float64 on the CPU. Statistics take two passes: first the deviations from
one reward of the group, then their squares. So rewards near 30 that differ by 0.01 keep their
digits, and equal rewards give exactly 0. A completion without a reward gets the advantage 0 and
changes no other.

Let `d_i` be the reward of completion i minus its baseline, which is the mean reward of its group or
of the group's other completions. The estimators are:

    grpo                 d_i / s, where `scale` chooses s: the standard deviation of the group's
                         rewards, that of the rewards of all groups, or 1
    gdpo                 the weighted sum of d_i / s over the components of the reward, divided by
                         the standard deviation of all these sums (arXiv 2601.05242)
    reinforce_plus_plus  d_i (or the reward itself), whitened over all groups (arXiv 2501.03262);
                         each completion counts once, whatever its length

Further ones, among them the one for completions that branch (`grpo.tree`), are in
`extensions/estimators`.

A division by s divides by `s + std_eps`, or by the noise floor if that is larger:
`noise_floor_factor` times the scoring noise, which is the standard deviation of the rewards' errors
(such as rounding) that an environment states, or measures by scoring conversations repeatedly. If s
is 0, nothing is divided. With `leave_one_out_std` nothing is divided below the floor either: other
rewards that differ by noise alone count as equal, or the one unlike them would be divided by noise.
The mean over the batch is subtracted only if no baseline was: otherwise a group with equal rewards
would get advantages from the other groups.

With `per_step` the steps of a group's completions are compared instead, and each token gets an
advantage of its own: the sum over the steps that end with it or later (process supervision in
section 4.1.3 of DeepSeekMath, arXiv 2402.03300). Let `r_ij` be the reward of step j of completion
i, `m_i` the mean of the rewards of all steps of the group, or of those of its other completions,
and `s` the standard deviation of those of the group (or of all groups, or 1). Then

    A_it = sum of (r_ij - m_i) / s over the steps j that end at token t or after it
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from laurel.config.grpo import (
    AdvantageConfig,
    GRPOConfig,
    PolicyLossConfig,
    RewardScalingConfig,
    RewardShapingConfig,
)
from laurel.errors import ConfigError, counted
from laurel.plugins import Advantage
from laurel.types import Rollout, RolloutGroup

if TYPE_CHECKING:
    from laurel.grpo.branching import Segment
    from laurel.types import LogProbs, Mask


Floats = npt.NDArray[np.float64]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageRule:
    """The settings for computing advantages, with the defaults that depend on the estimator."""

    estimator: AdvantageConfig
    has_baseline: bool
    """Whether the mean reward of the group, or of its other completions, is subtracted."""
    leave_one_out: bool
    scale: Literal["group", "batch", "none"]
    clip_low: float
    clip_high: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimator:
    """The estimator of a run, made once."""

    rule: AdvantageRule
    compare: Callable[[Rewards], Compared]
    """What `Advantage.make` returned for the rule."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """The advantages of a batch, of completions or of tokens, with statistics of the rewards."""

    values_BG: list[Floats]
    """Advantage of each completion, or the mean over its tokens; 0 where it has no reward."""
    tokens_BGL: list[list[Floats]] | None = None
    """Advantage of each token, [L]; None: every token has that of its completion."""
    metrics: dict[str, float]
    """Metrics that `compute_advantages` lists."""


def resolve(config: GRPOConfig) -> Estimator:
    """Make the estimator that a `grpo` section describes.

    Settings that the section leaves null get the default of its estimator.

    Raises:
        ConfigError: GDPO is combined with reward scaling or shaping. GDPO compares the components
            of a reward, but scaling and shaping change only the total.
    """
    chosen = config.adv_estimator
    plugin, section = chosen.settings_of(Advantage, chosen.name)
    if plugin.reads_components and (config.reward_scaling.enabled or config.reward_shaping.enabled):
        raise ConfigError(
            f"grpo.adv_estimator.name={chosen.name} compares the components of the reward one by "
            "one, and grpo.reward_scaling and grpo.reward_shaping change only their total; turn "
            "them off, or use adv_estimator.name=grpo"
        )
    low, high = config.advantage_clip_low, config.advantage_clip_high
    rule = AdvantageRule(
        estimator=chosen,
        has_baseline=config.compares_within_groups,
        leave_one_out=config.leaves_one_out,
        scale=config.scale,
        clip_low=-math.inf if low is None else low,
        clip_high=math.inf if high is None else high,
    )
    return Estimator(rule=rule, compare=plugin.make(section, rule))


def teaches(values: Floats) -> bool:
    """Report whether any advantage is nonzero; if none is, the rewards change nothing."""
    return bool(np.any(values != 0.0))


def compute_advantages(
    rewards_BG: Sequence[Sequence[float | None]],
    estimator: Estimator,
    *,
    noise: float | Sequence[float] = 0.0,
    components_BG: Sequence[Sequence[Mapping[str, float]]] | None = None,
    lengths_BG: Sequence[Sequence[int]] | None = None,
    greedy_B: Sequence[float | None] = (),
    segments_BG: Sequence[Sequence[Sequence[Segment]]] | None = None,
) -> Advantages:
    """Compute the advantages of a batch of groups.

    The metrics are computed over the completions that have a reward:
    `advantages/{mean,max,min,std,sum}`; `reward` and `reward_std` over the batch;
    `reward_group_std`, the mean over groups; `frac_reward_zero_std`, the share with equal rewards
    among the groups with at least two; `groups_without_signal`, whose advantages are all 0;
    `groups_at_noise_floor`; and, if all rewards are 0 or 1, the percentages of groups with only 0,
    only 1 or both, `baseline_reward/{pct_0,pct_1,pct_mixed}`. A group is at the noise floor if it
    is divided by a multiple of the noise because the standard deviation is smaller.

    Args:
        rewards_BG: The reward of each completion; None if its scoring failed or it is excluded.
        noise: The standard deviation of the errors of rewards (such as rounding), in units of the
            reward: one number, or one per group. It bounds divisors from below.
        components_BG: The named components of each reward; only GDPO uses them.
        lengths_BG: The number of tokens that the policy wrote in each completion; None: all have
            the same.
        greedy_B: The reward of each group's greedy completion, where the estimator reads it.
        segments_BG: The segments of each completion, where the estimator compares branches.

    Raises:
        ConfigError: GDPO is chosen, and rewards have no components, or the number of components is
            not the number of `reward_weights`.
        ValueError: A reward is NaN or infinite. The caller must pass None for such a completion.
    """
    used_BG = [np.array([r is not None for r in row_G], dtype=bool) for row_G in rewards_BG]
    rewards = [np.array([r for r in row_G if r is not None], np.float64) for row_G in rewards_BG]
    if not all(np.isfinite(row).all() for row in rewards):
        raise ValueError("a reward is NaN or infinite; a sample without a reward must be None")
    noise_B = list(noise) if isinstance(noise, Sequence) else [noise] * len(rewards)
    rule = estimator.rule
    segments_BG = segments_BG or [[()] * len(used_G) for used_G in used_BG]
    lengths_BG = lengths_BG or [[1] * len(used_G) for used_G in used_BG]
    compared = estimator.compare(
        Rewards(
            values_B=rewards,
            components_B=_used(components_BG or [[{}] * len(row) for row in used_BG], used_BG),
            noise_B=noise_B,
            lengths_B=[np.array(row, np.float64) for row in _used(lengths_BG, used_BG)],
            greedy_B=greedy_B,
            segments_B=_used(segments_BG, used_BG),
        )
    )
    shapes = [[len(row) for row in rows] for rows in (compared.values, rewards)]
    assert shapes[0] == shapes[1], (
        f"grpo.adv_estimator.name={rule.estimator.name} gives advantages for {shapes[0]} "
        f"completions of groups with {shapes[1]}"
    )
    values_BG = []
    for used_G, values in zip(used_BG, compared.values, strict=True):
        values_G = np.zeros(len(used_G))
        values_G[used_G] = np.clip(values, rule.clip_low, rule.clip_high)
        values_BG.append(values_G)
    counted_B = [values_G[used_G] for values_G, used_G in zip(values_BG, used_BG, strict=True)]
    tokens_BGL = None
    if compared.segments_B is not None:
        tokens_BGL, counted_B = _of_segments(compared.segments_B, segments_BG, used_BG, rule)
    return _with_metrics(values_BG, tokens_BGL, counted_B, rewards, compared, rule)


def _used(
    rows_BG: Sequence[Sequence[T]], used_BG: Sequence[npt.NDArray[np.bool_]]
) -> list[list[T]]:
    # Without the entries of completions that have no reward.
    return [
        [one for one, used in zip(row_G, used_G.tolist(), strict=True) if used]
        for row_G, used_G in zip(rows_BG, used_BG, strict=True)
    ]


def _of_segments(
    values_B: Sequence[Sequence[Floats]],
    segments_BG: Sequence[Sequence[Sequence[Segment]]],
    used_BG: Sequence[npt.NDArray[np.bool_]],
    rule: AdvantageRule,
) -> tuple[list[list[Floats]], list[Floats]]:
    # Of each token, and of those of each group that the policy wrote.
    tokens_BGL, counted_B = list[list[Floats]](), list[Floats]()
    for of_used, segments_G, used_G in zip(values_B, segments_BG, used_BG, strict=True):
        given, tokens_GL, counted = iter(of_used), list[Floats](), [np.zeros(0)]
        for segments, is_used in zip(segments_G, used_G.tolist(), strict=True):
            values = np.clip(next(given), rule.clip_low, rule.clip_high) if is_used else 0.0
            values = np.broadcast_to(np.asarray(values, np.float64), len(segments))
            lengths = np.diff([segment.end for segment in segments], prepend=0)
            tokens_GL.append(np.repeat(values, lengths))
            if is_used:
                counted.append(np.repeat(values, [segment.num_sampled for segment in segments]))
        tokens_BGL.append(tokens_GL)
        counted_B.append(np.concatenate(counted))
    return tokens_BGL, counted_B


def compute_step_advantages(
    groups: Sequence[RolloutGroup],
    rewards_BG: Sequence[Sequence[float | None]],
    estimator: Estimator,
    *,
    noise: Sequence[float],
) -> Advantages:
    """Compute an advantage for each token of a batch from the rewards of steps.

    A completion without a reward takes no part, and its advantages are 0. So are those of the
    tokens after the last step, of a completion without a step, and of a group in which fewer than
    two completions have steps.

    The metrics are those of `compute_advantages`, with `advantages/...` over the policy's tokens.
    Those of rewards are about the completions.

    Args:
        rewards_BG: The reward of each completion; None if it is left out.
        noise: The standard deviation of the errors of each group's rewards. It bounds divisors from
            below.
    """
    rule = estimator.rule
    used_BG = [np.array([r is not None for r in row_G], dtype=bool) for row_G in rewards_BG]
    steps_BG = [
        [
            rollout.steps or () if is_used else ()
            for rollout, is_used in zip(group.rollouts_G, used_G.tolist(), strict=True)
        ]
        for group, used_G in zip(groups, used_BG, strict=True)
    ]
    rows_BG = [
        [np.array([step.value for step in steps], np.float64) for steps in steps_G]
        for steps_G in steps_BG
    ]
    compared = _steps_against_groups(rows_BG, rule, noise)
    tokens_BGL, values_BG, counted_B = list[list[Floats]](), list[Floats](), list[Floats]()
    for group, steps_G, used_G, values in zip(
        groups, steps_BG, used_BG, compared.values, strict=True
    ):
        parts = _split(values, np.array([len(steps) for steps in steps_G]))
        tokens_GL = [
            np.clip(
                _of_tokens([step.end for step in steps], part, len(rollout.ids_L)),
                rule.clip_low,
                rule.clip_high,
            )
            for rollout, steps, part in zip(group.rollouts_G, steps_G, parts, strict=True)
        ]
        written_GU = [
            values_L[rollout.mask_L]
            for values_L, rollout in zip(tokens_GL, group.rollouts_G, strict=True)
        ]
        tokens_BGL.append(tokens_GL)
        values_BG.append(np.array([float(w.mean()) if len(w) else 0.0 for w in written_GU]))
        counted = [written for written, used in zip(written_GU, used_G, strict=True) if used]
        counted_B.append(np.concatenate([*counted, np.zeros(0)]))
    rewards = [np.array([r for r in row_G if r is not None], np.float64) for row_G in rewards_BG]
    return _with_metrics(values_BG, tokens_BGL, counted_B, rewards, compared, rule)


def _with_metrics(
    values_BG: list[Floats],
    tokens_BGL: list[list[Floats]] | None,
    counted_B: list[Floats],
    rewards: list[Floats],
    compared: Compared,
    rule: AdvantageRule,
) -> Advantages:
    stds_B = np.array([_deviation(row, rule.estimator.std_ddof) for row in rewards], np.float64)
    metrics = _metrics(counted_B, rewards, stds_B, rule.estimator.std_ddof)
    metrics["groups_at_noise_floor"] = float(sum(compared.at_floor))
    return Advantages(
        values_BG=values_BG,
        tokens_BGL=tokens_BGL,
        metrics=metrics,
    )


def _of_tokens(ends: Sequence[int], values: Floats, length: int) -> Floats:
    # Each token gets the sum over the steps that end with it or later.
    ending = np.zeros(length)
    np.add.at(ending, np.array(ends, np.int64) - 1, values)
    sums: Floats = np.cumsum(ending[::-1])[::-1]
    # What rounding leaves of steps that cancel out is no signal.
    sums[np.abs(sums) <= len(values) * np.finfo(np.float64).eps * np.abs(values).sum()] = 0.0
    return sums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rewards:
    """The rewards of a batch by group; completions without a reward are left out."""

    values_B: list[Floats]
    components_B: list[list[Mapping[str, float]]]
    """The named components of each reward."""
    noise_B: Sequence[float]
    """The standard deviation of the errors of each group's rewards."""
    lengths_B: list[Floats] = field(default_factory=list)
    """The number of tokens that the policy wrote in each completion."""
    greedy_B: Sequence[float | None] = ()
    """The reward of each group's greedy completion, if the estimator's `baseline` is `greedy`; None
    if it has none."""
    segments_B: list[list[Sequence[Segment]]] = field(default_factory=list)
    """The segments of each completion, if the estimator compares branches."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """The advantages of a batch by group, before they are clipped."""

    values: list[Floats]
    segments_B: list[list[Floats]] | None = None
    """The advantages of the segments of each completion, whose mean over tokens is in `values`;
    None: all tokens of a completion have its own."""
    noise: list[Floats] = field(default_factory=list)
    """Standard deviation of the scorer's noise in each value."""
    at_floor: list[bool] = field(default_factory=list)
    """Whether a sample was divided by the noise floor instead of a deviation."""


def against_groups(rule: AdvantageRule, given: Rewards) -> Compared:
    """Compare the rewards of each group with each other (`grpo`)."""
    compared = _against_groups(given.values_B, rule, given.noise_B)
    if rule.scale == "batch":
        std = _deviation(np.concatenate([*given.values_B, np.zeros(0)]), rule.estimator.std_ddof)
        compared = _over_batch(compared, float(std), rule)
    return compared


def whitened(rule: AdvantageRule, given: Rewards) -> Compared:
    """Divide by the deviation of the whole batch (`reinforce_plus_plus`)."""
    rewards, noise_B = given.values_B, given.noise_B
    if rule.has_baseline:
        compared = _against_groups(rewards, replace(rule, scale="none"), noise_B)
        return _over_batch(compared, _spread(compared.values, rule), rule)
    # What rounding leaves of the mean after one subtraction is not yet small beside a small spread.
    ahead = centred(np.concatenate([*rewards, np.zeros(0)]))
    ends = np.cumsum([len(row) for row in rewards])
    values = [ahead[end - len(row) : end] for row, end in zip(rewards, ends, strict=True)]
    noises = [np.full(len(row), n) for row, n in zip(rewards, noise_B, strict=True)]
    compared = Compared(values=values, noise=noises, at_floor=[False] * len(rewards))
    return _over_batch(compared, float(_deviation(ahead, rule.estimator.std_ddof)), rule)


def by_component(rule: AdvantageRule, given: Rewards) -> Compared:
    """Compare each component with those of its group, then weight them (`gdpo`)."""
    # arXiv 2601.05242.
    samples, noise_B = given.components_B, given.noise_B
    every = [sample for row in samples for sample in row]
    weights = component_weights(every, rule.estimator) if every else {}
    total = [np.zeros(len(row)) for row in samples]
    size = [np.zeros(len(row)) for row in samples]
    variance = [np.zeros(len(row)) for row in samples]
    at_floor = [False] * len(samples)
    for name, weight in weights.items():
        parts = [np.array([sample[name] for sample in row], np.float64) for row in samples]
        if not all(np.isfinite(row).all() for row in parts):
            raise ValueError(f"the component {name!r} of a reward is NaN or infinite")
        compared = _against_groups(parts, rule, noise_B)
        total = [t + weight * v for t, v in zip(total, compared.values, strict=True)]
        size = [s + np.abs(weight * v) for s, v in zip(size, compared.values, strict=True)]
        variance = [v + (weight * n) ** 2 for v, n in zip(variance, compared.noise, strict=True)]
        at_floor = [a or b for a, b in zip(at_floor, compared.at_floor, strict=True)]
    # What rounding leaves of components that cancel out is no signal.
    for t, s in zip(total, size, strict=True):
        t[np.abs(t) <= 8 * len(weights) * np.finfo(np.float64).eps * s] = 0.0
    compared = Compared(values=total, noise=[np.sqrt(v) for v in variance], at_floor=at_floor)
    return _over_batch(compared, _spread(total, rule), rule)


def component_weights(
    components: Iterable[Collection[str]], estimator: AdvantageConfig
) -> dict[str, float]:
    """Return the weights of the components that GDPO compares, which are not 0, by name.

    Raises:
        ConfigError: There are no components, not the same ones for all rewards, or not those for
            which `reward_weights` has weights.
    """
    each = [set(names) for names in components]
    names, given = sorted(set[str]().union(*each)), estimator.reward_weights
    chosen = sorted(given) if isinstance(given, dict) else names
    where = "grpo.adv_estimator"
    missing = [name for name in names if name in chosen and any(name not in own for own in each)]
    if not names or missing:
        found = ", ".join(names) or "none"
        if missing:
            found += f"; some samples have no {missing[0]}, or one that is not finite"
        raise ConfigError(
            f"{where}.name={estimator.name} needs an environment that gives every sample the same "
            f"named components of its reward (found: {found}): a composite "
            "(env.composite), a function that returns a dictionary of numbers, or an environment "
            f"that returns a dictionary of rewards. Use {where}.name=grpo otherwise"
        )
    if unknown := sorted(set(chosen) - set(names)):
        raise ConfigError(
            f"{where}.reward_weights: no component is called {', '.join(unknown)}; there are: "
            f"{', '.join(names)}"
        )
    if isinstance(given, list) and len(given) != len(names):
        raise ConfigError(
            f"{where}.reward_weights has {counted(len(given), 'weight')} for "
            f"{counted(len(names), 'component')}; give one for each of: {', '.join(names)}"
        )
    if given is None:
        return dict.fromkeys(names, 1.0)
    weights = given if isinstance(given, dict) else dict(zip(names, given, strict=True))
    return {name: weight for name, weight in weights.items() if weight != 0.0}


def _against_groups(
    rewards: list[Floats], rule: AdvantageRule, noise_B: Sequence[float]
) -> Compared:
    centred_B = list[Floats]()
    for row in rewards:
        n = len(row)
        values = centred(row)
        if n < 2:
            values = np.zeros(n)
        elif rule.leave_one_out:
            values = values * (n / (n - 1))  # r_i minus the mean of the others
        centred_B.append(values)
    return divided(centred_B, rewards, rule, noise_B)


def _steps_against_groups(
    rows_BG: Sequence[Sequence[Floats]], rule: AdvantageRule, noise_B: Sequence[float]
) -> Compared:
    # Of each group, the steps of all completions in one row.
    steps_B = [np.concatenate([*row_G, np.zeros(0)]) for row_G in rows_BG]
    centred_B, compared_B = list[Floats](), list[Floats]()
    for row_G, steps in zip(rows_BG, steps_B, strict=True):
        counts_G = np.array([len(row) for row in row_G])
        values = np.zeros(len(steps))
        is_compared = np.count_nonzero(counts_G) >= 2
        if is_compared:
            values = centred(steps)
            if rule.leave_one_out:
                sums_G = np.array([float(np.sort(c).sum()) for c in _split(values, counts_G)])
                others_G = (np.sort(values).sum() - sums_G) / (len(steps) - counts_G)
                values = values - np.repeat(others_G, counts_G)
        centred_B.append(values)
        # Without a spread nothing is divided, and no noise floor counts.
        compared_B.append(steps if is_compared else values)
    compared = divided(centred_B, compared_B, rule, noise_B)
    if rule.scale == "batch":
        std = _deviation(np.concatenate([*steps_B, np.zeros(0)]), rule.estimator.std_ddof)
        compared = _over_batch(compared, float(std), rule)
    return compared


def divided(
    centred_B: Sequence[Floats],
    rewards_B: Sequence[Floats],
    rule: AdvantageRule,
    noise_B: Sequence[float],
) -> Compared:
    """Divide the values of each group by the deviation of its rewards, or by its noise floor.

    With another `scale` than `group` they stay as they are.
    """
    values, noises, at_floor = list[Floats](), list[Floats](), list[bool]()
    for ahead, row, noise in zip(centred_B, rewards_B, noise_B, strict=True):
        n = len(row)
        divisors, is_floor = np.ones(n), False
        if rule.scale == "group" and n >= 2:
            if rule.estimator.leave_one_out_std:
                others = np.tile(row, (n, 1))[~np.eye(n, dtype=bool)].reshape(n, n - 1)
                stds = _deviation(others, rule.estimator.std_ddof)
            else:
                stds = np.full(n, _deviation(row, rule.estimator.std_ddof))
            of_others = rule.estimator.leave_one_out_std
            divisors, is_floor = _divisors(stds, rule, noise, of_others=of_others)
        values.append(ahead / divisors)
        noises.append(noise / divisors)
        at_floor.append(is_floor)
    return Compared(values=values, noise=noises, at_floor=at_floor)


def _split(values: Floats, counts: npt.NDArray[np.int64]) -> list[Floats]:
    return np.split(values, np.cumsum(counts)[:-1])


def _over_batch(compared: Compared, std: float, rule: AdvantageRule) -> Compared:
    noises = np.concatenate([*compared.noise, np.zeros(0)])
    noise = float(np.sqrt(np.mean(noises**2))) if len(noises) else 0.0
    divisors, is_floor = _divisors(np.array([std]), rule, noise)
    return replace(
        compared,
        values=[values / divisors[0] for values in compared.values],
        noise=[values / divisors[0] for values in compared.noise],
        at_floor=[
            a or (is_floor and len(a_values) > 0)
            for a, a_values in zip(compared.at_floor, compared.values, strict=True)
        ],
    )


def _divisors(
    stds: Floats, rule: AdvantageRule, noise: float, *, of_others: bool = False
) -> tuple[Floats, bool]:
    # Returns the divisors, and whether the noise floor was used.
    floor = rule.estimator.noise_floor_factor * noise
    divisors = np.maximum(stds + rule.estimator.std_eps, floor)
    is_spread = stds > 0.0
    is_floor = bool(np.any(is_spread & (stds + rule.estimator.std_eps < floor)))
    if of_others:
        return np.where(is_spread & (stds >= floor), divisors, max(1.0, floor)), is_floor
    return np.where(is_spread, divisors, 1.0), is_floor


def centred(rows: Floats) -> Floats:
    """Return the values minus the mean of each row, exactly 0 where all are equal."""
    # Sums run over sorted values, so the order of the samples changes no bit.
    ordered = np.sort(rows, axis=-1)
    if rows.shape[-1] == 0:
        return ordered
    pivot = ordered[..., rows.shape[-1] // 2, None]
    values: Floats = (rows - pivot) - (ordered - pivot).mean(axis=-1, keepdims=True)
    return values


def _mean(row: Floats) -> float:
    pivot = float(np.sort(row)[len(row) // 2])
    return pivot + float((np.sort(row) - pivot).mean())


def _deviation(rows: Floats, ddof: int) -> Floats:
    # The result is 0 if there are too few values.
    n = rows.shape[-1]
    if n < 2:
        return np.zeros(rows.shape[:-1])
    squares = np.square(centred(np.sort(rows, axis=-1)))
    return np.asarray(np.sqrt(squares.sum(axis=-1) / (n - ddof)), np.float64)


def _spread(values: list[Floats], rule: AdvantageRule) -> float:
    # Over all groups with samples to compare.
    compared = [row for row in values if len(row) > 1]
    return float(_deviation(np.concatenate([*compared, np.zeros(0)]), rule.estimator.std_ddof))


def _metrics(
    counted_B: list[Floats], rewards: list[Floats], stds_B: Floats, ddof: int
) -> dict[str, float]:
    # Of each group, the advantages that count: of completions with a reward, or of their tokens.
    silent = [not teaches(values) for values in counted_B]
    metrics = {"groups_without_signal": float(sum(silent))}
    every = np.concatenate([*rewards, np.zeros(0)])
    if not len(every):
        return metrics
    values = np.concatenate(counted_B)
    metrics |= {
        "advantages/mean": float(values.mean()),
        "advantages/max": float(values.max()),
        "advantages/min": float(values.min()),
        "advantages/std": float(values.std()),
        "advantages/sum": float(values.sum()),
        "reward": _mean(every),
        "reward_std": float(_deviation(every, ddof)),
    }
    is_compared = np.array([len(row) > 1 for row in rewards])
    if is_compared.any():
        metrics["reward_group_std"] = float(stds_B[is_compared].mean())
        metrics["frac_reward_zero_std"] = float((stds_B[is_compared] == 0.0).mean())
    if np.isin(every, (0.0, 1.0)).all():
        scored = [row for row in rewards if len(row)]
        all_0 = 100.0 * float(np.mean([(row == 0.0).all() for row in scored]))
        all_1 = 100.0 * float(np.mean([(row == 1.0).all() for row in scored]))
        metrics["baseline_reward/pct_0"] = all_0
        metrics["baseline_reward/pct_1"] = all_1
        metrics["baseline_reward/pct_mixed"] = 100.0 - all_0 - all_1
    return metrics


# What replaces the advantages of turns, and what leaves completions out of the loss.

_THOUGHT = re.compile(r"</?think>")


def is_malformed_thinking(text: str) -> bool:
    """Report whether the `<think>` and `</think>` of a turn are not one pair in order.

    A turn without any is well-formed, and so is one that only closes what its prompt has opened.
    """
    tags = _THOUGHT.findall(text)
    return tags not in ([], ["</think>"], ["<think>", "</think>"])


def penalize_turns(
    advantages: Advantages, groups: Sequence[RolloutGroup], config: GRPOConfig
) -> Advantages:
    """Return advantages in which malformed turns have those of the configuration.

    These are `malformed_thinking_advantage` and `invalid_tool_call_advantage`, clipped like others.
    The metrics `turns/malformed_thinking` and `turns/invalid_tool_call` are shares of the turns.
    """
    thinking, calling = config.malformed_thinking_advantage, config.invalid_tool_call_advantage
    if thinking is None and calling is None:
        return advantages
    low, high = config.advantage_clip_low, config.advantage_clip_high
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    tokens_BGL, values_BG = list[list[Floats]](), list[Floats]()
    counts = Counter[str]()
    for b, (group, values_G) in enumerate(zip(groups, advantages.values_BG, strict=True)):
        values_G, tokens_GL = values_G.copy(), list[Floats]()
        for g, rollout in enumerate(group.rollouts_G):
            if advantages.tokens_BGL is None:
                values_L = np.full(len(rollout.mask_L), values_G[g])
            else:
                values_L = advantages.tokens_BGL[b][g].copy()
            for turn, (text, own_L) in enumerate(_turns(rollout)):
                is_malformed, is_invalid = (
                    is_malformed_thinking(text),
                    turn in rollout.invalid_turns,
                )
                counts.update(turns=1, thinking=is_malformed, calling=is_invalid)
                instead = calling if is_invalid and calling is not None else None
                if instead is None and is_malformed:
                    instead = thinking
                if instead is not None:
                    values_L[own_L] = np.clip(instead, low, high)
            tokens_GL.append(values_L)
            if rollout.mask_L.any():
                values_G[g] = values_L[rollout.mask_L].mean()
        tokens_BGL.append(tokens_GL)
        values_BG.append(values_G)
    shares = {"malformed_thinking": counts["thinking"], "invalid_tool_call": counts["calling"]}
    metrics = {f"turns/{name}": n / max(counts["turns"], 1) for name, n in shares.items()}
    return Advantages(
        values_BG=values_BG, tokens_BGL=tokens_BGL, metrics=advantages.metrics | metrics
    )


def _turns(rollout: Rollout) -> list[tuple[str, Mask]]:
    # The text of each of the policy's turns, and which of all tokens it sampled in it.
    if not rollout.turns:
        said = [message.content for message in rollout.messages if message.role == "assistant"]
        return [("".join(said), rollout.mask_L)]
    at_L = np.arange(len(rollout.mask_L))
    return [
        (rollout.messages[one.message].content, (one.begin <= at_L) & (at_L < one.end))
        for one in rollout.turns
    ]


def sequence_errors(
    groups: Sequence[RolloutGroup], old_BG: Sequence[Sequence[LogProbs]]
) -> list[list[float]]:
    """Return how far generator and learner are apart about each completion, 1 where they agree.

    It is the mean of `e^|old - behaviour|` over the policy's tokens, as of
    `grpo.seq_logprob_error_threshold`; NaN if a log-probability is not finite, 1 without a token.
    """
    return [
        [
            _error(rollout.logprobs_L[rollout.mask_L], old_L[rollout.mask_L])
            for rollout, old_L in zip(group.rollouts_G, old_GL, strict=True)
        ]
        for group, old_GL in zip(groups, old_BG, strict=True)
    ]


def _error(behaviour_U: LogProbs, old_U: LogProbs) -> float:
    if not len(old_U):
        return 1.0
    apart_U = np.abs(old_U.astype(np.float64) - behaviour_U.astype(np.float64))
    if not np.isfinite(apart_U).all():
        return math.nan
    return float(np.exp(np.minimum(apart_U, 20.0)).mean())  # `policy_loss.LIMIT`, without torch


def leave_out_mismatched(
    used_BG: Sequence[Sequence[bool]], errors_BG: Sequence[Sequence[float]], *, threshold: float
) -> tuple[list[list[bool]], dict[str, float]]:
    """Return which completions the loss still uses, and metrics of their `sequence_errors`.

    Those whose error is above the threshold, or NaN, are left out. The metrics are
    `max_seq_mult_prob_error`, of all that are finite, and `num_masked_seqs_by_logprob_error`, the
    number that is left out for this reason alone.
    """
    kept_BG = [
        [used and error <= threshold for used, error in zip(*rows, strict=True)]
        for rows in zip(used_BG, errors_BG, strict=True)
    ]
    num_masked = sum(map(sum, used_BG)) - sum(map(sum, kept_BG))
    metrics = {"num_masked_seqs_by_logprob_error": float(num_masked)}
    if finite := [error for row in errors_BG for error in row if math.isfinite(error)]:
        metrics["max_seq_mult_prob_error"] = max(finite)
    return kept_BG, metrics


# What happens to a reward between the environment and the advantages.
#
# The order is: `reward_scaling`, then `reward_shaping`, then, if configured, the KL divergence from
# the reference policy is subtracted. Rollouts keep the reward that their environment gave.


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedRewards:
    """The rewards from which advantages are computed, after scaling, shaping and filtering."""

    rewards_BG: list[list[float | None]]
    """The reward of each completion; None if it failed, or if `overlong_filtering` excludes it."""
    metrics: dict[str, float]
    """`reward_scaling/clamped_fraction` and `reward_shaping/{penalty_mean,penalized_fraction}`
    over the completions with a reward, and `overlong_filtered`, the number that is excluded."""


def scaled(reward: float, config: RewardScalingConfig) -> float:
    """Clip a reward to the configured source range, and map it linearly to the target range."""
    cut = min(max(reward, config.source_min), config.source_max)
    share = (cut - config.source_min) / (config.source_max - config.source_min)
    return config.target_min + share * (config.target_max - config.target_min)


def slope(config: RewardScalingConfig) -> float:
    """Return the factor by which `scaled` stretches differences of rewards; 1 if scaling is off."""
    if not config.enabled:
        return 1.0
    width = config.target_max - config.target_min
    return abs(width) / (config.source_max - config.source_min)


def overlong_penalty(num_tokens: int, config: RewardShapingConfig, *, longest: int) -> float:
    """Compute the penalty for a completion's length (DAPO, arXiv 2503.14476), which is at least 0.

    The penalty is 0 up to `max_response_length - overlong_buffer_length` tokens. Beyond that it is
    linear: `overlong_buffer_penalty` at `max_response_length` and, as in NeMo RL, larger beyond.

    Args:
        longest: The value of `max_response_length` if the section sets none.
    """
    limit = config.max_response_length or longest
    excess = num_tokens - (limit - config.overlong_buffer_length)
    return max(excess / config.overlong_buffer_length * config.overlong_buffer_penalty, 0.0)


def stopped_improperly(reward: float, *, coefficient: float) -> float:
    """Return the reduced reward of a truncated completion.

    A positive reward is multiplied by `coefficient`. A negative reward is divided by
    `max(coefficient, 0.5)`, because multiplying would raise it.
    """
    if reward > 0.0:
        return coefficient * reward
    return reward / max(coefficient, 0.5)


def shaped(rollout: Rollout, reward: float, config: RewardShapingConfig, *, longest: int) -> float:
    """Return the reward of a rollout after `grpo.reward_shaping`.

    If `stop_properly_penalty_coef` is set, truncated completions are reduced by
    `stopped_improperly`, and others keep their reward. Otherwise the result is the reward minus the
    `overlong_penalty`, which also describes `longest`.
    """
    if config.stop_properly_penalty_coef is None:
        num_tokens = int(rollout.mask_L.sum())
        return reward - overlong_penalty(num_tokens, config, longest=longest)
    if not rollout.truncated:
        return reward
    return stopped_improperly(reward, coefficient=config.stop_properly_penalty_coef)


def shape_rewards(
    groups: Sequence[RolloutGroup], config: GRPOConfig, *, longest: int
) -> ShapedRewards:
    """Return rewards after `reward_scaling`, `reward_shaping` and `overlong_filtering`.

    Args:
        longest: The value of `max_response_length` if the section sets none.
    """
    rewards_BG, penalties = list[list[float | None]](), list[float]()
    num_clamped = num_filtered = 0
    scaling = config.reward_scaling
    for group in groups:
        row_G = list[float | None]()
        for rollout in group.rollouts_G:
            reward = rollout.reward
            if reward is not None and config.overlong_filtering and rollout.truncated:
                num_filtered += 1
                reward = None
            if reward is not None:
                if scaling.enabled:
                    num_clamped += not scaling.source_min <= reward <= scaling.source_max
                    reward = scaled(reward, scaling)
                before = reward
                if config.reward_shaping.enabled:
                    reward = shaped(rollout, reward, config.reward_shaping, longest=longest)
                penalties.append(before - reward)
            row_G.append(reward)
        rewards_BG.append(row_G)
    metrics = dict[str, float]()
    if config.overlong_filtering:
        metrics["overlong_filtered"] = float(num_filtered)
    if scaling.enabled and penalties:
        metrics["reward_scaling/clamped_fraction"] = num_clamped / len(penalties)
    if config.reward_shaping.enabled and penalties:
        metrics["reward_shaping/penalty_mean"] = float(np.mean(penalties))
        metrics["reward_shaping/penalized_fraction"] = float(np.mean(np.array(penalties) > 0.0))
    return ShapedRewards(rewards_BG=rewards_BG, metrics=metrics)


def greedy_rewards(
    groups: Sequence[RolloutGroup], config: GRPOConfig, *, longest: int
) -> list[float | None]:
    """Return the reward of each group's greedy completion, scaled and shaped like the others'.

    It is None where there is none, or it failed or is left out.
    """
    alone = [
        replace(group, rollouts_G=() if group.greedy is None else (group.greedy,))
        for group in groups
    ]
    shaped = shape_rewards(alone, config, longest=longest).rewards_BG
    return [row[0] if row else None for row in shaped]


def completion_divergence(
    policy_L: LogProbs, reference_L: LogProbs, mask_L: Mask, config: PolicyLossConfig
) -> float:
    """Estimate the KL divergence of the policy from the reference policy on one completion.

    The result is the sum over the policy's tokens of the clamped estimator that
    `reference_policy_kl_type` names; `reference_policy_kl_penalty` is not applied. Only the
    estimator k1 is unbiased here, and k1 can be negative. The result is NaN if a log-probability is
    not finite.

    Args:
        policy_L: Log-probabilities under the policy that sampled the completion.
        reference_L: Log-probabilities under the reference policy.
        mask_L: True for tokens of the policy; the other tokens are ignored.
    """
    given = reference_L[mask_L].astype(np.float64), policy_L[mask_L].astype(np.float64)
    if not np.isfinite(given).all():
        return math.nan
    lead = given[0] - given[1]
    if config.kl_input_clamp_value is not None:
        lead = np.clip(lead, -config.kl_input_clamp_value, config.kl_input_clamp_value)
    if config.reference_policy_kl_type == "k1":
        values = -lead
    elif config.reference_policy_kl_type == "k2":
        values = np.square(lead) / 2.0
    else:
        lead = np.minimum(lead, 20.0)  # `policy_loss.LIMIT`, without torch
        values = np.expm1(lead) - lead
    if config.kl_output_clamp_value is not None:
        values = np.clip(values, -config.kl_output_clamp_value, config.kl_output_clamp_value)
    return float(values.sum())


def fail_without_components(
    groups: Sequence[RolloutGroup], estimator: AdvantageConfig
) -> list[RolloutGroup]:
    """Return groups in which completions that lack a component of their reward have failed.

    Those that `reward_weights` names are compared, or those that most completions of the same
    environment have. A completion may lack one that was not finite.
    """
    samples: dict[str, list[Rollout]] = {}
    for group in groups:
        scored = [one for one in group.rollouts_G if one.reward is not None]
        samples.setdefault(group.task.environment, []).extend(scored)
    given = estimator.reward_weights
    wanted: dict[str, list[str]] = {}
    for name, those in samples.items():
        counts = Counter(key for one in those for key in one.components)
        wanted[name] = [
            key
            for key, count in sorted(counts.items())
            if 2 * count > len(those) and (not isinstance(given, dict) or key in given)
        ]

    def checked(rollout: Rollout, keys: Sequence[str]) -> Rollout:
        lacks = [key for key in keys if key not in rollout.components]
        if rollout.reward is None or not lacks:
            return rollout
        why = f"error: its reward has no finite component {lacks[0]!r}, which is compared"
        return replace(rollout, reward=None, failure=why)

    return [
        replace(
            group,
            rollouts_G=tuple(
                checked(one, wanted[group.task.environment]) for one in group.rollouts_G
            ),
        )
        for group in groups
    ]


NO_DIVERGENCE = "the divergence from the reference policy is not finite (loss_fn.use_kl_in_reward)"


def fail_without_divergence(
    groups: Sequence[RolloutGroup], divergences_BG: Sequence[Sequence[float]]
) -> list[RolloutGroup]:
    """Return groups in which completions with a NaN or infinite KL divergence are marked as failed.

    A failed completion has the reward None and a `failure` that says why.
    """
    return [
        replace(
            group,
            rollouts_G=tuple(
                replace(rollout, reward=None, failure=NO_DIVERGENCE)
                if rollout.reward is not None and not math.isfinite(kl)
                else rollout
                for rollout, kl in zip(group.rollouts_G, divergences_G, strict=True)
            ),
        )
        for group, divergences_G in zip(groups, divergences_BG, strict=True)
    ]


def lacks_divergences(groups: Sequence[RolloutGroup]) -> bool:
    """Report whether all completions failed, some of them because of their KL divergence."""
    failures = [rollout.failure for group in groups for rollout in group.rollouts_G]
    return None not in failures and NO_DIVERGENCE in failures


def mean_divergence(
    rewards_BG: Sequence[Sequence[float | None]], divergences_BG: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Return the metric `kl_in_reward`, the mean KL divergence of the completions with a reward.

    The result is empty if no completion has a reward.
    """
    rows = zip(rewards_BG, divergences_BG, strict=True)
    counted = [kl for row in rows for reward, kl in zip(*row, strict=True) if reward is not None]
    return {"kl_in_reward": float(np.mean(counted))} if counted else {}


def subtract_divergences(
    rewards_BG: Sequence[Sequence[float | None]],
    divergences_BG: Sequence[Sequence[float]],
    *,
    weight: float,
) -> list[list[float | None]]:
    """Return each reward minus `weight` times its KL divergence; None stays None."""
    return [
        [None if reward is None else reward - weight * kl for reward, kl in zip(*rows, strict=True)]
        for rows in zip(rewards_BG, divergences_BG, strict=True)
    ]
