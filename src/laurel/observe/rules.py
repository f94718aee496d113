"""The rules over the metrics of a run: alarms while it runs, findings of its report.

An alarm's rule gives no result (None) if a metric that it reads is not measured, or not yet long
enough, or was not measured in the last step. Drifts compare the median of the latest window with
the first steps. Leaps compare the latest step alone with the window before it, at once and from the
second step on. `docs/reward_hacking.md` describes each alarm, its threshold, and remedies.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import pairwise
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import yaml

from laurel.config.grpo import Alarm, HealthConfig
from laurel.errors import counted
from laurel.observe.console import format_number
from laurel.observe.history import (
    CONTROL_TOKENS,
    FAILURES,
    LENGTH,
    LENGTH_CORRELATION,
    READ,
    REPETITION,
    REWARD,
    TRUNCATION,
    UPDATES,
    ZERO_SPREAD,
    History,
    Level,
    RecentValues,
    estimated_noise,
    gold_metric,
    inside,
    is_of_validation,
    spread_of_changes,
)
from laurel.observe.metrics import is_lower_better
from laurel.observe.run_record import RaisedAlarm, RunRecord, Series, alarms_of

# The thresholds of the rules (docs/reward_hacking.md has the rates that were measured with them).
# Where chance moves a metric further, `num_spreads` decides.

GOLD_DROP = 0.1
"""`overoptimisation`: the share of its peak that the gold metric lost while the reward did not."""
COLLAPSE_DROP = 0.5
"""`collapse`: the share of its peak that it lost, over two steps or more, with the reward."""
KL_JUMP = 3.0
"""`kl_jump`: the factor by which the divergence is larger than where the steps before led."""
KL_LEAST = 0.5
"""`kl_jump`: the smallest divergence that counts; nats a token, or a completion in the reward."""
LENGTH_FACTOR = 1.5
"""`length`: the factor by which completions are longer or shorter."""
LEAST_CORRELATION = 0.5
"""`length_bias`: the correlation of reward and length within groups, while lengths grow."""
SHARE_RISE = 0.2
"""`repetition` and `truncation`: by how much the share has risen."""
CONTROL_TOKEN_RISE = 0.05
"""`control_tokens`: likewise."""
FORMAT_DROP = 0.1
"""`format`: by how much the metric has fallen."""
EQUAL_SHARE = 0.9
"""`zero_spread_groups`: the share of groups whose rewards are all equal."""
DISAGREEMENT = 1.0
"""`ensemble`: how far apart gains are, in standard deviations of the first scores."""
FAILED_SHARE = 0.1
"""`failures`: the share of completions without a reward."""

_of = format_number

Evidence = Literal[
    "best",
    "worst",
    "longest",
    "shortest",
    "repetitive",
    "control_tokens",
    "cut_off",
    "equal",
    "failed",
]
"""The completions that illustrate an alarm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmFinding:
    """The result of a rule at one step."""

    is_bad: bool
    metric: str
    value: float
    """The value of the metric over the latest window."""
    threshold: float
    """The value of the metric from which on the finding is bad."""
    text: str
    """The finding in words, with its numbers."""
    baseline: float | None = None
    """The value with which the metric is compared."""
    evidence: Evidence = "best"


def _beyond(history: History, step: RecentValues, least: float) -> float:
    """Return how far a value must lie from earlier values to be more than a chance leap."""
    if step.spread is None:
        return 2 * least  # too few values to estimate their noise
    return max(least, 1.5 * history.config.num_spreads * step.spread)


def _first_bad(*found: AlarmFinding | None) -> AlarmFinding | None:
    said = [one for one in found if one is not None]
    return next((one for one in said if one.is_bad), said[0] if said else None)


def overoptimisation(history: History) -> AlarmFinding | None:
    """Check whether the gold metric is below its peak, though the reward is not.

    A policy that is trained against a proxy first gains in the gold metric and later loses, as a
    function of the root of its KL divergence from its start (Gao, Schulman and Hilton, arXiv
    2210.10760).
    """
    found = _falls_of_gold(history, GOLD_DROP, least_steps=1)
    return _first_bad(*[replace(fall, is_bad=fall.is_bad and is_paid) for fall, is_paid in found])


def collapse(history: History) -> AlarmFinding | None:
    """Check whether the gold metric is far below its peak, and the reward with it.

    Nothing is gamed then: an update was bad, or the policy returned to its reference. A single bad
    step, after which all is well again, is no collapse.
    """
    found = _falls_of_gold(history, COLLAPSE_DROP, least_steps=2)
    return _first_bad(
        *[
            replace(fall, is_bad=fall.is_bad and not is_paid, evidence="worst")
            for fall, is_paid in found
        ]
    )


def _falls_of_gold(
    history: History, drop: float, *, least_steps: int
) -> list[tuple[AlarmFinding, bool]]:
    """Compare the gold metric with its peak, over the latest step, two, ... up to a window.

    It may lose all within a step, or little by little: the more steps are compared, the smaller is
    the fall that chance does not explain.

    Args:
        drop: The share of its peak that gold has to lose.
        least_steps: The least number of steps that are compared.

    Returns:
        For each number of steps whether gold has fallen, and whether that was paid for.
    """
    name, peak = history.gold_name, history.peak
    if name is None or peak is None or not history.is_fresh(name):
        return []
    num_values, window = len(history.latest(name)), history.gold_window
    counts: Sequence[int] = range(min(window, num_values - 1), least_steps - 1, -1)
    if is_of_validation(name):  # one of few, alone, may be chance
        counts = [window] if num_values >= window else []
    found = [_gold_fell(history, peak, count, drop) for count in counts]
    return [one for one in found if one is not None]


