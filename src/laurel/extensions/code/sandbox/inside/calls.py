"""Calls functions of a program with plain data, from a list or by requests over a channel.

Whatever the program does to this process, it can only change the answers.
"""

from __future__ import annotations

import builtins
import errno
import json
import linecache
import os
import sys
from collections.abc import Callable, Mapping
from types import CodeType, ModuleType
from typing import Any

from laurel.extensions.code.sandbox.inside import plain_data
from laurel.extensions.code.sandbox.inside.rights import CHANNEL_FD, RESULT_FD

_TEXT = 300
_AT_ONCE = 1 << 16


def answer_calls(job: dict[str, Any], parts: list[bytes]) -> None:
    """Run the program, then make the calls, and write a line for each.

    Args:
        job: The job, with the name of the function as `entry`, and the `prelude`.
        parts: The source, and a list of (args, kwargs) as plain data.
    """
    # Not `__main__`: what a program does when it is started, like reading stdin, must not run.
    namespace = names_of(job, "program")
    execute(parts[0].decode("utf-8", "replace"), namespace)
    function = find_solution(namespace, job["entry"])
    for index, (args, kwargs) in enumerate(plain_data.loads(parts[1])):
        reply = {"i": index, **_call(function, args, kwargs)[0]}
        _write(RESULT_FD, json.dumps(reply).encode() + b"\n")


def serve_program(job: dict[str, Any], parts: list[bytes]) -> None:
    """Run the program, then answer requests over the channel until it is closed.

    A request is a line with a number, a verb, a name, args and kwargs. `call` calls the function of
    that name or, without a name, the first argument. `get` and `set` access the attribute of that
    name of the first argument. The reply has the number of the request, and the arguments, which a
    function may have changed. An object of a class of the program stays here, and is sent as a
    number.
    """
    namespace = main_module()
    execute(parts[0].decode("utf-8", "replace"), namespace)
    kept = _Kept()
    waiting = bytearray()
    while (line := _line(waiting)) is not None:
        number, verb, name, args, kwargs = plain_data.loads(line, kept.object_of)
        reply = _serve(verb, name, args, kwargs, namespace, kept)
        _write(CHANNEL_FD, json.dumps({"i": number, **reply}).encode() + b"\n")


def _serve(
    verb: str,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    namespace: dict[str, Any],
    kept: _Kept,
) -> dict[str, Any]:
    if verb == "get":
        return _call(lambda owner: getattr(owner, name), args, {}, kept.new_number_of)[0]
    if verb == "set":
        return _call(lambda owner, value: setattr(owner, name, value), args, {}, kept.number_of)[0]
    if name:
        try:
            function = find_entry_point(namespace, name)
        except AttributeError as error:
            return {"error": "NameError", "text": str(error), "kind": ""}
    else:
        function, args = args[0], args[1:]
    # Functions that are expected to return plain data must do so.
    number_of = kept.new_number_of if isinstance(function, type) else kept.number_of
    reply, after = _call(function, args, kwargs, number_of)
    if "value" in reply:
        reply["args"] = after
    return reply


class _Kept:
    """The objects of the program that were sent as numbers."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}  # by `id`; the list keeps the objects alive

    def object_of(self, number: int) -> Any:
        return self._objects[number]

    def number_of(self, one: Any) -> int | None:
        """Return the number of an object; None if it has none."""
        return self._numbers.get(id(one))

    def new_number_of(self, one: Any) -> int:
        """Return the number of an object, after assigning one if it has none."""
        if id(one) not in self._numbers:
            self._numbers[id(one)] = len(self._objects)
            self._objects.append(one)
        return self._numbers[id(one)]


def find_entry_point(namespace: dict[str, Any], entry: str) -> Callable[..., Any]:
    """Return the function of a name; `Class.name` is a method of a new object.

    Raises:
        AttributeError: The program has no such function.
    """
    first, *rest = entry.split(".")
    if first not in namespace:
        raise AttributeError(f"the program defines no {first!r}")
    found = namespace[first]
    for name in rest:
        found = getattr(found() if isinstance(found, type) else found, name)
    function: Callable[..., Any] = found
    return function


def find_solution(namespace: dict[str, Any], entry: str) -> Callable[..., Any]:
    """Return the function of a name, or the method of the program's class `Solution` if it has one.

    A task accepts both forms.

    Raises:
        AttributeError: The program has neither.
    """
    solution = namespace.get("Solution")
    if isinstance(solution, type) and "." not in entry and hasattr(solution, entry):
        entry = f"Solution.{entry}"
    return find_entry_point(namespace, entry)


def _call(
    function: Callable[..., Any],
    args: list[Any] | tuple[Any, ...],
    kwargs: dict[str, Any],
    number_of: Callable[[Any], int | None] | None = None,
) -> tuple[dict[str, Any], Any]:
    """Call a function; return the reply, and the arguments after the call."""
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        kind = type(error).__name__
        return {"error": kind, "text": _text_of(error), "kind": classify(error)}, None
    try:
        encoded = json.loads(plain_data.dumps(value, number_of))
    except plain_data.NotPlainDataError as error:
        return {"bad": str(error)}, None
    try:
        after = json.loads(plain_data.dumps(list(args), number_of))
    except plain_data.NotPlainDataError:
        after = None
    return {"value": encoded}, after


def _text_of(error: Exception) -> str:
    try:
        return str(error)[:_TEXT]
    except Exception:  # its class may be the program's own
        return ""


def _line(waiting: bytearray) -> bytes | None:
    while b"\n" not in waiting:
        part = os.read(CHANNEL_FD, _AT_ONCE)
        if not part:
            return None
        waiting += part
    line, _, rest = bytes(waiting).partition(b"\n")
    waiting[:] = rest
    return line


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


# A program in this process: its names, its code, and the statuses of its exceptions.

FILE_NAME = "program.py"
EXIT_CODES: Mapping[str, int] = {
    "syntax_error": 65,
    "memory_limit": 66,
    "disk_limit": 67,
    "process_limit": 68,
    "forbidden": 69,
}
"""The exit codes after exceptions that have their own status. A program may use them too, because
each of them is a failure.
"""


class SourceError(Exception):
    """Raised if the program is not valid Python; the cause says why."""


def main_module(name: str = "__main__") -> dict[str, Any]:
    """Replace the module `__main__` by an empty one, and return its namespace."""
    module = ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    module.__dict__["__file__"] = FILE_NAME
    sys.modules[name] = sys.modules["__main__"] = module
    return module.__dict__


def names_of(job: Mapping[str, Any], name: str = "__main__") -> dict[str, Any]:
    """Return the namespace of a program, with the names of its job's `prelude`, such as imports."""
    namespace = main_module(name)
    # Compiled by itself, so that the program's lines keep their numbers, and __future__ is first.
    if prelude := job.get("prelude"):
        execute(prelude, namespace, "prelude.py")
    return namespace


def execute(source: str, namespace: dict[str, Any], name: str = FILE_NAME) -> None:
    """Compile a source and run it.

    Raises:
        SourceError: The source cannot be compiled.
        BaseException: The source raised this exception.
    """
    lines = source.splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)
    exec(compile_source(source, name), namespace)


def compile_source(source: str, name: str) -> CodeType:
    """Compile a source; raise `SourceError` if it is invalid."""
    try:
        # Features of this file must not be on in the program.
        return compile(source, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, OverflowError) as error:
        raise SourceError(str(error)) from error


def classify(error: BaseException) -> str:
    """Return the status of an exception; `runtime_error` for most."""
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
