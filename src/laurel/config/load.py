"""Reads configuration files and command-line overrides into the sections of a schema.

PyYAML parses, OmegaConf looks references up, and pydantic checks each section. Three things are
Laurel's own: every value keeps the line that it was written in, which none of the three libraries
would carry to an error; all problems are reported at once, in words; and an override starts from
the schema's defaults and reads `a: b` as text, where OmegaConf's would drop siblings and read a
mapping.

The steps, each in a file of its own::

    yaml_tree      YAML files and what they inherit  -> a tree that knows every value's line
    overrides      a.b=c, +a.b=c, ++a.b=c, ~a.b      -> the same tree, changed
    nemo_rl        NeMo RL's own settings            -> the same tree, in Laurel's terms
    interpolation  ${other.key}, ${mul:a,b}, ${oc.env:NAME,default}
    load           tree + schema -> sections, or everything that is wrong in one error
    dump           sections -> YAML that reads back as the same sections
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Generic, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from laurel.config.dump import to_yaml
from laurel.config.interpolation import Interpolations, UnresolvedError
from laurel.config.nemo_rl import Move, adapt, is_carried, unread_keys
from laurel.config.overrides import Override, apply_overrides, at_their_place
from laurel.config.plugged import field_of
from laurel.config.schema_info import (
    Kinds,
    choices_of,
    describe_kinds,
    item_kinds,
    kind_that_fits,
    kinds_of_field,
    says_nothing,
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
from laurel.errors import ConfigError

__all__ = ["LoadedConfig", "check_tree", "load_config", "to_yaml", "translated"]

T = TypeVar("T", bound=Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig(Generic[T]):
    """A configuration that was loaded and checked against its schema, with its warnings."""

    config: T
    warnings: tuple[str, ...]
    """The warnings, one line for each setting that does not act as written.

    Such settings were translated, are lost, are ignored without loss, have no effect beside others,
    or are null and keep their defaults.
    """
    ignored: tuple[str, ...] = ()
    """The keys of other systems that Laurel ignores, whether or not something is lost by that."""
    said: YamlNode = field(default_factory=lambda: YamlNode({}, DEFAULT))
    """The settings of file and overrides, translated to Laurel's keys, without defaults."""
    moves: tuple[Move, ...] = ()
    """The settings that were translated, each with Laurel's keys for it."""


def load_config(
    schema: type[T], path: Path | None = None, overrides: Sequence[str | Override] = ()
) -> LoadedConfig[T]:
    """Read a configuration file, or the schema's defaults if `path` is None, and apply overrides.

    Raises:
        ConfigError: Keys or values are wrong. The message lists all of them, each with its file and
            line, or its override.
    """
    tree = read_file(path) if path is not None else YamlNode({}, DEFAULT)
    problems: list[str] = []
    tree = at_their_place(schema, tree, problems)
    filled = apply_overrides(schema, with_defaults(schema, tree), overrides, problems)
    adapted = adapt(schema, filled, problems)
    config, checker = check_tree(schema, adapted.tree, problems)
    return LoadedConfig(
        config=config,
        warnings=(*adapted.sentences, *checker.warnings({move.key for move in adapted.moves})),
        ignored=tuple(checker.ignored),
        said=adapted.tree,
        moves=tuple(adapted.moves),
    )


def translated(schema: type[Section], tree: YamlNode) -> YamlNode:
    """Translate a configuration that an earlier version saved, as a file of a user's is.

    Raises:
        ConfigError: It cannot be translated.
    """
    problems: list[str] = []
    found = adapt(schema, at_their_place(schema, tree, problems), problems).tree
    if problems:
        raise all_of(problems)
    return found


def check_tree(schema: type[T], tree: YamlNode, problems: Sequence[str] = ()) -> tuple[T, Checker]:
    """Build the sections of a tree with defaults filled in, and return them with their checker.

    `problems` are those of the tree that are already known.

    Raises:
        ConfigError: The tree has problems; the message lists all of them.
    """
    checker = Checker(schema, tree, problems)
    config = checker.section(schema, tree)
    if checker.problems or isinstance(config, _Broken):
        raise all_of(checker.problems)
    return config, checker


# From a tree to the sections of a schema, collecting everything that is wrong on the way.


class _Broken:
    """Stands for a value whose problem was reported, so that it is not reported again."""


_BROKEN = _Broken()


def _has_broken(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_broken, value.values() if isinstance(value, dict) else value))
    return value is _BROKEN


