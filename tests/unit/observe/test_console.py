import contextlib
import io
import math
import os
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from laurel.data.report import TaskReport
from laurel.extensions.evaluation.policy import print_metrics
from laurel.extensions.score.score import print_scores
from laurel.observe.console import (
    PairRow,
    format_number,
    format_parameters,
    make_console,
    message_console,
    print_pairs,
    print_urgent,
    set_verbosity,
    shorten_middle,
    visible,
)
from laurel.observe.progress import TrainingProgress
from laurel.types import Conversation, Message, Preference, Score, group_of

NASTY = "[bold]x[/bold] [/] \x1b[31mred\x07\r\n\u202egnidrawkcab\udc80 日本語 👩‍👩‍👧 \x9b2J"


def make():
    # A plain file whatever the environment says, and markup on: any console must be safe.
    file = io.StringIO()
    return Console(width=80, file=file, force_terminal=False), file


def shown(file):
    text = file.getvalue()
    assert all(cell_len(line) <= 80 for line in text.split("\n"))
    assert "\x1b" not in text
    return text


def pair(better_score=2.5, worse_score=-1.0, **texts):
    defaults = {"prompt": "Capital of France?", "better": "Paris.", "worse": "Munich."}
    return PairRow(better_score=better_score, worse_score=worse_score, **(defaults | texts))


@pytest.mark.parametrize(
    "text", ["", NASTY, "日本" * 5000, "\x00" * 1000, "a" * 500, "\u0301" * 400]
)
def test_no_text_breaks_a_table(text):
    console, file = make()
    print_pairs(console, text, [pair(prompt=text, better=text, worse=text)])
    print_scores(console, [((Message(text, text),), Score(value=1.0))])
    print_scores(console, [((Message(text, text),), Score(value=None, failure=text))])
    print_metrics(console, text, {text: 1.0})
    assert shown(file)


def test_where_there_is_nothing_it_is_said():
    console, file = make()
    print_metrics(console, "validation-default", {})
    print_pairs(console, "pairs", [])
    print_scores(console, [])
    assert shown(file) == "validation-default: no metrics\npairs: no pairs\nno conversations\n"


def test_markup_and_control_characters_are_shown_not_obeyed():
    console, file = make()
    print_pairs(console, "pairs", [pair(better=NASTY)])
    text = " ".join(shown(file).split())
    assert r"[bold]x[/bold] [/] \x1b[31mred\x07\r\n\u202egnidrawkcab\udc80" in text
    assert r"\x9b2J" in text


@pytest.mark.parametrize(
    ("better_score", "worse_score", "verdict"),
    [
        (1.0, 0.0, "right"),
        (0.0, 1.0, "wrong"),
        (1.0, 1.0, "tie"),
        (math.nan, 1.0, "unknown"),
        (math.inf, 1.0, "unknown"),
    ],
)
def test_verdicts(better_score, worse_score, verdict):
    assert pair(better_score, worse_score).verdict == verdict


def test_a_row_is_the_best_and_the_worst_of_a_group():
    asked = [Message("system", "Add."), Message("user", "2+2?")]
    group = group_of(asked, ["5", "4", "fish"], group_id="g")
    preference = Preference(group=group, ranks_G=(1, 0, 2))
    row = PairRow.of(preference, [0.5, 1.5, -2.0])
    assert row == PairRow(
        prompt="system: Add.\nuser: 2+2?",
        better="4",
        worse="fish",
        better_score=1.5,
        worse_score=-2.0,
    )
    tied = Preference(group=group, ranks_G=(0, 0, 0))
    assert PairRow.of(tied, [0.5, 1.5, -2.0]) is None


def test_scores_show_number_or_reason():
    console, file = make()
    chat: Conversation = (Message("user", "Hi"), Message("assistant", "Hello"))
    long: Conversation = tuple(Message("user", f"turn {index}") for index in range(10))
    print_scores(
        console,
        [
            (chat, Score(value=-5.2534, num_tokens=39)),
            (chat, Score(value=None, failure="the template refused it")),
            (long, Score(value=2.0, num_tokens=8192, truncated=True)),
        ],
    )
    text = shown(file)
    assert "-5.253   user: Hi" in text
    assert "assistant: Hello" in text
    assert "failed   user: Hi" in text
    assert "the template refused it" in text
    assert "(cut to 8,192 tokens)" in text
    assert "... 4 more messages ..." in text
    assert "turn 0" in text
    assert "turn 4" not in text
    assert "turn 5" in text
    assert "turn 9" in text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (-0.0, "0"),
        (0.00012346, "0.0001235"),
        (12.3456, "12.35"),
        (999.97, "1,000"),
        (-12345.6, "-12,346"),
        (2e-6, "2.000e-06"),
        (1.23456e12, "1.235e+12"),
        (math.nan, "NaN"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_have_four_significant_digits(value, expected):
    assert format_number(value) == expected


def test_small_models_have_more_than_no_parameters():
    said = [format_parameters(count) for count in (41_232, 99_999, 100_000, 33_640_000)]
    assert said == ["41.2 thousand", "100 thousand", "0.1M", "33.6M"]


@settings(max_examples=30)
@given(st.text(), st.integers(16, 40))
def test_shortened_text_is_short_and_safe(text, length):
    assert shorten_middle("abcdefgh" * 4, 16) == "abcde ... cdefgh"
    with pytest.raises(ValueError, match="at least 16"):
        shorten_middle(text, 3)
    short = shorten_middle(text * 4, length)
    assert len(short) <= length
    assert short == visible(short)
    short.encode("utf-8")


def test_a_console_takes_texts_literally(monkeypatch):
    # A stream that can encode next to nothing, as under LANG=C.
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    console = make_console()
    console.print("pip install 'laurel-rl[wandb]' :smile: 日")
    sys.stdout.flush()
    assert raw.getvalue() == b"pip install 'laurel-rl[wandb]' :smile: \\u65e5\n"


def test_in_a_notebook_lines_end_between_words(monkeypatch):
    """A cell is no terminal: what is longer than it would be broken inside of words."""

    class Stream(io.StringIO):
        """Like the kernel's, which is told by its module."""

    Stream.__module__ = "ipykernel.iostream"
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "stdout", Stream())
    words = [f"word{number}" for number in range(30)]
    make_console().print(" ".join(words), soft_wrap=True)
    lines = sys.stdout.getvalue().splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= 92
    assert " ".join(lines).split() == words


