"""JudgeBench, pairs of any set, best of n, and the comparison of two results."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.evaluation.statistics import ScoredList
from laurel.extensions.evaluation import benchmarks
from laurel.extensions.evaluation import other_benchmarks as best_of_n
from laurel.extensions.evaluation import other_benchmarks as judge_bench
from laurel.extensions.evaluation.comparisons import paired_test, sign_test


def test_judge_bench_by_category_and_over_all_pairs(pairs):
    rows = [
        *pairs("mmlu-pro-law", 1, 0),
        *pairs("mmlu-pro-math", 1, 2, 1),
        *pairs("livecodebench", 3, 0),
        *pairs("my-own", 0, 1),
    ]
    measured = judge_bench.measure_judge_bench(rows)
    found = {one.name: (one.value, one.num_rows, one.num_failures) for one in measured.subsets}
    assert found == {"Knowledge": (0.5, 4, 1), "Coding": (1.0, 3, 0), "my-own": (0.0, 1, 0)}
    assert measured.final.value == 5 / 8
    assert measured.notes == ("absent: Reasoning, Math",)


def test_any_pairs_and_the_share_of_ties(pair):
    rows = [pair("a", (1.0, 0.0)), pair("b", (1.0, 1.0)), pair("c", (None, 1.0))]
    measured = benchmarks.measure(rows)
    assert (measured.final.value, measured.final.num_rows) == (0.5, 2)
    assert measured.sections[0].value == 0.5
    assert measured.subsets == ()


def test_best_of_n_by_hand(scored_list):
    lists = [
        scored_list("picked", [2.0, 1.0, 0.0], 1),
        scored_list("missed", [0.0, 1.0, 2.0, 0.0], 2),
        scored_list("shared", [1.0, 1.0], 1),
        scored_list("hopeless", [1.0, 0.0], 0),
        scored_list("failed", [1.0, None], 1),
    ]
    measured = best_of_n.measure_best_of_n(lists)
    assert measured.final.value == pytest.approx((1 + 0 + 0.5 + 0) / 4)
    assert (measured.final.num_rows, measured.final.num_failures) == (4, 1)
    random, oracle = (one.value for one in measured.sections)
    assert random == pytest.approx((1 / 3 + 1 / 2 + 1 / 2 + 0) / 4)
    assert oracle == 0.75
    assert measured.notes == ("in 1 of 5 prompts all answers are right, or all are wrong",)


def test_a_list_whose_parts_do_not_fit_is_refused():
    with pytest.raises(ValueError, match="x: 1 completions, 2 verdicts and 1 scores"):
        ScoredList(
            id="x", prompt=(), completions_G=("a",), is_right_G=(True, False), scores_G=(1.0,)
        )


@given(st.integers(0, 8), st.integers(0, 8))
def test_sign_test_is_the_share_of_throws_that_are_as_uneven(first, second):
    throws = first + second
    uneven = abs(first - second)
    as_uneven = sum(
        abs(2 * sum(one) - throws) >= uneven for one in itertools.product((0, 1), repeat=throws)
    )
    assert sign_test(first, second) == pytest.approx(as_uneven / 2**throws)
    assert sign_test(second, first) == sign_test(first, second)
    with pytest.raises(ValueError, match=f"counts are -1 and {second}"):
        sign_test(-1, second)


def test_only_rows_that_both_have_a_verdict_on_are_compared():
    first = {"a": 1.0, "b": 0.0, "c": None, "d": 1.0, "e": 0.5, "only": 1.0}
    second = {"a": 0.0, "b": 0.0, "c": 1.0, "d": 1.0, "e": 0.25}
    test = paired_test(first, second)
    assert (test.num_rows, test.num_first_better, test.num_second_better) == (4, 2, 0)
    assert test.p_value == 0.5
    assert paired_test(first, second, ids=["b", "c", "nobody"]).num_rows == 1
    assert paired_test({}, {}).p_value == 1.0
