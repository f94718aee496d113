"""Lets keys of a configuration name plug-ins, and hold the settings that these bring."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError, core_schema

from laurel import plugins
from laurel.config.yaml_tree import Section, nearest
from laurel.errors import ConfigError
from laurel.plugins import Plugin

P = TypeVar("P", bound=Plugin)
S = TypeVar("S", bound=Section)
NO_SETTINGS = "the plug-in of this name has no settings; leave the key out"
"""Says that a key is the name of a plug-in, and no key."""


@dataclass(frozen=True, slots=True)
class NameOf:
    """Marks a text that is the name of a plug-in of a kind."""

    kind: str
    others: tuple[str, ...] = ()
    """Words that the key has besides, before the names."""

    @property
    def words(self) -> list[str]:
        """Return what the key may be."""
        return [*self.others, *plugins.names(self.kind)]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        def checked(name: Any) -> str:
            known = self.words
            if name not in known:
                expected = " or ".join(map(repr, known))
                raise PydanticKnownError("literal_error", {"expected": expected})
            return str(name)

        return core_schema.no_info_plain_validator_function(
            checked, serialization=core_schema.plain_serializer_function_ser_schema(lambda x: x)
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": self.words, "type": "string"}


class OpenSection(Section):
    """A section in which a plug-in's settings may stand under its name."""

    model_config = ConfigDict(extra="allow")

    kind_of_plugin: ClassVar[str]
    """The kind of its plug-ins."""
    suffix_of_plugins: ClassVar[str] = ""
    """What follows the name of a plug-in in the key of its settings."""
    settings_of_plugins: ClassVar[str] = "section"
    """The attribute of a plug-in that is the class of its settings here."""

    @classmethod
    def section_of(cls, plugin: Plugin) -> type[Section] | None:
        """Return the settings that a plug-in has in this section.

        Raises:
            ConfigError: They are no section.
        """
        found: Any = getattr(plugin, cls.settings_of_plugins, None)
        if found is None or (isinstance(found, type) and issubclass(found, Section)):
            return found
        kind = type(plugin)
        raise ConfigError(
            f"{kind.__module__}:{kind.__qualname__} has {cls.settings_of_plugins} = {found!r}, "
            "which is no class that derives from laurel.config.yaml_tree.Section"
        )

    @classmethod
    def plugged_in(cls, key: str) -> FieldInfo | None:
        """Return the field that a plug-in brings; None if there is none of that name.

        Raises:
            ConfigError: The plug-in cannot be imported.
        """
        name = key.removesuffix(cls.suffix_of_plugins)
        is_name = name in plugins.names(cls.kind_of_plugin) and key == name + cls.suffix_of_plugins
        if key in cls.model_fields or not is_name:
            return None
        section = cls.section_of(plugins.plugin(cls.kind_of_plugin, name))
        return None if section is None else field_of_section(section)

    @classmethod
    def keys_of_plugins(cls) -> list[str]:
        """Return the keys that plug-ins may bring, without importing them."""
        return [name + cls.suffix_of_plugins for name in plugins.names(cls.kind_of_plugin)]

    @classmethod
    def all_plugged_in(cls) -> Iterator[tuple[str, FieldInfo]]:
        """Yield the keys and fields of all plug-ins.

        One that cannot be used, which is said where its name is used, is left out.
        """
        for key in cls.keys_of_plugins():
            with contextlib.suppress(ConfigError):
                if (field := cls.plugged_in(key)) is not None:
                    yield key, field

    @model_validator(mode="before")
    @classmethod
    def _plugged_in_are_sections(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        made = dict(values)
        for key in values.keys() - cls.model_fields.keys():
            field = cls.plugged_in(str(key))
            if field is None and key in cls.keys_of_plugins():
                raise ValueError(f"{key}: {NO_SETTINGS}")
            if field is None:
                near = nearest(str(key), known_keys(cls))
                raise ValueError(
                    f"unknown key {key}" + (f"; did you mean '{near}'?" if near else "")
                )
            kind: Any = field.annotation
            made[key] = TypeAdapter(kind).validate_python(values[key])
        return made

    def settings_of(self, base: Callable[..., P], name: str) -> tuple[P, Any]:
        """Return the plug-in of a name with its settings, given here or its defaults.

        Raises:
            ConfigError: The plug-in cannot be imported, or needs settings that are not given.
        """
        found = plugins.find(base, name)
        section = self.section_of(found)
        if section is None:
            return found, None
        given = self.get(name + self.suffix_of_plugins)
        if given is None:
            try:
                given = section()
            except ValidationError as error:
                lacking = "; ".join(
                    f"{'.'.join(map(str, (name, *problem['loc'])))}: {problem['msg']}"
                    for problem in error.errors()
                )
                raise ConfigError(f"'{name}' needs settings of its own: {lacking}") from error
        return found, given

    def chosen(self) -> tuple[str, str] | None:
        """Return the key that chooses a plug-in and the key of its settings; None: nothing does."""
        for key, field in type(self).model_fields.items():
            of_kind = [one for one in field.metadata if isinstance(one, NameOf)]
            if any(one.kind == self.kind_of_plugin for one in of_kind) and self[key] != "auto":
                return key, f"{self[key]}{self.suffix_of_plugins}"
        return None

    def without_effect(self) -> dict[str, str]:
        """Return the settings of plug-ins that the key which chooses one leaves out."""
        if (chosen := self.chosen()) is None:
            return {}
        key, its = chosen
        of_kind = {f"{one}{self.suffix_of_plugins}" for one in plugins.names(self.kind_of_plugin)}
        others = of_kind - {its}
        given = {
            one: value
            for one, value in (self.model_extra or {}).items()
            if one in others and value is not None and value != self._default_of(one)
        }
        return dict.fromkeys(given, f"{key} is {self[key]}")

    def _default_of(self, key: str) -> Section | None:
        field = self.plugged_in(key)
        default = None if field is None else field.default
        return default if isinstance(default, Section) else None


def with_chosen_plugins(section: S) -> S:
    """Return a section with the defaults of the plug-ins that its keys choose, at any depth."""
    values = {key: getattr(section, key) for key in type(section).model_fields}
    inside = {key: one for key, one in values.items() if isinstance(one, Section)}
    update = {key: with_chosen_plugins(one) for key, one in inside.items()}
    if isinstance(section, OpenSection) and (chosen := section.chosen()) is not None:
        (_, key) = chosen
        field = None if key in section else section.plugged_in(key)
        if field is not None and isinstance(field.default, Section):
            update[key] = field.default
    return section.model_copy(update=update)


def field_of_section(section: type[Section]) -> FieldInfo:
    """Return the field of a section that a plug-in brings, with its defaults if it has any."""
    needs = any(field.is_required() for field in section.model_fields.values())
    default: Any = ... if needs else section()
    return FieldInfo(annotation=section, default=default, description=section.__doc__)


def field_of(section: type[Section], key: str | int) -> FieldInfo | None:
    """Return the field of a key: the section's own, a short form, or that of a plug-in; or None."""
    own = None
    if isinstance(key, str):
        there, name = section.short_keys().get(key, (section, key))
        own = section.model_fields.get(key) or there.model_fields.get(name)
    if own is None and isinstance(key, str) and issubclass(section, OpenSection):
        return section.plugged_in(key)
    return own


def all_fields(section: type[Section]) -> dict[str, FieldInfo]:
    """Return the fields of a section, with those of all plug-ins that have settings in it."""
    more = dict(section.all_plugged_in()) if issubclass(section, OpenSection) else {}
    return {**section.model_fields, **more}


def fields_in(section: Section) -> dict[str, FieldInfo]:
    """Return the fields that a section holds: its own, and those of plug-ins that are set."""
    found = dict(type(section).model_fields)
    for key in section.model_extra or ():
        field = field_of(type(section), key)
        if field is not None:
            found[key] = field
    return found


def values_in(section: Section, *, with_plugins: bool) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield the keys of a section with their fields and values.

    With `with_plugins`, those of all plug-ins are among them, with their defaults.
    """
    fields = fields_in(section)
    if with_plugins:
        fields |= all_fields(type(section))
    for key, field in fields.items():
        if key in section:
            yield key, field, getattr(section, key)
        elif not field.is_required():
            yield key, field, field.get_default(call_default_factory=True)


def known_keys(section: type[Section]) -> list[str]:
    """Return the keys of a section and the names of its plug-ins, without importing these."""
    more = section.keys_of_plugins() if issubclass(section, OpenSection) else []
    return list(dict.fromkeys([*section.model_fields, *section.short_keys(), *more]))
