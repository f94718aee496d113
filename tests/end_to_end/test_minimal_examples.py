"""`examples/minimal_rm.py` and `minimal_grpo.py`: Laurel as a library, which loads no command."""

from __future__ import annotations

import asyncio
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
OF_A_COMMAND = ("typer", "ray", "laurel.config.environments", "laurel.run", "laurel.cli")


def test_a_reward_model_learns_from_rows() -> None:
    history = runpy.run_path(str(EXAMPLES / "minimal_rm.py"))["train"]()
    assert history[0]["loss"] == pytest.approx(0.693, abs=0.05)
    assert history[-1]["loss"] < 0.05
    assert history[-1]["accuracy"] == 1.0


def test_a_policy_learns_from_a_reward_function() -> None:
    history = asyncio.run(runpy.run_path(str(EXAMPLES / "minimal_grpo.py"))["train"]())
    assert max(history[:4]) < 0.4
    assert min(history[-4:]) > 0.8


def test_the_pieces_load_no_command() -> None:
    program = (
        "import runpy, sys\n"
        f"for path in {[str(EXAMPLES / f'minimal_{name}.py') for name in ('rm', 'grpo')]!r}:\n"
        "    runpy.run_path(path)\n"
        f"print([module for module in {OF_A_COMMAND!r} if module in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
