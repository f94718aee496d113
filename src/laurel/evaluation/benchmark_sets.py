"""A benchmark that is measured again and again: its rows, chosen once, and its figures by short
names.

The arithmetic is that of `laurel eval`; what is added is what a run logs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laurel.config.benchmarks import BenchmarkName, BenchmarkSetConfig
from laurel.data.benchmark_rows import BenchmarkRow
from laurel.errors import DataError
from laurel.evaluation import (
    best_of_n,
    judge_bench,
    pair_accuracy,
    reward_bench,
    reward_bench_2,
    rm_bench,
)
from laurel.evaluation.benchmarks import BENCHMARKS, Reduced, reduce_scores
from laurel.evaluation.measured import share
from laurel.evaluation.reward_bench_2 import ZeroSpread, is_ties
from laurel.types import Group, Score


def _short(names: Sequence[str]) -> dict[str, str]:
    return {name: name.lower().replace(" ", "_") for name in names}


PARTS: Mapping[BenchmarkName, Mapping[str, str]] = {
    "reward-bench": _short([*reward_bench.SECTIONS, reward_bench.PRIOR]),
    "reward-bench-2": _short(list(reward_bench_2.NUM_PROMPTS)),
    "rm-bench": _short([*rm_bench.LEVELS, *rm_bench.DOMAINS]),
    "judge-bench": _short(list(dict.fromkeys(judge_bench.CATEGORIES.values()))),
    "pairs": {pair_accuracy.TIES: "tie_share"},
    "best-of-n": {best_of_n.RANDOM: "random", best_of_n.ORACLE: "oracle"},
}
"""What a final score is made of, or stands beside, by the names that it is logged by."""
FINAL, ALL_ROWS = "final_score", "accuracy"
_SAME_FOR_ALL = ("random", "oracle")
"""Figures of the rows, whatever the model says."""
_EVEN = Score(value=0.0)


def selectable(benchmark: BenchmarkName) -> list[str]:
    """The figures that one checkpoint may be better by than another."""
    parts = [key for key in PARTS[benchmark].values() if key not in _SAME_FOR_ALL]
    return [FINAL, ALL_ROWS, *parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a benchmark is asked for: see `benchmarks.Asked`."""

    data: tuple[str, ...]
    split: str | None
    dataset: str | None
    prior: bool
    zero_spread: ZeroSpread
    margin_key: str | None = None
    column_keys: Mapping[str, str] = field(default_factory=dict)
    max_samples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSet:
    """The rows of a benchmark that a run is measured on."""

    name: str
    """That the run gives it."""
    benchmark: BenchmarkName
    asked: Asked
    rows: Sequence[BenchmarkRow]
    num_read: int
    """Rows that there were before some of them were chosen."""
    told: tuple[str, ...] = ()
    """What reading them told; see `Benchmark.read`."""

    @classmethod
    def load(cls, name: str, config: BenchmarkSetConfig) -> BenchmarkSet:
        """Read a benchmark, and choose its rows.

        Raises:
            DataError: A file or a row that cannot be used, or nothing that could be compared.
        """
        asked = Asked(
            data=config.paths, split=config.split, dataset=config.dataset_name, prior=config.prior,
            zero_spread=config.zero_spread,
        )  # fmt: skip
        try:
            told: list[str] = []
            read = BENCHMARKS[config.benchmark].read(asked, told.append)
            if not read:
                where = ", ".join(config.paths) or "its own place on the hub"
                raise DataError(f"there is no row in {where}")
            chosen = cls(
                name=name, benchmark=config.benchmark, asked=asked, num_read=len(read),
                told=tuple(told),
                rows=read if config.max_samples is None else spread(read, config.max_samples),
            )  # fmt: skip
            if not chosen.rows:
                raise DataError(
                    f"max_samples={config.max_samples} leaves none of its rows; raise it"
                )
            chosen.possible()
        except DataError as error:
            raise DataError(f"{name} (benchmark {config.benchmark}): {error}") from error
        return chosen

    @property
    def title(self) -> str:
        """What the benchmark is called."""
        return BENCHMARKS[self.benchmark].title

    @property
    def is_cut(self) -> bool:
        """Whether it has fewer rows than there are."""
        return len(self.rows) < self.num_read

    @property
    def groups(self) -> list[Group]:
        """What is to be scored."""
        return [row.group for row in self.rows]

    def reduced(self, scores: Sequence[Sequence[Score]]) -> Reduced:
        """What `laurel eval` makes of scores of these rows."""
        return reduce_scores(BENCHMARKS[self.benchmark], self.rows, scores, self.asked)

    def figures(self, scores: Sequence[Sequence[Score]]) -> dict[str, float]:
        """What is logged of scores, by bare name; what is undefined is absent.

        - `final_score` and, beside it, `longer_wins_final_score`: absent where a part of the
          benchmark is, and where it was cut.
        - `accuracy`, `longer_wins_baseline`: what rows are worth, over all rows.
        - The parts: see `PARTS`.
        - `num_rows` that have a verdict, and `num_failures` that have none.
        """
        found = self.reduced(scores)
        measured, parts = found.measured, PARTS[self.benchmark]
        every = share(ALL_ROWS, measured.credits.values())
        named: list[tuple[str, float | None]] = [
            (ALL_ROWS, every.value),
            ("longer_wins_baseline", share("", found.baseline.credits.values()).value),
        ]
        if not self.is_cut:
            named.insert(0, (FINAL, measured.final.value))
            named.append(("longer_wins_final_score", found.baseline.final.value))
        named += [
            (parts[figure.name], figure.value)
            for figure in (*measured.sections, *measured.subsets)
            if figure.name in parts
        ]
        known = {key: value for key, value in named if value is not None}
        return known | {
            "num_rows": float(every.num_rows), "num_failures": float(every.num_failures)
        }  # fmt: skip

    def possible(self) -> list[str]:
        """The figures that these rows give a model, and that a checkpoint may be the best by."""
        known = self.figures([[_EVEN] * len(row.group.completions_G) for row in self.rows])
        return [key for key in selectable(self.benchmark) if key in known]

    def notes(self) -> list[str]:
        """What a reader must know to believe the figures."""
        even = [[_EVEN] * len(row.group.completions_G) for row in self.rows]
        notes = list(self.reduced(even).measured.notes)
        if self.is_cut:
            cut = f"cut to {len(self.rows):,} of {self.num_read:,} rows (max_samples): "
            absent = [note for note in notes if note.startswith("absent")]
            notes = [f"{cut}the figures are of a sample, and there is no final score", *absent]
        return [*self.told, *notes]

    def described(self) -> str:
        """How much of what it is, in a line."""
        where = ", ".join(self.asked.data) or "its own place on the hub"
        return f"{self.title}, {where}: {len(self.rows):,} of {self.num_read:,} rows"

    def to_dict(self) -> dict[str, Any]:
        """What the data report of a run says of it."""
        return {
            "benchmark": self.benchmark,
            "data": list(self.asked.data),
            "num_read": self.num_read,
            "num_kept": len(self.rows),
            "notes": self.notes(),
        }


def spread(rows: Sequence[BenchmarkRow], limit: int) -> list[BenchmarkRow]:
    """At most so many rows, of each subset its share, in their order; the same ones each time.

    They lie evenly in their subset. The two rows of a prompt of Ties stay together: neither counts
    without the other.
    """
    subsets = list(dict.fromkeys(row.subset for row in rows))
    units: dict[str, list[BenchmarkRow]] = {}
    # One subset after the other: where they take turns, every nth row may be of the same one.
    for row in sorted(rows, key=lambda row: subsets.index(row.subset)):
        partner = f"ties {row.id.partition(':')[2]}" if is_ties(row.subset) else f"row {row.id}"
        units.setdefault(partner, []).append(row)
    chosen: set[str] = set()
    seen = 0
    for unit in units.values():
        seen += len(unit)
        # As many as are due after so many, and no more.
        if len(chosen) + len(unit) <= seen * limit // len(rows):
            chosen |= {row.id for row in unit}
    return [row for row in rows if row.id in chosen]
