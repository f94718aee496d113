"""The messages that Laurel's errors can have, as its sources write them: for docs/troubleshooting.

A message is told as a template, in which `…` stands for what is only known when it is raised.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from pathlib import Path

from laurel import errors

ROOT = Path(__file__).parents[1]
HOLE = "…"
CLASSES = {
    name for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.LaurelError)
}  # fmt: skip
WRAPPED = {
    "UnusableRow": 1, "LeftOutRow": 1, "MalformedTaskError": 0, "RefusedRequestError": 2,
    "ReplicaFault": 1, "NoScoreError": 0, "SandboxStartError": 0, "UnresolvedError": 0,
}  # fmt: skip
"""Exceptions of single rooms, which people read inside of an error of `CLASSES`, or as a reason;
and which of their arguments is the first that is told."""
_A_WORD = 14
_MOST = 64
"""Of the forms that one message takes; it is cut there."""


@dataclass(frozen=True)
class Message:
    """One call that makes an error."""

    place: str
    """File below src/laurel, and line."""

    error: str
    """Its class."""

    forms: tuple[str, ...]
    """What it can say; more than one where parts of it depend on a condition."""

    @property
    def room(self) -> str:
        return self.place.partition(":")[0]


@dataclass
class Module:
    """The parts of a module that texts are put together from."""

    constants: dict[str, ast.expr] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)


def letters(text: str) -> int:
    """How much is said: letters outside of the holes."""
    return len(re.findall(r"[^\W\d_]", text))


def messages(sources: Mapping[str, str]) -> list[Message]:
    """Of these sources (by their path below src/laurel) all calls that make an error."""
    modules = {path: _module(ast.parse(text)) for path, text in sources.items()}
    found = []
    for path, text in sources.items():
        tree = ast.parse(text)
        for call, function in _calls(tree, None):
            error = _class_of(call, path)
            if error and path != "errors.py":
                forms = _Texts(modules, path, function).of_call(call)
                told = tuple(dict.fromkeys(_tidy(form) for form in forms))
                found.append(Message(f"{path}:{call.lineno}", error, told))
    return found


@cache
def all_messages() -> list[Message]:
    source = ROOT / "src" / "laurel"
    return messages(
        {
            path.relative_to(source).as_posix(): path.read_text(encoding="utf-8")
            for path in sorted(source.rglob("*.py"))
        }
    )


# ------------------------------------------------------------------------------- what makes errors


def _module(tree: ast.Module) -> Module:
    found = Module()
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.constants[node.targets[0].id] = node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("laurel"):
            for alias in node.names:
                path = "/".join((node.module or "").split(".")[1:]) + ".py"
                found.imported[alias.asname or alias.name] = (path, alias.name)
    for inner in ast.walk(tree):
        if isinstance(inner, ast.FunctionDef):
            found.functions.setdefault(inner.name, inner)
    return found


def _calls(node: ast.AST, function: ast.AST | None) -> Iterator[tuple[ast.Call, ast.AST | None]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, function
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _calls(child, child if is_function else function)


def _class_of(call: ast.Call, path: str) -> str | None:
    """The class of the error that a call makes, if it makes one that people read."""
    names = ast.unparse(call.func).split(".")
    known = CLASSES | WRAPPED.keys()
    if path.startswith("config/"):
        known = known | {"ValueError"}  # of a section: pydantic tells it, and the schema wraps it
    if names[-1] in known:
        return names[-1]
    if len(names) > 1 and names[-2] in CLASSES and names[-1] == "of":
        return names[-2]
    return None


# ------------------------------------------------------------------------------- what a call says


class _Texts:
    """What expressions of one function of a module can be as texts."""

    def __init__(self, modules: Mapping[str, Module], path: str, function: ast.AST | None) -> None:
        self.modules = modules
        self.path = path
        self.function = function
        self.depth = 0

    def of_call(self, call: ast.Call) -> list[str]:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "of":
            asked = {word.arg: self.of(word.value) for word in call.keywords}
            return [
                f"{purpose} needs the package '{HOLE}', which is not installed. "
                f"Install it with: pip install 'laurel-rl[{HOLE}]'"
                for purpose in asked.get("purpose", [HOLE])
            ]
        if not call.args:
            return [HOLE]
        if isinstance(call.func, ast.Name) and call.func.id in WRAPPED:
            remedies = [word.value for word in call.keywords if word.arg == "remedy"]
            told = [*call.args[WRAPPED[call.func.id] :][:1], *remedies]
            sentences = [[". "], self.of(told[1])] if told[1:] else []
            return _joined([self.of(told[0]), *sentences]) if told else [HOLE]
        return self.of(call.args[0])

    def of(self, node: ast.expr) -> list[str]:
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return _joined(self.of(part) for part in parts)
            case ast.FormattedValue(value=value, format_spec=None, conversion=-1):
                return self.of(value)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _joined([self.of(left), self.of(right)])
            case ast.IfExp(body=body, orelse=other):
                return [*self.of(body), *self.of(other)]
            case ast.BoolOp(op=ast.Or(), values=values):
                return [form for value in values for form in self.of(value)]
            case ast.Name(id=name):
                return self._named(name)
            case ast.Call(func=ast.Name(id=name)) if name not in ("str", "repr"):
                return self._returned(name)
            case _:
                return [HOLE]

    def _named(self, name: str) -> list[str]:
        """Of a local variable what it is given, of a constant its text."""
        if self.function is not None:
            given = [
                node.value for node in ast.walk(self.function)
                if isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name
            ]  # fmt: skip
            if given:
                return self._deeper(self, given)
        path, home = self._home(name)
        module = self.modules.get(path)
        if module is None or home not in module.constants:
            return [HOLE]
        return self._deeper(_Texts(self.modules, path, None), [module.constants[home]])

    def _returned(self, name: str) -> list[str]:
        """What a function of Laurel's gives back, where it puts a text together."""
        path, home = self._home(name)
        module = self.modules.get(path)
        function = module.functions.get(home) if module else None
        if function is None:
            return [HOLE]
        given = [
            node.value for node in ast.walk(function)
            if isinstance(node, ast.Return) and node.value is not None
        ]  # fmt: skip
        found = self._deeper(_Texts(self.modules, path, function), given)
        if len(found) > 1 and max(map(letters, found)) < _A_WORD:
            return [HOLE]  # one word of several: what stands there differs
        return found or [HOLE]

    def _home(self, name: str) -> tuple[str, str]:
        return self.modules[self.path].imported.get(name, (self.path, name))

    def _deeper(self, texts: _Texts, nodes: list[ast.expr]) -> list[str]:
        if self.depth >= 4:
            return [HOLE]
        texts_depth, texts.depth = texts.depth, self.depth + 1
        found = [form for node in nodes for form in texts.of(node)]
        texts.depth = texts_depth
        return found


def _joined(parts: Iterable[list[str]]) -> list[str]:
    def longer(before: list[str], after: list[str]) -> list[str]:
        return [one + other for one in before for other in after][:_MOST]

    return reduce(longer, parts, [""])


def _tidy(form: str) -> str:
    """On one line, with one hole where several follow one another."""
    return re.sub(rf"{HOLE}+", HOLE, re.sub(r"\s+", " ", form)).strip()
