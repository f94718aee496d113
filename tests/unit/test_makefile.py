"""`make setup` says what it does before it does it: its longest step is silent for minutes."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
# Stands in for Python: makes no more of an environment than make calls.
case "$*" in
  "-c "*) ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip install "*) echo INSTALLED ;;
  *) exit 9 ;;
esac
"""


def test_each_step_of_setup_is_told_before_it(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON, encoding="utf-8")
    python.chmod(0o755)
    venv = tmp_path / "venv"
    command = ["make", "--no-print-directory", "setup", f"PYTHON={python}", f"VENV={venv}"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    first, second, installed, last = ran.stdout.splitlines()
    assert first.startswith(f"1/2 a virtual environment in {venv}: ")
    assert second.startswith(
        "2/2 torch, transformers and what else Laurel needs into it: about two"
    )
    assert installed == "INSTALLED"
    assert last.startswith("set up: ")
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "1/2" not in again.stdout  # there already
