"""Raises and ends the alarms of a run, step by step from its metrics.

The rules are pure arithmetic, without a clock, randomness or files. The same metrics in the same
order give the same events, even if the run was saved and resumed in between.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

import yaml

from laurel.config.grpo import Alarm, HealthConfig
from laurel.observe.console import format_number

# The history of a run that alarms keep: the first and the latest values of metrics, and a peak.

REWARD = "train/reward"
DIVERGENCES = ("train/kl_penalty", "train/kl_in_reward")
LENGTH = "train/mean_gen_tokens_per_sample"
LENGTH_CORRELATION = "train/completions/reward_length_correlation"
REPETITION = "train/completions/repetition"
TRUNCATION = "train/truncation_rate"
ZERO_SPREAD = "train/frac_reward_zero_std"
UPDATES = "train/optimizer_steps"
FAILURES = "train/completions/failure_share"
CONTROL_TOKENS = "train/completions/control_token_share"
READ = frozenset(
    {
        REWARD,
        *DIVERGENCES,
        LENGTH,
        LENGTH_CORRELATION,
        REPETITION,
        TRUNCATION,
        ZERO_SPREAD,
        UPDATES,
        FAILURES,
        CONTROL_TOKENS,
    }
)
"""The metrics that the rules read, besides those that the configuration names."""

WINDOWS_KEPT = 5
"""The number of latest windows that are kept."""
LEAST_STEPS = 3
"""The least number of first steps for a baseline."""
BEFORE_A_JUMP = 4
"""The number of earlier values that are needed to estimate the noise of one step."""
VALIDATIONS = 3
"""The number of validations whose median is checked: few, because each uses the same tasks."""
SIZES = ("num_samples", "num_problems_in_batch")
"""The metrics of an environment that count its completions of a step, and their problems."""
ALIKE = 0.5
"""The correlation that is assumed between the scores of completions of one problem. It makes the
effective sample size of a step smaller than its number of completions (the design effect)."""
EFFECTIVE_SIZE = 25.0
"""The effective sample size of a step that is assumed where those metrics are missing."""
ASSUMED = 4
"""The number of differences between steps that weigh as much as these assumptions."""
# The thresholds of the rules (docs/reward_hacking.md has the rates that were measured with them).
# Where chance moves a metric further, `num_spreads` and `jump_spreads` decide.

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

_OF_MEMBER = re.compile(r"(env/.+/part/)(.+)/(?:mean|std)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The median and spread of a metric in the first steps."""

    median: float
    spread: float
    """The robust standard deviation: 1.4826 times the median absolute deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentValues:
    """The latest value of a metric, compared with the values right before it."""

    value: float
    before: float
    """The median of the window before the value; the window may not be full yet."""
    spread: float | None
    """The robust standard deviation of a value; None with fewer than `BEFORE_A_JUMP` values."""


@dataclass(slots=True, kw_only=True)
class MetricWindow:
    """The kept values of one metric."""

    first: list[float] = field(default_factory=list)
    latest: list[float] = field(default_factory=list)
    count: int = 0
    """The number of finite values so far."""
    is_fresh: bool = False
    """Whether the last step, or validation, measured the metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The gold metric over successive steps, with the reward and the KL divergence there."""

    gold: float
    """The mean over the steps; of validations, the median."""
    count: int
    """The number of values."""
    reward: float
    divergence: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How far chance moves a metric from step to step."""

    unit: float
    """The standard deviation of a value; of a share, relative to that of a single sample."""
    size: float | None
    """For a share, the effective sample size of a step; None for other metrics."""

    def at(self, level: float) -> float:
        """Return the standard deviation of a value where the metric is at a level.

        Chance moves a share that is nearly 0, or nearly 1, less than one in the middle.
        """
        if self.size is None:
            return self.unit
        share = (level * self.size + 0.5) / (self.size + 1.0)
        return self.unit * math.sqrt(share * (1.0 - share))


