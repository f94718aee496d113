import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.config.environments import ScoreTransformConfig
from laurel.environments.reward_model_environment import Moments, ScoreTransform
from laurel.errors import ConfigError


def transform(*, stored=(None, None), **settings):
    return ScoreTransform(ScoreTransformConfig(**settings), stored=stored)


def test_without_settings_scores_are_the_rewards():
    plain = transform()
    assert plain.changes_nothing
    assert plain.rewards([1.5, -2.0]) == [1.5, -2.0]
    assert plain.factor == 1.0
    assert plain.rewards([]) == []


def test_scale_shift_and_clip_come_in_this_order():
    # 3 * 2 + 1 = 7, clipped to 5; -4 * 2 + 1 = -7, clipped to -5; 0 * 2 + 1 = 1
    made = transform(scale=2.0, shift=1.0, clip=(-5.0, 5.0))
    assert made.rewards([3.0, -4.0, 0.0]) == [5.0, -5.0, 1.0]
    assert made.factor == 2.0
    assert not made.changes_nothing


def test_a_reference_is_subtracted_first():
    # (3 - 1) * 10 + 1 = 21; (0 - 2) * 10 + 1 = -19
    made = transform(subtract_reference=True, scale=10.0, shift=1.0)
    assert made.rewards([3.0, 0.0], [1.0, 2.0]) == [21.0, -19.0]


def test_stored_statistics():
    # (7 - 3) / 2 = 2 ; (3 - 3) / 2 = 0 ; then * 0.5 + 1
    made = transform(normalize="stored", stored=(3.0, 2.0), scale=0.5, shift=1.0)
    assert made.rewards([7.0, 3.0]) == [2.0, 1.0]
    assert made.factor == 0.25


def test_the_stored_mean_cancels_where_a_reference_is_subtracted():
    # (7 - 3) / 2 - (5 - 3) / 2 = 1
    made = transform(normalize="stored", subtract_reference=True, stored=(3.0, 2.0))
    assert made.rewards([7.0], [5.0]) == [1.0]


@pytest.mark.parametrize("stored", [(None, None), (1.0, None), (1.0, 0.0)])
def test_stored_statistics_that_are_not_there(stored):
    with pytest.raises(ConfigError, match=r"normalize=stored.*mean and standard deviation"):
        transform(normalize="stored", stored=stored)


def test_running_statistics_change_only_when_a_batch_ends():
    made = transform(normalize="running")
    assert made.rewards([1.0, 5.0]) == [1.0, 5.0], "nothing is known yet"
    assert made.rewards([3.0]) == [3.0], "nor within the same batch"
    made.end_batch([1.0, 5.0, 3.0])
    # of 1, 5, 3: mean 3, squares 4 + 4 + 0 = 8, std sqrt(8 / 3)
    std = (8 / 3) ** 0.5
    assert made.rewards([3.0, 7.0]) == pytest.approx([0.0, 4 / std])
    assert made.factor == pytest.approx(1 / std)
    made.end_batch([3.0, 7.0])
    # of 1, 5, 3, 3, 7: mean 3.8, squares 7.84 + 1.44 + 0.64 + 0.64 + 10.24 = 20.8
    assert made.seen.count == 5
    assert made.seen.mean == pytest.approx(3.8)
    assert made.seen.squares == pytest.approx(20.8)


def test_only_running_statistics_change():
    made = transform(normalize="stored", stored=(3.0, 2.0))
    made.end_batch([1.0, 5.0])
    assert made.seen == Moments()


def test_equal_scores_are_not_divided_by_nothing():
    made = transform(normalize="running")
    made.end_batch([2.0, 2.0, 2.0])
    assert made.rewards([2.0, 3.0]) == [2.0, 3.0]


def test_a_saved_state_goes_on_to_the_last_bit():
    one, other = transform(normalize="running"), transform(normalize="running")
    one.end_batch([0.1, 0.7, -3.3])
    saved = one.state_dict() | {"waiting": []}  # which older versions wrote
    other.load_state_dict(json.loads(json.dumps(saved)))
    for made in (one, other):
        made.end_batch([9.1, 0.3])
    assert one.seen == other.seen
    assert one.rewards([0.2]) == other.rewards([0.2])


def test_small_spread_far_from_zero_is_exact():
    """A sum of squares minus the square of the sum would leave nothing of 0.01 at 30 000."""
    values = [30_000.0 + 0.01 * (-1) ** i for i in range(16)]
    seen = Moments().joined(values[:5]).joined(values[5:])
    assert seen.std == pytest.approx(0.01, rel=1e-6)


numbers = st.floats(-1e3, 1e3)


@given(st.lists(numbers, min_size=2, max_size=20), st.randoms(), st.integers(0, 20))
def test_order_within_a_batch_changes_no_bit_and_batches_change_nothing(values, random, cut):
    shuffled = list(values)
    random.shuffle(shuffled)
    assert Moments().joined(values) == Moments().joined(shuffled)
    whole, parts = Moments().joined(values), Moments().joined(values[:cut]).joined(values[cut:])
    assert parts.count == whole.count
    assert parts.mean == pytest.approx(whole.mean, abs=1e-9)
    assert parts.squares == pytest.approx(whole.squares, rel=1e-9, abs=1e-6)
