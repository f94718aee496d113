"""The benchmarks of reward models by name: which rows they read, and what is made of the scores.

`laurel eval`, validation during training and the check of a judge before GRPO all come here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal, Protocol

from laurel.config.benchmarks import BenchmarkName
from laurel.config.preference_data import DatasetConfig
from laurel.data import benchmark_rows as rows_of
from laurel.data.benchmark_rows import BenchmarkForm, BenchmarkRow
from laurel.data.cells import UnusableRow
from laurel.data.preferences import load_preferences
from laurel.data.report import DataReport
from laurel.errors import DataError, key_of
from laurel.evaluation import (
    best_of_n,
    judge_bench,
    pair_accuracy,
    reward_bench,
    reward_bench_2,
    rm_bench,
)
from laurel.evaluation.measured import Measured, lists_by_length, pairs_by_length
from laurel.evaluation.reward_bench_2 import ZeroSpread
from laurel.evaluation.scored_lists import ScoredList
from laurel.evaluation.scored_pairs import ScoredPair
from laurel.observe.console import conversation_text
from laurel.observe.counts import counted
from laurel.types import Preference, Score

MOST_MALFORMED = 0.5
"""Share of the rows of a training set that may be malformed where it is only compared with."""
Tell = Callable[[str], object]
_UNSCORED = Score(value=None, failure="it is only read")


class Asked(Protocol):
    """What a benchmark is asked for."""

    @property
    def data(self) -> Sequence[str]:
        """Files, directories or names on the hub; empty: the benchmark's own place."""

    @property
    def split(self) -> str | None:
        """Of a directory or a hub data set."""

    @property
    def dataset(self) -> str | None:
        """The class that reads preferences (`pairs`)."""

    @property
    def column_keys(self) -> Mapping[str, str]:
        """Keys of `DatasetConfig` that name columns, and what they say (`pairs`)."""

    @property
    def margin_key(self) -> str | None:
        """The column that says by how much the chosen answer is better (`pairs`)."""

    @property
    def prior(self) -> bool:
        """The prior sets too (`reward-bench`)."""

    @property
    def zero_spread(self) -> ZeroSpread:
        """See `evaluation.reward_bench_2`."""

    @property
    def max_samples(self) -> int | None:
        """The first rows of each file, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One evaluation, of scored pairs or of scored lists."""

    title: str
    read: Callable[[Asked, Tell], list[BenchmarkRow]]
    """Tells what a person should know of rows that it leaves out, or keeps."""
    scored: Callable[[BenchmarkRow, Sequence[Score]], list[Any]]
    measure: Callable[[Sequence[Any], Asked], Measured]
    by_length: Callable[[Sequence[Any]], list[Any]]
    details: Callable[[Sequence[Any]], Mapping[str, Any]] = field(default=lambda rows: {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What became of the scores of a benchmark."""

    rows: Sequence[ScoredPair | ScoredList]
    measured: Measured
    baseline: Measured
    """The same of somebody who scores answers by their length, on the rows that were scored."""


def reduce_scores(
    benchmark: Benchmark,
    rows: Sequence[BenchmarkRow],
    scores: Sequence[Sequence[Score]],
    asked: Asked,
) -> Reduced:
    """The figures of a benchmark from the scores of its rows.

    Args:
        benchmark: One of `BENCHMARKS`.
        rows: As it reads them.
        scores: Of the completions of each.
        asked: What else decides the figures.

    Raises:
        DataError: Nothing can be compared, or the rows are not those of the benchmark.
    """
    scored = [
        one
        for row, scores_G in zip(rows, scores, strict=True)
        for one in benchmark.scored(row, scores_G)
    ]
    if not scored:
        raise DataError(f"none of {len(rows)} rows can be compared: no two answers differ in rank")
    try:
        return Reduced(
            rows=scored,
            measured=benchmark.measure(scored, asked),
            baseline=benchmark.measure(benchmark.by_length(scored), asked),
        )
    except ValueError as error:
        raise DataError(str(error)) from error


# --------------------------------------------------------------------------------------- reading


def _read(form: BenchmarkForm) -> Callable[[Asked, Tell], list[BenchmarkRow]]:
    return lambda asked, tell: rows_of.read_benchmark(
        form, asked.data, split=asked.split, limit=asked.max_samples
    )


def _reward_bench_rows(asked: Asked, tell: Tell) -> list[BenchmarkRow]:
    rows = _read(rows_of.REWARD_BENCH)(asked, tell)
    if asked.prior:
        rows += rows_of.read_benchmark(rows_of.PRIOR_SETS, (), limit=asked.max_samples)
    return rows


def _judge_bench_rows(asked: Asked, tell: Tell) -> list[BenchmarkRow]:
    """By category, so that two results can be compared by it as well."""
    rows = _read(rows_of.JUDGE_BENCH)(asked, tell)
    return [replace(row, subset=judge_bench.category_of(row.subset or "")) for row in rows]


def preference_rows(asked: Asked, tell: Tell) -> list[BenchmarkRow]:
    """Preferences of every set that is named; each is a subset of its own where there are more."""
    if not asked.data and asked.dataset is None:
        raise DataError(
            f"which pairs? Name them with {key_of('--data')} (a file, or a name on the hub), or "
            f"with {key_of('--dataset')} (HelpSteer3 or Tulu3Preference, which have a place of "
            "their own)"
        )
    rows: list[BenchmarkRow] = []
    for path in asked.data or (None,):
        preferences, report = _preferences(asked, path, on_bad_row="error")
        for said in (*_left_out(report), *report.notes):
            tell(said if len(asked.data) < 2 else f"{path}: {said}")
        rows += rows_of.rows_of_preferences(
            preferences, subset=path if len(asked.data) > 1 else None
        )
    return rows


def _preferences(
    asked: Asked, path: str | None, *, on_bad_row: Literal["error", "skip"]
) -> tuple[list[Preference], DataReport]:
    config = DatasetConfig(
        dataset_name=asked.dataset, data_path=path, split=asked.split,
        margin_key=asked.margin_key, **asked.column_keys,
    )  # fmt: skip
    return load_preferences(
        config, name=path or asked.dataset or "", ties="drop", duplicates="keep",
        on_bad_row=on_bad_row, max_samples=asked.max_samples, remedy=_remedy,
    )  # fmt: skip


def _left_out(report: DataReport) -> list[str]:
    return [
        f"{counted(left_out.count, 'row')} of {report.num_read:,} left out: {reason} "
        f"(e.g. {left_out.examples[0]})"
        for reason, left_out in report.dropped.items()
    ]


def _remedy(problem: UnusableRow) -> str:
    """What an evaluation, which has no configuration, can be told about a malformed row."""
    if problem.lacks_columns:
        return (
            "Name the columns as for laurel rm (data.prompt_key=COLUMN, data.chosen_key=COLUMN, "
            "data.rejected_key=COLUMN), or mend the row. Where the class that reads the rows is "
            f"told wrongly, name it with {key_of('--dataset')}."
        )
    return "Mend the row, or take it out of the file: what is evaluated is evaluated whole."


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPairs:
    """What a model was trained on, of which nobody asks the scores."""

    pairs: list[ScoredPair]
    notes: tuple[str, ...] = ()
    """Of each set with malformed rows, how many were left out."""


def training_pairs(asked: Asked) -> TrainingPairs:
    """Every pair of the preferences that are named; malformed rows are left out and counted.

    Raises:
        DataError: A set cannot be read, or more than `MOST_MALFORMED` of its rows are malformed.
    """
    pairs: list[ScoredPair] = []
    notes: list[str] = []
    for path in asked.data:
        preferences, report = _preferences(asked, path, on_bad_row="skip")
        left_out = report.dropped.get("malformed")
        if left_out is not None:
            first = f"{left_out.examples[0]}: {next(iter(left_out.kinds))}"
            said = f"{left_out.count:,} of {report.num_read:,} rows are malformed (e.g. {first})"
            if left_out.count > MOST_MALFORMED * report.num_read:
                raise DataError(
                    f"{path}: {said}, more than {MOST_MALFORMED:.0%}: the others are no fair "
                    f"sample. Mend the file; laurel data check {path} shows what is wrong with it"
                )
            notes.append(f"{path}: {said} and left out")
        for row in rows_of.rows_of_preferences(
            preferences, subset=path if len(asked.data) > 1 else None
        ):
            pairs += pairs_of(row, [_UNSCORED] * len(row.group.completions_G))
    return TrainingPairs(pairs=pairs, notes=tuple(notes))


# --------------------------------------------------------------------------------------- scoring


def pairs_of(row: BenchmarkRow, scores_G: Sequence[Score]) -> list[ScoredPair]:
    """Every two answers of which one is better."""
    texts = [conversation_text(one.messages) for one in row.group.completions_G]
    places = [
        (i, j) if row.ranks_G[i] < row.ranks_G[j] else (j, i)
        for i, j in combinations(range(len(texts)), 2)
        if row.ranks_G[i] != row.ranks_G[j]
    ]
    return [
        ScoredPair(
            id=row.id if len(texts) == 2 else f"{row.id}:{better}>{worse}",
            prompt=row.group.prompt,
            chosen=texts[better],
            rejected=texts[worse],
            score_chosen=scores_G[better].value,
            score_rejected=scores_G[worse].value,
            subset=row.subset,
            margin=row.margin,
            failure=scores_G[better].failure or scores_G[worse].failure,
        )
        for better, worse in places
    ]


def list_of(row: BenchmarkRow, scores_G: Sequence[Score]) -> list[ScoredList]:
    """The row as it is: right answers have rank 0."""
    failures = [score.failure for score in scores_G if score.failure is not None]
    return [
        ScoredList(
            id=row.id,
            prompt=row.group.prompt,
            completions_G=tuple(conversation_text(one.messages) for one in row.group.completions_G),
            is_right_G=tuple(rank == 0 for rank in row.ranks_G),
            scores_G=tuple(score.value for score in scores_G),
            subset=row.subset,
            failure=failures[0] if failures else None,
        )
    ]


BENCHMARKS: dict[BenchmarkName, Benchmark] = {
    "reward-bench": Benchmark(
        title="RewardBench",
        read=_reward_bench_rows,
        scored=pairs_of,
        measure=lambda rows, _: reward_bench.measure(rows),
        by_length=pairs_by_length,
    ),
    "reward-bench-2": Benchmark(
        title="RewardBench 2",
        read=_read(rows_of.REWARD_BENCH_2),
        scored=list_of,
        measure=lambda rows, asked: reward_bench_2.measure(rows, zero_spread=asked.zero_spread),
        by_length=lists_by_length,
    ),
    "rm-bench": Benchmark(
        title="RM-Bench",
        read=_read(rows_of.RM_BENCH),
        scored=list_of,
        measure=lambda rows, _: rm_bench.measure(rows),
        by_length=lists_by_length,
        details=lambda rows: {"matrix": rm_bench.matrix_of(rows)},
    ),
    "judge-bench": Benchmark(
        title="JudgeBench",
        read=_judge_bench_rows,
        scored=pairs_of,
        measure=lambda rows, _: judge_bench.measure(rows),
        by_length=pairs_by_length,
    ),
    "pairs": Benchmark(
        title="Pairs",
        read=preference_rows,
        scored=pairs_of,
        measure=lambda rows, _: pair_accuracy.measure(rows),
        by_length=pairs_by_length,
    ),
    "best-of-n": Benchmark(
        title="Best of n",
        read=_read(rows_of.BEST_OF_N),
        scored=list_of,
        measure=lambda rows, _: best_of_n.measure(rows),
        by_length=lists_by_length,
    ),
}
