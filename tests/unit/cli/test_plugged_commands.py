"""Commands of other packages: listed in the help, imported when they are run, refused by name."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from laurel.cli.main import app
from laurel.errors import ConfigError
from packages import installed

MODULE = """
import typer
from laurel.plugins import Command

class Count(Command):
    "Count words."
    after = "score"

    def make(self, section, name):
        return count

def count(word: str, as_json: bool = False) -> None:
    "Count the letters of a word."
    print(len(word))

class Words(Command):
    "A group."

    def make(self, section, name):
        words = typer.Typer()
        words.callback()(lambda: None)
        words.command("longest", help="Print the longest.")(count)
        words.command("shortest", help="Print the shortest.")(count)
        return words

class Ask(Command):
    "It has options of names that ours have, too."

    def make(self, section, name):
        return ask

def ask(model: str = "", judge: str = "") -> None:
    "Ask."
    print(model, judge)

class Odd(Command):
    "It returns nothing."

    def make(self, section, name):
        return None
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path, where a test installs packages."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def said(*words: str) -> str:
    done = CliRunner().invoke(app, [*words], prog_name="laurel")
    assert done.exit_code in (0, 2), done.exception
    return done.output


def listed(text: str) -> list[str]:
    lines = text.partition("Commands:\n")[2].splitlines()
    return [line.split()[0] for line in lines if line[2:3].strip()]


def test_a_command_and_a_group_of_another_package(site):
    points = {
        "count": "counting:Count",
        "words": "counting:Words",
        "eval letters": "counting:Count",
    }
    installed(site, "their-commands", {"counting": MODULE}, {"commands": points})
    names = listed(said("--help"))
    assert names.index("score") < names.index("count") < names.index("sandbox")
    assert names[-1] == "words"
    assert "Count the letters of a word." in said("--help")
    assert said("count", "laurel") == said("words", "longest", "laurel") == "6\n"
    assert said("eval", "letters", "laurel", "--quiet") == "6\n"
    assert listed(said("eval", "--help"))[-1] == "letters"
    assert "Did you mean 'count'?" in said("coutn", "laurel")


def test_options_mean_what_their_own_command_says(site):
    installed(site, "their-commands", {"counting": MODULE}, {"commands": {"ask": "counting:Ask"}})
    assert said("ask", "--model", "a", "--judge", "b") == "a b\n"
    for words in (["--model", "a", "--judge", "b"], ["--judge", "b", "--model", "a"]):
        assert "--model is about a reward model" in " ".join(said("score", "f", *words).split())


def test_shell_completion_knows_them(site):
    installed(
        site, "their-commands", {"counting": MODULE}, {"commands": {"zcount": "counting:Count"}}
    )
    asked = {"_LAUREL_COMPLETE": "complete_bash", "COMP_WORDS": "laurel\nzc", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, [], env=asked, prog_name="laurel").stdout == "zcount\n"


@pytest.mark.parametrize("name", ["rm", "sandbox", "eval policy"])
def test_a_name_of_a_core_command_is_refused_with_both_packages(name, site):
    installed(site, "their-commands", {"counting": MODULE}, {"commands": {name: "counting:Count"}})
    done = CliRunner().invoke(app, [*name.split(), "--config", "x.yaml"])
    assert isinstance(done.exception, ConfigError)
    assert "laurel-rl" in str(done.exception)
    assert "their-commands" in str(done.exception)
    assert "(cannot be used)" in said(*name.split()[:-1], "--help")


def test_a_name_of_an_extension_is_refused_when_it_is_run(site):
    installed(
        site, "their-commands", {"counting": MODULE}, {"commands": {"init": "counting:Count"}}
    )
    done = CliRunner().invoke(app, ["init", "--task", "rm"])
    assert isinstance(done.exception, ConfigError)
    assert "declared twice" in str(done.exception)
    assert "laurel-rl" in str(done.exception)
    assert "their-commands" in str(done.exception)


@pytest.mark.parametrize(
    ("module", "target"), [("raise OSError('no disk')", "X"), (MODULE, "Odd"), ("", "X")]
)
def test_one_that_cannot_be_used_says_so_and_hinders_no_other(module, target, site):
    of_it = f"unusable_{abs(hash((module, target)))}"
    installed(site, "their-commands", {of_it: module}, {"commands": {"x": f"{of_it}:{target}"}})
    assert "x" in listed(said("--help"))
    assert "their-commands" in said("x", "--help").replace("\n  ", " ")
    assert "Usage: laurel init" in said("init", "--help")
    done = CliRunner().invoke(app, ["x", "--some", "word"])
    assert isinstance(done.exception, ConfigError)
    assert "their-commands" in str(done.exception)


def test_a_command_imports_no_other_command():
    program = (
        "import sys\nfrom laurel.cli.main import main\n"
        "sys.argv = ['laurel', 'rm', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('loaded:', [name for name in sys.modules if name.startswith('laurel.extensions')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "loaded: []", done.stderr
