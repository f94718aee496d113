"""What a benchmark of reward models is: the rows that it reads, and their figures.

`laurel eval`, validation during training and the check of a judge before GRPO all come here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from laurel import plugins
from laurel.config.data import BenchmarkName, BenchmarkSetConfig, DatasetConfig
from laurel.config.load import COLUMNS_IN_WORDS
from laurel.data import benchmarks as rows_of
from laurel.data.benchmarks import BenchmarkRow, limit_rows
from laurel.data.preferences import load_preferences
from laurel.data.report import DataReport
from laurel.data.sources import Row, UnusableRow
from laurel.errors import ConfigError, DataError, counted, key_of
from laurel.evaluation.statistics import (
    Measured,
    ScoredList,
    ScoredPair,
    share,
)
from laurel.types import Group, Preference, Score

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkOptions:
    """The options of a benchmark; some apply to one benchmark only."""

    data: tuple[str, ...] = ()
    """Files, directories or names on the hub; empty: the benchmark's own place."""
    split: str | None = None
    """The split of a directory or a hub data set."""
    dataset: str | None = None
    """The class that reads the preferences (`pairs` only)."""
    column_keys: Mapping[str, str] = field(default_factory=dict)
    """The names of columns, by the keys of the `data` section that set them (`pairs` only)."""
    margin_key: str | None = None
    """The column with the margin of the chosen answer (`pairs` only)."""
    prior: bool = False
    """Whether RewardBench's prior sets are read as well (`reward-bench` only)."""
    zero_spread: Literal["limit", "leave_out"] = "limit"
    """How RewardBench 2's Ties rows count if all correct answers have the same score.

    The choices are explained in `extensions.evaluation.reward_bench`.
    """
    threshold: float = 0.5
    """The value below which a step is called wrong (`process-bench` only)."""
    fit_threshold: str | None = None
    """The subset on which the threshold is chosen instead (`process-bench` only)."""
    max_samples: int | None = None
    """The number of rows that are read of each file, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One evaluation, of scored pairs or of scored lists."""

    title: str
    read: Callable[[BenchmarkOptions, Say], list[BenchmarkRow]]
    """Reads the rows, and says which of them it leaves out."""
    scored: Callable[[BenchmarkRow, Sequence[Score]], list[Any]]
    measure: Callable[[Sequence[Any], BenchmarkOptions], Measured]
    by_length: Callable[[Sequence[Any]], list[Any]]
    details: Callable[[Sequence[Any]], Mapping[str, Any]] = field(default=lambda rows: {})
    parts: Mapping[str, str] = field(default_factory=dict)
    """The parts of a final score, and what stands beside it, with the names in the log."""
    of_steps: bool = False
    """Whether it compares the steps of one answer, so that no longer answer could win."""
    is_row: Callable[[Row], bool] = field(default=lambda row: False)
    """Whether a row of a file has the form of the benchmark's; of no row two benchmarks say so."""


def benchmark_named(name: BenchmarkName) -> Benchmark:
    """Return the benchmark of a name.

    Raises:
        ConfigError: The plug-in that brings it cannot be imported, or makes none of a name.
    """
    kind = plugins.find(plugins.BenchmarkKind, name)
    try:
        inspect.signature(kind.make).bind(None, name)
    except TypeError as error:
        made_by = f"{type(kind).__module__}.{type(kind).__qualname__}"
        raise ConfigError(
            f"the benchmark {name}: make() of {made_by} does not take (section, name): {error}"
        ) from error
    found: Benchmark = kind.make(None, name)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """The figures of a benchmark, and those of its baseline."""

    rows: Sequence[ScoredPair | ScoredList]
    measured: Measured
    baseline: Measured
    """The figures of a scorer by length, on the rows that were scored."""


def reduce_scores(
    benchmark: Benchmark,
    rows: Sequence[BenchmarkRow],
    scores: Sequence[Sequence[Score]],
    asked: BenchmarkOptions,
) -> Reduced:
    """Compute the figures of a benchmark from the scores of its rows.

    Raises:
        DataError: Nothing can be compared, two rows share an id, or the rows are not those of the
            benchmark.
    """
    scored = [
        one
        for row, scores_G in zip(rows, scores, strict=True)
        for one in benchmark.scored(row, scores_G)
    ]
    if not scored:
        raise DataError(f"none of {len(rows)} rows can be compared: no two answers differ in rank")
    if len({one.id for one in scored}) < len(scored):
        raise DataError("two rows share an id")
    # The baseline is measured by the same function on the same rows, so that the two compare.
    try:
        plain = replace(asked, fit_threshold=None)
        return Reduced(
            rows=scored,
            measured=benchmark.measure(scored, asked),
            baseline=benchmark.measure(benchmark.by_length(scored), plain),
        )
    except ValueError as error:
        raise DataError(str(error)) from error


