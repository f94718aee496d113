"""Whether differences of scores mean probabilities: by hand, and what holds of any."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.errors import ConfigError
from laurel.evaluation.diagnostics import best_temperature, calibration
from laurel.evaluation.statistics import ScoredPair


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
    # A tie: confidence 0.5, half right, off by 0.
    gaps = [logit(0.81)] * 3 + [-logit(0.81)] + [logit(0.93), -logit(0.93), 0.0]
    found = calibration([*of_gaps(*gaps), of_scores(None, 1.0)])
    assert found is not None
    assert found.num_pairs == 7
    assert found.error == pytest.approx((4 * 0.06 + 2 * 0.43) / 7)
    rows = [(row.num_pairs, row.confidence, row.accuracy) for row in found.rows]
    ranges = [(row.start, row.end) for row in found.rows]
    assert ranges == [(0.5, 0.55), pytest.approx((0.8, 0.85)), pytest.approx((0.9, 0.95))]
    assert rows == [
        (1, 0.5, 0.5),
        (4, pytest.approx(0.81), 0.75),
        (2, pytest.approx(0.93), 0.5),
    ]
    expected = (
        -(3 * math.log(0.81) + math.log(0.19) + math.log(0.93) + math.log(0.07) + math.log(0.5)) / 7
    )
    assert found.negative_log_likelihood == pytest.approx(expected)
    assert calibration([of_scores(None, 1.0)]) is None
    with pytest.raises(ConfigError, match="num_rows=0"):
        calibration(of_gaps(1.0), num_rows=0)


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
