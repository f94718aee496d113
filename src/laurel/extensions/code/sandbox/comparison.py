"""Compares a program's values and outputs with the expected ones; both are plain data."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal

Comparison = Literal["laurel", "apps", "taco", "livecodebench", "verl"]
"""The grader whose rules decide whether values or outputs are equal."""


def same_value(
    expected: Any, given: Any, *, strict_types: bool = True, float_tolerance: float = 0.0
) -> bool:
    """Report whether two values are equal.

    Args:
        strict_types: Whether types must be equal: True is not 1, 1 is not 1.0, and a list is not a
            tuple. Otherwise numbers are compared by value, and lists and tuples by their items; a
            bool is never a number.
        float_tolerance: The largest relative or absolute difference of numbers of which one is a
            float. NaN equals NaN.
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
    """Report whether two sets, or the keys of two mappings, are equal, possibly also in type."""
    if set(expected) != set(given):
        return False
    if not strict_types:
        return True
    return {_typed(one) for one in expected} == {_typed(one) for one in given}


def _typed(key: Any) -> Any:
    """Return a key together with its type, and with the types of all items in it."""
    if isinstance(key, tuple):
        return (tuple, *(_typed(one) for one in key))
    if isinstance(key, frozenset):
        return (frozenset, frozenset(_typed(one) for one in key))
    return (type(key), key)


def same_output(expected: str, given: str, *, float_tolerance: float = 0.0) -> bool:
    """Report whether two texts are equal, ignoring blanks at ends of lines and final blank lines.

    Args:
        float_tolerance: The largest difference of words that are numbers; with 0, texts are equal.
    """
    wanted, got = _lines(expected), _lines(given)
    if wanted == got:
        return True
    if not float_tolerance or len(wanted) != len(got):
        return False
    for wanted_line, got_line in zip(wanted, got, strict=True):
        wanted_words, got_words = wanted_line.split(), got_line.split()
        if len(wanted_words) != len(got_words):
            return False
        for a, b in zip(wanted_words, got_words, strict=True):
            if a == b:
                continue
            try:
                if not _same_number(float(a), float(b), float_tolerance):
                    return False
            except ValueError:
                return False
    return True


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


#
# Each follows its own grader, even where that is odd, so that verdicts here and published results
# mean the same. `tests/extensions/code/test_code_graders.py` holds verdicts of those graders.


def same_output_as(comparison: Comparison, expected: str, given: str) -> bool:
    """Report whether the grader of a benchmark accepts a text.

    Args:
        comparison: The benchmark; for `laurel` use `same_output`.
    """
    return _OUTPUTS[comparison](expected, given)


def same_value_as(comparison: Comparison, expected: Any, given: Any) -> bool:
    """Report whether the grader of a benchmark accepts a value.

    Args:
        comparison: The benchmark; for `laurel` use `same_value`.
        expected: The expected value as the row holds it; most data sets wrap it in a list.
    """
    return _VALUES[comparison](expected, given)


def _apps_output(expected: str, given: str) -> bool:
    """Report whether lines are equal, numbers close, or the words the same in any order."""
    wanted, got = _kept_lines(expected.split("\n")), given.splitlines()
    if _same_lines(expected, wanted, got):
        return True
    got = [line for line in got if line]
    if _all_close(wanted, got):
        return True
    wanted_sets = {frozenset(line.split()) for line in wanted}
    got_sets = {frozenset(words) for line in got if (words := line.split())}
    return wanted_sets == got_sets or _same_when_rounded(wanted_sets, got_sets)


def _verl_output(expected: str, given: str) -> bool:
    """Report whether lines are equal, or numbers close if not all of them are whole."""
    wanted, got = _kept_lines(expected.split("\n")), given.splitlines()
    if _same_lines(expected, wanted, got):
        return True
    got = [line for line in got if line]
    return not all(line.isdigit() for line in (*wanted, *got)) and _all_close(wanted, got)


