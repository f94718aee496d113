"""Prints the results of evaluations as tables, and compares two stored results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from laurel.errors import ConfigError, DataError, counted, counted_that
from laurel.evaluation.diagnostics import (
    Column,
    Leak,
    Repeats,
    Scoring,
    Sensitivity,
    agreements,
    calibration,
    find_leaks,
    find_repeats,
    in_other_words,
    length_controlled_accuracy,
    longer_scored_higher,
    score_distribution,
    score_length_correlation,
    sensitivity,
)
from laurel.evaluation.statistics import (
    CONFIDENCE,
    BagOfWords,
    Credits,
    ScoredPair,
    accuracy,
    accuracy_by_name,
    accuracy_by_value,
    failure_reasons,
    length_difference,
    longer_wins,
    paired_test,
    scored,
)
from laurel.observe.console import (
    format_number,
    make_console,
    new_table,
    print_table,
    shorten_middle,
    visible,
)
from laurel.observe.json_output import write_json
from laurel.run.evaluation.results import StoredResult, read_result

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.evaluation.statistics import Figure
    from laurel.run.evaluation.results import Evaluation


_LONGEST_NAME = 40


def print_evaluation(console: Console, evaluation: Evaluation) -> None:
    """Print a table of subsets, sections and the final score, each beside the length baseline."""
    measured = evaluation.measured
    contract = [] if evaluation.by_contract is None else ["by contract"]
    columns = ("", "score", *contract, "longer wins", "rows", "failed")
    table = new_table(f"{evaluation.title}: {evaluation.model}", *columns)
    sections = [figure for figure in measured.sections if not figure.is_aside]
    asides = [figure for figure in measured.sections if figure.is_aside]
    for figures in (measured.subsets, sections, (measured.final,), asides):
        for place, figure in enumerate(figures, start=1):
            _add(table, evaluation, figure, ends=place == len(figures))
    print_table(console, table)
    for note in measured.notes:
        console.print(Text(f"note    {visible(note)}"), soft_wrap=True)
    if evaluation.num_truncated:
        console.print(
            f"note    {counted_that(evaluation.num_truncated, 'conversation', 'were')} cut to fit"
        )
    rate = evaluation.num_completions / max(evaluation.seconds, 1e-9)
    console.print(
        f"scored  {counted(evaluation.num_completions, 'completion')} in "
        f"{evaluation.seconds:.1f} s, loading included ({rate:,.0f}/s)"
    )


def print_compatibility(console: Console, facts: Mapping[str, Any], *, num_rows: int) -> None:
    """Print in how many rows another program's tokens differ from those of the contract.

    The reasons for the differences are printed as well.
    """
    console.print(
        f"format  {facts['program']}, {facts['max_length']:,} tokens, cut on the "
        f"{facts['truncation_side']}: other tokens than by the scoring contract in "
        f"{facts['num_rows']:,} of {counted(num_rows, 'row')} "
        f"({counted(facts['num_completions'], 'answer')}); the model reads others in "
        f"{facts['num_rows_read_differently']:,} ({facts['num_completions_read_differently']:,})",
        soft_wrap=True,
    )
    for reason, found in facts["reasons"].items():
        counts = (
            f"{counted(found['num_rows'], 'row')} ({counted(found['num_completions'], 'answer')})"
        )
        console.print(f"        {reason}: {counts}", soft_wrap=True)


def print_matrix(
    console: Console, matrix: Sequence[Sequence[float]] | None, styles: Sequence[str]
) -> None:
    """Print the share of rows in which one style's correct answer beats another's wrong answer.

    Lines of the table are the styles of correct answers, columns those of wrong answers.
    """
    if matrix is None:
        return
    table = new_table("right answer (line) against wrong answer (column), by style", "", *styles)
    for style, row in zip(styles, matrix, strict=True):
        table.add_row(style, *(share_text(value) for value in row))
    print_table(console, table)


def name_text(name: str) -> Text:
    """Return a name that comes from a file, shortened to fit a line of a table."""
    return Text(shorten_middle(name, _LONGEST_NAME))


def share_text(value: float | None) -> str:
    """Format a share with four decimals; None, which means that there were no rows, as `absent`."""
    return "absent" if value is None else f"{value:.4f}"


def _add(table: Table, evaluation: Evaluation, figure: Figure, *, ends: bool) -> None:
    by_contract = []
    if evaluation.by_contract is not None:
        by_contract.append(share_text(evaluation.under_contract(figure)))
    table.add_row(
        name_text(figure.name),
        share_text(figure.value),
        *by_contract,
        share_text(evaluation.beside(figure)),
        f"{figure.num_rows:,}",
        f"{figure.num_failures:,}" if figure.num_failures else "",
        end_section=ends,
    )


# --------------------------------------------------------------------------------------------------
# The diagnostics of a reward model in one report: for programs as a dict, for people as tables.

_EXAMPLES = 5

_SLICES = {
    "by_length_difference": "chosen longer by (characters)",
    "by_margin": "margin",
    "by_subset": "subset",
    "by_leak": "prompt in training set",
}


def diagnostics_report(
    pairs: Sequence[ScoredPair],
    *,
    training: Sequence[ScoredPair] | None = None,
    notes: Sequence[str] = (),
    members: Mapping[str, Column] | None = None,
    score: Scoring | None = None,
    in_other_language: Sequence[ScoredPair] | None = None,
    noise: float | None = None,
    num_bins: int = 5,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> dict[str, Any]:
    """Compute all diagnostics of a reward model from its scores, as JSON-compatible values.

    A diagnostic without data is left out, together with its key.

    Args:
        pairs: The evaluated pairs; those without both scores are counted and otherwise ignored.
        training: The pairs that the model was trained on, for the bag-of-words baseline and the
            detection of leaks; their scores are not used.
        notes: Notes on what was left out of the training pairs.
        members: The scores of an ensemble's members, by name; see `agreements`.
        score: Scores other forms of the answers; without it the sensitivity is left out.
        in_other_language: The same pairs, translated and scored, in the same order.
        noise: The largest difference between scores that counts as noise; see `measure_noise`.
        num_bins: The largest number of bins of length differences and of margins.
        confidence: The confidence level of the intervals.
        seed: The seed of the bootstrap.

    Raises:
        DataError: Two pairs have the same id, or the number of scores or translated pairs differs
            from the number of pairs.
    """
    _check(pairs, members or {})
    baselines: dict[str, Credits] = {"longer wins": longer_wins(pairs)}
    if training:
        baselines["bag of words"] = BagOfWords.train(training).credits(pairs)
    leaks = find_leaks(pairs, training) if training else []
    sure: dict[str, Any] = {"baselines": baselines, "seed": seed, "confidence": confidence}
    report: dict[str, Any] = {
        "num_pairs": len(pairs),
        "num_failures": len(pairs) - len(scored(pairs)),
        "failures": failure_reasons(pairs),
        "confidence": confidence,
        **_accuracy_of_kinds(pairs, leaks, num_bins=num_bins, **sure),
        "score_length_correlation": score_length_correlation(pairs),
        "longer_scored_higher": longer_scored_higher(pairs),
        "calibration": calibration(pairs),
        "scores": score_distribution(pairs),
        "agreement": agreements(members or {}),
        "noise_floor": _noise_floor(pairs, noise),
        "sensitivity": _forms(pairs, score, in_other_language),
        "evaluation_set": _repeats(find_repeats(pairs)),
        "training_set": (
            {**_repeats(find_repeats(training)), "notes": list(notes)} if training else None
        ),
        "leakage": _leakage(leaks) if training else None,
    }
    return {key: found for key, value in report.items() if (found := _plain(value)) is not None}


def print_diagnostics(console: Console, report: Mapping[str, Any]) -> None:
    """Print a report of `diagnostics_report` as tables."""
    failed = f", {report['num_failures']:,} of them without a verdict"
    console.print(counted(report["num_pairs"], "pair") + (failed if report["num_failures"] else ""))
    for reason, count in report.get("failures", {}).items():
        console.print(Text(f"  {count:,} x {visible(reason)}", style="yellow"))
    scores = new_table("scores", "", "")
    for label, text in _score_lines(report):
        scores.add_row(label, text)
    tables = (
        _accuracies(report),
        scores,
        _reliability(report.get("calibration", {})),
        _agreement(report.get("agreement", [])),
        _sensitivity(report.get("sensitivity", [])),
        _sets(report),
    )
    for table in tables:
        if table.row_count:
            print_table(console, table)


# ----------------------------------------------------------------------------------------- report


def _check(pairs: Sequence[ScoredPair], members: Mapping[str, Column]) -> None:
    for name, count in Counter(pair.id for pair in pairs).most_common(1):
        if count > 1:
            raise DataError(f"'{name}' is the id of {count} pairs; give each an id of its own")
    for name, column in members.items():
        if len(column) != len(pairs):
            raise DataError(
                f"member '{name}' has scores of {len(column)} pairs, but there are {len(pairs)}; "
                "give one row a pair, (None, None) where it has no scores"
            )


def _forms(
    pairs: Sequence[ScoredPair],
    score: Scoring | None,
    in_other_language: Sequence[ScoredPair] | None,
) -> list[Sensitivity]:
    found = sensitivity(pairs, score) if score is not None and pairs else []
    if in_other_language is not None:
        found.append(in_other_words("other language", pairs, in_other_language))
    return found


def _accuracy_of_kinds(
    pairs: Sequence[ScoredPair], leaks: Sequence[Leak], *, num_bins: int, **sure: Any
) -> dict[str, Any]:
    """Return the accuracy of all pairs, and of the pairs of each kind."""
    gaps = {pair.id: float(length_difference(pair)) for pair in pairs}
    margins = {pair.id: pair.margin for pair in pairs if pair.margin is not None}
    subsets = {pair.id: pair.subset for pair in pairs if pair.subset is not None}
    is_leaked = {pair.id: "no" for pair in pairs}
    is_leaked |= {leak.evaluated: "yes" if leak.is_exact else "almost" for leak in leaks}
    return {
        "accuracy": accuracy(pairs, **sure),
        "length_controlled_accuracy": length_controlled_accuracy(pairs, **sure),
        "by_length_difference": accuracy_by_value(pairs, gaps, num_bins=num_bins, **sure),
        "by_margin": accuracy_by_value(pairs, margins, num_bins=num_bins, **sure)
        if len(set(margins.values())) > 1
        else [],
        "by_subset": accuracy_by_name(pairs, subsets, **sure),
        "by_leak": accuracy_by_name(pairs, is_leaked, **sure) if leaks else [],
    }


def _leakage(leaks: Sequence[Leak]) -> dict[str, Any]:
    return {
        "num_same_prompt": sum(leak.is_exact for leak in leaks),
        "num_similar_prompt": sum(not leak.is_exact for leak in leaks),
        "num_same_pair": sum(leak.has_same_answers for leak in leaks),
        "examples": [asdict(leak) for leak in leaks[:_EXAMPLES]],
    }


def _noise_floor(pairs: Sequence[ScoredPair], noise: float | None) -> dict[str, Any] | None:
    """Return the noise, and the share of pairs whose two scores differ by no more than it."""
    differences = [
        abs(pair.score_chosen - pair.score_rejected)
        for pair in scored(pairs)
        if pair.score_chosen is not None and pair.score_rejected is not None
    ]
    if noise is None or not differences:
        return None
    return {"noise": noise, "within_share": fmean(gap <= noise for gap in differences)}


def _repeats(repeats: Repeats) -> dict[str, Any]:
    return {
        "num_pairs": repeats.num_pairs,
        "num_prompts": repeats.num_prompts,
        "num_redundant": repeats.num_redundant,
        "num_contradictory": sum(len(ids) for ids in repeats.contradictions),
        "duplicates": repeats.duplicates[:_EXAMPLES],
        "contradictions": repeats.contradictions[:_EXAMPLES],
    }


def _plain(value: Any) -> Any:
    """Convert a value to JSON-compatible ones without empty parts; None if nothing is left."""
    if hasattr(value, "__dataclass_fields__"):
        value = asdict(value)
    if isinstance(value, Mapping):
        parts = {
            f"{key:g}" if isinstance(key, float) else key: _plain(part)
            for key, part in value.items()
        }
        return {key: part for key, part in parts.items() if part is not None} or None
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value] or None
    return value


# ----------------------------------------------------------------------------------------- tables


def _accuracies(report: Mapping[str, Any]) -> Table:
    whole = report.get("accuracy", {})
    names = list(whole.get("baselines", {}))
    level = f"{report['confidence']:.0%} interval"
    table = new_table("accuracy", "", "pairs", "accuracy", level, *names)

    def add(label: str, found: Mapping[str, Any], num_pairs: int) -> None:
        table.add_row(
            Text(visible(label)),
            f"{num_pairs:,}",
            _share(found["value"]),
            f"{100 * found['low']:.1f}-{_share(found['high'])}",
            *(_share(found["baselines"][name]) for name in names),
        )

    if whole:
        add("all", whole, whole["num_pairs"])
    if controlled := report.get("length_controlled_accuracy"):
        halves = (controlled["longer_chosen"], controlled["shorter_chosen"])
        add("either as often", controlled, sum(half["num_pairs"] for half in halves))
        add("longer chosen", halves[0], halves[0]["num_pairs"])
        add("shorter chosen", halves[1], halves[1]["num_pairs"])
    for key, title in _SLICES.items():
        for place, part in enumerate(report.get(key, [])):
            if not place:
                table.add_row(Text(title, style="bold"))
            add(f"  {part['name']}", part["accuracy"], part["accuracy"]["num_pairs"])
    return table


def _score_lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "accuracy" in report:
        yield "pairs with tied scores", f"{report['accuracy']['num_ties']:,}"
    if "score_length_correlation" in report:
        correlation = format_number(report["score_length_correlation"])
        yield "Spearman's correlation of score and length", correlation
    if "longer_scored_higher" in report:
        yield "longer answer has the higher score", _share(report["longer_scored_higher"])
    if error := report.get("calibration"):
        yield "expected calibration error", _share(error["error"])
        yield "negative log-likelihood", format_number(error["negative_log_likelihood"])
        if "temperature" in error:
            yield "best temperature", format_number(error["temperature"])
            yield "  calibration error at it", _share(error["error_at_temperature"])
            better = error["negative_log_likelihood_at_temperature"]
            yield "  negative log-likelihood at it", format_number(better)
        else:
            yield "best temperature", "none: no pair is wrong, or wrong ones outweigh right ones"
    found = report.get("scores")
    if not found:
        return
    yield "answers with a score", f"{found['num_answers']:,}"
    yield "mean", format_number(found["mean"])
    yield "standard deviation", format_number(found["standard_deviation"])
    for level, value in found["quantiles"].items():
        label = {"0": "least", "1": "greatest"}.get(level, f"{float(level):.0%} lie below")
        yield f"  {label}", format_number(value)
    yield "answers with the score of another", _share(found["identical_share"])
    for key, label in (("saturated_low", "least"), ("saturated_high", "greatest")):
        if key in found:
            yield f"scores within 1 % of the {label}", _share(found[key])
    if "noise_floor" in report:
        noise = report["noise_floor"]
        yield "noise: the same answer in other company", format_number(noise["noise"])
        yield "  pairs no further apart than that", _share(noise["within_share"])
    if "largest_repeat_difference" in found:
        difference = format_number(found["largest_repeat_difference"])
        yield "largest difference of one answer's scores", difference


def _reliability(found: Mapping[str, Any]) -> Table:
    table = new_table("reliability", "confidence", "pairs", "mean confidence", "accuracy")
    for row in found.get("rows", []):
        table.add_row(
            f"{_share(row['start'])} to {_share(row['end'])}",
            f"{row['num_pairs']:,}",
            _share(row["confidence"]),
            _share(row["accuracy"]),
        )
    return table


def _agreement(found: Sequence[Mapping[str, Any]]) -> Table:
    table = new_table("agreement", "members", "pairs", "same verdict", "Kendall's tau-b")
    for row in found:
        table.add_row(
            Text(visible(f"{row['first']} and {row['second']}")),
            f"{row['num_pairs']:,}",
            _share(row["same_verdict_share"]),
            format_number(row["kendall"]) if "kendall" in row else "-",
        )
    return table


def _sensitivity(found: Sequence[Mapping[str, Any]]) -> Table:
    table = new_table(
        "other forms of the answers; verdicts that flip when both, one or the other has the form",
        "form",
        "answers",
        "failed",
        "shift/sd",
        "raised",
        "both",
        "chosen",
        "rejected",
    )
    for row in found:
        shift = f"{row['mean_shift']:+.3f}" if "mean_shift" in row else "-"
        flips = ("flip_share", "flip_share_chosen", "flip_share_rejected")
        shares = (_share(row[key]) if key in row else "-" for key in ("raised_share", *flips))
        counts = (f"{row['num_answers']:,}", f"{row['num_failures']:,}")
        table.add_row(Text(visible(row["name"])), *counts, shift, *shares)
    return table


def _sets(report: Mapping[str, Any]) -> Table:
    table = new_table("data sets", "", "")
    for key, label in (("evaluation_set", "evaluation"), ("training_set", "training")):
        if found := report.get(key):
            table.add_row(f"{label}: different prompts", f"{found['num_prompts']:,}")
            table.add_row(f"{label}: pairs said before", f"{found['num_redundant']:,}")
            table.add_row(f"{label}: pairs that contradict", f"{found['num_contradictory']:,}")
    if found := report.get("leakage"):
        table.add_row("evaluated prompts in training", f"{found['num_same_prompt']:,}")
        table.add_row("evaluated prompts almost in training", f"{found['num_similar_prompt']:,}")
        table.add_row("evaluated pairs in training", f"{found['num_same_pair']:,}")
    return table


def _share(value: float) -> str:
    return f"{value:.1%}"


# --------------------------------------------------------------------------------------------------
# Two results of the same evaluation side by side, and whether they differ by more than chance.

ALL = "all rows"


def run_compare(benchmark: str, first_path: Path, second_path: Path, *, as_json: bool) -> int:
    """Print two stored results of the same evaluation side by side.

    Each path is any of the files that `--output` wrote. Rows with an outcome in both results are
    compared by McNemar's exact test, in each subset and over all. Without the outcomes of rows, as
    in files of accuracies alone, the test is left out.

    Returns:
        The exit code, 0.

    Raises:
        UserError: A file holds no result, or the two are of different evaluations.
    """
    first, second = read_result(first_path), read_result(second_path)
    for result in (first, second):
        if result.benchmark not in (None, benchmark) or (
            result.benchmark is None and benchmark != "reward-bench"
        ):
            raise ConfigError(
                f"{result.path} is a result of laurel eval {result.benchmark or 'reward-bench'}, "
                f"and not of laurel eval {benchmark}"
            )
    compared = _compared(first, second)
    if as_json:
        write_json(compared)
    else:
        _print(first, second, compared)
    return 0


def _compared(first: StoredResult, second: StoredResult) -> dict[str, Any]:
    tests = _tests(first, second)

    def entries(
        one: Mapping[str, float | None], other: Mapping[str, float | None]
    ) -> list[dict[str, Any]]:
        return [
            {"name": name, "a": one.get(name), "b": other.get(name), **tests.get(name, {})}
            for name in dict.fromkeys([*one, *other])
        ]

    return {
        "a": {"file": str(first.path), "model": first.model},
        "b": {"file": str(second.path), "model": second.model},
        "subsets": entries(first.subsets, second.subsets),
        "sections": entries(first.sections, second.sections),
        "all_rows": tests.get(ALL),
    }


def _tests(first: StoredResult, second: StoredResult) -> Mapping[str, dict[str, Any]]:
    """Test the difference in each subset and over all rows; empty without row outcomes."""
    if first.credits is None or second.credits is None:
        return {}
    by_subset: dict[str, list[str]] = {}
    for row_id, subset in first.subset_of.items():
        if subset is not None:
            by_subset.setdefault(subset, []).append(row_id)
    kinds: list[tuple[str, list[str] | None]] = [*by_subset.items(), (ALL, None)]
    tests = {}
    for name, ids in kinds:
        test = paired_test(first.credits, second.credits, ids=ids)
        tests[name] = {
            "num_rows": test.num_rows,
            "only_a": test.num_first_better,
            "only_b": test.num_second_better,
            "p": test.p_value,
        }
    return tests


def _print(first: StoredResult, second: StoredResult, compared: Mapping[str, Any]) -> None:
    console = make_console()
    for letter, result in (("A", first), ("B", second)):
        console.print(visible(f"{letter}: {result.model} ({result.path})"), soft_wrap=True)
    table = new_table("", "", "A", "B", "B - A", "only A", "only B", "p")
    for group in (compared["subsets"], compared["sections"]):
        for place, one in enumerate(group, start=1):
            a, b = one["a"], one["b"]
            table.add_row(
                name_text(one["name"]),
                share_text(a),
                share_text(b),
                "" if a is None or b is None else f"{b - a:+.4f}",
                *_test_cells(one),
                end_section=place == len(group),
            )
    test = compared["all_rows"]
    if test is not None:
        table.add_row(ALL, "", "", "", *_test_cells(test))
    print_table(console, table)
    if test is None:
        without = [result for result in (first, second) if result.credits is None]
        console.print(
            "note    no test of significance: the rows' own scores are not beside "
            + " and ".join(visible(str(result.path)) for result in without),
            soft_wrap=True,
        )
        return
    console.print(
        f"rows    {counted_that(test['num_rows'], 'row', 'have')} a verdict in both; only A / only "
        "B: rows on which that one is better; p: exact McNemar, two-sided",
        soft_wrap=True,
    )
    absent = len({*(first.credits or ())} ^ {*(second.credits or ())})
    if absent:
        console.print(
            f"note    {counted_that(absent, 'row', 'stand')} in one of the two alone, not compared"
        )


def _test_cells(entry: Mapping[str, Any]) -> tuple[str, ...]:
    if "p" not in entry:
        return ("", "", "")
    return (f"{entry['only_a']:,}", f"{entry['only_b']:,}", f"{entry['p']:.3g}")
