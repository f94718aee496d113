"""Runs a job of any kind as Python runs a program, where everything else has been given up."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO, cast

from laurel.sandbox.inside.calls import (
    EXIT_CODES,
    FILE_NAME,
    SourceError,
    answer_calls,
    classify,
    execute,
    names_of,
    serve_program,
)
from laurel.sandbox.inside.proxy import run_tests

_TRACEBACK_HEAD, _TRACEBACK_TAIL = 2_000, 4_000


def hide() -> None:
    """Make this interpreter, and its forks, look like one that has just been started."""
    for name in [name for name in sys.modules if name.split(".")[0] == "laurel"]:
        del sys.modules[name]
    sys.argv = [FILE_NAME]


def open_streams() -> None:
    """Have Python's own streams read and write what is open as 0, 1 and 2."""
    sys.stdin = _stream(0, "r", "replace")
    sys.stdout = _stream(1, "w", "strict")
    sys.stderr = _stream(2, "w", "backslashreplace")
    for name in ("stdin", "stdout", "stderr"):  # what some programs restore
        setattr(sys, f"__{name}__", getattr(sys, name))


def run(job: dict[str, Any], parts: list[bytes]) -> None:
    """Run a job and end this process, where `hide` and `open_streams` have been called.

    Args:
        job: `kind` is script, call, serve or tests, `prelude` what is run before the program; the
            others are of that kind.
        parts: The source, and more, by kind.
    """
    code = 0
    try:
        _KINDS[job["kind"]](job, parts)
    except SystemExit as end:
        code = _code_of(end)
    except BaseException as error:
        code = EXIT_CODES.get(classify(error), 1)
        _print_traceback(error)
    _end(code, wait=job["kind"] == "script")


def _run_script(job: dict[str, Any], parts: list[bytes]) -> None:
    execute(parts[0].decode("utf-8", "replace"), names_of(job))


_KINDS: Mapping[str, Callable[[dict[str, Any], list[bytes]], None]] = {
    "script": _run_script,
    "call": answer_calls,
    "serve": serve_program,
    "tests": run_tests,
}


def _stream(descriptor: int, mode: str, errors: str) -> TextIO:
    # Not closed with the object: a thread may still want to print.
    stream = os.fdopen(descriptor, mode, encoding="utf-8", errors=errors, closefd=False)
    return cast(TextIO, stream)


def _code_of(end: SystemExit) -> int:
    """As Python does it."""
    if end.code is None:
        return 0
    if type(end.code) is int:
        return end.code & 0xFF
    with contextlib.suppress(Exception):  # it may be any object
        print(end.code, file=sys.stderr)
    return 1


def _print_traceback(error: BaseException) -> None:
    """As Python does it, without our own frames, and cut: a line of the program may be any
    length."""
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
    except BaseException:  # the exception may be any object, too
        os.write(2, b"an exception that cannot be printed\n")


def _end(code: int, *, wait: bool) -> None:
    """End this process as Python does: threads, exit functions, what is still to be written."""
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
