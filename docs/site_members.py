"""What the reference leaves out of a class: attributes that `__init__` sets and nobody describes.

A parameter of `__init__` describes them. Fields of dataclasses and sections stay.
"""

from __future__ import annotations

from typing import Any

from griffe import Attribute, Class, Extension


class WithoutSilentAttributes(Extension):
    """Takes them out of every class that is collected."""

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        """Griffe calls this when all members of a class are there."""
        for name, member in list(cls.members.items()):
            if isinstance(member, Attribute) and _is_silent(member):
                cls.del_member(name)


def _is_silent(member: Attribute) -> bool:
    set_by_init = "instance-attribute" in member.labels and "class-attribute" not in member.labels
    return set_by_init and member.value is not None and member.docstring is None
