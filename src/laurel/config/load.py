"""Configuration files and command-line overrides, read into the sections of a schema.

PyYAML parses, OmegaConf looks references up, and pydantic checks each section. What is our own:
every value keeps the line it was written in, which neither of the three would carry to an error;
all that is wrong is told at once, in words; and an override begins from the schema's defaults, and
takes `a: b` for text, where OmegaConf's would drop siblings and read a mapping.

The steps, each in a file of its own::

    yaml_tree      YAML files and what they inherit  -> a tree that knows every value's line
    overrides      a.b=c, +a.b=c, ++a.b=c, ~a.b      -> the same tree, changed
    nemo_rl        what files of NeMo RL say in another way -> the same tree, in Laurel's terms
    interpolation  ${other.key}, ${mul:a,b}, ${oc.env:NAME,default}
    load           tree + schema -> sections, or everything that is wrong in one error
    dump           sections -> YAML that reads back as the same sections
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, Generic, TypeVar, cast

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from laurel.config.dump import to_yaml
from laurel.config.interpolation import Interpolations, UnresolvedError
from laurel.config.nemo_rl import Move, adapt, unread_keys
from laurel.config.overrides import Override, apply_overrides, at_their_place
from laurel.config.schema_info import (
    Kinds,
    choices_of,
    describe_kinds,
    item_kinds,
    kind_that_fits,
    kinds_of,
    unknown_key,
    with_defaults,
)
from laurel.config.yaml_tree import (
    DEFAULT,
    MISSING,
    KeyPath,
    Section,
    YamlNode,
    all_of,
    dotted,
    find_node,
    graft,
    nearest,
    read_file,
)

__all__ = ["LoadedConfig", "check_tree", "load_config", "to_yaml"]

T = TypeVar("T", bound=Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig(Generic[T]):
    """A configuration that fits its schema, and what should be said about it."""

    config: T
    warnings: tuple[str, ...]
    """A line for each of: what was translated, what is lost, what is ignored and loses nothing,
    what has no effect beside other settings, what is null and has its default."""
    ignored: tuple[str, ...] = ()
    """Keys of other systems' files that mean nothing here, lost or not."""
    said: YamlNode = field(default_factory=lambda: YamlNode({}, DEFAULT))
    """What file and overrides say, in Laurel's own terms, without defaults."""
    moves: tuple[Move, ...] = ()
    """What they say in other terms, and where it went."""


def load_config(
    schema: type[T], path: Path | None = None, overrides: Sequence[str | Override] = ()
) -> LoadedConfig[T]:
    """Read a configuration file and change it by overrides; without a file, the schema's defaults.

    Raises ConfigError. What is wrong with keys and values is told all at once, each with the file
    and line, or the override, that it came from.
    """
    tree = read_file(path) if path is not None else YamlNode({}, DEFAULT)
    problems: list[str] = []
    tree = at_their_place(schema, tree, problems)
    filled = apply_overrides(schema, with_defaults(schema, tree), overrides, problems)
    adapted = adapt(schema, filled, problems)
    config, checker = check_tree(schema, adapted.tree, problems)
    return LoadedConfig(
        config=config,
        warnings=(*adapted.sentences, *checker.warnings()),
        ignored=tuple(checker.ignored),
        said=adapted.tree,
        moves=tuple(adapted.moves),
    )


def check_tree(schema: type[T], tree: YamlNode, problems: Sequence[str] = ()) -> tuple[T, Checker]:
    """The sections that a tree with its defaults is, and who checked it.

    Args:
        schema: Of the whole tree.
        tree: Its places are named in messages.
        problems: What is known to be wrong with it before.

    Raises:
        ConfigError: What is wrong, all at once.
    """
    checker = Checker(schema, tree, problems)
    config = checker.section(schema, tree)
    if checker.problems or isinstance(config, _Broken):
        raise all_of(checker.problems)
    return config, checker


# --------------------------------------------------------------------------------------------------
# From a tree to the sections of a schema, collecting everything that is wrong on the way.


class _Broken:
    """Stands for a value that has been reported and must not be reported again."""


_BROKEN = _Broken()


def _has_broken(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_broken, value.values() if isinstance(value, dict) else value))
    return value is _BROKEN