def preference_rows(asked: BenchmarkOptions, say: Say) -> list[BenchmarkRow]:
    """Read the preferences of every named set; of several, each is a subset of its own."""
    if not asked.data and asked.dataset is None:
        raise DataError(
            f"which pairs? Name them with {key_of('--data')} (a file, or a name on the hub), or "
            f"with {key_of('--dataset')} (HelpSteer3 or Tulu3Preference, which have a place of "
            "their own)"
        )
    rows: list[BenchmarkRow] = []
    for path in asked.data or (None,):
        preferences, report = read_preferences(asked, path, on_bad_row="error")
        for one in preferences:
            if one.steps_GS is not None:
                raise DataError(f"{one.group.id}: {rows_of.LABELS_STEPS}")
        left_out = [
            f"{counted(one.count, 'row')} of {report.num_read:,} left out: {reason} "
            f"(e.g. {one.examples[0]})"
            for reason, one in report.dropped.items()
        ]
        for said in (*left_out, *report.notes):
            say(said if len(asked.data) < 2 else f"{path}: {said}")
        rows += rows_of.rows_of_preferences(
            preferences, subset=path if len(asked.data) > 1 else None
        )
    return rows


def read_preferences(
    asked: BenchmarkOptions, path: str | None, *, on_bad_row: Literal["error", "skip"]
) -> tuple[list[Preference], DataReport]:
    """Read the preferences of one of the named sets; None is the place of the class that reads."""
    config = DatasetConfig(
        dataset_name=asked.dataset,
        data_path=path,
        split=asked.split,
        margin_key=asked.margin_key,
        **asked.column_keys,
    )
    return load_preferences(
        config,
        name=path or asked.dataset or "",
        ties="drop",
        duplicates="keep",
        on_bad_row=on_bad_row,
        max_samples=asked.max_samples,
        remedy=_remedy,
    )


def _remedy(problem: UnusableRow) -> str:
    # An evaluation has no configuration: a run's advice about a malformed row would mislead.
    if problem.lacks_columns:
        return (
            f"Name the columns as for laurel rm ({COLUMNS_IN_WORDS}), or fix the row. Where the "
            f"class that reads the rows was guessed wrongly, name it with {key_of('--dataset')}."
        )
    if problem.program:
        return f"{problem.remedy}."
    return "Fix the row, or take it out of the file: no row of it is left out for such an error."


# A benchmark in the validations of a run: its rows, selected once, and the names of its metrics.
#
# The arithmetic is that of `laurel eval`.


FINAL, ALL_ROWS = "final_score", "accuracy"
_SAME_FOR_ALL = ("random", "oracle")
"""Figures of the rows alone, which do not depend on the model."""


def _even(rows: Sequence[BenchmarkRow]) -> list[list[Score]]:
    # Equal scores for all answers, and for all steps of those in steps.
    return [
        [Score(value=0.0, values_K=(0.0,) * len(row.steps))] * len(row.group.completions_G)
        for row in rows
    ]


