"""Changes to a configuration that are tried before they are named as mends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from laurel.config.section import Section

S = TypeVar("S", bound=Section)
Change = Mapping[str, Any]
"""Key, `a.b.c`, to value."""


def with_changes(config: S, change: Change) -> S:
    """A copy of a section with some keys changed. What depends on them is not checked."""
    for key, value in change.items():
        first, _, rest = key.partition(".")
        if rest:
            value = with_changes(_section(config, first), {rest: value})
        config = config.model_copy(update={first: value})
    return config


def _section(config: Section, name: str) -> Section:
    """A section of a section; where it is null, its defaults."""
    section = getattr(config, name)
    if section is None:
        kinds = getattr(type(config).model_fields[name].annotation, "__args__", ())
        section = next(k for k in kinds if isinstance(k, type) and issubclass(k, Section))()
    assert isinstance(section, Section)
    return section


def as_typed(change: Change) -> str:
    """A change as it is typed on the command line."""
    return " ".join(f"{key}={_value(value)}" for key, value in change.items())


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
