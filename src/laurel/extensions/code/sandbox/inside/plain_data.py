"""Serializes plain data between processes that do not trust each other.

A value is plain data if its type is exactly one of Python's scalars, sequences, sets and mappings
that `_encode` lists; subclasses do not count. Any other object is refused, or sent as a number that
both sides have agreed on for it. No method of a value is called, such as `__repr__`, `__eq__` or
`__reduce__`, and decoding creates values of the listed types only.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_DEPTH = 100
_MAX_NODES = 1_000_000
_SAFE_INT = 1 << 53
_LONGEST_DECIMAL = 10_000
_MOST_OF_ONE_HASH = 64


class NotPlainDataError(ValueError):
    """Raised for a value or a text that is not plain data."""


def dumps(value: object, number_of: Callable[[Any], int | None] | None = None) -> bytes:
    """Encode a value as one line.

    Args:
        number_of: Returns the number that is sent instead of an object; None if it has none.

    Raises:
        NotPlainDataError: The value holds another type, or is too deep or too large.
    """
    encoded = _encode(value, _Writing(number_of), 0)
    return json.dumps(encoded, separators=(",", ":")).encode()


def loads(text: bytes, object_of: Callable[[int], Any] | None = None) -> Any:
    """Decode a value from one line.

    Args:
        object_of: Returns the object of a number; without it such numbers are refused.

    Raises:
        NotPlainDataError: The text is not plain data.
    """
    try:
        return _decode(json.loads(text), object_of, 0)
    except NotPlainDataError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, ArithmeticError) as error:
        raise NotPlainDataError(f"not plain data: {type(error).__name__}") from error


class _Writing:
    def __init__(self, number_of: Callable[[Any], int | None] | None) -> None:
        self.number_of = number_of
        self.nodes = 0  # values so far


def _encode(value: Any, writing: _Writing, depth: int) -> Any:
    kind = type(value)
    writing.nodes += 1
    if depth > MAX_DEPTH:
        raise NotPlainDataError(f"deeper than {MAX_DEPTH}, or in itself")
    if writing.nodes > _MAX_NODES:
        raise NotPlainDataError(f"more than {_MAX_NODES} values")
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_SAFE_INT < value < _SAFE_INT else ["i", format(value, "x")]
    if kind in _SCALARS:
        return [_SCALARS[kind][0], *_SCALARS[kind][1](value)]
    if kind in _SEQUENCES:
        # A copy, whose length is fixed during the loop.
        return [_SEQUENCES[kind], *[_encode(one, writing, depth + 1) for one in list(value)]]
    if kind in _MAPPINGS:
        pairs = list(dict.items(value))
        return [
            _MAPPINGS[kind],
            *[
                [_encode(key, writing, depth + 1), _encode(one, writing, depth + 1)]
                for key, one in pairs
            ],
        ]
    if kind is type:
        for known, python_type in _TYPES.items():
            if value is python_type:
                return ["y", known]
    number = writing.number_of(value) if writing.number_of else None
    if number is not None:
        return ["h", number]
    name = type.__dict__["__name__"].__get__(kind)
    raise NotPlainDataError(f"a value of type {str(name)[:80]!r} is no plain data")


_SCALARS: Mapping[type, tuple[str, Callable[[Any], Sequence[str]]]] = {
    float: ("f", lambda one: (one.hex(),)),
    complex: ("c", lambda one: (one.real.hex(), one.imag.hex())),
    bytes: ("b", lambda one: (one.hex(),)),
    bytearray: ("B", lambda one: (one.hex(),)),
    Decimal: ("D", lambda one: (str(one),)),
    Fraction: ("q", lambda one: (format(one.numerator, "x"), format(one.denominator, "x"))),
    range: ("r", lambda one: [format(part, "x") for part in (one.start, one.stop, one.step)]),
}
# Python's own classes, which tests pass as arguments.
_TYPES: Mapping[str, type] = {
    one.__name__: one
    for one in (
        int,
        float,
        complex,
        bool,
        str,
        bytes,
        bytearray,
        list,
        tuple,
        set,
        frozenset,
        dict,
        range,
        type(None),
    )
}
_SEQUENCES: Mapping[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z", deque: "Q"}
_MAPPINGS: Mapping[type, str] = {dict: "d", OrderedDict: "o", defaultdict: "e", Counter: "k"}


def _decode(read: Any, object_of: Callable[[int], Any] | None, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NotPlainDataError(f"deeper than {MAX_DEPTH}")
    if read is None or isinstance(read, bool | str | int):
        return read
    if not isinstance(read, list) or not read or not isinstance(read[0], str):
        raise NotPlainDataError("no such form")
    tag, rest = read[0], read[1:]
    if tag == "h" and object_of is not None and [type(one) for one in rest] == [int]:
        return object_of(rest[0])
    if tag in _READ_SCALARS:
        return _READ_SCALARS[tag](*rest)
    if tag in _READ_SEQUENCES:
        return _READ_SEQUENCES[tag]([_decode(one, object_of, depth + 1) for one in rest])
    pairs = [
        (_decode(key, object_of, depth + 1), _decode(one, object_of, depth + 1))
        for key, one in rest
    ]
    _check_hashes([key for key, _ in pairs])
    return _READ_MAPPINGS[tag](pairs)


def _integer(text: str) -> int:
    return int(text, 16)


def _decimal(text: str) -> Decimal:
    if len(text) > _LONGEST_DECIMAL:
        raise NotPlainDataError("a decimal of too many digits")
    value = Decimal(text)
    if value.is_snan():
        raise NotPlainDataError("a decimal that raises where it is compared")
    return value


def _check_hashes(keys: list[Any]) -> list[Any]:
    # A table of too many values with one hash would take forever.
    if keys and max(Counter(map(hash, keys)).values()) > _MOST_OF_ONE_HASH:
        raise NotPlainDataError("too many values of one hash")
    return keys


_READ_SCALARS: Mapping[str, Callable[..., Any]] = {
    "i": _integer,
    "f": float.fromhex,
    "c": lambda real, imaginary: complex(float.fromhex(real), float.fromhex(imaginary)),
    "b": bytes.fromhex,
    "B": bytearray.fromhex,
    "D": _decimal,
    "q": lambda above, below: Fraction(_integer(above), _integer(below)),
    "r": lambda start, stop, step: range(_integer(start), _integer(stop), _integer(step)),
    "y": _TYPES.__getitem__,
}
_READ_SEQUENCES: Mapping[str, Callable[[list[Any]], Any]] = {
    "l": list,
    "t": tuple,
    "s": lambda items: set(_check_hashes(items)),
    "z": lambda items: frozenset(_check_hashes(items)),
    "Q": deque,
}
_READ_MAPPINGS: Mapping[str, Callable[[Iterable[tuple[Any, Any]]], Any]] = {
    "d": dict,
    "o": OrderedDict,
    "e": lambda pairs: defaultdict(None, pairs),
    "k": lambda pairs: Counter(dict(pairs)),
}
