"""Options that several commands share: a dataclass of them is one parameter of a command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

_BY_NAME = inspect.Parameter.KEYWORD_ONLY


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of its dataclasses as options, in their place and order.

    A parameter whose annotation is a dataclass stands for one option per field, each as the field
    is annotated and with the field's default. The command is called with the dataclass made.

    Args:
        command: What typer is to register.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    hints = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if not is_dataclass(kind):
            parameters.append(parameter.replace(kind=_BY_NAME, annotation=kind))
            continue
        groups[parameter.name] = kind
        types = get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(
                one.name, _BY_NAME, default=one.default, annotation=types[one.name]
            )
            for one in fields(kind)
        ]  # fmt: skip

    @functools.wraps(command)
    def grouped(**said: Any) -> None:
        made = {
            name: kind(**{one.name: said.pop(one.name) for one in fields(kind)})
            for name, kind in groups.items()
        }
        command(**made, **said)

    grouped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    grouped.__annotations__ = {one.name: one.annotation for one in parameters}
    return grouped
