"""The base of every section of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict


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
