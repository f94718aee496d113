"""docs/troubleshooting.md: a section for each class of errors.py; messages that the code has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from laurel import errors

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CLASSES = [
    name for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.LaurelError)
]  # fmt: skip
NEVER_RAISED = {"LaurelError", "UserError"}


def sections(page: str) -> dict[str, str]:
    return dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))


def messages(section: str) -> list[str]:
    """The first column of its table."""
    return re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)


def texts(tree: ast.AST) -> Iterator[str]:
    """The constant texts of a program; neighbours that make one message are one text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def absent(message: str, sources: list[str]) -> bool:
    """Whether no one file has all fixed parts of it."""
    parts = [part.strip() for part in message.split("…") if len(part.strip()) > 2]
    return not parts or not any(all(part in source for part in parts) for source in sources)


def all_sources() -> list[str]:
    files = sorted((ROOT / "src" / "laurel").rglob("*.py"))
    return ["\0".join(texts(ast.parse(path.read_text(encoding="utf-8")))) for path in files]


def test_every_class_has_its_section() -> None:
    assert sorted(sections(PAGE)) == sorted(CLASSES)


def test_every_class_that_is_raised_has_messages_with_their_cure() -> None:
    for name, section in sections(PAGE).items():
        assert bool(messages(section)) == (name not in NEVER_RAISED), name
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        assert all(len([c for c in row.split(" | ") if c.strip(" |")]) == 3 for row in rows), name


def test_messages_of_the_page_are_messages_of_the_code() -> None:
    sources = all_sources()
    gone = [
        m for section in sections(PAGE).values() for m in messages(section) if absent(m, sources)
    ]
    assert not gone


def test_a_message_that_the_code_does_not_have_is_seen() -> None:
    sources = ["\0".join(texts(ast.parse('raise E(f"{a} is bad: " "choose " f"{b}; or wait")')))]
    assert not absent("… is bad: choose …; or wait", sources)
    assert absent("… is bad: pick …; or wait", sources)
    assert absent("…", sources)
