"""JSON output for other programs: without NaN and infinity, which JSON cannot express."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Annotated, Any, TextIO

import typer


def json_text(value: Any, *, indent: int | None = 2) -> str:
    """Return the value as ASCII JSON without a newline at its end; numbers not finite are null.

    Args:
        value: Mappings, lists, tuples, texts, numbers, paths, None.
        indent: Spaces of each level; None writes one line.
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


# --------------------------------------------------------------------------------------------------
# `--json`: standard output holds JSON and nothing else, also where libraries write to it meanwhile.

_kept: TextIO | None = None
"""Standard output, while other writes to it are redirected to standard error."""


def json_stream() -> TextIO:
    """Return the stream for JSON: the standard output that this process was given."""
    return sys.stdout if _kept is None else _kept


def write_json(value: Any, *, indent: int | None = 2) -> None:
    """Write one value and a newline; numbers not finite are null.

    Args:
        value: A value that `json_text` takes.
        indent: Spaces of each level; None writes one line.
    """
    stream = json_stream()
    stream.write(json_text(value, indent=indent) + "\n")
    stream.flush()


@contextlib.contextmanager
def stdout_for_json() -> Iterator[None]:
    """Keep standard output for `write_json`.

    Everything else that is printed there (by libraries, child processes, the user's code, as
    tables) goes to standard error.
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
    # Duplicates descriptor 1 for JSON, and points descriptor 1 at standard error. A stream that
    # replaces standard output, as in a test, has no descriptor and stays.
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


def _keep(context: typer.Context, is_wanted: bool) -> bool:
    if is_wanted and not context.resilient_parsing:
        context.with_resource(stdout_for_json())
    return is_wanted


JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        callback=_keep,
        help="Print JSON and nothing else on stdout; messages go to stderr.",
    ),
]
