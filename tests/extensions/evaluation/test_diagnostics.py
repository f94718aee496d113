"""Figures of scored pairs: by hand, and what holds of any."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.errors import DataError
from laurel.evaluation.statistics import (
    BagOfWords,
    ScoredPair,
)
from laurel.extensions.evaluation.accuracy import (
    accuracy,
    interval_of_share,
    longer_wins,
)
from laurel.extensions.evaluation.comparisons import (
    accuracy_by_name,
    accuracy_by_value,
    bins_of,
    failure_reasons,
)
from laurel.extensions.evaluation.diagnostics import (
    agreements,
    best_temperature,
    calibration,
    kendall,
    length_controlled_accuracy,
    longer_scored_higher,
    score_distribution,
    score_length_correlation,
)
from laurel.observe.metrics import preference_metrics, spearman
from laurel.types import Message

_ids = itertools.count()


def pair(score_chosen, score_rejected, chosen="yes", rejected="no", **others):
    fields = {
        "id": f"pair {next(_ids)}",
        "prompt": (Message("user", "Is it so?"),),
        "chosen": chosen,
        "rejected": rejected,
        "score_chosen": score_chosen,
        "score_rejected": score_rejected,
    }
    return ScoredPair(**(fields | others))


RIGHT, WRONG, TIE = (2.0, 1.0), (1.0, 2.0), (1.0, 1.0)
FAILED = (None, 1.0)


scores = st.integers(-5, 5).map(float)
texts = st.text(alphabet="ab ", min_size=1, max_size=6)
some_pairs = st.lists(st.builds(pair, scores, scores, texts, texts), min_size=1, max_size=12)


def test_accuracy_by_hand():
    # Right, right, wrong, tie: 2 of 4, for a tie is wrong. The failures take no part.
    pairs = [pair(*s) for s in (RIGHT, RIGHT, WRONG, TIE, FAILED, (math.nan, 1.0))]
    found = accuracy(pairs)
    assert found is not None
    assert (found.value, found.num_pairs, found.num_ties) == (0.5, 4, 1)
    # Of 4 drawn at even odds, 0 or 4 are right 1 time in 16 each, more than the 2.5 % left out.
    assert (found.low, found.high) == (0.0, 1.0)


def test_failures_are_counted_by_their_reason():
    pairs = [
        pair(*FAILED, failure="too long"),
        pair(math.inf, 1.0),
        pair(*RIGHT),
        pair(None, None, failure="too long"),
    ]
    assert failure_reasons(pairs) == {"too long": 2, "no finite score": 1}
    assert accuracy(pairs[:2]) is None


def test_the_interval_is_that_of_pairs_drawn_with_replacement():
    # The same done by hand, pair by pair, with a generator of its own. 0.7 +- 1.96 * 0.0458.
    drawn = random.Random(5)
    verdicts = [True] * 70 + [False] * 30
    shares = sorted(sum(drawn.choices(verdicts, k=100)) / 100 for _ in range(4000))
    low, high = interval_of_share(70, 100)
    assert low == pytest.approx(shares[100], abs=0.011)
    assert high == pytest.approx(shares[3900], abs=0.011)
    assert low == pytest.approx(0.7 - 1.96 * math.sqrt(0.21 / 100), abs=0.011)


def test_a_few_pairs_that_are_all_right_are_not_certain():
    # Were the share 0.025 ** (1 / 5) = 0.478, five of five would come 25 times in a thousand.
    assert interval_of_share(5, 5) == (pytest.approx(0.478, abs=5e-4), 1.0)
    assert interval_of_share(0, 5) == (0.0, pytest.approx(0.522, abs=5e-4))


@given(some_pairs, st.randoms())
def test_accuracy_lies_in_its_interval_whatever_the_order(pairs, order):
    found = accuracy(pairs)
    assert found is not None
    assert 0 <= found.low <= found.value <= found.high <= 1
    mixed = order.sample(pairs, len(pairs))
    assert accuracy(mixed) == found
    assert length_controlled_accuracy(mixed) == length_controlled_accuracy(pairs)
    assert accuracy_by_value(mixed, {p.id: len(p.chosen) for p in pairs}) == accuracy_by_value(
        pairs, {p.id: len(p.chosen) for p in pairs}
    )


def test_slices_by_name():
    pairs = [pair(*RIGHT), pair(*WRONG), pair(*RIGHT), pair(*FAILED), pair(*RIGHT)]
    names = dict(zip([p.id for p in pairs], ["b", "b", "a", "c"], strict=False))
    # "c" holds a failure only, and the last has no name.
    found = accuracy_by_name(pairs, names)
    assert [(s.name, s.accuracy.value, s.accuracy.num_pairs) for s in found] == [
        ("a", 1.0, 1),
        ("b", 0.5, 2),
    ]


def test_slices_by_value():
    pairs = [pair(*s) for s in (RIGHT, WRONG, RIGHT, RIGHT, WRONG, RIGHT, FAILED)]
    values = dict(zip([p.id for p in pairs], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 100.0], strict=True))
    # Six with a verdict: 1 2 3 | 4 5 6, with 2 of 3 right in each.
    found = accuracy_by_value(pairs, values, num_bins=2)
    assert [(s.name, s.lowest, s.highest, s.accuracy.num_pairs) for s in found] == [
        ("1 to 3", 1.0, 3.0, 3),
        ("4 to 6", 4.0, 6.0, 3),
    ]
    assert [s.accuracy.value for s in found] == pytest.approx([2 / 3, 2 / 3])
    assert accuracy_by_value(pairs, {}) == []


def test_bins_never_part_equal_values():
    assert bins_of([3, 1, 1, 3], 5) == [(1, 1), (3, 3)]
    # Shares of 0 0 0 0 1 2 begin at 0, 0 and 1: two bins.
    assert bins_of([0, 0, 0, 0, 1, 2], 2) == [(0, 2)]
    assert bins_of([0, 0, 0, 1, 2, 3], 2) == [(0, 0), (1, 3)]
    assert bins_of([], 3) == []


def test_longer_wins_by_hand():
    pairs = [
        pair(*RIGHT, "four", "one"),
        pair(*RIGHT, "one", "four"),
        pair(*WRONG, "one", "two"),
        pair(*FAILED, "three", "one"),
    ]
    assert list(longer_wins(pairs).values()) == [1.0, 0.0, 0.5, 1.0]
    found = accuracy(pairs, baselines={"longer wins": longer_wins(pairs)})
    assert found is not None
    # On the pairs that have a verdict: (1 + 0 + 0.5) / 3.
    assert found.baselines == {"longer wins": 0.5}


def test_a_bag_of_one_word_by_hand():
    # "good" is worth log 2 of a feature. With weight w the loss is
    # log(1 + exp(-w log 2)) + 0.01 / 2 w^2, so log 2 / (1 + 2^w) = 0.01 w: bisection gives w.
    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        is_below = math.log(2) / (1 + 2**middle) > 0.01 * middle
        low, high = (middle, high) if is_below else (low, middle)
    found = BagOfWords.train([pair(None, None, "It is GOOD", "it is")] * 2)
    assert found.weights == {"good": pytest.approx(low, rel=1e-3), "it": 0.0, "is": 0.0}
    assert found.score("good good") == pytest.approx(low * math.log(3), rel=1e-3)
    credits = found.credits([pair(None, None, "good", "x"), pair(None, None, "y", "x")])
    assert list(credits.values()) == [1.0, 0.5]


def test_a_bag_of_words_that_has_nothing_to_learn():
    assert BagOfWords.train([pair(None, None, "a b", "b a")] * 3).weights == {}
    with pytest.raises(DataError, match="at least one training pair"):
        BagOfWords.train([])


def test_length_controlled_accuracy_by_hand():
    long, short = "a long one", "short"
    pairs = [
        *(pair(*s, long, short) for s in (RIGHT, RIGHT, RIGHT, WRONG)),  # 3 of 4
        *(pair(*s, short, long) for s in (RIGHT, WRONG)),  # 1 of 2
        pair(*WRONG, "same", "size"),  # no part
        pair(*FAILED, short, long),
    ]
    found = length_controlled_accuracy(pairs, baselines={"longer wins": longer_wins(pairs)})
    assert found is not None
    assert found.value == (0.75 + 0.5) / 2
    assert (found.longer_chosen.num_pairs, found.shorter_chosen.num_pairs) == (4, 2)
    assert found.baselines == {"longer wins": 0.5}
    assert found.low < found.value < found.high
    assert length_controlled_accuracy(pairs[:4]) is None


def test_the_halves_of_a_length_controlled_accuracy_are_drawn_apart():
    # 50 of 100 in each half. The mean of both has a deviation of 0.05 / sqrt(2), so the interval is
    # 4 * 0.0346 = 0.139 wide; drawn alike it would be 0.05 * 3.92 = 0.196.
    sides = (("long", "s"), ("s", "long"))
    pairs = [pair(*s, *side) for s in (RIGHT, WRONG) for side in sides for _ in range(50)]
    found = length_controlled_accuracy(pairs)
    assert found is not None
    assert found.high - found.low == pytest.approx(0.139, abs=0.015)


def test_longer_scored_higher_by_hand():
    pairs = [
        pair(*RIGHT, "long", "s"),  # yes
        pair(*WRONG, "s", "long"),  # yes
        pair(*RIGHT, "s", "long"),  # no
        pair(*TIE, "s", "long"),  # half
        pair(*RIGHT, "s", "t"),  # no part
    ]
    assert longer_scored_higher(pairs) == 2.5 / 4
    assert longer_scored_higher(pairs[-1:]) is None


def test_spearman_by_hand():
    # Ranks 1 2 3 4 and 2 1 4 3: 1 - 6 * 4 / (4 * 15) = 0.6.
    assert spearman([1, 2, 3, 4], [20, 10, 40, 30]) == pytest.approx(0.6)
    # Ranks 1 2.5 2.5 4 and 1 2 3 4, deviations -1.5 0 0 1.5 and -1.5 -0.5 0.5 1.5:
    # 4.5 / sqrt(4.5 * 5) = sqrt(0.9).
    assert spearman([1, 5, 5, 9], [1, 2, 3, 4]) == pytest.approx(math.sqrt(0.9))
    assert spearman([1, 1], [1, 2]) is None
    assert spearman([], []) is None
    # Scores 3 1 2 with lengths 1 2 3 (the fourth failed): ranks 3 1 2 and 1 2 3, 1 - 6*6/(3*8).
    pairs = [pair(3.0, 1.0, "a", "bb"), pair(2.0, None, "ccc", "dddd")]
    assert score_length_correlation(pairs) == pytest.approx(-0.5)


columns = st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=15)


@given(columns)
def test_kendall_counts_pairs_of_positions(rows):
    signs = [
        ((a > c) - (a < c), (b > d) - (b < d)) for (a, b), (c, d) in itertools.combinations(rows, 2)
    ]
    untied, other_untied = (sum(side != 0 for side in sides) for sides in zip(*signs, strict=True))
    found = kendall(*zip(*rows, strict=True))
    if not untied * other_untied:
        assert found is None
    else:
        expected = sum(a * b for a, b in signs) / math.sqrt(untied * other_untied)
        assert found == pytest.approx(expected)


def test_score_distribution_by_hand():
    pairs = [
        pair(0.0, 100.0, "a", "b"),
        pair(0.5, 100.0, "c", "d"),
        pair(50.0, None, "e", "f"),
        pair(50.0, 51.0, "e", "b", prompt=(Message("user", "Another"),)),
    ]
    found = score_distribution(pairs)
    assert found is not None
    # 0 0.5 50 50 51 100 100: 7 answers; 0 and 0.5 lie within 1 of the least, 2 within 1 of the
    # greatest. Two have 100 and two have 50 (the same text, but to another prompt): 4 of 7.
    assert found.num_answers == 7
    assert found.quantiles[0.5] == 50.0
    assert (found.quantiles[0.0], found.quantiles[1.0]) == (0.0, 100.0)
    assert found.mean == pytest.approx(351.5 / 7)
    assert (found.saturated_low, found.saturated_high) == (2 / 7, 2 / 7)
    assert found.identical_share == 4 / 7
    assert found.largest_repeat_difference is None
    assert score_distribution([pair(None, math.nan)]) is None


def test_one_answer_scored_twice_is_no_other_answer():
    found = score_distribution([pair(1.0, 0.0, "a", "b"), pair(1.25, 0.0, "a", "b")])
    assert found is not None
    assert found.identical_share == 0.0
    assert found.largest_repeat_difference == 0.25
    # Deviations from 0.5625 of 1, 1.25, 0 and 0.
    squares = 0.4375**2 + 0.6875**2 + 2 * 0.5625**2
    assert found.standard_deviation == pytest.approx(math.sqrt(squares / 4))
    equal = score_distribution([pair(*TIE, "a", "b")])
    assert equal is not None
    assert (equal.identical_share, equal.saturated_low, equal.saturated_high) == (1.0, None, None)


def test_agreement_by_hand():
    columns = {
        "a": [(2.0, 1.0), (1.0, 2.0), (1.0, 1.0), (3.0, None)],
        "b": [(9.0, 3.0), (5.0, 4.0), (0.0, 0.0), (3.0, 1.0)],
        "c": [(None, None), (None, 1.0), (math.inf, 0.0), (1.0, 0.0)],
    }
    found = agreements(columns)
    # a and b: the same, another, both tied. b and c: the last only. a and c: none.
    assert [(row.first, row.second, row.num_pairs) for row in found] == [
        ("a", "b", 3),
        ("b", "c", 1),
    ]
    assert found[0].same_verdict_share == pytest.approx(2 / 3)
    assert found[1].same_verdict_share == 1.0
    assert found[1].kendall == 1.0
    # a: 2 1 1 2 1 1, b: 9 3 5 4 0 0. 8 pairs of positions are untied in a; of them only 4 < 5 (at
    # the second 2, beside a 1) is discordant: 7 - 1. Untied in b: 15 - 1.
    assert found[0].kendall == pytest.approx(6 / math.sqrt(8 * 14))
    with pytest.raises(DataError, match="a has 1, b has 2"):
        agreements({"a": [(1.0, 2.0)], "b": [(1.0, 2.0)] * 2})
    assert agreements({"a": [], "b": []}) == []


def of_scores(chosen, rejected):
    return ScoredPair(
        id="pair",
        prompt=(),
        chosen="yes",
        rejected="no",
        score_chosen=chosen,
        score_rejected=rejected,
    )


def of_gaps(*gaps):
    return [of_scores(gap, 0.0) for gap in gaps]


def logit(probability):
    return math.log(probability / (1 - probability))


def test_calibration_by_hand():
    # Four at confidence 0.81, three right: off by 0.06. Two at 0.93, one right: off by 0.43.
    # A tie: confidence 0.5, wrong, off by 0.5.
    gaps = [logit(0.81)] * 3 + [-logit(0.81)] + [logit(0.93), -logit(0.93), 0.0]
    found = calibration([*of_gaps(*gaps), of_scores(None, 1.0)])
    assert found is not None
    assert found.num_pairs == 7
    # Training logs the same number of the same scores.
    logged = preference_metrics([[gap, 0.0] for gap in gaps], [[0, 1]] * 7)
    assert logged["ece"] == found.error
    assert found.error == pytest.approx((4 * 0.06 + 2 * 0.43 + 0.5) / 7)
    rows = [(row.num_pairs, row.confidence, row.accuracy) for row in found.rows]
    ranges = [(row.start, row.end) for row in found.rows]
    assert ranges == [(0.5, 0.55), pytest.approx((0.8, 0.85)), pytest.approx((0.9, 0.95))]
    assert rows == [
        (1, 0.5, 0.0),
        (4, pytest.approx(0.81), 0.75),
        (2, pytest.approx(0.93), 0.5),
    ]
    expected = (
        -(3 * math.log(0.81) + math.log(0.19) + math.log(0.93) + math.log(0.07) + math.log(0.5)) / 7
    )
    assert found.negative_log_likelihood == pytest.approx(expected)
    assert calibration([of_scores(None, 1.0)]) is None


def test_the_temperature_by_hand():
    # All gaps are 2 or -2 and three of four are right: the best probability is 3/4, so
    # 2 / T = log 3.
    found = calibration(of_gaps(2.0, 2.0, 2.0, -2.0))
    assert found is not None
    assert found.temperature == pytest.approx(2 / math.log(3))
    assert found.error_at_temperature == pytest.approx(0.0, abs=1e-9)
    assert found.negative_log_likelihood_at_temperature == pytest.approx(
        -(3 * math.log(0.75) + math.log(0.25)) / 4
    )


@pytest.mark.parametrize("gaps", [[], [1.0, 2.0], [0.0, 0.0], [1.0, -2.0]])
def test_no_temperature_is_best_where_none_is(gaps):
    assert best_temperature(gaps) is None
    found = calibration(of_gaps(*gaps))
    assert found is None or found.error_at_temperature is None


def test_a_temperature_of_extreme_gaps_is_finite():
    for gaps in ([1e300, -1e-300], [1e-300, 1e-300, -1e-300], [1e300, 1e300, -1e300]):
        found = best_temperature(gaps)
        assert found is not None
        assert 0 < found < math.inf


@given(st.lists(st.floats(-6, 6), min_size=2, max_size=12), st.floats(0.1, 10))
def test_calibration_holds_of_any_gaps(gaps, factor):
    found = calibration(of_gaps(*gaps))
    assert found is not None
    assert 0 <= found.error <= 1
    assert sum(row.num_pairs for row in found.rows) == len(gaps)
    if found.temperature is None:
        return
    assert best_temperature([factor * gap for gap in gaps]) == pytest.approx(
        factor * found.temperature, rel=1e-6
    )
    assert found.negative_log_likelihood_at_temperature is not None
    for other in (0.5, 0.9, 1 / found.temperature, 1.1, 2.0):
        worse = calibration(of_gaps(*(gap / (other * found.temperature) for gap in gaps)))
        assert worse is not None
        assert found.negative_log_likelihood_at_temperature <= worse.negative_log_likelihood + 1e-9
