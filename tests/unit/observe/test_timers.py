import pytest

from laurel.observe.progress import Timers


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_times_are_summed_until_they_are_collected():
    clock = FakeClock()
    timers = Timers(clock)
    for seconds in (1.0, 2.5):
        with timers.time("forward"):
            clock.now += seconds
    assert timers.collect() == {"forward": 3.5}
    with timers.time("step"):
        clock.now += 1
        with timers.time("forward"), timers.time("forward"):  # inside itself it counts once
            clock.now += 2
            assert timers.collect() == {}  # a running timer counts when it has ended
    assert timers.collect() == {"step": 3.0, "forward": 2.0}


def test_an_exception_still_counts():
    clock = FakeClock()
    timers = Timers(clock)

    def fail():
        with timers.time("forward"):
            clock.now += 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert timers.collect() == {"forward": 2.0}
