"""A configuration before it is checked: nested values that know where each was written."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict

from laurel.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""The way to a value from the top: keys of mappings, positions in lists."""

DEFAULT = "the schema's defaults"
"""The place of a value that nobody wrote."""


class _Marker:
    def __repr__(self) -> str:
        return "???"


MISSING = _Marker()
"""The value of a key whose file says `???`: to be given in another file or by an override."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class YamlNode:
    """One value of a configuration and where it was written.

    `value` is `dict[str, YamlNode]`, `list[YamlNode]`, or a plain scalar.
    """

    value: Any
    place: str
    """`file.yaml:12`, or the override that set it."""
    text: str | None = None
    """How a scalar that is not text was spelled, for keys that want text (`revision: 12e3`)."""
    literal: bool = False
    """Holds no interpolation, whatever it looks like."""

    @property
    def reference(self) -> bool:
        """Whether the value is text with `${}` in it that has to be looked up."""
        return isinstance(self.value, str) and not self.literal and "${" in self.value


def graft(value: Any, place: str) -> YamlNode:
    """Plain values as nodes that all have one place and are taken literally."""
    if isinstance(value, dict):
        children = {str(key): graft(child, place) for key, child in value.items()}
        return YamlNode(value=children, place=place)
    if isinstance(value, list | tuple):
        return YamlNode(value=[graft(child, place) for child in value], place=place)
    return YamlNode(value=value, place=place, literal=True)


def plain_values(node: YamlNode) -> Any:
    """The values without their places."""
    if isinstance(node.value, dict):
        return {key: plain_values(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain_values(child) for child in node.value]
    return node.value


def overlay(parent: YamlNode, child: YamlNode) -> YamlNode:
    """`child` laid over `parent`: mappings are merged key by key, all else is replaced."""
    if not isinstance(parent.value, dict) or not isinstance(child.value, dict):
        return child
    merged = dict(parent.value)
    for key, value in child.value.items():
        merged[key] = overlay(merged[key], value) if key in merged else value
    return YamlNode(value=merged, place=child.place)


def find_node(node: YamlNode, path: Iterable[str | int]) -> YamlNode | None:
    """The node at `path`, or None where there is none."""
    for key in path:
        in_mapping = isinstance(node.value, dict) and key in node.value
        in_list = isinstance(node.value, list) and isinstance(key, int) and key < len(node.value)
        if not in_mapping and not in_list:
            return None
        node = node.value[key]
    return node


def with_key(block: YamlNode, path: Sequence[str], child: YamlNode) -> YamlNode:
    """A block with `child` at `path`; what is in the way there gives way."""
    key, *rest = path
    children = dict(block.value) if isinstance(block.value, dict) else {}
    if rest:
        child = with_key(children.get(key, YamlNode(value={}, place=DEFAULT)), rest, child)
    return YamlNode(value={**children, key: child}, place=block.place)


def without_key(block: YamlNode, path: Sequence[str]) -> YamlNode:
    """A block without the key at `path`, and without what is then empty on the way to it."""
    key, *rest = path
    children = dict(block.value)
    if rest:
        children[key] = without_key(children[key], rest)
    if not rest or not children[key].value:
        del children[key]
    return YamlNode(value=children, place=block.place)


def dotted(path: KeyPath) -> str:
    """`data.train[0].split`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def split_key(key: str) -> list[str | int]:
    """The way that `dotted` wrote: `data.train[0].split` is data, train, 0, split."""
    found = re.findall(r"\[(\d+)\]|([^.\[\]]+)", key)
    return [int(index) if index else name for index, name in found]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, if one is like it at all."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


# --------------------------------------------------------------------------------------------------
# YAML files as trees whose every value knows its line, and the inheritance between files.

_TAG = "tag:yaml.org,2002:"
_MISSING_TAG = "!missing"

# What a plain (unquoted) scalar means. As OmegaConf reads it, so `1e-5` is a number and a date is
# text; but without YAML 1.1's base 60 and its octal numbers, because `1:12:30:00` is a time budget
# and `0123456` a commit.
_SCALARS: tuple[tuple[str, str, list[str]], ...] = (
    (
        "bool",
        "yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF",
        list("yYnNtTfFoO"),
    ),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F_]+|[-+]?0b[01_]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[-+]?\.[0-9]+([eE][-+]?[0-9]+)?"
        r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", "<<", ["<"]),
)


