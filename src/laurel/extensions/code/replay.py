"""Runs, in the sandbox, the earlier blocks of a conversation silently, and then the new one.

The source of this module is sent to the sandbox as a program, so it imports only the standard
library. A program that forges the reply deceives only its own conversation.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import os
import pprint
import random
import sys
import traceback
from types import ModuleType
from typing import Any

_STDOUT = 1


class _Gate(io.RawIOBase):
    """A stream that writes to the standard output, or discards text unless `is_open`."""

    is_open = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return os.write(_STDOUT, data) if self.is_open else len(data)


def main(request: dict[str, Any]) -> None:
    """Run all blocks, write the result of the new one, and end this process.

    Args:
        request: The `blocks` that ran before, the new `code`, the `mark` that separates its output
            from other output, and the maximum length of the text of a value, `most`.
    """
    gate = _Gate()
    stream = io.TextIOWrapper(
        io.BufferedWriter(gate), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
    for name in ("stdout", "__stdout__"):  # some programs restore the latter
        setattr(sys, name, stream)
    random.seed(0)
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    for block in request["blocks"]:
        _run(block, module.__dict__, 0)
        _flush()
    gate.is_open = True
    os.write(_STDOUT, request["mark"].encode())
    reply = _run(request["code"], module.__dict__, request["most"])
    _flush()
    os.write(_STDOUT, (request["mark"] + json.dumps(reply)).encode())
    os._exit(0)  # a thread of the program may never end


def _run(code: str, names: dict[str, Any], most: int) -> dict[str, Any]:
    """Run a block; return a reply whose `kind` is error, value (of the last statement) or done."""
    try:
        tree = ast.parse(code, "<code>")
        last = tree.body[-1] if tree.body else None
        if not isinstance(last, ast.Expr):
            exec(_compiled(tree), names)
            return {"kind": "done", "text": ""}
        exec(_compiled(ast.Module(tree.body[:-1], tree.type_ignores)), names)
        value = eval(_compiled(ast.Expression(last.value)), names)
        text = "" if value is None or not most else pprint.pformat(value)
        return {"kind": "value", "text": text[: most + 1]}
    except BaseException as error:
        # Only the last line of the traceback.
        try:
            text = traceback.format_exception_only(type(error), error)[-1].strip()
        except BaseException:  # its class may be the program's own
            text = "an exception that cannot be printed"
        return {"kind": "error", "text": text[: most + 1]}


def _compiled(tree: ast.Module | ast.Expression) -> Any:
    kind = "exec" if isinstance(tree, ast.Module) else "eval"
    return compile(tree, "<code>", kind, dont_inherit=True)


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BaseException:  # the program may have closed or replaced it
        return
