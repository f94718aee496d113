"""`--json`: standard output is JSON, whoever else prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from laurel.cli.main import App, app
from laurel.observe.console import set_verbosity
from laurel.observe.json_output import json_stream, json_text, stdout_for_json, write_json
from laurel.run.options import JsonOption
from runs import settings
from site_commands import all_commands

NOISY = """
import os, subprocess, sys
from laurel.observe.json_output import stdout_for_json, write_json

print("before", flush=True)
with stdout_for_json():
    print("a library")
    os.write(1, b"a C library\\n")
    subprocess.run([sys.executable, "-c", "print('a child')"], check=True)
    write_json({"answer": 42})
print("after")
"""


def test_what_others_print_goes_to_standard_error():
    done = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 'before\n{\n  "answer": 42\n}\nafter\n'
    for line in ("a library", "a C library", "a child"):
        assert line in done.stderr.splitlines()


def test_a_stream_that_stands_in_for_standard_output_is_kept(capsys: Any):
    def fail():
        with stdout_for_json():
            print("beside it")
            write_json([1], indent=None)
            raise ValueError("oh")

    with pytest.raises(ValueError, match="oh"):
        fail()
    print("after it")
    assert capsys.readouterr() == ("[1]\nafter it\n", "beside it\n")
    assert json_stream() is sys.stdout


def test_the_option_keeps_standard_output_while_its_command_runs():
    small = App()

    @small.command("small")
    def command(as_json: JsonOption = False) -> None:
        print("a note")
        if as_json:
            write_json({"a": 1}, indent=None)

    done = CliRunner().invoke(small, ["--json"])
    assert (done.stdout, done.stderr) == ('{"a": 1}\n', "a note\n")
    done = CliRunner().invoke(small, [])
    assert (done.stdout, done.stderr) == ("a note\n", "")


def test_what_is_not_finite_is_null_and_a_path_is_text():
    value = {"loss": float("nan"), "rates": (1.5, float("inf")), "best": Path("a") / "b", "é": None}
    said = {"loss": None, "rates": [1.5, None], "best": os.path.join("a", "b"), "é": None}
    assert json.loads(json_text(value)) == said
    assert json_text(value).isascii()
    assert "\n" not in json_text(value, indent=None)


def test_every_command_has_the_option():
    found = list(all_commands())
    assert len(found) >= 20
    for path, one, _ in found:  # under the name for which `cli.main` keeps stdout
        assert [p.name for p in one.params if "--json" in p.opts] == ["as_json"], path


def test_plans_and_configurations_are_json(tmp_path: Path):
    done = CliRunner().invoke(app, ["config", "--for", "grpo", "--json", "grpo.max_num_steps=7"])
    assert json.loads(done.stdout)["grpo"]["max_num_steps"] == 7
    refused = CliRunner().invoke(app, ["config", "--json", "--describe"])
    assert (refused.exit_code, refused.stdout) == (2, "")
    planned = ["plan", "--for", "sft", "--json", "+policy.scratch.hidden_size=32"]
    assert isinstance(json.loads(CliRunner().invoke(app, planned).stdout)["fits"], bool)


def test_a_run_ends_with_json_and_says_nothing_else_when_quiet(tmp_path: Path):
    overrides = settings(tmp_path, "rm.max_num_steps=2", "rm.val_at_end=true")
    try:
        done = CliRunner().invoke(app, ["rm", "--json", "--quiet", *overrides])
    finally:
        set_verbosity("normal")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["step"], said["ended"]) == (2, "finished")
    assert Path(said["latest"]).is_dir()
    assert any(name.endswith("/accuracy") for name in said["metrics"])
    assert done.stderr == ""
