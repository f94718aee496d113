"""Lines of code as messages name them: whose they are, and where they lie."""

from __future__ import annotations

import os
import sysconfig
import traceback

_LAUREL = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep


def line_of(file: str, line: int | None) -> str:
    """A line of a file, from the working directory where the file is below it."""
    near = os.path.relpath(file)
    return f"{file if near.startswith(os.pardir) else near}:{line}"


def is_installed(file: str) -> bool:
    """Whether a file is Laurel's, Python's or of a package: nobody's who writes for a run."""
    return file.startswith((_LAUREL, _PYTHON)) or "site-packages" in file


def own_line_of(error: BaseException) -> str | None:
    """The innermost line of what is the user's own that an exception came through, if any."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if not is_installed(f.filename)]
    return line_of(own[-1].filename, own[-1].lineno) if own else None