def _gold_fell(
    history: History, peak: Level, count: int, drop: float
) -> tuple[AlarmFinding, bool] | None:
    """Compare the last `count` values of the gold metric with its peak.

    A fall is paid for where the reward has not fallen too, and where the divergence, if it is
    measured, has not shrunk since: a policy that returns to its reference has another problem.
    """
    config, name = history.config, history.gold_name or ""
    level, noise = history.gold_level(count), history.gold_noise(but_last=count)
    if level is None or noise is None:
        return None
    each = math.sqrt(1 / level.count + 1 / peak.count)
    rewards = history.latest(REWARD)
    of_reward = estimated_noise(rewards[: len(rewards) - count])
    slack = 0.0 if of_reward is None or is_of_validation(name) else 2 * of_reward.unit * each
    has_paid = level.reward >= peak.reward - slack
    away, before = level.divergence, peak.divergence
    has_left = away is None or before is None or away >= before
    # As in a test of two shares, noise is that of the level of both together.
    both = (peak.gold * peak.count + level.gold * count) / (peak.count + count)
    chance = config.num_spreads * noise.at(both) * each
    threshold = peak.gold - max(drop * abs(peak.gold), chance)
    text = (
        f"{name} has been {_of(peak.gold)} and is {_of(level.gold)} now, while the reward went "
        f"from {_of(peak.reward)} to {_of(level.reward)}"
    )
    if away is not None and before is not None:
        text += f" and the divergence from the reference from {_of(before)} to {_of(away)}"
    finding = AlarmFinding(
        is_bad=level.gold < threshold,
        metric=name,
        value=level.gold,
        threshold=threshold,
        baseline=peak.gold,
        text=text,
    )
    return finding, has_paid and has_left


def kl_jump(history: History) -> AlarmFinding | None:
    """Check whether the policy leapt away from the reference in one step, and was paid for it.

    A divergence grows as the square of a distance: a policy that leaves the reference at a constant
    speed has 4 times the divergence at its second step and 2.25 times at its third, whatever its
    learning rate is. So the divergence is compared with the one to which the speed of the steps
    before leads, in the root of the divergence. Where the reward fell in the same step, the leap
    was a bad update, which the reward shows.
    """
    config, name = history.config, history.divergence()
    if name is None or not history.is_fresh(name):
        return None
    *before, value = history.latest(name)[-config.window - 1 :]
    if not before:
        return None
    distances = [math.sqrt(max(0.0, one)) for one in before]
    speeds = [after - earlier for earlier, after in pairwise(distances)]
    speed = max(0.0, statistics.median(speeds)) if speeds else 0.0
    expected = (max(distances) + speed) ** 2
    threshold = max(KL_LEAST, KL_JUMP * expected)
    reward = history.step(REWARD)
    is_paid = reward is None or reward.value >= reward.before
    return AlarmFinding(
        is_bad=value >= threshold and is_paid,
        metric=name,
        value=value,
        threshold=threshold,
        baseline=expected,
        text=f"{name} is {_of(value)}, and the steps before led to {_of(expected)}",
    )


def length(history: History) -> AlarmFinding | None:
    """Check whether completions are much longer, or much shorter, than before.

    Length is the most common way to a higher score without better answers (Singhal et al., arXiv
    2310.03716). It is no problem if the policy learns to reason longer.
    """
    config, factor = history.config, LENGTH_FACTOR
    found: list[AlarmFinding] = []

    def compare(value: float, before: float, above: float, below: float, when: str) -> None:
        is_longer = value >= before
        found.append(
            AlarmFinding(
                is_bad=value != before and (value >= above if is_longer else value <= below),
                metric=LENGTH,
                value=value,
                threshold=above if is_longer else below,
                baseline=before,
                text=f"completions had {_of(before)} tokens in the {when} and have {_of(value)} "
                "now",
                evidence="longest" if is_longer else "shortest",
            )
        )

    if (step := history.step(LENGTH)) is not None:
        above = step.before + _beyond(history, step, step.before * (factor - 1))
        fall = step.before * (1 - 1 / factor**2)  # twice the fall may exceed the whole length
        if step.spread is not None:
            fall = _beyond(history, step, step.before * (1 - 1 / factor))
        compare(step.value, step.before, above, step.before - fall, "steps before")
    baseline, now = history.baseline(LENGTH), history.now(LENGTH)
    if baseline is not None and now is not None and history.is_fresh(LENGTH):
        usual, margin = baseline.median, config.num_spreads * baseline.spread
        above, below = max(usual * factor, usual + margin), min(usual / factor, usual - margin)
        compare(now, usual, above, below, "first steps")
    return _first_bad(*found)


def length_bias(history: History) -> AlarmFinding | None:
    """Check whether longer completions get better rewards within groups while lengths grow.

    A correlation alone means little, because truncated answers are wrong in any task. Together with
    growing lengths it shows that the policy learns to write more.
    """
    name, config = LENGTH_CORRELATION, history.config
    baseline, length_now, now = history.baseline(LENGTH), history.now(LENGTH), history.now(name)
    if baseline is None or length_now is None or now is None or not history.is_fresh(name):
        return None
    # Half the growth that raises an alarm by itself suffices, because two conditions must hold.
    grows = length_now > baseline.median + config.num_spreads / 2 * baseline.spread
    return AlarmFinding(
        is_bad=grows and now >= LEAST_CORRELATION,
        metric=name,
        value=now,
        threshold=LEAST_CORRELATION,
        text=f"reward and length correlate by {_of(now)} within groups, and completions grew from "
        f"{_of(baseline.median)} to {_of(length_now)} tokens",
        evidence="longest",
    )


