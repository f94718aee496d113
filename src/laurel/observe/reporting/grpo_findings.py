"""Rules for policies that learn from rewards: failures, spread, entropy, lengths, and hacking."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean

from laurel.observe.console import format_number
from laurel.observe.reporting.alarms import alarms_of
from laurel.observe.reporting.finding import MIN_STEPS, Finding, beginning, ending, variance
from laurel.observe.reporting.gold_course import gold_course
from laurel.observe.reporting.reward_range import standing
from laurel.observe.reporting.training_findings import is_success
from laurel.observe.run_record import RunRecord

_IN_WORDS = {"other": "for reasons of the environment's own, which stand in completions/"}
"""Reasons that do not say themselves what they are."""


def failed_rewards(record: RunRecord) -> Iterator[Finding]:
    """Completions that nobody could judge."""
    left_out = record.total("train/num_failures_left_out")
    num_failures = record.total("train/num_failures") + left_out
    turns = record.series("train/total_turns")
    each = record.series("train/avg_turns_per_sample")
    if not num_failures or turns.steps != each.steps:
        return
    total = left_out + math.fsum(
        all_of / of_one for all_of, of_one in zip(turns.values, each.values, strict=True) if of_one
    )
    share = num_failures / total
    reasons = sorted(
        ((record.total(name), name.removeprefix("train/reward/failed_"))
         for name in record.names() if name.startswith("train/reward/failed_")),
        reverse=True,
    )  # fmt: skip
    most = ", ".join(f"{count:,.0f} {_IN_WORDS.get(reason, reason)}"
                     for count, reason in reasons[:3] if count)  # fmt: skip
    yield Finding(
        weight="bad" if share > 0.05 else "look",
        text=f"{num_failures:,.0f} of {total:,.0f} completions got no reward ({100 * share:.2g}%"
        f"{': ' + most if most else ''}). They were masked, not counted as 0.",
    )


def groups_without_spread(record: RunRecord) -> Iterator[Finding]:
    """Groups whose completions all got the same reward teach nothing."""
    share = record.series("train/frac_reward_zero_std")
    if not share:
        return
    last = fmean(ending(share))
    if last > 0.5 and any(
        a.until is None and is_success(a, record) for a in alarms_of(record.health)
    ):
        return  # which is told there
    if last > 0.5:
        gold = gold_course(record)
        is_solved = standing(record) == "top" and not (gold and gold.is_lower)
        solved = record.series("train/baseline_reward/pct_1")
        which = ""
        if solved:
            which = f", and {fmean(ending(solved)):.0f}% of all groups were all right"
        yield Finding(
            weight="good" if is_solved else "look",
            text=f"In {last:.0%} of the groups of the last steps all completions got the same "
            f"reward{which}: nothing is learned from such a group. "
            + (
                "The reward is at the top of what was seen: harder tasks, or the end of the run."
                if is_solved
                else "Harder or easier tasks, a higher temperature, or grpo.use_dynamic_sampling."
            ),
        )


def cut_off(record: RunRecord) -> Iterator[Finding]:
    """Completions that hit the limit."""
    share = record.series("train/truncation_rate")
    if share and (last := fmean(ending(share))) > 0.2:
        yield Finding(
            weight="look",
            text=f"{last:.0%} of the completions of the last steps were cut off. A larger "
            "policy.generation.max_new_tokens, or overlong filtering.",
        )


def entropy_collapse(record: RunRecord) -> Iterator[Finding]:
    """A policy that says the same over and over."""
    for name in ("train/entropy", "train/approx_entropy"):
        entropy = record.series(name)
        if len(entropy.values) < MIN_STEPS:
            continue
        first, last = fmean(beginning(entropy)), fmean(ending(entropy))
        if first > 0 and last < 0.2 * first:
            yield Finding(
                weight="look",
                text=f"Entropy fell to {last / first:.0%} of what it was ({format_number(first)} "
                f"to {format_number(last)} nats per token): the policy hardly explores any more. "
                "A KL penalty, or a larger upper clip bound (loss_fn.ratio_clip_max).",
            )
        return


def gold_fell(record: RunRecord) -> Iterator[Finding]:
    """What is really wanted, which the policy is not rewarded by: the first thing to know."""
    gold = gold_course(record)
    if gold is None:
        return
    reward = record.series("train/reward")
    beside = ""
    if len(reward.values) > 1:
        first, last = fmean(beginning(reward)), fmean(ending(reward))
        beside = (
            f", while the reward {'rose' if last > first else 'went'} from {format_number(first)} "
            f"to {format_number(last)}"
        )
    if gold.fell:
        yield Finding(
            weight="bad",
            text=f"The gold metric {gold.name} fell from {format_number(gold.peak)} at step "
            f"{gold.peak_step:,.0f} to {format_number(gold.last)} at the end{beside}: the policy "
            "pleases the reward, not what is wanted. Read the samples with the highest reward. The "
            f"checkpoint nearest to step {gold.peak_step:,.0f} is likely the better model.",
        )
    elif gold.is_lower:
        yield Finding(
            weight="look",
            text=f"The gold metric {gold.name} did not rise: {format_number(gold.first)} at first, "
            f"{format_number(gold.last)} at the end{beside}.",
        )
    else:
        yield Finding(
            weight="good",
            text=f"The gold metric {gold.name} went from {format_number(gold.first)} to "
            f"{format_number(gold.last)}, and has not fallen{beside}.",
        )


def reward_without_success(record: RunRecord) -> Iterator[Finding]:
    """Reward that rises while the truth falls, and reward that does not rise at all."""
    reward = record.series("train/reward")
    if record.kind != "grpo" or len(reward.values) < MIN_STEPS:
        return
    first, last = beginning(reward), ending(reward)
    noise = 2 * math.sqrt(variance(first) / len(first) + variance(last) / len(last))
    change = fmean(last) - fmean(first)
    said = f"from {format_number(fmean(first))} to {format_number(fmean(last))}"
    truth = record.series("validation/accuracy")
    if change > noise and len(truth.values) > 1 and truth.values[-1] < truth.values[0] - 0.02:
        yield Finding(
            weight="bad",
            text=f"The reward rose ({said}) while success in validation fell from "
            f"{truth.values[0]:.1%} to {truth.values[-1]:.1%}: the policy has learned to please "
            "the reward, not to be right. Read the samples with the highest reward.",
        )
    elif (gold := gold_course(record)) is not None and gold.is_lower:
        return  # which `gold_fell` has told, with the reward beside it
    elif change > noise:
        yield Finding(
            weight="good",
            text=f"The reward rose {said} (means of the first and the last tenth of the steps).",
        )
    elif standing(record) == "top":
        yield Finding(
            weight="good",
            text=f"The reward is at the top of what was seen and was so from the beginning ({said}"
            "): these tasks were solved before.",
        )
    else:
        yield Finding(
            weight="bad",
            text=f"The reward did not rise beyond its noise: {said} (means of the first and the "
            "last tenth of the steps; two standard errors of the difference are "
            f"{format_number(noise)}).",
        )


def lengths_grew(record: RunRecord) -> Iterator[Finding]:
    """Answers that get longer and longer."""
    lengths = record.series("train/mean_gen_tokens_per_sample")
    if len(lengths.values) < MIN_STEPS:
        return
    first, last = fmean(beginning(lengths)), fmean(ending(lengths))
    if first > 0 and not 0.5 <= last / first <= 2:
        yield Finding(
            weight="look",
            text=f"Completions went from {first:,.0f} to {last:,.0f} tokens. Is that what the "
            "task needs, or what the reward likes?",
        )


def sampler_mismatch(record: RunRecord) -> Iterator[Finding]:
    """The generator's probabilities beside the learner's."""
    error = record.series("train/gen_kl_error")
    if error and (last := fmean(ending(error))) > 0.01:
        yield Finding(
            weight="look",
            text=f"The generator and the learner differ by {format_number(last)} nats per token "
            "over the last steps (train/gen_kl_error): they should compute the same model. Look "
            "at precision and at the staleness of the weights.",
        )
