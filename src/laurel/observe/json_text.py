"""JSON as Laurel writes it for others: no NaN, no infinity, for which JSON has no word."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any


def json_text(value: Any, *, indent: int | None = 2) -> str:
    """The value as ASCII text without a newline at its end; what is not finite is null.

    Args:
        value: Mappings, lists, tuples, texts, numbers, paths, None.
        indent: Of each level; None writes one line.
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