def _risen(
    history: History, name: str, rise: float, what: str, evidence: Evidence
) -> AlarmFinding | None:
    """Check whether a share rose, in one step or since the first steps."""
    found: list[AlarmFinding] = []

    def compare(value: float, before: float, least: float, when: str) -> None:
        found.append(
            AlarmFinding(
                is_bad=value >= before + least,
                metric=name,
                value=value,
                threshold=before + least,
                baseline=before,
                text=f"{what}: {_of(before)} in the {when}, {_of(value)} now",
                evidence=evidence,
            )
        )

    if (step := history.step(name)) is not None:
        compare(step.value, step.before, _beyond(history, step, rise), "steps before")
    baseline, now = history.baseline(name), history.now(name)
    if baseline is not None and now is not None and history.is_fresh(name):
        least = max(rise, history.config.num_spreads * baseline.spread)
        compare(now, baseline.median, least, "first steps")
    return _first_bad(*found)


def repetition(history: History) -> AlarmFinding | None:
    """Check whether completions repeat themselves more than before; None if data is missing."""
    what = "share of 4-grams that a completion has already said"
    return _risen(history, REPETITION, SHARE_RISE, what, "repetitive")


def truncation(history: History) -> AlarmFinding | None:
    """Check whether more completions are cut at the length limit."""
    what = "share of completions without an end"
    return _risen(history, TRUNCATION, SHARE_RISE, what, "cut_off")


def control_tokens(history: History) -> AlarmFinding | None:
    """Check whether more completions spell control tokens, which would forge a turn to a judge."""
    what = "share of completions that spell a control token as text"
    return _risen(history, CONTROL_TOKENS, CONTROL_TOKEN_RISE, what, "control_tokens")


def keeps_format(history: History) -> AlarmFinding | None:
    """Check whether fewer completions have the required format."""
    config, name = history.config, history.config.format_metric
    if name is None or not history.is_fresh(name):
        return None
    baseline, now = history.baseline(name), history.now(name)
    if baseline is None or now is None:
        return None
    threshold = baseline.median - max(FORMAT_DROP, config.num_spreads * baseline.spread)
    return AlarmFinding(
        is_bad=now <= threshold,
        metric=name,
        value=now,
        threshold=threshold,
        baseline=baseline.median,
        evidence="worst",
        text=f"{name} was {_of(baseline.median)} in the first steps and is {_of(now)} now",
    )


def _too_large(
    history: History, name: str, share: float, what: str, evidence: Evidence
) -> AlarmFinding | None:
    # Such a share is bad whatever it was in the first steps.
    now = history.now(name)
    if now is None or not history.is_fresh(name):
        return None
    return AlarmFinding(
        is_bad=now >= share,
        metric=name,
        value=now,
        threshold=share,
        text=f"{what}: {_of(now)}",
        evidence=evidence,
    )


def zero_spread_groups(history: History) -> AlarmFinding | None:
    """Check whether most groups have equal rewards, from which nothing is learned."""
    what = "share of groups whose rewards are all equal"
    found = _too_large(history, ZERO_SPREAD, EQUAL_SHARE, what, "equal")
    reward = history.now(REWARD)
    if found is None or reward is None:
        return found
    # The reward shows whether the tasks are solved or hopeless.
    return replace(found, text=f"{found.text}; the mean reward is {_of(reward)}")


def no_updates(history: History) -> AlarmFinding | None:
    """Check whether no step of a window has changed the policy, whatever the reason."""
    most = history.most(UPDATES)
    if most is None or not history.is_fresh(UPDATES):
        return None
    return AlarmFinding(
        is_bad=most <= 0,
        metric=UPDATES,
        value=most,
        threshold=0.0,
        text=f"in {history.config.window} steps no group had a signal: the policy did not change",
        evidence="equal",
    )


def missing_rewards(history: History) -> AlarmFinding | None:
    """Check whether many completions have no reward: they are masked, which biases the rest."""
    what = "share of completions without a reward"
    return _too_large(history, FAILURES, FAILED_SHARE, what, "failed")


def ensemble(history: History) -> AlarmFinding | None:
    """Check whether reward models disagree on how much better the completions have become.

    Models that were trained separately agree on real progress, and disagree if the policy exploits
    one of them (Coste et al., arXiv 2310.02743). The gain of each model is measured in standard
    deviations of its own scores in the first steps.
    """
    found: list[AlarmFinding] = []
    for stems in history.ensembles():
        gains: dict[str, float] = {}
        for stem in stems:
            mean, std = history.baseline(f"{stem}/mean"), history.baseline(f"{stem}/std")
            now = history.now(f"{stem}/mean")
            if mean is None or std is None or now is None or not history.is_fresh(f"{stem}/mean"):
                continue
            if std.median > 0.0:
                gains[stem] = (now - mean.median) / std.median
        if len(gains) < 2:
            continue
        most, least = max(gains, key=gains.__getitem__), min(gains, key=gains.__getitem__)
        # Gains are compared, because the scores of the models differ in scale and in mean.
        apart = gains[most] - gains[least]
        found.append(
            AlarmFinding(
                is_bad=apart >= DISAGREEMENT,
                metric=f"{most}/mean",
                value=apart,
                threshold=DISAGREEMENT,
                text=f"{most} has gained {_of(gains[most])} standard deviations since the first "
                f"steps, {least} {_of(gains[least])}",
            )
        )
    return max(found, key=lambda one: one.value, default=None)


Weight = Literal["bad", "look", "good", "note"]
"""The weight of a finding: a problem, a possible problem, a good sign, or a plain fact."""

