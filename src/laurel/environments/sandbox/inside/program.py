"""A program in this process: its names, its code, and what its exceptions stand for."""

from __future__ import annotations

import builtins
import errno
import linecache
import sys
from collections.abc import Mapping
from types import CodeType, ModuleType
from typing import Any

FILE_NAME = "program.py"
EXIT_CODES: Mapping[str, int] = {
    "syntax_error": 65,
    "memory_limit": 66,
    "disk_limit": 67,
    "process_limit": 68,
    "forbidden": 69,
}
"""How the process ends after an exception that says more than that there was one. A program may
end so as well: each of them is a failure."""


class SourceError(Exception):
    """The program is no Python; the cause says why."""


def main_module(name: str = "__main__") -> dict[str, Any]:
    """The names of a new, empty module in the place of `__main__`, whatever it calls itself."""
    module = ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    module.__dict__["__file__"] = FILE_NAME
    sys.modules[name] = sys.modules["__main__"] = module
    return module.__dict__


def names_of(job: Mapping[str, Any], name: str = "__main__") -> dict[str, Any]:
    """The names that a program finds: those of its job's `prelude`, such as imports."""
    namespace = main_module(name)
    # By itself, so that lines of the program keep their numbers, and its __future__ comes first.
    if prelude := job.get("prelude"):
        execute(prelude, namespace, "prelude.py")
    return namespace


def execute(source: str, namespace: dict[str, Any], name: str = FILE_NAME) -> None:
    """Compile a source and run it.

    Raises:
        SourceError: It cannot be compiled.
        BaseException: What it raises.
    """
    lines = source.splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)
    exec(compiled(source, name), namespace)


def compiled(source: str, name: str) -> CodeType:
    """The code of a source; `SourceError` where it has none."""
    try:
        # Features that are on in this file are not for the program.
        return compile(source, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, OverflowError) as error:
        raise SourceError(str(error)) from error


def classify(error: BaseException) -> str:
    """Which status an exception stands for; `runtime_error` for most."""
    if isinstance(error, SourceError):
        return "syntax_error"
    if isinstance(error, MemoryError):
        return "memory_limit"
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            return "disk_limit"
        if error.errno == errno.EAGAIN:
            return "process_limit"
        if error.errno in (errno.EPERM, errno.EACCES, errno.EROFS):
            return "forbidden"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "process_limit"
    return "runtime_error"
