"""Rules for any training: alarms, numbers that are none, gradients, validation, data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

from laurel.observe.console import format_number
from laurel.observe.counts import counted
from laurel.observe.metrics import is_lower_better
from laurel.observe.reporting.alarms import Alarm, alarms_of
from laurel.observe.reporting.finding import MIN_STEPS, Finding, Weight, beginning, ending, steps
from laurel.observe.reporting.gold_course import gold_course
from laurel.observe.reporting.reward_range import standing
from laurel.observe.run_record import RunRecord, Series

ZERO_SPREAD = "zero_spread_groups"
"""The alarm that success raises, too."""
_OF_ROWS = re.compile(r"(^|: )([\d,]+ rows? (?!of )|no row )")
"""How a note begins that says something of the rows; others say where they come from."""
JUMP = 10.0
"""A gradient norm so many times the median is a jump."""


def alarms_going_on(record: RunRecord) -> Iterator[Finding]:
    """Alarms of the run itself come before anything computed afterwards."""
    alarms = alarms_of(record.health)
    for alarm in alarms:
        if alarm.until is None and is_success(alarm, record):
            reward = format_number(fmean(ending(record.series("train/reward"))))
            yield Finding(
                weight="good",
                text=f"Since step {alarm.since:,} nearly all groups have equal rewards, and the "
                f"reward ({reward}) is at the top of what was seen: these tasks are solved, and "
                f"nothing more is learned from them ({alarm.name}). Harder tasks, or the end of "
                "the run.",
            )
        elif alarm.until is None:
            advice = alarm.advice and alarm.advice[0].upper() + alarm.advice[1:]
            parts = [alarm.name, alarm.text, advice]
            said = " ".join(f"{part.rstrip('.')}." for part in parts if part)
            yield Finding(
                weight="bad", text=f"An alarm is still on since step {alarm.since:,}: {said}"
            )
    if over := sum(alarm.until is not None for alarm in alarms):
        yield Finding(
            weight="look",
            text=f"Raised in the course of the run, and over by now: {over:,} "
            f"alarm{'' if over == 1 else 's'}.",
        )


def is_success(alarm: Alarm, record: RunRecord) -> bool:
    """Whether an alarm says no more than that everything is right."""
    if alarm.name != ZERO_SPREAD or standing(record) != "top":
        return False
    gold = gold_course(record)  # a reward at its top is no success where what is wanted falls
    return gold is None or not gold.is_lower


def not_finite(record: RunRecord) -> Iterator[Finding]:
    """NaN and infinity, which no curve can show."""
    lost = {
        name: found for name in record.names()
        if name not in ("step", "time") and (found := record.not_finite(name))
    }  # fmt: skip
    if lost:
        worst = max(lost, key=lambda name: len(lost[name]))
        others = f"; {len(lost) - 1} other figures too" if len(lost) > 1 else ""
        yield Finding(
            weight="bad",
            text=f"{worst} was NaN or infinite at {steps(len(lost[worst]))}, first at step "
            f"{lost[worst][0]:,.0f}{others}. The curves leave such values out. Look at the data "
            "of that step, then at the learning rate and the precision.",
        )


def gradient_jumps(record: RunRecord) -> Iterator[Finding]:
    """Steps at which the gradient was many times as large as usual.

    Those of the first tenth do not count: what begins from nothing begins with large ones.
    """
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
        yield Finding(
            weight="look",
            text=f"The norm of the gradient jumped: {format_number(value)} at step {step:,.0f}, "
            f"{value / usual:,.0f} times its median of {format_number(usual)}; {steps(len(jumps))} "
            f"lay above {JUMP:.0f} times the median. Look at the samples of such a step; a lower "
            "learning rate or policy.max_grad_norm holds it down.",
        )


def steps_lost(record: RunRecord) -> Iterator[Finding]:
    """Optimizer steps that were not taken."""
    lost = [
        ("bad steps, of which nothing was applied",
         sum(value > 0 for value in record.series("train/bad_steps_in_a_row").values)),
        ("steps with an update that was not applied",
         sum(v > 0 for v in record.series("train/optimizer_steps_not_applied").values)),
    ]  # fmt: skip
    for what, count in lost:
        if count:
            yield Finding(
                weight="look",
                text=f"There were {count:,} {what}, of {record.num_steps:,}. Nothing was learned "
                "from their data.",
            )
            return


def validation_got_worse(record: RunRecord) -> Iterator[Finding]:
    """A best validation that is not the last one, by more than chance explains.

    A figure that equals another at every step, as the mean of rewards of 0 and 1 equals the
    accuracy, is told once.
    """
    told: list[Series] = []
    for name in sorted(record.names(), key=lambda name: not name.endswith("/accuracy")):
        figure = name.rpartition("/")[2]
        if not name.startswith("validation") or figure not in (
            "accuracy", "loss", "reward_mean", "top1",
        ):  # fmt: skip
            continue
        series = record.series(name)
        if len(series.values) < 2 or series in told:
            continue
        told.append(series)
        sign = -1.0 if is_lower_better(name) else 1.0
        best = max(range(len(series.values)), key=lambda i: sign * series.values[i])
        step = f"step {series.steps[best]:,.0f}"
        worse_by = sign * (series.values[best] - series.values[-1])
        if worse_by > _chance(record, name, series.values[best]):
            yield Finding(
                weight="bad",
                text=f"Validation got worse: {name} was {format_number(series.values[best])} at "
                f"{step} and is {format_number(series.values[-1])} at step "
                f"{series.steps[-1]:,.0f}. The checkpoint nearest to {step} is likely the better "
                "model.",
            )


def _chance(record: RunRecord, name: str, value: float) -> float:
    """How far a figure may fall by chance: two standard errors where they are known."""
    section, _, figure = name.rpartition("/")
    if figure in ("accuracy", "top1"):
        counts = record.series(f"{section}/num_valid_samples").values
        if not counts:
            return 0.05
        # Two measurements of the same rows differ by less than two of different ones would.
        return max(0.01, 2 * math.sqrt(max(value * (1 - value), 0.01) / counts[-1]))
    if figure == "loss":
        return 0.03 * abs(value)
    spread = record.series(f"{section}/reward_std").values
    return 0.1 * spread[-1] if spread else 0.1 * abs(value)


def overfitting(record: RunRecord) -> Iterator[Finding]:
    """Training much better than validation."""
    training = record.series("train/accuracy")
    held = record.series("validation-default/accuracy")
    if len(training.values) < MIN_STEPS or not held:
        return
    seen = fmean(ending(training))
    if seen - held.values[-1] > 0.1:
        yield Finding(
            weight="look",
            text=f"Training is ahead of validation: accuracy {seen:.1%} over the last steps, "
            f"{held.values[-1]:.1%} in validation. Fewer epochs, a lower learning rate or more "
            "data.",
        )


def loss_did_not_fall(record: RunRecord) -> Iterator[Finding]:
    """Of training by gradient on a fixed loss; GRPO's loss says nothing of the kind."""
    loss = record.series("train/loss")
    if record.kind not in ("rm", "sft") or len(loss.values) < MIN_STEPS:
        return
    first, last = fmean(beginning(loss)), fmean(ending(loss))
    if last > 0.98 * first:
        yield Finding(
            weight="bad",
            text=f"The loss did not fall: {format_number(first)} over the first steps, "
            f"{format_number(last)} over the last. Look at the learning rate, and at whether the "
            "data says what it should.",
        )


def data_left_out(record: RunRecord) -> Iterator[Finding]:
    """Rows that were read and not used, and what the data report noted."""
    for name, report in record.data.items():
        read, kept = report.get("rows_read"), report.get("rows_kept")
        # What is held out is used in validation.
        reasons = {
            reason.replace("_", " "): _count(found)
            for reason, found in (report.get("rows_left_out") or {}).items()
        }
        held_out = reasons.pop("held out", 0)
        if isinstance(read, int) and isinstance(kept, int) and read:
            lost = read - kept - held_out
            if lost > 0.1 * read:
                most = sorted(reasons.items(), key=lambda item: -item[1])[:3]
                said = ", ".join(f"{count:,} {reason}" for reason, count in most)
                yield Finding(
                    weight="look",
                    text=f"Data '{name}': {lost:,} of {counted(read, 'row')} "
                    f"{'was' if lost == 1 else 'were'} left out ({said}).",
                )
        for note in report.get("notes") or ():
            weight: Weight = "look" if _OF_ROWS.search(str(note)) else "note"
            yield Finding(weight=weight, text=f"Data '{name}': {note}.")


def _count(found: Any) -> int:
    value = found.get("count", 0) if isinstance(found, dict) else found
    return value if isinstance(value, int) else 0