MIN_STEPS = 20
"""The minimum number of steps for which the beginning and the end of a curve are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinding:
    """A result of a rule, in one or two sentences."""

    weight: Weight
    text: str


def _bad(text: str) -> RunFinding:
    return RunFinding(weight="bad", text=text)


def _look(text: str) -> RunFinding:
    return RunFinding(weight="look", text=text)


def _good(text: str) -> RunFinding:
    return RunFinding(weight="good", text=text)


def beginning(series: Series) -> Sequence[float]:
    """Return the values of the first tenth of a curve."""
    return series.values[: max(1, len(series.values) // 10)]


def ending(series: Series) -> Sequence[float]:
    """Return the values of the last tenth of a curve."""
    return series.values[-max(1, len(series.values) // 10) :]


def _both_ends(series: Series) -> tuple[float, float] | None:
    """Return the means of the first and the last tenth of a curve; None if it is short."""
    if len(series.values) < MIN_STEPS:
        return None
    return fmean(beginning(series)), fmean(ending(series))


# Findings over a whole run that learns from rewards.

_IN_WORDS = {"other": "for reasons of the environment's own, which stand in completions/"}
"""Descriptions of reasons whose names do not explain themselves."""


def failed_rewards(record: RunRecord) -> Iterator[RunFinding]:
    """Report completions that could not be scored."""
    left_out = record.total("train/num_failures_left_out")
    num_failures = record.total("train/num_failures") + left_out
    # The number of completions is not logged; that of turns, and turns per completion, are.
    turns = record.series("train/total_turns")
    each = record.series("train/avg_turns_per_sample")
    if not num_failures or turns.steps != each.steps:
        return
    total = left_out + math.fsum(
        all_of / of_one for all_of, of_one in zip(turns.values, each.values, strict=True) if of_one
    )
    share = num_failures / total
    reasons = sorted(
        (
            (record.total(name), name.removeprefix("train/reward/failed_"))
            for name in record.names()
            if name.startswith("train/reward/failed_")
        ),
        reverse=True,
    )
    most = ", ".join(
        f"{count:,.0f} {_IN_WORDS.get(reason, reason)}" for count, reason in reasons[:3] if count
    )
    yield RunFinding(
        weight="bad" if share > 0.05 else "look",
        text=f"{num_failures:,.0f} of {total:,.0f} completions got no reward ({100 * share:.2g}%"
        f"{': ' + most if most else ''}). They were masked, not counted as 0.",
    )


def never_updated(record: RunRecord) -> Iterator[RunFinding]:
    """Report a run of which no step changed the policy."""
    updates = record.series(UPDATES)
    if updates and not any(updates.values):
        yield _bad(
            f"The policy did not change: none of {counted(len(updates.values), 'step')} had a "
            "group with a signal. Its rewards are equal within every group (train/reward_std), "
            "differ by less than their noise, or are missing (train/num_failures).",
        )


def groups_without_spread(record: RunRecord) -> Iterator[RunFinding]:
    """Report groups whose completions all got the same reward, from which nothing is learned."""
    share = record.series("train/frac_reward_zero_std")
    if not share:
        return
    last = fmean(ending(share))
    if last > 0.5 and any(
        a.until is None and is_success(a, record) for a in alarms_of(record.health)
    ):
        return  # `alarms_going_on` reports it
    if last > 0.5:
        gold = gold_course(record)
        is_solved = standing(record) == "top" and not (gold and gold.is_lower)
        solved = record.series("train/baseline_reward/pct_1")
        which = ""
        if solved:
            which = f", and {fmean(ending(solved)):.0f}% of all groups were all right"
        said = f"in {last:.0%} of the groups of the last steps all completions got the same reward"
        yield RunFinding(
            weight="good" if is_solved else "look",
            text=f"The reward is at the top of what was seen: {said}{which}. These tasks are "
            "solved, and only harder ones would teach more."
            if is_solved
            else f"I{said[1:]}{which}: nothing is learned from such a group. "
            "Harder or easier tasks, a higher temperature, or grpo.use_dynamic_sampling.",
        )


def cut_off(record: RunRecord) -> Iterator[RunFinding]:
    """Report completions that were cut at the length limit, or by the limit of turns."""
    share = record.series("train/truncation_rate")
    if share and (last := fmean(ending(share))) > 0.2:
        # Both kinds of end count as truncated; a run logs their numbers where there are any.
        by_turns, by_length = (
            fmean(ending(found)) if (found := record.series(f"train/unended_{name}")) else 0.0
            for name in ("out_of_turns", "cut_off")
        )
        yield _look(
            f"{last:.0%} of the conversations of the last steps did not end by themselves, "
            "most because they were out of turns. A larger grpo.max_rollout_turns."
            if by_turns > by_length
            else f"{last:.0%} of the completions of the last steps were cut off. A larger "
            "policy.generation.max_new_tokens, or overlong filtering.",
        )


def entropy_collapse(record: RunRecord) -> Iterator[RunFinding]:
    """Report a policy whose entropy collapsed."""
    for name in ("train/entropy", "train/approx_entropy"):
        if (ends := _both_ends(record.series(name))) is None:
            continue
        first, last = ends
        if first > 0 and last < 0.2 * first:
            yield _look(
                f"Entropy fell to {last / first:.0%} of what it was ({format_number(first)} "
                f"to {format_number(last)} nats per token): the policy hardly explores any more. "
                "A KL penalty, or a larger upper clip bound (loss_fn.ratio_clip_max).",
            )
        return


def gold_fell(record: RunRecord) -> Iterator[RunFinding]:
    """Report how the gold metric, on which the policy is not trained, changed."""
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
        yield _bad(
            f"The gold metric {gold.name} fell from {format_number(gold.peak)} at step "
            f"{gold.peak_step:,.0f} to {format_number(gold.last)} at the end{beside}: the policy "
            "pleases the reward, not what is wanted. Read the samples with the highest reward. The "
            f"checkpoint nearest to step {gold.peak_step:,.0f} is likely the better model.",
        )
    elif gold.is_lower:
        yield _look(
            f"The gold metric {gold.name} did not rise: {format_number(gold.first)} at first, "
            f"{format_number(gold.last)} at the end{beside}.",
        )
    else:
        yield _good(
            f"The gold metric {gold.name} went from {format_number(gold.first)} to "
            f"{format_number(gold.last)}, and has not fallen{beside}.",
        )


def reward_without_success(record: RunRecord) -> Iterator[RunFinding]:
    """Report a reward that rises while success falls, or that does not rise at all."""
    reward = record.series("train/reward")
    if record.kind != "grpo" or len(reward.values) < MIN_STEPS or any(never_updated(record)):
        return
    first, last = beginning(reward), ending(reward)
    # Two standard errors of the difference of the two means.
    noise = 2 * spread_of_changes(reward.values) * math.sqrt(1 / len(first) + 1 / len(last))
    change = fmean(last) - fmean(first)
    said = f"from {format_number(fmean(first))} to {format_number(fmean(last))}"
    # Two points of accuracy may be chance; a rise of the reward beyond its noise is not.
    truth = record.series("validation/accuracy")
    if change > noise and len(truth.values) > 1 and truth.values[-1] < truth.values[0] - 0.02:
        yield _bad(
            f"The reward rose ({said}) while success in validation fell from "
            f"{truth.values[0]:.1%} to {truth.values[-1]:.1%}: the policy has learned to please "
            "the reward, not to be right. Read the samples with the highest reward.",
        )
    elif (gold := gold_course(record)) is not None and gold.is_lower:
        return  # `gold_fell` reports it, with the reward beside it
    elif change > noise:
        yield _good(
            f"The reward rose {said} (means of the first and the last tenth of the steps).",
        )
    elif standing(record) == "top":
        yield _good(
            f"The reward is at the top of what was seen and was so from the beginning ({said}"
            "): these tasks were solved before.",
        )
    else:
        yield _bad(
            f"The reward did not rise beyond its noise: {said} (means of the first and the "
            "last tenth of the steps; two standard errors of the difference are "
            f"{format_number(noise)}).",
        )


MISMATCH = 0.01
"""Nats per token by which a generator and a learner with the same weights may differ."""
STALE = 0.1
"""The same for a generator whose weights are older, which is what `grpo.max_staleness` permits."""


def sampler_mismatch(record: RunRecord) -> Iterator[RunFinding]:
    """Report probabilities of the generator that differ from the learner's.

    With `grpo.max_staleness` they differ by the updates in between; only at the first step, before
    any update, are the weights the same.
    """
    error = record.series("train/gen_kl_error")
    if not error:
        return
    last, when = fmean(ending(error)), "over the last steps"
    alike, staleness = last, record.settings.get("grpo", {}).get("max_staleness", 0)
    if staleness:
        alike, when = error.values[0] if error.steps[0] == 1 else 0.0, "at step 1"
    if alike > MISMATCH:
        yield _look(
            f"The generator and the learner differ by {format_number(alike)} nats per token {when} "
            "(train/gen_kl_error): they should compute the same model. Look at precision.",
        )
    elif staleness and last > STALE:
        yield _look(
            f"The generator and the learner differ by {format_number(last)} nats per token "
            "over the last steps (train/gen_kl_error): the generator's weights are up to "
            f"{counted(staleness, 'step')} older. A smaller grpo.max_staleness or learning rate.",
        )


# Findings over any training: alarms, values that are not finite, gradients, validation, data.

_OF_ROWS = re.compile(r"(^|: )([\d,]+ rows? (?!of )|no row )")
"""The beginning of a note about rows; other notes are about the source of the data."""
JUMP = 10.0
"""The ratio to the median from which a gradient norm counts as a jump."""


def alarms_going_on(record: RunRecord) -> Iterator[RunFinding]:
    """Report the alarms that the run raised, and which of them have not ended."""
    alarms = alarms_of(record.health)
    for alarm in alarms:
        if alarm.until is None and is_success(alarm, record):
            reward = format_number(fmean(ending(record.series("train/reward"))))
            yield _good(
                f"Since step {alarm.since:,} nearly all groups have equal rewards, and the "
                f"reward ({reward}) is at the top of what was seen: these tasks are solved, and "
                f"nothing more is learned from them ({alarm.name}). Harder tasks, or the end of "
                "the run.",
            )
        elif alarm.until is None:
            advice = alarm.advice and alarm.advice[0].upper() + alarm.advice[1:]
            parts = [alarm.name, alarm.text, advice]
            said = " ".join(f"{part.rstrip('.')}." for part in parts if part)
            yield _bad(f"An alarm is still on since step {alarm.since:,}: {said}")
    if over := sum(alarm.until is not None for alarm in alarms):
        yield _look(
            f"Raised in the course of the run, and over by now: {over:,} "
            f"alarm{'' if over == 1 else 's'}.",
        )


def not_finite(record: RunRecord) -> Iterator[RunFinding]:
    """Report NaN and infinity, which no curve can show."""
    lost = {
        name: found
        for name in record.names()
        if name not in ("step", "time") and (found := record.not_finite(name))
    }
    if lost:
        worst = max(lost, key=lambda name: len(lost[name]))
        others = f"; {len(lost) - 1} other figures too" if len(lost) > 1 else ""
        yield _bad(
            f"{worst} was NaN or infinite at {counted(len(lost[worst]), 'step')}, first at step "
            f"{lost[worst][0]:,.0f}{others}. The curves leave such values out. Look at the data "
            "of that step, then at the learning rate and the precision.",
        )


def gradient_jumps(record: RunRecord) -> Iterator[RunFinding]:
    """Report steps at which the gradient was many times as large as usual."""
    # The first tenth does not count: a new model begins with large gradients.
    norms = record.series("train/grad_norm")
    if len(norms.values) < MIN_STEPS:
        return
    usual, begun = median(norms.values), len(norms.values) // 10
    jumps = [
        (value, step)
        for step, value in zip(norms.steps[begun:], norms.values[begun:], strict=True)
        if usual > 0 and value > JUMP * usual
    ]
    if jumps:
        value, step = max(jumps)
        count = counted(len(jumps), "step")
        yield _look(
            f"The norm of the gradient jumped: {format_number(value)} at step {step:,.0f}, "
            f"{value / usual:,.0f} times its median of {format_number(usual)}; {count} "
            f"lay above {JUMP:.0f} times the median. Look at the samples of such a step; a lower "
            "learning rate or policy.max_grad_norm holds it down.",
        )


def steps_lost(record: RunRecord) -> Iterator[RunFinding]:
    """Report optimizer steps that were not taken."""
    lost = [
        (
            "bad steps, of which nothing was applied",
            sum(value > 0 for value in record.series("train/bad_steps_in_a_row").values),
        ),
        (
            "steps with an update that was not applied",
            sum(v > 0 for v in record.series("train/optimizer_steps_not_applied").values),
        ),
    ]
    for what, count in lost:
        if count:
            yield _look(
                f"There were {count:,} {what}, of {record.num_steps:,}. Nothing was learned "
                "from their data.",
            )
            return


def validation_got_worse(record: RunRecord) -> Iterator[RunFinding]:
    """Report a last validation that is worse than the best by more than chance explains."""
    # A metric that equals another at every step, as the mean of rewards of 0 and 1 equals the
    # accuracy, is reported once.
    reported: list[Series] = []
    for name in sorted(record.names(), key=lambda name: not name.endswith("/accuracy")):
        figure = name.rpartition("/")[2]
        if not name.startswith("validation") or figure not in (
            "accuracy",
            "loss",
            "reward_mean",
            "top1",
        ):
            continue
        series = record.series(name)
        if len(series.values) < 2 or series in reported:
            continue
        reported.append(series)
        sign = -1.0 if is_lower_better(name) else 1.0
        best = max(range(len(series.values)), key=lambda i: sign * series.values[i])
        step = f"step {series.steps[best]:,.0f}"
        worse_by = sign * (series.values[best] - series.values[-1])
        if worse_by > _chance(record, name, series.values[best]):
            yield _bad(
                f"Validation got worse: {name} was {format_number(series.values[best])} at "
                f"{step} and is {format_number(series.values[-1])} at step "
                f"{series.steps[-1]:,.0f}. The checkpoint nearest to {step} is likely the better "
                "model.",
            )


def _chance(record: RunRecord, name: str, value: float) -> float:
    """Return the fall of a metric that chance explains, two standard errors if they are known."""
    section, _, figure = name.rpartition("/")
    counts = record.series(f"{section}/num_valid_samples").values
    if figure in ("accuracy", "top1"):
        if not counts:
            return 0.05
        # Two measurements of the same rows differ by less than those of different rows would.
        return max(0.01, 2 * math.sqrt(max(value * (1 - value), 0.01) / counts[-1]))
    if figure == "loss":
        return 0.03 * abs(value)
    spread = record.series(f"{section}/reward_std").values
    if not spread:
        return 0.1 * abs(value)
    return 2 * spread[-1] / math.sqrt(counts[-1]) if counts and counts[-1] else 0.1 * spread[-1]


def overfitting(record: RunRecord) -> Iterator[RunFinding]:
    """Report an accuracy in training far above that in validation."""
    training = record.series("train/accuracy")
    held = record.series("validation-default/accuracy")
    if len(training.values) < MIN_STEPS or not held:
        return
    seen = fmean(ending(training))
    if seen - held.values[-1] > 0.1:
        yield _look(
            f"Training is ahead of validation: accuracy {seen:.1%} over the last steps, "
            f"{held.values[-1]:.1%} in validation. Fewer epochs, a lower learning rate or more "
            "data.",
        )


def loss_did_not_fall(record: RunRecord) -> Iterator[RunFinding]:
    """Report a loss that did not fall."""
    # GRPO's loss says nothing about progress.
    ends = _both_ends(record.series("train/loss"))
    if record.kind not in ("rm", "sft") or ends is None:
        return
    first, last = ends
    if last > 0.98 * first:
        yield _bad(
            f"The loss did not fall: {format_number(first)} over the first steps, "
            f"{format_number(last)} over the last. Look at the learning rate, and at whether the "
            "data says what it should.",
        )


def data_left_out(record: RunRecord) -> Iterator[RunFinding]:
    """Report rows that were read but not used, and the notes of the data report."""
    for name, report in record.data.items():
        read, kept = report.get("rows_read"), report.get("rows_kept")
        counts = {
            reason.replace("_", " "): found.get("count", 0) if isinstance(found, dict) else found
            for reason, found in (report.get("rows_left_out") or {}).items()
        }
        reasons = {name: count if isinstance(count, int) else 0 for name, count in counts.items()}
        # Held-out rows are used in validation.
        held_out = reasons.pop("held out", 0)
        if isinstance(read, int) and isinstance(kept, int) and read:
            lost = read - kept - held_out
            if lost > 0.1 * read:
                most = sorted(reasons.items(), key=lambda item: -item[1])[:3]
                said = ", ".join(f"{count:,} {reason}" for reason, count in most)
                yield _look(
                    f"Data '{name}': {lost:,} of {counted(read, 'row')} "
                    f"{'was' if lost == 1 else 'were'} left out ({said}).",
                )
        for note in report.get("notes") or ():
            weight: Weight = "look" if _OF_ROWS.search(str(note)) else "note"
            yield RunFinding(weight=weight, text=f"Data '{name}': {note}.")


def against_length(record: RunRecord) -> Iterator[RunFinding]:
    """Compare a reward model's accuracy with that of a scorer by length."""
    for name in record.names():
        if not name.startswith("validation") or not name.endswith("/longer_wins_baseline"):
            continue
        section = name.rpartition("/")[0]
        accuracy, baseline = record.latest(f"{section}/accuracy"), record.latest(name)
        if accuracy is None or baseline is None:
            continue
        # A scorer that prefers the shorter answer has learned nothing more either.
        rival = max(baseline, 1 - baseline)
        rule = (
            "always taking the longer answer gives"
            if baseline >= 0.5
            else "always taking the shorter answer gives"
        )
        count = record.latest(f"{section}/num_valid_samples")
        pairs = "" if count is None else f" on {counted(round(count), 'pair')}"
        error = 0.02 if not count else 2 * math.sqrt(max(accuracy * (1 - accuracy), 0.01) / count)
        said = f"{section}: accuracy is {accuracy:.1%}{pairs}, and {rule} {rival:.1%}"
        if accuracy <= rival + error:
            yield _bad(
                f"{said}: no better than length alone, within two standard errors. Look at "
                "the accuracy where the shorter answer is chosen (laurel eval pairs "
                "--diagnostics), and balance the data by length.",
            )
        else:
            yield _good(
                f"{said}: {100 * (accuracy - rival):.1f} points better than length.",
            )


