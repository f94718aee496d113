"""Parts of pages that are generated: keys of a configuration, models.

A page holds such a part between `<!-- generated: NAME -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic.fields import FieldInfo

from doc_models import models_text
from laurel.config.load import entry, literal
from laurel.config.plugged import all_fields
from laurel.config.resuming import mark_of
from laurel.config.schema_info import is_mapping, item_kinds, kinds_of, sections_of
from laurel.config.schemas import SCHEMAS
from laurel.config.yaml_tree import Section

SHORT = 60
"""Characters of a meaning after which no further sentence is written, except what null means."""
RESUMES = " \u21bb"
"""What stands behind a key that may change when a run resumes."""
FEW = 3
"""Keys of a section that is written inside the section above it, at most."""


@dataclass(frozen=True, slots=True)
class _Key:
    """A key of a section: its line, its default, and the sections that it may hold."""

    name: str
    about: str
    default: str
    mark: str
    value: Any
    sections: dict[type[Section], str]
    """Each with what stands behind the key where a list or a mapping holds the section."""

    def line(self, prefix: str = "", mark: str = "") -> str:
        key = f"`{prefix}{self.name}{self.default}`{self.mark or mark}"
        return f"- {key} {self.about}".rstrip()


@dataclass(slots=True)
class _Options:
    """The text, and the sections that stand in it, each by its first place."""

    lines: list[str] = field(default_factory=list)
    places: dict[type[Section], str] = field(default_factory=dict)
    keys: dict[type[Section], list[_Key]] = field(default_factory=dict)
    meanings: dict[tuple[str, str], str] = field(default_factory=dict)
    """The first place of each meaning, by the key's name and the meaning."""

    def add(self, path: str, section: type[Section], about: str, keys: list[_Key]) -> None:
        """Write a section, then those below it."""
        like, shared = self.most_alike(keys)
        self.places[section], self.keys[section] = path, keys
        self.lines += ["", f"### {path}", "", about, ""]
        below: list[tuple[str, type[Section], str, list[_Key]]] = []
        known: dict[str, list[str]] = {}
        for key in keys:
            if key.name in shared:
                continue
            place = self.meanings.setdefault((key.name, key.about), path)
            if place != path and not key.sections:
                known.setdefault(place, []).append(f"`{key.name}{key.default}`{key.mark}")
                continue
            line = key.line()
            inside: list[str] = []
            for inner, behind in key.sections.items():
                value = key.value if isinstance(key.value, inner) else None
                leaves = _keys(inner, value)
                if inner in self.places:
                    line += f" Keys: `{self.places[inner]}`."
                elif len(leaves) <= FEW and not behind and not any(one.sections for one in leaves):
                    self.places[inner], self.keys[inner] = f"{path}.{key.name}", leaves
                    inside += [one.line(f"{key.name}.", key.mark) for one in leaves]
                else:
                    about = _short(inner.__doc__) + key.mark
                    below.append((f"{path}.{key.name}{behind}", inner, about, leaves))
            if not isinstance(key.value, Section) or "Keys: " in line:
                self.lines.append(line)
            self.lines += inside
        self.lines += [f"- As in `{place}`: {', '.join(those)}" for place, those in known.items()]
        if short := [key for key, (_, meant) in section.short_keys().items() if key != meant]:
            names = ", ".join(f"`{key}`" for key in short)
            self.lines.append(
                f"- {names} Short for the path and the split of a set. The other keys of "
                f"`{path}.train[]` may stand here, too, for all sets without their own."
            )
        if shared:
            of_like = next(self.keys[one] for one, place in self.places.items() if place == like)
            self.lines.append(_others(shared, like, keys, of_like))
        for one in below:
            if one[1] not in self.places:
                self.add(*one)

    def most_alike(self, keys: list[_Key]) -> tuple[str, set[str]]:
        """Find the section that stands already and shares most keys, and those."""
        best: tuple[str, set[str]] = ("", set())
        for one, place in self.places.items():
            lines = {key.line() for key in self.keys[one]}
            shared = {key.name for key in keys if key.line() in lines}
            if len(shared) > max(FEW, len(best[1])):
                best = (place, shared)
        return best


def _others(shared: set[str], like: str, keys: list[_Key], of_like: list[_Key]) -> str:
    """Name the keys that stand elsewhere, or those of that section that are not there."""
    here = {key.name for key in keys}
    left_out = [key.name for key in of_like if key.name not in here]
    if len(left_out) < len(shared):
        without = ", ".join(f"`{name}`" for name in left_out)
        return f"- Otherwise as in `{like}`" + (f", without {without}" if without else "")
    return f"- As in `{like}`: " + ", ".join(f"`{k.name}`" for k in keys if k.name in shared)


def options_text() -> str:
    """Write every key with its default and its meaning: a GRPO run, then what else others have."""
    text = _Options()
    for kind, schema in reversed(SCHEMAS.items()):
        for key in _keys(schema, None):
            (section,) = key.sections
            if section not in text.places:
                path = key.name if kind in ("grpo", key.name) else f"{kind}: {key.name}"
                about = (key.about or _short(section.__doc__)) + key.mark
                text.add(path, section, about, _keys(section, key.value))
    return "\n".join(text.lines).strip()


def _keys(section: type[Section], values: Section | None) -> list[_Key]:
    return [_key(section, *one, values) for one in all_fields(section).items()]


def _key(owner: type[Section], name: str, info: FieldInfo, values: Section | None) -> _Key:
    kinds = kinds_of(info.annotation)
    sections = dict.fromkeys(sections_of(kinds), "")
    for kind in kinds:
        for one in sections_of(tuple(item_kinds(kind) or ())):
            sections.setdefault(one, ".NAME" if is_mapping(kind) else "[]")
    is_given = values is not None and name in values
    value = values[name] if is_given else info.get_default(call_default_factory=True)
    default = ""
    if values is None and info.is_required():
        default = ": ..."
    elif not isinstance(value, Section) and value is not None:
        default = entry(name, literal(value)).strip().removeprefix(name)
    about = info.description or ""
    mark = RESUMES if mark_of(info) else ""
    return _Key(name, _short(about), default, mark, value, sections)


def _short(text: str | None) -> str:
    """Keep the first sentences of a docstring, without the reason for the default."""
    paragraph = " ".join((text or "").strip().split("\n\n")[0].split())
    whole = re.sub(r" ?\bDefault: .*", "", paragraph)
    kept = ""
    for sentence in re.split(r"(?<=[.?)])(?<!e\.g\.)(?<!Dr\.) (?=[A-Z`0-9])", whole):
        if not kept or len(kept) + len(sentence) < SHORT or re.match("Null|`?auto", sentence):
            kept += f" {sentence}"
    return kept.strip()


GENERATED: dict[str, Callable[[], str]] = {
    "options": options_text,
    "models": models_text,
}


def with_generated(page: str) -> str:
    """Write the generated parts of a page anew."""
    for name, text in GENERATED.items():
        begin, end = f"<!-- generated: {name} -->\n", f"<!-- end of {name} -->"
        if begin in page:
            before, _, rest = page.partition(begin)
            _, _, after = rest.partition(end)
            page = f"{before}{begin}\n{text()}\n\n{end}{after}"
    return page
