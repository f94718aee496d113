"""Writes JSON for other programs, without NaN and infinity, which JSON cannot express."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, TextIO


def json_text(value: Any, *, indent: int | None = 2) -> str:
    """Return a value as ASCII JSON without a final newline; numbers that are not finite are null.

    Args:
        value: A value of mappings, lists, tuples, texts, numbers, paths and None.
        indent: The number of spaces per level; None writes one line.
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


# `--json`: standard output gets nothing but JSON, even if libraries write to it meanwhile.

_kept: TextIO | None = None
"""Standard output, while other writes to it are redirected to standard error."""


def json_stream() -> TextIO:
    """Return the stream for JSON: the standard output that this process was given."""
    return sys.stdout if _kept is None else _kept


def write_json(value: Any, *, indent: int | None = 2) -> None:
    """Write a value as JSON, and a newline; numbers that are not finite are null.

    Args:
        indent: The number of spaces per level; None writes one line.
    """
    stream = json_stream()
    stream.write(json_text(value, indent=indent) + "\n")
    stream.flush()


@contextlib.contextmanager
def stdout_for_json() -> Iterator[None]:
    """Reserve standard output for `write_json` while the context is open.

    Everything else that is printed there, by libraries, child processes or the user's code, goes to
    standard error.
    """
    global _kept
    before = _kept
    with contextlib.ExitStack() as stack:
        _kept = _own_stdout(stack)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            yield
        finally:
            _kept = before


def _own_stdout(stack: contextlib.ExitStack) -> TextIO:
    # This duplicates descriptor 1 for JSON, and points descriptor 1 to standard error. A stream
    # without a descriptor that replaces standard output, as in a test, stays.
    stream = sys.stdout
    try:
        is_descriptor = stream.fileno() == 1
    except (OSError, ValueError, AttributeError):
        return stream
    if not is_descriptor:
        return stream
    stream.flush()
    # Child processes and C libraries write to descriptor 1, past `sys.stdout`.
    own = os.dup(1)
    os.dup2(2, 1)
    stack.callback(os.close, own)
    stack.callback(os.dup2, own, 1)  # called first
    return open(own, "w", encoding="utf-8", closefd=False)
