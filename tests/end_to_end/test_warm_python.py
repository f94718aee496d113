"""Programs of the tests end in a warm process as they do in one of their own.

Those of `warm_cli.py`, and the forks of `warm_python`.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from processes import descendants
from runs import environment, warm_python
from sandbox_processes import is_gone, wait_until

pytestmark = pytest.mark.slow

SEEN = """
import json, os, sys
seen = [__name__, sys.modules["__main__"].__dict__ is globals(), sys.argv[1:], sys.stdin.read()]
print(json.dumps([*seen, os.getcwd(), sorted(os.environ.items())]))
print("a word", file=sys.stderr)
"""
ENDS = {
    "a number": "import sys; sys.exit(75)",
    "a sentence": "import sys; sys.exit('why')",
    "an exception": "raise ValueError('why')",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "at exit": "import atexit; atexit.register(print, 'last'); print('first')",
}


def both(folder, *arguments):
    """What a process of its own and a warm one came to."""
    command = [sys.executable, *arguments]
    own = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
    )
    return own, warm_python()(command, folder)


@pytest.mark.parametrize("program", ENDS.values(), ids=ENDS)
def test_it_ends_as_one_of_its_own(tmp_path, program):
    own, warm = both(tmp_path, "-c", program)
    assert (warm.returncode, warm.stdout) == (own.returncode, own.stdout)
    assert warm.stderr.splitlines()[-1:] == own.stderr.splitlines()[-1:]


@pytest.mark.parametrize("kind", ["-m", "-c", "script"])
def test_it_sees_what_one_of_its_own_sees(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("OF_THIS_TEST", "here")
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "seen.py").write_text("import beside\n" + SEEN)
    words = {"-m": ("-m", "seen"), "-c": ("-c", SEEN), "script": (str(tmp_path / "seen.py"),)}
    own, warm = both(tmp_path, *words[kind], "a", "b")
    assert own.returncode == 0, own.stderr
    assert "OF_THIS_TEST" in own.stdout
    assert (warm.returncode, warm.stdout, warm.stderr) == (0, own.stdout, own.stderr)


def test_one_that_hangs_is_no_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(warm_python(), "patience", 0.5)
    with pytest.raises(subprocess.TimeoutExpired):
        warm_python()([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path)


@pytest.fixture
def spawned(warm_processes):
    """A process that multiprocessing spawns, whose work a fork does."""
    started = []

    def start(work, *given):
        process = multiprocessing.get_context("spawn").Process(target=work, args=given)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    ("work", "given", "status"),
    [
        (sys.exit, 3, 3),
        (sys.exit, None, 0),
        (signal.raise_signal, signal.SIGTERM, -signal.SIGTERM),
        (signal.raise_signal, signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_fork_ends_as_what_asked_for_it_would(spawned, work, given, status):
    process = spawned(work, given)
    process.join(60)
    assert process.exitcode == status


def test_a_fork_has_the_connections_and_the_end_of_what_asked_for_it(spawned):
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    spawned(theirs.send, "from a fork").join(60)
    theirs.close()
    assert ours.recv() == "from a fork"
    with pytest.raises(EOFError):
        ours.recv()
    sleeper = spawned(time.sleep, 600)
    wait_until(lambda: descendants(sleeper.pid))
    (fork,) = descendants(sleeper.pid)
    wait_until(lambda: os.getpgid(fork.pid) == fork.pid)
    sleeper.kill()
    wait_until(lambda: is_gone(fork.pid))
