"""Every key of a configuration is read by something."""

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest

import laurel
from laurel.config.load import sections_below
from laurel.config.schemas import SCHEMAS, Kind

SOURCES = Path(laurel.__path__[0])


@functools.cache
def names_read() -> Counter[str]:
    """How often a name is read as an attribute, or stands in a text (as in lists of keys)."""
    found = Counter[str]()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found[node.attr] += 1
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found[node.value] += 1
            elif isinstance(node, ast.keyword) and node.arg:
                found[node.arg] += 1
    return found


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_key_is_read(kind: Kind) -> None:
    sections = {section for section, _ in sections_below(SCHEMAS[kind], plugged_in=True)}
    own = [section for section in sections if section.__module__.startswith("laurel.")]
    assert len(own) > 15
    unread = {
        f"{section.__name__}.{key}"
        for section in own
        for key in section.model_fields
        # Loggers are switched by the name that they have: `tensorboard_enabled`.
        if not names_read()[key] and not names_read()[key.removesuffix("_enabled")]
    }
    assert unread == set()
