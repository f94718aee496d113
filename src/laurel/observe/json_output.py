"""JSON as Laurel writes it for others: no NaN, no infinity, for which JSON has no word."""

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


# --------------------------------------------------------------------------------------------------
# `--json`: standard output holds JSON and nothing else, whoever else writes to it meanwhile.

_kept: TextIO | None = None
"""Standard output, while everything else that is written there goes to standard error."""


def json_stream() -> TextIO:
    """Where JSON goes: the standard output that this process was given."""
    return sys.stdout if _kept is None else _kept


def write_json(value: Any, *, indent: int | None = 2) -> None:
    """Write one value and a newline; what is not finite is null.

    Args:
        value: See `json_text`.
        indent: Of each level; None writes one line.
    """
    stream = json_stream()
    stream.write(json_text(value, indent=indent) + "\n")
    stream.flush()


@contextlib.contextmanager
def stdout_for_json() -> Iterator[None]:
    """Keep standard output for `write_json`.

    What others print there (libraries, processes that are started, code of the user) goes to
    standard error, and so do the tables for people.
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
    """A stream of its own to where descriptor 1 leads, which from then on is standard error.

    A stream that stands in for standard output, as in a test, has no descriptor and stays.
    """
    stream = sys.stdout
    try:
        is_descriptor = stream.fileno() == 1
    except (OSError, ValueError, AttributeError):
        return stream
    if not is_descriptor:
        return stream
    stream.flush()
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
