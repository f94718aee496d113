"""RewardBench 2 against the reference implementation, and by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.extensions.evaluation.reward_bench import (
    NUM_PROMPTS,
    measure_reward_bench_2,
    ties_score,
)

CASES = ("win", "lose", "tie2", "tie3", "tie4", "tie_others", "nested")
TIES = (
    "perfect",
    "all_wrong",
    "accurate_but_spread",
    "ref_margin_small",
    "zero_spread",
    "equal_scores",
    "two_prompts",
)


def test_no_case_of_the_oracle_is_left_out(oracle):
    known = oracle("rewardbench2")
    assert set(known["cases"]) == set(CASES)
    assert set(known["ties"]) == set(TIES)


@pytest.mark.parametrize("case", CASES)
def test_best_of_four_as_the_reference(oracle, scored_list, case):
    known = oracle("rewardbench2")["cases"][case]
    scores = [one[0] if isinstance(one, list) else one for one in known["scores"]]
    assert scored_list("a", scores).first_credit == known["results"]
    (subset,) = measure_reward_bench_2([scored_list("a", scores, subset="Math")]).subsets
    assert subset.value == known["results"]


@pytest.mark.parametrize("case", TIES)
@pytest.mark.parametrize(
    ("zero_spread", "release"), [("limit", "score_head"), ("leave_out", "score_0.1.4")]
)
def test_ties_as_the_reference(oracle, scored_list, case, zero_spread, release):
    known = oracle("rewardbench2")["ties"][case]
    rows = [scored_list(row["id"], row["scores"], row["num_correct"]) for row in known["rows"]]
    figure = ties_score(rows, zero_spread=zero_spread)
    assert figure.value == known[release]
    assert figure.num_rows == len(rows)


def test_ties_by_hand(scored_list):
    rows = [scored_list("ref:7", [3.0, 1.0]), scored_list("tied:7", [4.0, 3.0, 0.5], 2, "ties")]
    # Both accurate; gaps 2 and 2.5, spread 1: both exceed it.
    expected = 0.3 + 0.3 + 0.2 + 0.2 + 0.01 * math.tanh(2.0 / 1.0 - 1)
    assert ties_score(rows).value == pytest.approx(expected, abs=1e-15)


def test_all_six_are_needed_for_the_final_score(scored_list):
    five = [name for name in NUM_PROMPTS if name != "Ties"]
    rows = [scored_list(name, [1.0, 0.0, 0.0, 0.0], subset=name) for name in five]
    measured = measure_reward_bench_2(rows)
    assert measured.final.value is None
    assert measured.notes[0] == "absent: Ties; the final score is the mean of all six"
    rows += [
        scored_list("ref:0", [0.0, 1.0], subset="Ties"),
        scored_list("tied:0", [0.0, 0.0, 1.0], 2, "Ties"),
    ]
    measured = measure_reward_bench_2(rows)
    # Of the five each 1; Ties: nothing right, margin -1 over a spread of 0 goes to tanh(-inf).
    assert measured.final.value == pytest.approx((5 - 0.01) / 6)
    assert [one.name for one in measured.subsets] == list(NUM_PROMPTS)


def test_a_missing_score_takes_its_row_out_and_is_counted(scored_list):
    rows = [
        scored_list("a", [1.0, 0.0, 0.0, 0.0], subset="Focus"),
        scored_list("b", [1.0, 0.0, None, 0.0], subset="Focus"),
        scored_list("ref:0", [1.0, None], subset="Ties"),
        scored_list("tied:0", [1.0, 1.0, 0.0], 2, "Ties"),
        scored_list("ref:1", [1.0, 0.0], subset="Ties"),
    ]
    measured = measure_reward_bench_2(rows)
    focus, ties = measured.subsets
    assert (focus.value, focus.num_rows, focus.num_failures) == (1.0, 1, 1)
    assert (ties.value, ties.num_rows, ties.num_failures) == (None, 0, 2)
    assert any(
        note.startswith("1 prompts of Ties have one of their two") for note in measured.notes
    )
    assert measured.credits["b"] is None
    assert measured.credits["tied:0"] == 1.0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("ref0", [1.0, 0.0], 1)], "ref0: the id of a row of Ties"),
        ([("ref:0", [1.0, 0.0], 1), ("ref:0", [1.0, 0.0], 1)], "ref:0: there are two rows"),
        ([("ref:0", [1.0, 0.0], 2), ("tied:0", [1.0, 0.0], 1)], "ref:0: a row of Ties needs"),
    ],
)
def test_ties_that_cannot_be_scored(scored_list, rows, message):
    with pytest.raises(ValueError, match=message):
        ties_score([scored_list(*row) for row in rows])


scores = st.lists(st.integers(-3, 3).map(float), min_size=4, max_size=4)


@given(st.lists(scores, min_size=1, max_size=8), st.integers(1, 5), st.integers(-9, 9))
def test_only_the_order_of_scores_counts_and_ties_share(scored_list, rows, scale, shift):
    lists = [scored_list(str(i), row, subset="Math") for i, row in enumerate(rows)]
    moved = [
        scored_list(str(i), [scale * x + shift for x in row], subset="Math")
        for i, row in enumerate(rows)
    ]
    assert measure_reward_bench_2(lists).subsets == measure_reward_bench_2(moved).subsets
    for row in rows:
        turns = [scored_list("a", row[i:] + row[:i]).first_credit for i in range(4)]
        assert sum(turns) == pytest.approx(1.0)  # whoever is asked about, one of the four is best