class History:
    """Keeps the values of a run's metrics that the rules read, in constant memory.

    A value that is not finite counts as not measured.
    """

    def __init__(
        self,
        config: HealthConfig,
        *,
        members: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Start an empty history; the arguments are those of `Alarms`."""
        self.config = config
        self.members = tuple(members)
        self.gold_name: str | None = config.gold_metric
        """The name of the gold metric; None while it is unknown, until one has been measured."""
        self._settings = settings or {}
        self.peak: Level | None = None
        """The level at which the gold metric was surely best."""
        self._surely = -math.inf
        """The gold metric of the peak less two standard errors."""
        self._series: dict[str, MetricWindow] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        """Add the metrics of a step, or of a validation, by their full names."""
        for series in self._series.values():
            series.is_fresh = False
        if self.gold_name is None:
            self.gold_name = gold_metric(self._settings, figures)
        for name, value in figures.items():
            if math.isfinite(value) and self._is_read(name):
                series = self._series.setdefault(name, MetricWindow())
                if len(series.first) < self.config.baseline_steps:
                    series.first.append(float(value))
                series.latest.append(float(value))
                # Memory and the saved state have a constant size.
                del series.latest[: -WINDOWS_KEPT * max(self.config.window, VALIDATIONS)]
                series.count += 1
                series.is_fresh = True
        self._update_peak()

    def _is_read(self, name: str) -> bool:
        if name in READ or name in (self.gold_name, self.config.format_metric):
            return True
        if name in self._sizes_of_gold():
            return True
        found = _OF_MEMBER.fullmatch(name)
        return found is not None and found[2] in self.members

    def _sizes_of_gold(self) -> tuple[str, ...]:
        # An environment counts its completions and problems beside its other metrics.
        stem = (self.gold_name or "").rpartition("/")[0]
        return tuple(f"{stem}/{size}" for size in SIZES)

    def _update_peak(self) -> None:
        name = self.gold_name
        if name is None or not self.is_fresh(name):
            return
        steps = self.gold_window if is_of_validation(name) else self.config.baseline_steps
        level, noise = self.gold_level(steps), self.gold_noise()
        if level is None or noise is None:
            return
        # The best of many noisy values is best by chance. So the peak is one of means, and a mean
        # over few of the first steps counts for less.
        surely = level.gold - 2 * noise.at(level.gold) / math.sqrt(level.count)
        if self.peak is None or surely > self._surely:
            self.peak, self._surely = level, surely

    def is_fresh(self, name: str) -> bool:
        """Report whether the last step, or validation, measured a metric."""
        series = self._series.get(name)
        return series is not None and series.is_fresh

    def latest(self, name: str) -> list[float]:
        """Return the values of a metric that are kept, in their order."""
        series = self._series.get(name)
        return series.latest if series is not None else []

    def now(self, name: str) -> float | None:
        """Return the median of a metric over the latest window; None before a window is full."""
        values, window = self.latest(name), self.config.window
        return statistics.median(values[-window:]) if len(values) >= window else None

    def most(self, name: str) -> float | None:
        """Return the largest value of a metric in the latest window; None before it is full."""
        values, window = self.latest(name), self.config.window
        return max(values[-window:]) if len(values) >= window else None

    @property
    def gold_window(self) -> int:
        """The largest number of latest values of the gold metric that are compared with the peak.

        That are `window` steps, or at most `VALIDATIONS` validations.
        """
        window = self.config.window
        return min(window, VALIDATIONS) if is_of_validation(self.gold_name or "") else window

    def gold_level(self, count: int) -> Level | None:
        """Return the level over the last `count` values of the gold metric, or over all so far.

        None if the gold metric or the reward is not measured.
        """
        name, kl = self.gold_name or "", self.divergence() or ""
        mean: Callable[[Sequence[float]], float] = statistics.fmean
        num_steps = count
        if is_of_validation(name):  # there are steps between two of them
            mean, num_steps = statistics.median, self.config.window
        golds = self.latest(name)[-count:]
        rewards, divergences = (self.latest(one)[-num_steps:] for one in (REWARD, kl))
        if not golds or not rewards:
            return None
        return Level(
            gold=mean(golds),
            count=len(golds),
            reward=mean(rewards),
            divergence=mean(divergences) if divergences else None,
        )

    def gold_noise(self, *, but_last: int = 0) -> Noise | None:
        """Return the noise of the gold metric before its last `but_last` values.

        None if there are too few values to tell. Validations have none: all have the same tasks.
        """
        name = self.gold_name or ""
        if is_of_validation(name):
            return Noise(unit=0.0, size=None)
        values = self.latest(name)
        before = values[: len(values) - but_last]
        if not all(0.0 <= value <= 1.0 for value in values):
            return estimated_noise(before)
        samples, problems = (self.latest(size)[-1:] for size in self._sizes_of_gold())
        if not samples or not problems or not 0.0 < problems[0] <= samples[0]:
            return estimated_noise(before, size=EFFECTIVE_SIZE)
        effect = 1.0 + ALIKE * (samples[0] / problems[0] - 1.0)
        return estimated_noise(before, size=samples[0] / effect)

    def baseline(self, name: str) -> Baseline | None:
        """Return the baseline of a metric, from the first steps before the latest window.

        None with fewer than `LEAST_STEPS` such steps.
        """
        series, wanted = self._series.get(name), self.config.baseline_steps
        # The latest window must not be compared with itself.
        first = series.first[: max(0, series.count - self.config.window)] if series else []
        if len(first) < min(LEAST_STEPS, wanted):
            return None
        spread = _spread(first)
        if 1 < len(first) < wanted:
            # The median of a few values says little about chance, and is often 0.
            spread = max(spread, statistics.stdev(first)) * wanted / len(first)
        return Baseline(median=statistics.median(first), spread=spread)

    def step(self, name: str) -> RecentValues | None:
        """Return the latest value of a metric and those before it; None if it is the first."""
        series = self._series.get(name)
        if series is None or not series.is_fresh or len(series.latest) < 2:
            return None
        *before, value = series.latest
        spread = spread_of_changes(before) if len(before) > 1 else 0.0
        return RecentValues(
            value=value,
            before=statistics.median(before[-self.config.window :]),
            spread=max(spread, _spread(before)) if len(before) >= BEFORE_A_JUMP else None,
        )

    def divergence(self) -> str | None:
        """Return the name of the metric of KL divergence from the reference; None without one."""
        return next((name for name in DIVERGENCES if name in self._series), None)

    def ensembles(self) -> Iterator[list[str]]:
        """Yield, for each ensemble of reward models, the prefixes of its members' metrics."""
        by_place: dict[str, set[str]] = {}
        for name in self._series:
            found = _OF_MEMBER.fullmatch(name)
            if found is not None:
                by_place.setdefault(found[1], set()).add(found[1] + found[2])
        yield from (sorted(stems) for stems in by_place.values() if len(stems) > 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole history as values that JSON can hold."""
        peak = self.peak
        return {
            "series": {
                name: {"first": [*one.first], "latest": [*one.latest], "count": one.count}
                for name, one in self._series.items()
            },
            "gold": self.gold_name,
            "peak": None if peak is None else [self._surely, *astuple(peak)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the history from a saved state."""
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
            if len(peak) == 3:  # an older state
                peak = [peak[0], peak[0], self.config.window, *peak[1:]]
            surely, gold, count, reward, divergence = peak
            self._surely = surely
            self.peak = Level(gold=gold, count=count, reward=reward, divergence=divergence)


def estimated_noise(values: Sequence[float], *, size: float | None = None) -> Noise | None:
    """Estimate the noise of a metric from its values; None if they are too few.

    Differences of successive values tell it, on which a slow drift has hardly any effect. That of
    a share is known beforehand, unless its completions are more alike than is assumed: the
    assumption counts as much as `ASSUMED` differences.

    Args:
        values: The values of successive steps.
        size: For a share, the effective sample size of a step.
    """
    if not values:
        return None
    changes = [abs(after - before) for before, after in pairwise(values)]
    shown = math.sqrt(math.pi) / 2 * math.fsum(changes)
    if size is None:
        few = len(changes) < BEFORE_A_JUMP
        return None if few else Noise(unit=shown / len(changes), size=None)
    shown /= Noise(unit=1.0, size=size).at(statistics.fmean(values))
    unit = (ASSUMED / math.sqrt(size) + shown) / (ASSUMED + len(changes))
    return Noise(unit=unit, size=size)


def _spread(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return 1.4826 * statistics.median([abs(value - middle) for value in values])


def spread_of_changes(values: Sequence[float]) -> float:
    """Return the robust standard deviation of a value's noise, from at least two values.

    Differences between neighbours tell it, which a slow drift hardly widens.
    """
    changes = [abs(after - before) for before, after in pairwise(values)]
    return 1.4826 * statistics.median(changes) / math.sqrt(2)


def is_of_validation(name: str) -> bool:
    """Report whether a metric is measured in validations, not at every step."""
    return name.startswith("validation")


# The rules of the alarms: from the history of a run's metrics to a finding, or to nothing.
#
# Drifts compare the median of the latest window with the first steps. Leaps compare the latest step
# alone with the window before it, at once and from the second step on.
#
# A rule gives no result (None) if a metric that it reads is not measured, or not yet long enough,
# or was not measured in the last step. `docs/reward_hacking.md` describes each alarm, its
# threshold, and remedies.

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
    return max(least, history.config.jump_spreads * step.spread)


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
        history: The metrics of the run.
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


RULES: Mapping[Alarm, Callable[[History], AlarmFinding | None]] = MappingProxyType(
    {
        "overoptimisation": overoptimisation,
        "collapse": collapse,
        "kl_jump": kl_jump,
        "length": length,
        "length_bias": length_bias,
        "repetition": repetition,
        "truncation": truncation,
        "control_tokens": control_tokens,
        "format": keeps_format,
        "zero_spread_groups": zero_spread_groups,
        "no_updates": no_updates,
        "ensemble": ensemble,
        "failures": missing_rewards,
    }
)
"""The rule of every alarm, in the order in which they are reported."""


@cache
def _advice() -> Mapping[str, str]:
    path = files("laurel.observe") / "alarms.yaml"
    found: Mapping[str, str] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmEvent:
    """An event of a run: an alarm is raised, or ends."""

    step: int
    alarm: Alarm
    state: Literal["raised", "over"]
    finding: AlarmFinding

    @property
    def advice(self) -> str:
        """The usual remedies if this alarm is raised."""
        return _advice()[self.alarm]


class Alarms:
    """The alarms of a run, which are updated step by step.

    An alarm is raised as soon as its rule finds something bad, and ends when the rule has found
    nothing bad `window` times in a row. A rule without a result changes nothing.

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
        """Create the alarms of a new run, none of which is raised.

        Args:
            config: The settings of the alarms.
            members: The names of the reward models if there are several.
            settings: The whole configuration as plain values. A gold metric is searched in it if
                `config` names none.
        """
        self.config = config
        self._history = History(config, members=members, settings=settings)
        self._good_in_a_row: dict[Alarm, int] = {}
        """For each raised alarm, the number of good steps since the last bad one."""
        self._known: set[Alarm] = set()

    @property
    def raised(self) -> tuple[Alarm, ...]:
        """The alarms that are currently raised."""
        return tuple(name for name in RULES if name in self._good_in_a_row)

    @property
    def known(self) -> tuple[Alarm, ...]:
        """The alarms whose rules have had enough measurements in this run to give a result."""
        return tuple(name for name in RULES if name in self._known)

    @property
    def stopping(self) -> tuple[Alarm, ...]:
        """The raised alarms that are configured to end the run."""
        return tuple(name for name in self.raised if name in self.config.stop_on)

    def see(self, step: int, figures: Mapping[str, float]) -> list[AlarmEvent]:
        """Update all alarms with the metrics of a step, or of a validation after it.

        Args:
            step: The number of the step.
            figures: The metrics by their full names.

        Returns:
            An event for each alarm that was raised or has ended.
        """
        self._history.add(figures)
        events = []
        for name, judge in RULES.items():
            finding = None if name in self.config.ignore else judge(self._history)
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
        # A single good step may be chance, and users would ignore an alarm that flickers.
        self._good_in_a_row[name] += 1
        if self._good_in_a_row[name] < self.config.window:
            return None
        del self._good_in_a_row[name]
        return "over"

    def state_dict(self) -> dict[str, Any]:
        """Return the history and the raised alarms as values that JSON can hold."""
        return {
            "history": self._history.state_dict(),
            "raised": dict(self._good_in_a_row),
            "known": list(self.known),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the alarms from a saved state."""
        self._history.load_state_dict(state["history"])
        # A resumed run may ignore an alarm that was raised before.
        wanted = [name for name in RULES if name not in self.config.ignore]
        self._good_in_a_row = {n: state["raised"][n] for n in wanted if n in state["raised"]}
        self._known = {name for name in wanted if name in state["known"]}


# The gold metric of a run measures the real goal, besides the reward that the run learns from.
#
# Reports and alarms both use this definition.

_GOLD_FIGURES = ("accuracy", "reward_mean")
"""The metrics of an environment that measure quality, the clearest first."""


def gold_metric(settings: Mapping[str, Any], measured: Collection[str]) -> str | None:
    """Return the full name of a run's gold metric; None if the run has none.

    It is `grpo.health.gold_metric` if that is set. Otherwise it is a metric of a part of a
    `composite` environment whose weight is 0, so that its scores do not change the reward.

    Args:
        settings: The whole configuration of the run, as plain values (`model_dump()`, or
            `config.json` of its directory).
        measured: The names of the metrics that the run has logged. A composite that is never used
            logs none, and is ignored.
    """
    named = _inside(settings, "grpo", "health").get("gold_metric")
    if named is not None:
        return str(named)
    for environment, composite in _inside(settings, "env", "composite").items():
        parts = composite.get("parts") if isinstance(composite, Mapping) else None
        for part in parts or ():
            # A gate changes the reward, whatever its weight is.
            if part.get("gate") is None and part.get("weight", 1.0) == 0.0:
                for figure in _GOLD_FIGURES:
                    name = f"env/{environment}/{part.get('env')}/{figure}"
                    if name in measured:
                        return name
    return None


def _inside(settings: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    # The settings of older runs may lack a section.
    found: Any = settings
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}