def _taco_output(expected: str, given: str) -> bool:
    """Report whether texts are equal without the blanks around them.

    The other rules of this grader are written for lists of lines but get a text, so they compare
    single characters instead of lines: they would accept "21" for "1 2".
    """
    given = given.replace("\r\n", "\n").replace("\r", "\n")
    if expected.strip() == given.strip():
        return True
    wanted = _kept_lines(expected.split("\n"))
    if _all_close(wanted, given):
        return True
    wanted_sets = {frozenset(line.split()) for line in wanted}
    got_sets = {frozenset(word) for word in given.split()}
    return wanted_sets == got_sets or _same_when_rounded(wanted_sets, got_sets)


def _livecodebench_output(expected: str, given: str) -> bool:
    """Report whether lines are equal, or have equal numbers."""
    wanted, got = expected.strip().split("\n"), given.strip().split("\n")
    if len(wanted) != len(got):
        return False
    pairs = ((a.strip(), b.strip()) for a, b in zip(wanted, got, strict=True))
    return all(a == b or _same_decimals(a.split(), b.split()) for a, b in pairs)


def _same_decimals(wanted: Sequence[str], got: Sequence[str]) -> bool:
    try:
        return [Decimal(one) for one in wanted] == [Decimal(one) for one in got]
    except ArithmeticError:  # a word that is no number, or cannot be compared
        return False


def _kept_lines(lines: Sequence[str]) -> list[str]:
    return [line.strip() for line in lines if line]


def _same_lines(expected: str, wanted: list[str], got: list[str]) -> bool:
    """Report whether all lines are equal, ignoring blanks at their ends or empty lines."""
    whole = ("\n".join(got).strip(), "\n".join(line.strip() for line in got).strip())
    return expected.strip() in whole or wanted in (got, [line for line in got if line])


def _all_close(wanted: Sequence[str], got: Sequence[str]) -> bool:
    """Report whether all words are numbers that are close by the rule of numpy's `allclose`."""
    if len(wanted) != len(got):
        return False
    try:
        pairs = [(float(a), float(b)) for a, b in zip(wanted, got, strict=True)]
    except ValueError:
        return False
    return all(
        abs(b - a) <= 1e-8 + 1e-5 * abs(a) if math.isfinite(a) and math.isfinite(b) else a == b
        for a, b in pairs
    )


def _same_when_rounded(wanted: Collection[frozenset[str]], got: Collection[frozenset[str]]) -> bool:
    try:
        return {frozenset(round(float(word), 3) for word in words) for words in wanted} == {
            frozenset(round(float(word), 3) for word in words) for words in got
        }
    except ValueError:
        return False


def _apps_value(expected: Any, given: Any) -> bool:
    """Report whether a value equals that of the row, or its first item, with tuples as lists."""
    given = list(given) if isinstance(given, tuple) else given
    if given == expected:
        return True
    if not isinstance(expected, list) or not expected:
        return False
    return bool(given == expected[0]) or _rows_as_lists(given) == expected[0]


def _verl_value(expected: Any, given: Any) -> bool:
    """Report whether APPS accepts a value, which must be writable as JSON."""
    try:
        json.dumps(given)
    except (TypeError, ValueError):
        return False
    return _apps_value(expected, given)


def _rows_as_lists(value: Any) -> Any:
    """Convert the items of a value into lists if the first of them is a tuple."""
    if isinstance(value, list | deque) and value and isinstance(value[0], tuple):
        try:
            return [list(one) for one in value]
        except TypeError:  # other items are not sequences
            return value
    return value


_OUTPUTS: Mapping[str, Callable[[str, str], bool]] = {
    "apps": _apps_output,
    "taco": _taco_output,
    "livecodebench": _livecodebench_output,
    "verl": _verl_output,
}
_VALUES: Mapping[str, Callable[[Any, Any], bool]] = {
    "apps": _apps_value,
    "taco": _apps_value,
    "livecodebench": lambda expected, given: bool(
        (list(given) if isinstance(given, tuple) else given) == expected
    ),
    "verl": _verl_value,
}
