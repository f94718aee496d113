"""Represents an unchecked configuration as nested nodes that know where each was written."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict

from laurel.errors import ConfigError, no_file_at

KeyPath = tuple[str | int, ...]
"""The path from the root to a value: keys of mappings and indices in lists."""

DEFAULT = "the schema's defaults"
"""The place of a value that comes from the schema's defaults."""


class _Marker:
    def __repr__(self) -> str:
        return "???"


MISSING = _Marker()
"""The value of a key written as `???`, which another file or an override has to set."""


@dataclass(frozen=True, slots=True, eq=False)
class YamlNode:
    """A value of a configuration and the place where it was written.

    `value` is `dict[str, YamlNode]`, `list[YamlNode]`, or a plain scalar.
    """

    value: Any
    place: str
    """The place where the value was written: `file.yaml:12`, or the override."""
    text: str | None = None
    """The original spelling of a non-text scalar, for keys that expect text (`revision: 12e3`)."""
    literal: bool = False
    """True if text that looks like a `${}` reference is meant literally."""

    @property
    def reference(self) -> bool:
        """Report whether the value is text with a `${}` reference to resolve."""
        return isinstance(self.value, str) and not self.literal and "${" in self.value


def graft(value: Any, place: str) -> YamlNode:
    """Convert plain values to nodes that share one place; their text is literal."""
    if isinstance(value, dict):
        return YamlNode({str(key): graft(child, place) for key, child in value.items()}, place)
    if isinstance(value, list | tuple):
        return YamlNode([graft(child, place) for child in value], place)
    return YamlNode(value, place, literal=True)