def scores_follow_length(record: RunRecord) -> Iterator[RunFinding]:
    """Report scores that follow length, ties, and bad calibration."""
    for name in record.names():
        section, _, figure = name.rpartition("/")
        value = record.latest(name) if section.startswith("validation") else None
        if value is None:
            continue
        if figure == "score_length_correlation" and abs(value) > 0.6:
            yield _look(
                f"{section}: scores go with length (Spearman's correlation {value:.2f}). A "
                "policy that learns from them will write "
                f"{'longer' if value > 0 else 'shorter'} answers.",
            )
        elif figure == "score_ties" and value > 0.05:
            yield _look(
                f"{section}: {value:.1%} of the pairs have the same score on both sides. "
                "Are answers cut off (policy.max_total_sequence_length), or the same?",
            )
        elif figure == "ece" and value > 0.1:
            yield _look(
                f"{section}: confidence and accuracy are {value:.1%} apart on average "
                "(calibration error). Scores can be ranked, but margins are no probabilities.",
            )


# Where the reward of a run lies in the range of its rewards: solved, hopeless, or between.
#
# Groups with equal rewards are a success if all completions are right, and a problem if none is.

Standing = Literal["top", "between", "bottom"]

CLOSE = 0.1
"""The share of the range of rewards within which a reward counts as at the end of the range."""


