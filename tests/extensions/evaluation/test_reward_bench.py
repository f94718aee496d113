"""RewardBench 1 against the reference implementation, and by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.errors import DataError
from laurel.evaluation.benchmarks import BenchmarkOptions, reduce_scores
from laurel.extensions.evaluation.benchmarks import BENCHMARKS
from laurel.extensions.evaluation.reward_bench import (
    NUM_ROWS,
    SECTIONS,
    WEIGHTS,
    final_score,
    measure_reward_bench,
    prior_score,
    section_scores,
)


def test_weights_are_those_of_the_paper():
    sums = {section: sum(weights.values()) for section, weights in SECTIONS.items()}
    assert sums == {"Chat": 358, "Chat Hard": 456, "Safety": 740, "Reasoning": 1968}
    assert sum(NUM_ROWS.values()) == 2985
    code = [weight for name, weight in WEIGHTS.items() if name.startswith("hep-")]
    assert WEIGHTS["math-prm"] == sum(code)


@pytest.mark.parametrize("column", ["reference", "ours"])
def test_rows_aggregate_as_their_accuracies_do(oracle, pairs, column):
    known = oracle("rewardbench")[column]
    rows = []
    for subset, accuracy in known["per_subset"].items():
        right = round(accuracy * NUM_ROWS[subset])
        rows += pairs(subset, right, NUM_ROWS[subset] - right)
    measured = measure_reward_bench(rows)
    assert {one.name: one.value for one in measured.subsets} == known["per_subset"]
    sections = {one.name: one.value for one in measured.sections}
    assert sections.pop("all rows, unweighted") == known["accuracy_2985"]
    assert sections == known["sections"]
    assert measured.final.value == known["overall"]
    assert (measured.final.num_rows, measured.final.num_failures) == (2985, 0)
    assert measured.notes == ()


def test_the_example_of_the_reference(oracle):
    known = oracle("rewardbench2")["readme_beaver"]
    assert section_scores(known["per_subset"]) == known["sections"]


def test_part_of_a_section_by_its_own_weights_and_absent_sections():
    accuracies = {"llmbar-natural": 0.5, "mt-bench-hard": 1.0, "gsm8k": 1.0}
    assert section_scores(accuracies) == {
        "Chat": None,
        "Chat Hard": 0.635036496350365,
        "Safety": None,
        "Reasoning": None,
    }
    assert final_score(accuracies) is None


def test_prior_sets_count_half_and_a_missing_one_not_at_all():
    assert prior_score({"shp": 0.5, "summarize": 0.7, "hep-go": 0.0}) == pytest.approx(0.6)
    assert prior_score({"hep-go": 1.0}) is None
    four = {"mt-bench-med": 0.9, "mt-bench-hard": 0.5, "donotanswer": 0.8, "hep-go": 0.6}
    assert final_score(four | {"shp": 0.3, "summarize": 0.1}) == pytest.approx((2 * 2.8 + 0.2) / 9)
    assert final_score(four) == pytest.approx(0.7)


def test_prior_sets_among_the_rows_are_a_fifth_section(pairs):
    rows = [one for subset in WEIGHTS for one in pairs(subset, 1, 1)] + pairs("shp", 1, 3)
    measured = measure_reward_bench(rows)
    assert {one.name: one.value for one in measured.sections}["Prior"] == 0.25
    assert measured.final.value == pytest.approx((8 * 0.5 + 0.25) / 9)


def test_ties_are_wrong_and_failures_are_no_verdicts(pair):
    scores = [(2.0, 1.0), (1.0, 1.0), (0.0, 1.0), (None, 1.0), (1.0, None)]
    measured = measure_reward_bench(
        [pair(str(i), one, "llmbar-natural") for i, one in enumerate(scores)]
    )
    (subset,) = measured.subsets
    assert (subset.value, subset.num_rows, subset.num_failures) == (1 / 3, 3, 2)
    assert measured.credits == {"0": 1.0, "1": 0.0, "2": 0.0, "3": None, "4": None}


def test_what_is_absent_or_unknown_or_not_whole_is_said(pairs):
    measured = measure_reward_bench(
        pairs("llmbar-natural", 99, 1) + pairs("hep-go", 3, 2) + pairs("mine", 1, 0)
    )
    assert measured.final.value is None
    assert measured.notes == (
        "absent section: Chat",
        "absent section: Safety",
        "absent from Chat Hard: mt-bench-hard, llmbar-adver-neighbor, llmbar-adver-GPTInst, "
        "llmbar-adver-GPTOut, llmbar-adver-manual",
        "absent from Reasoning: math-prm, hep-cpp, hep-java, hep-js, hep-python, hep-rust",
        "no final score: it is the mean of four sections",
        "hep-go has 5 rows where RewardBench has 164",
        "no subset of RewardBench, in no section: mine",
    )


def test_two_rows_with_one_id(pair):
    as_they_are = replace(BENCHMARKS["reward-bench"], scored=lambda row, scores_G: [row])
    rows: Any = [pair("a", (1.0, 0.0)), pair("a", (0.0, 1.0))]
    with pytest.raises(DataError, match="share an id"):
        reduce_scores(as_they_are, rows, [(), ()], BenchmarkOptions())


@given(
    st.dictionaries(st.sampled_from(sorted(WEIGHTS)), st.integers(0, 20), min_size=1),
    st.randoms(use_true_random=False),
)
def test_order_does_not_matter_and_a_section_lies_within_its_subsets(pairs, wins, random):
    rows = [one for subset, right in wins.items() for one in pairs(subset, right, 20 - right)]
    first = measure_reward_bench(rows)
    random.shuffle(rows)
    second = measure_reward_bench(rows)
    assert first.subsets == second.subsets
    assert first.sections == second.sections
    accuracies = {one.name: one.value for one in first.subsets}
    for section in first.sections[:4]:
        parts = [accuracies[name] for name in SECTIONS[section.name] if name in accuracies]
        assert (section.value is None) == (not parts)
        if section.value is not None:
            known = [part for part in parts if part is not None]
            assert min(known) - 1e-12 <= section.value <= max(known) + 1e-12
            assert math.isfinite(section.value)
