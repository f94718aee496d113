"""Runs tests of a data set against a program that is in another sandbox.

The test code calls proxy functions. Each sends its arguments as plain data, and gets back a value
or an exception, and the arguments as the call changed them. The program never sees the tests.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import select
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from laurel.extensions.code.sandbox.inside import plain_data
from laurel.extensions.code.sandbox.inside.calls import execute, main_module
from laurel.extensions.code.sandbox.inside.rights import CHANNEL_FD, RESULT_FD

_AT_ONCE = 1 << 16
_TESTS_NAME = "tests.py"


class CandidateGoneError(BaseException):
    """Raised if the program has ended; tests that catch `Exception` do not catch it."""


class BadReplyError(BaseException):
    """Raised if the program sent no valid reply to a request."""


class CandidateRaisedError(Exception):
    """Raised for an exception of the program whose class is not one of Python's."""


def run_tests(job: dict[str, Any], parts: list[bytes]) -> None:
    """Run the tests, and write one line with their result.

    Args:
        job: The job, with `entry`, and `reply_kb`, the maximum size of a reply.
        parts: The test code, and the setup that runs before it.
    """
    test_code, setup = (part.decode("utf-8", "replace") for part in parts)
    channel = _Channel(int(job["reply_kb"]) << 10)
    report: dict[str, Any] = {"passed": False}
    try:
        namespace = main_module()
        execute(setup, namespace, "setup.py")
        undefined = _undefined(test_code, namespace)
        for name in undefined & _modules(test_code):
            namespace[name] = importlib.import_module(name)
        for name in {job["entry"], *(undefined - namespace.keys())}:
            namespace[name] = _stand_in(channel, name)
        execute(test_code, namespace, _TESTS_NAME)
        report = {"passed": True}
    except CandidateGoneError:
        report["why"] = "gone"
    except BadReplyError as error:
        report |= {"why": "bad", "detail": str(error)}
    except BaseException as error:
        kind = getattr(error, "_candidate_kind", None)
        report |= {"why": kind or "wrong", "detail": _where(error)}
    data = json.dumps(report).encode() + b"\n"
    while data:
        data = data[os.write(RESULT_FD, data) :]
    sys.exit(0 if report["passed"] else 1)


