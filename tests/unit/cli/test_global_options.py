"""`--quiet` and `--verbose`, options out of dataclasses, and what a wrong command line is told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from laurel.cli.main import App, QuietOption, VerboseOption, begin, main
from laurel.cli.main import app as laurel
from laurel.observe.console import set_verbosity, verbosity


@pytest.fixture(autouse=True)
def _normal() -> Iterator[None]:
    yield
    set_verbosity("normal")


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    made = App()
    inner = App()
    made.add_typer(inner, name="inner")

    @made.callback()
    def root(
        context: typer.Context, is_quiet: QuietOption = False, is_verbose: VerboseOption = False
    ) -> None:
        begin(context)

    @inner.command("show")
    def show(word: str = "-") -> None:
        """Show it.

        Example: a line that is longer than eighty letters, which is shown as it stands --word long
        """
        print(verbosity(), word)
        logging.getLogger("laurel.test").debug("a detail")

    @inner.command("other")
    def other() -> None:
        pass

    return made


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inner", "show"], "normal -"),
        (["-q", "inner", "show"], "quiet -"),
        (["inner", "show", "--quiet", "--word", "x"], "quiet x"),
        (["-v", "inner", "show"], "verbose -"),
        (["inner", "show", "-v"], "verbose -"),
        (["-v", "inner", "show", "-v"], "verbose -"),
    ],
)
def test_they_may_stand_anywhere(app: typer.Typer, arguments: list[str], said: str):
    done = CliRunner().invoke(app, arguments)
    assert done.stdout == f"{said}\n"
    assert ("DEBUG laurel.test: a detail" in done.stderr) == said.startswith("verbose")
    # One command line does not decide for the next.
    assert CliRunner().invoke(app, ["inner", "show"]).stdout == "normal -\n"


@pytest.mark.parametrize(
    "arguments", [["-q", "-v", "inner", "show"], ["-q", "inner", "show", "-v"]]
)
def test_one_excludes_the_other(app: typer.Typer, arguments: list[str]):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "exclude each other" in done.stderr


@pytest.mark.parametrize(("option", "is_traced"), [("-v", True), ("-q", False)])
def test_verbose_shows_where_an_error_is_from(
    option: str,
    is_traced: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["laurel", option, "config", "policy.modl_name=x"])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert end.value.code == 2
    assert said.out == ""
    assert "did you mean 'model_name'?" in said.err.splitlines()[-1]
    assert ("Traceback" in said.err) == is_traced


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["scroe"], "'score'"),
        (["eval", "rewardbench"], "'reward-bench'"),
        (["score", "--modle"], "--model"),
        (["train", "rm"], "No such command 'train'. Did you mean 'rm'? Choose one of rm, sft, "),
        (["eval", "what"], "No such command 'what'. Choose one of policy, reward-bench, "),
        (["init", "--task", "rmm"], "'rmm' is none of its choices. Did you mean rm? Choose one of"),
        (["plan", "--for", "?"], "'?' is none of its choices. Choose one of rm, sft, grpo"),
        (["serve", "--port", "x"], "'x' is no whole number"),
        (["serve", "--request-seconds", "x"], "'x' is no number"),
        (["plan", "--nodes", "0"], "0 is less than 1"),
        (["rm", "-c", "a.yaml", "--data.path", "my rows"], "dashes before them: write data.path='"),
        (["rm", "--data.path=a.jsonl", "x=y"], "no dashes before them: write data.path=a.jsonl"),
        (["rm", "--lr", "1e-3"], "without dashes: policy.optimizer.kwargs.lr=1e-5"),
        (["config", "show", "--grpo.seed"], "no dashes before them: write grpo.seed=VALUE"),
        (["plan", "--grpo.seed", "--json"], "no dashes before them: write grpo.seed=VALUE"),
    ],
)
def test_a_wrong_command_line_is_answered_with_what_was_meant(arguments: list[str], said: str):
    done = CliRunner().invoke(laurel, arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert "Value error" not in done.stderr


def commands(command: Any, *above: str) -> Iterator[list[str]]:
    """Those that are no groups: a group shortens the first sentences of its commands."""
    if not hasattr(command, "commands"):
        yield list(above)
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *above, name)


def test_no_line_of_a_help_text_breaks_inside_a_word():
    for names in commands(typer.main.get_command(laurel)):
        narrow, wide = (
            CliRunner().invoke(
                laurel, [*names, "--help"], terminal_width=columns, max_content_width=columns
            )
            for columns in (60, 2000)
        )
        assert narrow.output.split() == wide.output.split(), names


@dataclass(frozen=True, kw_only=True)
class Where:
    town: Annotated[str, typer.Option("--town", "-t", help="Which town.")] = "Rome"
    streets: Annotated[list[str] | None, typer.Option(help="Which streets.")] = None


@dataclass(frozen=True, kw_only=True)
class WhereAndWhen(Where):
    streets: Annotated[list[str] | None, typer.Option(help="All streets.")] = None
    year: Annotated[int, typer.Option(min=1)] = 44


def command_of(function: Any) -> typer.Typer:
    app = App()
    app.command()(function)
    return app


def test_fields_are_options_in_their_place_and_the_command_gets_the_dataclass():
    seen: list[Any] = []

    def walk(where: WhereAndWhen, fast: Annotated[bool, typer.Option("--fast")] = False) -> None:
        """Take a walk."""
        seen.append((where, fast))

    app = command_of(walk)
    done = CliRunner().invoke(app, ["-t", "Siena", "--streets", "a", "--streets", "b", "--fast"])
    assert done.exit_code == 0, done.output
    assert CliRunner().invoke(app, []).exit_code == 0
    assert seen == [
        (WhereAndWhen(town="Siena", streets=["a", "b"], year=44), True),
        (WhereAndWhen(), False),
    ]
    text = CliRunner().invoke(app, ["--help"]).output
    places = [text.index(word) for word in ("Take a walk", "--town", "--streets", "--year", "--fa")]
    assert places == sorted(places)
    assert "All streets." in text, "the field of the subclass, in the place of the first"
    assert CliRunner().invoke(app, ["--year", "0"]).exit_code == 2
