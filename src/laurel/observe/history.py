"""The history of a run that alarms keep: first and latest values of metrics, and a peak."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import pairwise
from typing import Any

from laurel.config.grpo import HealthConfig

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

        These are `window` steps, or at most `VALIDATIONS` validations.
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
    named = inside(settings, "grpo", "health").get("gold_metric")
    if named is not None:
        return str(named)
    for environment, composite in inside(settings, "env", "composite").items():
        parts = composite.get("parts") if isinstance(composite, Mapping) else None
        for part in parts or ():
            # A gate changes the reward, whatever its weight is.
            if part.get("gate") is None and part.get("weight", 1.0) == 0.0:
                for figure in _GOLD_FIGURES:
                    name = f"env/{environment}/{part.get('env')}/{figure}"
                    if name in measured:
                        return name
    return None


def inside(settings: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return a section of plain settings; an empty one where it is missing."""
    # The settings of older runs may lack a section.
    found: Any = settings
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}
