"""The README's tree is that of the code. `python tests/test_readme.py` writes it anew."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "laurel"
START = "<!-- tree: written by `python tests/test_readme.py` from the modules' docstrings -->\n"
END = "<!-- end of tree -->"
WIDTH = 30


def purpose(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"(?<=\.)\s|\n\n", text, maxsplit=1)[0]
    return " ".join(sentence.split()).rstrip(".")


def tree() -> str:
    return "```\nsrc/laurel/\n" + "".join(lines_of(SOURCE, "  ")) + "```\n"


def lines_of(folder: Path, indent: str) -> Iterator[str]:
    """Its modules, then its rooms."""
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield f"{indent + path.name:<{WIDTH}}{purpose(path)}\n"
    for path in sorted(folder.glob("*/__init__.py")):
        yield f"{indent}{path.parent.name}/\n"
        yield from lines_of(path.parent, indent + "  ")


def test_the_tree_in_the_readme_is_that_of_the_code() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    written = readme.split(START)[1].split(END)[0]
    assert written == tree(), "run `python tests/test_readme.py`"


if __name__ == "__main__":
    readme_path = ROOT / "README.md"
    before, rest = readme_path.read_text(encoding="utf-8").split(START)
    readme_path.write_text(before + START + tree() + END + rest.split(END)[1], encoding="utf-8")
