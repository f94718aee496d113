"""Imports the code that a configuration names, and names the line of it that raised an error."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import traceback
from types import ModuleType
from typing import Any

from laurel.config.yaml_tree import nearest
from laurel.errors import ConfigError, UserError

_LAUREL = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep


def line_of(file: str, line: int | None) -> str:
    """Return a file and line for messages, relative to the working directory if it is below it."""
    near = os.path.relpath(file)
    return f"{file if near.startswith(os.pardir) else near}:{line}"


def is_ours(file: str) -> bool:
    """Report whether a file belongs to Laurel."""
    return file.startswith(_LAUREL)


def is_installed(file: str) -> bool:
    """Report whether a file belongs to Laurel, Python or a package, and not to the user."""
    return is_ours(file) or file.startswith(_PYTHON) or "site-packages" in file


def own_line_of(error: BaseException) -> str | None:
    """Return the innermost line of the user's own code in an exception's traceback, if any."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if not is_installed(f.filename)]
    return line_of(own[-1].filename, own[-1].lineno) if own else None


def error_with_line(error: Exception) -> str:
    """Describe an error with the line that raised it, or the line that could not be parsed."""
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


def import_object(path: str, *, where: str, kind: type[UserError] = ConfigError) -> Any:
    """Import the object at `package.module.Name` or `package.module:Name`.

    Args:
        path: The path.
        where: The key that holds it, with which messages begin.
        kind: The class of the error.

    Raises:
        UserError: There is no such module, it cannot be imported, or it has no such name.
    """
    # As with `python -m`, a module in the working directory can be named.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    module_path, colon, tail = path.partition(":")
    names = module_path.split(".")
    longest = len(names) if colon else len(names) - 1
    names += tail.split(".") if tail else []
    if longest == 0:
        raise kind(f"{where}: '{path}' is not of the form module.Class")
    for length in range(longest, 0, -1):
        module_name = ".".join(names[:length])
        try:
            found: Any = importlib.import_module(module_name)
        except Exception as error:  # in a file of the user, whose line the message names
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is not None and f"{module_name}.".startswith(f"{missing}."):
                continue
            raise kind(
                f"{where}: module '{module_name}' cannot be imported: {error_with_line(error)}"
            ) from error
        for name in names[length:]:
            found = member_of(found, name, where=where, kind=kind)
        return found
    raise kind(
        f"{where}: there is no module '{names[0]}' in the working directory ({os.getcwd()}) or "
        "among the installed packages"
    )


def member_of(holder: Any, name: str, *, where: str, kind: type[UserError] = ConfigError) -> Any:
    """Return what has this name in a module or a class.

    Raises:
        UserError: It has no such name; the message says which is the nearest, or what there is.
    """
    if hasattr(holder, name):
        return getattr(holder, name)
    own = getattr(holder, "__dict__", {}).items()
    known = [key for key, value in own if key[0] != "_" and not isinstance(value, ModuleType)]
    near = nearest(name, known)
    hint = f"did you mean '{near}'?" if near else f"it has: {', '.join(known[:10]) or 'nothing'}"
    raise kind(f"{where}: {getattr(holder, '__name__', holder)} has no '{name}'; {hint}")
