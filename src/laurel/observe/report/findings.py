"""Finds what to look at first in a run, by rules over its metrics, and words its last results."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from laurel.errors import counted
from laurel.observe.console import format_number
from laurel.observe.health import UPDATES, gold_metric, spread_of_changes
from laurel.observe.metrics import is_lower_better
from laurel.observe.run_record import RunRecord, Series

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


# Rules for policies that learn from rewards: failures, spread, entropy, lengths, and hacking.

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


def lengths_grew(record: RunRecord) -> Iterator[RunFinding]:
    """Report completions whose length doubled or halved."""
    ends = _both_ends(record.series("train/mean_gen_tokens_per_sample"))
    if ends is None:
        return
    first, last = ends
    if first > 0 and not 0.5 <= last / first <= 2:
        yield _look(
            f"Completions went from {first:,.0f} to {last:,.0f} tokens. Is that what the "
            "task needs, or what the reward likes?",
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


# Rules for reward models: what they learned besides length, and how far scores can be trusted.


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


# Rules for any training: alarms, values that are not finite, gradients, validation, data.

SOLVED = ("zero_spread_groups", "no_updates")
"""The alarms that are also raised when all tasks are solved."""
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


def is_success(alarm: Alarm, record: RunRecord) -> bool:
    """Report whether an alarm only means that the tasks are solved."""
    if alarm.name not in SOLVED or standing(record) != "top":
        return False
    gold = gold_course(record)  # the highest reward is no success if the gold metric falls
    return gold is None or not gold.is_lower


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


# All rules over the metrics of a run.
#
# A rule reports nothing if its metrics are missing. It names what a person should look at, and what
# usually helps.

Rule = Callable[[RunRecord], Iterator[RunFinding]]

RULES: tuple[Rule, ...] = (
    never_updated,
    gold_fell,
    reward_without_success,
    alarms_going_on,
    not_finite,
    validation_got_worse,
    loss_did_not_fall,
    against_length,
    failed_rewards,
    gradient_jumps,
    steps_lost,
    groups_without_spread,
    cut_off,
    entropy_collapse,
    lengths_grew,
    scores_follow_length,
    overfitting,
    sampler_mismatch,
    data_left_out,
)
"""Every rule, the most important first."""

_WEIGHTS: tuple[Weight, ...] = ("bad", "look", "good", "note")


def findings(record: RunRecord) -> list[RunFinding]:
    """Apply all rules to a run; problems come first and plain facts last."""
    found = [finding for rule in RULES for finding in rule(record)]
    return sorted(found, key=lambda finding: _WEIGHTS.index(finding.weight))


# The alarms of a run, read from `health.jsonl`.

MAX_SAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One alarm, from the step at which it was raised to that at which it ended."""

    name: str
    since: int
    until: int | None = None
    """The step at which the alarm ended; None if it has not."""
    metric: str = ""
    value: float | None = None
    """The value of the metric when the alarm was raised."""
    threshold: float | None = None
    baseline: float | None = None
    text: str = ""
    advice: str = ""
    samples: Sequence[Mapping[str, Any]] = ()


def alarms_of(lines: Iterable[Mapping[str, Any]]) -> list[Alarm]:
    """Read the alarms from lines of `health.jsonl`: first those that have not ended, latest first.

    A line that raises an alarm again is ignored, because the alarm began with the first one.
    """
    ended: list[Alarm] = []
    going_on: dict[str, Alarm] = {}
    for line in lines:
        name, step = str(line.get("alarm", "")), _number(line.get("step"))
        if not name or step is None:
            continue
        if line.get("state") == "over":
            alarm = going_on.pop(name, None)
            if alarm is not None:
                ended.append(replace(alarm, until=int(step)))
        elif line.get("state") == "raised" and name not in going_on:
            samples = line.get("samples")
            going_on[name] = Alarm(
                name=name,
                since=int(step),
                metric=str(line.get("metric") or ""),
                value=_number(line.get("value")),
                threshold=_number(line.get("threshold")),
                baseline=_number(line.get("baseline")),
                text=str(line.get("text") or ""),
                advice=str(line.get("advice") or ""),
                samples=[sample for sample in samples if isinstance(sample, dict)][:MAX_SAMPLES]
                if isinstance(samples, list)
                else (),
            )
    return [
        *sorted(going_on.values(), key=lambda alarm: -alarm.since),
        *sorted(ended, key=lambda alarm: -alarm.since),
    ]


