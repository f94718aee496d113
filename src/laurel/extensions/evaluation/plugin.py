"""The benchmarks as plug-ins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laurel.plugins import BenchmarkKind

if TYPE_CHECKING:
    from laurel.evaluation.benchmarks import Benchmark


class OwnBenchmark(BenchmarkKind):
    """A benchmark of Laurel's own, by its name."""

    def make(self, section: None, name: str) -> Benchmark:
        """Return the benchmark."""
        from laurel.extensions.evaluation.benchmarks import BENCHMARKS

        return BENCHMARKS[name]
