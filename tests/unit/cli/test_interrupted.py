"""Ctrl-C ends a command with one line that says what it leaves."""

import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

import laurel.__main__
import laurel.extensions.demo.demo
import laurel.extensions.evaluation.policy
import laurel.extensions.evaluation.run
import laurel.extensions.score.score
from laurel.cli.main import app
from reward_models import small_model, write_model

ROW = b'{"prompt": "Where?", "completions": ["By the gate.", "No."]}\n'


def interrupted(*arguments, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("words", "where", "said"),
    [
        (["score", "-m", "x"], (laurel.extensions.score.score, "run_score"), "interrupted"),
        (
            ["demo", "-d", "there"],
            (laurel.extensions.demo.demo, "run_demo"),
            "interrupted; there keeps what was made, and another demo starts over",
        ),
        (
            ["eval", "policy", "-m", "x", "--dataset", "GSM8K"],
            (laurel.extensions.evaluation.policy, "_played"),
            "interrupted; no completion is kept",
        ),
        (
            ["eval", "pairs", "-m", "{model}", "-d", "{rows}", "-o", "out"],
            (laurel.extensions.evaluation.run, "open_evaluation_scorer"),
            "interrupted; 0 of 1 result kept in out",
        ),
    ],
)
def test_one_line_says_what_is_kept(words, where, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    write_model(small_model(), tmp_path / "x")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Where?", "chosen": "By the gate.", "rejected": "No."}\n')
    monkeypatch.setattr(*where, interrupted)
    done = CliRunner().invoke(app, [word.format(model="x", rows=rows) for word in words])
    assert done.exit_code == 130
    assert done.stderr.splitlines()[-1] == said


def test_a_signal_while_the_command_line_is_imported(capsys, monkeypatch):
    class Interrupting:
        find_spec = staticmethod(interrupted)

    monkeypatch.delitem(sys.modules, "laurel.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupting])
    with pytest.raises(SystemExit) as end:
        laurel.__main__.main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "interrupted before anything began\n"


@pytest.mark.slow
def test_a_signal_while_rows_are_read(tmp_path):
    model, output = tmp_path / "model", tmp_path / "scores.jsonl"
    write_model(small_model(), model)
    # Whoever is started in the background of a shell ignores the signal, and so do its children.
    program = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('laurel', run_name='__main__', alter_sys=True)"
    )
    command = [
        sys.executable,
        "-c",
        program,
        "score",
        "-m",
        model,
        "--device",
        "cpu",
        "-o",
        output,
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=False
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(ROW)
        process.stdin.flush()
        try:
            while len(list(tmp_path.iterdir())) < 2:  # its file is begun, and it waits for rows
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()
        lines = process.stderr.read().decode().splitlines()
    assert lines[-1] == f"interrupted; 0 rows scored, and {output} is not written"
    assert not output.exists()
