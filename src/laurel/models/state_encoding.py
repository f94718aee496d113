"""Nested Python values as JSON and tensors, so that they come back equal in value *and* in type.

JSON alone would turn a tuple into a list, an integer key into text, and has no NaN; a resumed
run would then not be the run that was interrupted. What JSON cannot say is an object with one
key that begins with `$`. Tensors go beside it, by name. Nothing here can run code on loading.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

_NUMBER_KINDS = "biufc"


class UnencodableError(TypeError):
    """A value of a kind that cannot be saved; the message says where it is."""


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Json:
    """The value as JSON. Tensors in it are added to `tensors`, under names that begin with `name`.

    Floats come back bit by bit: `json` writes the shortest text that reads as the same number.

    Raises:
        UnencodableError: something in it is not None, a number, text, list, tuple, dict,
            `Counter`, array or dense tensor, whole or spread over ranks (other subclasses of these
            are refused too).
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value  # type: ignore[no-any-return]
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is list:
        return _encode_all(value, name, tensors)
    if kind is tuple:
        return {"$tuple": _encode_all(value, name, tensors)}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item, f"{name}/{key}", tensors) for key, item in value.items()}
        return {"$dict": _encode_items(value, name, tensors)}
    if kind is Counter:
        return {"$counter": _encode_items(value, name, tensors)}
    if kind in (torch.Tensor, torch.nn.Parameter, DTensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise UnencodableError(f"{name} is a tensor that is not dense")
        tensors[name] = value.detach()
        return {"$tensor": name}
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in _NUMBER_KINDS:
        if isinstance(value, np.generic):
            return {"$number": [value.dtype.str, value.tobytes().hex()]}
        return {"$array": [value.dtype.str, list(value.shape), value.tobytes().hex()]}
    raise UnencodableError(f"{name} is a {kind.__module__}.{kind.__qualname__}")


def decode(value: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that `encode` was given.

    Raises:
        KeyError, TypeError, ValueError: this is nothing that `encode` wrote.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and next(iter(value)).startswith("$"):
        ((tag, content),) = value.items()
        return _DECODERS[tag](content, tensors)
    return {key: decode(item, tensors) for key, item in value.items()}


def _encode_all(values: Iterable[Any], name: str, tensors: dict[str, torch.Tensor]) -> list[Json]:
    return [encode(item, f"{name}/{index}", tensors) for index, item in enumerate(values)]


def _encode_items(
    values: Mapping[Any, Any], name: str, tensors: dict[str, torch.Tensor]
) -> list[Json]:
    return [
        _encode_all(pair, f"{name}/{index}", tensors) for index, pair in enumerate(values.items())
    ]


def _decode_items(content: Any, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {decode(key, tensors): decode(item, tensors) for key, item in content}


def _decode_number(content: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    dtype, data = content
    return np.frombuffer(bytes.fromhex(data), dtype=_number_type(dtype))[0]


def _decode_array(content: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    dtype, shape, data = content
    # The copy is writable and owns its memory.
    return np.frombuffer(bytes.fromhex(data), dtype=_number_type(dtype)).reshape(shape).copy()


def _number_type(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _NUMBER_KINDS:
        raise ValueError(f"'{name}' is not a type of numbers")
    return dtype


_DECODERS: dict[str, Callable[[Any, Mapping[str, torch.Tensor]], Any]] = {
    "$float": lambda content, tensors: float(content),
    "$tuple": lambda content, tensors: tuple(decode(item, tensors) for item in content),
    "$dict": _decode_items,
    "$counter": lambda content, tensors: Counter(_decode_items(content, tensors)),
    "$tensor": lambda content, tensors: tensors[content],
    "$number": _decode_number,
    "$array": _decode_array,
}