def plain_values(node: YamlNode) -> Any:
    """Convert a node to plain values without places."""
    if isinstance(node.value, dict):
        return {key: plain_values(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain_values(child) for child in node.value]
    return node.value


def overlay(parent: YamlNode, child: YamlNode) -> YamlNode:
    """Merge `child` into `parent`: mappings key by key, anything else is replaced."""
    if not isinstance(parent.value, dict) or not isinstance(child.value, dict):
        return child
    merged = dict(parent.value)
    for key, value in child.value.items():
        merged[key] = overlay(merged[key], value) if key in merged else value
    return YamlNode(merged, child.place)


def find_node(node: YamlNode, path: Iterable[str | int]) -> YamlNode | None:
    """Return the node at `path`, or None if there is none."""
    for key in path:
        in_mapping = isinstance(node.value, dict) and key in node.value
        in_list = isinstance(node.value, list) and isinstance(key, int) and key < len(node.value)
        if not in_mapping and not in_list:
            return None
        node = node.value[key]
    return node


def with_key(block: YamlNode, path: Sequence[str], child: YamlNode) -> YamlNode:
    """Return a copy of a block with `child` at `path`, replacing what is there."""
    if not path:
        return child
    children = dict(block.value) if isinstance(block.value, dict) else {}
    below = children.get(path[0], YamlNode({}, DEFAULT))
    return YamlNode({**children, path[0]: with_key(below, path[1:], child)}, block.place)


def dotted(path: KeyPath) -> str:
    """Format a path as text, such as `data.train[0].split`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def split_key(key: str) -> list[str | int]:
    """Parse a key that `dotted` wrote: `data.train[0].split` is data, train, 0, split."""
    found = re.findall(r"\[(\d+)\]|([^.\[\]]+)", key)
    return [int(index) if index else name for index, name in found]


def all_of(problems: Sequence[str]) -> ConfigError:
    """Combine problems into one error: those of files by line, then those of overrides."""

    def file_and_line(problem: str) -> tuple[bool, str, int]:
        place = re.match(r"(?!override ')(.+?):(\d+): ", problem)
        return (False, place[1], int(place[2])) if place else (True, "", 0)

    if len(problems) == 1:
        return ConfigError(problems[0])
    heading = f"{len(problems)} problems in the configuration:"
    return ConfigError("\n  ".join((heading, *sorted(problems, key=file_and_line))))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most similar to `word`; None if none is similar enough."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


# YAML files as trees whose every value knows its line, and the inheritance between files.

MOST_NODES = 100_000
"""The largest number of values that a configuration may have, with all repetitions."""
_TAG = "tag:yaml.org,2002:"
_MISSING_TAG = "!missing"

# What a plain (unquoted) scalar means. As OmegaConf reads it, so `1e-5` is a number and a date is
# text; but without YAML 1.1's base 60 and its octal numbers, because `1:12:30:00` is a time budget
# and `0123456` a commit.
_SCALARS = (
    (_TAG + "int", r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)", "-+0123456789"),
    (
        _TAG + "float",
        r"[-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[-+]?\.[0-9]+([eE][-+]?[0-9]+)?"
        r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    (_MISSING_TAG, r"\?\?\?", "?"),
)


def read_scalars_our_way(yaml_class: Any) -> None:
    """Replace a PyYAML loader's or dumper's rules for recognizing scalars with Laurel's."""
    kept = {_TAG + "bool", _TAG + "null", _TAG + "merge"}
    yaml_class.yaml_implicit_resolvers = {
        first: [rule for rule in rules if rule[0] in kept]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, pattern, first in _SCALARS:
        yaml_class.add_implicit_resolver(tag, re.compile(rf"(?:{pattern})\Z"), list(first))


def is_named_as_data(name: str) -> bool:
    """Report whether a file's name ends like one of rows, and not like one of a configuration."""
    # `data.sources` reads these; JSON may be either.
    return name.lower().removesuffix(".gz").endswith((".jsonl", ".csv", ".parquet", ".arrow"))


class _Loader(yaml.SafeLoader):
    """Loads YAML with the rules of `read_scalars_our_way`."""


read_scalars_our_way(_Loader)


def read_file(path: Path) -> YamlNode:
    """Read a YAML file into a tree, merged into the files that its `defaults` name.

    Raises:
        ConfigError: A file is missing or not YAML, a key is given twice, or `defaults` form a
            cycle.
    """
    return _with_parents(path, ())


def read_text(text: str, place: str) -> YamlNode:
    """Parse the text of one value into a tree; all of its nodes get the given place."""
    return _Reader(text, place, lines=False).tree()


def read_document(text: str, name: str) -> YamlNode:
    """Parse a YAML document into a tree; its `defaults` are a key like any other.

    Raises:
        ConfigError: The text is not YAML, or a key is given twice; the message names `name` and the
            line.
    """
    return _Reader(text, name).tree()


def _with_parents(path: Path, children: tuple[Path, ...], named_by: str = "") -> YamlNode:
    path = path.expanduser()
    # Links are followed: the same file under another name is a circle, too.
    if path.resolve() in [child.resolve() for child in children]:
        chain = " -> ".join(str(step) for step in (*children, path))
        raise ConfigError(f"{named_by}the files inherit in a circle: {chain}")
    written = _read_bytes(path, named_by)
    row, _, rest = written.lstrip().partition(b"\n")
    are_rows = row.startswith(b"{") and row.rstrip().endswith(b"}") and rest.lstrip()[:1] == b"{"
    if are_rows or is_named_as_data(path.name):
        raise ConfigError(
            f"{named_by}{path} looks like a file of data, not a configuration. Data to train on is "
            f"given as data.train_data_path={path}, without --config or beside it; laurel data "
            f"check {path} prints the whole command"
        )
    tree = _Reader(written, str(path)).tree()
    sections = {} if tree.value is None else tree.value
    if not isinstance(sections, dict):
        raise ConfigError(f"{tree.place}: a configuration is a mapping of keys, this file is not")
    defaults = sections.pop("defaults", YamlNode([], ""))
    merged = YamlNode({}, str(path))
    for name in defaults.value if isinstance(defaults.value, list) else [defaults]:
        if not isinstance(name.value, str) or name.value == "_self_":
            raise ConfigError(
                f"{name.place}: defaults: give a file or a list of files, relative to this one; "
                "this file overrides them all"
            )
        parent = Path(os.path.normpath(path.parent / Path(name.value).expanduser()))
        found = _with_parents(parent, (*children, path), f"{name.place}: defaults: ")
        merged = _laid_over(merged, found)
    return _laid_over(merged, YamlNode(sections, str(path)))


def _laid_over(parent: YamlNode, child: YamlNode) -> YamlNode:
    """Merge like `overlay`, but let a section with `_override_: true` replace the parent's."""
    for key, section in child.value.items():
        mark = section.value.pop("_override_", None) if isinstance(section.value, dict) else None
        if mark is not None and not isinstance(mark.value, bool):
            raise ConfigError(f"{mark.place}: _override_: must be true or false")
        if mark is not None and mark.value:
            parent.value.pop(key, None)
    return overlay(parent, child)


def _read_bytes(path: Path, named_by: str) -> bytes:
    if (problem := no_file_at(path)) is not None:
        raise ConfigError(f"{named_by}{problem}")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"{named_by}{path} cannot be read: {error.strerror}") from error
    if not path.parent.is_dir():
        raise ConfigError(f"{named_by}{path} does not exist: there is no directory {path.parent}")
    there = {p.stem: p.name for p in sorted(path.parent.glob("[!.]*.y*ml"))}
    near = difflib.get_close_matches(path.stem, there, n=3) or list(there)[:8]
    names = ", ".join(there[stem] for stem in near)
    hint = f"there are: {names}" if names else "its directory holds no YAML file"
    raise ConfigError(f"{named_by}{path} does not exist; {hint}")


class _Reader:
    """Turns one YAML document into nodes; PyYAML parses it and reads its scalars."""

    def __init__(self, stream: bytes | str, name: str, *, lines: bool = True) -> None:
        self.stream = stream
        self.name = name
        self.lines = lines
        self.problems: list[str] = []
        self.open: list[yaml.Node] = []
        self.num_nodes = 0

    def tree(self) -> YamlNode:
        try:
            top = yaml.compose(self.stream, _Loader)
        except yaml.YAMLError as error:
            raise ConfigError(self._syntax(error)) from None
        except RecursionError:
            raise ConfigError(f"{self.name}: nested too deeply") from None
        tree = YamlNode(None, self.name) if top is None else self._node(top, self._place(top))
        if self.problems:
            raise ConfigError("\n".join(self.problems))
        return tree

    def _syntax(self, error: yaml.YAMLError) -> str:
        if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
            return f"{self.name}: not YAML text: {error}".replace("\n", " ")
        mark = error.problem_mark
        where = f"{self.name}:{mark.line + 1}:{mark.column + 1}" if self.lines else self.name
        message = f"{where}: not YAML: {error.problem or error.context}"
        if error.context_mark is not None and error.context_mark.line != mark.line:
            message += f", {error.context} (line {error.context_mark.line + 1})"
        text = self.stream if isinstance(self.stream, str) else self.stream.decode(errors="replace")
        if "'\\t'" in message:
            message += "; indent with spaces, not tabs"
        elif "${" in "".join(text.splitlines()[mark.line : mark.line + 1]):
            message += "; inside [ ] and { } put quotes around '${...}'"
        return message

    def _place(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}" if self.lines else self.name

    def _node(self, node: yaml.Node, place: str) -> YamlNode:
        self.num_nodes += 1
        if self.num_nodes > MOST_NODES:
            raise ConfigError(
                f"{place}: the file has more than {MOST_NODES} values, and what an anchor repeats "
                "counts each time; a configuration has some hundreds"
            )
        if node in self.open:
            self.problems.append(f"{place}: an anchor that contains itself")
            return YamlNode(None, place)
        self.open.append(node)
        value: Any = None
        kind = node.tag.removeprefix(_TAG)
        is_scalar = isinstance(node, yaml.ScalarNode)
        if kind == "map" and isinstance(node, yaml.MappingNode):
            value = self._mapping(node)
        elif kind == "seq" and isinstance(node, yaml.SequenceNode):
            value = [self._node(item, self._place(item)) for item in node.value]
        elif kind == _MISSING_TAG:
            value = MISSING
        # A date is text; runs of earlier versions saved theirs with the tag.
        elif kind in ("str", "merge", "timestamp") and is_scalar:
            value = node.value
        elif kind in ("bool", "null", "int", "float") and is_scalar:
            try:
                value = yaml.constructor.SafeConstructor().construct_object(node)
            except (yaml.YAMLError, ValueError):
                self.problems.append(f"{place}: '{node.value}' is not of the type '{kind}'")
        else:
            self.problems.append(f"{place}: the tag '{node.tag}' means nothing in a configuration")
        self.open.pop()
        # As written, for a key that wants text: `revision: 12e3` is no number.
        is_spelled = is_scalar and not isinstance(value, str)
        return YamlNode(value, place, node.value if is_spelled else None)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, YamlNode]:
        """Return the entries of a mapping; those merged in by `<<` yield to the mapping's own."""
        merged: dict[str, YamlNode] = {}
        own: dict[str, YamlNode] = {}
        places: dict[str, str] = {}
        for key, value in node.value:
            place = self._place(key)
            if key.tag == _TAG + "merge":
                # Of several merged mappings the first counts, so it is laid on last.
                for entry in reversed(value.value if value.tag == _TAG + "seq" else [value]):
                    source = self._node(entry, place)
                    if isinstance(source.value, dict):
                        merged.update(source.value)
                    else:
                        self.problems.append(f"{place}: '<<' merges mappings, this is not one")
            elif not isinstance(key, yaml.ScalarNode):
                self.problems.append(f"{place}: a key must be a word, not a list or a mapping")
            elif key.value in own:
                before = f", first in {places[key.value]}" if self.lines else ""
                self.problems.append(f"{place}: the key '{key.value}' is given twice{before}")
            else:
                own[key.value], places[key.value] = self._node(value, place), place
        return {**merged, **own}