def read_scalars_our_way(yaml_class: Any) -> None:
    """Give a YAML loader or dumper class our rules of what a plain scalar means, and no others."""
    yaml_class.yaml_implicit_resolvers = {}
    for name, pattern, first in _SCALARS:
        yaml_class.add_implicit_resolver(_TAG + name, re.compile(rf"(?:{pattern})\Z"), first)
    yaml_class.add_implicit_resolver(_MISSING_TAG, re.compile(r"\?\?\?\Z"), ["?"])


class _Loader(yaml.SafeLoader):
    """Reads scalars by the rules above."""


read_scalars_our_way(_Loader)


def read_file(path: Path) -> YamlNode:
    """The tree of a file, laid over those of the files its `defaults` name.

    Raises ConfigError for a file that is missing or not YAML, for a key given twice, and for
    `defaults` that go in a circle.
    """
    return _with_parents(path, ())


def read_text(text: str, place: str) -> YamlNode:
    """The tree of one value, every part of which gets `place`."""
    return _Reader(text, place, lines=False).tree()


def read_document(text: str, name: str) -> YamlNode:
    """The tree of a document as it stands: its `defaults` are a key like any other.

    Raises:
        ConfigError: It is not YAML, or a key is given twice; the message names `name` and the line.
    """
    return _Reader(text, name, lines=True).tree()


def _with_parents(path: Path, children: tuple[Path, ...], named_by: str = "") -> YamlNode:
    path = path.expanduser()
    if path.resolve() in [child.resolve() for child in children]:
        chain = " -> ".join(str(step) for step in (*children, path))
        raise ConfigError(f"{named_by}the files inherit in a circle: {chain}")
    tree = _Reader(_read_bytes(path, named_by), str(path), lines=True).tree()
    if tree.value is None:
        tree = YamlNode(value={}, place=str(path))
    if not isinstance(tree.value, dict):
        raise ConfigError(f"{tree.place}: a configuration is a mapping of keys, this file is not")
    defaults = tree.value.pop("defaults", None)
    merged = YamlNode(value={}, place=str(path))
    for name in _parent_names(defaults) if defaults is not None else []:
        parent = Path(os.path.normpath(path.parent / Path(name.value).expanduser()))
        merged = _laid_over(
            merged, _with_parents(parent, (*children, path), f"{name.place}: defaults: ")
        )
    return _laid_over(merged, YamlNode(value=tree.value, place=str(path)))


def _laid_over(parent: YamlNode, child: YamlNode) -> YamlNode:
    """`overlay`; a section of the child that says `_override_: true` replaces the parent's."""
    whole = [key for key, section in child.value.items() if _replaces(section)]
    kept = {key: section for key, section in parent.value.items() if key not in whole}
    without_marks = {
        key: YamlNode(
            value={name: inner for name, inner in section.value.items() if name != _OVERRIDE},
            place=section.place,
        )
        if isinstance(section.value, dict)
        else section
        for key, section in child.value.items()
    }
    return overlay(
        YamlNode(value=kept, place=parent.place), YamlNode(value=without_marks, place=child.place)
    )


_OVERRIDE = "_override_"


def _replaces(section: YamlNode) -> bool:
    mark = section.value.get(_OVERRIDE) if isinstance(section.value, dict) else None
    if mark is None:
        return False
    if not isinstance(mark.value, bool):
        raise ConfigError(f"{mark.place}: {_OVERRIDE}: must be true or false")
    return mark.value


def _parent_names(defaults: YamlNode) -> list[YamlNode]:
    names = defaults.value if isinstance(defaults.value, list) else [defaults]
    for name in names:
        if not isinstance(name.value, str) or name.value == "_self_":
            raise ConfigError(
                f"{name.place}: defaults: give a file or a list of files, relative to this one; "
                "this file overrides them all"
            )
    return list(names)


