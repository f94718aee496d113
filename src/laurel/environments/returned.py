"""Whether what an environment returned is a verdict; who returned what, where it is none.

An environment may be anybody's: what it does wrong is told with its own class, file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import torch

from laurel.errors import EnvironmentFailedError
from laurel.observe.hub import line_of
from laurel.types import EnvironmentReturn

FIELDS = ("observations", "metadata", "next_stop_strings")
MAY_MISS = ("answers", "failures")


def source_of(called: Callable[..., Any]) -> tuple[str, int] | None:
    """File and first line of a function; None where it is not written in Python."""
    code = getattr(getattr(called, "__func__", called), "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def name_of(called: Callable[..., Any]) -> str:
    """A method as its author knows it: `module.Class.step (FILE:LINE)`."""
    owner = getattr(called, "__self__", None)
    where = source_of(called)
    kind = type(owner)
    name = getattr(called, "__name__", "step")
    said = f"{kind.__module__}.{kind.__qualname__}.{name}" if owner is not None else name
    return said if where is None else f"{said} ({line_of(*where)})"


def unfit(called: Callable[..., Any], returned: str, expected: str) -> EnvironmentFailedError:
    """The error for a function that returned something that cannot be used."""
    return EnvironmentFailedError(f"{name_of(called)} returned {returned}; expected is {expected}")


def checked_return(step: Callable[..., Any], returned: Any, size: int) -> EnvironmentReturn:
    """What `step` returned, if it is a verdict on `size` conversations.

    Whether each reward is finite is not looked at: one that is not is the failure of its sample.

    Raises:
        EnvironmentFailedError: It is no verdict; says whose, what it is, and what is expected.
    """
    of_each = f"one for each of {size} conversations"
    if not isinstance(returned, EnvironmentReturn):
        raise unfit(step, kind_of(returned), f"an EnvironmentReturn with a reward, {of_each}")
    if isinstance(returned.rewards, Mapping) and not returned.rewards:
        raise unfit(step, "rewards without any component", f"a tensor of rewards, {of_each}")
    for name in FIELDS + MAY_MISS:
        given: Any = getattr(returned, name)
        if given is None and name in MAY_MISS:
            continue
        if not isinstance(given, Sized) or len(given) != size:
            count = (
                f"{len(given)} {name}"
                if isinstance(given, Sized)
                else (f"{kind_of(given)} as {name}")
            )
            raise unfit(step, count, f"a list, {of_each}")
    for name, values in columns_of(returned).items():
        column_of(step, values, size, name)
    return returned


def columns_of(returned: EnvironmentReturn) -> dict[str, Any]:
    """The numbers of a verdict by what to call them: every component of the reward, and the end."""
    rewards = returned.rewards
    if isinstance(rewards, Mapping):
        named = {f"rewards[{name!r}]": values for name, values in rewards.items()}
    else:
        named = {"rewards": rewards}
    return {**named, "terminateds": returned.terminateds}


def column_of(step: Callable[..., Any], values: Any, size: int, name: str) -> list[Any]:
    """A number for each conversation, as plain numbers.

    Raises:
        EnvironmentFailedError: It is something else.
    """
    expected = f"a tensor of shape [{size}], one for each of {size} conversations"
    try:
        column = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise unfit(step, f"{kind_of(values)} as {name}", expected) from error
    if column.ndim == 1 and len(column) != size:
        raise unfit(step, f"{len(column)} {name}", expected)
    if column.ndim != 1:
        raise unfit(step, f"{name} of shape {list(column.shape)}", expected)
    plain: list[Any] = column.tolist()
    return plain


def kind_of(value: Any) -> str:
    """What a value is, in few words."""
    if value is None:
        return "None"
    kind = type(value)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else (f"{kind.__module__}.{kind.__qualname__}")
    )
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {name} of {len(value)}"
    return f"a {name}"
