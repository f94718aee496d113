"""`.ci/run`, with a `make` that only says what it was asked for, fails or hangs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from sandbox_processes import is_gone, wait_until

ROOT = Path(__file__).parents[2]
MAKE = """#!/bin/sh
echo "made $1"
case "$1" in
  "$FAILS")
    while [ "$HANGS" ] && [ ! -s "$0.hangs" ]; do sleep 0.01; done
    echo "why $1 fails" >&2
    exit 2 ;;
  "$HANGS") echo $$ > "$0.hangs"; exec sleep 600 ;;
esac
"""
TARGETS = [
    "setup",
    "check",
    "test-all",
    "docs",
    "demo",
    "house",
    "test-real",
    "test-pages",
    "setup-vllm",
    "test-vllm",
]


def run(folder: Path, **how: str) -> subprocess.CompletedProcess[str]:
    make = folder / "make"
    make.write_text(MAKE, encoding="utf-8")
    make.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "TMPDIR": str(folder),
        "FAILS": "",
        "HANGS": "",
        **how,
    }
    command = ["bash", str(ROOT / ".ci" / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1].endswith("all of it")
    assert {file.name for file in folder.iterdir()} <= {"make", "make.hangs"}
    return done


def test_all_is_made_and_what_ran_beside_is_printed(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("made")) == sorted(
        f"made {target}" for target in TARGETS
    )
    assert "FAILED" not in done.stdout


def test_what_is_left_out_of_the_tests_runs_beside_them() -> None:
    left_out = re.findall(r"--ignore=(\S+?)[\s\"]", (ROOT / ".ci" / "run").read_text("utf-8"))
    assert left_out
    pages = (ROOT / "Makefile").read_text("utf-8").partition("\ntest-pages:")[2].splitlines()[1]
    assert pages.split()[1:] == left_out


@pytest.mark.parametrize(
    ("fails", "hangs"),
    [
        ("setup", ""),
        ("setup", "setup-vllm"),
        ("setup-vllm", "test-all"),
        ("check", "demo"),
        ("test-all", "test-vllm"),
        ("docs", "test-all"),
        ("test-vllm", "test-all"),
        ("test-vllm", ""),
    ],
)
def test_a_failure_ends_the_others_at_once_and_is_told(
    tmp_path: Path, fails: str, hangs: str
) -> None:
    done = run(tmp_path, FAILS=fails, HANGS=hangs)
    assert done.returncode == 2
    assert f"why {fails} fails" in done.stdout + done.stderr
    if hangs:
        assert f"made {hangs}" in done.stdout
        hanging = int((tmp_path / "make.hangs").read_text())
        wait_until(lambda: is_gone(hanging))
    (failed,) = (line for line in done.stdout.splitlines() if "FAILED" in line)
    assert failed.split()[1:3] == ["make", fails]
    assert failed.endswith("FAILED (2)")
