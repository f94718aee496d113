"""Reads configuration files and overrides into the sections of a schema, and writes these.

PyYAML parses, OmegaConf looks references up, and pydantic checks each section. Three things are
Laurel's own: every value keeps the line that it was written in, which none of the three libraries
would carry to an error; all problems are reported at once, in words; and an override starts from
the schema's defaults and reads `a: b` as text, where OmegaConf's would drop siblings and read a
mapping.

The steps::

    yaml_tree         YAML files and what they inherit  -> a tree that knows every value's line
    apply_overrides   a.b=c, +a.b=c, ++a.b=c, ~a.b      -> the same tree, changed
    interpolation     ${other.key}, ${mul:a,b}, ${oc.env:NAME,default}
    check_tree        tree + schema -> sections, or everything that is wrong in one error
    other_systems     another system's settings         -> the tree in Laurel's terms, checked again
    to_yaml           sections -> YAML that reads back as the same sections
"""

from __future__ import annotations

import datetime
import functools
import json
import operator
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from types import NoneType
from typing import Annotated, Any, Generic, TypeVar, cast

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from laurel.config.interpolation import Interpolations, UnresolvedError
from laurel.config.other_systems import Adapted, Move, foreign_keys, ignored_keys, translate
from laurel.config.plugged import all_fields, field_of, fields_in, values_in
from laurel.config.schema_info import (
    Kinds,
    changes_default,
    choices_of,
    default_node,
    describe_kinds,
    is_mapping,
    item_kinds,
    kind_that_fits,
    kinds_of,
    kinds_of_field,
    names_in,
    says_nothing,
    sections_of,
    sole_section,
    step_into,
    unknown_key,
    with_defaults,
)
from laurel.config.yaml_tree import (
    DEFAULT,
    IN_LIST,
    MISSING,
    KeyPath,
    Section,
    YamlNode,
    all_of,
    dotted,
    escaped,
    find_node,
    graft,
    is_named_as_data,
    nearest,
    overlay,
    read_file,
    read_scalars_our_way,
    read_text,
    with_key,
)
from laurel.errors import ConfigError

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
    schema: type[T],
    path: Path | None = None,
    overrides: Sequence[str | Override] = (),
    *,
    is_foreign: bool = False,
) -> LoadedConfig[T]:
    """Read a configuration file, or the schema's defaults if `path` is None, and apply overrides.

    Args:
        is_foreign: The file is of another system, even if Laurel has all of its keys.

    Raises:
        ConfigError: Keys or values are wrong. The message lists all of them, each with its file and
            line, or its override.
    """
    tree = read_file(path) if path is not None else YamlNode({}, DEFAULT)
    problems: list[str] = []
    tree = at_their_place(schema, tree, problems)
    filled = apply_overrides(schema, with_defaults(schema, tree), overrides, problems)
    adapted = Adapted(tree=filled)
    config, checker = tried(schema, filled, problems)
    if is_foreign or config is None or checker.ignored:
        adapted = translate(schema, filled, problems)
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
    found = at_their_place(schema, tree, problems)
    config, checker = tried(schema, found, problems)
    if config is None or checker.ignored:
        found = translate(schema, found, problems).tree
    if problems:
        raise all_of(problems)
    return found


_FORM = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=]*)(?:(?P<equals>=)(?P<value>.*))?", re.DOTALL)