class Checker:
    """Builds the sections of one run from its tree, from the innermost outwards.

    Each section is validated on its own, from parts that are already built. So an error is never
    told once per branch of a union, and one wrong key does not hide another.
    """

    def __init__(self, schema: type[Section], tree: YamlNode, problems: Sequence[str]) -> None:
        self.schema = schema
        self.tree = tree
        self.interpolations = Interpolations(tree, schema)
        self.problems = list(problems)
        self.ignored: list[str] = []
        self.without_effect: dict[str, str] = {}
        """Keys that do nothing beside others, and why."""
        self.nulls: dict[str, Any] = {}
        """Keys that are null and cannot be, with the defaults that hold instead."""

    def section(self, section: type[T], node: YamlNode, path: KeyPath = ()) -> T | _Broken:
        """The section at `path`, or a stand-in where something in it has been reported."""
        values: dict[str, Any] = {}
        whole = True
        for key, child in node.value.items():
            here = (*path, key)
            if key in section.model_fields:
                kinds = kinds_of(section.model_fields[key].annotation)
                value = self._value(kinds, child, here)
                if value is None and self._is_left_out(section.model_fields[key], kinds, here):
                    continue
                values[key] = value
                whole = whole and not _has_broken(value)
            elif key in section.foreign_keys or (key in section.removed and child.value is None):
                self.ignored.append(dotted(here))
            else:
                whole = False
                self._report(here, child.place, unknown_key(self.schema, section, key))
        try:
            built = section.model_validate(values)
        except ValidationError as error:
            for told in error.errors(include_url=False):
                if told["loc"]:
                    self._report_value(told, section, node, path, values)
                elif whole:  # else the rule may have failed for what is already reported
                    self._report(path, self._place_of_rule(told, node), _reason(told))
            return _BROKEN
        if whole:
            named = built.without_effect().items()
            self.without_effect |= {dotted((*path, key)): why for key, why in named}
        return built if whole else _BROKEN

    def warnings(self) -> Iterator[str]:
        """What the tree says that is lost, ignored, without effect or null."""
        fates = unread_keys(self.tree, self.ignored)
        lost = {fate.key: fate.why for fate in fates if fate.is_lost}
        if lost:
            told = "; ".join(f"{key} ({why})" for key, why in lost.items())
            yield f"these settings are not carried over: {told}"
        nothing = [
            key for key in self.ignored if not any(f"{one}.".startswith(f"{key}.") for one in lost)
        ]
        if nothing:
            yield f"these keys mean nothing here and are ignored: {', '.join(nothing)}"
        if self.without_effect:
            told = "; ".join(f"{key} ({why})" for key, why in self.without_effect.items())
            yield f"these settings have no effect beside the others: {told}"
        if self.nulls:
            told = ", ".join(f"{key}={value}" for key, value in self.nulls.items())
            yield f"these keys are null, which leaves them at their defaults: {told}"

    def _is_left_out(self, field: FieldInfo, kinds: Kinds, path: KeyPath) -> bool:
        """Whether a key that is null cannot be: then nothing is said, and its default holds.

        Null is how YAML says that there is no value; a key that must be given is refused.
        """
        if field.is_required() or not {Any, NoneType}.isdisjoint(kinds):
            return False
        default = field.get_default(call_default_factory=True)
        if default:  # else the default is nothing, too
            is_section = isinstance(default, Section)
            self.nulls[dotted(path)] = default.model_dump() if is_section else default
        return True

    def _value(self, kinds: Kinds, node: YamlNode, path: KeyPath) -> Any:
        """The value of one key: references looked up, sections built."""
        try:
            node = self._resolved(node, path)
        except UnresolvedError as error:
            return self._report(path, node.place, str(error))
        if not isinstance(node.value, dict | list):
            return self._scalar(kinds, node, path)
        kind = kind_that_fits(kinds, node)
        if isinstance(kind, type) and issubclass(kind, Section):
            return self.section(kind, node, path)
        inside = item_kinds(kind) or (Any,)
        if isinstance(node.value, list):
            return [self._value(inside, item, (*path, i)) for i, item in enumerate(node.value)]
        return {k: self._value(inside, child, (*path, k)) for k, child in node.value.items()}

    def _scalar(self, kinds: Kinds, node: YamlNode, path: KeyPath) -> Any:
        """A number where only text is wanted is the text as written (`revision: 12e3`)."""
        if Any in kinds:
            return node.value
        takes_number = not {int, float}.isdisjoint(kinds)
        if isinstance(node.value, bool) and takes_number and {bool, str}.isdisjoint(kinds):
            # pydantic would take `true` for 1.
            message = f"must be {describe_kinds(kinds)}, not {_shown(node.value)}"
            return self._report(path, node.place, message)
        is_number = isinstance(node.value, int | float) and not isinstance(node.value, bool)
        wants_text = str in kinds and not takes_number
        return node.text if is_number and wants_text and node.text is not None else node.value

    def _resolved(self, node: YamlNode, path: KeyPath) -> YamlNode:
        if node.value is MISSING:
            raise UnresolvedError("must be given: the file says ???")
        if not node.reference:
            return node
        found = graft(self.interpolations.value(path, node.value), node.place)
        return replace(found, text=str(found.value))

    # ------------------------------------------------------------------------------------ messages

    def _report_value(
        self,
        told: ErrorDetails,
        section: type[Section],
        node: YamlNode,
        path: KeyPath,
        values: Mapping[str, Any],
    ) -> None:
        """Report what pydantic found in a key, in words and at the line it came from."""
        field = section.model_fields[str(told["loc"][0])]
        where, kinds = _descend(kinds_of(field.annotation), told["loc"])
        if told["type"] == "missing":
            message = f"is missing; it must be {describe_kinds(kinds)}"
            self._report((*path, *where), node.place, message)
            return
        value = functools.reduce(operator.getitem, where, cast(Any, values))
        if _has_broken(value):
            return
        message = _reason(told)
        if told["type"].endswith(_TOLD_BY_KIND):
            limits = field.metadata if len(where) == 1 else []
            near = nearest(str(value), choices_of(kinds))
            message = f"must be {describe_kinds(kinds, limits)}, not {_shown(value)}"
            message += f"; did you mean '{near}'?" if near else ""
            gone = section.removed.get(str(value))
            if gone is not None:
                message = f"there is no {value} any more ({gone}); leave it out"
        # Where a reference brought in the rest, the last node on the way has the line.
        ways = (find_node(node, where[:length]) for length in range(len(where), -1, -1))
        written = next(found for found in ways if found is not None)
        self._report((*path, *where), written.place, message)

    def _place_of_rule(self, told: ErrorDetails, node: YamlNode) -> str:
        """The line of the first written key that a section's own rule names; else the section's."""
        reason = _reason(told)
        named = [
            find_node(self.tree, key.split(".")) for key in re.findall(r"\w+(?:\.\w+)+", reason)
        ]
        named += [find_node(node, [word]) for word in re.findall(r"\w+", reason)]
        written = (found.place for found in named if found is not None and found.place != DEFAULT)
        return next(written, node.place)

    def _report(self, path: KeyPath, place: str, message: str) -> _Broken:
        key = dotted(path)
        problem = f"{place}: {message}"
        if not message.startswith(key):
            problem = f"{place}: {key}: {message}"
        if problem not in self.problems:
            self.problems.append(problem)
        return _BROKEN


_TOLD_BY_KIND = (
    "_type",
    "_parsing",
    "_from_float",
    "literal_error",
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
)
"""pydantic's errors for which the description of the key says all there is to say."""


def _descend(kinds: Kinds, location: tuple[int | str, ...]) -> tuple[KeyPath, Kinds]:
    """How far a location goes down before it names branches of a union, and the kinds there."""
    where: KeyPath = location[:1]
    for key in location[1:]:
        inside = item_kinds(kinds[0]) if len(kinds) == 1 else None
        if inside is None:
            break
        where, kinds = (*where, key), inside
    return where, kinds


def _reason(told: ErrorDetails) -> str:
    """The text of a rule of ours, or pydantic's without its opening."""
    error = told.get("ctx", {}).get("error")
    return str(error) if error is not None else told["msg"].replace("Input should be", "must be")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
