"""The rows of every step are a pure function of the step."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.grpo.source import Stream
from laurel.training.epochs import StepOrder

SIZES = {"num_rows": st.integers(1, 60), "batch_size": st.integers(1, 20)}


def order_of(num_rows, batch_size, *, shuffle=True, seed=3):
    return StepOrder(num_rows, batch_size, shuffle=shuffle, seed=seed)


def epoch(order, number):
    steps = range(number * order.steps_per_epoch, (number + 1) * order.steps_per_epoch)
    return [order.rows(step) for step in steps]


def test_in_order_by_hand():
    order = order_of(5, 2, shuffle=False)
    assert order.steps_per_epoch == 3
    assert [order.rows(step) for step in range(4)] == [[0, 1], [2, 3], [4], [0, 1]]
    assert [order.samples_before(step) for step in range(5)] == [0, 2, 4, 5, 7]
    assert [order.epoch_of(step) for step in range(7)] == [0, 0, 0, 1, 1, 1, 2]


@settings(deadline=None)
@given(**SIZES, shuffle=st.booleans(), seed=st.integers(0, 2**40))
def test_every_epoch_reads_every_row_once(num_rows, batch_size, shuffle, seed):
    order = order_of(num_rows, batch_size, shuffle=shuffle, seed=seed)
    for number in (0, 1, 7):
        batches = epoch(order, number)
        assert sorted(row for rows in batches for row in rows) == list(range(num_rows))
        assert all(len(rows) == batch_size for rows in batches[:-1])
        assert 1 <= len(batches[-1]) <= batch_size
    step = 2 * order.steps_per_epoch - 1
    assert order.samples_before(step) == sum(len(order.rows(s)) for s in range(step))


@settings(deadline=None)
@given(**SIZES, seed=st.integers(0, 2**40), steps=st.lists(st.integers(0, 300), max_size=12))
def test_the_rows_of_a_step_do_not_depend_on_what_was_read_before(
    num_rows, batch_size, seed, steps
):
    wandering = order_of(num_rows, batch_size, seed=seed)
    for step in steps:
        assert wandering.rows(step) == order_of(num_rows, batch_size, seed=seed).rows(step)


def test_each_epoch_and_seed_has_an_order_of_its_own():
    orders = [
        tuple(row for rows in epoch(order_of(50, 8, seed=seed), number) for row in rows)
        for seed in (1, 2)
        for number in (0, 1, 2)
    ]
    assert len(set(orders)) == 6
    assert tuple(range(50)) not in orders


def test_every_order_is_about_as_likely():
    """The first row of 4000 epochs of 5 rows: 800 each, give or take 4 standard deviations."""
    counts = np.bincount([order_of(5, 5, seed=9).rows(step)[0] for step in range(4000)])
    assert abs(counts - 800).max() < 4 * (4000 * 0.2 * 0.8) ** 0.5


def test_the_order_is_fixed_for_good():
    """A run that goes on under another version of numpy must read the same rows."""
    order = order_of(10, 10, seed=42)
    assert order.rows(0) == [4, 8, 1, 9, 3, 6, 0, 7, 2, 5]
    assert order.rows(1) == [1, 2, 8, 5, 3, 9, 6, 0, 4, 7]
    assert {type(row) for row in order.rows(0)} == {int}
    assert Stream(10, shuffle=True, seed=42).rows(0, 20) == order.rows(0) + order.rows(1)


def test_a_stream_in_order_by_hand():
    stream = Stream(3, shuffle=False, seed=0)
    assert stream.rows(0, 2) == [0, 1]
    assert stream.rows(2, 5) == [2, 0, 1, 2, 0]
    assert stream.rows(7, 0) == []


@settings(deadline=None)
@given(num_rows=st.integers(1, 40), seed=st.integers(0, 2**40), shuffle=st.booleans())
def test_every_epoch_of_a_stream_reads_every_row_once(num_rows, seed, shuffle):
    stream = Stream(num_rows, shuffle=shuffle, seed=seed)
    drawn = stream.rows(0, 3 * num_rows)
    for number in range(3):
        part = drawn[number * num_rows : (number + 1) * num_rows]
        assert sorted(part) == list(range(num_rows))


@settings(deadline=None)
@given(
    num_rows=st.integers(1, 20),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    seed=st.integers(0, 99),
)
def test_a_stream_is_the_same_however_it_is_cut_and_wherever_one_begins(num_rows, cuts, seed):
    whole = Stream(num_rows, shuffle=True, seed=seed).rows(0, sum(cuts))
    stream, place, found = Stream(num_rows, shuffle=True, seed=seed), 0, []
    for count in cuts:
        found += stream.rows(place, count)
        place += count
    assert found == whole
    # Backwards too: nothing is remembered but what can be made again.
    fresh = Stream(num_rows, shuffle=True, seed=seed)
    assert [fresh.rows(i, 1)[0] for i in reversed(range(len(whole)))] == whole[::-1]