COLUMN_KEYS = ("data.prompt_key", "data.chosen_key", "data.rejected_key", "data.system_key")
"""The keys that name the columns of preferences, which all commands that read such rows accept."""
COLUMNS_IN_WORDS = ", ".join(f"{key}=COLUMN" for key in COLUMN_KEYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A parsed override: one change of one configuration key."""

    text: str
    sign: str
    """The sign: `+` adds a key, `++` adds or changes it, `~` deletes it, none changes it."""
    keys: tuple[str, ...]
    value: YamlNode | None
    """The key's new value; None deletes the key."""
    place: str
    """The name of the override in error messages."""


def apply_overrides(
    schema: type[Section], tree: YamlNode, overrides: Sequence[str | Override], problems: list[str]
) -> YamlNode:
    """Apply overrides to a tree in order, and return the changed tree.

    Overrides that cannot be applied are added to `problems`. A section that the tree lacks starts
    from the schema's defaults, so that a change of one key leaves its siblings as they were.
    """
    for said in overrides:
        try:
            override = parse_override(said) if isinstance(said, str) else said
            key = ".".join(override.keys)
            keys = tuple(schema.other_names.get(key, key).split("."))
            tree, keys = _at_short_keys(schema, tree, override, keys)
            tree = _changed(schema, tree, replace(override, keys=keys))
        except ConfigError as error:
            problems.append(str(error))
    return tree


def _at_short_keys(
    schema: type[Section], tree: YamlNode, override: Override, keys: tuple[str, ...]
) -> tuple[YamlNode, tuple[str, ...]]:
    """Return where a short key is set in the tree, and the tree without what would outdo it."""
    *above, last = keys
    block = find_node(tree, above)
    if len(above) != 1 or override.value is None or block is None:
        return tree, keys
    section = sole_section(step_into((schema,), above[0]).kinds)
    if section is None or last not in section.short_keys() or not isinstance(block.value, dict):
        return tree, keys
    block, below = section.place_of_short(block, last)
    return with_key(tree, above, block), (*above, *below)


def parse_override(text: str, *, place: str | None = None) -> Override:
    """Parse the text of an override.

    Args:
        place: Its name in messages; None quotes the text.

    Raises:
        ConfigError: The text is no override.
    """
    place = place or f"override '{text}'"
    form = _FORM.fullmatch(text)
    assert form is not None  # the pattern fits every text
    sign, key, value = form["sign"] or "", form["key"].strip(), form["value"]
    keys = tuple(re.sub(r"\[(\d+)\]", r".\1", key).split("."))
    if not form["equals"] and text.endswith((".yaml", ".yml", ".json")):
        raise ConfigError(
            f"{place}: a configuration file is given as --config {text}; overrides are "
            "written section.key=value"
        )
    if not form["equals"] and is_named_as_data(text):
        raise ConfigError(
            f"{place}: a file of data to train on is given as data.train_data_path={text}; "
            "overrides are written section.key=value"
        )
    if not all(keys) or any(part != part.strip() for part in keys):
        raise ConfigError(f"{place}: write it as section.key=value")
    if sign == "~" and form["equals"]:
        raise ConfigError(f"{place}: '~' deletes a key, it takes no value: ~{key}")
    if sign != "~" and not form["equals"]:
        raise ConfigError(f"{place}: a value is missing: {sign}{key}=value")
    node = None if sign == "~" else _parse_value(value, place)
    return Override(text=text, sign=sign, keys=keys, value=node, place=place)


def _parse_value(text: str, place: str) -> YamlNode:
    text = text.strip()
    as_text = YamlNode(text, place)
    if not text:
        return as_text
    try:
        node = read_text(text, place)
    except ConfigError as error:
        if text[0] in "[{'\"":
            raise ConfigError(f"{error}; put quotes around what is meant as text") from None
        return as_text
    if text[0] in "[{'\"":
        return node
    # `a: b` is a mapping to YAML, and `a #1` has a comment; on a command line both are text.
    is_whole = text == (node.value if node.text is None else node.text)
    return node if is_whole else as_text


def column_overrides(
    overrides: Sequence[str | Override], *, or_bad_rows: bool = False, remedy: str = ""
) -> dict[str, str]:
    """Return the column names that overrides set, by their keys in the `data` section.

    With `or_bad_rows`, `data.on_bad_row` may be set as well. `remedy` is the caller's last sentence
    about a word that sets nothing; `{word}` in it stands for the word.

    Raises:
        ConfigError: An override sets another key.
    """
    columns: dict[str, str] = {}
    more = "; or set data.on_bad_row=skip" if or_bad_rows else ""
    for one in overrides:
        # What looks like a key without a value is one; a file may be called data.jsonl.
        if isinstance(one, str) and not re.match(r"[~+-]|.*=|data\.\w+_\w+$", one, re.DOTALL):
            raise ConfigError(
                f"'{one}' is neither an option nor a column ({COLUMNS_IN_WORDS}{more}). "
                + remedy.format(word=one)
            )
        said = parse_override(one) if isinstance(one, str) else one
        key = ".".join(said.keys)
        value = None if said.value is None else said.value.text or said.value.value
        is_bad_rows = or_bad_rows and key == "data.on_bad_row" and value in ("error", "skip")
        if (key not in COLUMN_KEYS and not is_bad_rows) or said.value is None:
            raise ConfigError(
                f"{said.place}: there is no configuration here, and only the columns of rows "
                f"can be named: {COLUMNS_IN_WORDS}{more}"
            )
        columns[said.keys[-1]] = str(value)
    return columns


def overrides_of(settings: Mapping[str, Any]) -> list[Override]:
    """Convert keys and values that a Python program sets to overrides; messages name these keys.

    Args:
        settings: Dotted keys with texts, paths, numbers, booleans, None, and lists and mappings of
            those. A key need not exist yet; a sign before it is refused.

    Raises:
        ConfigError: A key or a value has another form.
    """

    def as_text(value: object) -> str:
        if isinstance(value, PurePath):
            return str(value)
        raise TypeError(f"{type(value).__name__} cannot be written in a configuration")

    found: list[Override] = []
    for key, value in settings.items():
        if not isinstance(key, str) or not re.match(r"[^+~=\s][^=]*$", key):
            raise ConfigError(
                f"setting {key!r}: write it as 'section.key', without a sign before it"
            )
        try:
            written = json.dumps(value, ensure_ascii=False, allow_nan=False, default=as_text)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"setting '{key}': {error}; it may be a text, a path, a finite number, True, "
                "False, None, or a list or mapping of those"
            ) from error
        found.append(parse_override(f"++{key}={written}", place=f"setting '{key}'"))
    return found


