"""Runs a job of any kind as Python runs a program, in a process that has given up all rights."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO, cast

from laurel.extensions.code.sandbox.inside.calls import (
    EXIT_CODES,
    FILE_NAME,
    SourceError,
    answer_calls,
    classify,
    execute,
    names_of,
    serve_program,
)
from laurel.extensions.code.sandbox.inside.proxy import run_tests

_TRACEBACK_HEAD, _TRACEBACK_TAIL = 2_000, 4_000


def hide() -> None:
    """Make this interpreter, and its forks, look like one that was just started."""
    for name in [name for name in sys.modules if name.split(".")[0] == "laurel"]:
        del sys.modules[name]
    sys.argv = [FILE_NAME]


def open_streams() -> None:
    """Connect Python's standard streams to descriptors 0, 1 and 2."""
    sys.stdin = _stream(0, "r", "replace")
    sys.stdout = _stream(1, "w", "strict")
    sys.stderr = _stream(2, "w", "backslashreplace")
    for name in ("stdin", "stdout", "stderr"):  # some programs restore these
        setattr(sys, f"__{name}__", getattr(sys, name))


def run(job: dict[str, Any], parts: list[bytes]) -> None:
    """Run a job and end this process, after `hide` and `open_streams`.

    Args:
        job: Its `kind` (script, call, serve or tests), a `prelude` that runs before the program,
            and the fields of that kind.
        parts: The source, and the other parts of its kind.
    """
    code = 0
    try:
        _KINDS[job["kind"]](job, parts)
    except SystemExit as end:
        # The exit code that Python would give.
        if end.code is None or type(end.code) is int:
            code = (end.code or 0) & 0xFF
        else:
            code = 1
            with contextlib.suppress(Exception):  # it may be any object
                print(end.code, file=sys.stderr)
    except BaseException as error:
        code = EXIT_CODES.get(classify(error), 1)
        _print_traceback(error)
    _end(code, wait=job["kind"] == "script")


_KINDS: Mapping[str, Callable[[dict[str, Any], list[bytes]], None]] = {
    "script": lambda job, parts: execute(parts[0].decode("utf-8", "replace"), names_of(job)),
    "call": answer_calls,
    "serve": serve_program,
    "tests": run_tests,
}


def _stream(descriptor: int, mode: str, errors: str) -> TextIO:
    # Not closed with the object, as a thread may still print.
    stream = os.fdopen(descriptor, mode, encoding="utf-8", errors=errors, closefd=False)
    return cast(TextIO, stream)


def _print_traceback(error: BaseException) -> None:
    """Print a traceback as Python would, but shortened, and without the sandbox's own frames."""
    try:
        shown: BaseException = error
        if isinstance(error, SourceError) and error.__cause__ is not None:
            shown = error.__cause__.with_traceback(None)
        frames = shown.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != FILE_NAME:
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(shown), shown, frames, limit=-30))
        if len(text) > _TRACEBACK_HEAD + _TRACEBACK_TAIL:
            text = f"{text[:_TRACEBACK_HEAD]}\n[...]\n{text[-_TRACEBACK_TAIL:]}"
        os.write(2, text.encode("utf-8", "backslashreplace"))
    except BaseException:  # the exception's methods may be the program's own
        os.write(2, b"an exception that cannot be printed\n")


def _end(code: int, *, wait: bool) -> None:
    """End this process as Python would, with threads, exit functions and buffered output."""
    try:
        if wait:
            getattr(threading, "_shutdown")()  # noqa: B009 - what the interpreter itself calls
            getattr(atexit, "_run_exitfuncs")()  # noqa: B009
    except BaseException:
        code = code or 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            code = code or 1
    os._exit(code)
