import pytest

from laurel.observe.progress import Timers


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_sums_until_collected():
    clock = FakeClock()
    timers = Timers(clock)
    for seconds in (1.0, 2.5):
        with timers.time("forward"):
            clock.now += seconds
    assert timers.collect() == {"forward": 3.5}
    assert timers.collect() == {}


def test_nested_time_counts_for_both():
    clock = FakeClock()
    timers = Timers(clock)
    with timers.time("total_step_time"):
        clock.now += 1
        with timers.time("forward"):
            clock.now += 2
    assert timers.collect() == {"total_step_time": 3.0, "forward": 2.0}


def test_a_name_inside_itself_counts_once():
    clock = FakeClock()
    timers = Timers(clock)
    with timers.time("forward"):
        clock.now += 1
        with timers.time("forward"):
            clock.now += 2
    assert timers.collect() == {"forward": 3.0}


def test_a_running_timer_counts_when_it_has_ended():
    clock = FakeClock()
    timers = Timers(clock)
    with timers.time("outer"):
        clock.now += 1
        assert timers.collect() == {}
        clock.now += 1
    assert timers.collect() == {"outer": 2.0}


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


def test_the_default_clock_never_runs_backwards():
    timers = Timers()
    with timers.time("nothing"):
        pass
    assert timers.collect()["nothing"] >= 0.0
