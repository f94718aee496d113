"""What becomes of a run whose process is ended from below, as Ray's core does."""

import os
import signal
import subprocess
import sys

import pytest

from sandbox_processes import is_gone, wait_until

LISTEN = """
from laurel.training.stopping import StopRequest
with StopRequest(lambda name: print(name, flush=True)) as stop:
    print("ready", os.getpid(), flush=True)
    while stop.signal is None:
        time.sleep(0.01)
    time.sleep(2)  # for another that must not come
print("over", stop.signal, flush=True)
sys.exit(3)
"""


def guarded(program):
    head = "import os, sys, time\nfrom laurel.training.ray_guard import guard\nguard()\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("os._exit(1)", 75, "error: this run lost its Ray cluster, and Ray ended it"),
        ("sys.exit(1)", 1, ""),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("sys.exit(0)", 0, ""),
        ("os._exit(130)", 130, ""),
        ("os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_only_an_end_without_a_word_is_taken_for_rays(end, code, said):
    process = guarded(f"print('once')\nsys.stdout.flush()\n{end}")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "once\n")
    assert said in err
    assert ("lost its Ray cluster" in err) == (code == 75)


@pytest.mark.slow
def test_a_signal_arrives_once_whoever_it_was_sent_to():
    for to_both in (False, True):
        process = guarded(LISTEN)
        assert process.stdout is not None
        child = int(process.stdout.readline().split()[1])
        process.send_signal(signal.SIGTERM)
        if to_both:
            os.kill(child, signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
        assert out == "SIGTERM\nover Signals.SIGTERM\n" or out == "SIGTERM\nover 15\n"
        assert process.returncode == 3


def test_the_run_dies_with_who_watches_it():
    process = guarded(LISTEN)
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[1])
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: is_gone(child))
