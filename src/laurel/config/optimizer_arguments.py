"""What the optimizers of torch are called with, told from torch's source.

Importing torch takes seconds; whoever misspells an argument is told before that.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from laurel.config.tree import nearest


class _Call(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def kwargs(self) -> dict[str, Any]: ...


Call = TypeVar("Call", bound=_Call)
_HOME = "torch.optim."
_OTHER_NAMES = {
    "learning_rate": "lr", "epsilon": "eps", "adam_epsilon": "eps", "beta1": "betas",
    "beta2": "betas", "adam_beta1": "betas", "adam_beta2": "betas", "wd": "weight_decay",
}  # fmt: skip
"""Arguments as other systems spell them, and as torch does."""

_NOT_NEGATIVE = frozenset(
    {"lr", "eps", "weight_decay", "momentum", "lr_decay", "initial_accumulator_value"}
)
"""Numbers that every optimizer of torch which has them refuses below 0."""


@cache
def arguments_of(path: str) -> Mapping[str, Any] | None:
    """The arguments of an optimizer of torch, with their defaults.

    Args:
        path: Its import path.

    Returns:
        In their order; None as a default also where it is no constant. None: no class of
        `torch.optim`, or one whose source cannot be read, so that nothing is known of it.
    """
    name = path.removeprefix(_HOME)
    torch = importlib.util.find_spec("torch")
    if name == path or not name.isidentifier() or torch is None or torch.origin is None:
        return None
    for file in (Path(torch.origin).parent / "optim").glob("*.py"):
        if file.stem.replace("_", "") != name.lower():
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return _arguments_of_class(node)
    return None


def _arguments_of_class(node: ast.ClassDef) -> Mapping[str, Any] | None:
    made = [one for one in node.body if isinstance(one, ast.FunctionDef)]
    start = next((one.args for one in made if one.name == "__init__"), None)
    if start is None or start.kwarg is not None:
        return None
    names = [one.arg for one in (*start.posonlyargs, *start.args)][2:]  # self, params
    values = [*([None] * len(names)), *start.defaults][-len(names) :] if names else []
    known = dict(zip(names, values, strict=True))
    known |= {
        one.arg: value for one, value in zip(start.kwonlyargs, start.kw_defaults, strict=True)
    }
    return MappingProxyType({name: _constant(value) for name, value in known.items()})


def _constant(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def unknown_argument(path: str, name: str) -> str | None:
    """What is said of an argument that an optimizer does not take; None: it may take it."""
    known = arguments_of(path)
    if known is None or name in known:
        return None
    meant = _OTHER_NAMES.get(name)
    near = meant if meant in known else nearest(name, known)
    hint = f" Did you mean {near}?" if near else ""
    takes = ", ".join(known)
    return f"{path} refuses these kwargs ({name} is none of its own).{hint} It takes: {takes}"


def check_arguments(path: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that an optimizer of torch cannot be called with.

    Raises:
        ValueError: A name that it does not know, no number where its default is one, or a number
            that no optimizer of torch takes.
    """
    known = arguments_of(path) or {}
    for name, value in kwargs.items():
        problem = unknown_argument(path, name)
        if problem is not None:
            raise ValueError(problem)
        if _is_number(known.get(name)) and not _is_number(value):
            raise ValueError(f"{path} refuses these kwargs: {name} is {value!r}, not a number")
        if name in known and name in _NOT_NEGATIVE and _is_number(value) and not 0 <= value < inf:
            raise ValueError(
                f"{path} refuses these kwargs: {name} is {value!r}, and must be 0 or more"
            )


def with_its_arguments(call: Call) -> Call:
    """The call of an optimizer, where it can be made. Raises ValueError; see `check_arguments`."""
    check_arguments(call.name, call.kwargs)
    return call


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
