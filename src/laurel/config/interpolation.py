"""Resolves `${}` references in a tree with OmegaConf: other keys, arithmetic, the environment."""

from __future__ import annotations

import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from laurel.config.schema_info import with_defaults
from laurel.config.yaml_tree import (
    MISSING,
    KeyPath,
    Section,
    YamlNode,
    dotted,
    escaped,
    find_node,
    nearest,
)


def _number(value: Any) -> int | float:
    # The environment gives numbers as text.
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value


def _divide(a: Any, b: Any) -> int | float:
    a, b = _number(a), _number(b)
    quotient = a / b
    # Sizes stay whole numbers.
    return a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else quotient


def _over_all(combine: Callable[[Any, Any], Any], *values: Any) -> Any:
    return functools.reduce(combine, map(_number, values))


_RESOLVERS: dict[str, Callable[..., Any]] = {
    "mul": functools.partial(_over_all, operator.mul),
    "add": functools.partial(_over_all, operator.add),
    "sub": lambda a, b: _number(a) - _number(b),
    "div": _divide,
    "max": functools.partial(_over_all, max),
    "min": functools.partial(_over_all, min),
}


def register_resolvers() -> None:
    """Register `${mul:a,b}`, `add`, `sub`, `div`, `max` and `min` with OmegaConf; idempotent."""
    # OmegaConf 2.4 has a new function and warns about the old one; 2.3 has an older function under
    # the new one's name, which cannot replace.
    register: Callable[..., None] = OmegaConf.register_resolver
    if "replace" not in inspect.signature(register).parameters:
        register = OmegaConf.register_new_resolver
    for name, resolver in _RESOLVERS.items():
        register(name, resolver, replace=True)


MOST_VALUES = 10_000
"""The largest number of values that all references of a configuration may stand for."""


class UnresolvedError(Exception):
    """Raised if a `${}` reference cannot be resolved; the message says why."""


class Interpolations:
    """Resolves `${}` references against the values of one run."""

    def __init__(self, tree: YamlNode, schema: type[Section] | None = None) -> None:
        self.tree = tree
        self.schema = schema
        self._sizes: dict[KeyPath, int] = {}
        self._num_values = 0

    @functools.cached_property
    def _whole(self) -> tuple[YamlNode, Any]:
        # Cached and lazy: many runs have no references and need neither of the two.
        register_resolvers()
        tree = self.tree
        if self.schema is not None:
            tree = with_defaults(self.schema, tree, everything=True)
        return tree, OmegaConf.create(_for_omegaconf(tree))

    def _size(self, path: KeyPath, node: YamlNode, inside_of: set[KeyPath]) -> int:
        """Count the values of a node at `path` with all that its references repeat."""
        if isinstance(node.value, dict | list):
            items = node.value.items() if isinstance(node.value, dict) else enumerate(node.value)
            return 1 + sum(self._size((*path, key), child, inside_of) for key, child in items)
        if not node.reference:
            return 1
        size = 1
        for dots, key in re.findall(r"\$\{(\.*)([\w.]+)\}", node.value):
            target = (*(path[: -len(dots)] if dots else ()), *key.split("."))
            if target not in self._sizes and target not in inside_of:
                found = find_node(self._whole[0], target)
                inside = 1 if found is None else self._size(target, found, inside_of | {target})
                self._sizes[target] = min(inside, MOST_VALUES + 1)
            size += self._sizes.get(target, 1)  # OmegaConf reports a circle
        return size

    def value(self, path: KeyPath, text: str) -> Any:
        """Resolve the reference `text` that is written at `path`.

        Raises:
            UnresolvedError: The reference cannot be resolved.
        """
        if not _is_well_formed(text):
            raise UnresolvedError(f"'{text}' is not a well-formed interpolation")
        tree, value = self._whole
        self._num_values += self._size(path, YamlNode(text, ""), set())
        if self._num_values > MOST_VALUES:
            raise UnresolvedError(
                f"'{text}': the references repeat more than {MOST_VALUES} values, as references to "
                "lists of references do"
            )
        try:
            for key in path:
                value = value[key]
            if isinstance(value, DictConfig | ListConfig):
                return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
            return value
        except OmegaConfBaseException as error:
            # Without OmegaConf's notes on the types of its own nodes.
            line = str(error).splitlines()[0]
            reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", line).strip('"')
            asked = re.search(r"'([^']+)'", str(error))
            near = None
            if isinstance(error, InterpolationKeyError) and asked:
                near = nearest(asked[1], map(dotted, _paths(tree, ())))
            hint = f"; did you mean '{near}'?" if near else ""
            raise UnresolvedError(f"'{text}': {reason}{hint}") from None


def _is_well_formed(text: str) -> bool:
    try:
        OmegaConf.create({"value": text})
    except OmegaConfBaseException:
        return False
    return True


def _for_omegaconf(node: YamlNode) -> Any:
    if isinstance(node.value, dict):
        return {key: _for_omegaconf(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [_for_omegaconf(child) for child in node.value]
    if node.value is MISSING:
        return "???"
    if node.literal and isinstance(node.value, str):
        return escaped(node.value)
    # A malformed reference is reported where it is read; here it must not spoil the others.
    return None if node.reference and not _is_well_formed(node.value) else node.value


def _paths(node: YamlNode, path: KeyPath) -> Iterator[KeyPath]:
    for key, child in node.value.items() if isinstance(node.value, dict) else ():
        yield (*path, key)
        yield from _paths(child, (*path, key))