def escaped(text: str) -> str:
    """Escape text that looks like a `${}` reference but is none, so that it is read literally."""
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)


# The base of every section of a configuration.


MINUS_1_IS_OFF = BeforeValidator(lambda value: 0 if value == -1 else value)
OffPeriod = Annotated[int, MINUS_1_IS_OFF]
"""The number of steps between two events; 0, or -1 as in other systems, disables them."""


def _in_list(value: Any) -> Any:
    return [value] if value and isinstance(value, dict | Section) else value or None


def _by_name(value: Any) -> Any:
    if isinstance(value, list):
        said = [one.get("task_name") if isinstance(one, dict | Section) else None for one in value]
        # A number could be the place of another.
        own = {one for one in said if one and said.count(one) == 1 and not one.isdecimal()}
        names = [
            name if name in own else str(place) if len(said) > 1 else "default"
            for place, name in enumerate(said, 1)
        ]
        return dict(zip(names, value, strict=True)) or None
    of_one = isinstance(value, Section) or (
        isinstance(value, dict) and not all(isinstance(v, dict | Section) for v in value.values())
    )
    return {"default": value} if of_one else value or None


IN_LIST = BeforeValidator(_in_list)
"""Marks a list of sections, one of which may also be written alone."""
BY_NAME = BeforeValidator(_by_name)
"""Marks sections by name that may also be written in a list, or one alone, as `default`. Those of a
list have the names that they give themselves, or their places in it."""