def _changed(schema: type[Section], tree: YamlNode, override: Override) -> YamlNode:
    """Apply one override; blocks on the way to its key are copied, so the given tree stays."""
    path: KeyPath = ()

    def problem(message: str) -> ConfigError:
        return ConfigError(f"{override.place}: {dotted(path)}: {message}")

    def copied(block: YamlNode) -> YamlNode:
        place = override.place if block.place == DEFAULT else block.place
        return replace(block, value=copy(block.value), place=place)

    top = block = copied(tree)
    kinds: Kinds = (schema,)
    for name in override.keys:
        key: Any = name  # of a mapping; of a list it becomes a position
        if block.reference:
            raise problem(f"is '{block.value}'; set the key it names, or replace it")
        if isinstance(block.value, list):
            if not name.isdecimal() or int(name) >= len(block.value):
                first = f"; its first is {dotted((*path, 0))}" if block.value else ""
                raise problem(f"is a list of {len(block.value)}; it has no '{name}'{first}")
            key = int(name)
        elif not isinstance(block.value, dict):
            raise problem(f"is {block.value!r}, it has no keys")
        elif block.value and is_mapping(named := kind_that_fits(kinds, block)):
            kinds = (named,)  # what else may be written there has other keys
        path = (*path, key)
        is_last = len(path) == len(override.keys)
        step, child = step_into(kinds, key), find_node(block, [key])
        is_known = child is not None or step.standing in ("field", "foreign")
        if override.value is None:
            if child is None and (is_last or not is_known):
                raise problem("is not set, so it cannot be deleted")
            if is_last:
                del block.value[key]
                break
        elif not is_known and not override.sign:
            sections = sections_of(kinds) if step.standing == "unknown" else []
            if sections:
                raise problem(unknown_key(schema, sections[0], name))
            if known := [one for kind in kinds for one in names_in(kind)]:
                raise problem(f"unknown key; known here: {', '.join(known)}")
            raise problem(f"is not there to be changed; to add it: '+{override.text}'")
        place = DEFAULT if child is None else child.place
        if is_last and place != DEFAULT and override.sign == "+":
            raise problem(f"is already set in {place}; to change it leave out '+'")
        # A section that is not written begins with what the schema sets there explicitly. A mapping
        # is laid over it and over what files set, as that of another file would be.
        default = None if step.field is None else step.field.default
        is_section = sole_section(step.kinds) is not None or (
            is_last and override.value is not None and changes_default(default, override.value)
        )
        if child is None and (is_section or not is_last):
            child = default_node(step.field)
        if not is_last:
            is_empty = child is None or child.value is None or child.value is MISSING
            below = copied(YamlNode({}, DEFAULT) if child is None or is_empty else child)
        else:
            assert override.value is not None
            is_laid_over = child is not None and (place != DEFAULT or is_section)
            below = overlay(child, override.value) if child and is_laid_over else override.value
        block.value[key] = below
        block, kinds = below, step.kinds
    return top


