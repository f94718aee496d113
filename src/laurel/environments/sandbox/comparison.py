"""Whether what a program gave is what was expected. Both are plain data when they come here."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any


def same_value(
    expected: Any, given: Any, *, strict_types: bool = True, float_tolerance: float = 0.0
) -> bool:
    """Whether two values are the same.

    Args:
        expected: The known one.
        given: The other.
        strict_types: True is not 1, 1 is not 1.0, a list is not a tuple. Else numbers are compared
            by value, lists and tuples by items; a bool is never a number.
        float_tolerance: Largest relative or absolute difference of numbers of which one is a float.
            NaN is NaN.
    """
    if strict_types and type(expected) is not type(given):
        return False
    if isinstance(expected, bool) or isinstance(given, bool):
        return expected is given
    if isinstance(expected, complex) and isinstance(given, complex):
        return _same_number(expected.real, given.real, float_tolerance) and _same_number(
            expected.imag, given.imag, float_tolerance
        )
    if isinstance(expected, float) or isinstance(given, float):
        return _same_number(expected, given, float_tolerance)
    options = {"strict_types": strict_types, "float_tolerance": float_tolerance}
    if isinstance(expected, list | tuple | deque):
        return (
            isinstance(given, list | tuple | deque)
            and len(expected) == len(given)
            and all(same_value(a, b, **options) for a, b in zip(expected, given, strict=True))  # type: ignore[arg-type]
        )
    if isinstance(expected, Mapping):
        return (
            isinstance(given, Mapping)
            and _same_keys(expected, given, strict_types=strict_types)
            and all(same_value(one, given[key], **options) for key, one in expected.items())  # type: ignore[arg-type]
        )
    if isinstance(expected, set | frozenset):
        return isinstance(given, set | frozenset) and _same_keys(
            expected, given, strict_types=strict_types
        )
    return bool(expected == given)


def _same_number(expected: Any, given: Any, tolerance: float) -> bool:
    if not isinstance(expected, int | float) or not isinstance(given, int | float):
        return False
    try:
        if math.isnan(expected) or math.isnan(given):
            return math.isnan(expected) and math.isnan(given)
        close = math.isclose(expected, given, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer beyond all floats
        return False
    return expected == given or (tolerance > 0 and close)


def _same_keys(expected: Any, given: Any, *, strict_types: bool) -> bool:
    """Whether two sets, or the keys of two mappings, are the same; for Python 1 and True are."""
    if set(expected) != set(given):
        return False
    if not strict_types:
        return True
    return {_typed(one) for one in expected} == {_typed(one) for one in given}


def _typed(key: Any) -> Any:
    """A key together with its type, and those of all within it."""
    if isinstance(key, tuple):
        return (tuple, *(_typed(one) for one in key))
    if isinstance(key, frozenset):
        return (frozenset, frozenset(_typed(one) for one in key))
    return (type(key), key)


def same_output(expected: str, given: str, *, float_tolerance: float = 0.0) -> bool:
    """Whether two texts are the same but for blanks at ends of lines and blank lines at the end.

    Args:
        expected: The known one.
        given: The other.
        float_tolerance: Where it is not 0, words that are numbers may differ by so much.
    """
    wanted, got = _lines(expected), _lines(given)
    if wanted == got:
        return True
    if not float_tolerance or len(wanted) != len(got):
        return False
    return all(
        _same_words(a.split(), b.split(), float_tolerance) for a, b in zip(wanted, got, strict=True)
    )


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_words(expected: Sequence[str], given: Sequence[str], tolerance: float) -> bool:
    if len(expected) != len(given):
        return False
    for wanted, got in zip(expected, given, strict=True):
        if wanted == got:
            continue
        try:
            if not _same_number(float(wanted), float(got), tolerance):
                return False
        except ValueError:
            return False
    return True
