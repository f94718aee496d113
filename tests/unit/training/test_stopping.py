"""Signals as flags, and the arithmetic of a time budget."""

import os
import signal
import threading
import time

import pytest
import torch

from laurel.errors import ConfigError
from laurel.training.stopping import Deadline, StopRequest, parse_duration

torch.set_num_threads(1)


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_the_first_signal_is_a_flag_and_the_second_the_end(number):
    told: list[str] = []
    left: list[int] = []
    with StopRequest(told.append, leave=left.append) as stop:
        assert stop.signal is None
        assert stop.seconds == 0
        os.kill(os.getpid(), number)
        wait_for(lambda: told == [number.name])
        assert stop.signal is number
        wait_for(lambda: stop.seconds > 0.01)
        assert left == []
        os.kill(os.getpid(), number)
        wait_for(lambda: left == [128 + number])
    assert told == [number.name]


def test_a_signal_is_heard_while_the_main_thread_is_in_torch():
    """The product takes most of a second; a handler of Python's would run after it."""
    heard: list[float] = []
    factor = torch.ones(1500, 1500, dtype=torch.float64)
    with StopRequest(lambda name: heard.append(time.monotonic())):
        sender = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
        sender.start()
        torch.linalg.multi_dot([factor] * 4)
        done = time.monotonic()
        sender.join()
        wait_for(lambda: len(heard) == 1)
    assert heard[0] < done


def test_handlers_are_put_back_and_no_thread_is_left():
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    threads = threading.active_count()
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
        assert threading.active_count() == threads + 1
    after = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    assert after == before
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1


def test_other_signals_are_not_taken_for_a_request():
    received: list[int] = []
    previous = signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGUSR2)
            wait_for(lambda: received == [signal.SIGUSR2])
            time.sleep(0.02)
            assert stop.signal is None
    finally:
        signal.signal(signal.SIGUSR2, previous)


def test_another_thread_than_the_main_one_leaves_signals_alone():
    found: list[object] = []
    before = signal.getsignal(signal.SIGTERM)

    def inside():
        with StopRequest() as stop:
            found.append((stop.signal, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [(None, before)]


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_without_a_budget_the_end_is_never_near():
    clock = Clock()
    deadline = Deadline(None, clock=clock)
    clock.now = 1e12
    assert not deadline.is_near(before=["validation", "save"])


def test_what_comes_before_the_step_counts_too():
    clock = Clock()
    deadline = Deadline("00:00:10:00", clock=clock)
    deadline.took("save", 20.0)
    deadline.took("save", 10.0)  # the longest counts: 20, times 1.5 is 30
    deadline.took("step", 5.0)
    deadline.took("validation", 100.0)
    clock.now = 1464.9  # 100 + 5 + 30
    assert not deadline.is_near(before=["validation"])
    clock.now = 1465.0
    assert deadline.is_near(before=["validation"])
    for now, is_near in ((1465.0, False), (1564.9, False), (1565.0, True)):  # 5 + 30
        clock.now = now
        assert deadline.is_near() == is_near
    clock.now = 1445.0  # 100 + 20 + 5 + 30
    assert deadline.is_near(before=["validation", "save"])


def test_time_is_kept_for_a_save_that_was_never_measured():
    clock = Clock()
    short = Deadline("00:00:01:40", clock=clock)  # 100 s; a tenth of it, times 1.5: 15 s
    long = Deadline("01:00:00:00", clock=clock)  # a minute at most, times 1.5: 90 s
    clock.now = 1084.9
    assert not short.is_near()
    clock.now = 1085.0
    assert short.is_near()
    clock.now = 1000.0 + 86400 - 90.1
    assert not long.is_near()
    clock.now = 1000.0 + 86400 - 90
    assert long.is_near()
    long.took("save", 2.0)  # measured: only that counts now
    assert not long.is_near()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:00:00:07", 7), ("00:03:45:00", 13500), ("2:00:00:00", 172800), ("01:02:03:04", 93784)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "3h", "03:45:00", "00:03:45:0.5", "-1:00:00:00", "00:00:00:"])
def test_other_forms_are_refused(text):
    with pytest.raises(ConfigError, match="DD:HH:MM:SS"):
        parse_duration(text)


def fork_that_sleeps():
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_neither_keeps_the_request_open_nor_sends_it_its_signals(request):
    """An environment forks in `step`: the fork holds a copy of all that is open."""
    before = signal.getsignal(signal.SIGTERM)
    # The fork gets the handlers from before the request: `ray.init` in an earlier test of this
    # process leaves one that raises SystemExit, and the fork would go on as a test run.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, before))
    with StopRequest() as stop:
        child = fork_that_sleeps()
        os.kill(child, signal.SIGTERM)  # as `terminate` of multiprocessing does
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        left = fork_that_sleeps()
    # The listener has ended, though the fork holds the socket.
    os.kill(left, signal.SIGKILL)
    os.waitpid(left, 0)
    assert stop.signal is None
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_leaves_the_signals_blocked_that_its_thread_had_blocked():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        with StopRequest():
            child = os.fork()
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
            if child == 0:
                os._exit(0 if blocked == before | {signal.SIGUSR1} else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert blocked == before | {signal.SIGUSR1}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
