"""Which benchmark a file of rows belongs to, told from its columns."""

from __future__ import annotations

from laurel.config.benchmarks import BenchmarkName
from laurel.data.benchmark_rows import (
    JUDGE_BENCH,
    REWARD_BENCH,
    REWARD_BENCH_2,
    RM_BENCH,
    BenchmarkForm,
    benchmark_of,
)
from laurel.data.sources import locate, read_rows
from laurel.errors import DataError

ON_HUB: dict[BenchmarkName, BenchmarkForm] = {
    "reward-bench": REWARD_BENCH,
    "reward-bench-2": REWARD_BENCH_2,
    "rm-bench": RM_BENCH,
    "judge-bench": JUDGE_BENCH,
}
"""Those that have a place of their own."""


def benchmark_in(path: str, *, split: str | None) -> BenchmarkName:
    """The benchmark that the rows of a file, a directory or a hub data set belong to.

    Args:
        path: As `--data` names it.
        split: Of a directory or a hub data set.

    Raises:
        DataError: It cannot be read, or its columns are those of none.
    """
    for name, form in ON_HUB.items():
        if any(part.name == path for part in form.hub):
            return name
    source, row = next(read_rows(path, split=split))  # no rows at all are a DataError
    found = benchmark_of(row)
    if found is None:
        known = "; ".join(f"{form.title}: {form.written}" for form in ON_HUB.values())
        raise DataError(
            f"{locate(path, source)}: the columns ({', '.join(map(str, row))}) are those of no "
            f"benchmark, and no preferences. Name the evaluation (laurel eval pairs, for one, has "
            f"--dataset), or leave the file out. Known are {known}"
        )
    return found