def _read_bytes(path: Path, named_by: str) -> bytes:
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
    """Turns one YAML document into nodes."""

    def __init__(self, stream: bytes | str, name: str, *, lines: bool) -> None:
        self.stream = stream
        self.name = name
        self.lines = lines
        self.problems: list[str] = []
        self.open: list[yaml.Node] = []

    def tree(self) -> YamlNode:
        loader = None
        try:
            loader = _Loader(self.stream)
            top = loader.get_single_node()
        except yaml.YAMLError as error:
            raise ConfigError(self._syntax(error)) from None
        except RecursionError:
            raise ConfigError(f"{self.name}: nested too deeply") from None
        finally:
            if loader is not None:
                loader.dispose()
        if top is None:
            return YamlNode(value=None, place=self.name)
        tree = self._node(top, self._place(top))
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
        if "'\\t'" in message:
            message += "; indent with spaces, not tabs"
        elif "${" in self._line(mark.line):
            message += "; inside [ ] and { } put quotes around '${...}'"
        return message

    def _line(self, number: int) -> str:
        text = self.stream if isinstance(self.stream, str) else self.stream.decode(errors="replace")
        return next(iter(text.splitlines()[number : number + 1]), "")

    def _place(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}" if self.lines else self.name

    def _node(self, node: yaml.Node, place: str) -> YamlNode:
        if any(node is parent for parent in self.open):
            self.problems.append(f"{place}: an anchor that contains itself")
            return YamlNode(value=None, place=place)
        self.open.append(node)
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
                return YamlNode(value=self._mapping(node), place=place)
            if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
                items = [self._node(item, self._place(item)) for item in node.value]
                return YamlNode(value=items, place=place)
            return self._scalar(node, place)
        finally:
            self.open.pop()

    def _mapping(self, node: yaml.MappingNode) -> dict[str, YamlNode]:
        """The entries; those merged in by `<<` come first and give way to the mapping's own."""
        merged: dict[str, YamlNode] = {}
        own: dict[str, YamlNode] = {}
        places: dict[str, str] = {}
        for key, value in node.value:
            place = self._place(key)
            if key.tag == _TAG + "merge":
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

    def _scalar(self, node: yaml.Node, place: str) -> YamlNode:
        known = {_TAG + name for name in ("str", "bool", "null", "int", "float")}
        if node.tag == _MISSING_TAG:
            return YamlNode(value=MISSING, place=place, text=node.value)
        if node.tag == _TAG + "merge":
            return YamlNode(value=node.value, place=place)
        if not isinstance(node, yaml.ScalarNode) or node.tag not in known:
            self.problems.append(f"{place}: the tag '{node.tag}' means nothing in a configuration")
            return YamlNode(value=None, place=place)
        try:
            value = yaml.constructor.SafeConstructor().construct_object(node)
        except (yaml.YAMLError, ValueError):
            kind = node.tag.removeprefix(_TAG)
            self.problems.append(f"{place}: '{node.value}' is not of the type '{kind}'")
            return YamlNode(value=None, place=place)
        return YamlNode(
            value=value, place=place, text=None if isinstance(value, str) else node.value
        )


# --------------------------------------------------------------------------------------------------
# The base of every section of a configuration.


def _off_is_0(value: Any) -> Any:
    return 0 if value == -1 else value


OffPeriod = Annotated[int, BeforeValidator(_off_is_0)]
"""Steps between two things; 0, or -1 as other systems write it, switches them off."""


class Section(BaseModel):
    """A frozen, fully checked block of a configuration file.

    Unknown keys are errors. Keys that other systems' files carry and that mean nothing here are
    named in `foreign_keys`: the loader takes them out before validation and mentions all of them
    in one warning.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )

    foreign_keys: ClassVar[frozenset[str]] = frozenset()
    removed: ClassVar[Mapping[str, str]] = {}
    """Keys, and choices of a key, that there were once, and why they are gone: errors say so."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """Of a whole configuration: keys as other systems spell them, and where they belong here, both
    from the top and with dots."""

    def without_effect(self) -> dict[str, str]:
        """Keys that are set and do nothing beside the section's others, and why.

        They are no error, as a file keeps settings of what it has switched off; the loader names
        them.
        """
        return {}

    def __getitem__(self, key: str) -> Any:
        """A setting by its name, as in the dictionary that a section may be given as."""
        if key not in type(self).model_fields:
            raise KeyError(key)
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        """Whether it has a setting of that name."""
        return key in type(self).model_fields

    def get(self, key: str, default: Any = None) -> Any:
        """A setting by its name; the default where there is no such setting."""
        return getattr(self, key) if key in type(self).model_fields else default