def seen_rewards(record: RunRecord) -> tuple[float, float] | None:
    """Return the lowest and the highest reward of all training completions; None if unknown."""
    low, high = record.series("train/reward_min"), record.series("train/reward_max")
    return (min(low.values), max(high.values)) if low and high else None


def standing(record: RunRecord) -> Standing | None:
    """Return where the mean reward of the last steps lies in the range of rewards; None if unknown.

    If only one reward was ever seen, the shares of groups whose rewards are all 1, or all 0,
    decide.
    """
    reward, seen = record.series("train/reward"), seen_rewards(record)
    if not reward or seen is None:
        return None
    low, high = seen
    last = fmean(ending(reward))
    if high > low:
        share = (last - low) / (high - low)
        return "top" if share >= 1 - CLOSE else "bottom" if share <= CLOSE else "between"
    for name, where in (("pct_1", "top"), ("pct_0", "bottom")):
        groups = record.series(f"train/baseline_reward/{name}")
        if groups and fmean(ending(groups)) >= 100 * (1 - CLOSE):
            return "top" if where == "top" else "bottom"
    return None


# The course of the gold metric of a run: did it fall by more than chance?

LEAST_FALL = 0.02
"""The smallest fall that counts, as a share of the peak."""
FALL_OF_FEW = GOLD_DROP
"""The smallest fall that counts if there are too few values to estimate noise, as a share of the
peak."""


