"""`laurel serve` that is killed and stopped under load, with a client that streams.

How it ends under load, and what its front leaves behind: `test_serve.py` and `test_serve_front.py`.
"""

import signal
import threading
from contextlib import ExitStack

import pytest
from null_server import NullScorer

from reward_streams import GROUPS, Streamed
from serve_processes import KEY, SamePort

MANY = GROUPS * 8


@pytest.fixture(scope="module")
def served_processes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("served")
    with ExitStack() as stack:
        yield [stack.enter_context(SamePort(directory, "--null")) for _ in range(3)]


@pytest.fixture
def three_served(served_processes):
    """All of them up and running."""
    for server in served_processes:
        if server.serving.process.poll() is not None:
            server.start()
    return served_processes


def null_scores(groups):
    null = NullScorer()
    return null.score_tokens([tokens for tokens, _ in null.prepare(groups)])


@pytest.mark.slow
def test_laurel_serve_is_killed_and_comes_back(three_served):  # [1]
    one, other, last = three_served
    streamed = Streamed(three_served, version="", api_key=KEY)
    streamed.after(100, one.kill)
    streamed.after(200, other.kill)

    def start_one_and_end_the_last():  # for a moment there may be none
        starting = threading.Thread(target=one.start)
        starting.start()
        last.kill()
        starting.join()

    streamed.after(300, start_one_and_end_the_last)
    assert streamed.run(MANY) == null_scores(MANY)
    assert streamed.counts["fault_connection"] > 0


@pytest.mark.slow
def test_laurel_serve_hangs(three_served):  # [2]
    limits = {"timeout": 900.0, "attempt_timeout": 600.0}
    streamed = Streamed(three_served, version="", api_key=KEY, hedge=True, **limits)
    streamed.after(100, lambda: three_served[0].serving.process.send_signal(signal.SIGSTOP))
    assert streamed.run(MANY) == null_scores(MANY)
    assert streamed.counts["hedges"] > 0