def _number(value: object) -> float | None:
    # JSON has no NaN: loggers write it as text, and `float` reads that.
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


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
FALL_OF_FEW = 0.1
"""The smallest fall that counts if there are too few values to estimate noise, as a share of the
peak; `health.GOLD_DROP` is the same."""


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


# The last words of a finished run: its results, and the first findings, in a few lines.

MAX_RESULTS = 3
MAX_FINDINGS = 3
BASELINES = {"longer_wins_baseline": "longer answer", "bag_of_words_baseline": "bag of words"}
"""The metrics of baselines, and the words for them beside an accuracy."""
_SIGNS = {"bad": "problem", "look": "look", "good": "fine"}
"""The words that the report's page uses for each weight."""


def accuracy_words(figures: Mapping[str, float]) -> str | None:
    """Describe an accuracy with its baselines and number of pairs; None if there is no accuracy.

    Args:
        figures: The metrics of one validation set, by their names without a prefix.
    """
    accuracy, count = figures.get("accuracy"), figures.get("num_valid_samples")
    rows = figures.get("num_rows")  # benchmarks log this one
    if accuracy is None:
        return None
    # Only reward models are validated on pairs, and only they have these metrics.
    has_pairs = "longer_wins_baseline" in figures or "margin_mean" in figures
    said = f"accuracy {accuracy:.4f}"
    if count is not None:
        said += f" of {counted(round(count), 'pair' if has_pairs else 'completion')}"
    elif rows is not None:
        said += f" of {counted(round(rows), 'row')}"
    if not has_pairs and figures.get("truncation_rate"):
        # Environments count these as wrong in an accuracy of their own, whatever their reward is.
        said += ", with those cut off"
    beside = [
        f"{label} {figures[name]:.4f}" for name, label in BASELINES.items() if name in figures
    ]
    return f"{said} ({', '.join(beside)})" if beside else said


def results(record: RunRecord) -> list[str]:
    """Return one line per result: the gold metric, the reward, each validation set, or the loss."""
    return list(islice(_results(record), MAX_RESULTS))


def _results(record: RunRecord) -> Iterator[str]:
    gold = gold_metric(record.settings, record.names())
    if gold is not None:
        yield from _course(record, gold, f"{gold} (gold metric)")
    sections = [
        name.rpartition("/")[0]
        for name in record.names()
        if name.startswith("validation") and name.count("/") == 1
    ]
    found = False
    for section in dict.fromkeys(sections):
        latest = {
            name.rpartition("/")[2]: value
            for name in record.names()
            if name.rpartition("/")[0] == section and (value := record.latest(name)) is not None
        }
        said = accuracy_words(latest)
        accuracy, reward = (
            record.series(f"{section}/{key}") for key in ("accuracy", "reward_mean")
        )
        # With rewards between 0 and 1 some validations have no accuracy, and all a mean reward.
        if said is not None and len(accuracy.values) >= len(reward.values):
            found = True
            # The score of a benchmark, such as F1, leads; checkpoints are chosen by it.
            for final in _course(record, f"{section}/final_score", "final_score"):
                said = f"{final}, {said}"
            since = f", {accuracy.values[0]:.4f} at step {accuracy.steps[0]:,.0f}"
            yield f"{section}: {said}" + (since if len(accuracy.values) > 1 else "")
        else:
            for figure in ("final_score", "reward_mean", "loss"):
                if figure in latest:
                    found = True
                    yield from _course(record, f"{section}/{figure}", f"{section}: {figure}")
                    break
    yield from _course(record, "train/reward", "train/reward")
    if not found and record.kind != "grpo":
        yield from _course(record, "train/loss", "train/loss (nothing was validated)")


def _course(record: RunRecord, name: str, label: str) -> Iterator[str]:
    series = record.series(name)
    if series:
        first, last = (format_number(series.values[i]) for i in (0, -1))
        since = f" ({first} at step {series.steps[0]:,.0f})" if len(series.values) > 1 else ""
        yield f"{label} {last}{since}"


def first_findings(record: RunRecord) -> list[str]:
    """Return the first findings of the report, one sentence each, problems first."""
    found = [_sentence(one) for one in findings(record) if one.weight != "note"]
    return found[:MAX_FINDINGS]


def learned_nothing(record: RunRecord) -> str | None:
    """Return the finding that a run's policy never changed, in a sentence; None if it did."""
    return next(map(_sentence, never_updated(record)), None)


def _sentence(finding: RunFinding) -> str:
    text = finding.text
    for end in (". ", ": look", " (means of"):  # the remedies are in the report
        text = text.split(end)[0]
    return f"{_SIGNS[finding.weight]}: {text.rstrip('.')}"