class GoldCourse(NamedTuple):
    """The gold metric at the beginning, at its best and at the end of a run.

    Each is the mean of a tenth of the values, or a single value if there are fewer than twenty.
    """

    name: str
    first: float
    peak: float
    peak_step: float
    last: float
    fell: bool
    """Whether the end is below the best by more than chance explains."""

    @property
    def is_lower(self) -> bool:
        """Whether the end is below the beginning, or fell from the peak."""
        return self.fell or self.last < self.first


def gold_course(record: RunRecord) -> GoldCourse | None:
    """Return the course of the gold metric; None if the run measured it less than twice."""
    name = gold_metric(record.settings, record.names())
    series = record.series(name) if name is not None else None
    if name is None or series is None or len(series.values) < 2:
        return None
    window = max(1, len(series.values) // 10)
    means = [
        fmean(series.values[end - window : end]) for end in range(window, len(series.values) + 1)
    ]
    # The latest of equal peaks is taken, because its checkpoint has learned the most. Means of
    # windows are compared, because the best of many noisy values would always be a peak.
    best = max(range(len(means)), key=lambda index: (means[index], index))
    least = max(
        LEAST_FALL * abs(means[best]), _gold_by_chance(record, name, series, window, means[best])
    )
    return GoldCourse(
        name=name,
        first=means[0],
        peak=means[best],
        peak_step=series.steps[best + window - 1],
        last=means[-1],
        fell=means[best] - means[-1] > least,
    )


def _gold_by_chance(
    record: RunRecord, name: str, series: Series, window: int, peak: float
) -> float:
    """Return the difference between two means over a window that chance explains."""
    # It is three standard errors, because the peak is the best of many windows.
    if len(series.values) >= MIN_STEPS:
        return 3 * math.sqrt(2 / window) * spread_of_changes(series.values)
    counts = record.series(f"{name.rpartition('/')[0]}/num_samples").values
    if name.endswith("/accuracy") and counts and counts[-1] > 0:
        return 3 * math.sqrt(2 * max(peak * (1 - peak), 0.01) / counts[-1])
    return FALL_OF_FEW * abs(peak)


SOLVED = ("zero_spread_groups", "no_updates")
"""The alarms that are also raised when all tasks are solved."""


def is_success(alarm: RaisedAlarm, record: RunRecord) -> bool:
    """Report whether an alarm only means that the tasks are solved."""
    if alarm.name not in SOLVED or standing(record) != "top":
        return False
    gold = gold_course(record)  # the highest reward is no success if the gold metric falls
    return gold is None or not gold.is_lower


# The table.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule over the metrics of a run. It is silent where its metrics are missing."""

    alarm: Callable[[History], AlarmFinding | None] | None = None
    """Checks the latest steps while the run goes on; None: no alarm."""
    report: Callable[[RunRecord], Iterator[RunFinding]] | None = None
    """What the report says of the whole run, and what usually helps."""
    compares_ends: bool = False
    """Whether the report checks the last tenth of the steps by the rule of the alarm, too."""

    @property
    def is_in_report(self) -> bool:
        """Whether the report applies the rule; else it only lists the alarms that it raised."""
        return self.report is not None or self.compares_ends


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "no_updates": Rule(alarm=no_updates, report=never_updated),
        "overoptimisation": Rule(alarm=overoptimisation, report=gold_fell),
        "collapse": Rule(alarm=collapse),
        "kl_jump": Rule(alarm=kl_jump),
        "reward": Rule(report=reward_without_success),
        "alarms": Rule(report=alarms_going_on),
        "not_finite": Rule(report=not_finite),
        "validation": Rule(report=validation_got_worse),
        "loss": Rule(report=loss_did_not_fall),
        "against_length": Rule(report=against_length),
        "failures": Rule(alarm=missing_rewards, report=failed_rewards),
        "gradient": Rule(report=gradient_jumps),
        "steps_lost": Rule(report=steps_lost),
        "zero_spread_groups": Rule(alarm=zero_spread_groups, report=groups_without_spread),
        "truncation": Rule(alarm=truncation, report=cut_off),
        "entropy": Rule(report=entropy_collapse),
        "length": Rule(alarm=length, compares_ends=True),
        "length_bias": Rule(alarm=length_bias, compares_ends=True),
        "repetition": Rule(alarm=repetition, compares_ends=True),
        "control_tokens": Rule(alarm=control_tokens, compares_ends=True),
        "format": Rule(alarm=keeps_format, compares_ends=True),
        "ensemble": Rule(alarm=ensemble),
        "scores": Rule(report=scores_follow_length),
        "overfitting": Rule(report=overfitting),
        "sampler": Rule(report=sampler_mismatch),
        "data": Rule(report=data_left_out),
    }
)
"""Every rule, the most important first."""