class Checker:
    """Builds the sections of one run from its tree, innermost sections first.

    Each section is validated on its own, from parts that are already built. So an error is never
    repeated for each branch of a union, and one wrong key does not hide another.
    """

    def __init__(self, schema: type[Section], tree: YamlNode, problems: Sequence[str]) -> None:
        self.schema = schema
        self.tree = tree
        self.interpolations = Interpolations(tree, schema)
        self.problems = list(problems)
        self.ignored: list[str] = []
        self.removed: dict[str, str] = {}
        """The keys that there are no more, whose values ask for what holds now."""
        self.without_effect: dict[str, str] = {}
        """The keys that have no effect beside others, with the reason."""
        self.nulls: dict[str, Any] = {}
        """The keys that are null but need a value, with the defaults that they keep."""

    def section(self, section: type[T], node: YamlNode, path: KeyPath = ()) -> T | _Broken:
        """Build the section at `path`, or return a marker if a problem in it was reported."""
        values: dict[str, Any] = {}
        whole = True
        for key, child in node.value.items():
            here = (*path, key)
            try:
                field = field_of(section, key)
            except ConfigError as error:  # its plug-in cannot be used
                whole = False
                self._report(here, child.place, str(error))
                continue
            if field is not None:
                kinds = kinds_of_field(field)
                value = self._value(kinds, child, here)
                if value is None and self._is_left_out(field, kinds, here):
                    continue
                if key not in section.model_fields and not _has_broken(value):
                    value = self._checked(section, key, field, value, node, path)
                whole = whole and not _has_broken(value)
                # The section would validate what a plug-in's key holds again, whatever it is.
                if key in section.model_fields or not _has_broken(value):
                    values[key] = value
            elif key in section.foreign_keys:
                self.ignored.append(dotted(here))
            elif key in section.removed and says_nothing(section.removed[key], child):
                self.removed[dotted(here)] = section.removed[key].instead
            else:
                whole = False
                self._report(here, child.place, unknown_key(self.schema, section, key))
        try:
            built = section.model_validate(values)
        except ValidationError as error:
            for problem in error.errors(include_url=False):
                if problem["loc"]:
                    self._report_value(problem, section, node, path, values)
                elif whole:  # otherwise a problem that is reported may have broken the rule
                    self._report(path, self._place_of_rule(problem, node), _reason(problem))
            return _BROKEN
        if whole:
            named = section.outdone(values) | built.without_effect()
            self.without_effect |= {dotted((*path, key)): why for key, why in named.items()}
        return built if whole else _BROKEN

    def warnings(self, moved: Collection[str] = ()) -> Iterator[str]:
        """Yield one line for each setting that is lost, ignored, without effect or null."""
        unread = unread_keys(self.tree, self.ignored)
        lost = {one.key: one.why for one in unread if one.is_lost}
        if lost:
            listed = "; ".join(f"{key} ({why})" for key, why in lost.items())
            yield f"these settings are not carried over: {listed}"
        nothing = [
            key
            for key in self.ignored
            if key not in moved
            and not is_carried(key)
            and not any(f"{one}.".startswith(f"{key}.") for one in lost)
        ]
        if nothing:
            yield f"these keys mean nothing here and are ignored: {', '.join(nothing)}"
        if self.removed:
            yield f"these keys are gone, and what they say holds anyway: {', '.join(self.removed)}"
        if self.without_effect:
            listed = "; ".join(f"{key} ({why})" for key, why in self.without_effect.items())
            yield f"these settings have no effect beside the others: {listed}"
        if self.nulls:
            listed = ", ".join(f"{key}={value}" for key, value in self.nulls.items())
            yield f"these keys are null, which leaves them at their defaults: {listed}"

    def _checked(
        self,
        section: type[Section],
        key: str,
        field: FieldInfo,
        value: Any,
        node: YamlNode,
        path: KeyPath,
    ) -> Any:
        """Validate what a plug-in's or a short key holds, which is no field of the section."""
        kind: Any = field.annotation
        for limit in field.metadata:
            kind = Annotated[kind, limit]
        try:
            return TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            for problem in error.errors(include_url=False):
                problem["loc"] = (key, *problem["loc"])
                self._report_value(problem, section, node, path, {key: value})
            return _BROKEN

    def _is_left_out(self, field: FieldInfo, kinds: Kinds, path: KeyPath) -> bool:
        """Report whether a null leaves a key out, so that its default holds."""
        # YAML writes null for no value. A required key may be none, so it is refused elsewhere.
        if field.is_required() or not {Any, NoneType}.isdisjoint(kinds):
            return False
        default = field.get_default(call_default_factory=True)
        if default:  # an empty default means the same as null
            is_section = isinstance(default, Section)
            self.nulls[dotted(path)] = default.model_dump() if is_section else default
        return True

    def _value(self, kinds: Kinds, node: YamlNode, path: KeyPath) -> Any:
        """Return the value of one key, with references resolved and sections built."""
        try:
            if node.value is MISSING:
                raise UnresolvedError("must be given: the file says ???")
            if node.reference:
                # An error in the value names the line of the reference.
                found = graft(self.interpolations.value(path, node.value), node.place)
                node = replace(found, text=str(found.value))
        except UnresolvedError as error:
            return self._report(path, node.place, str(error))
        if not isinstance(node.value, dict | list):
            if Any in kinds:
                return node.value
            takes_number = not {int, float}.isdisjoint(kinds)
            if isinstance(node.value, bool) and takes_number and {bool, str}.isdisjoint(kinds):
                # pydantic would read `true` as 1.
                message = f"must be {describe_kinds(kinds)}, not {_shown(node.value)}"
                return self._report(path, node.place, message)
            if takes_number and float not in kinds and _is_whole(node.value):
                return int(node.value)  # 1e23, which pydantic would not read
            is_number = isinstance(node.value, int | float) and not isinstance(node.value, bool)
            wants_text = str in kinds and not takes_number
            return node.text if is_number and wants_text and node.text is not None else node.value
        kind = kind_that_fits(kinds, node)
        if isinstance(kind, type) and issubclass(kind, Section):
            return self.section(kind, node, path)
        inside = item_kinds(kind) or (Any,)
        if isinstance(node.value, list):
            return [self._value(inside, item, (*path, i)) for i, item in enumerate(node.value)]
        return {k: self._value(inside, child, (*path, k)) for k, child in node.value.items()}

    def _report_value(
        self,
        problem: ErrorDetails,
        section: type[Section],
        node: YamlNode,
        path: KeyPath,
        values: Mapping[str, Any],
    ) -> None:
        """Report pydantic's problem with a key, in words and with the line that it is in."""
        field = field_of(section, str(problem["loc"][0]))
        assert field is not None
        where: KeyPath = problem["loc"][:1]
        kinds = kinds_of_field(field)
        # From a union on, the location names its branches, which are no keys.
        for key in problem["loc"][1:]:
            inside = item_kinds(kinds[0]) if len(kinds) == 1 else None
            if inside is None:
                break
            where, kinds = (*where, key), inside
        if problem["type"] == "missing":
            message = f"is missing; it must be {describe_kinds(kinds)}"
            self._report((*path, *where), node.place, message)
            return
        value = functools.reduce(operator.getitem, where, cast(Any, values))
        if _has_broken(value):
            return
        message = _reason(problem)
        if problem["type"].endswith(_DESCRIBED_BY_KIND):
            limits = field.metadata if len(where) == 1 else []
            near = nearest(str(value), choices_of(kinds))
            message = f"must be {describe_kinds(kinds, limits)}, not {_shown(value)}"
            message += f"; did you mean '{near}'?" if near else ""
            gone = section.removed.get(str(value))
            if gone is not None:
                message = f"there is no {value} any more ({gone.instead}); leave it out"
        elif problem["type"] == "finite_number":
            or_null = ", or null" if type(None) in kinds else ""
            message = f"must be a finite number{or_null}, not {_shown(value)}"
        # A reference may stand for the rest of the path; then the last node on it has the line.
        ways = (find_node(node, where[:length]) for length in range(len(where), -1, -1))
        written = next(found for found in ways if found is not None)
        if written.reference:
            message += self._source_of(written.value)
        is_block = isinstance(written.value, dict)
        place = self._place_of_rule(problem, written) if is_block else written.place
        self._report((*path, *where), place, message)

    def _source_of(self, reference: str) -> str:
        """Say what the keys of a `${}` reference are, and where they were written."""
        said = []
        for key in re.findall(r"[A-Za-z_]\w*(?:\.\w+)+", reference):
            node = find_node(self.tree, key.split("."))
            if node is not None and not isinstance(node.value, dict | list):
                said.append(f"{key}={_shown(node.value)} ({node.place})")
        return f": it is written {reference}, and {', '.join(said)}; set it too" if said else ""

    def _place_of_rule(self, problem: ErrorDetails, node: YamlNode) -> str:
        """Find the line of the first written key that a rule's message names, or the section's."""
        reason = _reason(problem)
        named = [
            find_node(root, key.split("."))
            for key in re.findall(r"\w+(?:\.\w+)+", reason)
            for root in (self.tree, node)
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


# pydantic's errors that the description of the key explains completely.
_DESCRIBED_BY_KIND = (
    "_type",
    "_parsing",
    "_parsing_size",
    "_from_float",
    "literal_error",
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
)


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _reason(problem: ErrorDetails) -> str:
    error = problem.get("ctx", {}).get("error")
    return str(error) if error is not None else problem["msg"].replace("Input should be", "must be")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
