"""Imports the code that a configuration names, names the line that raised, and guards its calls.

A process that a user's code forks ends where the call of that code ends. It is a copy of the whole
program in the middle of the call. If it came back from the call, it would go on as if it were the
program: answer a request a second time, take the next one, run the steps of a training run.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from types import ModuleType, TracebackType
from typing import Any, Generic, TypeVar

from laurel.errors import ConfigError, UserError

_FORM = re.compile(r"[^.:]+(\.[^.:]+)*[.:][^.:]+(\.[^.:]+)*")
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


def check_form(path: str, *, where: str, kind: type[UserError] = ConfigError) -> None:
    """Raise an error for what is no path of an object, as `import_object` takes it."""
    if not _FORM.fullmatch(path):
        raise kind(f"{where}: '{path}' is not of the form module.Name or module:Name")


def import_object(
    path: str, *, where: str, kind: type[UserError] = ConfigError, instead: str = ""
) -> Any:
    """Import the object at `package.module.Name` or `package.module:Name`.

    Args:
        where: The key that holds it, with which messages begin.
        instead: What to do if there is no such module, with a semicolon before it.

    Raises:
        UserError: The path does not have that form, there is no such module, it cannot be imported,
            or it has no such name.
    """
    check_form(path, where=where, kind=kind)
    # As with `python -m`, a module in the working directory can be named.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    module_path, colon, _ = path.partition(":")
    names = path.replace(":", ".").split(".")
    longest = module_path.count(".") + len(colon)
    for length in range(longest, 0, -1):
        module_name = ".".join(names[:length])
        try:
            with ForkGuard():
                found: Any = importlib.import_module(module_name)
        except Exception as error:  # in a file of the user, whose line the message names
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is not None and f"{module_name}.".startswith(f"{missing}."):
                continue
            raise kind(
                f"{where}: module '{module_name}' cannot be imported: {error_with_line(error)}"
                + ("; install what it imports" if missing else "")
            ) from error
        for name in names[length:]:
            found = member_of(found, name, where=where, kind=kind)
        return found
    raise kind(
        f"{where}: there is no module '{names[0]}' in the working directory ({os.getcwd()}) or "
        f"among the installed packages{instead}"
    )


def member_of(
    holder: Any, name: str, *, where: str, kind: type[UserError] = ConfigError, called: str = ""
) -> Any:
    """Return what has this name in a module or a class.

    Args:
        called: What messages call the holder. Default: its name.

    Raises:
        UserError: It has no such name; the message says which is the nearest, or what there is.
    """
    if hasattr(holder, name):
        return getattr(holder, name)
    held, module = getattr(holder, "__dict__", {}).items(), getattr(holder, "__name__", holder)
    known = {key: one for key, one in held if key[0] != "_" and not isinstance(one, ModuleType)}
    # Of a module what it defines, unless it defines nothing: imports would hide it.
    own = [key for key, one in known.items() if getattr(one, "__module__", None) == module]
    from laurel.config.yaml_tree import nearest

    near = nearest(name, known)
    listed = ", ".join((own or list(known))[:10]) or "nothing"
    hint = f"did you mean '{near}'?" if near else f"it has: {listed}"
    raise kind(f"{where}: {called or module} has no '{name}'; {hint}")


T = TypeVar("T")

RETURNED = (
    "laurel: a process that was forked in the call of a function, a tool or an environment "
    "returned from the call, and is ended with exit code 1: end it with sys.exit or os._exit\n"
)


class ForkGuard:
    """A context around a call of a user's code, which only the process that entered it leaves.

    Another one ends as a program does that comes to that point: with the code of `sys.exit`, or
    with a traceback and 1 if it raised. It ends with 1 after a return, too: who waits for it may
    take 0 for success.
    """

    __slots__ = ("_process",)

    def __enter__(self) -> None:
        self._process = os.getpid()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._process:
            _end(error)


def _end(error: BaseException | None) -> None:
    code, said = 1, RETURNED
    try:
        if isinstance(error, SystemExit):
            is_code = error.code is None or isinstance(error.code, int)
            code, said = (int(error.code or 0) & 0xFF, "") if is_code else (1, f"{error.code}\n")
        elif error is not None:
            said = "".join(traceback.format_exception(error))
        # Not by Python's streams: a thread that was not copied may hold their locks.
        os.write(2, said.encode(errors="backslashreplace"))
    finally:
        os._exit(code)


async def guarded(work: Awaitable[T]) -> T:
    """Await a coroutine of a user's code, with each of its steps in a `ForkGuard`."""
    return await _Steps(work)


class _Steps(Generic[T]):
    def __init__(self, work: Awaitable[T]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, Any, T]:
        steps = _awaited(self._work)
        step: Callable[[], Any] = partial(steps.send, None)
        while True:
            try:
                with ForkGuard():
                    asked = step()
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                sent = yield asked
            except BaseException as error:
                step = partial(steps.throw, error)
            else:
                step = partial(steps.send, sent)


async def _awaited(work: Awaitable[T]) -> T:
    return await work
