"""The reference is made from docstrings: a public name without one is an error here.

Ruff's D1 sees modules, classes, functions and methods, and lets pass what `noqa`, `@override` and
a leading underscore in a parent excuse. This sees the attributes of pydantic models as well: they
are what `laurel config --describe` and the reference print. Aliases of types and fields of
dataclasses are left to the docstring of their module or class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "laurel"
PYDANTIC = {"Section", "BaseModel"}


def is_public(name: str) -> bool:
    return not name.startswith("_")


def undocumented(tree: ast.Module, models: set[str]) -> Iterator[str]:
    """Public names without a docstring; `models` are the names of pydantic classes."""
    if not ast.get_docstring(tree):
        yield "the module"
    yield from _within(tree, "", models)


def _within(node: ast.Module | ast.ClassDef, prefix: str, models: set[str]) -> Iterator[str]:
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not is_public(child.name) or _is_excused(child):
                continue
            if not ast.get_docstring(child):
                yield f"{prefix}{child.name}"
            if isinstance(child, ast.ClassDef):
                yield from _within(child, f"{child.name}.", models)
                if child.name in models - PYDANTIC:
                    yield from _fields(child)


def _is_excused(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Overloads have the docstring of the function, setters that of the property."""
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return bool(names & {"overload", "override", "setter"})


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        kind = ast.unparse(field.annotation)
        # A field that is a section has the docstring of that section's class.
        if not is_public(field.target.id) or kind.startswith("ClassVar") or kind.endswith("Config"):
            continue
        if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
            yield f"{node.name}.{field.target.id}"


def pydantic_classes(trees: list[ast.Module]) -> set[str]:
    """By name: whatever is derived from a section or from pydantic's own base.

    Bodies that travel are left out: their fields are what the protocols call them.
    """
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    classes = [node for node in classes if node.name != "Body"]
    found = set(PYDANTIC)
    while True:
        more = {c.name for c in classes for base in c.bases if _name(base) in found} - found
        if not more:
            return found
        found |= more


def _name(base: ast.expr) -> str:
    return ast.unparse(base).split("[")[0].rpartition(".")[2]


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {
        path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    }


def test_every_public_name_has_a_docstring(trees: dict[str, ast.Module]) -> None:
    models = pydantic_classes(list(trees.values()))
    missing = [
        f"{path}: {name}" for path, tree in trees.items() for name in undocumented(tree, models)
    ]
    assert not missing


def test_what_has_none_is_seen() -> None:
    tree = ast.parse(
        "class A(Section):\n"
        "    '''A.'''\n    x: int = 0\n    y: int = 1\n    '''Y.'''\n    part: PartConfig\n"
        "    foreign: ClassVar[int] = 2\n"
        "    def f(self): ...\n    def _g(self): ...\n"
        "class B(A):\n    '''B.'''\n    z: int = 0\n"
        "class _C:\n    def h(self): ...\n"
    )
    models = pydantic_classes([tree])
    assert list(undocumented(tree, models)) == ["the module", "A.f", "A.x", "B.z"]
