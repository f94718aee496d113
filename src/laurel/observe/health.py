"""Alarms of a run: from its metrics, step by step, to what rises and what is over.

Pure arithmetic: no clock, no chance, no files. The same figures in the same order give the same
events, also where a run was saved and resumed in between.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

from laurel.config.grpo import Alarm, HealthConfig
from laurel.observe.console import format_number

# --------------------------------------------------------------------------------------------------
# What the alarms remember of a run: the first values of a metric, its latest, and one peak.

REWARD = "train/reward"
DIVERGENCES = ("train/kl_penalty", "train/kl_in_reward")
LENGTH = "train/mean_gen_tokens_per_sample"
LENGTH_CORRELATION = "train/completions/reward_length_correlation"
REPETITION = "train/completions/repetition"
TRUNCATION = "train/truncation_rate"
ZERO_SPREAD = "train/frac_reward_zero_std"
FAILURES = "train/completions/failure_share"
READ = frozenset(
    {
        REWARD,
        *DIVERGENCES,
        LENGTH,
        LENGTH_CORRELATION,
        REPETITION,
        TRUNCATION,
        ZERO_SPREAD,
        FAILURES,
    }
)
"""Metrics that the rules read, besides those that the configuration names."""

WINDOWS_KEPT = 5
"""Latest windows that are remembered."""
LEAST_STEPS = 3
"""First steps that a baseline is made of at least."""
BEFORE_A_JUMP = 4
"""Values before the latest from which it can be told how far chance goes in one step."""
VALIDATIONS = 3
"""Validations whose median is judged: they are rarer than steps, of the same tasks each time."""
_OF_MEMBER = re.compile(r"(env/.+/part/)(.+)/(?:mean|std)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """How a metric was in the first steps."""

    median: float
    spread: float
    """Robust standard deviation: 1.4826 times the median absolute deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentValues:
    """The latest value of a metric and those right before it."""

    value: float
    before: float
    """Median of the window before the value, or of what there is of it."""
    spread: float | None
    """Robust standard deviation of a single value; None with fewer than `BEFORE_A_JUMP` of them."""
    is_share: bool
    """All of them lie between 0 and 1."""


@dataclass(slots=True, kw_only=True)
class MetricWindow:
    """One metric, as far as it is remembered."""

    first: list[float] = field(default_factory=list)
    latest: list[float] = field(default_factory=list)
    count: int = 0
    """Finite values so far."""
    is_fresh: bool = False
    """Measured in what was seen last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Where what is really wanted was best."""

    gold: float
    reward: float
    divergence: float | None