ALARMS: Mapping[Alarm, Callable[[History], AlarmFinding | None]] = MappingProxyType(
    {name: check for name in get_args(Alarm) if (check := RULES[name].alarm) is not None}
)
"""The rule of every alarm, in the order in which they are reported."""

_WEIGHTS: tuple[Weight, ...] = ("bad", "look", "good", "note")


def findings(record: RunRecord) -> list[RunFinding]:
    """Apply all rules to a run; problems come first and plain facts last."""
    health = inside(record.settings, "grpo", "health")
    reported = {alarm.name for alarm in alarms_of(record.health) if alarm.until is None}
    reported |= set(health.get("ignore") or ())
    ends = _Ends.of(record, health)
    found: list[RunFinding] = []
    for name, rule in RULES.items():
        if rule.report is not None:
            found += rule.report(record)
        if rule.compares_ends and rule.alarm and ends and name not in reported:
            checked = rule.alarm(ends)
            if checked is not None and checked.is_bad:
                text = checked.text[0].upper() + checked.text[1:]
                advice = advice_of(name)
                found.append(_look(f"{text}. {advice[0].upper()}{advice[1:]}."))
    return sorted(found, key=lambda finding: _WEIGHTS.index(finding.weight))


class _Ends(History):
    """A whole run: its first tenth is the baseline, its last tenth the latest window."""

    @classmethod
    def of(cls, record: RunRecord, health: Mapping[str, Any]) -> _Ends | None:
        """Return the history of a run; None where it is too short, or learns from no reward."""
        steps = [figures for figures in record.metrics if not READ.isdisjoint(figures)]
        if len(steps) < MIN_STEPS:
            return None
        tenth = len(steps) // 10
        kept = {key: health[key] for key in ("format_metric", "num_spreads") if key in health}
        ends = cls(HealthConfig(window=tenth, baseline_steps=max(3, tenth), **kept))
        for figures in steps:
            ends.add(figures)
        return ends

    def step(self, name: str) -> RecentValues | None:
        """Return None: the last step of a run is nothing special."""
        return None


def advice_of(name: str) -> str:
    """Return the usual remedies where the rule of an alarm finds something bad."""
    return _advice()[name]


@cache
def _advice() -> Mapping[str, str]:
    path = files("laurel.observe") / "alarms.yaml"
    found: Mapping[str, str] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found
