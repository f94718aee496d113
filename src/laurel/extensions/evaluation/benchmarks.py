"""The benchmarks by name: the rows that they read, and their figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

from laurel.config.data import BenchmarkName
from laurel.data.benchmarks import BenchmarkForm, BenchmarkRow, read_benchmark
from laurel.data.steps import SEPARATOR
from laurel.errors import DataError, counted
from laurel.evaluation.benchmarks import Benchmark, BenchmarkOptions, Say, preference_rows
from laurel.evaluation.statistics import (
    Figure,
    Measured,
    ScoredList,
    ScoredPair,
    share,
)
from laurel.extensions.evaluation import benchmark_rows, other_benchmarks, reward_bench
from laurel.extensions.evaluation.accuracy import (
    lists_by_length,
    pair_credits,
    pairs_by_length,
    shares_by_subset,
)
from laurel.observe.console import conversation_text
from laurel.types import Score

PAIRS_FINAL = "all pairs"
TIES = "share of equal scores"
"""The name of a share of all pairs; it is no subset with an accuracy."""


def _read(form: BenchmarkForm) -> Callable[[BenchmarkOptions, Say], list[BenchmarkRow]]:
    return lambda asked, say: read_benchmark(
        form, asked.data, split=asked.split, limit=asked.max_samples, say=say
    )


def _reward_bench_rows(asked: BenchmarkOptions, say: Say) -> list[BenchmarkRow]:
    rows = _read(benchmark_rows.REWARD_BENCH)(asked, say)
    if asked.prior:
        rows += read_benchmark(benchmark_rows.PRIOR_SETS, (), limit=asked.max_samples, say=say)
    return rows


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


def _short(names: Sequence[str]) -> dict[str, str]:
    return {name: name.lower().replace(" ", "_") for name in names}


BENCHMARKS: dict[BenchmarkName, Benchmark] = {
    "reward-bench": Benchmark(
        title="RewardBench",
        read=_reward_bench_rows,
        scored=ordered_pairs,
        measure=lambda rows, _: reward_bench.measure_reward_bench(rows),
        by_length=pairs_by_length,
        parts=_short([*reward_bench.SECTIONS, reward_bench.PRIOR]),
        is_row=benchmark_rows.is_reward_bench,
    ),
    "reward-bench-2": Benchmark(
        title="RewardBench 2",
        read=_read(benchmark_rows.REWARD_BENCH_2),
        scored=list_of,
        measure=lambda rows, asked: reward_bench.measure_reward_bench_2(
            rows, zero_spread=asked.zero_spread
        ),
        by_length=lists_by_length,
        parts=_short(list(reward_bench.NUM_PROMPTS)),
        is_row=benchmark_rows.is_reward_bench_2,
    ),
    "rm-bench": Benchmark(
        title="RM-Bench",
        read=_read(benchmark_rows.RM_BENCH),
        scored=list_of,
        measure=lambda rows, _: other_benchmarks.measure_rm_bench(rows),
        by_length=lists_by_length,
        details=lambda rows: {"matrix": other_benchmarks.matrix_of(rows)},
        parts=_short([*other_benchmarks.LEVELS, *other_benchmarks.DOMAINS]),
        is_row=benchmark_rows.is_rm_bench,
    ),
    "judge-bench": Benchmark(
        title="JudgeBench",
        # The category becomes the subset, so that two results can be compared by it as well.
        read=lambda asked, say: [
            replace(row, subset=other_benchmarks.category_of(row.subset or ""))
            for row in _read(benchmark_rows.JUDGE_BENCH)(asked, say)
        ],
        scored=ordered_pairs,
        measure=lambda rows, _: other_benchmarks.measure_judge_bench(rows),
        by_length=pairs_by_length,
        parts=_short(list(dict.fromkeys(other_benchmarks.CATEGORIES.values()))),
        is_row=benchmark_rows.is_judge_bench,
    ),
    "pairs": Benchmark(
        title="Pairs",
        read=preference_rows,
        scored=ordered_pairs,
        measure=lambda rows, _: measure(rows),
        by_length=pairs_by_length,
        parts={TIES: "tie_share"},
    ),
    "best-of-n": Benchmark(
        title="Best of n",
        read=_read(benchmark_rows.BEST_OF_N),
        scored=list_of,
        measure=lambda rows, _: other_benchmarks.measure_best_of_n(rows),
        by_length=lists_by_length,
        parts={other_benchmarks.RANDOM: "random", other_benchmarks.ORACLE: "oracle"},
        is_row=benchmark_rows.is_best_of_n,
    ),
    "process-bench": Benchmark(
        title="ProcessBench",
        read=_read(benchmark_rows.PROCESS_BENCH),
        scored=steps_of,
        measure=lambda rows, asked: other_benchmarks.measure_process_bench(
            rows, threshold=asked.threshold, fit_on=asked.fit_threshold
        ),
        by_length=other_benchmarks.one_long_step,
        parts={
            other_benchmarks.ERRONEOUS: "erroneous_accuracy",
            other_benchmarks.CORRECT: "correct_accuracy",
        },
        is_row=benchmark_rows.is_process_bench,
        of_steps=True,
    ),
}