class _Channel:
    """Connects the tests with the program."""

    def __init__(self, longest_reply: int) -> None:
        self._longest_reply = longest_reply
        self._count = 0
        self._remote: dict[int, _Remote] = {}

    def ask(self, verb: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Send a request to the program (`calls.serve_program`), and apply changes to arguments."""
        self._count += 1
        try:
            request = plain_data.dumps((self._count, verb, name, args, kwargs), _number_of) + b"\n"
        except plain_data.NotPlainDataError as error:
            raise BadReplyError(f"the tests pass a value that cannot be sent: {error}") from None
        if select.select([CHANNEL_FD], [], [], 0)[0] and self._read():
            raise BadReplyError("it answered before it was asked")
        try:
            while request:
                request = request[os.write(CHANNEL_FD, request) :]
        except OSError:
            raise CandidateGoneError from None
        return self._value_of(self._reply(), args)

    def _value_of(self, reply: dict[str, Any], args: tuple[Any, ...]) -> Any:
        if "bad" in reply:
            raise BadReplyError(str(reply["bad"])[:300])
        if "error" in reply:
            raise _exception(reply)
        try:
            value = self._loads(reply["value"])
            after = reply.get("args")
            changed = None if after is None else self._loads(after)
        except (plain_data.NotPlainDataError, KeyError, RecursionError) as error:
            raise BadReplyError(f"no plain data: {error}") from None
        if type(changed) is list and len(changed) == len(args):
            for before, now in zip(args, changed, strict=True):
                _replay(before, now)
        return value

    def _loads(self, value: Any) -> Any:
        # A number always gives the same proxy, so that identity is preserved here.
        return plain_data.loads(
            json.dumps(value).encode(),
            lambda number: self._remote.setdefault(number, _Remote(self, number)),
        )

    def _reply(self) -> dict[str, Any]:
        received = bytearray()
        while not received.endswith(b"\n"):
            part = self._read()
            if not part:
                raise CandidateGoneError
            received += part
            if len(received) > self._longest_reply:
                raise BadReplyError("its reply is too long")
        try:
            reply = json.loads(received)
        except (ValueError, RecursionError):
            raise BadReplyError("its reply is no JSON") from None
        if type(reply) is not dict or reply.get("i") != self._count:
            raise BadReplyError("its reply is to another request")
        return reply

    def _read(self) -> bytes:
        try:
            return os.read(CHANNEL_FD, _AT_ONCE)
        except OSError:
            return b""


class _Remote:
    """A proxy in the tests for an object of the program, to which attributes and calls are sent.

    It equals only itself and has no truth value, so a program cannot fake a comparison.
    """

    __slots__ = ("_channel", "_number")

    def __init__(self, channel: _Channel, number: int) -> None:
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself looks for these
            raise AttributeError(name)
        return self._channel.ask("get", name, (self,), {})

    def __setattr__(self, name: str, value: Any) -> None:
        self._channel.ask("set", name, (self, value), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._channel.ask("call", "", (self, *args), kwargs)

    def __bool__(self) -> bool:
        raise BadReplyError("the tests want data, and got an object of the program")


def _number_of(value: Any) -> int | None:
    number: int | None = (
        object.__getattribute__(value, "_number") if type(value) is _Remote else None
    )
    return number


def _stand_in(channel: _Channel, name: str) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        return channel.ask("call", name, args, kwargs)

    ask.__name__ = ask.__qualname__ = name
    return ask


def _exception(reply: dict[str, Any]) -> Exception:
    """Return an exception of the Python class that the reply names, if there is one."""
    found = getattr(builtins, str(reply["error"]), None)
    kind: Any = CandidateRaisedError
    if isinstance(found, type) and issubclass(found, Exception):
        kind = found
    try:
        error: Exception = kind(str(reply.get("text", "")))
    except Exception:  # some need more arguments, like UnicodeDecodeError
        error = CandidateRaisedError(f"{reply['error']}: {reply.get('text', '')}")
    error._candidate_kind = str(reply.get("kind") or "runtime_error")  # type: ignore[attr-defined]
    return error


def _replay(before: Any, now: Any) -> None:
    """Change an argument in place as the program changed its copy."""
    if type(before) is not type(now):
        return
    if type(before) is list and len(before) == len(now):
        for index, (one, other) in enumerate(zip(before, now, strict=True)):
            if type(one) in (list, dict, set, deque) and type(one) is type(other):
                _replay(one, other)
            else:
                before[index] = other
    elif type(before) is list:
        before[:] = now
    elif isinstance(before, dict | set):
        before.clear()
        before.update(now)
    elif type(before) is deque:
        before.clear()
        before.extend(now)


def _undefined(source: str, namespace: dict[str, Any]) -> set[str]:
    """Return the names that a source uses and does not define."""
    used: set[str] = set()
    known = {*namespace, *vars(builtins)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else known).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, ast.alias):
            known.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            known.add(node.name)
    return used - known


def _modules(source: str) -> set[str]:
    """Return the modules that a source uses, because some tests rely on the program's imports."""
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    owners = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    counts = Counter(name.id for name in names)
    dotted = Counter(owner.id for owner in owners if isinstance(owner, ast.Name))
    # A name that is used bare is a function of the program that is named like a module.
    return {name for name in dotted if dotted[name] == counts[name]} & sys.stdlib_module_names


def _where(error: BaseException) -> str:
    """Describe an exception by its class and the line of the tests, without expected values."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == _TESTS_NAME
    ]
    return type(error).__name__ + (f" in line {lines[-1]} of the tests" if lines else "")