@dataclass(frozen=True, slots=True)
class OfMachine:
    """Marks a count of what this machine has to carry, which bounds it (`workers.process`)."""

    what: Literal["threads", "processes", "calls"]
    is_lowered: bool = False
    """Whether a larger count is lowered to the cores, and so is no error."""


THREADS = OfMachine("threads")
PROCESSES = OfMachine("processes")
CALLS = OfMachine("calls")
"""Marks calls that wait at the same time, each with a thread or a connection of its own."""
ONE_PER_CORE = OfMachine("processes", is_lowered=True)


@dataclass(frozen=True, slots=True)
class MayChange:
    """Marks a key, with everything below it, that may change when a run resumes.

    Such a key says where, how fast, or how long a run computes, not what it learns or measures.
    Every other key identifies the run (`config.resuming`). Of nested marks the innermost counts.
    """

    in_sweeps: bool
    """False if a sweep, which compares its trials, must go on with the same value."""


MAY_CHANGE = MayChange(in_sweeps=True)
"""Marks places, addresses, processes, limits of memory and time, and what is printed."""
LENGTH_MAY_CHANGE = MayChange(in_sweeps=False)
"""Marks the length of a run, and when it validates and saves."""


@dataclass(frozen=True, slots=True)
class Removed:
    """A key that there is no more, or one of the names that a key took."""

    instead: str
    """What holds now, or what to do instead, as a part of a sentence."""
    was: Any = None
    """The value that asks for what holds now anyway: it is accepted, as null is."""


