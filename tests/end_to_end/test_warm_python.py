"""Programs of the tests end in a warm process (`warm_cli.py`) as they do in one of their own."""

import subprocess
import sys

import pytest

from runs import environment, warm_python

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
