"""Long curves: no peak is lost, nothing is made up, the band is where it should be."""

import pytest

from laurel.extensions.report.charts import (
    NUM_PLACES,
    _edges,
    charts_of,
    extremes,
    over_seeds,
    smooth,
)
from laurel.observe.run_record import Series
from report_runs import record


def series(values):
    return Series(steps=tuple(float(i + 1) for i in range(len(values))), values=tuple(values))


def test_a_peak_of_one_step_in_ten_thousand_is_kept():
    values = [float(i % 7) for i in range(10_000)]
    values[4321], values[9000] = 99.0, -50.0
    long = series(values)
    short = extremes(long)
    assert len(short.steps) <= 2 * NUM_PLACES + 2
    kept = dict(zip(short.steps, short.values, strict=True))
    assert kept[4322.0] == 99.0
    assert kept[9001.0] == -50.0
    assert set(kept.items()) <= set(zip(long.steps, long.values, strict=True))
    assert list(short.steps) == sorted(short.steps)
    assert (short.steps[0], short.steps[-1]) == (1.0, 10_000.0)


def test_a_rolling_mean_and_its_band():
    """Of 0, 1, 0, 1, ... every window of 101 (one in 25 of 2,500) has a mean near a half."""
    smoothed = smooth(series([float(i % 2) for i in range(2_500)]))
    assert smoothed is not None
    assert smoothed.window == 101
    assert all(abs(value - 0.5) < 0.02 for value in smoothed.mean.values)
    assert set(smoothed.low.values) == {0.0}
    assert set(smoothed.high.values) == {1.0}
    assert (smoothed.mean.steps[0], smoothed.mean.steps[-1]) == (1.0, 2_500.0)


def test_several_seeds_are_a_mean_in_a_band():
    one = Series(steps=(1.0, 2.0, 3.0), values=(0.0, 2.0, 5.0))
    two = Series(steps=(2.0, 3.0, 4.0), values=(4.0, 1.0, 9.0))
    over = over_seeds([one, two])
    assert over is not None
    assert over.mean == Series(steps=(2.0, 3.0), values=(3.0, 3.0))
    assert over.low.values == (2.0, 1.0)
    assert over.high.values == (4.0, 5.0)
    assert over_seeds([one, Series(steps=(9.0,), values=(1.0,))]) is None


def test_the_band_of_rewards_ends_where_no_reward_was_seen():
    curves = {
        "train/reward": [0.1, 0.5, 0.9],
        "train/reward_std": [0.3, 0.5, 0.3],
        "train/reward_min": [0.0, 0.0, 0.5],
        "train/reward_max": [1.0, 1.0, 1.0],
    }
    chart = next(chart for chart in charts_of(record(curves)) if chart.title == "Reward")
    low, high = _edges(chart.lines[0], None) or ((), ())
    assert low == pytest.approx([0.0, 0.0, 0.6])
    assert high == pytest.approx([0.4, 1.0, 1.0])
    # Where nobody said what was seen, the spread is drawn as it is.
    unknown = {name: curves[name] for name in ("train/reward", "train/reward_std")}
    chart = next(chart for chart in charts_of(record(unknown)) if chart.title == "Reward")
    low, high = _edges(chart.lines[0], None) or ((), ())
    assert low[0] == pytest.approx(-0.2)