def at_their_place(schema: type[Section], tree: YamlNode, problems: list[str]) -> YamlNode:
    """Rename keys with another system's spelling to the schema's names.

    A tree with both spellings of one key is reported in `problems`.
    """
    for said, meant in schema.other_names.items():
        keys = said.split(".")
        found, there = find_node(tree, keys), find_node(tree, meant.split("."))
        if found is None:
            continue
        if there is not None:
            problems.append(
                f"{found.place}: {said}: is another name of {meant}, which is set in {there.place}"
            )
        rest: dict[str, YamlNode] = {}
        while keys and not rest:  # blocks that have nothing else go, too
            *keys, last = keys
            block = find_node(tree, keys)
            assert block is not None
            rest = {key: child for key, child in block.value.items() if key != last}
            tree = with_key(tree, keys, YamlNode(rest, block.place))
        tree = with_key(tree, meant.split("."), found)
    return tree


def check_tree(schema: type[T], tree: YamlNode, problems: Sequence[str] = ()) -> tuple[T, Checker]:
    """Build the sections of a tree with defaults filled in, and return them with their checker.

    `problems` are those of the tree that are already known.

    Raises:
        ConfigError: The tree has problems; the message lists all of them.
    """
    config, checker = tried(schema, tree, problems)
    if config is None:
        raise all_of(checker.problems)
    return config, checker