def selectable(benchmark: BenchmarkName) -> list[str]:
    """Return the figures by which a checkpoint may be selected."""
    parts = [key for key in benchmark_named(benchmark).parts.values() if key not in _SAME_FOR_ALL]
    return [FINAL, ALL_ROWS, *parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSet:
    """The rows of a benchmark that a run is measured on."""

    name: str
    """The name in the run's configuration."""
    benchmark: BenchmarkName
    asked: BenchmarkOptions
    rows: Sequence[BenchmarkRow]
    num_read: int
    """The number of rows before the selection."""
    reading_notes: tuple[str, ...] = ()
    """Messages of `Benchmark.read` about rows that it left out."""

    @classmethod
    def load(cls, name: str, config: BenchmarkSetConfig) -> BenchmarkSet:
        """Read a benchmark, and select its rows.

        Raises:
            DataError: A file or a row that cannot be used, or nothing that could be compared.
        """
        asked = BenchmarkOptions(
            data=config.paths,
            split=config.split,
            dataset=config.dataset_name,
        )
        try:
            notes: list[str] = []
            read = benchmark_named(config.benchmark).read(asked, notes.append)
            if not read:
                where = ", ".join(config.paths) or "its own place on the hub"
                raise DataError(f"there is no row in {where}")
            chosen = cls(
                name=name,
                benchmark=config.benchmark,
                asked=asked,
                num_read=len(read),
                reading_notes=tuple(notes),
                rows=read if config.max_samples is None else limit_rows(read, config.max_samples),
            )
            if not chosen.rows:
                raise DataError(
                    f"max_samples={config.max_samples} leaves none of its rows; raise it"
                )
            # Raises here, before any training, where no figure can be computed from the rows.
            chosen.possible()
        except DataError as error:
            raise DataError(f"{name} (benchmark {config.benchmark}): {error}") from error
        return chosen

    @property
    def title(self) -> str:
        """The title of the benchmark."""
        return benchmark_named(self.benchmark).title

    @property
    def is_cut(self) -> bool:
        """Whether `max_samples` dropped rows."""
        return len(self.rows) < self.num_read

    @property
    def groups(self) -> list[Group]:
        """The groups to score."""
        return [row.group for row in self.rows]

    def reduced(self, scores: Sequence[Sequence[Score]]) -> Reduced:
        """Compute the figures of `laurel eval` from scores of these rows."""
        return reduce_scores(benchmark_named(self.benchmark), self.rows, scores, self.asked)

    def figures(self, scores: Sequence[Sequence[Score]]) -> dict[str, float]:
        """Compute the metrics of scores, by bare name; an undefined metric is absent.

        - `final_score` and, beside it, `longer_wins_final_score`: absent where a part of the
          benchmark is, and where it was cut.
        - `accuracy`, `longer_wins_baseline`: the mean credit over all rows.
        - The parts of the benchmark.
        - `num_rows` that have a verdict, and `num_failures` that have none.
        """
        found = self.reduced(scores)
        benchmark = benchmark_named(self.benchmark)
        measured, parts = found.measured, benchmark.parts
        every = share(ALL_ROWS, measured.credits.values())
        named: list[tuple[str, float | None]] = [(ALL_ROWS, every.value)]
        if not benchmark.of_steps:
            baseline = share("", found.baseline.credits.values())
            named.append(("longer_wins_baseline", baseline.value))
        # A final score of a sample could be taken for that of the benchmark.
        if not self.is_cut:
            named.insert(0, (FINAL, measured.final.value))
            if not benchmark.of_steps:
                named.append(("longer_wins_final_score", found.baseline.final.value))
        named += [
            (parts[figure.name], figure.value)
            for figure in (*measured.sections, *measured.subsets)
            if figure.name in parts
        ]
        known = {key: value for key, value in named if value is not None}
        return known | {
            "num_rows": float(every.num_rows),
            "num_failures": float(every.num_failures),
        }

    def possible(self) -> list[str]:
        """Return the names of the metrics of these rows that can select the best checkpoint."""
        known = self.figures(_even(self.rows))
        return [key for key in selectable(self.benchmark) if key in known]

    def notes(self) -> list[str]:
        """Return the caveats that a reader needs beside the figures."""
        # Notes depend on the rows alone: equal scores for all answers bring them out.
        notes = list(self.reduced(_even(self.rows)).measured.notes)
        if self.is_cut:
            cut = f"cut to {len(self.rows):,} of {self.num_read:,} rows (max_samples): "
            absent = [note for note in notes if note.startswith("absent")]
            notes = [f"{cut}the figures are of a sample, and there is no final score", *absent]
        return [*self.reading_notes, *notes]

    def described(self) -> str:
        """Describe the benchmark and the number of its rows in a line."""
        where = ", ".join(self.asked.data) or "its own place on the hub"
        return f"{self.title}, {where}: {len(self.rows):,} of {self.num_read:,} rows"

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of the run's data report."""
        return {
            "benchmark": self.benchmark,
            "data": list(self.asked.data),
            "num_read": self.num_read,
            "num_kept": len(self.rows),
            "notes": self.notes(),
        }