def _printed(line):
    make_console().print(line)


def _printed_as_urgent(line):
    print_urgent(make_console(), line)


LINES = (
    "model   Qwen3 from demo/checkpoints/sft/step_250: 0.2M parameters, float32 on cpu, of words",
    "look: " + "one word after another " * 4 + "to the end",
)


@pytest.mark.parametrize("said", [_printed, _printed_as_urgent])
def test_on_a_terminal_a_line_goes_on_below_its_text_however_it_is_printed(said, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    for line in LINES:
        said(line)
    lines = sys.stdout.getvalue().splitlines()
    assert [len(line) - len(line.lstrip()) for line in lines] == [0, 8, 0, 2]
    assert not [line for line in lines if len(line) > 60]


@pytest.mark.parametrize("said", [_printed, _printed_as_urgent])
def test_in_a_file_a_line_stays_whole_however_it_is_printed(said, capsys, monkeypatch):
    """Headings of runs had been broken at 80 characters in logs, which are searched."""
    monkeypatch.delenv("COLUMNS", raising=False)
    for line in LINES:
        said(line)
    assert tuple(capsys.readouterr().out.splitlines()) == LINES


@pytest.mark.parametrize("columns", [None, "60"])
def test_in_a_file_a_report_has_whole_lines_without_blanks_at_their_ends(
    columns, capsys, monkeypatch
):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    report = TaskReport(name="train", num_read=300, notes=["of some data.jsonl:1 " * 9])
    make_console().print(report.render())
    said = capsys.readouterr().out
    assert not [line for line in said.splitlines() if line.endswith(" ")]
    assert (report.notes[0].strip() in said) == (columns is None)


@pytest.fixture
def _quiet():
    set_verbosity("quiet")
    yield
    set_verbosity("normal")


@pytest.mark.usefixtures("_quiet")
def test_quiet_leaves_results_and_what_is_urgent(capsys):
    console = message_console()
    with console.status("loading"):
        console.print("model   a.b")
        console.print(Text("warning: a key is ignored"))
        console.print("FAILED  2 completions")
        console.rule("1 of 6. Data")
    with TrainingProgress(2, 0, console) as progress:
        progress.step(1, {}, pairs=1, tokens=1)
        progress.message("saved step_1", is_routine=True)
        progress.message("step 1 not applied: NaN")
    make_console().print("latest  step_1")
    said = capsys.readouterr()
    assert said.out == "latest  step_1\n"
    assert said.err == (
        "warning: a key is ignored\nFAILED  2 completions\nstep 1 not applied: NaN\n"
    )


@pytest.mark.parametrize(
    ("term", "force", "is_moving"), [("xterm", "", True), ("dumb", "", False), ("xterm", "1", True)]
)
def test_a_spinner_on_a_terminal_that_can_show_it(term, force, is_moving, monkeypatch):
    monkeypatch.setenv("TERM", term)
    if force:
        monkeypatch.setenv("FORCE_COLOR", force)
    else:
        monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        console = message_console()
        with console.status("loading"):
            pass
        console.print("done")
    shown = ""
    with os.fdopen(master, "rb", buffering=0) as view, contextlib.suppress(OSError):
        while chunk := view.read(1000):  # Linux ends it with an error
            shown += chunk.decode(errors="replace")
    assert ("\x1b[?25l" in shown) == is_moving
    assert shown.replace("\r\n", "\n").endswith("done\n")
    assert not re.search(r"\x1b\[3\d", shown)  # no colour
    if not is_moving:
        assert "\x1b" not in shown


@pytest.mark.parametrize("width", [40, 100])
def test_brief_pairs_have_a_line_for_the_scores_and_one_for_each_text(width):
    file = io.StringIO()
    row = pair(prompt="word " * 200, better="日本" * 300, worse="no\nway")
    print_pairs(Console(file=file, width=width), "title", [row], is_brief=True)
    lines = file.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["right", "prompt", "better", "worse"]
    assert max(map(cell_len, lines)) <= 12 + max(60, width - 12)
    assert lines[1].endswith("word ...")  # at a blank
    assert lines[3].endswith(r"no\nway")