def tried(
    schema: type[T], tree: YamlNode, problems: Sequence[str] = ()
) -> tuple[T | None, Checker]:
    """Build sections like `check_tree`, but return None for a tree with problems."""
    checker = Checker(schema, tree, problems)
    config = checker.section(schema, tree)
    return None if checker.problems or isinstance(config, _Broken) else config, checker


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
        self.problems = list(problems)
        self.ignored: list[str] = []
        self.removed: dict[str, str] = {}
        """The keys that there are no more, whose values ask for what holds now."""
        self.without_effect: dict[str, str] = {}
        """The keys that have no effect beside others, with the reason."""
        self.nulls: dict[str, Any] = {}
        """The keys that are null but need a value, with the defaults that they keep."""

    @functools.cached_property
    def interpolations(self) -> Interpolations:
        """The references of the tree, of which most files have none."""
        return Interpolations(self.tree, self.schema)

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
            elif key in foreign_keys(section):
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
        unread = ignored_keys(self.tree, self.ignored) if self.ignored else []
        carried = {one.key for one in unread if one.is_carried}
        lost = {one.key: one.why for one in unread if one.is_lost}
        if lost:
            listed = "; ".join(f"{key} ({why})" for key, why in lost.items())
            yield f"these settings are not carried over: {listed}"
        nothing = [
            key
            for key in self.ignored
            if key not in moved
            and key not in carried
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


_WIDTH = 100


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes every text that our loader would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True, so that no anchors are written."""
        return True


read_scalars_our_way(_Dumper)

_LINE_BREAKS_YAML_CHANGES = re.compile("[\x85\u2028\u2029]")


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Templates and other long texts are readable as blocks.
    style = "|" if "\n" in text else None
    # A block with empty lines at its end has no end of its own: "..." is written after it, which
    # stands for the end of a document.
    if _LINE_BREAKS_YAML_CHANGES.search(text) or text.endswith("\n\n") or text == "\n":
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.SequenceNode:
    is_short = not any(isinstance(item, dict | list) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=is_short)


def _represent_date(dumper: yaml.SafeDumper, day: datetime.date) -> yaml.ScalarNode:
    return _represent_text(dumper, day.isoformat())  # to our loader a date is text


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(datetime.date, _represent_date)
_Dumper.add_representer(list, _represent_list)


def to_yaml(
    config: Section,
    *,
    describe: bool = False,
    keys: Collection[str] | None = None,
    more: Mapping[str, str] | None = None,
) -> str:
    """Return a configuration as YAML: all keys with defaults included, or only those in `keys`.

    A block that a run may have several of (data sets, schedulers) is written with the keys that
    were given and no others.

    Args:
        describe: Write the description of each key above it.
        keys: The dotted names of the keys to write, each with everything below it; None is all.
        more: Text to append to the descriptions of keys, by dotted name.
    """
    below = list(sections_below(type(config)))
    repeatable = {section for section, may_be_several in below if may_be_several}

    def lines(section: Section, path: str, keys: Collection[str] | None) -> Iterator[str]:
        margin = "  " * path.count(".")
        for name, info, value in values_in(section, with_plugins=describe and keys is None):
            if type(section) in repeatable and name not in section.model_fields_set:
                continue
            here = f"{path}{name}"
            if isinstance(value, list) and len(value) == 1 and IN_LIST in info.metadata:
                (value,) = value  # one is written alone
            if keys is not None and not any(f"{key}.".startswith(f"{here}.") for key in keys):
                continue
            if describe:
                about = info.description or ""
                if isinstance(info.default, str | int | float) and info.default != value:
                    about = about.replace("Default:", f"Default ({info.default}):")
                if isinstance(value, Section) and not about:
                    about = type(value).__doc__ or ""
                for text in (about, (more or {}).get(here, "")):
                    paragraph = textwrap.dedent(text).strip().split("\n\n")[0]
                    for line in textwrap.wrap(paragraph, _WIDTH - len(margin) - 2):
                        yield f"{margin}# {line}\n"
            inner = ""
            if isinstance(value, Section):
                inside = None if keys is None or here in keys else keys
                inner = "".join(lines(value, f"{here}.", inside))
            if inner:
                yield f"{margin}{name}:\n{inner}"
            else:
                yield textwrap.indent(entry(name, _as_plain(value, repeatable)), margin)

    return "".join(lines(config, "", keys))


def entry(name: str, value: Any) -> str:
    """Return one key with a plain value as lines of a YAML block."""
    return yaml.dump(
        {name: value},
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
        width=10**6,
    )


def literal(value: Any) -> Any:
    """Escape all text in a plain value that looks like a reference, so that it is read as text."""
    return _as_plain(value, set())


def _as_plain(
    value: Any, repeatable: set[type[Section]], *, is_one_of_several: bool = False
) -> Any:
    if isinstance(value, Section):
        only_given = is_one_of_several or type(value) in repeatable
        names = [n for n in fields_in(value) if not only_given or n in value.model_fields_set]
        return {name: _as_plain(getattr(value, name), repeatable) for name in names}
    if isinstance(value, dict):
        items = value.items()
        return {k: _as_plain(item, repeatable, is_one_of_several=True) for k, item in items}
    if isinstance(value, list | tuple):
        return [_as_plain(item, repeatable, is_one_of_several=True) for item in value]
    return escaped(value) if isinstance(value, str) else value


def sections_below(
    schema: type[Section], *, plugged_in: bool = False
) -> Iterator[tuple[type[Section], bool]]:
    """Yield a section and every section nested in it, each with whether a run may have several.

    With `plugged_in`, those of all plug-ins are among them, which imports these.
    """
    yield schema, False
    for info in (all_fields(schema) if plugged_in else schema.model_fields).values():
        kinds = kinds_of(info.annotation)
        for section in sections_of(kinds):
            yield from sections_below(section, plugged_in=plugged_in)
        inside = (one for kind in kinds for one in item_kinds(kind) or ())
        for section in sections_of(tuple(inside)):
            yield section, True
            below = sections_below(section, plugged_in=plugged_in)
            yield from ((inner, False) for inner, _ in below)
