"""The programs of benchmarks/ go with what they measure: what they take from Laurel is there."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
PROGRAMS = sorted(FOLDER.glob("*.py"))


@pytest.mark.slow
def test_every_program_can_be_imported() -> None:
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    names = [program.stem for program in PROGRAMS]
    run = subprocess.run(
        [sys.executable, "-c", code, *names], cwd=FOLDER, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("program", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_names_that_functions_import_are_there(program: Path) -> None:
    for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("laurel"):
            module = importlib.import_module(str(node.module))
            for name in (one.name for one in node.names):
                whole = f"{node.module}.{name}"
                assert hasattr(module, name) or find_spec(whole), f"{program.name}: {whole}"
