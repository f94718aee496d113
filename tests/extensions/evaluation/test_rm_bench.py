"""RM-Bench by hand."""

import pytest

from laurel.extensions.evaluation.other_benchmarks import (
    levels_of,
    matrix_of,
    measure_rm_bench,
    wins,
)

ONE = [2.0, 3.0, 4.0, 1.0, 2.5, 3.5]
"""Right: 2, 3, 4. Wrong: 1, 2.5, 3.5."""


def test_one_row_by_hand(scored_list):
    assert wins(scored_list("a", ONE, 3)) == ((1, 0, 0), (1, 1, 0), (1, 1, 1))
    matrix = matrix_of([scored_list("a", ONE, 3)])
    assert matrix is not None
    assert levels_of(matrix) == {"easy": 1.0, "normal": 1.0, "hard": 0.0}


def test_shares_over_rows_and_a_tie_is_wrong(scored_list):
    rows = [
        scored_list("a", ONE, 3),
        scored_list("b", [1.0] * 6, 3),
        scored_list("c", [None] * 6, 3),
    ]
    assert matrix_of(rows) == ((0.5, 0, 0), (0.5, 0.5, 0), (0.5, 0.5, 0.5))
    assert matrix_of(rows[2:]) is None


def test_domains_count_alike_and_the_rows_of_safety_together(scored_list):
    perfect, hopeless = [1.0] * 3 + [0.0] * 3, [0.0] * 3 + [1.0] * 3
    parts = {
        "chat": [ONE],
        "math": [perfect] * 3,
        "code": [hopeless] * 2,
        "safety-refuse": [perfect],
        "safety-response": [hopeless] * 9,
    }
    rows = [
        scored_list(f"{part}/{i}", scores, 3, part)
        for part, every in parts.items()
        for i, scores in enumerate(every)
    ]
    measured = measure_rm_bench(rows)
    sections = {one.name: one.value for one in measured.sections}
    assert sections["hard"] == pytest.approx((0 + 1 + 0 + 0.1) / 4)
    assert sections["easy"] == sections["normal"] == pytest.approx((1 + 1 + 0 + 0.1) / 4)
    assert sections["Safety"] == pytest.approx(0.1), "1 of 10 rows"
    assert sections["Chat"] == pytest.approx(2 / 3)
    assert measured.final.value == pytest.approx((2 / 3 + 1 + 0 + 0.1) / 4)
    assert measured.final.num_rows == len(rows)
    assert measured.notes == ()


def test_what_is_absent_is_said_and_failures_are_counted(scored_list):
    rows = [
        scored_list("a", ONE, 3, "chat"),
        scored_list("b", [None, *ONE[1:]], 3, "chat"),
        scored_list("c", ONE, 3, "cooking"),
    ]
    measured = measure_rm_bench(rows)
    assert measured.final.value is None
    assert [(one.value, one.num_rows, one.num_failures) for one in measured.subsets[:3]] == [
        (1.0, 1, 1),
        (1.0, 1, 1),
        (0.0, 1, 1),
    ]
    assert measured.notes[0].startswith("absent: math, code, safety-refuse, safety-response;")
    assert measured.notes[1].endswith("cooking")
    assert measured.credits == {"a": pytest.approx(6 / 9), "b": None, "c": pytest.approx(6 / 9)}


def test_another_number_of_answers(scored_list):
    with pytest.raises(ValueError, match="a: RM-Bench has 3 right and 3 wrong"):
        measure_rm_bench([scored_list("a", [1.0, 0.0, 0.0, 0.0])])
