"""The values of a JSON text that are expected to be of one type, or what they must be and are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from laurel.data.cells import kind_of
from laurel.errors import ProtocolError

MISSING: Any = object()
"""What stands for an entry that is not there, so that a message can say that."""


def expect_object(value: Any, what: str) -> Mapping[str, Any]:
    """The value, if it is an object.

    Raises:
        ProtocolError: It is not; the message calls it `what`.
    """
    if not isinstance(value, dict):
        raise _other(value, what, "an object")
    return value


def expect_list(value: Any, what: str, *, must_be: str = "a list") -> Sequence[Any]:
    """The value, if it is a list; see `expect_object`. `must_be` says what else is taken, too."""
    if not isinstance(value, list):
        raise _other(value, what, must_be)
    return value


def expect_text(value: Any, what: str) -> str:
    """The value, if it is a text; see `expect_object`."""
    if not isinstance(value, str):
        raise _other(value, what, "a text")
    return value


def expect_number(value: Any, what: str) -> float:
    """The value, if it is a finite number; see `expect_object`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _other(value, what, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ProtocolError(f"{what} is not finite", kind="nan")
    return number


def _other(value: Any, what: str, must_be: str) -> ProtocolError:
    if value is MISSING:
        return ProtocolError(f"{what} is missing; it must be {must_be}")
    return ProtocolError(f"{what} must be {must_be}, and is {kind_of(value)}")
