"""Reads the pairs of a training set, and recognizes the benchmark that a file belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from laurel.config.data import BenchmarkName
from laurel.data.benchmarks import (
    LABELS_STEPS,
    BenchmarkForm,
    benchmark_of,
    labels_steps,
    rows_of_preferences,
)
from laurel.data.sources import locate, read_rows
from laurel.errors import DataError
from laurel.evaluation.benchmarks import BenchmarkOptions, read_preferences
from laurel.evaluation.statistics import ScoredPair
from laurel.extensions.evaluation.benchmark_rows import (
    JUDGE_BENCH,
    REWARD_BENCH,
    REWARD_BENCH_2,
    RM_BENCH,
)
from laurel.extensions.evaluation.benchmarks import ordered_pairs
from laurel.types import Score

MOST_MALFORMED = 0.5
"""The share of malformed rows that a training set may have where it is only compared with."""
_UNSCORED = Score(value=None, failure="it is only read")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPairs:
    """The pairs that a model was trained on, without scores."""

    pairs: list[ScoredPair]
    notes: tuple[str, ...] = ()
    """For each set with malformed rows, the number that was left out."""


def training_pairs(asked: BenchmarkOptions) -> TrainingPairs:
    """Read every pair of the named preferences; malformed rows are left out and counted.

    Raises:
        DataError: A set cannot be read, or more than `MOST_MALFORMED` of its rows are malformed.
    """
    pairs: list[ScoredPair] = []
    notes: list[str] = []
    for path in asked.data:
        preferences, report = read_preferences(asked, path, on_bad_row="skip")
        left_out = report.dropped.get("malformed")
        if left_out is not None:
            first = f"{left_out.examples[0]}: {next(iter(left_out.kinds))}"
            said = f"{left_out.count:,} of {report.num_read:,} rows are malformed (e.g. {first})"
            if left_out.count > MOST_MALFORMED * report.num_read:
                raise DataError(
                    f"{path}: {said}, more than {MOST_MALFORMED:.0%}: the others are no fair "
                    f"sample. Fix the file; laurel data check {path} shows what is wrong with it"
                )
            notes.append(f"{path}: {said} and left out")
        # Texts alone are compared, and the bag of words learns from them: no score is needed.
        for row in rows_of_preferences(preferences, subset=path if len(asked.data) > 1 else None):
            pairs += ordered_pairs(row, [_UNSCORED] * len(row.group.completions_G))
    return TrainingPairs(pairs=pairs, notes=tuple(notes))


ON_HUB: dict[BenchmarkName, BenchmarkForm] = {
    "reward-bench": REWARD_BENCH,
    "reward-bench-2": REWARD_BENCH_2,
    "rm-bench": RM_BENCH,
    "judge-bench": JUDGE_BENCH,
}
"""The forms of the benchmarks that can be read from the hub, by the benchmark's name."""


def benchmark_in(path: str, *, split: str | None) -> BenchmarkName:
    """Recognize the benchmark that the rows of a file, a directory or a hub data set belong to.

    Raises:
        DataError: The rows cannot be read, or their columns fit no benchmark.
    """
    for name, form in ON_HUB.items():
        if any(part.name == path for part in form.hub):
            return name
    source, row = next(read_rows(path, split=split))  # no rows at all are a DataError
    found = benchmark_of(row)
    if found is None and labels_steps(row):
        raise DataError(f"{locate(path, source)}: {LABELS_STEPS}")
    if found is None:
        known = "; ".join(f"{form.title}: {form.written}" for form in ON_HUB.values())
        raise DataError(
            f"{locate(path, source)}: the columns ({', '.join(map(str, row))}) are those of no "
            f"benchmark, and no preferences. Name the evaluation (laurel eval pairs, for one, has "
            f"--dataset), or leave the file out. Known are {known}"
        )
    return found
