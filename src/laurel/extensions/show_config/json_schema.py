"""Builds JSON schemas of configuration files, with which editors complete and check keys."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from laurel.config.load import sections_below
from laurel.config.other_systems import foreign_keys
from laurel.config.plugged import OpenSection, field_of, field_of_section
from laurel.config.schema_info import item_kinds, kinds_of, sections_of, step_into
from laurel.config.schemas import SCHEMAS, Kind
from laurel.config.yaml_tree import BY_NAME, IN_LIST, MINUS_1_IS_OFF, Section

DIALECT = "https://json-schema.org/draft/2020-12/schema"
# No value, one that the loader looks up, or one that another file or an override has to give.
_LATER = {"type": ["null", "string"], "pattern": r"\$\{|^\?\?\?$"}
_NULL = {"type": "null"}
_INSIDE = ("items", "additionalProperties")


def json_schema(kind: Kind) -> dict[str, Any]:
    """Return the JSON schema of the files that the loader accepts for a command.

    Every key accepts its section's values, references such as `${policy.precision}`, `???`, and
    null. The schema also has alternative spellings of keys, keys of NeMo RL's files that have no
    effect here, and `defaults` and `_override_`. No key is required, because a file may inherit it.
    """
    top = SCHEMAS[kind]
    schema = top.model_json_schema()
    named = {section.__name__: section for section, _ in sections_below(top)}
    definitions = schema.pop("$defs")
    for section in list(named.values()):
        if issubclass(section, OpenSection):
            block = schema if section is top else definitions[section.__name__]
            block["additionalProperties"] = False
            for key, field in section.all_plugged_in():
                place = f"{section.__name__}.{key}"
                block["properties"][key] = _plugged_in(place, field, definitions, named)
    for name, section in named.items():
        for key, (there, meant) in section.short_keys().items():
            entry = definitions[there.__name__]["properties"][meant]
            definitions[name]["properties"].setdefault(key, deepcopy(entry))
    for name, definition in definitions.items():
        _accept(definition, named[name], named)
    _accept(schema, top, named)
    for spelled, meant in top.other_names.items():
        *above, last = spelled.split(".")
        block = schema
        for name in above:
            unknown = {"anyOf": [{"type": "object", "properties": {}}]}
            entry = block["properties"].setdefault(name, unknown)
            block = next(
                definitions[_named_in(one)] if "$ref" in one else one for one in entry["anyOf"]
            )
        block["properties"][last] = {"description": f"Another name of {meant}."}
    for name in top.model_fields:
        section = definitions[_named_in(schema["properties"][name]["anyOf"][0])]
        section["properties"]["_override_"] = {
            "description": "True replaces the section of inherited files instead of changing it.",
            "type": "boolean",
        }
    schema["properties"] = {
        "defaults": {
            "description": "Files that this one inherits from, relative to it; later ones win.",
            "type": ["string", "array"],
            "items": {"type": "string"},
        },
        **schema["properties"],
    }
    title = f"Configuration of laurel {kind}"
    return {"$schema": DIALECT, **schema, "title": title, "$defs": definitions}


def schema_text(kind: Kind) -> str:
    """Return the JSON schema of a command's configuration as the text of a file."""
    return json.dumps(json_schema(kind), indent=1, ensure_ascii=False) + "\n"


def _plugged_in(
    place: str,
    field: FieldInfo,
    definitions: dict[str, dict[str, Any]],
    named: dict[str, type[Section]],
) -> dict[str, Any]:
    """Return the schema of a plug-in's key.

    Its section and those below it become definitions under names of its own, as two packages may
    call their sections the same.
    """
    kinds = kinds_of(field.annotation)
    items = sections_of(item_kinds(kinds[0]) or ())
    if items:  # several of a kind, by names of the user's own
        one = _plugged_in(place, field_of_section(*items), definitions, named)
        return {"type": "object", "additionalProperties": one, "default": {}}
    sections = sections_of(kinds)
    if not sections:
        kind: Any = field.annotation
        default = field.get_default(call_default_factory=True)
        return {**TypeAdapter(kind).json_schema(), "default": default}
    (section,) = sections
    below = {one.__name__: one for one, _ in sections_below(section, plugged_in=True)}
    schema = section.model_json_schema(ref_template=f"#/$defs/{place}.{{model}}")
    for name, one in schema.pop("$defs", {}).items():
        definitions[f"{place}.{name}"], named[f"{place}.{name}"] = one, below[name]
    definitions[place], named[place] = schema, section
    return {"$ref": f"#/$defs/{place}"}


def _named_in(reference: dict[str, Any]) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _accept(
    schema: dict[str, Any], section: type[Section], named: dict[str, type[Section]]
) -> None:
    """Widen a section's schema so that it accepts what files may contain, such as references."""
    schema.pop("required", None)
    for key, entry in schema["properties"].items():
        field = field_of(section, key)
        assert field is not None
        about = " ".join((field.description or "").split())
        if MINUS_1_IS_OFF in field.metadata:
            entry["minimum"] = -1
        if IN_LIST in field.metadata or BY_NAME in field.metadata:
            inside = next(one[name] for one in entry["anyOf"] for name in _INSIDE if name in one)
            entry["anyOf"] += inside.get("anyOf", [inside])
            if BY_NAME in field.metadata:
                entry["anyOf"].append({"type": "array", "items": inside})
        kept = {name: entry.pop(name) for name in ("default",) if name in entry}
        for name in ("title", "description"):
            entry.pop(name, None)
        described = {"description": about} if about else {}
        schema["properties"][key] = {**described, **_accepting(entry), **kept}
    for key, why in sorted(foreign_keys(section).items()):
        if key not in section.model_fields:
            schema["properties"][key] = {"description": f"Ignored: {why}."}
    for key in sorted(section.removed.keys() - section.model_fields.keys()):
        if step_into((section,), key).standing != "foreign":
            gone = f"Removed: {section.removed[key].instead}."
            schema["properties"].setdefault(key, {"description": gone, **_NULL})


def _accepting(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a value's JSON schema, extended to accept null and `${}` references at every level."""
    alternatives = [
        one | {name: _accepting(one[name]) for name in _INSIDE if isinstance(one.get(name), dict)}
        for one in entry.get("anyOf", [entry])
    ]
    # The loader reads a number as text where only text is wanted: `revision: 12e3`.
    is_open = any("enum" not in one and "const" not in one for one in alternatives)
    if is_open and any(one.get("type") == "string" for one in alternatives):
        alternatives.append({"type": "number"})
    if {} in alternatives:
        return {}
    return {"anyOf": [*(one for one in alternatives if one != _NULL), _LATER]}
