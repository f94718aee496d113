"""What the alarms remember of a run: the first values of a metric, its latest, and one peak."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from laurel.config.health import HealthConfig
from laurel.observe.gold import gold_metric

REWARD = "train/reward"
DIVERGENCES = ("train/kl_penalty", "train/kl_in_reward")
LENGTH = "train/mean_gen_tokens_per_sample"
LENGTH_CORRELATION = "train/completions/reward_length_correlation"
REPETITION = "train/completions/repetition"
TRUNCATION = "train/truncation_rate"
ZERO_SPREAD = "train/frac_reward_zero_std"
FAILURES = "train/completions/failure_share"
READ = frozenset(
    {REWARD, *DIVERGENCES, LENGTH, LENGTH_CORRELATION, REPETITION, TRUNCATION, ZERO_SPREAD,
     FAILURES}
)  # fmt: skip
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
class Step:
    """The latest value of a metric and those right before it."""

    value: float
    before: float
    """Median of the window before the value, or of what there is of it."""
    spread: float | None
    """Robust standard deviation of a single value; None with fewer than `BEFORE_A_JUMP` of them."""
    is_share: bool
    """All of them lie between 0 and 1."""


@dataclass(slots=True, kw_only=True)
class Series:
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
        self._series: dict[str, Series] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        """What was measured at one step, or in one validation, by full name."""
        for series in self._series.values():
            series.is_fresh = False
        if self.gold_name is None:
            self.gold_name = gold_metric(self._settings, figures)
        for name, value in figures.items():
            if math.isfinite(value) and self._is_read(name):
                self._add(self._series.setdefault(name, Series()), float(value))
        self._look_for_peak()

    def _is_read(self, name: str) -> bool:
        if name in READ or name in (self.gold_name, self.config.format_metric):
            return True
        found = _OF_MEMBER.fullmatch(name)
        return found is not None and found[2] in self.members

    def _add(self, series: Series, value: float) -> None:
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

    def step(self, name: str) -> Step | None:
        """The latest value and those before it; None where it is the first one."""
        series = self._series.get(name)
        if series is None or not series.is_fresh or len(series.latest) < 2:
            return None
        *before, value = series.latest
        # Steps from value to value: their spread is hardly widened by a drift.
        changes = [abs(b - a) for a, b in pairwise(before)]
        spread = 1.4826 * statistics.median(changes) / math.sqrt(2) if changes else 0.0
        return Step(
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
            name: Series(first=[*one["first"]], latest=[*one["latest"]], count=one["count"])
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
