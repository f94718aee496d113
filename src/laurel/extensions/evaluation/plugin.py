"""The benchmarks as plug-ins."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from laurel.plugins import BenchmarkKind

if TYPE_CHECKING:
    from laurel.config.data import BenchmarkName
    from laurel.evaluation.benchmarks import Benchmark


class _OfTable(BenchmarkKind):
    name: ClassVar[BenchmarkName]

    def make(self, section: None, given: None = None, /) -> Benchmark:
        """Return the benchmark."""
        from laurel.extensions.evaluation.benchmarks import BENCHMARKS

        return BENCHMARKS[self.name]


class BestOfN(_OfTable):
    """Answers of which some are right."""

    name = "best-of-n"


class JudgeBench(_OfTable):
    """JudgeBench: pairs of which one answer is right, by subject."""

    name = "judge-bench"


class Pairs(_OfTable):
    """Any preferences."""

    name = "pairs"


class ProcessBench(_OfTable):
    """ProcessBench: the first wrong step of a solution."""

    name = "process-bench"


class RewardBench(_OfTable):
    """RewardBench: pairs in four sections."""

    name = "reward-bench"


class RewardBench2(_OfTable):
    """RewardBench 2: the best of four in five domains, and ties."""

    name = "reward-bench-2"


class RmBench(_OfTable):
    """RM-Bench: answers in three styles."""

    name = "rm-bench"
