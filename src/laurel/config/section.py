"""The base of every section of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


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