@cache
def _all_removed() -> Mapping[str, Any]:
    text = files(__package__).joinpath("removed.yaml").read_text(encoding="utf-8")
    found: Mapping[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return found


def removed(section: str) -> Mapping[str, Removed]:
    """Return the removed keys and names of a section, from `removed.yaml`."""
    return {
        key: Removed(instead, was)
        for instead, keys in _all_removed()[section].items()
        for key, was in keys.items()
    }


class Section(BaseModel):
    """A frozen, fully checked block of a configuration file.

    Unknown keys are errors. Keys that other systems' files carry and that mean nothing here are
    named in `foreign_keys` or known to importers (`plugins.Importer.keys_beside`): the loader takes
    them out before validation and mentions all of them in one warning.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    foreign_keys: ClassVar[frozenset[str]] = frozenset()
    removed: ClassVar[Mapping[str, Removed]] = {}
    """Removed keys and choices."""
    other_commands: ClassVar[Mapping[str, str]] = {}
    """Keys that only other commands have, with what an error about them names instead."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """Keys as other systems spell them and the keys that they stand for, both dotted from the top.
    Only the section of a whole configuration has them."""

    @classmethod
    def short_keys(cls) -> Mapping[str, tuple[type[Section], str]]:
        """Return keys that may be written here and are read as keys of a section further below.

        Each with that section, and the key that it has there.
        """
        return {}

    @classmethod
    def in_blocks(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values of a section with its short keys put where they are read."""
        return values

    @classmethod
    def place_of_short(cls, block: YamlNode, key: str) -> tuple[YamlNode, tuple[str, ...]]:
        """Return where an override sets a short key, and the section's block made ready for it."""
        return block, (key,)

    @classmethod
    def outdone(cls, values: Mapping[str, Any]) -> dict[str, str]:
        """Return the short keys among the values of a section that set nothing, with the reasons.

        The loader warns of them.
        """
        return {}

    def without_effect(self) -> dict[str, str]:
        """Return the keys that are set but have no effect beside other keys, with the reasons.

        They are no error, because a file may keep the settings of what it has switched off; the
        loader warns of them.
        """
        return {}

    def __getitem__(self, key: str) -> Any:
        """Return a setting by its name, like a dictionary."""
        if key not in self:
            raise KeyError(key)
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        """Report whether the section has a setting of that name."""
        return key in type(self).model_fields or key in (self.model_extra or ())

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting by its name, or the default if there is no such setting."""
        return getattr(self, key) if key in self else default
