"""Writes a checked configuration as YAML that reads back as the same configuration."""

from __future__ import annotations

import datetime
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml

from laurel.config.interpolation import escaped
from laurel.config.plugged import all_fields, fields_in, values_in
from laurel.config.schema_info import item_kinds, kinds_of, sections_of
from laurel.config.yaml_tree import IN_LIST, Section, read_scalars_our_way

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
        for name, field, value in values_in(section, with_plugins=describe and keys is None):
            if type(section) in repeatable and name not in section.model_fields_set:
                continue
            here = f"{path}{name}"
            if isinstance(value, list) and len(value) == 1 and IN_LIST in field.metadata:
                (value,) = value  # one is written alone
            if keys is not None and not any(f"{key}.".startswith(f"{here}.") for key in keys):
                continue
            if describe:
                about = field.description or ""
                if isinstance(field.default, str | int | float) and field.default != value:
                    about = about.replace("Default:", f"Default ({field.default}):")
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
    for field in (all_fields(schema) if plugged_in else schema.model_fields).values():
        kinds = kinds_of(field.annotation)
        for section in sections_of(kinds):
            yield from sections_below(section, plugged_in=plugged_in)
        inside = (one for kind in kinds for one in item_kinds(kind) or ())
        for section in sections_of(tuple(inside)):
            yield section, True
            below = sections_below(section, plugged_in=plugged_in)
            yield from ((inner, False) for inner, _ in below)
