"""The programs of benchmarks/ go with what they measure: what they take from Laurel is there.

So do the tests that need a GPU, which are collected only where there is one.
"""

from __future__ import annotations

import ast
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from runs import warm_python

FOLDER = Path(__file__).parents[1] / "benchmarks"
PROGRAMS = sorted(
    program
    for program in (*FOLDER.glob("*.py"), *(FOLDER / "gpu_day").glob("*.py"))
    if "__main__" in program.read_text(encoding="utf-8")
)
ASK_EACH = """
import runpy, sys
for program in sys.argv[1:]:
    sys.argv, sys.path[0] = [program, "--help"], program.rpartition("/")[0]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        assert not end.code, program
    else:
        raise AssertionError(f"{program} was asked for help, and ran")
"""


@pytest.mark.slow
def test_every_program_says_how_it_is_called() -> None:
    """In one process, which is forked from one that has imported torch."""
    run = warm_python()([sys.executable, "-c", ASK_EACH, *map(str, PROGRAMS)], FOLDER)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("usage: ") == len(PROGRAMS)


def test_the_readme_lists_every_program() -> None:
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    names = [str(program.relative_to(FOLDER)) for program in PROGRAMS]
    assert [name for name in names if f"| `{name}" not in listed] == []


@pytest.mark.parametrize(
    "program",
    sorted([*FOLDER.rglob("*.py"), *(Path(__file__).parent / "gpu").glob("*.py")]),
    ids=lambda path: path.stem,
)
def test_names_that_functions_import_are_there(program: Path) -> None:
    for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("laurel"):
            module = importlib.import_module(str(node.module))
            for name in (one.name for one in node.names):
                whole = f"{node.module}.{name}"
                assert hasattr(module, name) or find_spec(whole), f"{program.name}: {whole}"
