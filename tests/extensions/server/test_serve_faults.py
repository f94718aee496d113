"""`laurel serve` that is killed, ended and stopped under load, with a client that streams."""

import signal
import threading
from contextlib import ExitStack

import pytest
from null_server import NullScorer

from reward_streams import GROUPS, Streamed
from serve_processes import KEY, SamePort

pytestmark = pytest.mark.usefixtures("warm_processes")


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


@pytest.fixture(scope="module")
def right():
    """The scores of all groups."""
    null = NullScorer()
    return null.score_tokens([tokens for tokens, _ in null.prepare(GROUPS)])


@pytest.mark.slow
def test_laurel_serve_is_killed_and_comes_back(three_served, right):  # [1]
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
    assert streamed.run(until="fault_connection") == right


@pytest.mark.slow
def test_laurel_serve_is_asked_to_end_under_load(three_served, right):  # [21]
    """SIGTERM: what it has is answered, the rest goes elsewhere, and it ends well."""
    codes = []

    def end_and_start():
        codes.append(three_served[0].serving.end())
        three_served[0].start()

    streamed = Streamed(three_served, version="", api_key=KEY)
    streamed.after(100, end_and_start)
    assert streamed.run() == right
    assert codes == [0]


@pytest.mark.slow
def test_the_front_of_replicas_is_killed_and_started_again(tmp_path, right):
    """It holds the router. Whoever asks asks again until there is another one at its address."""
    with SamePort(tmp_path, "--null", "--replicas", "2") as front:
        streamed = Streamed([front], version="", api_key=KEY)

        def kill_and_start():
            front.kill()
            front.start()

        streamed.after(100, kill_and_start)
        streamed.after(200, kill_and_start)
        assert streamed.run(until="fault_connection") == right
        assert streamed.counts["requests"] == streamed.num_asked


@pytest.mark.slow
def test_laurel_serve_hangs(three_served, right):  # [2]
    limits = {"timeout": 900.0, "attempt_timeout": 600.0}
    streamed = Streamed(three_served, version="", api_key=KEY, hedge=True, **limits)
    streamed.after(100, lambda: three_served[0].serving.process.send_signal(signal.SIGSTOP))
    assert streamed.run(until="hedges") == right
