"""The benchmarks of reward models by name: the rows that they read, and their figures.

`laurel eval`, validation during training and the check of a judge before GRPO all come here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal

from laurel.config.data import BenchmarkName, BenchmarkSetConfig, DatasetConfig
from laurel.config.overrides import COLUMNS_IN_WORDS
from laurel.data import benchmarks as rows_of
from laurel.data.benchmarks import BenchmarkForm, BenchmarkRow
from laurel.data.preferences import load_preferences
from laurel.data.report import DataReport
from laurel.data.sources import UnusableRow
from laurel.data.steps import SEPARATOR
from laurel.errors import DataError, counted, key_of
from laurel.evaluation import other_benchmarks, reward_bench
from laurel.evaluation.reward_bench import ZeroSpread, is_ties
from laurel.evaluation.statistics import (
    Figure,
    Measured,
    ScoredList,
    ScoredPair,
    lists_by_length,
    pair_credits,
    pairs_by_length,
    share,
    shares_by_subset,
)
from laurel.observe.console import conversation_text
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
    zero_spread: ZeroSpread = "limit"
    """How RewardBench 2's Ties rows count if all correct answers have the same score.

    The choices are explained in `evaluation.reward_bench`.
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


def _read(form: BenchmarkForm) -> Callable[[BenchmarkOptions, Say], list[BenchmarkRow]]:
    return lambda asked, say: rows_of.read_benchmark(
        form, asked.data, split=asked.split, limit=asked.max_samples, say=say
    )


def _reward_bench_rows(asked: BenchmarkOptions, say: Say) -> list[BenchmarkRow]:
    rows = _read(rows_of.REWARD_BENCH)(asked, say)
    if asked.prior:
        rows += rows_of.read_benchmark(rows_of.PRIOR_SETS, (), limit=asked.max_samples, say=say)
    return rows


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