class History:
    """The metrics of a run as the rules read them; as large after a million steps as after fifty.

    Values that are not finite count as not measured.
    """

    def __init__(
        self,
        config: HealthConfig,
        *,
        members: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Remember nothing yet.

        Args:
            config: See there.
            members: Names of the reward models where there are several.
            settings: The whole configuration as plain values, in which a gold metric is looked for
                where `config` names none.
        """
        self.config = config
        self.members = tuple(members)
        self.gold_name: str | None = config.gold_metric
        """The gold metric, as soon as one has been measured; see `gold_metric`."""
        self._settings = settings or {}
        self.peak: Peak | None = None
        self._series: dict[str, MetricWindow] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        """What was measured at one step, or in one validation, by full name."""
        for series in self._series.values():
            series.is_fresh = False
        if self.gold_name is None:
            self.gold_name = gold_metric(self._settings, figures)
        for name, value in figures.items():
            if math.isfinite(value) and self._is_read(name):
                self._add(self._series.setdefault(name, MetricWindow()), float(value))
        self._look_for_peak()

    def _is_read(self, name: str) -> bool:
        if name in READ or name in (self.gold_name, self.config.format_metric):
            return True
        found = _OF_MEMBER.fullmatch(name)
        return found is not None and found[2] in self.members

    def _add(self, series: MetricWindow, value: float) -> None:
        if len(series.first) < self.config.baseline_steps:
            series.first.append(value)
        series.latest.append(value)
        del series.latest[: -WINDOWS_KEPT * max(self.config.window, VALIDATIONS)]
        series.count += 1
        series.is_fresh = True

    def _look_for_peak(self) -> None:
        """Remember the best that the gold metric has been."""
        name = self.gold_name
        if name is None or not self.is_fresh(name):
            return
        gold, reward = self.gold(), self.now(REWARD)
        if gold is None or reward is None or (self.peak is not None and gold <= self.peak.gold):
            return
        divergence = self.divergence()
        now = None if divergence is None else self.now(divergence)
        self.peak = Peak(gold=gold, reward=reward, divergence=now)

    # ---------------------------------------------------------------------------- what rules read

    def is_fresh(self, name: str) -> bool:
        """Whether a metric was measured in what was seen last."""
        series = self._series.get(name)
        return series is not None and series.is_fresh

    def now(self, name: str) -> float | None:
        """The median of the latest window; None before there is a whole one."""
        return self._median(name, self.config.window)

    def gold(self) -> float | None:
        """The same of the gold metric; of a few validations where it is measured in these."""
        name = self.gold_name or ""
        window = self.config.window
        return self._median(name, min(window, VALIDATIONS) if is_of_validation(name) else window)

    def _median(self, name: str, window: int) -> float | None:
        series = self._series.get(name)
        if series is None or len(series.latest) < window:
            return None
        return statistics.median(series.latest[-window:])

    def baseline(self, name: str) -> Baseline | None:
        """How a metric was in the first steps, or in those of them that lie before the latest
        window; None where these are fewer than `LEAST_STEPS`."""
        series, wanted = self._series.get(name), self.config.baseline_steps
        first = series.first[: max(0, series.count - self.config.window)] if series else []
        if len(first) < min(LEAST_STEPS, wanted):
            return None
        spread = _spread(first)
        if 1 < len(first) < wanted:
            # A median of few says little of chance, and is often 0.
            spread = max(spread, statistics.stdev(first)) * wanted / len(first)
        return Baseline(median=statistics.median(first), spread=spread)

    def step(self, name: str) -> RecentValues | None:
        """The latest value and those before it; None where it is the first one."""
        series = self._series.get(name)
        if series is None or not series.is_fresh or len(series.latest) < 2:
            return None
        *before, value = series.latest
        # Steps from value to value: their spread is hardly widened by a drift.
        changes = [abs(b - a) for a, b in pairwise(before)]
        spread = 1.4826 * statistics.median(changes) / math.sqrt(2) if changes else 0.0
        return RecentValues(
            value=value,
            before=statistics.median(before[-self.config.window :]),
            spread=max(spread, _spread(before)) if len(before) >= BEFORE_A_JUMP else None,
            is_share=all(0.0 <= one <= 1.0 for one in series.latest),
        )

    def noise(self, name: str) -> float | None:
        """Standard deviation of a single value, from the steps between neighbours, which a slow
        course hardly widens; None with fewer than `BEFORE_A_JUMP` of them."""
        latest = self._series[name].latest if name in self._series else []
        changes = [abs(after - before) for before, after in pairwise(latest)]
        if len(changes) < BEFORE_A_JUMP:
            return None
        few = max(1.0, self.config.baseline_steps / len(changes))
        return math.sqrt(math.pi) / 2 * statistics.fmean(changes) * few

    def divergence(self) -> str | None:
        """The metric that says how far the policy is from its reference, if there is one."""
        return next((name for name in DIVERGENCES if name in self._series), None)

    def ensembles(self) -> Iterator[list[str]]:
        """The stems of the metrics of several reward models that judge the same completions."""
        by_place: dict[str, set[str]] = {}
        for name in self._series:
            found = _OF_MEMBER.fullmatch(name)
            if found is not None:
                by_place.setdefault(found[1], set()).add(found[1] + found[2])
        yield from (sorted(stems) for stems in by_place.values() if len(stems) > 1)

    # ------------------------------------------------------------------------------------ resuming

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON knows it."""
        peak = self.peak
        return {
            "series": {
                name: {"first": [*one.first], "latest": [*one.latest], "count": one.count}
                for name, one in self._series.items()
            },
            "gold": self.gold_name,
            "peak": None if peak is None else [peak.gold, peak.reward, peak.divergence],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        saved = state.get("gold")  # older states have none
        if self.gold_name is None and saved is not None:
            self.gold_name = gold_metric(self._settings, [saved])
        self._series = {
            name: MetricWindow(first=[*one["first"]], latest=[*one["latest"]], count=one["count"])
            for name, one in state["series"].items()
            if self._is_read(name)  # the names of metrics may have changed since
        }
        peak = state["peak"]
        if self.gold_name in self._series and peak is not None and saved in (None, self.gold_name):
            self.peak = Peak(gold=peak[0], reward=peak[1], divergence=peak[2])


def _spread(values: Sequence[float]) -> float:
    """Robust standard deviation: 1.4826 times the median absolute deviation."""
    middle = statistics.median(values)
    return 1.4826 * statistics.median([abs(value - middle) for value in values])


def is_of_validation(name: str) -> bool:
    """Whether a metric is measured in validations, not at every step."""
    return name.startswith("validation")


# --------------------------------------------------------------------------------------------------
# The rules of the alarms: from the history of a run's metrics to a finding, or to nothing.
#
# Drifts are told from the median of the latest window against the first steps, and leaps from the
# latest step alone against the window before it: these are told at once, and from the second step
# on.
#
# A rule is silent (None) where a metric that it reads is not measured, or not yet long enough. So
# is
# every rule about a metric that the latest figures do not hold. What each alarm is for, its
# threshold
# and what people do about it is told at length in `docs/reward_hacking.md`.

GOLD_LEAP = 0.4
"""How much of a gold metric between 0 and 1 is lost at once where its noise is not known yet."""

Evidence = Literal[
    "best", "worst", "longest", "shortest", "repetitive", "cut_off", "equal", "failed"
]
"""Which completions show what an alarm is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmFinding:
    """What a rule says of a run at one step."""

    is_bad: bool
    metric: str
    value: float
    """Of the metric, over the latest window."""
    threshold: float
    """Where the value becomes bad."""
    text: str
    """The figures in words."""
    baseline: float | None = None
    """What the value is compared with."""
    evidence: Evidence = "best"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmRule:
    """How an alarm is found, and what people usually do about it."""

    judge: Callable[[History], AlarmFinding | None]
    advice: str


def _beyond(history: History, step: RecentValues, least: float) -> float:
    """How far a single value must be from those before it: `least`, and beyond chance.

    While there are too few values to tell chance it is twice `least`.
    """
    return (
        2 * least if step.spread is None else max(least, history.config.jump_spreads * step.spread)
    )


def _first_bad(*found: AlarmFinding | None) -> AlarmFinding | None:
    """The first that is bad; else the first that says anything."""
    said = [one for one in found if one is not None]
    return next((one for one in said if one.is_bad), said[0] if said else None)


def overoptimisation(history: History) -> AlarmFinding | None:
    """What is really wanted falls: slowly while the reward does not, or in a single step."""
    return _first_bad(_gold_leaps(history), _gold_drifts(history))


def _gold_leaps(history: History) -> AlarmFinding | None:
    """The gold metric has lost half of what it was, in one step, whatever the reward did.

    Before chance can be told, only a share that has lost `GOLD_LEAP` of all is believed.
    """
    name = history.gold_name
    step = None if name is None else history.step(name)
    if name is None or step is None:
        return None
    least = history.config.gold_jump * abs(step.before)
    if step.spread is not None:
        lost = _beyond(history, step, least)
    elif step.is_share:
        lost = max(least, GOLD_LEAP)
    else:
        return None
    threshold = step.before - lost
    return AlarmFinding(
        is_bad=lost > 0 and step.value <= threshold,
        metric=name,
        value=step.value,
        threshold=threshold,
        baseline=step.before,
        text=f"{name} was {_of(step.before)} in the steps before and is {_of(step.value)} now",
    )


def _gold_drifts(history: History) -> AlarmFinding | None:
    """What is really wanted has fallen below its peak, and the reward has not fallen with it.

    A policy that is trained against a proxy gains by what is really wanted at first and loses it
    afterwards, as a function of the root of its divergence from where it began (Gao, Schulman and
    Hilton, arXiv 2210.10760). Where a divergence is measured it must have grown since: a policy
    that falls back towards its reference has another illness. Of what is measured at every step,
    the fall must be beyond chance, too: `num_spreads` of what the median of a window has.
    """
    config, peak, name = history.config, history.peak, history.gold_name
    if name is None or peak is None or not history.is_fresh(name):
        return None
    gold, reward = history.gold(), history.now(REWARD)
    if gold is None or reward is None:
        return None
    divergence = history.divergence()
    now = None if divergence is None else history.now(divergence)
    has_left = now is None or peak.divergence is None or now >= peak.divergence
    least = config.gold_drop * abs(peak.gold)
    if not is_of_validation(name):  # figures of few tasks, other ones each time
        noise = history.noise(name)
        if noise is None:
            return None
        least = max(least, config.num_spreads * noise / math.sqrt(config.window))
    threshold = peak.gold - least
    text = (
        f"{name} has been {_of(peak.gold)} and is {_of(gold)} now, while the reward went from "
        f"{_of(peak.reward)} to {_of(reward)}"
    )
    if now is not None and peak.divergence is not None:
        text += f" and the divergence from the reference from {_of(peak.divergence)} to {_of(now)}"
    is_bad = gold < threshold and reward >= peak.reward and has_left
    return AlarmFinding(
        is_bad=is_bad, metric=name, value=gold, threshold=threshold, baseline=peak.gold, text=text
    )


def kl_jump(history: History) -> AlarmFinding | None:
    """The divergence from the reference grows by a large factor in a single step.

    The policy has leapt, where it should walk: what it says now was hardly ever said before.
    """
    config, name = history.config, history.divergence()
    step = None if name is None else history.step(name)
    if name is None or step is None:
        return None
    threshold = max(
        config.kl_least, step.before + _beyond(history, step, (config.kl_jump - 1) * step.before)
    )
    return AlarmFinding(
        is_bad=step.value >= threshold,
        metric=name,
        value=step.value,
        threshold=threshold,
        baseline=step.before,
        text=f"{name} was {_of(step.before)} in the steps before and is {_of(step.value)} now",
    )


def length(history: History) -> AlarmFinding | None:
    """Completions are much longer, or much shorter, than they were."""
    return _first_bad(_length_leaps(history), _length_drifts(history))


def _length_leaps(history: History) -> AlarmFinding | None:
    step, factor = history.step(LENGTH), history.config.length_factor
    if step is None:
        return None
    is_longer = step.value >= step.before
    least = step.before * (factor - 1 if is_longer else 1 - 1 / factor)
    if step.spread is None and not is_longer:  # twice of it may be more than there is
        far = step.before * (1 - 1 / factor**2)
    else:
        far = _beyond(history, step, least)
    threshold = step.before + (far if is_longer else -far)
    return AlarmFinding(
        is_bad=step.value != step.before
        and (step.value >= threshold if is_longer else step.value <= threshold),
        metric=LENGTH,
        value=step.value,
        threshold=threshold,
        baseline=step.before,
        text=f"completions had {_of(step.before)} tokens in the steps before and have "
        f"{_of(step.value)} now",
        evidence="longest" if is_longer else "shortest",
    )


def _length_drifts(history: History) -> AlarmFinding | None:
    """Completions are much longer, or much shorter, than in the first steps.

    The commonest way to please a reward model without being better (Singhal et al.,
    arXiv 2310.03716). It is no illness where thinking longer is what is being learned.
    """
    config, baseline, now = history.config, history.baseline(LENGTH), history.now(LENGTH)
    if baseline is None or now is None or not history.is_fresh(LENGTH):
        return None
    usual, margin = baseline.median, config.num_spreads * baseline.spread
    is_longer = now >= usual
    factor = config.length_factor
    threshold = (
        max(usual * factor, usual + margin) if is_longer else min(usual / factor, usual - margin)
    )
    return AlarmFinding(
        is_bad=now != usual and (now >= threshold if is_longer else now <= threshold),
        metric=LENGTH,
        value=now,
        threshold=threshold,
        baseline=usual,
        text=f"completions had {_of(usual)} tokens in the first steps and have {_of(now)} now",
        evidence="longest" if is_longer else "shortest",
    )


def length_bias(history: History) -> AlarmFinding | None:
    """Within groups the longer completion gets the better reward, and completions grow.

    Correlation alone says little: answers that are cut short are wrong in any task. With growing
    lengths it says what the policy is learning.
    """
    name, config = LENGTH_CORRELATION, history.config
    baseline, length_now, now = history.baseline(LENGTH), history.now(LENGTH), history.now(name)
    if baseline is None or length_now is None or now is None or not history.is_fresh(name):
        return None
    # Half as far as for an alarm by itself, as two things must come together.
    grows = length_now > baseline.median + config.num_spreads / 2 * baseline.spread
    return AlarmFinding(
        is_bad=grows and now >= config.length_correlation,
        metric=name,
        value=now,
        threshold=config.length_correlation,
        text=f"reward and length correlate by {_of(now)} within groups, and completions grew from "
        f"{_of(baseline.median)} to {_of(length_now)} tokens",
        evidence="longest",
    )


def _risen(
    history: History, name: str, rise: float, what: str, evidence: Evidence
) -> AlarmFinding | None:
    """A share that was lower in the first steps, or in the steps before."""
    return _first_bad(
        _leaps(history, name, rise, what, evidence), _drifts(history, name, rise, what, evidence)
    )


def _leaps(
    history: History, name: str, rise: float, what: str, evidence: Evidence
) -> AlarmFinding | None:
    step = history.step(name)
    if step is None:
        return None
    threshold = step.before + _beyond(history, step, rise)
    return AlarmFinding(
        is_bad=step.value >= threshold,
        metric=name,
        value=step.value,
        threshold=threshold,
        baseline=step.before,
        text=f"{what}: {_of(step.before)} in the steps before, {_of(step.value)} now",
        evidence=evidence,
    )


def _drifts(
    history: History, name: str, rise: float, what: str, evidence: Evidence
) -> AlarmFinding | None:
    baseline, now = history.baseline(name), history.now(name)
    if baseline is None or now is None or not history.is_fresh(name):
        return None
    threshold = baseline.median + max(rise, history.config.num_spreads * baseline.spread)
    return AlarmFinding(
        is_bad=now >= threshold,
        metric=name,
        value=now,
        threshold=threshold,
        baseline=baseline.median,
        text=f"{what}: {_of(baseline.median)} in the first steps, {_of(now)} now",
        evidence=evidence,
    )


def repetition(history: History) -> AlarmFinding | None:
    """Completions say again what they have said."""
    what = "share of 4-grams that a completion has already said"
    return _risen(history, REPETITION, history.config.repetition_rise, what, "repetitive")


def truncation(history: History) -> AlarmFinding | None:
    """Completions do not come to an end any more."""
    what = "share of completions without an end"
    return _risen(history, TRUNCATION, history.config.truncation_rise, what, "cut_off")


def keeps_format(history: History) -> AlarmFinding | None:
    """Fewer completions have the form that was asked for."""
    config, name = history.config, history.config.format_metric
    if name is None or not history.is_fresh(name):
        return None
    baseline, now = history.baseline(name), history.now(name)
    if baseline is None or now is None:
        return None
    threshold = baseline.median - max(config.format_drop, config.num_spreads * baseline.spread)
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
    """A share that is bad whatever it was in the first steps."""
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
    """Groups whose rewards are all equal teach nothing."""
    what = "share of groups whose rewards are all equal"
    found = _too_large(history, ZERO_SPREAD, history.config.zero_spread_share, what, "equal")
    reward = history.now(REWARD)
    if found is None or reward is None:
        return found
    # Whether that is the end that was wished for, the reward says.
    return replace(found, text=f"{found.text}; the mean reward is {_of(reward)}")


def missing_rewards(history: History) -> AlarmFinding | None:
    """Completions without a reward are left out, and those that remain may be others."""
    what = "share of completions without a reward"
    return _too_large(history, FAILURES, history.config.failure_share, what, "failed")


def ensemble(history: History) -> AlarmFinding | None:
    """Several reward models no longer agree how much better the completions have become.

    Models that were trained apart agree where there is something to know and go apart where the
    policy has found what only one of them likes (Coste et al., arXiv 2310.02743). The gain of each
    is measured in standard deviations of its own scores in the first steps.
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
        apart = gains[most] - gains[least]
        found.append(
            AlarmFinding(
                is_bad=apart >= history.config.disagreement,
                metric=f"{most}/mean",
                value=apart,
                threshold=history.config.disagreement,
                text=f"{most} has gained {_of(gains[most])} standard deviations since the first "
                f"steps, {least} {_of(gains[least])}",
            )
        )
    return max(found, key=lambda one: one.value, default=None)


def _of(value: float) -> str:
    return format_number(value)


RULES: Mapping[Alarm, AlarmRule] = MappingProxyType(
    {
        "overoptimisation": AlarmRule(
            judge=overoptimisation,
            advice="go back to the checkpoint at the peak; weigh the divergence from the reference "
            "more (loss_fn.reference_policy_kl_penalty) or learn more slowly; train the reward "
            "model "
            "on completions of this policy; put the rule into the reward (env.composite)",
        ),
        "kl_jump": AlarmRule(
            judge=kl_jump,
            advice="read the samples of this step beside earlier ones; lower the learning rate, "
            "clip "
            "gradients (policy.max_grad_norm), or weigh the divergence more "
            "(loss_fn.reference_policy_kl_penalty)",
        ),
        "length": AlarmRule(
            judge=length,
            advice="read the longest and the shortest with their rewards. If length itself is paid "
            "for: grpo.reward_shaping against overlong completions, a reward model trained on "
            "pairs "
            "of equal length, a rule beside it. If thinking longer is the aim: "
            "grpo.health.ignore=[length]",
        ),
        "length_bias": AlarmRule(
            judge=length_bias,
            advice="measure the reward model's preference for length (laurel eval pairs "
            "--diagnostics); shape the reward (grpo.reward_shaping); use "
            "loss_fn.normalizer=max_length, so that the loss itself does not favour lengths",
        ),
        "repetition": AlarmRule(
            judge=repetition,
            advice="read the samples; lower policy.generation.max_new_tokens or penalise overlong "
            "completions; weigh the divergence more; show the reward model such texts as rejected",
        ),
        "truncation": AlarmRule(
            judge=truncation,
            advice="raise policy.generation.max_new_tokens if the answers are good but unfinished; "
            "else grpo.reward_shaping.stop_properly_penalty_coef, or grpo.overlong_filtering",
        ),
        "format": AlarmRule(
            judge=keeps_format,
            advice="make the form a part of the reward, or its gate (env.composite); show it in "
            "the "
            "prompt; warm up on demonstrations that have it (laurel sft)",
        ),
        "zero_spread_groups": AlarmRule(
            judge=zero_spread_groups,
            advice="if all are right, use harder tasks; if none is, easier ones or a warm-up; draw "
            "more completions of each; grpo.use_dynamic_sampling leaves such groups out",
        ),
        "ensemble": AlarmRule(
            judge=ensemble,
            advice="combine warily (env.reward_model.combine=mean_minus_std or min); read what "
            "the one "
            "likes and the other does not, and have pairs of it judged",
        ),
        "failures": AlarmRule(
            judge=missing_rewards,
            advice="see train/reward/failed_* for the reasons and completions/ for the texts; a "
            "reward "
            "model that fails on certain texts is not measured on them",
        ),
    }
)
"""Every alarm, in the order in which they are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmEvent:
    """An alarm that rises, or is over."""

    step: int
    alarm: Alarm
    state: Literal["raised", "over"]
    finding: AlarmFinding

    @property
    def advice(self) -> str:
        """What people usually do about it."""
        return RULES[self.alarm].advice


class Alarms:
    """What is wrong with a run at the moment.

    An alarm rises as soon as its rule finds something bad, and is over when the rule has found
    nothing bad `window` times in a row. A silent rule changes nothing.

    Example::

        alarms = Alarms(HealthConfig())
        for event in alarms.see(1, {"train/reward": 0.3, ...}):
            print(event.alarm, event.finding.text)
    """

    def __init__(
        self,
        config: HealthConfig,
        *,
        members: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing has been seen yet.

        Args:
            config: See there.
            members: Names of the reward models where there are several.
            settings: The whole configuration as plain values, in which a gold metric is looked for
                where `config` names none.
        """
        self.config = config
        self._history = History(config, members=members, settings=settings)
        self._good_in_a_row: dict[Alarm, int] = {}
        """By the alarms that are raised."""
        self._known: set[Alarm] = set()

    @property
    def raised(self) -> tuple[Alarm, ...]:
        """The alarms that have risen and are not over."""
        return tuple(name for name in RULES if name in self._good_in_a_row)

    @property
    def known(self) -> tuple[Alarm, ...]:
        """The alarms of which this run has measured enough to judge."""
        return tuple(name for name in RULES if name in self._known)

    @property
    def stopping(self) -> tuple[Alarm, ...]:
        """The alarms that are raised and are to end the run."""
        return tuple(name for name in self.raised if name in self.config.stop_on)

    def see(self, step: int, figures: Mapping[str, float]) -> list[AlarmEvent]:
        """Judge what was measured at a step, or in a validation after it.

        Args:
            step: Its number.
            figures: By the full names that they are logged under.
        """
        self._history.add(figures)
        events = []
        for name, rule in RULES.items():
            finding = None if name in self.config.ignore else rule.judge(self._history)
            if finding is None:
                continue
            self._known.add(name)
            state = self._changed(name, finding)
            if state is not None:
                events.append(AlarmEvent(step=step, alarm=name, state=state, finding=finding))
        return events

    def _changed(self, name: Alarm, finding: AlarmFinding) -> Literal["raised", "over"] | None:
        is_raised = name in self._good_in_a_row
        if finding.is_bad:
            self._good_in_a_row[name] = 0
            return None if is_raised else "raised"
        if not is_raised:
            return None
        self._good_in_a_row[name] += 1
        if self._good_in_a_row[name] < self.config.window:
            return None
        del self._good_in_a_row[name]
        return "over"

    def state_dict(self) -> dict[str, Any]:
        """Everything that was seen, as far as it is remembered; as JSON knows it."""
        return {
            "history": self._history.state_dict(),
            "raised": dict(self._good_in_a_row),
            "known": list(self.known),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._history.load_state_dict(state["history"])
        wanted = [name for name in RULES if name not in self.config.ignore]
        self._good_in_a_row = {n: state["raised"][n] for n in wanted if n in state["raised"]}
        self._known = {name for name in wanted if name in state["known"]}


# --------------------------------------------------------------------------------------------------
# The gold metric of a run: what is really wanted, measured beside the reward it learns from.
#
# Reports and alarms ask here, so that both speak of the same metric.

_GOLD_FIGURES = ("accuracy", "reward_mean")
"""Figures of an environment that say how good completions are, the clearest first."""


def gold_metric(settings: Mapping[str, Any], measured: Collection[str]) -> str | None:
    """The full name of a run's gold metric; None where the run has none.

    It is `grpo.health.gold_metric` where that is set. Otherwise it is a figure of a part with
    weight 0 of a `composite` environment: the part judges completions and is no part of the reward.

    Args:
        settings: The whole configuration of the run, as plain values (`model_dump()`, or
            `config.json` of its directory).
        measured: Names of the metrics that the run has logged. A part of a composite whose
            environment is never used logs none, and is passed over.
    """
    named = _inside(settings, "grpo", "health").get("gold_metric")
    if named is not None:
        return str(named)
    return next((name for name in _of_composites(settings) if name in measured), None)


def _of_composites(settings: Mapping[str, Any]) -> Iterator[str]:
    for environment, composite in _inside(settings, "env", "composite").items():
        parts = composite.get("parts") if isinstance(composite, Mapping) else None
        for part in parts or ():
            # A gate decides about the reward, whatever its weight.
            if part.get("gate") is None and part.get("weight", 1.0) == 0.0:
                yield from (f"env/{environment}/{part.get('env')}/{one}" for one in _GOLD_FIGURES)


def _inside(settings: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """A section within sections; empty where the settings lack it, as those of old runs may."""
    found: Any = settings
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}
