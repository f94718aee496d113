"""ProcessBench: first errors, F1 and thresholds, against numbers worked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laurel.errors import DataError
from laurel.evaluation.benchmarks import BenchmarkOptions, reduce_scores
from laurel.extensions.evaluation.benchmarks import BENCHMARKS
from laurel.extensions.evaluation.other_benchmarks import CORRECT, ERRONEOUS
from laurel.observe.metrics import first_below, first_error_metrics, step_metrics
from laurel.types import Score

# Of each solution: its subset, the index of its first error, and the values of its steps.
SOLUTIONS = [
    ("gsm8k", 1, (0.9, 0.4, 0.1)),  # found
    ("gsm8k", 2, (0.9, 0.4, 0.1)),  # called wrong too early
    ("gsm8k", 0, (0.2, 0.9)),  # found
    ("gsm8k", -1, (0.9, 0.8)),  # found right
    ("gsm8k", -1, (0.9, 0.45)),  # called wrong
    ("math", 1, (0.9, 0.6)),  # not called wrong
    ("math", 0, (0.3, 0.3)),  # found
    ("math", -1, (0.7,)),  # found right
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [
        {
            "id": f"row-{number}",
            "problem": "What is it?",
            "steps": [f"step {i}\n\nof them" for i in range(len(values))],
            "label": label,
            "subset": subset,
        }
        for number, (subset, label, values) in enumerate(SOLUTIONS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def measured(rows: Path, **options: object) -> object:
    asked = BenchmarkOptions(data=(str(rows),), **options)  # type: ignore[arg-type]
    benchmark = BENCHMARKS["process-bench"]
    read = benchmark.read(asked, print)
    assert read[0].group.completions_G[0].messages[0].content.count("\n\n") == 2
    scores = [(Score(value=min(values), values_K=values),) for _, _, values in SOLUTIONS]
    return reduce_scores(benchmark, read, scores, asked).measured


def test_figures_by_hand(rows: Path) -> None:
    found = measured(rows)
    sections = {one.name: one.value for one in found.sections}  # type: ignore[attr-defined]
    assert sections == {ERRONEOUS: 3 / 5, CORRECT: 2 / 3}
    subsets = {one.name: one.value for one in found.subsets}  # type: ignore[attr-defined]
    # gsm8k: 2 of 3 errors found, 1 of 2 correct ones left alone. math: 1 of 2, and 1 of 1.
    gsm8k = 2 * (2 / 3) * (1 / 2) / (2 / 3 + 1 / 2)
    assert subsets == {"gsm8k": pytest.approx(gsm8k), "math": pytest.approx(2 / 3)}
    assert found.final.value == pytest.approx((gsm8k + 2 / 3) / 2)  # type: ignore[attr-defined]


def test_a_threshold_is_taken_or_chosen_on_a_subset_and_said(rows: Path) -> None:
    # Below 0.425 the fifth solution is left alone, and the others of gsm8k stay as they are.
    for options in ({"threshold": 0.425}, {"fit_threshold": "gsm8k"}):
        found = measured(rows, **options)
        subsets = {one.name: one.value for one in found.subsets}  # type: ignore[attr-defined]
        assert subsets["gsm8k"] == pytest.approx(2 * (2 / 3) / (2 / 3 + 1))
        assert "0.425" in found.notes[0]  # type: ignore[attr-defined]
    assert "highest F1 on gsm8k" in found.notes[0]  # type: ignore[attr-defined]
    assert "(the default)" in measured(rows).notes[0]  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"no subset 'other'.* have the subsets gsm8k, math"):
        measured(rows, fit_threshold="other")
    rows.write_text(rows.read_text().replace('"label": -1', '"label": 0'))
    with pytest.raises(DataError, match="no threshold can be chosen on the subset 'gsm8k'"):
        measured(rows, fit_threshold="gsm8k")


def test_a_failure_takes_no_part_and_other_models_are_refused(rows: Path) -> None:
    asked = BenchmarkOptions(data=(str(rows),))
    benchmark = BENCHMARKS["process-bench"]
    read = benchmark.read(asked, print)
    scores = [(Score(value=None, failure="too long"),)]
    scores += [(Score(value=min(v), values_K=v),) for _, _, v in SOLUTIONS[1:]]
    found = reduce_scores(benchmark, read, scores, asked).measured
    assert {one.name: one.num_failures for one in found.sections} == {ERRONEOUS: 1, CORRECT: 0}
    assert found.sections[0].value == 2 / 4
    scalar = [(Score(value=1.0, values_K=(1.0,)),)] * len(read)
    with pytest.raises(DataError, match="gives 1 value for 3 steps"):
        reduce_scores(benchmark, read, scalar, asked)
    # Some servers send a score without values, and one score is not that of each step.
    without = [(Score(value=1.0),)] * len(read)
    with pytest.raises(DataError, match="gives 0 values for 3 steps"):
        reduce_scores(benchmark, read, without, asked)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"label": 3}, "'label' is 3"),
        ({"label": -2}, "'label' is -2"),
        ({"steps": ["a", ""]}, "a step in 'steps' is empty"),
        ({"steps": "a"}, "'steps' is"),
        ({"label": None}, "'label' is null"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(
    tmp_path: Path, change: dict[str, object], problem: str
) -> None:
    row: dict[str, object] = {"id": "1", "problem": "p", "steps": ["a", "b"], "label": -1}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "id": "2", **change}) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:2") as caught:
        BENCHMARKS["process-bench"].read(BenchmarkOptions(data=(str(path),)), print)
    assert problem in str(caught.value)


def test_first_errors_and_their_figures() -> None:
    assert first_below((0.9, 0.5, 0.4), 0.5) == 2
    assert first_below((0.9, 0.5), 0.5) == -1
    assert first_error_metrics([1, -1, -1], [1, 0, -1]) == {
        "erroneous_accuracy": 0.5,
        "correct_accuracy": 1.0,
        "first_error_f1": pytest.approx(2 / 3),
    }
    assert first_error_metrics([0], [1]) == {"erroneous_accuracy": 0.0}
    assert first_error_metrics([0, 0], [1, -1])["first_error_f1"] == 0.0


def test_metrics_of_steps_leave_out_what_has_no_label() -> None:
    nan = float("nan")
    found = step_metrics([(0.9, 0.2), (0.6, 0.7), (0.1, 0.9)], [(1.0, 0.0), (1.0, 0.5), (nan, 0.0)])
    assert found["step_accuracy"] == pytest.approx(3 / 4)
    # The third answer is labelled in part.
    assert found["erroneous_accuracy"] == 1.0
    assert found["correct_accuracy"] == 1.0
    assert found["num_valid_samples"] == 4.0
    assert step_metrics([(0.5,)], [(nan,)]) == {"num_valid_samples": 0.0}


def test_a_value_that_is_not_finite_is_on_no_side() -> None:
    found = step_metrics([(float("nan"), 0.9), (0.9,)], [(0.0, 1.0), (1.0,)])
    assert found["step_accuracy"] == 1.0
    assert found["num_valid_samples"] == 2.0
    assert found["correct_accuracy"] == 1.0
    assert "erroneous_accuracy" not in found


@pytest.mark.parametrize("inside", ["a\n\nb", "a\n\n\nb", "a\n\n\n\n\nb"])
def test_no_separator_is_left_inside_of_a_step(tmp_path: Path, inside: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem": "p", "steps": [inside, "c"], "label": -1}) + "\n")
    (row,) = BENCHMARKS["process-bench"].read(BenchmarkOptions(data=(str(path),)), print)
    assert row.steps == ("a\nb", "c")
    assert row.group.completions_G[0].messages[0].content == "a\nb\n\nc"