def ordered_pairs(row: BenchmarkRow, scores_G: Sequence[Score]) -> list[ScoredPair]:
    """Return every two answers of a row of which one is better, with their scores."""
    texts = [conversation_text(one.messages) for one in row.group.completions_G]
    places = [
        (i, j) if row.ranks_G[i] < row.ranks_G[j] else (j, i)
        for i, j in combinations(range(len(texts)), 2)
        if row.ranks_G[i] != row.ranks_G[j]
    ]
    return [
        ScoredPair(
            # Ids of plain pairs stay those of their rows, by which results are compared.
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
    """Return the row as one list, in which the answers of rank 0 are right."""
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


def steps_of(row: BenchmarkRow, scores_G: Sequence[Score]) -> list[ScoredList]:
    """Return the steps of a row as one list, in which those before the first error are right.

    Raises:
        DataError: The scores are not those of a process reward model that finds the same steps.
    """
    (score,) = scores_G
    count = len(row.steps)
    values: tuple[float | None, ...] = score.values_K
    if score.failure is not None:
        values = (None,) * count
    elif len(values) != count:
        raise DataError(
            f"{row.source}: the model gives {counted(len(values), 'value')} for "
            f"{counted(count, 'step')}. ProcessBench is for process reward models that separate "
            f"steps by {SEPARATOR!r}"
        )
    first = count if row.first_error is None else row.first_error
    return [
        ScoredList(
            id=row.id,
            prompt=row.group.prompt,
            completions_G=row.steps,
            is_right_G=tuple(index < first for index in range(count)),
            scores_G=values,
            subset=row.subset,
            failure=score.failure,
        )
    ]


BENCHMARKS: dict[BenchmarkName, Benchmark] = {
    "reward-bench": Benchmark(
        title="RewardBench",
        read=_reward_bench_rows,
        scored=ordered_pairs,
        measure=lambda rows, _: reward_bench.measure_reward_bench(rows),
        by_length=pairs_by_length,
    ),
    "reward-bench-2": Benchmark(
        title="RewardBench 2",
        read=_read(rows_of.REWARD_BENCH_2),
        scored=list_of,
        measure=lambda rows, asked: reward_bench.measure_reward_bench_2(
            rows, zero_spread=asked.zero_spread
        ),
        by_length=lists_by_length,
    ),
    "rm-bench": Benchmark(
        title="RM-Bench",
        read=_read(rows_of.RM_BENCH),
        scored=list_of,
        measure=lambda rows, _: other_benchmarks.measure_rm_bench(rows),
        by_length=lists_by_length,
        details=lambda rows: {"matrix": other_benchmarks.matrix_of(rows)},
    ),
    "judge-bench": Benchmark(
        title="JudgeBench",
        # The category becomes the subset, so that two results can be compared by it as well.
        read=lambda asked, say: [
            replace(row, subset=other_benchmarks.category_of(row.subset or ""))
            for row in _read(rows_of.JUDGE_BENCH)(asked, say)
        ],
        scored=ordered_pairs,
        measure=lambda rows, _: other_benchmarks.measure_judge_bench(rows),
        by_length=pairs_by_length,
    ),
    "pairs": Benchmark(
        title="Pairs",
        read=preference_rows,
        scored=ordered_pairs,
        measure=lambda rows, _: measure(rows),
        by_length=pairs_by_length,
    ),
    "best-of-n": Benchmark(
        title="Best of n",
        read=_read(rows_of.BEST_OF_N),
        scored=list_of,
        measure=lambda rows, _: other_benchmarks.measure_best_of_n(rows),
        by_length=lists_by_length,
    ),
    "process-bench": Benchmark(
        title="ProcessBench",
        read=_read(rows_of.PROCESS_BENCH),
        scored=steps_of,
        measure=lambda rows, asked: other_benchmarks.measure_process_bench(
            rows, threshold=asked.threshold, fit_on=asked.fit_threshold
        ),
        by_length=other_benchmarks.one_long_step,
    ),
}


# Accuracy on any set of pairs: how often the preferred answer has the higher score.

PAIRS_FINAL = "all pairs"
TIES = "share of equal scores"
"""The name of a share of all pairs; it is no subset with an accuracy."""


def measure(pairs: Sequence[ScoredPair]) -> Measured:
    """Measure the accuracy of each subset and over all pairs, and the share of ties."""
    credits = pair_credits(pairs)
    found = shares_by_subset((pair.subset, credits[pair.id]) for pair in pairs)
    return Measured(
        subsets=tuple(found.values()) if len(found) > 1 else (),
        sections=(tie_share(pairs),),
        final=share(PAIRS_FINAL, credits.values()),
        credits=credits,
    )


def tie_share(pairs: Sequence[ScoredPair]) -> Figure:
    """Return the share of pairs whose answers have equal scores, which count as wrong."""
    equal = [
        None if pair.is_right is None else float(pair.score_chosen == pair.score_rejected)
        for pair in pairs
    ]
    return replace(share(TIES, equal), is_aside=True)


# A benchmark in the validations of a run: its rows, selected once, and the names of its metrics.
#
# The arithmetic is that of `laurel eval`.


def _short(names: Sequence[str]) -> dict[str, str]:
    return {name: name.lower().replace(" ", "_") for name in names}


PARTS: Mapping[BenchmarkName, Mapping[str, str]] = {
    "reward-bench": _short([*reward_bench.SECTIONS, reward_bench.PRIOR]),
    "reward-bench-2": _short(list(reward_bench.NUM_PROMPTS)),
    "rm-bench": _short([*other_benchmarks.LEVELS, *other_benchmarks.DOMAINS]),
    "judge-bench": _short(list(dict.fromkeys(other_benchmarks.CATEGORIES.values()))),
    "pairs": {TIES: "tie_share"},
    "best-of-n": {other_benchmarks.RANDOM: "random", other_benchmarks.ORACLE: "oracle"},
    "process-bench": {
        other_benchmarks.ERRONEOUS: "erroneous_accuracy",
        other_benchmarks.CORRECT: "correct_accuracy",
    },
}
"""The parts of a final score, and what stands beside it, with the names in the log."""
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
    parts = [key for key in PARTS[benchmark].values() if key not in _SAME_FOR_ALL]
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
            prior=config.prior,
            zero_spread=config.zero_spread,
        )
        try:
            notes: list[str] = []
            read = BENCHMARKS[config.benchmark].read(asked, notes.append)
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
        return BENCHMARKS[self.benchmark].title

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
        return reduce_scores(BENCHMARKS[self.benchmark], self.rows, scores, self.asked)

    def figures(self, scores: Sequence[Sequence[Score]]) -> dict[str, float]:
        """Compute the metrics of scores, by bare name; an undefined metric is absent.

        - `final_score` and, beside it, `longer_wins_final_score`: absent where a part of the
          benchmark is, and where it was cut.
        - `accuracy`, `longer_wins_baseline`: the mean credit over all rows.
        - The parts in `PARTS`.
        - `num_rows` that have a verdict, and `num_failures` that have none.
        """
        found = self.reduced(scores)
        measured, parts = found.measured, PARTS[self.benchmark]
        every = share(ALL_ROWS, measured.credits.values())
        named: list[tuple[str, float | None]] = [(ALL_ROWS, every.value)]
        # Steps of one answer do not compete, so no longer one could win.
        compares = self.benchmark != "process-bench"
        if compares:
            baseline = share("", found.baseline.credits.values())
            named.append(("longer_wins_baseline", baseline.value))
        # A final score of a sample could be taken for that of the benchmark.
        if not self.is_cut:
            named.insert(0, (FINAL, measured.final.value))
            if compares:
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


def limit_rows(rows: Sequence[BenchmarkRow], limit: int) -> list[BenchmarkRow]:
    """Select at most `limit` rows, a share of each subset, evenly spaced, in their order.

    The selection is the same each time. The two rows of a prompt of Ties stay together: neither
    counts without the other.
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
