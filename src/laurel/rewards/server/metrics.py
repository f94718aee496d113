"""Figures of a reward server for Prometheus."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ServerMetrics:
    """Counts requests; all else is asked for when somebody looks."""

    def __init__(
        self, paths: Iterable[str], *, counters: Callable[[], Mapping[str, float]],
        gauges: Callable[[], Mapping[str, float]],
    ) -> None:  # fmt: skip
        """Begin to count.

        Args:
            paths: Those that have a name of their own in the figures; others are `other`.
            counters: Further figures that only grow, by name.
            gauges: Further figures, by name.
        """
        self._paths = frozenset(paths)
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "laurel_requests", "Requests that were answered.", ("path", "status"),
            registry=self._registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "laurel_request_seconds", "From the head of a request to the end of its answer.",
            ("path",), buckets=_BUCKETS, registry=self._registry,
        )  # fmt: skip
        self._completions = 0
        self._failures: Tally[str] = Tally()
        self._failed = 0
        self._counters = counters
        self._gauges = gauges
        self._registry.register(self)
        self._of_path = {path: self._seconds.labels(path) for path in self._paths | {"other"}}
        self._of_status: dict[tuple[str, int], Counter] = {}

    def note(self, path: str, status: int, seconds: float, completions: int, failures: int) -> None:
        """Count one request."""
        name = path if path in self._paths else "other"
        counter = self._of_status.get((name, status))
        if counter is None:
            counter = self._of_status[name, status] = self._requests.labels(name, str(status))
        counter.inc()
        self._of_path[name].observe(seconds)
        self._completions += completions
        self._failed += failures

    def note_failures(self, reasons: Iterable[str]) -> None:
        """Count completions without a score by why they have none."""
        self._failures.update(reasons)

    def collect(self) -> Iterable[Metric]:
        """What `prometheus_client` asks for."""
        counts = {"completions": self._completions, "completions_failed": self._failed}
        for name, value in {**counts, **self._counters()}.items():
            yield CounterMetricFamily(f"laurel_{name}", f"{name} so far.", value=value)
        reasons = CounterMetricFamily("laurel_failures", "By their reason.", labels=["reason"])
        for reason, count in self._failures.items():
            reasons.add_metric([reason], count)
        yield reasons
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(f"laurel_{name}", f"{name} now.", value=value)

    def text(self) -> bytes:
        """All figures in Prometheus' format."""
        return generate_latest(self._registry)
