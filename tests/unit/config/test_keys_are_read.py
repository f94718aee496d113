"""Every key of a configuration is read by something.

A key counts as read where its name is an attribute of what is called as its section is: of a
variable that is annotated with it or made of it, of a field that holds it, or of `self` in its
class. In a module that names the section the key may also stand in a list of keys.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import create_model

import laurel
from laurel.config.grpo import AdvantageConfig, GRPOConfig
from laurel.config.load import sections_below
from laurel.config.plugged import all_fields
from laurel.config.policy import CheckpointingConfig, PolicyConfig
from laurel.config.schema_info import item_kinds, kinds_of, sections_of
from laurel.config.schemas import SCHEMAS, Kind
from laurel.config.yaml_tree import Section

SOURCES = Path(laurel.__path__[0])
_KEEPS = {"model_copy", "items", "values", "get", "model_validate"}
"""Methods whose result is called as their object is."""
_PASSES = {"enumerate", "zip", "sorted", "list", "dict", "cast", "replace"}
"""Functions whose result is called as their arguments are."""


def last(node: ast.AST | None) -> str:
    """The identifier that an expression ends with: `scale` of `config.grpo.scale`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call):
        return last(node.func)
    return last(node.value) if isinstance(node, ast.Subscript | ast.Await) else ""


def made_of(value: ast.AST) -> set[str]:
    """The identifiers whose values an expression may have."""
    parts: list[ast.AST] = []
    if isinstance(value, ast.BoolOp):
        parts = list(value.values)
    elif isinstance(value, ast.IfExp):
        parts = [value.body, value.orelse]
    elif isinstance(value, ast.List | ast.Tuple):
        parts = list(value.elts)
    elif isinstance(value, ast.BinOp):
        parts = [value.left, value.right]
    elif isinstance(value, ast.DictComp | ast.Starred | ast.Subscript | ast.NamedExpr):
        parts = [value.value]
    elif isinstance(value, ast.Call):
        if isinstance(value.func, ast.Attribute) and value.func.attr in _KEEPS:
            parts = [value.func.value]
        elif isinstance(value.func, ast.Name) and value.func.id in _PASSES:
            parts = list(value.args)
        else:  # a class among the arguments is that of the result
            names = {last(one) for one in value.args}
            return {last(value.func)} | {name for name in names if name[:1].isupper()}
    else:
        return {last(value)} - {""}
    return set[str]().union(*map(made_of, parts))


def named_in(annotation: ast.AST) -> set[str]:
    return {last(one) for one in ast.walk(annotation) if isinstance(one, ast.Name | ast.Attribute)}


_SAYS_NOTHING = frozenset((ast.Constant, ast.Load, ast.Store, ast.keyword, ast.Expr, ast.Return))
"""What most nodes are, of which a module takes nothing."""


class Module:
    """What a module reads, of what."""

    def __init__(self, tree: ast.Module) -> None:
        self.reads = defaultdict[str, set[str]](set)
        """What each name is an attribute of."""
        self.texts, self.names = set[str](), set[str]()
        self.annotated, self.made = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
        self.returns = defaultdict[str, set[str]](set)
        """What functions return."""
        self.own = defaultdict[str, set[str]](set)
        """What each class reads of `self` and `cls`."""
        for node in ast.walk(tree):
            if type(node) not in _SAYS_NOTHING:
                self._take(node)

    def _take(self, node: ast.AST) -> None:
        words: Iterable[ast.AST | None] = ()
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            self.reads[node.attr].add(last(node.value))
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            words = node.elts
        elif isinstance(node, ast.Dict):
            words = node.keys
        elif isinstance(node, ast.Subscript):
            words = [node.slice]
        elif isinstance(node, ast.Call) and last(node.func) in ("getattr", "get"):
            words = node.args
        elif isinstance(node, ast.Name):
            self.names.add(node.id)
        elif isinstance(node, ast.alias):
            self.names.add(node.name)
        elif isinstance(node, ast.arg) and node.annotation is not None:
            self.annotated[node.arg] |= named_in(node.annotation)
        elif isinstance(node, ast.AnnAssign):
            self.annotated[last(node.target)] |= named_in(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            self.returns[node.name] |= named_in(node.returns)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._made(target, node.value)
        elif isinstance(node, ast.For | ast.comprehension):
            self._made(node.target, node.iter)
        elif isinstance(node, ast.NamedExpr):
            self._made(node.target, node.value)
        elif isinstance(node, ast.ClassDef):
            inside = [one for one in ast.walk(node) if isinstance(one, ast.Attribute)]
            self.own[node.name] |= {one.attr for one in inside if last(one.value) in _SELF}
        texts = (one.value for one in words if isinstance(one, ast.Constant))
        self.texts |= {text for text in texts if isinstance(text, str)}

    def _made(self, target: ast.expr, value: ast.expr) -> None:
        several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        if several and len(target.elts) == len(value.elts):
            for one, of in zip(target.elts, value.elts, strict=True):
                self._made(one, of)
            return
        for one in target.elts if isinstance(target, ast.Tuple) else [target]:
            self.made[last(one)] |= made_of(value)


_SELF = ("self", "cls")


@functools.cache
def modules() -> list[Module]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES.rglob("*.py"))
    return [Module(tree) for tree in trees]


