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


def is_ours(file: str) -> bool:
    """Whether a file is one of Laurel's."""
    return file.startswith(_LAUREL)


def is_installed(file: str) -> bool:
    """Whether a file is Laurel's, Python's or of a package: nobody's who writes for a run."""
    return is_ours(file) or file.startswith(_PYTHON) or "site-packages" in file


def own_line_of(error: BaseException) -> str | None:
    """The innermost line of what is the user's own that an exception came through, if any."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if not is_installed(f.filename)]
    return line_of(own[-1].filename, own[-1].lineno) if own else None


def told_with_line(error: Exception) -> str:
    """An error in anybody's program: what it is, and the line that raised it, or cannot be read."""
    place: tuple[str, int | None] | None = None
    if isinstance(error, SyntaxError) and error.filename is not None:
        place, said = (error.filename, error.lineno), error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        written = [frame for frame in frames if not frame.filename.startswith("<frozen")]
        place = (written[-1].filename, written[-1].lineno) if written else None
        said = str(error)
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return text if place is None else f"{text} ({line_of(*place)})"
