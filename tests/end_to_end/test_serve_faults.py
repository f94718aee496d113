"""`laurel serve` that is killed, ended and stopped under load, with a client that streams."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

from laurel.rewards.server.service import NullScorer
from reward_streams import GROUPS, Streamed

KEY = "test-key-" + "k" * 32
MANY = GROUPS * 8


class ServedProcess:
    """`laurel serve --null`, always on the same port."""

    def __init__(self, *arguments):
        self.arguments = arguments
        self.port = 0
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        command = [sys.executable, "-m", "laurel", "serve", "--null", "--access-log", "none"]
        self.process = subprocess.Popen(
            [*command, *self.arguments, "--port", str(self.port)],
            env={**os.environ, "LAUREL_API_KEY": KEY},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        said = []
        for line in self.process.stderr:
            said.append(line)
            if line.startswith("ready"):
                self.port = int(line.rpartition(":")[2])
                return
        raise AssertionError(f"it did not start: {said}")

    def end(self, signal_number=signal.SIGKILL):
        """Its exit code."""
        self.process.send_signal(signal_number)
        code = self.process.wait(timeout=60)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.end()


@pytest.fixture(scope="module")
def served_processes():
    with ExitStack() as stack:
        yield [stack.enter_context(ServedProcess()) for _ in range(3)]


@pytest.fixture
def three_served(served_processes):
    """All of them up and running."""
    for server in served_processes:
        if server.process.poll() is not None:
            server.start()
    return served_processes


def null_scores(groups):
    null = NullScorer()
    return null.score_tokens([tokens for tokens, _ in null.prepare(groups)])


@pytest.mark.slow
def test_laurel_serve_is_killed_and_comes_back(three_served):  # [1]
    one, other, last = three_served
    streamed = Streamed(three_served, version="", api_key=KEY)
    streamed.after(100, one.end)
    streamed.after(200, other.end)

    def start_one_and_end_the_last():  # for a moment there may be none
        starting = threading.Thread(target=one.start)
        starting.start()
        last.end()
        starting.join()

    streamed.after(300, start_one_and_end_the_last)
    assert streamed.run(MANY) == null_scores(MANY)
    assert streamed.counts["fault_connection"] > 0


@pytest.mark.slow
def test_laurel_serve_is_asked_to_end_under_load(three_served):  # [21]
    """SIGTERM: what it has is answered, the rest goes elsewhere, and it ends well."""
    codes = []

    def end_and_start():
        codes.append(three_served[0].end(signal.SIGTERM))
        three_served[0].start()

    streamed = Streamed(three_served, version="", api_key=KEY)
    streamed.after(100, end_and_start)
    assert streamed.run(MANY) == null_scores(MANY)
    assert codes == [0]


@pytest.mark.slow
def test_the_front_of_replicas_is_killed_and_started_again():
    """It holds the router. Whoever asks asks again until there is another one at its address."""
    with ServedProcess("--replicas", "2") as front:
        streamed = Streamed([front], version="", api_key=KEY)

        def kill_and_start():
            front.end()
            front.start()

        streamed.after(100, kill_and_start)
        streamed.after(800, kill_and_start)
        assert streamed.run(MANY) == null_scores(MANY)
        assert streamed.counts["requests"] == streamed.num_asked
        assert streamed.counts["fault_connection"] > 0


@pytest.mark.slow
def test_laurel_serve_hangs(three_served):  # [2]
    limits = {"timeout": 900.0, "attempt_timeout": 600.0}
    streamed = Streamed(three_served, version="", api_key=KEY, hedge=True, **limits)
    streamed.after(100, lambda: three_served[0].process.send_signal(signal.SIGSTOP))
    assert streamed.run(MANY) == null_scores(MANY)
    assert streamed.counts["hedges"] > 0