@functools.cache
def sections_of_kind(kind: Kind) -> frozenset[type[Section]]:
    return frozenset(one for one, _ in sections_below(SCHEMAS[kind], plugged_in=True))


def sections_inside(kinds: Iterable[Any]) -> Iterator[type[Section]]:
    for kind in kinds:
        yield from sections_of((kind,))
        yield from sections_inside(item_kinds(kind) or ())


@functools.cache
def fields_that_hold() -> dict[type[Section], set[str]]:
    found = defaultdict[type[Section], set[str]](set)
    for kind in SCHEMAS:
        for section in sections_of_kind(kind):
            for key, field in all_fields(section).items():
                for one in sections_inside(kinds_of(field.annotation)):
                    found[one].add(key)
    return found


@functools.cache
def called(section: type[Section]) -> list[tuple[Module, set[str], bool]]:
    """How each module calls a section, and whether it names its class."""
    family = {one.__name__ for one in section.__mro__ if one.__module__.startswith("laurel.")}
    family -= {"Section", "OpenSection"}
    # What stands for it and others: `EpochSection = RewardTrainingConfig | SFTConfig`.
    unions = {
        name
        for module in modules()
        for name, of in module.made.items()
        if name[:1].isupper() and of & family
    }
    kinds = family | unions
    makers = {name for module in modules() for name, of in module.returns.items() if of & kinds}
    held = fields_that_hold()
    fields = {
        key
        for one, keys in held.items()
        if issubclass(one, section) or issubclass(section, one)
        for key in keys
    }
    found = []
    for module in modules():
        ids = {name for name, of in module.annotated.items() if of & kinds} | fields | makers
        for _ in range(3):  # as far as a value is passed on within a module
            ids |= {name for name, of in module.made.items() if of & (ids | kinds)}
        found.append((module, ids, bool(kinds & module.names)))
    return found


def is_read(section: type[Section], key: str) -> bool:
    family = [one.__name__ for one in section.__mro__]
    return any(
        module.reads[key] & ids
        or (names_it and key in module.texts)
        or any(key in module.own[one] for one in family)
        for module, ids, names_it in called(section)
    )


def unread(section: type[Section]) -> set[str]:
    return {
        f"{section.__name__}.{key}"
        for key in section.model_fields
        # Loggers are switched by the name that they have: `tensorboard_enabled`.
        if not is_read(section, key) and not key.endswith("_enabled")
    }


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_key_is_read(kind: Kind) -> None:
    own = [one for one in sections_of_kind(kind) if one.__module__.startswith("laurel.")]
    assert len(own) > 15
    assert set[str]().union(*map(unread, own)) == set()


PLANTED = (
    *((AdvantageConfig, key) for key in ("seed", "size", "step", "path")),
    *((GRPOConfig, key) for key in ("name", "size")),
    *((CheckpointingConfig, key) for key in ("name", "seed", "step", "path")),
    *((PolicyConfig, key) for key in ("name", "size", "step")),
)
"""Keys that there are not, by names that elsewhere are read."""


@pytest.mark.parametrize(("section", "key"), PLANTED, ids=str)
def test_a_key_that_nobody_reads_is_found_though_its_name_is_common(
    section: type[Section], key: str
) -> None:
    assert key not in section.model_fields
    assert any(module.reads[key] for module in modules())
    fields: Any = {key: (int, 0)}
    planted = create_model(section.__name__, __base__=section, **fields)
    assert not is_read(planted, key)
